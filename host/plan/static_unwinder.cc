#include "host/plan/static_unwinder.h"

#include <algorithm>
#include <set>
#include <vector>

#include "host/plan/insn.h"
#include "host/tables/exception_tables.h"

namespace sonde::host {
namespace {

using Bytes = std::span<const uint8_t>;

constexpr uint8_t kLandingPad[] = {0xf3, 0x0f, 0x1e, 0xfa};                              // endbr64
constexpr uint8_t kGetIp[] = {0x48, 0x8b, 0x87, 0x98, 0, 0, 0, 0xc3};                    // mov 0x98(%rdi),%rax; ret
constexpr uint8_t kSetIp[] = {0x48, 0x89, 0xb7, 0x98, 0, 0, 0, 0xc3};                    // mov %rsi,0x98(%rdi); ret
constexpr uint8_t kIsRegister[] = {0x83, 0xfe, 0x11};                                    // cmp $17,%esi
constexpr uint8_t kIsExtended[] = {0xf6, 0x87, 0xc7, 0, 0, 0, 0x40};                     // testb $0x40,0xc7(%rdi)
constexpr uint8_t kIsByValue[] = {0x80, 0xbc, 0x37, 0xd8, 0, 0, 0, 0};                   // cmpb $0,0xd8(%rdi,%rsi)
constexpr uint8_t kStores[] = {0x48, 0x89, 0x11};                                        // mov %rdx,(%rcx)
constexpr uint8_t kStoresValue[] = {0x48, 0x89, 0x14, 0xf7};                             // mov %rdx,(%rdi,%rsi,8)
constexpr uint8_t kKeepsReturnRegisters[] = {0x52, 0x50};                                // push %rdx; push %rax
constexpr size_t kAccessorBytes = 80, kPrologueBytes = 64, kResumeBytes = 512;

bool starts(Bytes code, Bytes with) {
  return code.size() >= with.size() && std::ranges::equal(code.first(with.size()), with);
}
bool contains(Bytes code, Bytes part) { return !std::ranges::search(code, part).empty(); }

Bytes code_of(const Image& image, const Function& f, size_t most) {
  uint64_t size = std::min<uint64_t>(f.range.size(), most);
  Bytes code = image.bytes({f.range.begin, f.range.begin + static_cast<int64_t>(size)});
  return starts(code, kLandingPad) ? code.subspan(std::size(kLandingPad)) : code;
}

bool sets_register(Bytes code) {
  return starts(code, kIsRegister) && contains(code, kIsExtended) && contains(code, kIsByValue) &&
         contains(code, kStores) && contains(code, kStoresValue);
}

// cmpq $0,0x10(any register)
bool looks_at_private_1(Bytes code) {
  for (size_t i = 0; i + 5 <= code.size(); i++) {
    bool rex = code[i] == 0x48 || code[i] == 0x49;
    if (rex && code[i + 1] == 0x83 && (code[i + 2] & 0xf8) == 0x78 && code[i + 3] == 0x10 && code[i + 4] == 0)
      return true;
  }
  return false;
}

bool is_resume(const Image& image, const Function& f) {
  return contains(code_of(image, f, kPrologueBytes), kKeepsReturnRegisters) &&
         looks_at_private_1(code_of(image, f, kResumeBytes));
}

// What the code of landing pads calls, as far as it leads without a return.
std::set<uint64_t> called_from_pads(const Image& image) {
  std::set<uint64_t> seen, called;
  std::vector<uint64_t> paths;
  for (const ThrowingRange& r : read_exception_tables(image).ranges) paths.push_back(r.pad);
  while (!paths.empty()) {
    uint64_t pc = paths.back();
    paths.pop_back();
    auto hit = image.find(ImageAddr(pc));
    while (hit && hit->function->range.contains(ImageAddr(pc)) && seen.insert(pc).second) {
      auto insn = decode(image.bytes({ImageAddr(pc), hit->function->range.end}), pc);
      if (!insn) break;
      if (insn->flow == Flow::call) called.insert(insn->target);
      if (insn->flow == Flow::jump || insn->flow == Flow::branch) paths.push_back(insn->target);
      if (ends_flow(insn->flow)) break;
      pc = insn->next();
    }
  }
  return called;
}

}  // namespace

std::optional<StaticUnwinder> find_static_unwinder(const Image& image) {
  StaticUnwinder found{};
  for (const Function& f : image.functions()) {
    Bytes code = code_of(image, f, kAccessorBytes);
    if (starts(code, kGetIp)) found.get_ip = f.range.begin;
    else if (starts(code, kSetIp)) found.set_ip = f.range.begin;
    else if (sets_register(code)) found.set_gr = f.range.begin;
  }
  if (!found.get_ip || !found.set_ip || !found.set_gr) return std::nullopt;
  for (uint64_t target : called_from_pads(image)) {
    auto hit = image.find(ImageAddr(target));
    if (!hit || hit->offset != 0 || !is_resume(image, *hit->function)) continue;
    if (found.resume) return std::nullopt;
    found.resume = ImageAddr(target);
  }
  if (!found.resume) return std::nullopt;
  return found;
}

}  // namespace sonde::host
