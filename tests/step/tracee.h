// A program of this machine under ptrace. Only the thread that main() runs in is stepped, others run as they like.
#pragma once

#include <sys/user.h>

#include "tests/step/program.h"

namespace sonde::stepping {

class Tracee : public Program {
 public:
  // Stands at the very first instruction, in the dynamic linker.
  static host::Result<std::unique_ptr<Tracee>> launch(const Command& command);
  ~Tracee() override;

  const user_regs_struct& regs() const { return regs_; }
  Registers registers() const override;
  uint64_t pc() const override { return regs_.rip; }
  uint64_t sp() const override { return regs_.rsp; }
  uint64_t entry() const override;
  const char* architecture() const override { return "x86-64"; }

  bool step(Shadow& shadow) override;
  bool send(int signal, Shadow& shadow) override { return deliver(signal, shadow); }
  bool run_to(uint64_t pc, double seconds) override;
  // Runs freely for so much processor time, then stands somewhere; false if it has ended before.
  bool run_for(double seconds);

 private:
  using Program::Program;
  bool wait();
  bool resume(int request, int signal);
  void get_regs();
  Insn classify(std::span<const uint8_t> bytes) const override;
  SystemCall system_call() const;
  bool deliver(int signal, Shadow& shadow);
  bool finish_repeat(const Insn& insn, Shadow& shadow);
  void set_breakpoint(uint64_t pc);

  int status_ = 0;
  user_regs_struct regs_{};
  int repeats_ = 0;
};

}  // namespace sonde::stepping
