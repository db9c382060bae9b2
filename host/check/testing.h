// For tests: a shared object made from assembly text, checked.
#pragma once

#include <doctest/doctest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "host/check/check.h"
#include "host/tables/image_table.h"

namespace sonde::host::check {

struct Checked {
  std::shared_ptr<const Image> image;
  std::vector<uint8_t> table_bytes;
  Report report;

  explicit Checked(const std::string& path) {
    auto opened = Image::open(path);
    REQUIRE(opened);
    image = *opened;
    auto compiled = compile_table(*image);
    REQUIRE(compiled);
    table_bytes = std::move(compiled->bytes);
    auto made = check_image(*image, table());
    REQUIRE(made);
    report = std::move(*made);
  }

  Table table() const { return Table::at(table_bytes.data()); }
  const FunctionReport& function(std::string_view name) const {
    for (const FunctionReport& f : report.functions)
      if (image->functions()[f.function].name == name) return f;
    FAIL("no function ", std::string(name));
    return report.functions[0];
  }
  uint64_t count(std::string_view name, Verdict verdict) const {
    return function(name).counts[static_cast<unsigned>(verdict)];
  }
  // Its wrong instructions as lines "offset what".
  std::string wrong(std::string_view name) const {
    std::string text;
    const FunctionReport& f = function(name);
    for (const Finding& finding : f.findings)
      if (finding.verdict == Verdict::wrong)
        text += std::to_string(finding.pc - image->functions()[f.function].range.begin) + " " +
                describe_wrong(finding.wrong) + "\n";
    return text;
  }
};

// Builds `source` with `command` (compiler and flags; " -o out in" follows) in a folder of its own.
class Built {
 public:
  Built(const std::string& source, const std::string& suffix, const std::string& command) {
    char name[] = "/tmp/sonde-check-test-XXXXXX";
    REQUIRE(mkdtemp(name));
    folder_ = name;
    std::ofstream(folder_ + "/in" + suffix) << source;
    REQUIRE(std::system((command + " -o " + path() + " " + folder_ + "/in" + suffix).c_str()) == 0);
  }
  ~Built() { std::filesystem::remove_all(folder_); }
  Built(const Built&) = delete;
  std::string path() const { return folder_ + "/out"; }

 private:
  std::string folder_;
};

}  // namespace sonde::host::check
