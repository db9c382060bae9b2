// Names for people. Manglings come from the traced program and may be hostile: a few hundred bytes can stand for
// gigabytes of text, so the demangler hands its text out piece by piece and is left when there is too much of it.
#include <csetjmp>
#include <cstring>

#define HAVE_DECL_BASENAME 1
#include <libiberty/demangle.h>

#include <fmt/format.h>

#include "host/image/image.h"

namespace sonde::host {
namespace {

constexpr size_t kMaxInput = 4096, kMaxOutput = 4096;

struct Sink {
  char text[kMaxOutput];
  size_t size = 0;
  jmp_buf overflow;
};

// libiberty's callback demanglers hold no heap memory (their state is on the stack), so jumping out of them is sound.
void collect(const char* piece, size_t size, void* opaque) {
  auto& sink = *static_cast<Sink*>(opaque);
  if (size > kMaxOutput - sink.size) longjmp(sink.overflow, 1);
  std::memcpy(sink.text + sink.size, piece, size);
  sink.size += size;
}

bool run_demangler(const char* raw, bool rust, Sink& sink) {
  if (setjmp(sink.overflow)) return false;
  int done = rust ? rust_demangle_callback(raw, 0, collect, &sink)
                  : cplus_demangle_v3_callback(raw, DMGL_PARAMS | DMGL_ANSI, collect, &sink);
  return done != 0;
}

// Length of the UTF-8 sequence at the start of text, 0 if there is none.
size_t utf8_length(std::string_view text) {
  auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  size_t n = byte(0) >= 0xf0 && byte(0) < 0xf5 ? 4 : byte(0) >= 0xe0 ? 3 : byte(0) >= 0xc2 ? 2 : 0;
  if (byte(0) >= 0xf5 || n == 0 || text.size() < n) return 0;
  for (size_t i = 1; i < n; i++)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  return n;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    auto byte = static_cast<uint8_t>(text[0]);
    size_t n = byte < 0x80 ? 1 : utf8_length(text);
    bool control = byte < 0x20 || byte == 0x7f || n == 0 || (byte == 0xc2 && static_cast<uint8_t>(text[1]) < 0xa0);
    if (control) out += fmt::format("\\x{:02x}", byte), n = 1;
    else out += text.substr(0, n);
    text.remove_prefix(n);
  }
  return out;
}

std::string demangle(std::string_view raw) {
  bool cxx = raw.starts_with("_Z"), rust_v0 = raw.starts_with("_R");
  if ((!cxx && !rust_v0) || raw.size() > kMaxInput) return printable(raw.substr(0, kMaxOutput));
  std::string copy(raw);
  Sink sink;
  // A legacy Rust name is a C++ mangling as well; only rustc ends one in a 16 digit hash.
  bool done = run_demangler(copy.c_str(), true, sink);
  if (!done) sink.size = 0;
  if (!done && cxx) done = run_demangler(copy.c_str(), false, sink);
  return printable(done ? std::string_view(sink.text, sink.size) : raw);
}

}  // namespace sonde::host
