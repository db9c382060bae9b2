// Source lines and inlined calls of one file, from its DWARF line tables and entries (DWARF 5, 3.3.8.2), split units' .dwo
// files included. Not thread-safe: elfutils caches in its handles.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "host/image/elf_file.h"

namespace sonde::host {

class SourceLines {
 public:
  // Null if the file has no debug information, or with `why` if it cannot be read. `file` must live longer.
  static std::unique_ptr<SourceLines> open(const ElfFile& file, std::string* why);
  ~SourceLines();
  SourceLines(const SourceLines&) = delete;

  // See Image::source_rows.
  std::vector<SourceRow> rows(ImageAddr at);
  // See Image::line_code.
  LineCode code_of(const std::string& file, unsigned line);

 private:
  struct Impl;
  explicit SourceLines(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace sonde::host
