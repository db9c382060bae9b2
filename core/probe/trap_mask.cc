#include "core/probe/trap_mask.h"

#include "core/native/syscall.h"
#include "core/native/thread_pointer.h"
#include "core/native/ticks.h"
#include "core/probe/stack_capture.h"
#include "core/probe/thread.h"

namespace sonde {
namespace {

constexpr uint32_t kStates = 8192, kProbed = 64;
TrapMask states[kStates];

uint32_t place_of(uint64_t thread_pointer) {
  return static_cast<uint32_t>((thread_pointer * 0x9e3779b97f4a7c15u) >> 51);  // 13 bits
}
static_assert(kStates == 1u << 13);

uint32_t own_tid() { return static_cast<uint32_t>(system_call(__NR_gettid)); }
uint32_t own_pid() { return static_cast<uint32_t>(system_call(__NR_getpid)); }

constexpr uint32_t kClaimed = ~0u;  // tid of a state that is being filled in

bool is_alive(const TrapMask& state) {
  constexpr int64_t kNoSuchProcess = -3;
  return state.tid == kClaimed || system_call(__NR_tgkill, state.pid, state.tid, 0) != kNoSuchProcess;
}

bool claim(TrapMask& state, uint32_t expected) {
  return __atomic_compare_exchange_n(&state.tid, &expected, kClaimed, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

struct Found {
  TrapMask* own = nullptr;
  TrapMask* parent = nullptr;  // of the parent process, with the same thread pointer
};

[[gnu::always_inline]] inline Found look_up(uint64_t key, uint32_t tid, uint32_t pid) {
  Found found;
  uint32_t parent_pid = 0;
  for (uint32_t i = 0; i < kProbed; i++) {
    TrapMask& state = states[(place_of(key) + i) % kStates];
    uint64_t there = __atomic_load_n(&state.thread_pointer, __ATOMIC_ACQUIRE);
    if (!there) break;
    if (there != key || !state.tid || state.tid == kClaimed) continue;
    if (state.tid == tid && state.pid == pid) {
      found.own = &state;
      return found;
    }
    // Others are of threads that are gone, or of children that shared this memory.
    if (state.pid == pid) continue;
    if (!parent_pid) parent_pid = static_cast<uint32_t>(system_call(__NR_getppid));
    if (state.pid == parent_pid) found.parent = &state;
  }
  return found;
}

// A place for a new state: a free one, or that of a thread that is gone.
TrapMask* take_place(uint64_t key) {
  for (bool crowded : {false, true}) {
    for (uint32_t i = 0; i < kProbed; i++) {
      TrapMask& state = states[(place_of(key) + i) % kStates];
      uint32_t there = __atomic_load_n(&state.tid, __ATOMIC_ACQUIRE);
      bool usable = !there || ((crowded || state.thread_pointer == key) && !is_alive(state));
      if (usable && claim(state, there)) return &state;
    }
  }
  return nullptr;
}

bool blocked_before(const TrapMask& state) { return state.waiting ? state.saved : state.blocked; }

bool may_call() { return !(sonde_agent_control.flags & kControlNoSystemCalls); }

constexpr unsigned kPatience = 1 << 20;
uint64_t action_sequence;  // odd: AgentControl::program_trap is being written

void write_shared_action(const KernelSigaction& action) {
  // No handler of this thread should come in between: it would read what is half written.
  uint64_t all = ~uint64_t{0}, before = 0;
  bool may_block = may_call();
  if (may_block)
    system_call(__NR_rt_sigprocmask, kSetMask, reinterpret_cast<uint64_t>(&all), reinterpret_cast<uint64_t>(&before),
                kMaskBytes);
  uint64_t sequence = __atomic_load_n(&action_sequence, __ATOMIC_RELAXED);
  for (unsigned i = 0;; i++) {  // a forked child may have been copied while another thread wrote
    if (i < kPatience) sequence &= ~uint64_t{1};
    if (__atomic_compare_exchange_n(&action_sequence, &sequence, sequence | 1, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_RELAXED))
      break;
    pause_hint();
  }
  sonde_agent_control.program_trap = action;
  __atomic_store_n(&action_sequence, (sequence | 1) + 1, __ATOMIC_RELEASE);
  if (may_block) system_call(__NR_rt_sigprocmask, kSetMask, reinterpret_cast<uint64_t>(&before), 0, kMaskBytes);
}

KernelSigaction read_shared_action() {
  KernelSigaction action{};
  for (unsigned i = 0; i < kPatience; i++) {
    uint64_t sequence = __atomic_load_n(&action_sequence, __ATOMIC_ACQUIRE);
    action = sonde_agent_control.program_trap;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (!(sequence & 1) && __atomic_load_n(&action_sequence, __ATOMIC_RELAXED) == sequence) break;
    pause_hint();
  }
  return action;
}

}  // namespace

void block_trap() {
  uint64_t trap = kTrapBit;
  system_call(__NR_rt_sigprocmask, kBlock, reinterpret_cast<uint64_t>(&trap), 0, kMaskBytes);
}

namespace {
// Apart from the look-up, which is all that mostly happens, and may happen where there is little stack.
[[gnu::noinline]] TrapMask* make_state(uint64_t key, uint32_t tid, uint32_t pid, bool blocked) {
  TrapMask* state = take_place(key);
  if (!state) return nullptr;
  state->pid = pid;
  state->blocked = blocked;
  state->waiting = state->saved = state->window = state->held = state->own_action = false;
  __atomic_store_n(&state->thread_pointer, key, __ATOMIC_RELEASE);
  if (TrapMask* own = look_up(key, tid, pid).own) {  // a handler came in between and made one
    __atomic_store_n(&state->tid, 0, __ATOMIC_RELEASE);
    return own;
  }
  __atomic_store_n(&state->tid, tid, __ATOMIC_RELEASE);
  return state;
}

[[gnu::noinline]] void hand_state_over(TrapMask* state, SignalContext* context) {
  SignalInfo info = state->pending;
  bool held = state->held;
  if (!state->window) {  // else the kernel has the true mask
    if (context && blocked_before(*state)) context->mask |= kTrapBit;
    if (state->blocked) block_trap();
  }
  state->blocked = state->waiting = state->window = state->held = false;
  if (held) send_trap(&info);
}
}  // namespace

TrapMask* trap_mask(bool make) {
  uint64_t key = thread_pointer();
  if (!key) key = kEarlyKey;
  uint32_t tid = own_tid(), pid = own_pid();
  Found found = look_up(key, tid, pid);
  if (found.own) return found.own;
  bool blocked = found.parent && blocked_before(*found.parent);
  return make || blocked ? make_state(key, tid, pid, blocked) : nullptr;
}

void hand_mask_over(SignalContext* context) {
  TrapMask* state = trap_mask();
  if (state && (state->blocked || state->waiting || state->window || state->held)) hand_state_over(state, context);
}

bool trap_blocked() {
  TrapMask* state = trap_mask();
  return state && state->blocked;
}

void set_trap_blocked(bool blocked) {
  if (TrapMask* state = trap_mask(blocked)) state->blocked = blocked;
}

void forget_trap_mask() {
  if (TrapMask* state = trap_mask()) __atomic_store_n(&state->tid, 0, __ATOMIC_RELEASE);
}

namespace {
[[gnu::noinline]] void send_held(TrapMask* state) {
  SignalInfo info = state->pending;
  state->held = false;
  send_trap(&info);
}
}  // namespace

void deliver_held() {
  TrapMask* state = trap_mask();
  if (state && state->held && !state->blocked) send_held(state);
}

void send_trap(const SignalInfo* info) {
  system_call(__NR_rt_tgsigqueueinfo, own_pid(), own_tid(), kSigtrap, reinterpret_cast<uint64_t>(info));
}

bool in_exec_window() {
  TrapMask* state = trap_mask();
  return state && state->window;
}

void enter_handler(SignalContext* context, bool blocks_trap) {
  TrapMask* state = trap_mask(blocks_trap);
  if (!state) return;
  if (state->window) {
    uint64_t trap = kTrapBit;
    system_call(__NR_rt_sigprocmask, kUnblock, reinterpret_cast<uint64_t>(&trap), 0, kMaskBytes);
    state->window = false;
  }
  if (blocked_before(*state)) context->mask |= kTrapBit;
  state->waiting = false;
  if (blocks_trap) state->blocked = true;
}

void leave_handler(SignalContext* context, bool window) {
  bool blocked = context->mask & kTrapBit;
  if (traps_gone() && !window) {  // the context's mask is the kernel's from now on
    hand_mask_over(nullptr);
    return;
  }
  if (window) {  // back to where the kernel has the true mask
    if (TrapMask* state = trap_mask()) state->window = true, state->blocked = blocked;
    return;
  }
  context->mask &= ~kTrapBit;
  set_trap_blocked(blocked);
  if (!blocked) deliver_held();
}

namespace {
uint32_t* owner_word() {
  void* area = sonde_agent_control.thread_area;
  return area ? &process_mark(area)->pid : nullptr;
}
}  // namespace

uint32_t owner_pid() {
  uint32_t* word = owner_word();
  if (!word) return own_pid();
  uint32_t nobody = 0;
  if (uint32_t owner = __atomic_load_n(word, __ATOMIC_RELAXED)) return owner;
  uint32_t pid = own_pid();
  return __atomic_compare_exchange_n(word, &nobody, pid, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED) ? pid : nobody;
}

bool is_sharing_child() { return may_call() && owner_pid() != own_pid(); }

KernelSigaction program_trap() {
  if (is_sharing_child())
    if (TrapMask* state = trap_mask(); state && state->own_action) return state->action;
  return read_shared_action();
}

void set_program_trap(const KernelSigaction& action) {
  if (!is_sharing_child()) return write_shared_action(action);
  TrapMask* state = trap_mask(true);
  if (!state) return;
  state->action = action;
  state->own_action = true;
}

}  // namespace sonde
