#include "host/target/memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace sonde::host {

AnyMemory TargetMemory::any_memory() {
  return {this,
          [](void* self, Addr at, uint64_t* value) { return static_cast<TargetMemory*>(self)->read_as(at, value); },
          [](void* self, Addr sp, AddrRange* stack) { return static_cast<TargetMemory*>(self)->stack_at(sp, stack); }};
}

ProcessMemory::ProcessMemory(pid_t pid, std::vector<Mapping> mappings) : pid_(pid), mappings_(std::move(mappings)) {}

ProcessMemory::~ProcessMemory() {
  if (mem_ >= 0) close(mem_);
}

const Mapping* ProcessMemory::mapping(Addr at) const {
  auto found = std::ranges::upper_bound(mappings_, at, {}, [](const Mapping& m) { return m.range.begin; });
  if (found == mappings_.begin() || !std::prev(found)->range.contains(at)) return nullptr;
  return &*std::prev(found);
}

void ProcessMemory::reload_mappings() {
  if (auto now = read_maps(pid_)) mappings_ = std::move(*now);
}

size_t ProcessMemory::read_now(Addr at, std::span<uint8_t> into) {
  size_t done = 0;
  while (done < into.size()) {
    iovec local{into.data() + done, into.size() - done};
    iovec remote{reinterpret_cast<void*>(at.value + done), into.size() - done};
    ssize_t n = process_vm_readv(pid_, &local, 1, &remote, 1, 0);
    if (n <= 0) {
      // Some sandboxes forbid the call, and it refuses pages that are mapped without read permission.
      if (mem_ < 0) mem_ = open(fmt::format("/proc/{}/mem", pid_).c_str(), O_RDONLY | O_CLOEXEC);
      n = mem_ < 0 ? -1 : pread(mem_, into.data() + done, into.size() - done, static_cast<off_t>(at.value + done));
    }
    if (n <= 0) break;
    done += static_cast<size_t>(n);
  }
  return done;
}

const uint8_t* ProcessMemory::page(uint64_t number) {
  auto [found, fresh] = pages_.try_emplace(number);
  if (fresh) {
    auto bytes = std::make_unique<uint8_t[]>(kPageSize);
    if (read_now(Addr(number * kPageSize), {bytes.get(), kPageSize}) == kPageSize) found->second = std::move(bytes);
  }
  return found->second.get();
}

bool ProcessMemory::read(Addr at, std::span<uint8_t> into) {
  if (at.value + into.size() < at.value) return false;
  for (size_t done = 0; done < into.size();) {
    uint64_t address = at.value + done, offset = address % kPageSize;
    const uint8_t* bytes = page(address / kPageSize);
    if (!bytes) return false;
    size_t n = std::min<size_t>(kPageSize - offset, into.size() - done);
    std::memcpy(into.data() + done, bytes + offset, n);
    done += n;
  }
  return true;
}

const Mapping* ProcessMemory::stack_mapping(Addr sp) const {
  const Mapping* found = mapping(sp);
  if (found && found->writable) return found;
  if (found && found->readable) return nullptr;  // no guard page
  auto above = std::ranges::upper_bound(mappings_, sp, {}, [](const Mapping& m) { return m.range.begin; });
  if (above == mappings_.end() || !above->writable || above->range.begin - sp > kOverflow) return nullptr;
  return &*above;
}

bool ProcessMemory::stack_at(Addr sp, AddrRange* stack) {
  const Mapping* found = stack_mapping(sp);
  if (!found || !found->readable) return false;
  *stack = {std::min(sp, found->range.begin), found->range.end};
  return true;
}

const SnapshotMemory::Piece* SnapshotMemory::piece(Addr at) const {
  auto found = std::ranges::upper_bound(pieces_, at, {}, &Piece::begin);
  if (found == pieces_.begin() || at >= std::prev(found)->end()) return nullptr;
  return &*std::prev(found);
}

std::span<const uint8_t> SnapshotMemory::copy(Addr at, uint64_t size) {
  if (const Piece* known = piece(at); known && known->end() - at >= static_cast<int64_t>(size))
    return std::span(known->bytes).subspan(static_cast<size_t>(at - known->begin), size);
  Piece fresh{at, std::vector<uint8_t>(size)};
  fresh.bytes.resize(process_->read_now(at, fresh.bytes));
  if (fresh.bytes.empty()) return {};
  // Pieces it overlaps are older copies of the same standing target: the longer one stays whole.
  std::erase_if(pieces_, [&](const Piece& p) { return fresh.begin <= p.begin && p.end() <= fresh.end(); });
  auto place = std::ranges::upper_bound(pieces_, at, {}, &Piece::begin);
  return pieces_.insert(place, std::move(fresh))->bytes;
}

bool SnapshotMemory::read(Addr at, std::span<uint8_t> into) {
  if (const Piece* found = piece(at)) {
    if (found->end() - at < static_cast<int64_t>(into.size())) return false;
    std::memcpy(into.data(), found->bytes.data() + (at - found->begin), into.size());
    return true;
  }
  const Mapping* mapping = process_->mapping(at);
  if (!mapping || mapping->writable) return false;
  return (mapping->executable && read_file(at, into)) || process_->read(at, into);
}

bool SnapshotMemory::read_file(Addr at, std::span<uint8_t> into) const {
  for (const LoadedImage& loaded : images_) {
    if (!loaded.range.contains(at)) continue;
    ImageAddr begin = loaded.to_image(at), end = begin + static_cast<int64_t>(into.size());
    for (const Segment& s : loaded.image->segments()) {
      if (!s.executable || s.writable || begin < s.range.begin ||
          s.range.begin + static_cast<int64_t>(s.file_size) < end)
        continue;
      auto bytes = loaded.image->bytes(ImageRange{begin, end});
      if (bytes.size() != into.size()) return false;
      return std::memcpy(into.data(), bytes.data(), bytes.size()), true;
    }
  }
  return false;
}

bool SnapshotMemory::stack_at(Addr sp, AddrRange* stack) {
  const Piece* found = piece(sp);
  if (!found) {  // overflowed: the stack's first byte was copied
    const Mapping* mapping = process_->stack_mapping(sp);
    if (mapping && !mapping->range.contains(sp)) found = piece(mapping->range.begin);
  }
  if (!found) return false;
  *stack = {std::min(sp, found->begin), found->end()};
  return true;
}

}  // namespace sonde::host
