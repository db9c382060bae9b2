// The proof: single-steps a real program, and at every instruction holds sonde's walk against the truth (shadow.h). Prints one
// JSON object with what was counted, and on standard error what was wrong, in full.
//
// usage: step_proof --steps N [--from start|entry] [--stdin FILE] [--urgent] -- PROGRAM [ARGUMENT...]
//   start   the very first instruction, in the dynamic linker
//   entry   the program's own first one; nobody called that either
#include <fmt/format.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "tests/step/compare.h"

namespace sonde::stepping {
namespace {

constexpr double kLongestStart = 60;  // seconds

struct Options {
  uint64_t steps = 20000;
  std::string from = "start";
  bool urgent = false;
  Command command;
};

[[noreturn]] void usage(const std::string& what) {
  fmt::print(stderr, "step_proof: {}\n", what);
  exit(2);
}

Options parse(int count, char** words) {
  Options options;
  int i = 1;
  auto value = [&] { return ++i < count ? words[i] : (usage("a value is missing"), nullptr); };
  for (; i < count && strcmp(words[i], "--") != 0; i++) {
    std::string option = words[i];
    if (option == "--steps") options.steps = strtoull(value(), nullptr, 10);
    else if (option == "--from") options.from = value();
    else if (option == "--stdin") options.command.input = value();
    else if (option == "--urgent") options.urgent = true;
    else usage("what is " + option + "?");
  }
  for (i++; i < count; i++) options.command.words.push_back(words[i]);
  if (options.command.words.empty()) usage("no program");
  return options;
}

nlohmann::ordered_json json_of(const Counts& c) {
  return {{"states", c.states},
          {"reliable", c.reliable},
          {"wrong", c.wrong},
          {"forms_differ", c.forms_differ},
          {"unknown", c.unknown},
          {"unknown_reliable", c.unknown_reliable},
          {"rewritten", c.rewritten},
          {"best_effort_right", c.best_effort_right},
          {"deepest", c.deepest},
          {"plain_refused", c.plain_refused},
          {"plain_wrong", c.plain_wrong},
          {"plain_bad_where_unreliable", c.plain_bad_where_unreliable},
          {"reasons", c.reasons},
          {"places", c.places},
          {"wrong_places", c.wrong_places}};
}

int run(const Options& options) {
  if (options.urgent) setpriority(PRIO_PROCESS, 0, -10);  // two processes that wait for each other
  const auto begin = std::chrono::steady_clock::now();
  auto launched = Tracee::launch(options.command);
  if (!launched) usage(launched.error().message);
  Tracee& tracee = **launched;
  Walks walks(tracee);
  Comparison comparison(tracee, walks);
  Shadow shadow;
  if (options.from == "entry" && !tracee.run_to(tracee.entry(), kLongestStart))
    usage("it did not come to its entry point");
  shadow.begin(tracee.stack_end(tracee.regs().rsp));
  while (tracee.steps() < options.steps) {
    bool compared = false;
    comparison.compare(truth_of(shadow, tracee.regs()), &compared);
    if (!tracee.step(shadow)) break;
  }
  for (const std::string& text : comparison.counts.first_wrong) fmt::print(stderr, "{}", text);
  nlohmann::ordered_json out = json_of(comparison.counts);
  out["steps"] = tracee.steps();
  out["signals"] = tracee.signals();
  out["ended"] = tracee.end();
  out["stack_switches"] = shadow.stack_switches, out["abandoned"] = shadow.abandoned;
  out["seconds"] = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  fmt::print("{}\n", out.dump());
  return comparison.counts.wrong || comparison.counts.forms_differ ? 1 : 0;
}

}  // namespace
}  // namespace sonde::stepping

int main(int count, char** words) { return sonde::stepping::run(sonde::stepping::parse(count, words)); }
