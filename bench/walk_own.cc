// sonde's walks of the own thread, as a hit makes them, and what they are held against: a walk by frame pointers, and an
// ideal walk by tables, which remembers every pc and checks nothing.
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "bench/walk_bench.h"
#include "core/walk/arena_view.h"
#include "core/walk/usual_steps.h"
#include "core/walk/walker.h"
#include "host/tables/arena.h"

namespace sonde::bench {
namespace {

const TableArena* arena;
RowCache* rows;

struct ThisThread {
  AddrRange stack;

  uint64_t last_fp, left;
  bool whole;
  Frame frames[kMostFrames];
};
thread_local ThisThread* self;

bool read_elsewhere(Addr address, uint64_t* value) {  // what a hit does for memory it knows nothing of
  iovec to{value, 8}, from{reinterpret_cast<void*>(address.value), 8};
  return process_vm_readv(static_cast<pid_t>(syscall(SYS_gettid)), &to, 1, &from, 1, 0) == 8;
}

struct Here {
  uint64_t pc, sp, rbp, rbx, r12, r13, r14, r15;
};
[[gnu::always_inline]] inline Here here() {
  Here h;
  asm volatile(
      "lea 0(%%rip), %%rax; mov %%rax, %0; mov %%rsp, %1; mov %%rbp, %2; mov %%rbx, %3; mov %%r12, %4; mov %%r13, %5;"
      "mov %%r14, %6; mov %%r15, %7"
      : "=m"(h.pc), "=m"(h.sp), "=m"(h.rbp), "=m"(h.rbx), "=m"(h.r12), "=m"(h.r13), "=m"(h.r14), "=m"(h.r15)
      :
      : "rax");
  return h;
}

unsigned walk_long(const Here& h, bool reliable_only, uint64_t* out) {
  ThisThread& t = *self;
  RawMemory memory;
  memory.stacks[memory.stack_count++] = t.stack;
  memory.other = read_elsewhere;
  WalkStart<X86_64> start;
  start.reliable_only = reliable_only;
  start.regs.set(X86_64::rip, h.pc), start.regs.set(X86_64::rsp, h.sp), start.regs.set(X86_64::rbp, h.rbp);
  start.regs.set(X86_64::rbx, h.rbx), start.regs.set(X86_64::r12, h.r12), start.regs.set(X86_64::r13, h.r13);
  start.regs.set(X86_64::r14, h.r14), start.regs.set(X86_64::r15, h.r15);
  WalkResult result = walk(arena, rows, memory, start, std::span<Frame>(t.frames));
  for (unsigned i = 0; i < result.frames; i++) out[i] = pack_frame(t.frames[i]);
  t.whole = result.whole();
  return result.frames;
}

[[gnu::always_inline]] inline unsigned walk_sonde(const Here& h, bool reliable_only, uint64_t* out) {
  ThisThread& t = *self;
  auto load = [](uint64_t address, uint64_t* value) { return *value = RawMemory::load(Addr(address)), true; };
  UsualState state{h.pc, h.sp, h.rbp, packed_kind(Source::regs_pc, 0, false), t.stack};
  uint64_t* end = usual_steps<X86_64>(arena, *rows, load, false, &state, out, out + kMostFrames);
  if (!state.ended) return t.left++, walk_long(h, reliable_only, out);
  t.whole = true;
  return static_cast<unsigned>(end - out);
}
[[gnu::noinline]] unsigned best_effort(uint64_t* out) { return walk_sonde(here(), false, out); }
[[gnu::noinline]] unsigned reliable(uint64_t* out) { return walk_sonde(here(), true, out); }

[[gnu::noinline]] unsigned frame_pointers(uint64_t* out) {
  const auto* fp = static_cast<const uint64_t*>(__builtin_frame_address(0));
  const auto* last = reinterpret_cast<const uint64_t*>(self->last_fp);
  unsigned count = 0;
  for (; fp != last && count < kMostFrames; fp = reinterpret_cast<const uint64_t*>(fp[0])) out[count++] = fp[1];
  return count;
}

// One word for each pc: enough of it to tell it from others of its place, and the row in a UsualRow's bits.
struct Ideal {
  static constexpr unsigned kBits = 16;
  static constexpr uint64_t kSignal = 8;  // beside kEnd
  uint64_t words[1 << kBits];

  static unsigned place(uint64_t pc) { return (pc >> 4 ^ pc >> 20) & ((1 << kBits) - 1); }
  static uint64_t tag(uint64_t pc) { return (pc >> 20 << 4 | (pc & 15)) << 25; }
};
thread_local Ideal* ideal_rows;

[[gnu::noinline]] uint64_t ideal_row(uint64_t pc, bool exact) {
  ArenaView view(arena);
  Addr at(pc - !exact);
  const ImageEntry* image = view.text(at);
  const SpecialEntry* special = view.special(at);
  if (!special) special = view.special(Addr(pc));
  auto kind = special ? static_cast<SpecialKind>(special->kind) : SpecialKind::vdso;
  if (kind == SpecialKind::outermost) return UsualRow::kEnd;
  if (kind == SpecialKind::signal_return) return UsualRow::kEnd | Ideal::kSignal;
  const Row* row =
      image && view.has_table(*image) ? view.table(*image).lookup(ImageAddr(at.value - image->bias)) : nullptr;
  if (row && row->ra_kind == ValueKind::undefined) return UsualRow::kEnd;
  uint64_t bits = row ? UsualRow::encode(*row, X86_64::kSp, X86_64::kFp) : 0;
  if (!bits) std::fprintf(stderr, "the ideal walk knows no row like that of %#lx\n", pc), std::exit(1);
  return bits;
}

[[gnu::noinline]] unsigned ideal(uint64_t* out) {
  auto load = [](uint64_t address) { return RawMemory::load(Addr(address)); };
  Here h = here();
  uint64_t* words = ideal_rows->words;
  uint64_t pc = h.pc, sp = h.sp, fp = h.rbp;
  unsigned count = 0;
  bool exact = true;
  for (; count < kMostFrames; count++) {
    out[count] = pc;
    uint64_t& word = words[Ideal::place(pc)];
    if (__builtin_expect((word ^ Ideal::tag(pc)) >> 25 != 0, 0)) word = Ideal::tag(pc) | ideal_row(pc, exact);
    if (__builtin_expect(word & UsualRow::kEnd, 0)) {
      if (!(word & Ideal::kSignal)) return count + 1;
      pc = load(sp + 168), fp = load(sp + 120), sp = load(sp + 160), exact = true;
      continue;
    }
    uint64_t below = UsualRow::saved_below(word);
    uint64_t cfa = (word & UsualRow::kByFp ? fp : sp) + UsualRow::offset(word);
    if (below) fp = load(cfa - below);
    pc = load(cfa - 8), sp = cfa, exact = false;
  }
  return count;
}

}  // namespace

void map_tables() {
  host::ArenaInput input;
  auto images = host::loaded_images(getpid(), nullptr);
  if (!images) std::fprintf(stderr, "%s\n", images.error().message.c_str()), std::exit(1);
  for (auto& loaded : *images) {
    auto table = host::load_table(*loaded.image);
    std::optional<Table> view;
    if (table) view = (*table)->table();
    auto specials = host::find_specials(loaded, view ? &*view : nullptr);
    input.specials.insert(input.specials.end(), specials.begin(), specials.end());
    input.images.push_back({loaded, table ? *table : nullptr, true});
  }
  rows = static_cast<RowCache*>(
      mmap(nullptr, sizeof(RowCache), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
  input.row_cache = Addr(reinterpret_cast<uint64_t>(rows));
  auto bytes = host::build_arena(input);
  if (!bytes) std::fprintf(stderr, "%s\n", bytes.error().message.c_str()), std::exit(1);
  constexpr size_t kHuge = size_t{2} << 20;  // as host/target/tables.cc
  size_t size = (bytes->size() + kHuge - 1) & ~(kHuge - 1);
  auto* room =
      static_cast<char*>(mmap(nullptr, size + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  char* block = room + (kHuge - reinterpret_cast<uintptr_t>(room) % kHuge);
  madvise(block, size, MADV_HUGEPAGE);
  std::memcpy(block, bytes->data(), bytes->size());
  mprotect(block, size, PROT_READ);
  arena = reinterpret_cast<const TableArena*>(block);
}

void begin_thread() {
  static thread_local ThisThread here;
  self = &here;
  pthread_attr_t attributes;
  void* low;
  size_t size;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &low, &size);
  pthread_attr_destroy(&attributes);
  self->stack = {Addr(reinterpret_cast<uint64_t>(low)), Addr(reinterpret_cast<uint64_t>(low) + size)};
  ideal_rows =
      static_cast<Ideal*>(mmap(nullptr, sizeof(Ideal), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}
void end_frame_pointers_at(uint64_t fp) { self->last_fp = fp; }
bool last_was_whole() { return self->whole; }
uint64_t left_by_the_short_way() { return self->left; }

std::vector<Walker> own_walkers() {
  return {{.name = "frame pointers (limit)", .walk = frame_pointers, .frame_pointers = true},
          {.name = "ideal table walk", .walk = ideal},
          {.name = "sonde, best effort", .walk = best_effort, .packed = true},
          {.name = "sonde, reliable", .walk = reliable, .packed = true}};
}

}  // namespace sonde::bench
