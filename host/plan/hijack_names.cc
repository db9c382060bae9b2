// Functions whose return must not be hijacked, by name, with why. Names are the raw ones, without version. A program's
// own function of such a name is treated alike: that costs a return probe, never a wrong run.
#include <algorithm>
#include <array>

#include "host/plan/hijack.h"

namespace sonde::host {
namespace {

struct Named {
  std::string_view name;
  NoHijack reason;
};

constexpr auto kReads = NoHijack::reads_return_address;
constexpr auto kTwice = NoHijack::returns_twice;
constexpr auto kElsewhere = NoHijack::returns_elsewhere;

constexpr Named kNamed[] = {
    // The loader looks up who called (dl-caller, namespaces, RUNPATH, RTLD_NEXT).
    {"dlopen", kReads},
    {"__dlopen", kReads},
    {"___dlopen", kReads},
    {"dlmopen", kReads},
    {"__dlmopen", kReads},
    {"___dlmopen", kReads},
    {"dlsym", kReads},
    {"__dlsym", kReads},
    {"___dlsym", kReads},
    {"dlvsym", kReads},
    {"__dlvsym", kReads},
    {"___dlvsym", kReads},
    {"dl_iterate_phdr", kReads},
    {"__dl_iterate_phdr", kReads},
    {"__libc_dlopen_mode", kReads},
    {"__libc_dlsym", kReads},
    {"__libc_dlvsym", kReads},
    {"_dl_open", kReads},
    {"_dl_sym", kReads},
    {"_dl_vsym", kReads},
    {"_dl_mcount", kReads},
    {"_dl_mcount_wrapper", kReads},
    // Profilers' and coverage hooks.
    {"mcount", kReads},
    {"_mcount", kReads},
    {"__fentry__", kReads},
    {"__cyg_profile_func_enter", kReads},
    {"__cyg_profile_func_exit", kReads},
    {"__return_address", kReads},
    // Come back a second time, from a saved stack pointer or with the caller's memory shared.
    {"setjmp", kTwice},
    {"_setjmp", kTwice},
    {"__setjmp", kTwice},
    {"sigsetjmp", kTwice},
    {"__sigsetjmp", kTwice},
    {"_sigsetjmp", kTwice},
    {"savectx", kTwice},
    {"getcontext", kTwice},
    {"__getcontext", kTwice},
    {"vfork", kTwice},
    {"__vfork", kTwice},
    {"__libc_vfork", kTwice},
    {"_Ux86_64_getcontext", kTwice},
    {"_Ux86_64_getcontext_trace", kTwice},
    {"__unw_getcontext", kTwice},
    {"unw_getcontext", kTwice},
    {"__builtin_setjmp", kTwice},
    // A new stack, another frame, or no return at all.
    {"clone", kElsewhere},
    {"__clone", kElsewhere},
    {"clone3", kElsewhere},
    {"__clone3", kElsewhere},
    {"__clone_internal", kElsewhere},
    {"__clone_internal_fallback", kElsewhere},
    {"__clone2", kElsewhere},
    {"longjmp", kElsewhere},
    {"_longjmp", kElsewhere},
    {"siglongjmp", kElsewhere},
    {"__longjmp", kElsewhere},
    {"____longjmp_chk", kElsewhere},
    {"__longjmp_chk", kElsewhere},
    {"__libc_longjmp", kElsewhere},
    {"__libc_siglongjmp", kElsewhere},
    {"setcontext", kElsewhere},
    {"__setcontext", kElsewhere},
    {"swapcontext", kElsewhere},
    {"__swapcontext", kElsewhere},
    {"__start_context", kElsewhere},
    {"__push___start_context", kElsewhere},
    {"_start", kElsewhere},
    {"_dl_start_user", kElsewhere},
    {"__restore_rt", kElsewhere},
    {"__restore", kElsewhere},
    {"_dl_runtime_resolve", kElsewhere},
    {"_dl_runtime_resolve_fxsave", kElsewhere},
    {"_dl_runtime_resolve_xsave", kElsewhere},
    {"_dl_runtime_resolve_xsavec", kElsewhere},
    {"_dl_runtime_profile_avx", kElsewhere},
    {"_dl_runtime_profile_avx512", kElsewhere},
    {"_dl_runtime_profile_sse", kElsewhere},
    {"_dl_tlsdesc_return", kElsewhere},
    {"_dl_tlsdesc_undefweak", kElsewhere},
    {"_dl_tlsdesc_dynamic", kElsewhere},
    {"__morestack", kElsewhere},
    {"__morestack_non_split", kElsewhere},
    {"start_thread", kElsewhere},
    {"jump_fcontext", kElsewhere},
    {"make_fcontext", kElsewhere},
    {"ontop_fcontext", kElsewhere},
    {"jump_context", kElsewhere},
    // Unwinders: they start from their own return address and leave through eh_return.
    {"_Unwind_RaiseException", kElsewhere},
    {"_Unwind_Resume", kElsewhere},
    {"_Unwind_Resume_or_Rethrow", kElsewhere},
    {"_Unwind_ForcedUnwind", kElsewhere},
    {"_Unwind_Backtrace", kReads},
    {"_Unwind_SjLj_RaiseException", kElsewhere},
    {"uw_init_context_1", kReads},
    {"uw_install_context_1", kElsewhere},
    {"unw_resume", kElsewhere},
    {"__unw_resume", kElsewhere},
    {"_Ux86_64_resume", kElsewhere},
    {"_Ux86_64_setcontext", kElsewhere},
    {"__libunwind_Registers_x86_64_jumpto", kElsewhere},
    {"_ZN9libunwind16Registers_x86_646jumptoEv", kElsewhere},
    {"_Unwind_Find_FDE", kReads},
    {"__libc_unwind_link_get", kReads},
    {"__libc_start_main", kElsewhere},
    {"__libc_start_main_impl", kElsewhere},
    {"__libc_start_call_main", kElsewhere},
    {"_dl_start", kElsewhere},
    {"__sigreturn", kElsewhere},
    {"sigreturn", kElsewhere},
};

constexpr std::string_view kSanitizerPrefixes[] = {
    "__asan_",    "__tsan_",      "__ubsan_",       "__msan_",          "__hwasan_",  "__lsan_",
    "__dfsan_",   "__sanitizer_", "__interceptor_", "___interceptor_",  "__sancov_",  "__xray_",
    "_ZN6__asan", "_ZN6__tsan",   "_ZN7__ubsan",    "_ZN11__sanitizer", "_ZN6__lsan", "_ZN13__interceptor",
};

constexpr auto kSorted = [] {
  auto a = std::to_array(kNamed);
  std::sort(a.begin(), a.end(), [](const Named& x, const Named& y) { return x.name < y.name; });
  return a;
}();

}  // namespace

NoHijack no_hijack_by_name(std::string_view name) {
  auto it = std::lower_bound(kSorted.begin(), kSorted.end(), name,
                             [](const Named& n, std::string_view s) { return n.name < s; });
  if (it != kSorted.end() && it->name == name) return it->reason;
  for (std::string_view prefix : kSanitizerPrefixes)
    if (name.starts_with(prefix)) return NoHijack::sanitizer_entry;
  return NoHijack::none;
}

}  // namespace sonde::host
