#include "host/image/select.h"

#include <doctest/doctest.h>

namespace sonde::host {
namespace {

TEST_CASE("select: a library is meant by its file name and by its name without the last numbers") {
  auto image = Image::open("/usr/lib/x86_64-linux-gnu/libsqlite3.so.0.8.6");
  REQUIRE(image);
  auto by = [&](const char* pattern) { return Selection::parse({pattern})->select(**image, false).size(); };
  size_t all = by("libsqlite3.so.0.8.6:sqlite3_*");
  CHECK(all > 200);
  CHECK(by("libsqlite3.so.0:sqlite3_*") == all);
  CHECK(by("libsqlite3*:sqlite3_*") == all);
  CHECK(by("libsqlite3.so.1:sqlite3_*") == 0);
  CHECK(by("libsqlite3.so.0:sqlite3_close") == 1);
}

}  // namespace
}  // namespace sonde::host
