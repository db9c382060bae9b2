#include "tests/probe/harness.h"

#include <Zydis/Zydis.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <gelf.h>
#include <link.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "core/isa/x86_64_detour.h"
#include "core/native/syscall.h"
#include "core/native/ticks.h"
#include "core/probe/stack_capture.h"
#include "core/walk/arena_view.h"

namespace sonde::test {
namespace {

constexpr uint32_t kSites = 2048;

#define REQUIRE_OR_DIE(condition) \
  ((condition) ? (void)0 : (std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition), std::exit(3)))

std::map<std::string, uint64_t> read_symbols(const std::string& path) {
  std::map<std::string, uint64_t> symbols;
  elf_version(EV_CURRENT);
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  REQUIRE_OR_DIE(fd >= 0);
  Elf* elf = elf_begin(fd, ELF_C_READ, nullptr);
  for (Elf_Scn* section = nullptr; (section = elf_nextscn(elf, section));) {
    GElf_Shdr header;
    gelf_getshdr(section, &header);
    if (header.sh_type != SHT_SYMTAB) continue;
    Elf_Data* data = elf_getdata(section, nullptr);
    for (size_t i = 0; i < header.sh_size / header.sh_entsize; i++) {
      GElf_Sym symbol;
      gelf_getsym(data, static_cast<int>(i), &symbol);
      symbols[elf_strptr(elf, header.sh_link, symbol.st_name)] = symbol.st_value;
    }
  }
  elf_end(elf);
  close(fd);
  return symbols;
}

std::map<std::string, uint64_t>& agent_symbols() {
  static std::map<std::string, uint64_t> symbols;
  return symbols;
}

void* map_pages(uint64_t bytes, int protection, int flags, void* hint = nullptr) {
  void* pages = mmap(hint, bytes, protection, flags | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE_OR_DIE(pages != MAP_FAILED);
  return pages;
}

SessionHeader* make_session(const HarnessOptions& options) {
  uint64_t sites = kPage, counters = sites + kSites * sizeof(Site);
  uint64_t rings = (counters + kSites * sizeof(SiteCounters) + kPage - 1) / kPage * kPage;
  uint64_t size = rings + options.ring_count * (kPage + options.ring_bytes);
  auto* session = static_cast<SessionHeader*>(map_pages(size, PROT_READ | PROT_WRITE, MAP_SHARED));
  session->magic = kSessionMagic;
  session->size = size;
  session->counters_offset = counters;
  session->rings_offset = rings;
  session->ring_bytes = options.ring_bytes;
  session->ring_count = options.ring_count;
  session->policy = options.policy;
  session->heartbeat_timeout_ticks = uint64_t{1} << 40;
  session->heartbeat_ticks = ticks();
  session->state = static_cast<uint32_t>(SessionState::recording);
  return session;
}

}  // namespace

Harness::Harness(Options options) : options_(options) {
  void* handle = dlopen(options.agent_path.c_str(), RTLD_NOW);
  if (!handle) std::fprintf(stderr, "%s\n", dlerror());
  REQUIRE_OR_DIE(handle);
  link_map* map = nullptr;
  REQUIRE_OR_DIE(dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0);
  bias_ = map->l_addr;
  agent_symbols() = read_symbols(options.agent_path);
  agent_begin_ = bias_;
  agent_end_ = bias_ + agent_symbols()["_end"];
  control_ = reinterpret_cast<AgentControl*>(agent_symbol("sonde_agent_control"));
  entry_ = agent_symbol("sonde_entry");
  trampolines_ = agent_symbol("sonde_trampolines");
  REQUIRE_OR_DIE(control_->version == kAgentVersion && entry_ != bias_ && trampolines_ != bias_);
  control_->thread_area = map_pages(thread_area_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE);
  REQUIRE_OR_DIE(madvise(control_->thread_area, thread_area_bytes(), MADV_WIPEONFORK) == 0);
  control_->loader_debug = reinterpret_cast<uint64_t>(&_r_debug);
  session_ = make_session(options);
  control_->session = session_;
  if (!options.unwinders_of.empty()) announce_unwinder(options.unwinders_of);
}

void Harness::announce_unwinder(const std::string& path) {
  auto symbols = read_symbols(path);
  uint64_t bias = _r_debug.r_map->l_addr;
  auto at = [&](const char* name) { return symbols.count(name) ? symbols[name] + bias : 0; };
  control_->unwinders[0] = {bias,
                            bias + symbols["_end"],
                            at("_Unwind_GetIP"),
                            at("_Unwind_SetIP"),
                            at("_Unwind_SetGR"),
                            at("_Unwind_Resume")};
  REQUIRE_OR_DIE(control_->unwinders[0].resume);
  control_->unwinder_count = 1;
}

uint64_t Harness::agent_symbol(const std::string& name) const {
  auto found = agent_symbols().find(name);
  return found == agent_symbols().end() ? 0 : bias_ + found->second;
}

// The arena that detours to code at `address` can be reached from; a new one in the first free gap below that mmap grants.
Harness::Arena& Harness::arena_near(uint64_t address) {
  for (Arena& arena : arenas_) {
    uint64_t distance = address - reinterpret_cast<uint64_t>(arena.begin);
    if (distance + (1 << 24) < 0x70000000 && arena.used + 128 <= kArenaBytes) return arena;
  }
  for (uint64_t hint = (address & ~(kArenaBytes - 1)) - (1 << 24); address - hint < 0x60000000; hint -= kArenaBytes) {
    void* pages = mmap(reinterpret_cast<void*>(hint), kArenaBytes, PROT_READ | PROT_WRITE | PROT_EXEC,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (pages == MAP_FAILED) continue;
    std::memcpy(pages, &entry_, 8);
    arenas_.push_back({static_cast<char*>(pages), 8});
    return arenas_.back();
  }
  REQUIRE_OR_DIE(!"no room for detours");
  std::abort();
}

uint64_t Harness::write_detour(uint64_t patch, uint32_t site, uint32_t displaced, std::vector<uint32_t> begins,
                               uint32_t length) {
  using namespace x86_64_detour;
  Arena& arena = arena_near(patch);
  char* header = arena.begin + arena.used;
  arena.used += 96;
  char* detour = header + kHeader;
  auto at = reinterpret_cast<uint64_t>(detour);
  auto put32 = [&](int offset, uint64_t value) {
    auto word = static_cast<uint32_t>(value);
    std::memcpy(detour + offset, &word, 4);
  };
  uint64_t return_point = at + kReturnOffset;
  std::memcpy(header, &return_point, 8);
  std::memcpy(header + 8, &patch, 8);
  std::memcpy(detour, "\x48\x8d\x64\x24\x80\x68", 6);
  put32(6, site);
  std::memcpy(detour + kPushReturnOffset, "\xff\x35", 2);
  put32(kPushReturnOffset + 2, static_cast<uint64_t>(-kHeader - kJumpOffset));
  std::memcpy(detour + kJumpOffset, "\xff\x25", 2);
  put32(kJumpOffset + 2, reinterpret_cast<uint64_t>(arena.begin) - (at + kReturnOffset));
  std::memcpy(detour + kReturnOffset, "\x48\x8d\xa4\x24\x88\x00\x00\x00", 8);
  std::memcpy(detour + kResumeOffset, reinterpret_cast<void*>(patch), displaced);
  int jump = kResumeOffset + static_cast<int>(displaced);
  detour[jump] = '\xe9';
  put32(jump + 1, patch + length - (at + static_cast<uint64_t>(jump) + 5));
  Detour known{at, at + static_cast<uint64_t>(jump) + 5, patch, site, {}};
  auto step = [&](int offset, int original, int sp_adjust) {
    known.steps.push_back(
        {static_cast<uint16_t>(offset), static_cast<int16_t>(original), static_cast<int16_t>(sp_adjust), 0});
  };
  step(0, -1, 0), step(kPushOffset, -1, 128), step(kPushReturnOffset, -1, 136), step(kJumpOffset, -1, 144);
  step(kReturnOffset, -1, 136);
  for (uint32_t begin : begins) step(kResumeOffset + static_cast<int>(begin), static_cast<int>(begin), 0);
  step(jump, static_cast<int>(length), 0);
  all_detours_.push_back(known);
  detours_.push_back(at);
  return at;
}

void Harness::write_code(uint64_t at, const void* bytes, uint64_t count) {
  auto* page = reinterpret_cast<void*>(at & ~(kPage - 1));
  REQUIRE_OR_DIE(mprotect(page, 2 * kPage, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
  std::memcpy(reinterpret_cast<void*>(at), bytes, count);
  REQUIRE_OR_DIE(mprotect(page, 2 * kPage, PROT_READ | PROT_EXEC) == 0);
}

namespace {
void write_jump(uint64_t from, uint64_t to, void (*write)(uint64_t, const void*, uint64_t)) {
  unsigned char jump[5] = {0xe9};
  auto displacement = static_cast<uint32_t>(to - (from + 5));
  std::memcpy(jump + 1, &displacement, 4);
  write(from, jump, 5);
}
}  // namespace

uint32_t Harness::hook(void* function, uint32_t flags) {
  auto patch = reinterpret_cast<uint64_t>(function);
  REQUIRE_OR_DIE(std::memcmp(function, "\x90\x90\x90\x90\x90", 5) == 0);
  uint32_t number = session_->site_count;
  REQUIRE_OR_DIE(number < kSites);
  uint64_t at = write_detour(patch, number, 0, {}, 5);  // the nops need no copy
  session_sites(session_)[number] = {patch, patch, at + x86_64_detour::kResumeOffset, flags | kSiteEnabled, 0};
  __atomic_store_n(&session_->site_count, number + 1, __ATOMIC_RELEASE);
  write_jump(patch, at, write_code);
  return number;
}

uint32_t Harness::hook_over(void* function, std::vector<uint32_t> begins, uint32_t length, uint32_t flags) {
  auto patch = reinterpret_cast<uint64_t>(function);
  uint32_t number = session_->site_count;
  REQUIRE_OR_DIE(number < kSites && length >= 5);
  uint64_t at = write_detour(patch, number, length, begins, length);
  session_sites(session_)[number] = {patch, patch, at + x86_64_detour::kResumeOffset, flags | kSiteEnabled, 0};
  __atomic_store_n(&session_->site_count, number + 1, __ATOMIC_RELEASE);
  publish_detours();
  write_jump(patch, at, write_code);
  return number;
}

void Harness::install_trap_handler() {
  auto* action = reinterpret_cast<const KernelSigaction*>(agent_symbol("sonde_trap_action"));
  // By an instruction that is no site, as the host does it.
  REQUIRE_OR_DIE(system_call(SYS_rt_sigaction, SIGTRAP, reinterpret_cast<uint64_t>(action),
                             reinterpret_cast<uint64_t>(&control_->program_trap), 8) == 0);
}

void Harness::use_traps() {
  if (traps_.empty()) install_trap_handler();
  __atomic_fetch_or(&control_->flags, uint32_t{kControlTraps}, __ATOMIC_RELEASE);
}

void Harness::add_trap(uint64_t pc, uint32_t site) {
  traps_.push_back({pc, site, *reinterpret_cast<const uint8_t*>(pc)});
  std::sort(traps_.begin(), traps_.end(), [](const TrapSite& a, const TrapSite& b) { return a.pc < b.pc; });
  auto* table = static_cast<TrapTable*>(std::malloc(sizeof(TrapTable) + traps_.size() * sizeof(TrapSite)));
  table->count = traps_.size();
  std::copy(traps_.begin(), traps_.end(), table->sites);
  __atomic_store_n(&control_->traps, table, __ATOMIC_RELEASE);
  write_code(pc, "\xcc", 1);
}

uint32_t Harness::hook_by_trap(void* function, uint32_t flags) {
  auto patch = reinterpret_cast<uint64_t>(function);
  REQUIRE_OR_DIE(*static_cast<unsigned char*>(function) == 0x90);
  uint32_t number = session_->site_count;
  session_sites(session_)[number] = {patch, patch, patch + 1, flags | kSiteEnabled, 0};
  __atomic_store_n(&session_->site_count, number + 1, __ATOMIC_RELEASE);
  if (traps_.empty() && !(control_->flags & kControlTraps)) install_trap_handler();
  add_trap(patch, number);
  return number;
}

namespace {

// What may move with a system call instruction: cmp $imm32,%rax or %eax, or a nop. Its length, or 0.
uint32_t movable_behind(const unsigned char* instruction) {
  if (std::memcmp(instruction + 2, "\x0f\x1f\x00", 3) == 0) return 3;
  if (std::memcmp(instruction + 2, "\x48\x3d", 2) == 0) return 6;
  return instruction[2] == 0x3d ? 5 : 0;
}

struct Decoded {
  std::vector<uint64_t> system_calls;
  std::vector<uint64_t> targets;  // of direct branches, sorted
};

Decoded decode(uint64_t begin, uint64_t end) {
  ZydisDecoder decoder;
  ZydisDecoderInit(&decoder, ZYDIS_MACHINE_MODE_LONG_64, ZYDIS_STACK_WIDTH_64);
  Decoded found;
  for (uint64_t at = begin; at < end;) {
    ZydisDecodedInstruction insn;
    if (!ZYAN_SUCCESS(ZydisDecoderDecodeInstruction(&decoder, nullptr, reinterpret_cast<void*>(at), end - at, &insn))) {
      at++;
      continue;
    }
    if (insn.mnemonic == ZYDIS_MNEMONIC_SYSCALL) found.system_calls.push_back(at);
    if (insn.raw.imm[0].is_relative)
      found.targets.push_back(at + insn.length + static_cast<uint64_t>(insn.raw.imm[0].value.s));
    at += insn.length;
  }
  std::sort(found.targets.begin(), found.targets.end());
  return found;
}

}  // namespace

uint32_t Harness::hook_system_call(void* instruction, bool by_trap) {
  uint32_t number = arm_system_call(instruction, by_trap);
  publish_detours();
  return number;
}

uint32_t Harness::arm_system_call(void* instruction, bool by_trap) {
  auto patch = reinterpret_cast<uint64_t>(instruction);
  auto* code = static_cast<const unsigned char*>(instruction);
  REQUIRE_OR_DIE(std::memcmp(code, "\x0f\x05", 2) == 0);
  uint32_t number = session_->site_count, behind = by_trap ? 0 : movable_behind(code);
  REQUIRE_OR_DIE(number < kSites && (by_trap || behind));
  std::vector<uint32_t> begins{0};
  if (behind) begins.push_back(2);
  uint64_t at = write_detour(patch, number, 2 + behind, begins, 2 + behind);
  session_sites(session_)[number] = {patch, patch, at + x86_64_detour::kResumeOffset,
                                     kSiteEnabled | kSiteSilent | kSiteSystemCall, 0};
  __atomic_store_n(&session_->site_count, number + 1, __ATOMIC_RELEASE);
  if (by_trap) add_trap(patch, number);
  else write_jump(patch, at, write_code);
  return number;
}

uint32_t Harness::hook_system_calls_of(const char* library, bool traps) {
  struct Text {
    const char* library;
    uint64_t begin = 0, end = 0;
  } text{library};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto* wanted = static_cast<Text*>(data);
        if (!std::strstr(info->dlpi_name, wanted->library)) return 0;
        for (int i = 0; i < info->dlpi_phnum; i++)
          if (info->dlpi_phdr[i].p_type == PT_LOAD && info->dlpi_phdr[i].p_flags & PF_X)
            wanted->begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr,
            wanted->end = wanted->begin + info->dlpi_phdr[i].p_memsz;
        return 1;
      },
      &text);
  REQUIRE_OR_DIE(text.begin);
  static std::map<std::string, Decoded> decoded;  // as the library was before any of it was patched
  if (!decoded.count(library)) decoded[library] = decode(text.begin, text.end);
  const Decoded& found = decoded[library];
  uint32_t hooked = 0;
  for (uint64_t at : found.system_calls) {
    auto* code = reinterpret_cast<unsigned char*>(at);
    if (std::memcmp(code, "\x0f\x05", 2) != 0) continue;  // hooked already
    if (std::memcmp(code - 7, "\x48\xc7\xc0\x0f\0\0\0", 7) == 0) continue;  // the restorer
    auto lead_into = std::upper_bound(found.targets.begin(), found.targets.end(), at);
    bool jump = movable_behind(code) && (lead_into == found.targets.end() || *lead_into >= at + 5);
    if (!jump && !traps) continue;
    arm_system_call(code, !jump);
    hooked++;
  }
  publish_detours();
  return hooked;
}

void Harness::publish_detours() {
  auto sorted = all_detours_;
  std::sort(sorted.begin(), sorted.end(), [](const Detour& a, const Detour& b) { return a.begin < b.begin; });
  uint64_t steps = 0;
  for (const Detour& detour : sorted) steps += detour.steps.size();
  uint64_t detours_at = sizeof(TableArena), steps_at = detours_at + sorted.size() * sizeof(DetourEntry);
  uint64_t size = steps_at + steps * sizeof(DetourStepEntry);
  auto* arena = static_cast<TableArena*>(std::calloc(1, size));  // an older one stays: a handler may be reading it
  static uint64_t generation;
  arena->size = size, arena->generation = ++generation;
  arena->detours_offset = detours_at, arena->steps_offset = steps_at;
  arena->detour_count = static_cast<uint32_t>(sorted.size()), arena->step_count = static_cast<uint32_t>(steps);
  auto* entry = reinterpret_cast<DetourEntry*>(reinterpret_cast<char*>(arena) + detours_at);
  auto* step = reinterpret_cast<DetourStepEntry*>(reinterpret_cast<char*>(arena) + steps_at);
  uint32_t first = 0;
  for (const Detour& detour : sorted) {
    auto count = static_cast<uint32_t>(detour.steps.size());
    *entry++ = {detour.begin, detour.end, detour.patch, detour.site, first, count, 0};
    step = std::copy(detour.steps.begin(), detour.steps.end(), step);
    first += count;
  }
  publish_arena(control_->tables, arena);
}

void Harness::enable(uint32_t site, bool on) {
  uint32_t* flags = &session_sites(session_)[site].flags;
  if (on) __atomic_fetch_or(flags, kSiteEnabled, __ATOMIC_RELAXED);
  else __atomic_fetch_and(flags, ~uint32_t{kSiteEnabled}, __ATOMIC_RELAXED);
}

void Harness::enable_all(bool on) {
  for (uint32_t site = 0; site < session_->site_count; site++) enable(site, on);
}

void Harness::set_state(SessionState state) {
  __atomic_store_n(&session_->state, static_cast<uint32_t>(state), __ATOMIC_RELEASE);
}

Records Harness::drain() {
  Records records;
  for (uint32_t i = 0; i < session_->rings_taken; i++) {
    RingHeader* ring = ring_header(session_, i);
    uint64_t tail = ring_committed(ring), head = ring->head;
    const uint64_t* data = ring_data(ring);
    while (head < tail) {
      const uint64_t* word = data + (head & (session_->ring_bytes - 1)) / 8;
      uint32_t words = record_words(word[0]), site = record_site(word[0]);
      REQUIRE_OR_DIE(words != 0 && head + words * 8 <= tail);
      switch (record_type(word[0])) {
        case RecordType::call:
        case RecordType::inherited:
          (record_type(word[0]) == RecordType::call ? records.calls : records.inherited)
              .push_back({site, static_cast<ExitKind>(record_kind(word[0])), record_high(word[0]), word[1], word[2],
                          ring->tid});
          break;
        case RecordType::entry: records.entries.push_back({site, record_high(word[0]), word[1]}); break;
        case RecordType::stack:
          records.stacks.push_back({site, word[1], {word + kStackHeaderWords, word + words}});
          break;
        default: records.holes++;
      }
      head += uint64_t{words} * 8;
    }
    __atomic_store_n(&ring->head, head, __ATOMIC_RELEASE);
    if (__atomic_load_n(&ring->state, __ATOMIC_ACQUIRE) == static_cast<uint32_t>(RingState::ended))
      __atomic_store_n(&ring->state, static_cast<uint32_t>(RingState::free), __ATOMIC_RELEASE);
  }
  return records;
}

uint64_t Harness::lost(LossCause cause) const {
  uint64_t sum = 0;
  for (uint32_t site = 0; site < session_->site_count; site++)
    sum += session_counters(session_)[site].lost[static_cast<unsigned>(cause)];
  return sum;
}

uint64_t Harness::calls_begun() const {
  uint64_t sum = 0;
  for (uint32_t i = 0; i < session_->rings_taken; i++) sum += ring_header(session_, i)->calls;
  return sum;
}

uint32_t Harness::rings_taken() const { return session_->rings_taken; }

bool Harness::is_trampoline(uint64_t address) const {
  return address - trampolines_ < uint64_t{kTrampolines} * kTrampolineStride;
}

}  // namespace sonde::test
