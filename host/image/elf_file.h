// The bytes of one ELF file together with elfutils' handle on them: the only place that opens files for host/image.
// Everything here may be hostile: what elfutils hands out is checked against the file's size before use.
#pragma once

#include <gelf.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "host/error.h"
#include "host/image/image.h"

namespace sonde::host {

// A file in memory: read if small, so that a file cut short under us cannot hurt; mapped if large.
class FileBytes {
 public:
  static Result<FileBytes> read(const std::string& path);
  explicit FileBytes(std::vector<uint8_t> bytes) : owned_(std::move(bytes)) {}
  FileBytes(FileBytes&& other) noexcept;
  FileBytes& operator=(FileBytes&&) = delete;
  ~FileBytes();
  std::span<const uint8_t> span() const {
    return map_ ? std::span<const uint8_t>(map_, map_size_) : std::span<const uint8_t>(owned_);
  }

 private:
  FileBytes(const uint8_t* map, size_t size) : map_(map), map_size_(size) {}
  std::vector<uint8_t> owned_;
  const uint8_t* map_ = nullptr;
  size_t map_size_ = 0;
};

// A parsed ELF header with its section and segment tables, not yet judged as a program. Address is stable.
class ElfFile {
 public:
  // An error says in what way the file is not an ELF file of a kind sonde handles.
  static Result<std::unique_ptr<ElfFile>> open(FileBytes bytes);
  ~ElfFile();
  ElfFile(const ElfFile&) = delete;

  std::span<const uint8_t> bytes() const { return bytes_.span(); }
  const GElf_Ehdr& header() const { return header_; }
  const std::vector<Segment>& segments() const { return segments_; }
  const std::vector<GElf_Phdr>& program_headers() const { return program_headers_; }
  // In file order, the null section left out.
  const std::vector<Section>& sections() const { return sections_; }
  const Section* section(std::string_view name) const;
  // No section headers: sections() holds what the program headers lead to, and symbols' section indices mean nothing.
  bool sectionless() const { return sectionless_; }
  // The string table that goes with a section (sh_link), or null.
  const Section* linked(const Section& section) const;
  // As they lie in the file; empty if NOBITS.
  std::span<const uint8_t> raw(const Section& section) const;
  // Decompressed where needed. Not thread-safe: elfutils caches in its handle.
  std::span<const uint8_t> data(const Section& section) const;
  std::span<const uint8_t> at(ImageRange range) const;
  const Segment* segment_at(ImageAddr addr) const;
  // Lower-case hex of the NT_GNU_BUILD_ID note, "" if none.
  std::string build_id() const;
  Elf* handle() const { return elf_; }

 private:
  size_t index_of(const Section& section) const;
  explicit ElfFile(FileBytes bytes) : bytes_(std::move(bytes)) {}
  Result<void> read_segments();
  Result<void> read_sections();
  FileBytes bytes_;
  Elf* elf_ = nullptr;
  GElf_Ehdr header_{};
  std::vector<GElf_Phdr> program_headers_;
  std::vector<Segment> segments_;
  std::vector<Section> sections_;
  std::vector<uint32_t> links_;  // sh_link of each
  bool sectionless_ = false;
};

}  // namespace sonde::host
