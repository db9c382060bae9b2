// A process with the agent in it: gives the agent its session, plans and arms sites in every image as it appears, and
// keeps the account of what was armed or refused. All work on the process happens through a stopped Tracee that the
// caller provides; between calls nothing is traced.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/event/session.h"
#include "core/event/sum.h"
#include "host/image/maps.h"
#include "host/plan/plan.h"
#include "host/plan/static_unwinder.h"
#include "host/tables/arena.h"
#include "host/target/agent_file.h"
#include "host/target/threads.h"
#include "host/target/tracee.h"

namespace sonde::host {

// One image that was mapped while the target was recorded. Never removed: trace records refer to it by index.
struct TargetImage {
  LoadedImage loaded;
  bool gone = false;  // unloaded since
  bool stays = false;  // there from the program's first instruction on: loaders never unload such
  SharedTable table = {};                 // with TargetOptions::stacks
  std::optional<StaticUnwinder> unwinder = {};  // without symbols
  bool small_stacks = false;  // has_small_stacks()
  std::vector<ArenaSpecial> specials = {};   // those of the agent always, others with stacks
};

struct TargetSite {
  uint32_t image;     // index into images()
  uint32_t function;  // index into its functions(), kNoFunction for some system calls and refused points
  SitePlan plan;
  uint32_t event_flag = 0;  // kSiteLoader, kSiteSystemCall and so on: the engine itself acts on its hits
  bool internal = false;    // only the engine does: no records
  bool gone = false;  // its image was unloaded
};

// An activation that has begun and not ended.
struct InFlight {
  uint32_t site, tid;
  uint64_t entry_ticks, slot;
  SumCall sum;  // with --sum, else zero
  ExitKind kind;  // unfinished, abandoned (its slot does not lead to it any more), thread_ended or inherited
  AddrRange signal_stack;  // the alternate one that its thread has; empty: none, or not known
};

// What of one image shall be probed.
struct Chosen {
  std::vector<uint32_t> functions;  // indices into image.functions(), ascending
  std::vector<ImageAddr> points;  // instructions (host/plan/places.h), ascending
};
using Selector = std::function<Result<Chosen>(const LoadedImage& image, bool is_program)>;

// A thread's stack, from the lowest address of its memory, and where it had come to when the last hooked slot was released.
struct StackTop {
  Addr begin, sp;
};

struct TargetOptions {
  bool stacks = false;  // a stack per hit
  bool sum = false;  // calls are summed up in the target
  bool allow_traps = false;  // where no jump fits, if the process can have them (host/plan/trap_safety.h)
  bool launched = true;  // install() comes before the program's first instruction
  Addr handle = {};  // else: what dlopen said of the agent
  bool force_traps = false;  // for every function; an error if the process cannot have them
};

class Target {
 public:
  Target(pid_t pid, AgentFile agent, std::string program, Addr syscall_instruction, TargetOptions options)
      : pid_(pid),
        agent_(std::move(agent)),
        program_(std::move(program)),
        syscall_(syscall_instruction),
        options_(options) {}

  // A process in which an agent was left by a recorder that is gone: what there is to detach(). Where the agent came with the
  // program itself it cannot be taken out. (recover.cc)
  static Result<Target> recover(pid_t pid, AgentFile agent);

  // Maps the session and the target's presence (presence.h), both descriptor numbers in the target that are closed there
  // afterwards, and tells the agent.
  Result<void> install(Tracee& tracee, int session_fd, int presence_fd, SessionHeader* session);

  // Looks which images came or went since the last call, and plans and arms the chosen functions of the new ones.
  Result<void> update(Tracee& tracee, const Selector& select);

  // The first update of a process that runs: plans while it does, then stops it for as long as patching takes, as often
  // as threads stand in bytes that change. Sites where one always does are refused as `occupied`. The program's handlers get
  // their entrances in the first of these stops.
  Result<void> arm_running(const Selector& select, std::chrono::nanoseconds* longest_pause);

  // Takes back everything, from a process of the target that runs: code byte for byte, hooked return addresses, memory, the
  // agent itself (of a forked child it stays). Waits for threads that are inside. Value: what had to stay and why, "" if nothing.
  Result<std::string> detach(pid_t pid, std::chrono::nanoseconds* longest_pause);

  // Calls in flight in a process of the target (itself or a forked child), as the agent's entries there say.
  Result<std::vector<InFlight>> in_flight(pid_t pid) const;

  pid_t pid() const { return pid_; }
  std::span<const TargetImage> images() const { return images_; }
  std::span<const TargetSite> sites() const { return sites_; }  // by site number, refused ones included
  std::span<const std::string> problems() const { return problems_; }
  // Why sites that need a trap were refused, or had theirs taken away; "" if none was.
  const std::string& no_traps() const { return no_traps_; }
  // Whether handlers of the program see where they interrupted its own code. Not if a thread of one that ran never left the
  // instructions through which they are installed.
  bool minds_handlers() const { return minds_calls_; }
  Addr agent_address(ImageAddr a) const { return Addr(a.value + agent_bias_); }

 private:
  Result<Addr> agent_system_call() const;
  Result<Addr> map(Tracee& tracee, Addr at, uint64_t size, int protection, int flags, int fd);
  // The plan of an image that was mapped just now, before anything is written.
  struct Planned {
    uint32_t image;
    Chosen chosen;
    std::map<uint32_t, uint32_t> events;
    ImagePlan plan;
  };
  Result<Planned> plan(Tracee& tracee, uint32_t image, Chosen chosen, std::span<const Planned> before);
  void hook_no_returns(NoHijack why);
  Result<void> refuse_differing(Tracee& tracee, SitePlan& site) const;
  Result<bool> look(Tracee& tracee, const Selector& select, std::vector<Planned>* planned);
  Result<void> place(Tracee& tracee, std::span<Planned> planned);
  Result<void> arm(Tracee& tracee, Planned& planned);
  void add_site(TargetSite site);
  Result<std::vector<uint32_t>> patch_stopped(const StoppedProcess& stopped, Tracee& tracee,
                                              std::vector<uint32_t> sites, bool all);
  void refuse_occupied(std::span<const uint32_t> sites);
  Result<void> restore_code(Tracee& tracee, bool calls) const;
  struct WayOut {
    Addr pc;
    int64_t sp_adjust;
    bool call;  // only when system calls have come back
  };
  std::optional<WayOut> way_out(Addr pc) const;
  bool is_inside(class StackTarget& images, const StoppedThread& thread, class ProcessMemory& memory) const;
  // Handlers of a program that runs, in signals.cc.
  Result<void> set_flag(Tracee& tracee, uint32_t flag, bool on);
  Result<void> wrap_handlers(Tracee& tracee);
  Result<void> unwrap_handlers(Tracee& tracee, pid_t pid) const;
  Result<size_t> release_slots(Tracee& tracee) const;
  Result<bool> holds_trampolines(pid_t pid, std::span<const StackTop> tops) const;
  static Result<void> patch(Tracee& tracee, const TargetSite& site);

  // Traps, in traps.cc.
  Result<void> decide_traps(Tracee& tracee, std::span<Planned> planned);
  Result<void> begin_traps(Tracee& tracee);
  Result<void> arm_traps(Tracee& tracee);
  Result<void> disarm_traps(Tracee& tracee);
  Result<std::string> process_obstacle(Tracee& tracee) const;
  Result<std::map<uint32_t, uint32_t>> event_functions(Tracee& tracee, const LoadedImage& loaded);
  Result<void> publish_unwinders(Tracee& tracee);
  Result<void> publish_tables(Tracee& tracee);
  Result<Addr> map_block(Tracee& tracee, uint64_t size);
  void find_tables(TargetImage& image) const;
  ArenaInput arena_input() const;
  Result<std::vector<AddrRange>> used_ranges() const;

  pid_t pid_;
  AgentFile agent_;
  uint64_t agent_bias_ = 0;
  std::string program_;
  Addr syscall_;
  Addr row_cache_;  // of the block published last
  TargetOptions options_;
  NoHijack no_hijack_ = NoHijack::none;  // of all functions, see no_hijack_beside()
  SessionHeader* session_ = nullptr;
  std::vector<TargetImage> images_;
  std::vector<TargetSite> sites_;
  std::vector<std::string> problems_;
  std::vector<AddrRange> mapped_;  // all memory that was made for the engine
  bool minds_calls_ = true;  // system calls of images that are new come by the agent
  bool has_traps_ = false;  // allowed, and possible so far
  bool traps_begun_ = false;  // SIGTRAP is the agent's
  uint32_t traps_seen_ = 0;  // sites below have theirs
  std::string no_traps_;
};

}  // namespace sonde::host
