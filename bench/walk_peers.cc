// The walkers to compare with. GNU's and LLVM's libraries are loaded by name, since both replace functions of libgcc.
#include <dlfcn.h>
#include <elfutils/libdwfl.h>
#include <execinfo.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#include <unwind.h>

#include <cstring>

#include "bench/walk_bench.h"

namespace sonde::bench {
namespace {

struct Room {
  uint64_t* out;
  unsigned count;
  uintptr_t (*address)(_Unwind_Context*);
};

_Unwind_Reason_Code add(_Unwind_Context* context, void* room_) {
  Room& room = *static_cast<Room*>(room_);
  if (room.count == kMostFrames) return _URC_END_OF_STACK;
  room.out[room.count++] = room.address(context);
  return _URC_NO_REASON;
}

unsigned by_libgcc(uint64_t* out) {
  Room room{out, 0, _Unwind_GetIP};
  _Unwind_Backtrace(add, &room);
  return room.count;
}

unsigned by_glibc(uint64_t* out) {
  return static_cast<unsigned>(backtrace(reinterpret_cast<void**>(out), kMostFrames));
}

struct {
  _Unwind_Reason_Code (*backtrace)(_Unwind_Trace_Fn, void*);
  uintptr_t (*address)(_Unwind_Context*);
} llvm;

unsigned by_llvm(uint64_t* out) {
  Room room{out, 0, llvm.address};
  llvm.backtrace(add, &room);
  return room.count;
}

struct {
  int (*backtrace)(void**, int);
  int (*context)(void*);
  int (*init)(void*, void*);
  int (*step)(void*);
  int (*get_reg)(void*, int, uint64_t*);
} gnu;

unsigned by_gnu(uint64_t* out) {
  return static_cast<unsigned>(gnu.backtrace(reinterpret_cast<void**>(out), kMostFrames));
}

unsigned by_gnu_steps(uint64_t* out) {
  ucontext_t context;  // unw_tdep_context_t is one on x86-64
  uint64_t cursor[127];  // UNW_TDEP_CURSOR_LEN
  constexpr int kIp = 16;  // UNW_X86_64_RIP
  unsigned count = 0;
  if (gnu.context(&context) || gnu.init(cursor, &context)) return 0;
  do {
    if (gnu.get_reg(cursor, kIp, out + count)) break;
    count++;
  } while (count < kMostFrames && gnu.step(cursor) > 0);
  return count;
}

// libdw in the own process: the kernel's maps once, then memory and registers through callbacks.
struct Session {
  Dwfl* dwfl;
  uint64_t regs[17];
};
thread_local Session* session;

pid_t next_thread(Dwfl*, void*, void** thread) {
  if (*thread) return 0;
  *thread = session;
  return static_cast<pid_t>(syscall(SYS_gettid));
}
bool get_thread(Dwfl*, pid_t, void*, void** thread) { return *thread = session, true; }
bool read_memory(Dwfl*, Dwarf_Addr address, Dwarf_Word* value, void*) {
  return std::memcpy(value, reinterpret_cast<const void*>(address), 8), true;
}
bool set_registers(Dwfl_Thread* thread, void*) { return dwfl_thread_state_registers(thread, 0, 17, session->regs); }
const Dwfl_Thread_Callbacks kThreads = {next_thread, get_thread, read_memory, set_registers, nullptr, nullptr};

int add_dwfl(Dwfl_Frame* frame, void* room_) {
  Room& room = *static_cast<Room*>(room_);
  Dwarf_Addr pc;
  if (room.count == kMostFrames || !dwfl_frame_pc(frame, &pc, nullptr)) return DWARF_CB_ABORT;
  room.out[room.count++] = pc;
  return DWARF_CB_OK;
}

unsigned by_libdw(uint64_t* out) {
  static const Dwfl_Callbacks callbacks = {dwfl_linux_proc_find_elf, dwfl_standard_find_debuginfo, nullptr, nullptr};
  if (!session) {
    session = new Session{};
    session->dwfl = dwfl_begin(&callbacks);
    dwfl_linux_proc_report(session->dwfl, getpid());
    dwfl_report_end(session->dwfl, nullptr, nullptr);
    dwfl_attach_state(session->dwfl, nullptr, getpid(), &kThreads, nullptr);
  }
  constexpr int kInContext[17] = {REG_RAX, REG_RDX, REG_RCX, REG_RBX, REG_RSI, REG_RDI, REG_RBP, REG_RSP, REG_R8,
                                  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15, REG_RIP};
  ucontext_t context;
  getcontext(&context);
  for (int i = 0; i < 17; i++) session->regs[i] = static_cast<uint64_t>(context.uc_mcontext.gregs[kInContext[i]]);
  Room room{out, 0, nullptr};
  dwfl_getthread_frames(session->dwfl, static_cast<pid_t>(syscall(SYS_gettid)), add_dwfl, &room);
  return room.count;
}

template <class Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function;
}

std::string load_llvm() {
  void* library = dlopen("libunwind.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library || !find(library, "_Unwind_Backtrace", llvm.backtrace) || !find(library, "_Unwind_GetIP", llvm.address))
    return "libunwind-19 is not installed";
  return "";
}

std::string load_gnu() {
  void* library = dlopen("libunwind.so.8", RTLD_NOW | RTLD_LOCAL);
  if (!library || !find(library, "unw_backtrace", gnu.backtrace) ||
      !find(library, "_Ux86_64_getcontext", gnu.context) || !find(library, "_ULx86_64_init_local", gnu.init) ||
      !find(library, "_ULx86_64_step", gnu.step) || !find(library, "_ULx86_64_get_reg", gnu.get_reg))
    return "libunwind8 is not installed";
  return "";
}

}  // namespace

std::vector<Walker> peers() {
  std::string no_gnu = load_gnu(), no_llvm = load_llvm();
  return {{.name = "GNU libunwind, unw_backtrace", .walk = by_gnu, .missing = no_gnu},
          {.name = "GNU libunwind, unw_step", .walk = by_gnu_steps, .missing = no_gnu},
          {.name = "libgcc", .walk = by_libgcc},
          {.name = "glibc backtrace", .walk = by_glibc},
          {.name = "LLVM libunwind", .walk = by_llvm, .missing = no_llvm},
          {.name = "libdw", .walk = by_libdw}};
}

void end_thread() {
  if (session) dwfl_end(session->dwfl);
  delete session;
  session = nullptr;
}

}  // namespace sonde::bench
