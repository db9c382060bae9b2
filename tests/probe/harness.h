// Hooks functions of the test program itself: loads the agent as a library, makes the session and the thread area, and
// writes detours by hand, so that the in-target engine is tested without the host's launcher and planner.
// Hooked functions begin with five one-byte nops (SONDE_HOOKABLE).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/event/session.h"
#include "core/probe/control.h"
#include "core/probe/entries.h"

#define SONDE_HOOKABLE __attribute__((noinline, noclone, patchable_function_entry(5, 0)))

namespace sonde::test {

struct CallRecord {
  uint32_t site;
  ExitKind kind;
  uint32_t slot;
  uint64_t entry, exit;
  uint32_t tid;
};
struct EntryRecord {
  uint32_t site, slot;
  uint64_t ticks;
};
struct StackRecord {
  uint32_t site;
  uint64_t ticks;
  std::vector<uint64_t> frames;
};
struct Records {
  std::vector<CallRecord> calls;  // ring after ring, each in order
  std::vector<CallRecord> inherited;  // that a forked child ends, and its parent counts
  std::vector<EntryRecord> entries;
  std::vector<StackRecord> stacks;
  uint64_t holes = 0;
};

struct HarnessOptions {
  uint64_t ring_bytes = uint64_t{1} << 24;
  uint32_t ring_count = 64;
  FullPolicy policy = FullPolicy::drop;
  std::string agent_path = SONDE_AGENT;
  std::string unwinders_of;  // this executable carries an unwinder of its own: announce it, by its .symtab
};

class Harness {
 public:
  static constexpr uint64_t kArenaBytes = 1 << 16;
  using Options = HarnessOptions;
  explicit Harness(Options options = {});

  // Hooks the function; the site's number. flags: SiteFlags besides kSiteEnabled.
  uint32_t hook(void* function, uint32_t flags = kSiteHijack);
  // The same by a trap on the first of the nops.
  uint32_t hook_by_trap(void* function, uint32_t flags = kSiteHijack);
  // Displaces the instructions in the function's first `length` bytes, which begin at `begins` and may stand anywhere.
  uint32_t hook_over(void* function, std::vector<uint32_t> begins, uint32_t length, uint32_t flags = kSiteHijack);
  // A system call instruction, as kSiteSystemCall: by a jump, which takes the instruction behind it too, or by a trap.
  uint32_t hook_system_call(void* instruction, bool by_trap);
  // All of a loaded library: by jumps where the compare with -errno follows and nothing leads to it, the rest by traps
  // (use_traps first), without them not at all. The number of sites.
  uint32_t hook_system_calls_of(const char* library, bool traps);
  // SIGTRAP is the engine's, the program's own view of it is kept up (kControlTraps).
  void use_traps();
  // Publishes where detours lie and what they stand for, of all sites so far.
  void publish_detours();
  void enable(uint32_t site, bool on);
  void enable_all(bool on);
  void set_state(SessionState state);

  // Everything published so far, consumed.
  Records drain();
  uint64_t lost(LossCause cause) const;  // over all sites
  uint64_t lost_no_thread_state() const { return session_->lost_no_thread_state; }
  uint64_t calls_begun() const;  // over all rings
  uint32_t rings_taken() const;

  bool is_trampoline(uint64_t address) const;
  bool is_agent(uint64_t address) const { return address >= agent_begin_ && address < agent_end_; }
  bool is_detour(uint64_t address) const {
    for (const Arena& arena : arenas_)
      if (address - reinterpret_cast<uint64_t>(arena.begin) < kArenaBytes) return true;
    return false;
  }
  static void write_code(uint64_t at, const void* bytes, uint64_t count);
  // A symbol of the agent file, hidden ones too; 0: none.
  uint64_t agent_symbol(const std::string& name) const;
  AgentControl* control() const { return control_; }
  SessionHeader* session() const { return session_; }
  const std::vector<uint64_t>& detours() const { return detours_; }
  uint64_t site_function(uint32_t site) const { return session_sites(session_)[site].function; }

 private:
  struct Arena {
    char* begin;
    uint64_t used;
  };
  struct Detour {
    uint64_t begin, end, patch;
    uint32_t site;
    std::vector<DetourStepEntry> steps;
  };
  Arena& arena_near(uint64_t address);
  // A detour to a site: its copy of `displaced` bytes, `begins` being where the instructions among them begin.
  uint64_t write_detour(uint64_t patch, uint32_t site, uint32_t displaced, std::vector<uint32_t> begins,
                        uint32_t length);
  uint32_t arm_system_call(void* instruction, bool by_trap);
  void add_trap(uint64_t pc, uint32_t site);
  void install_trap_handler();
  void announce_unwinder(const std::string& path);

  Options options_;
  uint64_t agent_begin_ = 0, agent_end_ = 0, bias_ = 0;
  AgentControl* control_ = nullptr;
  SessionHeader* session_ = nullptr;
  std::vector<Arena> arenas_;
  std::vector<Detour> all_detours_;
  uint64_t entry_ = 0, trampolines_ = 0;
  std::vector<uint64_t> detours_;
  std::vector<TrapSite> traps_;
};

}  // namespace sonde::test
