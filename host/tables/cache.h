// Tables kept between runs: one file per build id under $XDG_CACHE_HOME/sonde or ~/.cache/sonde. The cache is a convenience:
// whatever is wrong with it (no folder, disk full, another user's files, damage), the table is compiled as if it were empty.
//
//   file: CacheHeader, then the table's bytes (core/unwind/table.h)
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/unwind/table.h"
#include "host/image/image.h"

namespace sonde::host {

constexpr uint64_t kCacheMagic = 0x656863615f646e73;  // "snd_ache"
constexpr uint32_t kCacheVersion = 3;  // raised when the same input gives other rows

struct CacheHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t checked;  // 1: `sonde check` has marked the rows that it refuted
  uint64_t source;  // checksum of the unwind sections and where they lie: equal build ids do not prove equal files
  uint64_t table_size;
};
static_assert(sizeof(CacheHeader) % 8 == 0);

class ImageTable {
 public:
  ImageTable(std::vector<uint8_t> storage, size_t begin, bool from_cache)
      : storage_(std::move(storage)), begin_(begin), from_cache_(from_cache) {}
  std::span<const uint8_t> bytes() const { return std::span(storage_).subspan(begin_); }
  Table table() const { return Table::at(bytes().data()); }
  bool from_cache() const { return from_cache_; }

 private:
  std::vector<uint8_t> storage_;
  size_t begin_;
  bool from_cache_;
};
using SharedTable = std::shared_ptr<const ImageTable>;

// Folder of the cache, made if it is missing; "" if there can be none. Read from the environment at each call.
std::string table_cache_folder();

// The image's table, from the cache at `folder` ("": no cache) or compiled and then stored there.
Result<SharedTable> load_table(const Image& image, const std::string& folder = table_cache_folder());
// `refine` may give other bytes for a table that was just compiled; they are what is kept then.
using RefineTable = std::function<Result<std::vector<uint8_t>>(const Image& image, std::vector<uint8_t> table)>;
Result<SharedTable> load_table(const Image& image, const std::string& folder, const RefineTable& refine);

// Keeps a table that `sonde check` has marked, so that load_table gives it from now on. False if it cannot be kept.
bool keep_checked_table(const Image& image, std::span<const uint8_t> table,
                        const std::string& folder = table_cache_folder());

}  // namespace sonde::host
