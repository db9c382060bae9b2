#include "host/image/debug_file.h"

#include <elfutils/libdwelf.h>
#include <fmt/format.h>
#include <libdeflate.h>
#include <lzma.h>

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

uint32_t check_sum(std::span<const uint8_t> bytes) { return libdeflate_crc32(0, bytes.data(), bytes.size()); }

// What belongs to a file must say so; `problem` tells of one that does not.
void refuse(const std::string& path, const char* what, std::string* problem) {
  if (problem) *problem = fmt::format("its debug file {} is of another build ({} differs) and not used", path, what);
}

std::unique_ptr<ElfFile> by_build_id(const std::string& id, const std::string& root, std::string* problem) {
  if (id.size() < 4) return nullptr;
  std::string path = fmt::format("{}/.build-id/{}/{}.debug", root, id.substr(0, 2), id.substr(2));
  auto file = try_open(path);
  if (file && file->build_id() == id) return file;
  if (file) refuse(path, "the build id", problem);
  return nullptr;
}

std::unique_ptr<ElfFile> by_debuglink(const ElfFile& file, const std::string& id, const std::string& path,
                                      std::span<const std::string> roots, std::string* problem) {
  GElf_Word expected;
  const char* link = dwelf_elf_gnu_debuglink(file.handle(), &expected);
  if (!link || !*link || std::string_view(link).find('/') != std::string_view::npos) return nullptr;
  std::error_code ignored;
  auto folder = std::filesystem::canonical(path, ignored).parent_path().string();
  if (folder.empty()) return nullptr;
  std::vector<std::string> candidates = {fmt::format("{}/{}", folder, link), fmt::format("{}/.debug/{}", folder, link)};
  for (const std::string& root : roots) candidates.push_back(fmt::format("{}{}/{}", root, folder, link));
  for (const std::string& candidate : candidates) {
    auto debug = try_open(candidate);
    if (!debug) continue;
    std::string debug_id = debug->build_id();
    bool other = !id.empty() && !debug_id.empty() && debug_id != id;
    if (!other && check_sum(debug->bytes()) == expected) return debug;
    refuse(candidate, other ? "the build id" : "the check sum", problem);
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

std::vector<std::string>& debug_roots() {
  static std::vector<std::string> roots = {"/usr/lib/debug"};
  return roots;
}

std::unique_ptr<ElfFile> find_debug_file(const ElfFile& file, const std::string& path, std::string* problem,
                                         std::span<const std::string> roots) {
  std::string id = file.build_id();
  std::vector<std::string> all(roots.begin(), roots.end());
  constexpr std::string_view kRoot = "/root/";
  if (auto end = path.find(kRoot); path.starts_with("/proc/") && end != path.npos)
    all.push_back(path.substr(0, end + kRoot.size() - 1) + "/usr/lib/debug");
  for (const std::string& root : all)
    if (auto found = by_build_id(id, root, problem)) return found;
  if (auto found = by_debuglink(file, id, path, all, problem)) return found;
  return from_debugdata(file);
}

}  // namespace sonde::host
