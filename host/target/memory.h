// The memory of a target, looked at from outside: a process that stands or runs, the copy of one taken while it stood.
// core_file.h has that of a dead one. All of them serve the walker through any_memory().
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/walk/memory.h"
#include "host/image/maps.h"

namespace sonde::host {

// How far below its stack's memory sp may stand: a function that has overflowed it has not yet touched what it made room for.
constexpr int64_t kOverflow = 1 << 16;

class TargetMemory {
 public:
  virtual ~TargetMemory() = default;
  // All bytes or false.
  virtual bool read(Addr at, std::span<uint8_t> into) = 0;
  // The memory around sp that may be its stack; it begins at sp if that lies below what there is of an overflowed one.
  virtual bool stack_at(Addr sp, AddrRange* stack) = 0;

  template <class T>
  bool read_as(Addr at, T* value) {
    return read(at, {reinterpret_cast<uint8_t*>(value), sizeof *value});
  }
  AnyMemory any_memory();
};

// A process by its id. Pages are kept once read: make a new one, or forget(), when the process may have changed them.
class ProcessMemory : public TargetMemory {
 public:
  ProcessMemory(pid_t pid, std::vector<Mapping> mappings);
  ~ProcessMemory() override;
  ProcessMemory(const ProcessMemory&) = delete;

  bool read(Addr at, std::span<uint8_t> into) override;
  bool stack_at(Addr sp, AddrRange* stack) override;
  // Past the kept pages; how many bytes from the start could be read.
  size_t read_now(Addr at, std::span<uint8_t> into);
  void forget() { pages_.clear(); }
  const Mapping* mapping(Addr at) const;
  // The writable mapping that holds sp, or the one that it has just overflowed; null if there is none.
  const Mapping* stack_mapping(Addr sp) const;
  // Reads the mappings anew: a stack may have grown, a thread may have come.
  void reload_mappings();

 private:
  static constexpr uint64_t kPageSize = 4096;
  const uint8_t* page(uint64_t number);

  pid_t pid_;
  int mem_ = -1;  // /proc/PID/mem, opened when process_vm_readv fails
  std::vector<Mapping> mappings_;
  std::unordered_map<uint64_t, std::unique_ptr<uint8_t[]>> pages_;  // null: cannot be read
};

// Pieces copied while the target stood; what can change is answered from them alone. What cannot (read-only mappings)
// is read when it is asked for.
class SnapshotMemory : public TargetMemory {
 public:
  explicit SnapshotMemory(std::shared_ptr<ProcessMemory> process) : process_(std::move(process)) {}

  // Copies [at, at + size) or as much of its beginning as there is. Call while the target stands.
  std::span<const uint8_t> copy(Addr at, uint64_t size);
  bool holds(Addr at) const { return piece(at) != nullptr; }
  // Code is answered from these images' files from now on: in memory a probe or a debugger may have put a jump or a trap
  // where the program has a call.
  void use_files(std::vector<LoadedImage> images) { images_ = std::move(images); }

  bool read(Addr at, std::span<uint8_t> into) override;
  bool stack_at(Addr sp, AddrRange* stack) override;

 private:
  struct Piece {
    Addr begin;
    std::vector<uint8_t> bytes;
    Addr end() const { return begin + static_cast<int64_t>(bytes.size()); }
  };
  const Piece* piece(Addr at) const;
  bool read_file(Addr at, std::span<uint8_t> into) const;

  std::shared_ptr<ProcessMemory> process_;
  std::vector<LoadedImage> images_;
  std::vector<Piece> pieces_;  // sorted by begin
};

}  // namespace sonde::host
