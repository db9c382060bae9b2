// A real program under ptrace, unmodified: stepped one instruction at a time with its truth (shadow.h) kept, or run freely
// until a time or a place. Only the thread that main() runs in is stepped, others run as they like. Its memory, as it is at
// the instruction it stands at, serves the walkers.
#pragma once

#include <sys/user.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "host/image/maps.h"
#include "host/target/memory.h"
#include "tests/step/shadow.h"

namespace sonde::stepping {

struct Command {
  std::vector<std::string> words;
  std::string input;  // file for standard input; "": /dev/null
};

class Tracee : public host::TargetMemory {
 public:
  // Stands at the very first instruction, in the dynamic linker.
  static host::Result<std::unique_ptr<Tracee>> launch(const Command& command);
  ~Tracee() override;

  pid_t pid() const { return pid_; }
  const user_regs_struct& regs() const { return regs_; }
  // Instructions carried out by step(); the rounds of a repeated one count once, but for the first few.
  uint64_t steps() const { return steps_; }
  uint64_t signals() const { return signals_; }
  // How the program ended, in words; "" while it lives.
  const std::string& end() const { return end_; }

  // Of the program itself: its file, and where its own code begins.
  const std::string& program() const { return program_; }
  uint64_t entry() const;

  // One instruction; false if the program has ended or replaced itself.
  bool step(Shadow& shadow);
  // Whether the program has called sigaction for it, while it was stepped, with a handler.
  bool handles(int signal) const { return handled_ >> signal & 1; }
  // The kernel delivers a signal here, as if it had come just now; false if the program has ended.
  bool send(int signal, Shadow& shadow) { return deliver(signal, shadow); }
  // Runs freely for so much processor time, then stands somewhere; false if it has ended before.
  bool run_for(double seconds);
  // Runs freely until it is about to execute `pc`, at most for so long; false if it did not come there.
  bool run_to(uint64_t pc, double seconds);

  // Changes when code was mapped or unmapped.
  uint64_t code_generation() const { return code_generation_; }
  const std::vector<host::Mapping>& mappings() const { return mappings_; }
  const host::Mapping* mapping(Addr at) const;
  // Above the highest address of the stack that holds `sp`; 0: none.
  uint64_t stack_end(uint64_t sp);
  // Takes a copy of the stack from sp on, from which everything is answered until the next step.
  void look();

  bool read(Addr at, std::span<uint8_t> into) override;
  bool stack_at(Addr sp, AddrRange* stack) override;

 private:
  explicit Tracee(pid_t pid) : pid_(pid) {}
  bool wait();
  bool resume(int request, int signal);
  void get_regs();
  void reload();
  bool deliver(int signal, Shadow& shadow);
  bool finish_repeat(const Insn& insn, Shadow& shadow);
  const Insn& insn_at(uint64_t pc);
  bool maps_code() const;
  void set_breakpoint(uint64_t pc);

  pid_t pid_;
  int status_ = 0;
  user_regs_struct regs_{};
  std::string end_, program_;
  std::vector<host::Mapping> mappings_;
  std::unique_ptr<host::ProcessMemory> memory_;
  uint64_t steps_ = 0, signals_ = 0, code_generation_ = 1;
  int repeats_ = 0;
  uint64_t handled_ = 0;
  std::unordered_map<uint64_t, Insn> insns_;
  Insn unkept_;
  uint64_t window_begin_ = 0;
  size_t window_size_ = 0;
  std::vector<uint8_t> window_;
};

}  // namespace sonde::stepping
