// `sonde report`: shows what a trace holds.
#include <sys/ioctl.h>
#include <unistd.h>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/options.h"
#include "host/image/image.h"
#include "host/report/open.h"
#include "host/report/view.h"

namespace sonde::cli {

namespace {

constexpr double kLongestUs = 1e12;  // twelve days

struct Options {
  std::string file = "sonde.trace";
  bool tree = false, stats = false, calls = false, folded = false;
  uint32_t tid = 0;
  double min_time_us = 0;
  host::ViewOptions view;
};

unsigned terminal_width() {
  winsize size{};
  if (isatty(1) && ioctl(1, TIOCGWINSZ, &size) == 0 && size.ws_col >= 40) return size.ws_col;
  return 120;
}

// Options that mean something in some views only.
void require_meaning(const Options& options, const CLI::App& command) {
  struct Meaning {
    const char* option;
    bool shown;
    const char* views;
  };
  bool tree = !options.stats && !options.calls && !options.folded;
  for (const Meaning& m :
       {Meaning{"--sort", options.stats, "--stats"}, Meaning{"--counts", options.folded, "--folded"},
        Meaning{"--per-thread", tree, "the tree"}, Meaning{"--depth", tree || options.folded, "the tree and --folded"},
        Meaning{"--limit", !options.folded, "the tree, --stats and --calls"},
        Meaning{"--min-time", !options.folded, "the tree, --stats and --calls"},
        Meaning{"--json", !options.folded, "the tree, --stats and --calls"}})
    if (command.count(m.option) && !m.shown)
      throw CommandError{
          {fmt::format("{} means something with {} only: leave it out, or choose another view", m.option, m.views), 2}};
}

void run(Options& options, const CLI::App& command) {
  if (options.tree + options.stats + options.calls + options.folded > 1)
    throw CommandError{{"--tree, --stats, --calls and --folded are different views: choose one", 2}};
  require_meaning(options, command);
  if (access(options.file.c_str(), F_OK) != 0)
    throw CommandError{{options.file + ": no such file. Record first: sonde record ./program", 1}};
  host::Recording recording = require(host::open_recording(options.file));
  options.view.width = terminal_width();
  options.view.min_time_ns = options.min_time_us * 1e3;
  if (options.tid) options.view.tid = options.tid;
  require(host::check_functions(recording, options.view));
  require(host::check_thread(recording, options.view));
  auto print = options.stats    ? host::print_stats
               : options.calls  ? host::print_calls
               : options.folded ? host::print_folded
                                : host::print_tree;
  require(print(recording, options.view, stdout));
  if (!options.folded) return;
  for (const std::string& note : recording.notes)
    tell("sonde: note: {}\n", host::printable(note));  // no footer says it
}

}  // namespace

void add_report(CLI::App& app, int&) {
  auto options = std::make_shared<Options>();
  host::ViewOptions& view = options->view;
  CLI::App* command = app.add_subcommand("report", "Show a trace: call tree, statistics, calls, folded stacks");
  command->add_option("file", options->file, "The trace")->type_name("FILE")->capture_default_str();
  command->add_flag("--tree", options->tree, "Aggregated call tree (the default)");
  command->add_flag("--stats", options->stats, "One line per function: calls, total, self, min, avg, p50, p99, max");
  command->add_flag("--calls", options->calls, "Every call in order of time, with stacks where recorded");
  command->add_flag("--folded", options->folded, "Folded stacks, one a line, for flame graphs");
  command->add_flag("--json", view.json, "The view as JSON");
  command->add_option("-f,--function", view.functions, "Only functions that match GLOB (repeatable)")
      ->allow_extra_args(false)
      ->type_name("GLOB");
  command->add_option("--tid", options->tid, "Only this thread")->type_name("TID")->check(whole_number(1, kLargestId));
  command->add_flag("--per-thread", view.per_thread, "One tree per thread");
  command->add_option("--sort", view.sort, "--stats by total, self, calls, avg, max or name")
      ->type_name("COLUMN")
      ->capture_default_str()
      ->check(one_of({"total", "self", "calls", "avg", "max", "name"}));
  command->add_option("--limit", view.limit, "At most so many rows")->type_name("N")->check(whole_number(1, kMostRows));
  command->add_option("--depth", view.depth, "Levels of the tree, of folded stacks (else 1000)")
      ->type_name("N")
      ->check(whole_number(1, kMostRows));
  command->add_option("--min-time", options->min_time_us, "Leave out what took less, in microseconds")
      ->type_name("US")
      ->check(number(0, kLongestUs));
  command->add_flag("--counts", view.counts, "--folded by calls rather than self time in ns");
  command->add_flag("--full-names", view.full_names, "Do not shorten names");
  command->footer(
      "Examples:\n"
      "  sonde report\n"
      "  sonde report --stats --sort self --limit 20\n"
      "  sonde report --calls -f 'net::*' app.trace\n"
      "  sonde report --folded > app.folded");
  command->callback([options, command] { run(*options, *command); });
}

}  // namespace sonde::cli
