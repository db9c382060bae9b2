#include "tests/probe/harness.h"

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
#include "core/native/ticks.h"
#include "core/probe/stack_capture.h"

namespace sonde::test {
namespace {

constexpr uint32_t kSites = 256;

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
  session->sites_offset = sites;
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
  agent_end_ = bias_;
  for (auto& [name, value] : agent_symbols())  // its last object is the pool
    if (bias_ + value + kTrampolines * sizeof(Activation) > agent_end_)
      agent_end_ = bias_ + value + kTrampolines * sizeof(Activation);
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
  control_->unwinders[0] = {bias, bias + symbols["_end"], at("_Unwind_GetIP"), at("_Unwind_SetIP"), at("_Unwind_SetGR"),
                            at("_Unwind_Resume")};
  REQUIRE_OR_DIE(control_->unwinders[0].resume);
  control_->unwinder_count = 1;
}

uint64_t Harness::agent_symbol(const std::string& name) const {
  auto found = agent_symbols().find(name);
  return found == agent_symbols().end() ? 0 : bias_ + found->second;
}

char* Harness::new_arena(uint64_t near) {
  // The first free gap below the program that mmap grants as asked.
  for (uint64_t hint = (near & ~(kArenaBytes - 1)) - (1 << 24); near - hint < 0x60000000; hint -= kArenaBytes) {
    void* pages = mmap(reinterpret_cast<void*>(hint), kArenaBytes, PROT_READ | PROT_WRITE | PROT_EXEC,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (pages != MAP_FAILED) {
      arena_used_ = 8;
      std::memcpy(pages, &entry_, 8);
      return static_cast<char*>(pages);
    }
  }
  REQUIRE_OR_DIE(!"no room for detours");
  return nullptr;
}

uint32_t Harness::hook(void* function, uint32_t flags) {
  using namespace x86_64_detour;
  auto patch = reinterpret_cast<uint64_t>(function);
  auto* code = static_cast<unsigned char*>(function);
  REQUIRE_OR_DIE(std::memcmp(code, "\x90\x90\x90\x90\x90", 5) == 0);
  if (!arena_) arena_ = new_arena(patch);
  uint32_t number = session_->site_count;
  REQUIRE_OR_DIE(number < kSites && arena_used_ + 64 <= kArenaBytes);
  char* header = arena_ + arena_used_;
  arena_used_ += 64;
  char* detour = header + kHeader;
  auto at = reinterpret_cast<uint64_t>(detour);
  auto put32 = [&](int offset, uint64_t value) {
    auto word = static_cast<uint32_t>(value);
    std::memcpy(detour + offset, &word, 4);
  };
  std::memcpy(header, &patch, 8);
  std::memcpy(detour, "\x48\x8d\x64\x24\x80\x68", 6);
  put32(6, number);
  std::memcpy(detour + kCallOffset, "\xff\x15", 2);
  put32(kCallOffset + 2, reinterpret_cast<uint64_t>(arena_) - (at + kReturnOffset));
  std::memcpy(detour + kReturnOffset, "\x48\x8d\xa4\x24\x88\x00\x00\x00\xe9", 9);  // the nops need no copy
  put32(kResumeOffset + 1, patch + 5 - (at + kResumeOffset + 5));
  session_sites(session_)[number] = {patch, patch, at + kResumeOffset, flags | kSiteEnabled, 0};
  __atomic_store_n(&session_->site_count, number + 1, __ATOMIC_RELEASE);
  detours_.push_back(at);

  uint64_t page = patch & ~(kPage - 1);
  REQUIRE_OR_DIE(mprotect(reinterpret_cast<void*>(page), 2 * kPage, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
  unsigned char jump[5] = {0xe9};
  auto displacement = static_cast<uint32_t>(at - (patch + 5));
  std::memcpy(jump + 1, &displacement, 4);
  std::memcpy(code, jump, 5);
  REQUIRE_OR_DIE(mprotect(reinterpret_cast<void*>(page), 2 * kPage, PROT_READ | PROT_EXEC) == 0);
  return number;
}

void Harness::install_trap_handler() {
  auto* action = reinterpret_cast<const KernelSigaction*>(agent_symbol("sonde_trap_action"));
  REQUIRE_OR_DIE(syscall(SYS_rt_sigaction, SIGTRAP, action, &control_->program_trap, 8) == 0);
}

uint32_t Harness::hook_by_trap(void* function, uint32_t flags) {
  auto patch = reinterpret_cast<uint64_t>(function);
  auto* code = static_cast<unsigned char*>(function);
  REQUIRE_OR_DIE(*code == 0x90);
  uint32_t number = session_->site_count;
  session_sites(session_)[number] = {patch, patch, patch + 1, flags | kSiteEnabled, 0};
  __atomic_store_n(&session_->site_count, number + 1, __ATOMIC_RELEASE);
  if (traps_.empty()) install_trap_handler();
  traps_.push_back({patch, number, 0});
  std::sort(traps_.begin(), traps_.end(), [](const TrapSite& a, const TrapSite& b) { return a.pc < b.pc; });
  auto* table = static_cast<TrapTable*>(std::malloc(sizeof(TrapTable) + traps_.size() * sizeof(TrapSite)));
  table->count = traps_.size();
  std::copy(traps_.begin(), traps_.end(), table->sites);
  __atomic_store_n(&control_->traps, table, __ATOMIC_RELEASE);
  auto* page = reinterpret_cast<void*>(patch & ~(kPage - 1));
  REQUIRE_OR_DIE(mprotect(page, kPage, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
  *code = 0xcc;
  REQUIRE_OR_DIE(mprotect(page, kPage, PROT_READ | PROT_EXEC) == 0);
  return number;
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
    uint64_t tail = __atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE), head = ring->head;
    const uint64_t* data = ring_data(ring);
    while (head < tail) {
      const uint64_t* word = data + (head & (session_->ring_bytes - 1)) / 8;
      uint32_t words = record_words(word[0]), site = record_site(word[0]);
      REQUIRE_OR_DIE(words != 0 && head + words * 8 <= tail);
      switch (record_type(word[0])) {
        case RecordType::call:
          records.calls.push_back({site, static_cast<ExitKind>(record_kind(word[0])), record_high(word[0]), word[1], word[2], ring->tid});
          break;
        case RecordType::entry: records.entries.push_back({site, record_high(word[0]), word[1]}); break;
        case RecordType::stack: records.stacks.push_back({site, word[1], {word + kStackHeaderWords, word + words}}); break;
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
