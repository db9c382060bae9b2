// The proof: single-steps a real program, and at every instruction holds sonde's walk against the truth (shadow.h), now and then
// also libdw, GNU libunwind and gdb. Prints one JSON object with what was counted, and on standard error what was wrong, in full.
//
// usage: step_proof --steps N [--from start|entry|SECONDS] [--stdin FILE] [--peers-every N] [--gdb-every N] [--gdb-unreliable N]
//          [--return-seconds S] [--gdb-script FILE] [--signals] [--show N] [--spoil-every N] [--urgent] [--skip N]
//          -- PROGRAM [ARGUMENT...]
//   start    the very first instruction, in the dynamic linker
//   entry    the program's own first one; nobody called that either
//   SECONDS  of processor time at full speed first. What is on the stack then is taken from libdw and libunwind, where they agree
//            and end in _start; each of these calls that returns later, stepped or in S seconds at full speed, is proven by that.
//   --skip   so many instructions are carried out first, their truth kept but compared with nothing
// A program for AArch64 is carried out by qemu-aarch64 (emulated.h); there are no others to compare with then, and no SECONDS.
#include <fmt/format.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_map>

#include "tests/step/compare.h"
#include "tests/step/emulated.h"
#include "tests/step/gdb.h"
#include "tests/step/peers.h"

namespace sonde::stepping {
namespace {

constexpr double kLongestStart = 60;  // seconds
constexpr int kPlacesToAgree = 50, kStepsToAgree = 50;
constexpr double kToTheNextPlace = 0.01;
constexpr uint64_t kUnreliableToPeers = 1000;
constexpr uint64_t kEntryBytes = 64;  // _start is no longer

struct Options {
  uint64_t steps = 20000, peers_every = 100, gdb_every = 10000, gdb_unreliable = 1000, show = 0, spoil_every = 0,
           skip = 0;
  std::string from = "start", gdb_script;
  double return_seconds = 1;
  bool signals = false;
  bool urgent = false;
  Command command;
};

[[noreturn]] void give_up(const std::string& what, int status) {
  fmt::print(stderr, "step_proof: {}\n", what);
  exit(status);
}

Options parse(int count, char** words) {
  Options options;
  int i = 1;
  auto value = [&] { return ++i < count ? words[i] : (give_up("a value is missing", 2), nullptr); };
  auto number = [&] { return strtoull(value(), nullptr, 10); };
  for (; i < count && strcmp(words[i], "--") != 0; i++) {
    std::string option = words[i];
    if (option == "--steps") options.steps = number();
    else if (option == "--from") options.from = value();
    else if (option == "--stdin") options.command.input = value();
    else if (option == "--peers-every") options.peers_every = number();
    else if (option == "--gdb-every") options.gdb_every = number();
    else if (option == "--gdb-unreliable") options.gdb_unreliable = number();
    else if (option == "--gdb-script") options.gdb_script = value();
    else if (option == "--return-seconds") options.return_seconds = strtod(value(), nullptr);
    else if (option == "--signals") options.signals = true;
    else if (option == "--spoil-every") options.spoil_every = number();
    else if (option == "--skip") options.skip = number();
    else if (option == "--show") options.show = number();
    else if (option == "--urgent") options.urgent = true;
    else give_up("what is " + option + "?", 2);
  }
  for (i++; i < count; i++) options.command.words.push_back(words[i]);
  if (options.command.words.empty()) give_up("no program", 2);
  return options;
}

// How one of the others does.
struct PeerCounts {
  uint64_t asked = 0, refused = 0, wrong = 0;
  void add(Answer answer) {
    asked++;
    refused += answer == Answer::refused;
    wrong += answer == Answer::wrong;
  }
  nlohmann::ordered_json json() const { return {{"asked", asked}, {"refused", refused}, {"wrong", wrong}}; }
};
struct Peer {
  PeerCounts sampled, unreliable;  // every so many states; states that sonde calls unreliable
};

class Run {
 public:
  explicit Run(const Options& options) : options_(options), begin_(std::chrono::steady_clock::now()) {}

  int operator()() {
    if (options_.urgent) setpriority(PRIO_PROCESS, 0, -10);  // two processes that wait for each other
    launch();
    to_the_beginning();
    while (program_->steps() < options_.skip && program_->end().empty()) program_->step(shadow_);
    seconds_to_begin_ = seconds();
    const uint64_t before = program_->steps();
    while (program_->end().empty() && program_->steps() - before < options_.steps) {
      compare(program_->steps() - before);
      if (!(interrupts() ? interrupt() : program_->step(shadow_))) break;
    }
    stepped_ = program_->steps() - before;
    if (native_ && program_->end().empty()) prove_adopted();
    report();
    return comparison_->counts.wrong || comparison_->counts.forms_differ || shadow_.adopted_false ? 1 : 0;
  }

 private:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

  void launch() {
    auto take = [&](auto launched) {
      if (!launched) give_up(launched.error().message, 1);
      return std::move(*launched);
    };
    if (is_for_aarch64(options_.command.words[0])) {
      program_ = take(Emulated::launch(options_.command));
      shadow_ = Shadow(Return::in_register);
    } else {
      auto tracee = take(Tracee::launch(options_.command));
      native_ = tracee.get();
      program_ = std::move(tracee);
      libdw_.emplace(*native_), libunwind_.emplace(*native_);
      if (!options_.gdb_script.empty()) gdb_.emplace(*native_, native_->file(), options_.gdb_script, ".");
    }
    walks_.emplace(*program_), comparison_.emplace(*program_, *walks_);
    comparison_->show = options_.show;
  }

  void to_the_beginning() {
    if (options_.from == "start") return shadow_.begin(program_->stack_end(program_->sp()));
    if (options_.from == "entry") {
      if (!program_->run_to(program_->entry(), kLongestStart)) give_up("it did not come to its entry point", 1);
      return shadow_.begin(program_->stack_end(program_->sp()));
    }
    if (!native_) give_up("nobody tells what is on this program's stack: --from start or entry, with --skip", 2);
    double seconds = strtod(options_.from.c_str(), nullptr);
    for (int i = 0; i < kPlacesToAgree; i++, seconds = kToTheNextPlace) {
      if (!native_->run_for(seconds)) give_up(native_->end(), 1);
      for (int k = 0; k < kStepsToAgree; k++) {
        if (adopt()) return;
        if (!program_->step(shadow_)) give_up(program_->end(), 1);
      }
    }
    give_up("libdw and libunwind do not agree on any stack", 1);
  }

  // Whether a signal is to come at the instruction that execution stands at: at each, once for either signal, when the program
  // has handlers for both and is in neither.
  bool interrupts() {
    if (!options_.signals) return false;
    if (!handles_signals_) handles_signals_ = program_->handles(SIGUSR1) && program_->handles(SIGUSR2);
    bool in_handler = std::ranges::any_of(shadow_.calls(), [](const Call& call) { return call.interrupted; });
    if (!handles_signals_ || in_handler) return false;
    return interruptions_at_[program_->pc()] < 2 && (interrupted_ = !interrupted_);  // not again when it returns there
  }

  bool interrupt() {
    interruptions_++;
    return program_->send(interruptions_at_[program_->pc()]++ ? SIGUSR2 : SIGUSR1, shadow_);
  }

  bool adopt() {
    constexpr size_t kDeepest = 4000;
    program_->look();
    Chain a = libdw_->chain(kDeepest), b = libunwind_->chain(kDeepest);
    if (a.pcs != b.pcs || a.pcs.size() < 2 || a.pcs.size() == kDeepest) return false;
    if (a.pcs.back() - program_->entry() >= kEntryBytes) return false;
    std::vector<Call> calls;
    for (size_t i = a.pcs.size(); i-- > 1;) {
      uint64_t held = 0;
      if (!program_->read_as(Addr(b.sps[i] - 8), &held) || held != a.pcs[i]) return false;
      calls.push_back({.slot = b.sps[i] - 8, .pc = a.pcs[i], .caller_sp = b.sps[i], .adopted = true});
    }
    adopted_ = calls.size();
    shadow_.begin(program_->stack_end(program_->sp()), std::move(calls));
    return true;
  }

  void compare(uint64_t number) {
    Truth truth = truth_of(shadow_, *program_);
    if (options_.spoil_every && truth.known && truth.chain.size() > 1 && number % options_.spoil_every == 0)
      spoil(truth, number);
    bool compared = false;
    bool reliable = comparison_->compare(truth, &compared);
    if (!compared) return;
    const size_t limit = truth.chain.size() + 1;
    const bool sampled = number % options_.peers_every == 0;
    if (!native_) return;
    if (sampled || (!reliable && libdw_counts_.unreliable.asked < kUnreliableToPeers)) {
      Answer dw = judge(libdw_->chain(limit), truth, *program_),
             unwind = judge(libunwind_->chain(limit), truth, *program_);
      if (sampled) libdw_counts_.sampled.add(dw), libunwind_counts_.sampled.add(unwind);
      if (sampled) plain_sampled_.add(comparison_->last_plain);
      if (sampled) sonde_unreliable_sampled_ += !reliable;
      if (!reliable) libdw_counts_.unreliable.add(dw), libunwind_counts_.unreliable.add(unwind);
    }
    const bool gdb_sampled = number % options_.gdb_every == 0;
    if (gdb_ && (gdb_sampled || (!reliable && gdb_counts_.unreliable.asked < options_.gdb_unreliable))) {
      Chain chain;
      if (!gdb_->chain(limit, &chain, &gdb_problem_)) return;
      Answer answer = judge(chain, truth, *program_);
      if (gdb_sampled) gdb_counts_.sampled.add(answer);
      if (!reliable) gdb_counts_.unreliable.add(answer);
    }
  }

  // For the test that the comparison can fail: one thing in the truth is made another.
  void spoil(Truth& truth, uint64_t number) {
    size_t last = truth.chain.size() - 1, at = 1 + number / options_.spoil_every % last;
    switch (number / options_.spoil_every % 4) {
      case 0: truth.chain[at]++, truth.slots[at] = 0; break;
      case 1: truth.sps[at] += 8; break;
      case 2: truth.chain.pop_back(), truth.slots.pop_back(), truth.sps.pop_back(); break;
      case 3:
        truth.chain.push_back(truth.chain[at]), truth.slots.push_back(truth.slots[at]),
            truth.sps.push_back(truth.sps[at]);
    }
    spoiled_++;
  }

  // Runs on at full speed, to see the calls return that were there before.
  void prove_adopted() {
    auto calls = shadow_.calls();
    std::vector<Call> open(calls.begin(), calls.end());
    const auto begin = std::chrono::steady_clock::now();
    auto left = [&] {
      return options_.return_seconds - std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    Shadow ignored;
    for (size_t i = open.size(); i-- > 0 && left() > 0 && program_->end().empty();) {
      if (!open[i].adopted) continue;
      while (left() > 0) {
        if (program_->pc() == open[i].pc && !program_->step(ignored)) return;
        if (!program_->run_to(open[i].pc, left())) break;
        if (program_->sp() < open[i].caller_sp) continue;  // of another call of the same, further in
        shadow_.adopted_returned += program_->sp() == open[i].caller_sp;
        break;
      }
    }
  }

  void report() {
    const Counts& c = comparison_->counts;
    for (const std::string& text : c.first_wrong) fmt::print(stderr, "{}", text);
    nlohmann::ordered_json out = {
        {"architecture", program_->architecture()},
        {"steps", stepped_},
        {"states", c.states},
        {"reliable", c.reliable},
        {"wrong", c.wrong},
        {"forms_differ", c.forms_differ},
        {"unknown", c.unknown},
        {"unknown_reliable", c.unknown_reliable},
        {"seconds_to_begin", seconds_to_begin_},
        {"rewritten", c.rewritten},
        {"best_effort_right", c.best_effort_right},
        {"deepest", c.deepest},
        {"plain", {{"asked", c.states}, {"refused", c.plain_refused}, {"wrong", c.plain_wrong}}},
        {"plain_bad_where_unreliable", c.plain_bad_where_unreliable}};
    auto add = [&](const char* name, const Peer& peer) {
      out[name] = peer.sampled.json();
      out[name]["at_unreliable"] = peer.unreliable.json();
    };
    out["plain_sampled"] = plain_sampled_.json();
    out["sonde_unreliable_sampled"] = sonde_unreliable_sampled_;
    add("libdw", libdw_counts_), add("libunwind", libunwind_counts_), add("gdb", gdb_counts_);
    out["gdb_problem"] = gdb_problem_;
    out["adopted"] = adopted_, out["adopted_returned"] = shadow_.adopted_returned,
    out["adopted_false"] = shadow_.adopted_false;
    out["spoiled"] = spoiled_;
    out["interruptions"] = interruptions_, out["interrupted_at"] = interruptions_at_.size();
    out["signals"] = program_->signals(), out["ended"] = program_->end();
    out["stack_switches"] = shadow_.stack_switches, out["abandoned"] = shadow_.abandoned;
    out["reasons"] = c.reasons, out["places"] = c.places, out["wrong_places"] = c.wrong_places;
    out["seconds"] = seconds();
    fmt::print("{}\n", out.dump());
  }

  const Options& options_;
  const std::chrono::steady_clock::time_point begin_;
  std::unique_ptr<Program> program_;
  Tracee* native_ = nullptr;  // the same, if it is of this machine
  std::optional<Walks> walks_;
  std::optional<Comparison> comparison_;
  std::optional<Libdw> libdw_;
  std::optional<Libunwind> libunwind_;
  std::optional<Gdb> gdb_;
  Shadow shadow_;
  Peer libdw_counts_, libunwind_counts_, gdb_counts_;
  PeerCounts plain_sampled_;
  uint64_t sonde_unreliable_sampled_ = 0, stepped_ = 0, adopted_ = 0;
  double seconds_to_begin_ = 0;
  std::string gdb_problem_;
  bool handles_signals_ = false, interrupted_ = false;
  uint64_t interruptions_ = 0, spoiled_ = 0;
  std::unordered_map<uint64_t, int> interruptions_at_;
};

}  // namespace
}  // namespace sonde::stepping

int main(int count, char** words) {
  sonde::stepping::Options options = sonde::stepping::parse(count, words);
  return sonde::stepping::Run(options)();
}
