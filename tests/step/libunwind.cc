#include <libunwind-ptrace.h>
#include <libunwind.h>

#include "tests/step/peers.h"

namespace sonde::stepping {

struct Libunwind::State {
  unw_addr_space_t space;
  void* process;
  uint64_t generation = 0;
};

namespace {

// libunwind finds tables by its own ptrace support, which passes its own argument on to the accessors. Memory and registers it
// gets from here: reading each word by ptrace would take the most part of the time. There is one tracee at a time.
Tracee* current;

int access_memory(unw_addr_space_t, unw_word_t at, unw_word_t* value, int write, void*) {
  uint64_t word = 0;
  if (write || !current->read_as(Addr(at), &word)) return -UNW_EINVAL;
  *value = word;
  return 0;
}

int access_register(unw_addr_space_t, unw_regnum_t reg, unw_word_t* value, int write, void*) {
  const user_regs_struct& r = current->regs();
  const unw_word_t words[] = {r.rax, r.rdx, r.rcx, r.rbx, r.rsi, r.rdi, r.rbp, r.rsp, r.r8,
                              r.r9,  r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rip};
  if (write || reg < 0 || static_cast<size_t>(reg) >= std::size(words)) return -UNW_EBADREG;
  *value = words[reg];
  return 0;
}

}  // namespace

Libunwind::Libunwind(Tracee& tracee) : tracee_(tracee), state_(std::make_unique<State>()) {
  static unw_accessors_t ours = _UPT_accessors;
  ours.access_mem = access_memory, ours.access_reg = access_register;
  current = &tracee;
  state_->space = unw_create_addr_space(&ours, 0);
  state_->process = _UPT_create(tracee.pid());
  unw_set_caching_policy(state_->space, UNW_CACHE_GLOBAL);
}

Libunwind::~Libunwind() {
  _UPT_destroy(state_->process);
  unw_destroy_addr_space(state_->space);
}

Chain Libunwind::chain(size_t limit) {
  if (state_->generation != tracee_.code_generation()) {
    state_->generation = tracee_.code_generation();
    unw_flush_cache(state_->space, 0, 0);
    _UPT_destroy(state_->process);
    state_->process = _UPT_create(tracee_.pid());
  }
  Chain chain;
  unw_cursor_t cursor;
  if (unw_init_remote(&cursor, state_->space, state_->process) != 0) return chain;
  do {
    unw_word_t pc = 0, sp = 0;
    if (unw_get_reg(&cursor, UNW_REG_IP, &pc) != 0) break;
    // libunwind ends a stack whose outermost frame has no caller with a frame of its own at 0.
    if (pc == 0 && !chain.pcs.empty()) break;
    unw_get_reg(&cursor, UNW_REG_SP, &sp);
    chain.pcs.push_back(pc), chain.sps.push_back(sp);
  } while (chain.pcs.size() < limit && unw_step(&cursor) > 0);
  return chain;
}

}  // namespace sonde::stepping
