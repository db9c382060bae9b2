// Text of reports: units, names that cannot break the output, columns, colour.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "host/image/image.h"  // printable()

namespace sonde::host {

// Three significant digits: "0 ns", "12.3 us", "1.23 ms", "45.0 s".
std::string format_time(double nanoseconds);
// "1234567" -> "1,234,567".
std::string format_count(uint64_t count);
// "12.3" of whole, without sign; "0.0" if whole is 0.
std::string format_percent(double part, double whole);

// Columns that valid UTF-8 text takes (one per code point).
size_t display_width(std::string_view text);
// At most `width` columns: parameter lists become (...), then template arguments <...>, then the middle is cut with
// "...". Text that fits stays as it is.
std::string shorten(std::string_view name, size_t width);

// A JSON string with its quotes. Bytes that are no UTF-8 are written as the text \xNN.
std::string json_string(std::string_view raw);
// For one frame of a folded stack: printable, and ';' written as \x3b.
std::string folded_name(std::string_view raw);

// In front of a line that lies `level` levels deep, counted from 0: two spaces a level, from kDeepestIndent on a number
// instead. Indentation without end would make the text of a deep recursion quadratic.
constexpr unsigned kDeepestIndent = 40;
std::string indentation(unsigned level);
// What the numbers mean; "" if the deepest line has none.
std::string indentation_hint(unsigned deepest_level);

// A table whose last column is the name: left-aligned and not padded; all others right-aligned.
class Columns {
 public:
  explicit Columns(std::vector<std::string> titles) { rows_.push_back(std::move(titles)); }
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace sonde::host
