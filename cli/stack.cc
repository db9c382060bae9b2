// sonde stack: every thread's stack of a process or a core file, each frame with its verdict.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "core/walk/reason.h"
#include "host/target/stack_target.h"

namespace sonde::cli {
namespace {

struct Options {
  int pid = 0;
  std::string core, executable;
  bool json = false, reliable = false;
  unsigned max_frames = 1000;
};

// Where a frame's pc lies, in words.
struct Location {
  std::string function;  // "" if no symbol holds it
  uint64_t offset = 0;   // from the function, else from the file's address 0
  std::string file;      // "" if in none
};

Location locate(const host::StackTarget& target, const Frame& frame) {
  const host::LoadedImage* loaded = target.image_at(frame.code().lookup());
  if (!loaded) return {};
  Location where;
  where.file = loaded->image->path();
  ImageAddr lookup = loaded->to_image(frame.code().lookup());
  auto hit = loaded->image->find(lookup);
  uint64_t back = frame.is_return ? 1 : 0;
  if (!hit) return where.offset = lookup.value + back, where;
  where.function = host::display_name(*loaded->image, *hit->function);
  where.offset = hit->offset + back;
  return where;
}

std::string base_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

std::string in_words(const Location& where) {
  if (where.file.empty()) return "??";
  std::string name = where.function.empty() ? "??" : host::printable(where.function);
  return fmt::format("{}+{:#x} ({})", name, where.offset, host::printable(base_name(where.file)));
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

std::string summary_of(const host::ThreadStack& stack) {
  if (stack.result.whole()) return "reliable";
  size_t first = 0;
  while (first < stack.frames.size() && is_reliable(stack.frames[first])) first++;
  return fmt::format("not reliable: {} at #{}", sonde::describe(stack.result.reason), first);
}

void print_text(const host::StackTarget& target, const host::StoppedThread& thread, const host::ThreadStack& stack) {
  fmt::print("thread {} ({}): {}\n", thread.tid, host::printable(thread.name), summary_of(stack));
  for (size_t i = 0; i < stack.frames.size(); i++) {
    const Frame& frame = stack.frames[i];
    fmt::print("#{:<3} 0x{:016x} {}{}\n", i, frame.pc.value, in_words(locate(target, frame)), verdict_of(frame));
  }
  fmt::print("\n");
}

nlohmann::ordered_json frame_json(const host::StackTarget& target, const Frame& frame) {
  static constexpr const char* kSources[] = {"frame", "caller", "task", "registers"};
  Location where = locate(target, frame);
  nlohmann::ordered_json out;
  out["pc"] = fmt::format("{:#x}", frame.pc.value);
  out["is_return"] = frame.is_return;
  if (!where.file.empty()) out["file"] = where.file, out["offset"] = where.offset;
  if (!where.function.empty()) out["function"] = where.function;
  if (frame.cfa) out["cfa"] = fmt::format("{:#x}", frame.cfa.value);
  out["source"] = kSources[static_cast<unsigned>(frame.source)];
  out["reliable"] = is_reliable(frame);
  out["reason"] = sonde::describe(frame.reason);
  if (frame.recovered & kRecoveredReturn) out["recovered"] = true;
  if (frame.recovered & kInDetour) out["in_detour"] = true;
  if (frame.recovered & kMarked) out["guessed"] = true;
  return out;
}

nlohmann::ordered_json thread_json(const host::StackTarget& target, const host::StoppedThread& thread,
                                   const host::ThreadStack& stack) {
  nlohmann::ordered_json out{{"tid", thread.tid}, {"name", thread.name}, {"reliable", stack.result.whole()}};
  out["reason"] = sonde::describe(stack.result.reason);
  out["frames"] = nlohmann::ordered_json::array();
  for (const Frame& frame : stack.frames) out["frames"].push_back(frame_json(target, frame));
  return out;
}

int run(const Options& options) {
  if ((options.pid != 0) == !options.core.empty())
    throw CommandError{{"give either -p PID or a core file (see sonde stack --help)", 2}};
  auto target = require(options.pid ? host::StackTarget::of_process(options.pid)
                                    : host::StackTarget::of_core(options.core, options.executable));
  host::WalkOptions walk{.max_frames = options.max_frames, .reliable_only = options.reliable};
  bool all_whole = true;
  nlohmann::ordered_json out{{"pid", target.pid()}, {"threads", nlohmann::ordered_json::array()}};
  for (const host::StoppedThread& thread : target.threads()) {
    auto stack = target.walk(thread, walk);
    all_whole &= stack.result.whole();
    if (options.json) out["threads"].push_back(thread_json(target, thread, stack));
    else print_text(target, thread, stack);
  }
  if (options.json) {
    out["problems"] = target.problems();
    fmt::print("{}\n", out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
  }
  for (const std::string& problem : target.problems())
    fmt::print(stderr, "sonde: note: {}\n", host::printable(problem));
  return options.reliable && !all_whole ? 3 : 0;
}

}  // namespace

void add_stack(CLI::App& app, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("stack", "Print every thread's stack, each frame with its verdict");
  command->add_option("-p,--pid", options->pid, "The process; it stands still only while its stacks are copied")
      ->type_name("PID");
  command->add_option("core", options->core, "Instead of a process: a core file")->type_name("CORE");
  command->add_option("executable", options->executable, "The core's program, if it is no longer where it was")
      ->type_name("EXECUTABLE");
  command->add_flag("--json", options->json, "Print JSON");
  command->add_flag(
      "--reliable", options->reliable,
      "Guess nothing: end each stack at the first frame that is not reliable; exit status 3 if there is one");
  command->add_option("--max-frames", options->max_frames, "Cut each stack after so many frames")
      ->type_name("N")
      ->capture_default_str()
      ->check(CLI::Range(1u, 10000000u));
  command->footer(
      "Behind a frame: [P] pc from registers, [K] return address recovered from a return probe, [D] execution stood in "
      "a\n"
      "detour of a probe; then why the frame is not believed, or `guessed`.\n\n"
      "Examples:\n"
      "  sonde stack -p 4711                      stacks of a running process, also while it is recorded\n"
      "  sonde stack core.4711                    of a dead one\n"
      "  sonde stack core ./app                   the same, the program lies elsewhere now\n"
      "  sonde stack --reliable -p 4711           exit status 0 only if every stack is certain\n"
      "  sonde stack --json -p 4711 | jq '.threads[].frames[].function'");
  command->callback([options, &status] { status = run(*options); });
}

}  // namespace sonde::cli
