// Images against what binutils say about the same files, and against files built here whose truth is their source.
#include "host/image/image.h"

#include <doctest/doctest.h>

using namespace sonde;
using namespace sonde::host;

TEST_CASE("an image names its parts") {
  auto image = Image::open("/usr/lib/x86_64-linux-gnu/libc.so.6");
  REQUIRE(image);
  CHECK((*image)->build_id().size() == 40);
  CHECK((*image)->symbol("malloc"));
  auto hit = (*image)->find(*(*image)->symbol("malloc"));
  REQUIRE(hit);
  CHECK(hit->function->name == "malloc");
}
