// What unwind tables cost, beside what they are made from: size, processor time to build, from the cache, of a look-up (among
// 64 and 16,000 places).
// Usage: bench_tables [--json] [FILE...]   (normally through `./dev bench tables`)
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <random>

#include "host/tables/cache.h"
#include "host/tables/image_table.h"

namespace {

using namespace sonde;

constexpr int kRounds = 9;
constexpr const char* kFiles[] = {"/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib/x86_64-linux-gnu/libstdc++.so.6",
                                  "/usr/lib/x86_64-linux-gnu/libcrypto.so.3", "/usr/lib/x86_64-linux-gnu/libLLVM-19.so",
                                  "/usr/bin/python3"};

double processor_ms() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

// Milliseconds of processor time, which others on the machine disturb least; the median of kRounds.
template <class Work>
double median_ms(Work&& work) {
  std::vector<double> times;
  for (int i = 0; i < kRounds; i++) {
    double start = processor_ms();
    work();
    times.push_back(processor_ms() - start);
  }
  std::ranges::sort(times);
  return times[kRounds / 2];
}

struct Figures {
  uint64_t source = 0, table = 0, rows = 0, changes = 0;
  double build_ms = 0, open_ms = 0, cached_ms = 0, few_ns = 0, many_ns = 0;
};

// Nanoseconds per look-up over `count` places of code in rotation, in an order that nothing can predict.
double lookup_ns(const Table& table, std::span<const ImageAddr> places) {
  constexpr size_t kLookups = 1 << 20;
  uintptr_t sum = 0;
  double ms = median_ms([&] {
    // Each look-up waits for the row of the one before, as in a walk.
    size_t at = 0;
    for (size_t i = 0; i < kLookups; i++) {
      const Row* row = table.lookup(places[at]);
      at += 1 + row->saved[0].reserved;  // 0
      if (at >= places.size()) at = 0;
      sum += reinterpret_cast<uintptr_t>(row);
    }
  });
  [[maybe_unused]] static volatile uintptr_t sink;
  sink = sum;
  return ms * 1e6 / kLookups;
}

Figures measure(const std::string& path, const std::string& cache) {
  auto image = host::Image::open(path);
  if (!image) throw std::runtime_error(image.error().message);
  Figures out;
  host::Result<host::CompiledTable> compiled = host::compile_table(**image);
  if (!compiled) throw std::runtime_error(compiled.error().message);
  out.build_ms = median_ms([&] { compiled = host::compile_table(**image); });
  out.source = compiled->stats.source_bytes, out.table = compiled->stats.table_bytes;
  out.rows = compiled->stats.rows, out.changes = compiled->stats.changes + compiled->stats.gaps;
  if (!host::load_table(**image, cache)) throw std::runtime_error(path + ": no table");
  bool cached = true;
  out.cached_ms = median_ms([&] {
    auto table = host::load_table(**image, cache);
    cached = cached && table && (*table)->from_cache();
  });
  if (!cached) throw std::runtime_error(path + ": not from the cache");
  out.open_ms = median_ms([&] { (void)host::Image::open(path); });

  Table table = Table::at(compiled->bytes.data());
  std::vector<ImageRange> code;
  table.for_each([&](ImageAddr begin, ImageAddr end, const Row* row) {
    if (row) code.push_back({begin, end});
  });
  std::mt19937 random(1);
  std::vector<ImageAddr> places;
  for (int i = 0; i < 16000; i++) {
    const ImageRange& range = code[random() % code.size()];
    places.push_back(range.begin + static_cast<int64_t>(random() % range.size()));
  }
  out.few_ns = lookup_ns(table, std::span(places).first(64));
  out.many_ns = lookup_ns(table, places);
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> files;
  bool json = false;
  for (int i = 1; i < argc; i++)
    std::string_view(argv[i]) == "--json" ? void(json = true) : void(files.push_back(argv[i]));
  if (files.empty())
    for (const char* file : kFiles) files.push_back(file);

  char folder[] = "/tmp/sonde-bench-tables-XXXXXX";
  if (!mkdtemp(folder)) return 1;
  int status = 0;
  if (!json)
    fmt::print("{:<18} {:>10} {:>10} {:>6} {:>6} {:>9} {:>7} {:>9} {:>9} {:>7} {:>9}\n", "file", "eh_frame", "table",
               "ratio", "rows", "changes", "build", "speed", "cached", "look-up", "16,000");
  for (const std::string& file : files) {
    std::string name = std::filesystem::path(file).filename();
    if (access(file.c_str(), R_OK)) {
      if (!json) fmt::print("{:<18} not installed\n", name);
      continue;
    }
    try {
      Figures f = measure(file, folder);
      double ratio = static_cast<double>(f.table) / static_cast<double>(f.source);
      double speed = static_cast<double>(f.source) / f.build_ms / 1000;
      if (json)
        fmt::print(
            "{{\"file\": \"{}\", \"source_bytes\": {}, \"table_bytes\": {}, \"rows\": {}, \"changes\": {}, "
            "\"build_ms\": {:.3f}, "
            "\"mb_per_s\": {:.1f}, \"cached_ms\": {:.3f}, \"open_ms\": {:.3f}, \"lookup_ns\": {:.2f}, "
            "\"lookup_16000_ns\": {:.2f}}}\n",
            name, f.source, f.table, f.rows, f.changes, f.build_ms, speed, f.cached_ms, f.open_ms, f.few_ns, f.many_ns);
      else
        fmt::print(
            "{:<18} {:>10} {:>10} {:>5.2f}x {:>6} {:>9} {:>5.1f}ms {:>5.0f}MB/s {:>7.2f}ms {:>5.1f}ns {:>7.1f}ns\n",
            name, f.source, f.table, ratio, f.rows, f.changes, f.build_ms, speed, f.cached_ms, f.few_ns, f.many_ns);
    } catch (const std::exception& error) {
      fmt::print(stderr, "bench_tables: {}\n", error.what());
      status = 1;
    }
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  return status;
}
