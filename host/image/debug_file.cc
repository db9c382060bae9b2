#include "host/image/debug_file.h"

#include <elfutils/libdwelf.h>
#include <fmt/format.h>
#include <lzma.h>
#include <zlib.h>

#include <climits>
#include <cstdlib>
#include <filesystem>

namespace sonde::host {
namespace {

constexpr uint64_t kMaxMiniDebug = 256 << 20;

std::unique_ptr<ElfFile> try_open(const std::string& path) {
  auto bytes = FileBytes::read(path);
  if (!bytes) return nullptr;
  auto file = ElfFile::open(std::move(*bytes));
  return file ? std::move(*file) : nullptr;
}

uint32_t check_sum(std::span<const uint8_t> bytes) {
  return static_cast<uint32_t>(crc32_z(0, bytes.data(), bytes.size()));
}

std::unique_ptr<ElfFile> by_build_id(const std::string& id, const std::string& root) {
  if (id.size() < 4) return nullptr;
  auto file = try_open(fmt::format("{}/.build-id/{}/{}.debug", root, id.substr(0, 2), id.substr(2)));
  return file && file->build_id() == id ? std::move(file) : nullptr;
}

std::unique_ptr<ElfFile> by_debuglink(const ElfFile& file, const std::string& id, const std::string& path,
                                      const std::string& root) {
  GElf_Word expected;
  const char* link = dwelf_elf_gnu_debuglink(file.handle(), &expected);
  if (!link || !*link || std::string_view(link).find('/') != std::string_view::npos) return nullptr;
  std::error_code ignored;
  auto folder = std::filesystem::canonical(path, ignored).parent_path().string();
  if (folder.empty()) return nullptr;
  for (auto& candidate : {fmt::format("{}/{}", folder, link), fmt::format("{}/.debug/{}", folder, link),
                          fmt::format("{}{}/{}", root, folder, link)}) {
    auto debug = try_open(candidate);
    if (!debug) continue;
    std::string debug_id = debug->build_id();
    bool ids = !id.empty() && !debug_id.empty();
    if (ids ? debug_id == id : check_sum(debug->bytes()) == expected) return debug;
  }
  return nullptr;
}

std::unique_ptr<ElfFile> from_debugdata(const ElfFile& file) {
  const Section* section = file.section(".gnu_debugdata");
  if (!section) return nullptr;
  auto packed = file.data(*section);
  lzma_stream stream = LZMA_STREAM_INIT;
  if (lzma_stream_decoder(&stream, kMaxMiniDebug, LZMA_CONCATENATED) != LZMA_OK) return nullptr;
  std::vector<uint8_t> bytes;
  stream.next_in = packed.data();
  stream.avail_in = packed.size();
  lzma_ret status = LZMA_OK;
  while (status == LZMA_OK && bytes.size() < kMaxMiniDebug) {
    size_t have = bytes.size();
    bytes.resize(have + std::max<size_t>(1 << 16, have));
    stream.next_out = bytes.data() + have;
    stream.avail_out = bytes.size() - have;
    status = lzma_code(&stream, LZMA_FINISH);
    bytes.resize(bytes.size() - stream.avail_out);
  }
  lzma_end(&stream);
  if (status != LZMA_STREAM_END) return nullptr;
  auto mini = ElfFile::open(FileBytes(std::move(bytes)));
  return mini ? std::move(*mini) : nullptr;
}

}  // namespace

std::unique_ptr<ElfFile> find_debug_file(const ElfFile& file, const std::string& path, const std::string& root) {
  std::string id = file.build_id();
  if (auto found = by_build_id(id, root)) return found;
  if (auto found = by_debuglink(file, id, path, root)) return found;
  return from_debugdata(file);
}

}  // namespace sonde::host
