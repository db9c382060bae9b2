#include <elfutils/libdwfl.h>

#include "tests/step/peers.h"

namespace sonde::stepping {

struct Libdw::State {
  Dwfl* dwfl = nullptr;
  uint64_t generation = 0;
};

namespace {

constexpr Dwfl_Callbacks kCallbacks = {.find_elf = dwfl_linux_proc_find_elf,
                                       .find_debuginfo = dwfl_standard_find_debuginfo,
                                       .section_address = nullptr,
                                       .debuginfo_path = nullptr};

Tracee& tracee_of(void* argument) { return *static_cast<Tracee*>(argument); }

constexpr Dwfl_Thread_Callbacks kThreads = {
    .next_thread = [](Dwfl*, void* argument, void** thread_argument) -> pid_t {
      if (*thread_argument) return 0;  // there is but one
      *thread_argument = argument;
      return tracee_of(argument).pid();
    },
    .get_thread = nullptr,
    .memory_read =
        [](Dwfl*, Dwarf_Addr at, Dwarf_Word* result, void* argument) {
          uint64_t word = 0;
          bool has = tracee_of(argument).read_as(Addr(at), &word);
          *result = word;
          return has;
        },
    .set_initial_registers =
        [](Dwfl_Thread* thread, void* argument) {
          const user_regs_struct& r = tracee_of(argument).regs();
          const Dwarf_Word words[] = {r.rax, r.rdx, r.rcx, r.rbx, r.rsi, r.rdi, r.rbp, r.rsp, r.r8,
                                      r.r9,  r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rip};
          return dwfl_thread_state_registers(thread, 0, std::size(words), words);
        },
    .detach = nullptr,
    .thread_detach = nullptr};

struct Taking {
  Chain chain;
  size_t limit;
};

int take(Dwfl_Frame* frame, void* argument) {
  auto* taking = static_cast<Taking*>(argument);
  Dwarf_Addr pc = 0;
  bool activation = false;
  if (!dwfl_frame_pc(frame, &pc, &activation)) return DWARF_CB_ABORT;
  taking->chain.pcs.push_back(pc);
  return taking->chain.pcs.size() < taking->limit ? DWARF_CB_OK : DWARF_CB_ABORT;
}

}  // namespace

Libdw::Libdw(Tracee& tracee) : tracee_(tracee), state_(std::make_unique<State>()) {}
Libdw::~Libdw() {
  if (state_->dwfl) dwfl_end(state_->dwfl);
}

Chain Libdw::chain(size_t limit) {
  if (state_->generation != tracee_.code_generation()) {
    if (state_->dwfl) dwfl_end(state_->dwfl);
    state_->generation = tracee_.code_generation();
    state_->dwfl = dwfl_begin(&kCallbacks);
    dwfl_linux_proc_report(state_->dwfl, tracee_.pid());
    dwfl_report_end(state_->dwfl, nullptr, nullptr);
    if (!dwfl_attach_state(state_->dwfl, nullptr, tracee_.pid(), &kThreads, &tracee_)) return {};
  }
  Taking taking{.chain = {}, .limit = limit};
  dwfl_getthread_frames(state_->dwfl, tracee_.pid(), take, &taking);
  return std::move(taking.chain);
}

}  // namespace sonde::stepping
