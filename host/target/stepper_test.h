// For tests: a program that is single-stepped, with the truth about its stack kept aside. The truth comes from what call,
// ret, signals and signal returns do to rsp and rip alone: no unwind table has a part in it. In a program that is being
// recorded it also knows, from the addresses that control passes through, that a return into a trampoline is not over yet,
// and that the return point in a detour stands for the probed function.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <set>

#include "core/walk/reason.h"
#include "core/walk/walker.h"
#include "host/tables/arena.h"
#include "host/target/agent_view.h"
#include "host/target/memory.h"
#include "host/target/threads.h"

namespace sonde::host {

// Memory of a tracee that changes with each step: what can be written is read anew, in one piece around sp; the rest once.
class SteppedMemory : public TargetMemory {
 public:
  SteppedMemory(pid_t pid, std::vector<Mapping> mappings) : constant_(pid, std::move(mappings)) {}
  void at(Addr sp) {
    window_begin_ = sp - 256;
    window_.resize(8192);
    window_.resize(constant_.read_now(window_begin_, window_));
  }
  bool read(Addr at, std::span<uint8_t> into) override {
    uint64_t offset = static_cast<uint64_t>(at - window_begin_);
    if (offset < window_.size() && window_.size() - offset >= into.size())
      return std::memcpy(into.data(), window_.data() + offset, into.size()), true;
    const Mapping* mapping = constant_.mapping(at);
    if (mapping && !mapping->writable) return constant_.read(at, into);
    return constant_.read_now(at, into) == into.size();
  }
  bool stack_at(Addr sp, AddrRange* stack) override { return constant_.stack_at(sp, stack); }

 private:
  ProcessMemory constant_;
  Addr window_begin_;
  std::vector<uint8_t> window_;
};

struct Counts {
  uint64_t steps = 0, whole = 0, refused = 0, wrong = 0, signals = 0, in_detours = 0, displaced_calls = 0;
  size_t deepest = 0;
  std::map<std::string, uint64_t> reasons;
  std::map<std::string, uint64_t> refused_in, wrong_in;  // by function
  std::string first_wrong;
};

class Stepper {
 public:
  explicit Stepper(std::vector<std::string> arguments) : program_(std::filesystem::canonical(arguments[0])) {
    std::vector<char*> argv;
    for (auto& a : arguments) argv.push_back(a.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      alarm(600);
      int null = open("/dev/null", O_RDWR);
      dup2(null, 0), dup2(null, 1);
      ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
      execv(argv[0], argv.data());
      _exit(127);
    }
    waitpid(pid_, &status_, 0);
    REQUIRE(WIFSTOPPED(status_));
    get_regs();
  }
  ~Stepper() {
    if (!WIFEXITED(status_) && !WIFSIGNALED(status_)) kill(pid_, SIGKILL), waitpid(pid_, nullptr, 0);
  }

  // Takes over a process that spins, `recorded` or not. The truth begins with the walk here: other tests hold that against
  // gdb. Then word `go` of the program is set to 1.
  Stepper(const std::string& program, pid_t pid, const char* go)
      : program_(std::filesystem::canonical(program)), pid_(pid) {
    REQUIRE(ptrace(PTRACE_SEIZE, pid_, nullptr, nullptr) == 0);
    REQUIRE(ptrace(PTRACE_INTERRUPT, pid_, nullptr, nullptr) == 0);
    waitpid(pid_, &status_, 0);
    REQUIRE(WIFSTOPPED(status_));
    get_regs();
    describe();
    WalkResult result;
    auto frames = walk(&result);
    REQUIRE(result.whole());
    for (size_t i = frames.size() - 1; i-- > 0;)
      truth_.push_back({frames[i].cfa.value - 8, frames[i + 1].pc.value, false});
    auto image = Image::open(program_);
    REQUIRE(image);
    REQUIRE((*image)->symbol(go));
    ptrace(PTRACE_POKEDATA, pid_, in_target(*(*image)->symbol(go)), 1L);
  }

  // To the first instruction of main by a breakpoint. The truth begins with main's return address; what lies above it is
  // taken from the walk there, and stays as it is (run_to_entry leaves nothing to be taken).
  void run_to_main() {
    auto image = Image::open(program_);
    REQUIRE(image);
    auto main = (*image)->symbol("main");
    REQUIRE(main);
    uint64_t entry = in_target(*main);
    long saved = ptrace(PTRACE_PEEKTEXT, pid_, entry, nullptr);
    ptrace(PTRACE_POKETEXT, pid_, entry, (saved & ~0xffL) | 0xcc);
    ptrace(PTRACE_CONT, pid_, nullptr, nullptr);
    waitpid(pid_, &status_, 0);
    ptrace(PTRACE_POKETEXT, pid_, entry, saved);
    get_regs();
    regs_.rip = entry;
    ptrace(PTRACE_SETREGS, pid_, nullptr, &regs_);
    truth_.push_back({regs_.rsp, word(regs_.rsp), false});
    describe();
    auto stack = walk();
    REQUIRE(stack.size() > 2);
    above_.assign(stack.begin() + 2, stack.end());
  }

  // To the program's own first instruction, behind the dynamic linker; nobody called it.
  void run_to_entry() {
    auto image = Image::open(program_);
    REQUIRE(image);
    uint64_t entry = in_target((*image)->entry());
    while (regs_.rip != entry) REQUIRE(step());
    truth_.clear();
    describe();
  }

  // Until this function is entered.
  Counts compare_to(const char* function) {
    auto image = Image::open(program_);
    REQUIRE(image);
    auto symbol = (*image)->symbol(function);
    REQUIRE(symbol);
    for (uint64_t end = in_target(*symbol); regs_.rip != end;) {
      compare();
      REQUIRE(step());
    }
    return counts_;
  }
  // Addresses in the agent's code that execution has stood at, and where its functions lie.
  const std::set<uint64_t>& seen_in_agent() const { return seen_in_agent_; }
  AddrRange function_of_agent(const char* name) const {
    for (auto& loaded : images_)
      if (loaded.range.contains(agent_.begin))
        if (auto symbol = loaded.image->symbol(name))
          if (auto hit = loaded.image->find(*symbol))
            return {loaded.to_target(hit->function->range.begin), loaded.to_target(hit->function->range.end)};
    return {};
  }
  std::vector<uint8_t> code(AddrRange range) {
    std::vector<uint8_t> bytes(range.size());
    REQUIRE(memory_->read(range.begin, bytes));
    return bytes;
  }

  // From here until the caller of main is reached, the program has ended, or so many steps; every instruction is compared.
  Counts compare_all(uint64_t limit) {
    size_t depth = truth_.size();
    do compare();
    while (step() && truth_.size() >= depth && counts_.steps < limit);
    if (!WIFEXITED(status_)) {
      ptrace(PTRACE_CONT, pid_, nullptr, nullptr);
      waitpid(pid_, &status_, 0);
    }
    REQUIRE(WIFEXITED(status_));
    CHECK(WEXITSTATUS(status_) == 0);
    return counts_;
  }

 private:
  struct Call {
    uint64_t slot, pc;
    bool interrupted;  // pc is where a signal hit; slot is the kernel's frame
  };

  uint64_t word(uint64_t at) const { return static_cast<uint64_t>(ptrace(PTRACE_PEEKDATA, pid_, at, nullptr)); }
  uint64_t in_target(ImageAddr address) const {
    auto images = loaded_images(pid_, nullptr);
    REQUIRE(images);
    for (auto& loaded : *images)
      if (loaded.image->path() == program_) return loaded.to_target(address).value;
    FAIL("the program is not among its images");
    return 0;
  }
  void get_regs() { ptrace(PTRACE_GETREGS, pid_, nullptr, &regs_); }

  static bool is_call(uint64_t code) {
    auto byte = [&](unsigned i) { return static_cast<uint8_t>(code >> 8 * i); };
    unsigned i = 0;
    while (byte(i) == 0xf2 || byte(i) == 0x3e || byte(i) == 0x67 || byte(i) == 0x66 || (byte(i) & 0xf0) == 0x40) i++;
    return byte(i) == 0xe8 || (byte(i) == 0xff && (byte(i + 1) >> 3 & 7) == 2);
  }

  // False when the program has ended.
  bool step() {
    uint64_t sp = regs_.rsp, code = word(regs_.rip), pc = regs_.rip;
    bool maps_code = (code & 0xffff) == 0x050f && regs_.rax == 9 && (regs_.rdx & 4);
    bool sigreturn = (code & 0xffff) == 0x050f && regs_.rax == 15;
    ptrace(PTRACE_SINGLESTEP, pid_, nullptr, nullptr);
    waitpid(pid_, &status_, 0);
    if (!WIFSTOPPED(status_)) return false;
    get_regs();
    if (sigreturn) {
      REQUIRE(truth_.back().interrupted);
      truth_.pop_back();
    } else if (is_call(code) && regs_.rsp == sp - 8) {
      // A hooked function is entered by a call in its trampoline, in place of the program's.
      bool once_more = agent_.contains(Addr(pc)) && !truth_.empty() && truth_.back().slot == regs_.rsp;
      if (!once_more) truth_.push_back({regs_.rsp, word(regs_.rsp), false});
    } else if (detour_at(pc) && agent_.contains(Addr(regs_.rip)) &&
               regs_.rsp == sp) {  // pushes the return point and jumps
      truth_.push_back({regs_.rsp, word(regs_.rsp), false});
    } else {
      enter_by_displaced_call(pc);
      // A return, or code that leaves frames otherwise. Frames on a stack that a signal came in on stay.
      while (!truth_.empty() && !truth_.back().interrupted && regs_.rip != pc && truth_.back().slot < regs_.rsp &&
             regs_.rsp - truth_.back().slot < (1 << 20) && !returning())
        truth_.pop_back();
    }
    while (WSTOPSIG(status_) != SIGTRAP) deliver(WSTOPSIG(status_));
    if (maps_code && memory_) describe();
    return true;
  }

  // A hooked function has returned into its trampoline: the call is over only when the engine jumps to its caller.
  bool returning() const {
    if (!agent_.contains(Addr(regs_.rip)) || agent_.contains(Addr(truth_.back().pc))) return false;
    // From sonde_entry back to the detour by a jump: the word has been taken from the stack one instruction before.
    return !detour_at(truth_.back().pc) || regs_.rsp == truth_.back().slot + 8;
  }

  // A detour carries out a call that it displaced by pushing the address behind it in the program, and a jump.
  void enter_by_displaced_call(uint64_t from) {
    const ArenaDetour* detour = detour_at(from);
    if (!detour || detour_at(regs_.rip) || agent_.contains(Addr(regs_.rip))) return;
    uint64_t top = word(regs_.rsp);
    if (same_function(detour->patch, Addr(regs_.rip)) || !in_patch(*detour, top) ||
        (!truth_.empty() && truth_.back().slot <= regs_.rsp))
      return;
    truth_.push_back({regs_.rsp, top, false});
    counts_.displaced_calls++;
  }

  const ArenaDetour* detour_at(uint64_t pc) const {
    for (const ArenaDetour& detour : detours_)
      if (detour.range.contains(Addr(pc))) return &detour;
    return nullptr;
  }
  bool same_function(Addr a, Addr b) const {
    for (auto& loaded : images_)
      if (loaded.range.contains(a)) {
        auto first = loaded.image->find(loaded.to_image(a)), second = loaded.image->find(loaded.to_image(b));
        return first && second && first->function == second->function;
      }
    return false;
  }
  static bool in_patch(const ArenaDetour& detour, uint64_t pc) { return pc - detour.patch.value <= 5 + 14; }

  // In detours: the return point stands for the patch address; where execution stands or was interrupted, for one of the
  // displaced instructions (which one is planner_test's business).
  bool agrees(const Frame& frame, uint64_t truth, bool exact) const {
    const ArenaDetour* detour = detour_at(truth);
    if (!detour) return frame.pc.value == truth;
    if (!(frame.recovered & kInDetour) || frame.is_return) return false;
    return exact ? in_patch(*detour, frame.pc.value) : frame.pc == detour->patch;
  }

  void deliver(int signal) {
    uint64_t pc = regs_.rip;
    ptrace(PTRACE_SINGLESTEP, pid_, nullptr, static_cast<long>(signal));
    waitpid(pid_, &status_, 0);
    REQUIRE(WIFSTOPPED(status_));
    get_regs();
    truth_.push_back({regs_.rsp + 8, pc, true});
    truth_.push_back({regs_.rsp, word(regs_.rsp), false});
    counts_.signals++;
  }

  void describe() {
    auto images = loaded_images(pid_, nullptr);
    REQUIRE(images);
    images_ = *images;
    auto mappings = read_maps(pid_);
    REQUIRE(mappings);
    ArenaInput input;
    for (auto& loaded : images_)
      if (auto agent = view_agent(loaded)) {
        ProcessMemory now(pid_, *mappings);
        agent_ = loaded.range;
        input.trampolines = agent->trampolines, input.entries = agent->entries;
        input.specials = agent->specials;
        auto detours = published_detours(published_arena(*agent, now), now);
        REQUIRE(detours);
        input.detours = detours_ = *detours;
      }
    for (auto& loaded : images_) {
      auto table = load_table(*loaded.image);
      REQUIRE(table);
      Table view = (*table)->table();
      auto specials = find_specials(loaded, &view);
      input.specials.insert(input.specials.end(), specials.begin(), specials.end());
      input.images.push_back({loaded, *table});
    }
    arena_ = *build_arena(input);
    memory_ = std::make_unique<SteppedMemory>(pid_, *mappings);
  }

  std::vector<Frame> walk(WalkResult* result = nullptr) {
    memory_->at(Addr(regs_.rsp));
    WalkStart<X86_64> start{.regs = regset_of(regs_)};
    start.reliable_only = true;
    AnyMemory any = memory_->any_memory();
    std::vector<Frame> frames(1000);
    WalkResult got =
        sonde::walk(reinterpret_cast<const TableArena*>(arena_.data()), &cache_, any, start, std::span<Frame>(frames));
    frames.resize(got.frames);
    if (result) *result = got;
    return frames;
  }

  void compare() {
    WalkResult result;
    std::vector<Frame> frames = walk(&result);
    std::vector<uint64_t> truth = {regs_.rip};
    std::vector<bool> exact = {true};
    // Without hooks a slot's own content counts: the runtime that throws an exception rewrites return addresses.
    for (size_t i = truth_.size(); i-- > 0;) {
      uint64_t now = truth_[i].pc;
      if (!truth_[i].interrupted && !agent_.begin) memory_->read_as(Addr(truth_[i].slot), &now);
      truth.push_back(now);
      exact.push_back(truth_[i].interrupted);
    }
    for (const Frame& frame : above_) truth.push_back(frame.pc.value), exact.push_back(false);
    if (agent_.contains(Addr(regs_.rip))) seen_in_agent_.insert(regs_.rip);
    counts_.in_detours += detour_at(regs_.rip) != nullptr;
    counts_.steps++;
    counts_.deepest = std::max(counts_.deepest, truth.size());
    bool wrong = result.whole() && frames.size() != truth.size();
    for (size_t i = 0; i < frames.size(); i++)
      if (is_reliable(frames[i].reason)) wrong |= i >= truth.size() || !agrees(frames[i], truth[i], exact[i]);
    if (wrong) counts_.wrong_in[name(frames.front().pc)]++;
    if (wrong && counts_.wrong++ == 0) counts_.first_wrong = show(frames, truth);
    if (result.whole()) return void(counts_.whole++);
    counts_.refused++;
    counts_.reasons[sonde::describe(result.reason)]++;
    counts_.refused_in[name(frames.back().pc, false)]++;
  }

  std::string name(Addr pc, bool offset = true) const {
    for (auto& loaded : images_)
      if (loaded.range.contains(pc)) {
        auto hit = loaded.image->find(loaded.to_image(pc));
        return hit ? display_name(*loaded.image, *hit->function) + (offset ? "+" + std::to_string(hit->offset) : "")
                   : loaded.image->path();
      }
    return "?";
  }
  std::string show(const std::vector<Frame>& frames, const std::vector<uint64_t>& truth) const {
    std::string text;
    for (size_t i = 0; i < std::max(frames.size(), truth.size()); i++) {
      text += "\n  walk " + (i < frames.size() ? name(frames[i].pc) + " " + sonde::describe(frames[i].reason) : "-");
      text += "   truth " + (i < truth.size() ? name(Addr(truth[i])) : "-");
    }
    return text;
  }

  std::string program_;
  pid_t pid_;
  int status_ = 0;
  user_regs_struct regs_;
  std::vector<Call> truth_;
  std::vector<Frame> above_;
  std::vector<LoadedImage> images_;
  AddrRange agent_;
  std::vector<ArenaDetour> detours_;
  std::set<uint64_t> seen_in_agent_;
  std::vector<uint8_t> arena_;
  std::unique_ptr<SteppedMemory> memory_;
  RowCache cache_;
  Counts counts_;
};

}  // namespace sonde::host
