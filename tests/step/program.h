// A real program, unmodified, that stands at an instruction and is carried on by one at a time with its truth (shadow.h) kept.
// How that is done and on which processor is told by those who derive: tracee.h (ptrace), emulated.h (AArch64, qemu). Its
// memory, as it is at the instruction it stands at, serves the walkers.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "core/isa/regset.h"
#include "host/image/maps.h"
#include "host/tables/arena.h"
#include "host/target/memory.h"
#include "tests/step/shadow.h"

namespace sonde::stepping {

struct Command {
  std::vector<std::string> words;
  std::string input;  // file for standard input; "": /dev/null
};

using Registers = std::variant<RegSet<X86_64>, RegSet<Aarch64>>;  // all of them
std::string in_words(const Registers& registers);

// A system call that the program is about to make, as far as somebody here has to know of it.
struct SystemCall {
  enum class Kind : uint8_t { other, map, protect, unmap, remap, action, signal_return, execute };
  Kind kind = Kind::other;
  uint64_t arguments[4] = {};
};

class Program : public host::TargetMemory {
 public:
  virtual Registers registers() const = 0;
  virtual uint64_t pc() const = 0;
  virtual uint64_t sp() const = 0;
  virtual uint64_t entry() const = 0;  // where its own code begins
  virtual const char* architecture() const = 0;

  // One instruction; false if the program has ended or replaced itself.
  virtual bool step(Shadow& shadow) = 0;
  // A signal is delivered here, as if it had come just now; false if the program has ended.
  virtual bool send(int signal, Shadow& shadow) = 0;
  // Runs freely until it is about to execute `pc`, at most for so long; false if it did not come there.
  virtual bool run_to(uint64_t pc, double seconds) = 0;

  pid_t pid() const { return pid_; }
  // Instructions carried out by step(); the rounds of a repeated one count once, but for the first few.
  uint64_t steps() const { return steps_; }
  uint64_t signals() const { return signals_; }
  // How the program ended, in words; "" while it lives.
  const std::string& end() const { return end_; }
  const std::string& file() const { return file_; }
  // Whether the program has called sigaction for it, while it was stepped, with a handler.
  bool handles(int signal) const { return handlers_.contains(static_cast<uint64_t>(signal)); }

  // Changes when code was mapped or unmapped.
  uint64_t code_generation() const { return code_generation_; }
  const std::vector<host::Mapping>& mappings() const { return mappings_; }
  const host::Mapping* mapping(Addr at) const;
  std::vector<host::LoadedImage> images() const { return host::mapped_images(pid_, mappings_, nullptr); }
  // Special code that lies in no image.
  virtual std::vector<host::ArenaSpecial> specials() { return {}; }
  // Above the highest address of the stack that holds `sp`; 0: none.
  uint64_t stack_end(uint64_t sp);
  // Takes a copy of the stack from sp on, from which everything is answered until the next step.
  void look();

  bool read(Addr at, std::span<uint8_t> into) override;
  bool stack_at(Addr sp, AddrRange* stack) override;

 protected:
  explicit Program(pid_t pid) : pid_(pid) {}
  virtual host::Result<std::vector<host::Mapping>> read_mappings() const { return host::read_maps(pid_); }
  virtual Insn classify(std::span<const uint8_t> bytes) const = 0;

  void moved() { window_size_ = 0; }
  void reload();
  const Insn& insn_at(uint64_t pc);
  // Whether the call may change what is mapped executable.
  bool maps_code(const SystemCall& call) const;
  // Remembers what sigaction is told.
  void note_action(const SystemCall& call);
  size_t read_now(Addr at, std::span<uint8_t> into) { return memory_->read_now(at, into); }
  template <class T>
  bool read_now_as(Addr at, T* value) {
    return memory_->read_now(at, {reinterpret_cast<uint8_t*>(value), sizeof *value}) == sizeof *value;
  }

  pid_t pid_;
  std::string end_, file_;
  uint64_t steps_ = 0, signals_ = 0;
  std::unordered_map<uint64_t, uint64_t> handlers_;  // by signal

 private:
  std::vector<host::Mapping> mappings_;
  std::unique_ptr<host::ProcessMemory> memory_;
  uint64_t code_generation_ = 1;
  std::unordered_map<uint64_t, Insn> insns_;
  Insn unkept_;
  uint64_t window_begin_ = 0;
  size_t window_size_ = 0;
  std::vector<uint8_t> window_;
};

}  // namespace sonde::stepping
