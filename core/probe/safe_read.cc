#include "core/probe/safe_read.h"

#include "core/native/syscall.h"
#include "core/probe/control.h"

namespace sonde {
namespace {

struct Piece {  // struct iovec
  uint64_t address, bytes;
};

// process_vm_readv on this process. By thread id: after vfork the process id is another's, the memory is the same.
int64_t read_pieces(const Piece* to, unsigned to_count, const Piece* from, unsigned from_count) {
  return system_call(__NR_process_vm_readv, static_cast<uint64_t>(system_call(__NR_gettid)),
                     reinterpret_cast<uint64_t>(to), to_count, reinterpret_cast<uint64_t>(from), from_count, 0);
}
bool may_call() { return !(sonde_agent_control.flags & kControlNoSystemCalls); }

}  // namespace

uint64_t safe_read(uint64_t from, void* to, uint64_t bytes, uint64_t known) {
  if (bytes <= known || !may_call()) {
    if (bytes > known) bytes = known;
    for (uint64_t i = 0; i < bytes; i++) static_cast<char*>(to)[i] = reinterpret_cast<const volatile char*>(from)[i];
    return bytes;
  }
  Piece destination{reinterpret_cast<uint64_t>(to), bytes};
  // In two pieces at the page's end: the kernel stops at the first piece it cannot read.
  uint64_t first = 4096 - from % 4096;
  if (first > bytes) first = bytes;
  Piece source[2] = {{from, first}, {from + first, bytes - first}};
  int64_t got = read_pieces(&destination, 1, source, 2);
  return got < 0 ? 0 : static_cast<uint64_t>(got);
}

void safe_read_words(const uint64_t* addresses, uint64_t* words, bool* found, unsigned count) {
  for (unsigned i = 0; i < count; i++) found[i] = false;
  if (!may_call()) return;
  Piece source[kMaxSafeWords];
  for (unsigned i = 0; i < count; i++) source[i] = {addresses[i], 8};
  for (unsigned i = 0; i < count; i++) {  // each round ends behind a word that cannot be read
    Piece destination{reinterpret_cast<uint64_t>(words + i), (count - i) * 8};
    int64_t got = read_pieces(&destination, 1, source + i, count - i);
    for (; got >= 8; got -= 8) found[i++] = true;
  }
}

}  // namespace sonde
