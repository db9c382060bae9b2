// A program for AArch64 on any machine: qemu-aarch64 carries it out and stands between two instructions, asked through its stub
// for debuggers (the GDB manual, appendix "GDB Remote Serial Protocol"; qemu 7.2, gdbstub.c and linux-user). The stub gives
// registers; memory is read from qemu's own, in which the program's addresses are what they are in the program.
//
// What qemu does otherwise than a kernel:
//   - an `svc` does not end a step: the system call and the instruction behind it are one. So is the first instruction of a
//     signal's handler, and the one that a handler returned to. Each is told to the truth for itself
//   - it maps code readable, not executable: which mappings are code is read from the files
//   - handlers return to a page of its own, which is no file's; a kernel has that code in its vDSO, where it is known by the same
//     bytes (host/tables/specials.cc)
#pragma once

#include <unordered_map>

#include "tests/step/program.h"

namespace sonde::stepping {

bool is_for_aarch64(const std::string& file);
// What one instruction does to pc and sp.
Insn aarch64_insn(uint32_t word);

class Emulated : public Program {
 public:
  // Stands at the very first instruction. Dynamically linked programs get the libraries of the cross compiler.
  static host::Result<std::unique_ptr<Emulated>> launch(const Command& command);
  ~Emulated() override;

  Registers registers() const override { return regs_; }
  uint64_t pc() const override { return regs_.pc().value; }
  uint64_t sp() const override { return regs_.sp().value; }
  uint64_t entry() const override { return entry_; }
  const char* architecture() const override { return "AArch64"; }

  std::vector<host::ArenaSpecial> specials() override;

  bool step(Shadow& shadow) override;
  bool send(int signal, Shadow& shadow) override;
  bool run_to(uint64_t pc, double seconds) override;

 private:
  using Program::Program;
  bool connect(const std::string& path);
  bool send_packet(std::string_view packet);
  // Empty: nothing came in time, or the connection is gone.
  std::string answer(double seconds);
  std::string ask(std::string_view packet, double seconds);
  // Lets it run by this packet until it stands again; false if it has ended.
  bool resume(std::string_view packet, double seconds);
  bool get_regs();
  void read_entry();
  uint64_t frame_of(const RegSet<Aarch64>& interrupted);
  bool deliver(int signal, Shadow& shadow);
  SystemCall system_call() const;
  // The instruction at pc was carried out, and perhaps one more behind it (at `next`), before the program stands where it does.
  void stepped_on(uint64_t next, uint64_t next_sp, Shadow& shadow);

  host::Result<std::vector<host::Mapping>> read_mappings() const override;
  Insn classify(std::span<const uint8_t> bytes) const override;

  int socket_ = -1;
  bool acknowledges_ = false;
  int signal_ = 0;  // that it stands for, as the protocol numbers them
  std::string input_;
  RegSet<Aarch64> regs_;
  uint64_t entry_ = 0;
  // Executable segments of the files that are mapped, by path: offsets.
  mutable std::unordered_map<std::string, std::vector<std::pair<uint64_t, uint64_t>>> code_;
};

}  // namespace sonde::stepping
