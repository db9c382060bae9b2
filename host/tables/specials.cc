// Code that a walk must know by name: found by symbols where there are some, otherwise by bytes or rows that only this code
// has. What cannot be recognised for certain is not listed; a walk then treats it as ordinary code.
#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "core/isa/aarch64.h"
#include "core/isa/x86_64.h"
#include "host/tables/arena.h"
#include "host/tables/start_files.h"
#include "include/sonde/special.h"

namespace sonde::host {
namespace {

constexpr uint16_t kMachineX86_64 = 62, kMachineAarch64 = 183;
constexpr int64_t kLongestStart = 4096;

class Finder {
 public:
  Finder(const LoadedImage& loaded, const Table* table)
      : loaded_(loaded), image_(*loaded.image), table_(table), x86_(image_.machine() == kMachineX86_64) {}

  std::vector<ArenaSpecial> run() {
    add_declared();
    add_signal_returns();
    add_entry();
    add_context_start();
    add_clone_returns();
    add_resolver();
    add_start_files();
    add_context_loads();
    add_unwound_returns();
    for (const Section& section : image_.sections())
      if (section.addr && (section.name == ".plt" || section.name.starts_with(".plt.") || section.name == ".iplt"))
        add({section.addr, section.addr + static_cast<int64_t>(section.size)}, SpecialKind::plt);
    if (image_.path() == "[vdso]")
      for (const Segment& segment : image_.segments())
        if (segment.executable) add(segment.range, SpecialKind::vdso);
    return std::move(out_);
  }

 private:
  void add(ImageRange range, SpecialKind kind) {
    out_.push_back({{loaded_.to_target(range.begin), loaded_.to_target(range.end)}, kind});
  }

  // What the program says itself, see include/sonde/special.h. Test: "specials: what a program declares".
  void add_declared() {
    const Section* section = image_.section("sonde_special");
    if (!section || !section->addr) return;
    auto bytes = image_.bytes(*section);
    for (size_t at = 0; at + 16 <= bytes.size(); at += 16) {
      int32_t words[3];
      std::memcpy(words, bytes.data() + at, sizeof words);
      ImageAddr here = section->addr + static_cast<int64_t>(at);
      ImageRange range{here + words[0], here + 4 + words[1]};
      if (range.begin < range.end && is_code(range.begin) && is_code(range.end - 1))
        add(range, declared_kind(words[2]));
    }
  }
  static SpecialKind declared_kind(int32_t kind) {
    switch (kind) {
      case SONDE_SPECIAL_OUTERMOST: return SpecialKind::outermost;
      case SONDE_SPECIAL_SIGNAL_RETURN: return SpecialKind::signal_return;
      default: return SpecialKind::unreliable;  // also kinds that a later sonde knows
    }
  }

  // x86-64: mov $15,%rax; syscall. AArch64: mov x8,#139; svc #0. glibc, musl, Go and the kernel's vDSO use exactly these.
  // Test: "specials: the restorer that libc registered with the kernel".
  void add_signal_returns() {
    static constexpr uint8_t kX86[] = {0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05};
    static constexpr uint8_t kAarch64[] = {0x68, 0x11, 0x80, 0xd2, 0x01, 0, 0, 0xd4};
    auto add_one = [&](ImageAddr begin, std::span<const uint8_t> code) {
      add({begin, begin + static_cast<int64_t>(code.size())}, SpecialKind::signal_return);
    };
    if (x86_) search(kX86, [&](ImageAddr at, auto) { add_one(at, kX86); });
    else search(kAarch64, [&](ImageAddr at, auto) { add_one(at, kAarch64); });
  }

  // glibc's __start_context, where a function started by makecontext returns to: mov %rbx,%rsp; mov (%rsp),%rdi;
  // test %rdi,%rdi; je; and hlt at its end. Nobody calls it, so the byte in front, at which its return address is looked
  // up, is padding. Test: "specials: where a function started by makecontext returns to".
  // AArch64: nop; mov x0,x19; cbnz x0,setcontext; b exit.
  // Test: "specials: AArch64 code that changes contexts, and what started ones return to (S20, S29)".
  void add_context_start() {
    static constexpr uint8_t kStart[] = {0x48, 0x89, 0xdc, 0x48, 0x8b, 0x3c, 0x24, 0x48, 0x85, 0xff, 0x74};
    static constexpr uint8_t kAarch64Start[] = {0x1f, 0x20, 0x03, 0xd5, 0xe0, 0x03, 0x13, 0xaa};
    if (!x86_)
      return search(kAarch64Start, [&](ImageAddr at, std::span<const uint8_t> code) {
        if ((insn(code, 2) & 0xff00001f) == 0xb5000000 && (insn(code, 3) & 0xfc000000) == 0x14000000)
          add({at, at + 16}, SpecialKind::outermost);
      });
    search(kStart, [&](ImageAddr at, std::span<const uint8_t> code) {
      for (size_t i = sizeof kStart; i < code.size() && i < 40; i++)
        if (code[i] == 0xf4 && table_ && !table_->lookup(at - 1))
          return add({at - 1, at + static_cast<int64_t>(i) + 1}, SpecialKind::outermost);
    });
  }

  // glibc's clone and clone3: from behind the system call to where parent and child part, the child runs on its new stack
  // by the parent's rows. Pattern: syscall; test %rax,%rax; jl; je child; ret, where the child's row says outermost.
  // Test: "specials: entry point, linker start, vDSO, linkage stubs".
  void add_clone_returns() {
    static constexpr uint8_t kTest[] = {0x0f, 0x05, 0x48, 0x85, 0xc0, 0x7c};
    if (!x86_) return;
    search(kTest, [&](ImageAddr at, std::span<const uint8_t> code) {
      if (code.size() < 10 || code[7] != 0x74 || code[9] != 0xc3) return;
      ImageAddr child = at + 9 + code[8];
      const Row* row = table_ ? table_->lookup(child) : nullptr;
      if (row && row->ra_kind == ValueKind::undefined && !(row->flags & kRowInexpressible) && child < at + 32)
        add({at + 2, child}, SpecialKind::clone_return), add({at, at + 2}, SpecialKind::bare);
    });
  }

  // Test: "specials: start files of every kind of link are recognised to the last byte".
  void add_start_files() {
    if (!x86_) return;
    auto add_all = [&](ImageAddr base, const std::vector<BareCode>& found) {
      for (const BareCode& code : found)
        add({base + static_cast<int64_t>(code.begin), base + static_cast<int64_t>(code.end)}, code.kind);
    };
    for (const Section& section : image_.sections())
      if (section.addr && (section.name == ".init" || section.name == ".fini"))
        add_all(section.addr, find_init(image_.bytes(section)));
    for (const Segment& segment : image_.segments())
      if (segment.executable)
        add_all(segment.range.begin,
                find_crtbegin(code_at(segment.range.begin, static_cast<int64_t>(segment.file_size))));
  }

  // setcontext and swapcontext: from where sp is the new context's to where its pc is pushed, rows say that a return address
  // lies on top of the stack, where there is none: mov 0xa0(%rdx),%rsp; ...; mov 0xa8(%rdx),%rcx; push %rcx.
  // Test: "specials: swapcontext between the new stack pointer and its pc".
  void add_context_loads() {
    static constexpr uint8_t kLoadSp[] = {0x48, 0x8b, 0xa2, 0xa0, 0, 0, 0};
    static constexpr uint8_t kPushPc[] = {0x48, 0x8b, 0x8a, 0xa8, 0, 0, 0, 0x51};
    if (!x86_) return add_aarch64_context_loads();
    search(kLoadSp, [&](ImageAddr at, std::span<const uint8_t> code) {
      code = code.first(std::min<size_t>(code.size(), 96));
      auto push = std::ranges::search(code, kPushPc);
      if (!push.empty())
        add({at + static_cast<int64_t>(sizeof kLoadSp), at + (push.end() - code.begin())}, SpecialKind::unreliable);
    });
  }

  // setcontext: ldp x18,x19,[x0,#328] begins to load, br x16 ends it. swapcontext: from where x30 is the place that it goes on
  // at, stp xzr,x30,[x0,#184]; adr x30, to where that place has got the return address back, mov x30,x1; ret. Rows say all along
  // that it is in x30. Test: "specials: AArch64 code that changes contexts, and what started ones return to (S20, S29)".
  void add_aarch64_context_loads() {
    static constexpr uint8_t kLoad[] = {0x12, 0xcc, 0x54, 0xa9};
    static constexpr uint8_t kSave[] = {0x1f, 0xf8, 0x0b, 0xa9};
    constexpr uint32_t kJump = 0xd61f0200, kRestore = 0xaa0103fe, kReturn = 0xd65f03c0;
    constexpr size_t kFurthest = 64;
    search(kLoad, [&](ImageAddr at, std::span<const uint8_t> code) {
      for (size_t i = 1; i < kFurthest; i++)
        if (insn(code, i) == kJump) return add({at + 4, at + static_cast<int64_t>(i) * 4 + 4}, SpecialKind::unreliable);
    });
    search(kSave, [&](ImageAddr at, std::span<const uint8_t> code) {
      if ((insn(code, 1) & 0x9f00001f) != 0x1000001e) return;
      for (size_t i = 2; i < kFurthest; i++)
        if (insn(code, i) == kRestore && insn(code, i + 1) == kReturn)
          return add({at + 8, at + static_cast<int64_t>(i) * 4 + 4}, SpecialKind::unreliable);
    });
  }

  // libgcc's functions that throw, as add_unwound_returns() has it: a call of uw_install_context_1, one of _Unwind_DebugHook,
  // str,[x29,#8]. All of them then take the registers from their frame, ldp x29,x30,[sp] first, and end with add sp,sp,x4; ret.
  // Test: "specials: AArch64 functions that throw, and the lazy resolver (S20)", step_aarch64_programs.
  void add_aarch64_unwound_returns() {
    static constexpr uint8_t kMove[] = {0xff, 0x63, 0x24, 0x8b, 0xc0, 0x03, 0x5f, 0xd6};
    constexpr uint32_t kLoad = 0xa9407bfd, kStore = 0xf90007a0;
    constexpr size_t kFurthestLoad = 24, kFurthestStore = 1024, kFurthestCall = 16;
    search(kMove, [&](ImageAddr at, std::span<const uint8_t> from) {
      const ImageRange whole = function_around(at);
      auto code = code_at(whole.begin, static_cast<int64_t>(whole.size()));
      const size_t count = code.size() / 4, move = static_cast<size_t>(at - whole.begin) / 4;
      auto address = [&](size_t i) { return whole.begin + static_cast<int64_t>(i) * 4; };
      for (size_t i = move; i-- > 0 && move - i < kFurthestLoad;)
        if (insn(code, i) == kLoad) {
          add({address(i), at + 8}, SpecialKind::unreliable);
          break;
        }
      for (size_t i = 0; i < count && i < kFurthestStore; i++) {
        if ((insn(code, i) & ~31u) != kStore) continue;
        int calls = 0;
        for (size_t k = i; k-- > 0 && i - k < kFurthestCall;)
          if ((insn(code, k) & 0xfc000000) == 0x94000000 && ++calls == 2) {
            add({address(k) + 1, address(i + 2)}, SpecialKind::unreliable);
            break;
          }
      }
    });
  }

  ImageRange function_around(ImageAddr at) const {
    auto hit = image_.find(at);
    return hit ? hit->function->range : ImageRange{at, at};
  }

  // Number `i` of AArch64's instructions in `code`; 0: none.
  static uint32_t insn(std::span<const uint8_t> code, size_t i) {
    uint32_t word = 0;
    if (code.size() >= 4 * i + 4) std::memcpy(&word, code.data() + 4 * i, sizeof word);
    return word;
  }

  // libgcc's functions that throw: one call (of uw_install_context_1) writes the landing pad over their own return address,
  // another (of _Unwind_DebugHook) follows, then sp is moved as well: mov %rcx,%rsp. In between their row leads to the landing
  // pad, as if it had called, with a stack pointer that it never has.
  // Test: "specials: libgcc's functions from where they have written over their return addresses".
  void add_unwound_returns() {
    static constexpr uint8_t kMove[] = {0x48, 0x89, 0xcc};
    constexpr int64_t kFurthest = 192;
    if (!x86_) return add_aarch64_unwound_returns();
    if (!table_) return;
    search(kMove, [&](ImageAddr at, std::span<const uint8_t> code) {
      const Row* row = table_->lookup(at);
      if (!row || row->cfa_kind != CfaKind::reg_offset || row->cfa_reg != X86_64::rcx || code.size() < 8) return;
      auto before = code_at(at - kFurthest, kFurthest);
      int calls = 0;
      for (size_t i = before.size(); i-- > 0 && before.size() == static_cast<size_t>(kFurthest);)
        if (calls_nearby(before, i) && ++calls == 2)
          return add({at - kFurthest + static_cast<int64_t>(i) + 1, at + static_cast<int64_t>(sizeof kMove + 3)},
                     SpecialKind::unreliable);
    });
  }

  static bool calls_nearby(std::span<const uint8_t> code, size_t at) {
    constexpr int32_t kNearby = 1 << 20;
    int32_t distance;
    if (code[at] != 0xe8 || at + 5 > code.size()) return false;
    std::memcpy(&distance, code.data() + at + 1, sizeof distance);
    return -kNearby < distance && distance < kNearby;
  }

  // Calls found(address, code from there on) for each place of `pattern` in executable code.
  template <class Found>
  void search(std::span<const uint8_t> pattern, Found&& found) {
    for (const Segment& segment : image_.segments()) {
      if (!segment.executable) continue;
      auto bytes =
          image_.bytes(ImageRange{segment.range.begin, segment.range.begin + static_cast<int64_t>(segment.file_size)});
      auto rest = bytes;
      while (const void* hit = memmem(rest.data(), rest.size(), pattern.data(), pattern.size())) {
        auto offset = static_cast<const uint8_t*>(hit) - bytes.data();
        rest = bytes.subspan(static_cast<size_t>(offset) + 1);
        found(segment.range.begin + offset, bytes.subspan(static_cast<size_t>(offset)));
      }
    }
  }

  // The kernel starts a program, or its dynamic linker, at the entry point: nobody called that function.
  // Test: "specials: entry point, linker start, vDSO, linkage stubs".
  void add_entry() {
    ImageAddr entry = image_.entry();
    if (!entry || !is_code(entry)) return;
    ImageAddr end = end_of_linker_start(entry);
    if (end == entry) end = end_of_start(entry);
    // A library that can be run by itself (libc) is hardly ever; its many symbols are not read for that.
    bool library = image_.interpreter() && image_.section(".gnu.version_d");
    if (end == entry && !library)
      if (auto hit = image_.find(entry); hit && hit->offset == 0) end = hit->function->range.end;
    if (end > entry) add({entry, end}, SpecialKind::outermost);
  }

  bool is_code(ImageAddr address) const {
    return std::ranges::any_of(image_.segments(), [&](const Segment& segment) {
      return segment.executable && segment.range.contains(address);
    });
  }

  // Code of the file at [begin, begin + size), less where the file ends.
  std::span<const uint8_t> code_at(ImageAddr begin, int64_t size) const {
    for (const Segment& segment : image_.segments())
      if (segment.executable && segment.range.contains(begin)) {
        ImageAddr end = segment.range.begin + static_cast<int64_t>(segment.file_size);
        return image_.bytes(ImageRange{begin, std::clamp(end, begin, begin + size)});
      }
    return {};
  }

  // glibc's dynamic linker: _start and _dl_start_user behind it, from which constructors are called, have no rows:
  // mov %rsp,%rdi; call _dl_start; mov %rax,%r12; ...; jmp *%r12.
  // Test: "specials: entry point, linker start, vDSO, linkage stubs".
  ImageAddr end_of_linker_start(ImageAddr entry) const {
    auto code = x86_ ? code_at(entry, 128) : std::span<const uint8_t>();
    auto has = [&](size_t at, std::initializer_list<uint8_t> bytes) {
      return at + bytes.size() <= code.size() &&
             std::equal(bytes.begin(), bytes.end(), code.begin() + static_cast<long>(at));
    };
    if (!has(0, {0x48, 0x89, 0xe7, 0xe8}) || !has(8, {0x49, 0x89, 0xc4})) return entry;
    for (size_t i = 11; i < code.size(); i++)
      if (has(i, {0x41, 0xff, 0xe4})) return entry + static_cast<int64_t>(i) + 3;
    return entry;
  }

  // As far as rows say "nobody called this", or to the hlt behind glibc's call of __libc_start_main.
  // Test: "specials: entry point, linker start, vDSO, linkage stubs".
  ImageAddr end_of_start(ImageAddr entry) const {
    ImageAddr at = entry;
    for (const Row* row; table_ && at < entry + kLongestStart && (row = table_->lookup(at)) &&
                         row->ra_kind == ValueKind::undefined && !(row->flags & kRowInexpressible);)
      at += 1;
    if (at > entry || !x86_) return at;
    auto bytes = code_at(entry, 64);
    // ff 15 <disp32> f4 (call *disp(%rip); hlt) or 67 e8 <rel32> f4, e8 <rel32> f4
    for (size_t i = 6; i < bytes.size(); i++)
      if (bytes[i] == 0xf4 && ((bytes[i - 6] == 0xff && bytes[i - 5] == 0x15) || bytes[i - 5] == 0xe8))
        return entry + static_cast<int64_t>(i + 1);
    return entry;
  }

  // By symbol; in a stripped dynamic linker by its first row: entered by a jump from the first linkage stub, with two words
  // pushed above the return address. Test: "specials: entry point, linker start, vDSO, linkage stubs".
  // AArch64: only by rows that forget them, Code<Aarch64>::kResolverPushed.
  // Test: "specials: AArch64 functions that throw, and the lazy resolver (S20)".
  void add_resolver() {
    bool linker = image_.entry() && !image_.interpreter() && image_.symbol("__tls_get_addr");
    if (!linker) return;
    for (const Function& function : image_.functions()) {
      bool named = function.name.starts_with("_dl_runtime_resolve");
      if (!x86_) {
        if (forgets_two_words(function.range.begin)) add(function.range, SpecialKind::lazy_resolver);
      } else if (named || (function.name.empty() && x86_ && entered_with_two_words(function.range.begin)))
        add(function.range, SpecialKind::lazy_resolver);
    }
  }

  bool entered_with_two_words(ImageAddr begin) const {
    const Row* row = table_ ? table_->lookup(begin) : nullptr;
    return row && row->cfa_kind == CfaKind::reg_offset && row->cfa_reg == X86_64::rsp && row->cfa_offset == 24 &&
           !in_plt(begin);
  }
  // Behind its first instruction, which is for branch protection: CFA = sp, and the return address above it.
  bool forgets_two_words(ImageAddr begin) const {
    const Row* row = table_ ? table_->lookup(begin + 4) : nullptr;
    return row && !row->flags && row->cfa_kind == CfaKind::reg_offset && row->cfa_reg == Aarch64::sp &&
           row->cfa_offset == 0 && row->ra_kind == ValueKind::at_cfa && row->ra_offset == 8;
  }
  bool in_plt(ImageAddr address) const {
    return std::ranges::any_of(image_.sections(), [&](const Section& section) {
      return section.name.starts_with(".plt") && section.addr <= address &&
             address < section.addr + static_cast<int64_t>(section.size);
    });
  }

  const LoadedImage& loaded_;
  const Image& image_;
  const Table* table_;
  bool x86_;
  std::vector<ArenaSpecial> out_;
};

}  // namespace

// Test: "specials: the kernel's page of return probes, by its name".
std::vector<ArenaSpecial> mapped_specials(std::span<const Mapping> mappings) {
  std::vector<ArenaSpecial> found;
  for (const Mapping& mapping : mappings)  // returned to at its first byte, and looked up one before
    if (mapping.path == "[uprobes]")
      found.push_back({{mapping.range.begin - 1, mapping.range.end}, SpecialKind::unreliable});
  return found;
}

std::vector<ArenaSpecial> find_specials(const LoadedImage& loaded, const Table* table) {
  uint16_t machine = loaded.image->machine();
  if (machine != kMachineX86_64 && machine != kMachineAarch64) return {};
  return Finder(loaded, table).run();
}

}  // namespace sonde::host
