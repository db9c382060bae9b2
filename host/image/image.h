// One ELF file as sonde sees it: segments, symbols, functions, build id, unwind sections, names. Everything is in the
// file's own address space (ImageAddr); host/image/maps.h places it in a process. Read with elfutils; separate and
// compressed debug files are found by build id and .gnu_debuglink. Immutable once opened, shared freely.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/addr.h"
#include "host/error.h"

namespace sonde::host {

struct Segment {  // PT_LOAD
  ImageRange range;  // memory size
  FileOffset offset;
  uint64_t file_size;
  bool readable, writable, executable;
};

struct Section {
  std::string name;
  ImageAddr addr;  // 0 if not loaded
  FileOffset offset;
  uint64_t size;
  uint32_t type;   // SHT_*
  uint64_t flags;  // SHF_*
};

enum class FunctionSource : uint8_t { symtab, dynsym, eh_frame };

// A place where calls enter. One per entry address: aliases are other names of the same function.
struct Function {
  ImageRange range;  // clipped at the next function
  std::string name;  // raw, without version; "" for those known from .eh_frame only
  // Raw, with @VERSION or @@VERSION where the symbol has one; so `name` too is here again if it has a version.
  std::vector<std::string> aliases;
  FunctionSource source;
  bool global = false;
  bool ifunc = false;      // range is the resolver
  bool sizeless = false;   // no size is known: range is one byte, its code may reach to the next function
  bool cold_part = false;  // X.cold and unwind ranges that no call enters: never probed
  bool label = false;      // a local label without type: names its addresses, never probed
};

struct NameHit {
  const Function* function;
  uint64_t offset;  // bytes from its start
};

struct SourceLine {
  std::string file;  // "" if unknown
  unsigned line = 0, column = 0;
};

// One level of what an instruction belongs to: a function inlined there, or last the function that was called.
struct SourceRow {
  std::string function;  // demangled; "" if debug information does not tell
  SourceLine at;         // of the innermost row where execution stands, else where the row before it was inlined
  bool inlined = false;
};

// Where the code of a source line is.
struct LineCode {
  bool file_known = false;  // some code is of that file
  unsigned line = 0;  // the one asked for or, if that has no code, the next one of the file that has; 0: there is none
  std::vector<ImageAddr> addresses;  // where statements of it begin, ascending
};

class Image {
 public:
  // Opens an ELF file (or a vDSO in memory). An error says what is wrong with the file.
  static Result<std::shared_ptr<const Image>> open(const std::string& path);
  static Result<std::shared_ptr<const Image>> from_memory(std::vector<uint8_t> bytes, std::string name);

  const std::string& path() const;
  std::string_view build_id() const;  // lower-case hex; "" if the file has none
  uint16_t machine() const;  // EM_*
  uint16_t type() const;  // ET_EXEC, ET_DYN
  ImageAddr entry() const;
  std::optional<std::string> interpreter() const;
  std::string_view soname() const;  // DT_SONAME, "" if none
  // A program without dynamic section: nothing of it is exported, nothing is loaded later.
  bool is_static() const;
  bool stripped() const;  // no .symtab, here or in a debug file
  std::span<const Segment> segments() const;
  std::span<const Section> sections() const;
  const Section* section(std::string_view name) const;
  // File bytes of a section (decompressed) or of an address range; empty if absent or NOBITS.
  std::span<const uint8_t> bytes(const Section& section) const;
  std::span<const uint8_t> bytes(ImageRange range) const;
  // Contents (decompressed) of a section of debug information, in this file or in its debug file; empty if neither has it.
  // `name` as it is called uncompressed: ".debug_frame".
  std::span<const uint8_t> debug_section(std::string_view name) const;

  // Sorted by start, non-overlapping.
  std::span<const Function> functions() const;
  // The function that holds addr, or null: never a wrong name.
  std::optional<NameHit> find(ImageAddr addr) const;
  // Any symbol (function or object) by raw name, from .symtab and .dynsym; of several the exported one, of its
  // versions the default one.
  std::optional<ImageAddr> symbol(std::string_view raw_name) const;
  // Whether debug information, here or in a debug file, knows inlined copies of a function whose name matches the glob.
  // Slow; for error messages.
  bool has_inlined(const std::string& glob) const;
  // Source lines of an instruction, innermost first; for a return address give the byte before it. Empty without debug
  // information, here or in a debug file. The last row is the function that find() gives.
  std::vector<SourceRow> source_rows(ImageAddr addr) const;
  // Of the files whose path is `file` or ends in "/" + `file`.
  LineCode line_code(const std::string& file, unsigned line) const;
  // Why debug information was not used though there is some: a debug file of another build, say. "" mostly.
  std::string debug_problem() const;

  ~Image();

 private:
  Image();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// C++ and Rust names for people: bounded in time and length, the raw name where it cannot be demangled.
std::string demangle(std::string_view raw);
// Text with control characters and broken UTF-8 as \xNN, safe for a terminal.
std::string printable(std::string_view text);
// What reports print for a function: demangled, or "app+0x1234" where it has no name.
std::string display_name(const Image& image, const Function& function);

}  // namespace sonde::host
