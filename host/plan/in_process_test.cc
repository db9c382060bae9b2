// Whole libraries patched in a child of the test while it uses them: the C library, the C++ library and SQLite do
// afterwards what they did before.
#include <dlfcn.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iomanip>
#include <locale>
#include <map>
#include <numeric>
#include <regex>
#include <sstream>

#include "host/plan/plan.h"
#include "host/plan/test_code.h"

using namespace sonde;
using namespace sonde::host;

namespace {

using Exec = int (*)(void*, const char*, int (*)(void*, int, char**, char**), void*, char**);
using Open = int (*)(const char*, void**);

int append_row(void* out, int columns, char** values, char**) {
  for (int i = 0; i < columns; i++)
    *static_cast<std::string*>(out) += fmt::format("{}|", values[i] ? values[i] : "null");
  return 0;
}

std::string use_sqlite() {
  void* library = dlopen("libsqlite3.so.0", RTLD_NOW);
  if (!library) return "no sqlite";
  void* db = nullptr;
  std::string out;
  reinterpret_cast<Open>(dlsym(library, "sqlite3_open"))(":memory:", &db);
  auto exec = reinterpret_cast<Exec>(dlsym(library, "sqlite3_exec"));
  for (const char* sql :
       {"create table t(x integer primary key, y text, z real); create index i on t(y);",
        "with recursive c(n) as (select 1 union all select n+1 from c where n < 500) "
        "insert into t select n, printf('%04x', n * 7919 % 1000), n / 7.0 from c;",
        "select count(*), sum(x), min(y), max(y), round(avg(z), 6) from t where y like '%1%';",
        "select group_concat(x) from (select x from t order by y desc, x limit 20);",
        "delete from t where x % 3 = 0; update t set y = upper(y) where x % 5 = 0; select count(distinct y) from t;",
        "select json_extract('{\"a\":[1,2,{\"b\":\"c\"}]}', '$.a[2].b'), hex('xyz'), strftime('%Y', 0, 'unixepoch');"})
    exec(db, sql, append_row, &out, nullptr);
  return out;
}

std::string use_libraries() {
  std::string out;
  std::vector<double> numbers(500);
  for (size_t i = 0; i < numbers.size(); i++) numbers[i] = std::sin(static_cast<double>(i)) * 1000;
  std::sort(numbers.begin(), numbers.end());
  qsort(numbers.data(), numbers.size(), sizeof(double), [](const void* a, const void* b) {
    double x = *static_cast<const double*>(a), y = *static_cast<const double*>(b);
    return x < y ? 1 : x > y ? -1 : 0;
  });
  char text[256];
  snprintf(text, sizeof text, "%.17g %a %-8s|%+05d %lx %c %%", numbers[7], numbers[9], "abc", -42, 0xdeadbeefL, 'q');
  out += text;
  std::ostringstream stream;
  stream << std::setprecision(12) << numbers[3] << ' ' << std::hex << 255 << ' ' << std::boolalpha << true;
  out += stream.str();
  std::map<std::string, int> words;
  std::istringstream in("the quick brown fox jumps over the lazy dog the end");
  for (std::string word; in >> word;) words[word]++;
  for (auto& [word, n] : words) out += word + std::to_string(n);
  out += std::regex_replace(std::string("2024-01-02"), std::regex("(\\d+)-(\\d+)"), "$2/$1");
  try {
    (void)std::stoi("no number");
  } catch (const std::exception& e) {
    out += e.what();
  }
  char* end = nullptr;
  out += std::to_string(strtod("1.5e3x", &end));
  out += end + std::to_string(strtol("-077", nullptr, 8));
  char* copy = strdup("strdup and strtok and strstr");
  for (char *save = nullptr, *w = strtok_r(copy, " ", &save); w; w = strtok_r(nullptr, " ", &save)) out += w;
  free(copy);
  for (size_t n : {1uz, 3uz, 17uz, 100uz, 5000uz}) {
    std::string a(n, 'a'), b = a;
    std::memmove(a.data(), b.data(), n);
    out += std::to_string(std::memcmp(a.data(), b.data(), n)) + std::to_string(strlen(a.c_str()));
  }
  return out + use_sqlite();
}

bool not_chosen(std::string_view path) {
  return !path.contains("libc.so") && !path.contains("libstdc++") && !path.contains("libsqlite3") &&
         !path.contains("libm.so");
}

size_t patch_libraries(uint32_t* first_site) {
  std::vector<std::string> problems;
  auto images = loaded_images(getpid(), &problems);
  if (!images) return 0;
  size_t patched = 0;
  mallopt(M_MMAP_MAX, 0);  // planning must not itself map memory where it plans to
  for (LoadedImage& loaded : *images) {
    if (not_chosen(loaded.image->path())) continue;
    PlanRequest request{.image = &loaded,
                        .functions = {},
                        .first_site = *first_site,
                        .entry_trampoline = Addr(test::counting_entry()),
                        .used = {},
                        .kept = {}};
    auto mappings = read_maps(getpid());
    REQUIRE(mappings);
    for (auto& m : *mappings) request.used.push_back(m.range);
    request.functions.resize(loaded.image->functions().size());
    std::iota(request.functions.begin(), request.functions.end(), 0u);
    auto plan = plan_image(request);
    if (!plan) return 0;
    *first_site += static_cast<uint32_t>(request.functions.size());
    for (auto& a : plan->arenas)
      if (mmap(reinterpret_cast<void*>(a.begin.value), a.size(), PROT_READ | PROT_WRITE | PROT_EXEC,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED)
        return 0;
    auto put = [](Addr at, const std::vector<uint8_t>& bytes) {
      auto* p = reinterpret_cast<volatile uint8_t*>(at.value);
      for (size_t i = 0; i < bytes.size(); i++) p[i] = bytes[i];
    };
    for (auto& [at, bytes] : plan->writes) put(at, bytes);
    for (auto& s : loaded.image->segments()) {
      uint64_t begin = loaded.to_target(s.range.begin).value & ~4095ul, end = loaded.to_target(s.range.end).value;
      if (s.executable) mprotect(reinterpret_cast<void*>(begin), end - begin, PROT_READ | PROT_WRITE | PROT_EXEC);
    }
    for (auto& s : plan->sites) {
      put(s.island, s.island_bytes);
      put(s.patch, s.bytes);  // the loop itself calls nothing
      patched += s.method != Method::refused;
    }
  }
  return patched;
}

}  // namespace

TEST_CASE("libraries patched as a whole do what they did") {
  std::string before = use_libraries();
  REQUIRE(before == use_libraries());
  if (before.ends_with("no sqlite")) MESSAGE("libsqlite3.so.0 is not installed: not patched");
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  pid_t child = fork();
  if (child == 0) {
    alarm(60);
    uint32_t sites = 0;
    size_t patched = patch_libraries(&sites);
    bool same = use_libraries() == before && use_libraries() == before;
    uint64_t report[2] = {patched, 0};
    for (size_t i = 0; i < sites; i++) report[1] += test::plan_test_hits[i] != 0;
    if (!same) report[0] = 0;
    if (write(ends[1], report, sizeof report) != sizeof report) _exit(2);
    _exit(0);
  }
  close(ends[1]);
  uint64_t report[2] = {};
  ssize_t got = read(ends[0], report, sizeof report);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  REQUIRE(got == sizeof report);
  CHECK(report[0] > 5000);  // functions patched, or 0 where anything came out differently
  CHECK(report[1] > 800);   // of them hit
  MESSAGE(report[0] << " functions patched, " << report[1] << " of them hit");
}
