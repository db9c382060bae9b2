// sonde stack: every thread's stack of a process or a core file, each frame with its verdict.
#include <fmt/format.h>
#include <string.h>

#include <map>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/options.h"
#include "core/walk/reason.h"
#include "host/image/debug_file.h"
#include "host/report/frame_json.h"
#include "host/target/stack_target.h"
#include "host/words.h"

namespace sonde::cli {
namespace {

using namespace host;

struct Options {
  int pid = 0;
  std::string core, executable;
  std::vector<std::string> debug_dirs;
  bool json = false, reliable = false, verbose = false, no_inline = false;
  unsigned max_frames = 1000, outermost = 0;
};

constexpr unsigned kMostFrames = 10'000'000;

// A stack, and how many frames behind the first --max-frames are not shown.
struct Shown {
  ThreadStack stack;
  size_t left_out = 0;
};

Shown walk(StackTarget& target, const StoppedThread& thread, const Options& options) {
  WalkOptions wanted{.max_frames = options.max_frames, .reliable_only = options.reliable};
  Shown shown{.stack = target.walk(thread, wanted)};
  if (options.outermost == 0 || shown.stack.result.reason != Reason::depth_limit) return shown;
  do {
    wanted.max_frames = std::min(kMostFrames, std::max(wanted.max_frames, 1u << 16) * 8);
    shown.stack = target.walk(thread, wanted);
  } while (shown.stack.result.reason == Reason::depth_limit && wanted.max_frames < kMostFrames);
  auto& frames = shown.stack.frames;
  size_t kept = size_t{options.max_frames} + options.outermost;
  if (frames.size() <= kept) return shown;
  shown.left_out = frames.size() - kept;
  auto gap = frames.begin() + options.max_frames;
  frames.erase(gap, gap + static_cast<std::ptrdiff_t>(shown.left_out));
  return shown;
}

// What a frame's pc belongs to.
struct Location {
  const Image* image = nullptr;
  std::string file;               // "" if in none
  std::string function;           // "" if no symbol holds it
  uint64_t offset = 0;            // from the function, else from the file's address 0
  std::vector<SourceRow> source;  // innermost first, the function itself last; empty without debug information
};

Location find_location(const StackTarget& target, const Frame& frame) {
  Location where;
  const LoadedImage* loaded = target.image_at(frame.code().lookup());
  if (!loaded) return where.file = target.file_at(frame.code().lookup()), where;
  where.image = loaded->image.get();
  where.file = where.image->path();
  ImageAddr lookup = loaded->to_image(frame.code().lookup());
  where.source = where.image->source_rows(lookup);
  uint64_t back = frame.is_return ? 1 : 0;
  auto hit = where.image->find(lookup);
  if (!hit) return where.offset = lookup.value + back, where;
  where.function = display_name(*where.image, *hit->function);
  where.offset = hit->offset + back;
  return where;
}

// Recursions show the same few places many thousand times.
const Location& locate(const StackTarget& target, const Frame& frame) {
  static std::map<std::pair<uint64_t, bool>, Location> known;  // of the one target of this command
  auto [found, added] = known.try_emplace({frame.pc.value, frame.is_return});
  if (added) found->second = find_location(target, frame);
  return found->second;
}

std::string base_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

std::string in_words(const Location& where) {
  if (where.file.empty()) return "??";
  if (!where.image) return fmt::format("?? ({})", printable(base_name(where.file)));
  std::string name = where.function.empty() ? "??" : printable(where.function);
  return fmt::format("{}+{:#x} ({})", name, where.offset, printable(base_name(where.file)));
}

std::string in_words(const SourceLine& line) {
  if (line.file.empty()) return "";
  return line.line ? fmt::format(" at {}:{}", printable(line.file), line.line)
                   : fmt::format(" at {}", printable(line.file));
}

// Letters of where a pc came from, as the kernel's dumps print them, then words where a frame is not simply believed.
std::string verdict_of(const Frame& frame) {
  std::string text;
  if (frame.source == Source::regs_pc) text += 'P';
  if (frame.source == Source::caller) text += 'C';
  if (frame.source == Source::task) text += 'T';
  if (frame.recovered & kRecoveredReturn) text += 'K';
  if (frame.recovered & kRecoveredGraph) text += 'F';
  if (frame.recovered & kInDetour) text += 'D';
  if (!text.empty()) text = fmt::format(" [{}]", text);
  bool guessed = frame.recovered & kMarked;
  if (guessed) return text + " guessed";
  if (!is_reliable(frame.reason)) text += fmt::format(" {}", sonde::describe(frame.reason));
  return text;
}

std::string summary_of(const Shown& shown) {
  const auto& [stack, left_out] = shown;
  if (stack.result.whole()) return "reliable";
  auto bad = std::ranges::find_if(stack.frames, [](const Frame& frame) { return !is_reliable(frame); });
  std::string where =
      bad == stack.frames.end() ? "among those left out" : fmt::format("at #{}", bad - stack.frames.begin());
  return fmt::format("not reliable: {} {}", sonde::describe(stack.result.reason), where);
}

// Inlined calls are rows of their own without a number: they share the frame, and the verdict, of the function below.
void print_text(const StackTarget& target, const StoppedThread& thread, const Shown& shown, const Options& options) {
  fmt::print("thread {} ({}): {}\n", thread.tid, printable(thread.name), summary_of(shown));
  const auto& frames = shown.stack.frames;
  for (size_t i = 0, number = 0; i < frames.size(); i++, number++) {
    if (shown.left_out && i == options.max_frames) {
      fmt::print("     ... {} left out\n", counted(shown.left_out, "frame"));
      number += shown.left_out;
    }
    const Location& where = locate(target, frames[i]);
    for (const SourceRow& row : where.source)
      if (row.inlined && !options.no_inline)
        fmt::print("{:<4} {:<18} {}{}\n", "", "inlined", row.function.empty() ? "??" : printable(row.function),
                   in_words(row.at));
    std::string line = where.source.empty() || where.source.back().inlined ? "" : in_words(where.source.back().at);
    fmt::print("#{:<3} 0x{:016x} {}{}{}\n", number, frames[i].pc.value, in_words(where), line, verdict_of(frames[i]));
  }
  fmt::print("\n");
}

nlohmann::ordered_json frame_json(const StackTarget& target, const Frame& frame) {
  const Location& where = locate(target, frame);
  nlohmann::ordered_json out{{"pc", fmt::format("{:#x}", frame.pc.value)}, {"is_return", frame.is_return}};
  if (!where.function.empty()) out["function"] = where.function;
  if (!where.file.empty()) out["file"] = where.file;
  if (where.image) {
    out["offset"] = where.offset;
    out["build_id"] = where.image->build_id();
  }
  add_source(out, where.source);
  if (frame.cfa) out["cfa"] = fmt::format("{:#x}", frame.cfa.value);
  add_judgement(out, frame);
  return out;
}

nlohmann::ordered_json thread_json(const StackTarget& target, const StoppedThread& thread, const Shown& shown) {
  const auto& [stack, left_out] = shown;
  nlohmann::ordered_json out{{"tid", thread.tid}, {"name", thread.name}};
  out["verdict"] = stack.result.whole() ? "reliable" : "unreliable";
  out["reason"] = sonde::describe(stack.result.reason);
  if (left_out) out["left_out"] = left_out;
  out["frames"] = nlohmann::ordered_json::array();
  for (const Frame& frame : stack.frames) out["frames"].push_back(frame_json(target, frame));
  return out;
}

// Of debug files: known only once lines were asked for.
std::vector<std::string> problems_of(const StackTarget& target) {
  std::vector<std::string> problems(target.problems().begin(), target.problems().end());
  for (const LoadedImage& loaded : target.images())
    if (std::string problem = loaded.image->debug_problem(); !problem.empty()) problems.push_back(std::move(problem));
  return problems;
}

double microseconds(std::chrono::nanoseconds time) { return static_cast<double>(time.count()) / 1000; }

std::chrono::nanoseconds median(std::span<const std::chrono::nanoseconds> sorted) { return sorted[sorted.size() / 2]; }

void print_header(const StackTarget& target) {
  if (target.signal())
    fmt::print("process {}: signal {} ({})\n\n", target.pid(), target.signal(), strsignal(target.signal()));
}

int run(const Options& options) {
  if ((options.pid != 0) == !options.core.empty())
    throw CommandError{{"give either -p PID or a core file (see sonde stack --help)", 2}};
  if (options.verbose && !options.pid)
    throw CommandError{
        {"-v says how long threads stood still: with -p PID only, threads of a core file do not run", 2}};
  debug_roots().insert(debug_roots().begin(), options.debug_dirs.begin(), options.debug_dirs.end());
  auto target = require(options.pid ? StackTarget::of_process(options.pid)
                                    : StackTarget::of_core(options.core, options.executable));
  bool all_whole = target.unstopped() == 0;
  nlohmann::ordered_json out{{"pid", target.pid()}};
  if (target.signal()) out["signal"] = target.signal();
  if (options.pid) {
    out["longest_pause_us"] = microseconds(target.pauses().back());
    out["median_pause_us"] = microseconds(median(target.pauses()));
  }
  out["threads"] = nlohmann::ordered_json::array();
  if (!options.json) print_header(target);
  for (const StoppedThread& thread : target.threads()) {
    Shown shown = walk(target, thread, options);
    all_whole &= shown.stack.result.whole();
    if (options.json) out["threads"].push_back(thread_json(target, thread, shown));
    else print_text(target, thread, shown, options);
  }
  auto problems = problems_of(target);
  if (options.json) {
    out["problems"] = problems;
    fmt::print("{}\n", out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
  }
  for (const std::string& problem : problems) tell("sonde: note: {}\n", printable(problem));
  if (options.verbose && options.pid)
    tell("sonde: {}; the longest pause of one was {:.1f} us, the median {:.1f} us\n",
         counted(target.threads().size(), "thread"), microseconds(target.pauses().back()),
         microseconds(median(target.pauses())));
  return options.reliable && !all_whole ? 3 : 0;
}

}  // namespace

void add_stack(CLI::App& app, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("stack", "Print every thread's stack, each frame with its verdict");
  command->add_option("-p,--pid", options->pid, "The process; a thread stands still only while its stack is copied")
      ->type_name("PID")
      ->check(whole_number(1, kLargestId));
  command->add_option("core", options->core, "Instead of a process: a core file")->type_name("CORE");
  command
      ->add_option("executable", options->executable,
                   "The core's program, if it is no longer where it was; its build id must be the one in the core")
      ->type_name("EXECUTABLE");
  command->add_flag("--json", options->json, "Print JSON");
  command->add_flag(
      "--reliable", options->reliable,
      "Guess nothing: end each stack at the first frame that is not reliable; exit status 3 if there is one");
  command->add_option("--max-frames", options->max_frames, "Cut each stack after so many frames")
      ->type_name("N")
      ->capture_default_str()
      ->check(whole_number(1, kMostFrames));
  command
      ->add_option("--outermost", options->outermost,
                   "Of a stack that is cut show this many of the outermost frames too")
      ->type_name("N")
      ->check(whole_number(1, kMostFrames));
  command
      ->add_option("--debug-dir", options->debug_dirs,
                   "Look for debug files, and for a core's programs and libraries, by build id in "
                   "DIR/.build-id/ab/cdef[.debug], before /usr/lib/debug (repeatable)")
      ->allow_extra_args(false)
      ->type_name("DIR")
      ->check(existing_folder());
  command->add_flag("--no-inline", options->no_inline, "No rows for inlined calls");
  command->add_flag("-v,--verbose", options->verbose, "Say how long a thread stood still");
  command->footer(
      "A row `inlined` is a call that the compiler has put into the function below it.\n"
      "Behind a frame: [P] pc from registers, [K] return address recovered from a return probe, [D] execution stood "
      "in\n"
      "a detour of a probe; then why the frame is not believed, or `guessed`.\n\n"
      "Examples:\n"
      "  sonde stack -p 4711                      stacks of a running process, also while it is recorded\n"
      "  sonde stack -p 4711 -v                   and for how long a thread stood still\n"
      "  sonde stack core.4711                    of a dead one\n"
      "  sonde stack core ./app                   the same, the program lies elsewhere now\n"
      "  sonde stack core --debug-dir ./symbols   its libraries and debug files by build id\n"
      "  sonde stack --reliable -p 4711           exit status 0 only if every stack is certain\n"
      "  sonde stack --json -p 4711 | jq '.threads[].frames[].function'");
  command->callback([options, &status] { status = run(*options); });
}

}  // namespace sonde::cli
