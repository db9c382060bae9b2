// See address_space.h. Limits: Documentation/arch/x86/x86_64/mm.rst (47-bit user space), vm.mmap_min_addr, and the
// kernel's placing of brk behind the program.
#include "host/plan/address_space.h"

#include <algorithm>

namespace sonde::host {
namespace {

constexpr uint64_t kPageMask = 4095;
constexpr uint64_t kLowest = 0x10000, kHighest = 0x7ffffffff000;
constexpr uint64_t kHeapRoom = uint64_t{1} << 30;
constexpr uint64_t kStackRoom = uint64_t{64} << 20, kStackRegion = 0x7ff000000000;

}  // namespace

AddressSpace::AddressSpace(const CodeView& view, std::span<const AddrRange> used) {
  take(0, kLowest);
  take(kHighest, ~uint64_t{0});
  take(view.begin & ~kPageMask, (view.end + kPageMask) & ~kPageMask);
  if (view.main_program) take(view.end, view.end + kHeapRoom);
  for (AddrRange r : used) {
    uint64_t begin = r.begin.value & ~kPageMask, end = (r.end.value + kPageMask) & ~kPageMask;
    if (begin >= kStackRegion) begin -= kStackRoom;
    take(begin, end);
  }
}

std::optional<uint64_t> AddressSpace::closest(uint64_t near, uint64_t from, uint64_t to, uint64_t size) const {
  std::optional<uint64_t> below, above;
  uint64_t free_begin = 0;
  for (auto [begin, end] : taken_) {
    uint64_t low = (std::max(free_begin, from) + kPageMask) & ~kPageMask, high = std::min(begin, to) & ~kPageMask;
    free_begin = end;
    if (low >= high || high - low < size) continue;
    if (high <= near) below = high - size;
    else if (!above) above = low;
  }
  return below ? below : above;
}

}  // namespace sonde::host
