#include "host/report/text.h"

#include <fmt/format.h>

#include <algorithm>

namespace sonde::host {

namespace {

// Length of the UTF-8 sequence at the start of text; 0 if there is none (RFC 3629: shortest form, no surrogates).
size_t utf8_length(std::string_view text) {
  auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  unsigned first = byte(0);
  if (first < 0x80) return 1;
  size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  unsigned second = byte(1);
  if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) || (first == 0xf0 && second < 0x90) ||
      (first == 0xf4 && second > 0x8f))
    return 0;
  return length;
}

bool valid_utf8(std::string_view text) {
  while (!text.empty()) {
    size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

void append_printable(std::string& out, std::string_view raw, bool keep_ascii) {
  while (!raw.empty()) {
    size_t length = utf8_length(raw);
    unsigned char c = raw[0];
    bool c1_control = length == 2 && c == 0xc2 && static_cast<unsigned char>(raw[1]) < 0xa0;
    if (length == 0 || c1_control || (length == 1 && !keep_ascii && (c < 0x20 || c == 0x7f))) {
      length = 1;
      if (c == '\n') out += "\\n";
      else if (c == '\t') out += "\\t";
      else out += fmt::format("\\x{:02x}", c);
      if (c1_control) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(raw[1])), length = 2;
    } else if (c == '\\') {
      out += "\\\\";
    } else {
      out.append(raw.substr(0, length));
    }
    raw.remove_prefix(length);
  }
}

// Replaces what stands between each outermost pair of brackets by "...". Operators such as operator<, operator() and
// "->" do not open or close a pair; an unbalanced name comes back as it was.
std::string collapse(std::string_view name, char open, char close) {
  std::string out;
  int depth = 0;
  constexpr std::string_view op = "operator";
  for (size_t i = 0; i < name.size(); ++i) {
    if (depth == 0 && name.substr(i).starts_with(op)) {
      size_t end = i + op.size();
      while (end < name.size() && std::string_view("<>=-()!").find(name[end]) != name.npos) {
        if (name[end] == '(' && name.substr(end, 2) != "()") break;
        end += name[end] == '(' ? 2 : 1;
        if (name[end - 1] == ')') break;
      }
      out += name.substr(i, end - i);
      i = end - 1;
      continue;
    }
    char c = name[i];
    if (c == close && !(close == '>' && i > 0 && name[i - 1] == '-')) {
      if (--depth < 0) return std::string(name);
      if (depth == 0) out += c;
    } else if (c == open) {
      if (depth++ == 0) {
        out += c;
        bool empty = i + 1 < name.size() && name[i + 1] == close;
        if (!empty) out += "...";
      }
    } else if (depth == 0) {
      out += c;
    }
  }
  return depth == 0 ? out : std::string(name);
}

// The first or last `columns` code points.
std::string_view head(std::string_view text, size_t columns) {
  size_t at = 0;
  while (columns-- > 0 && at < text.size()) at += std::max<size_t>(1, utf8_length(text.substr(at)));
  return text.substr(0, at);
}
std::string_view tail(std::string_view text, size_t columns) {
  size_t at = text.size();
  while (columns-- > 0 && at > 0) do
      --at;
    while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80);
  return text.substr(at);
}

}  // namespace

std::string format_time(double ns) {
  static constexpr const char* kUnits[] = {"ns", "us", "ms", "s"};
  int unit = 0;
  // 999.5 would be printed as 1000 in three digits.
  while (unit < 3 && ns >= 999.5) ns /= 1000, ++unit;
  int digits = unit == 0 || ns >= 99.95 ? 0 : ns >= 9.995 ? 1 : 2;
  return fmt::format("{:.{}f} {}", ns, digits, kUnits[unit]);
}

std::string format_count(uint64_t count) {
  std::string digits = std::to_string(count);
  for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) digits.insert(digits.begin() + at, ',');
  return digits;
}

std::string format_percent(double part, double whole) {
  return fmt::format("{:.1f}", whole > 0 ? 100 * part / whole : 0.0);
}

size_t display_width(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](unsigned char c) { return (c & 0xc0) != 0x80; });
}

std::string shorten(std::string_view name, size_t width) {
  if (display_width(name) <= width) return std::string(name);
  std::string shorter = collapse(name, '(', ')');
  if (display_width(shorter) > width) shorter = collapse(shorter, '<', '>');
  if (display_width(shorter) <= width) return shorter;
  if (width < 8) return std::string(head(shorter, width));
  size_t front = (width - 3) / 2;
  return fmt::format("{}...{}", head(shorter, front), tail(shorter, width - 3 - front));
}

std::string json_string(std::string_view raw) {
  std::string escaped;
  if (!valid_utf8(raw)) {
    append_printable(escaped, raw, true);
    raw = escaped;
  }
  std::string out = "\"";
  for (char c : raw) {
    if (c == '"' || c == '\\') out += '\\', out += c;
    else if (c == '\n') out += "\\n";
    else if (c == '\t') out += "\\t";
    else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    else out += c;
  }
  return out += '"';
}

std::string folded_name(std::string_view raw) {
  std::string out;
  for (char c : printable(raw)) {
    if (c == ';') out += "\\x3b";
    else out += c;
  }
  return out;
}

std::string indentation(unsigned level) {
  std::string text(2 * size_t{std::min(level, kDeepestIndent)}, ' ');
  return level <= kDeepestIndent ? text : text + fmt::format("[{}] ", level);
}

std::string indentation_hint(unsigned deepest_level) {
  if (deepest_level <= kDeepestIndent) return "";
  return fmt::format("[N]: N levels below the outermost function, the deepest here {}; not indented further\n",
                     deepest_level);
}

std::string Columns::text() const {
  std::vector<size_t> widths(rows_[0].size(), 0);
  for (const auto& row : rows_)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], display_width(row[i]));
  std::string out;
  for (const auto& row : rows_) {
    for (size_t i = 0; i + 1 < row.size(); ++i) {
      out.append(widths[i] - display_width(row[i]), ' ');
      out += row[i];
      out += "  ";
    }
    out += row.back();
    out += '\n';
  }
  return out;
}

}  // namespace sonde::host
