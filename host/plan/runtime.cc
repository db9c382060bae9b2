#include "host/plan/runtime.h"

#include <cstring>
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

bool has_string(const Image& image, const Section& section, std::string_view text) {
  std::span<const uint8_t> bytes = image.bytes(section);
  return memmem(bytes.data(), bytes.size(), text.data(), text.size()) != nullptr;
}

// Defined by the runtimes, imported by what is compiled for them; leak checking alone is only linked.
constexpr std::string_view kSanitizerRuntimes[] = {"__asan_init",   "__lsan_do_leak_check", "__msan_init",
                                                   "__hwasan_init", "__tsan_init",          "liblsan.so"};

// What only the runtimes say: without symbols nothing else tells that one is linked in.
constexpr std::string_view kSanitizerMessages[] = {"LeakSanitizer does not work under ptrace",
                                                   "ThreadSanitizer: unexpected memory mapping",
                                                   "WARNING: MemorySanitizer: use-of-uninitialized-value"};

}  // namespace

namespace {

bool is_sanitized(const Image& image) {
  const Section *names = image.section(".dynstr"), *constants = image.section(".rodata");
  for (std::string_view name : kSanitizerRuntimes)
    if (image.symbol(name) || (names && has_string(image, *names, name))) return true;
  if (image.section(".symtab") || !constants) return false;
  for (std::string_view message : kSanitizerMessages)
    if (has_string(image, *constants, message)) return true;
  return false;
}

}  // namespace

// It has exception tables, but neither defines nor imports what every user of an unwinder needs: linked statically and stripped. With
// the personality, who reads the tables; or without, then the way to find other images' tables is what it imports. Who imports the
// personality and not even that only catches, which needs no unwinder. The C library opens the shared unwinder by its name.
bool has_hidden_unwinder(const Image& image) {
  if (!image.section(".gcc_except_table") || image.symbol("_Unwind_Resume")) return false;
  const Section *names = image.section(".dynstr"), *constants = image.section(".rodata");
  if (constants && has_string(image, *constants, "libgcc_s.so.1")) return false;
  if (!names) return true;
  if (has_string(image, *names, "_Unwind_")) return false;
  bool own_personality = image.symbol("__gxx_personality_v0") || image.symbol("__gcc_personality_v0");
  bool finds_tables = has_string(image, *names, "dl_iterate_phdr") || has_string(image, *names, "_dl_find_object");
  bool only_catches = has_string(image, *names, "_personality_v") && !finds_tables;
  return own_personality || !only_catches;
}

NoHijack no_hijack_beside(const Image& image, std::optional<StaticUnwinder>* unwinder) {
  bool hidden = has_hidden_unwinder(image);
  auto found = hidden ? find_static_unwinder(image) : std::nullopt;
  if (unwinder) *unwinder = found;
  if (is_sanitized(image)) return NoHijack::sanitized;
  return hidden && !found ? NoHijack::no_unwinder : NoHijack::none;
}

bool has_small_stacks(const Image& image) { return image.section(".gopclntab"); }

NoHijack no_hijack_in_image(const Image& image) {
  if (has_small_stacks(image)) return NoHijack::runtime_scans_stacks;
  for (std::string_view name : kScanningRuntimes)
    if (image.symbol(name)) return NoHijack::runtime_scans_stacks;
  return NoHijack::none;
}

}  // namespace sonde::host
