#include "host/plan/runtime.h"

#include <algorithm>
#include <string_view>

namespace sonde::host {

namespace {

// One symbol tells each: an entry point of the runtime's interface, or of its hand-written code.
constexpr std::string_view kScanningRuntimes[] = {
    "Builtins_Abort",                                  // V8, with symbols
    "_ZN2v87Isolate8AllocateEv",                       // V8, its exported interface (node)
    "JNI_CreateJavaVM",                                // HotSpot
    "runtime.morestack",
    "runtime.gcWriteBarrier",     // Go
    "coreclr_initialize",
    "mono_jit_init",
    "JS_Init",  // .NET, Mono, SpiderMonkey
};

bool holds(std::span<const uint8_t> bytes, std::string_view text) {
  return std::search(bytes.begin(), bytes.end(), text.begin(), text.end()) != bytes.end();
}

// It has exception tables, but neither defines nor imports the function that every user of an unwinder needs: linked
// statically and stripped.
bool has_hidden_unwinder(const Image& image) {
  if (!image.section(".gcc_except_table") || image.symbol("_Unwind_Resume")) return false;
  const Section* names = image.section(".dynstr");
  return !names || !holds(image.bytes(*names), "_Unwind_Resume");
}

}  // namespace

NoHijack no_hijack_in_image(const Image& image) {
  if (image.section(".gopclntab")) return NoHijack::runtime_scans_stacks;
  for (std::string_view name : kScanningRuntimes)
    if (image.symbol(name)) return NoHijack::runtime_scans_stacks;
  return has_hidden_unwinder(image) ? NoHijack::no_unwinder : NoHijack::none;
}

}  // namespace sonde::host
