#include "host/plan/places.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>

#include "host/image/near.h"
#include "host/plan/insn.h"
#include "host/words.h"

namespace sonde::host {
namespace {

std::optional<uint64_t> number_in(std::string_view text) {
  bool hex = text.starts_with("0x");
  if (hex) text.remove_prefix(2);
  uint64_t value;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, hex ? 16 : 10);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

bool is_decimal(std::string_view text) { return !text.empty() && text.find_first_not_of("0123456789") == text.npos; }

std::optional<ImageAddr> at_file_offset(const Image& image, uint64_t offset) {
  for (const Segment& s : image.segments())
    if (s.executable && offset >= s.offset.value && offset - s.offset.value < s.file_size)
      return s.range.begin + static_cast<int64_t>(offset - s.offset.value);
  return std::nullopt;
}

bool is_code(const Image& image, ImageAddr at) {
  return std::ranges::any_of(image.segments(), [&](const Segment& s) { return s.executable && s.range.contains(at); });
}

// Known by that name, its parameters or a version left out or not; what an indirect function's own code is, nobody means.
std::vector<const Function*> functions_called(const Image& image, const std::string& name) {
  std::vector<const Function*> found;
  for (const Function& f : image.functions()) {
    if (f.ifunc) continue;
    bool its = std::ranges::any_of(call_names(f), [&](const CallName& n) { return !n.versioned && n.name == name; });
    if (its || (f.name.empty() && display_name(image, f) == name)) found.push_back(&f);
  }
  return found;
}

// "; instructions begin at main+0x1 and main+0x5": those beside it.
std::string beside(const Image& image, ImageAddr at, const std::vector<ImageAddr>& starts) {
  auto behind = std::ranges::upper_bound(starts, at);
  if (behind == starts.begin()) return "";
  std::string text = "; instructions begin at " + point_name(image, *std::prev(behind));
  if (behind != starts.end()) text += " and " + point_name(image, *behind);
  return text;
}

// Where an instruction begins, all is well.
Result<void> check_instruction(const std::string& text, const Image& image, ImageAddr at) {
  auto starts = instructions_around(image, at);
  if (std::ranges::binary_search(starts, at)) return {};
  auto hit = image.find(at);
  if (!hit) return fail(fmt::format("{}: {} belongs to no function that is known", text, point_name(image, at)), 2);
  if (starts.empty())
    return fail(fmt::format("{}: the code of {} cannot be read up to there", text, display_name(image, *hit->function)),
                2);
  return fail(fmt::format("{} is inside an instruction{}", text, beside(image, at, starts)), 2);
}

}  // namespace

std::string point_name(const Image& image, ImageAddr at) {
  if (auto hit = image.find(at)) {
    const Function& f = *hit->function;
    if (!f.name.empty()) return fmt::format("{}+{:#x}", demangle(f.name), hit->offset);
  }
  return fmt::format("{}+{:#x}", base_name(image.path()), at.value);
}

std::vector<ImageAddr> instructions_around(const Image& image, ImageAddr at) {
  auto hit = image.find(at);
  if (!hit) return {};
  ImageRange range = hit->function->range;
  if (hit->function->sizeless) range.end = at + 1;
  auto code = image.bytes(range);
  std::vector<ImageAddr> starts;
  for (size_t i = 0; i < code.size();) {
    auto insn = decode(code.subspan(i), range.begin.value + i);
    if (!insn) {
      if (range.begin + static_cast<int64_t>(i) <= at) return {};
      break;  // what lies behind does not matter
    }
    starts.push_back(range.begin + static_cast<int64_t>(i));
    i += insn->length;
  }
  return starts;
}

Result<Places::Place> Places::parse_one(const std::string& text) {
  Place place;
  place.text = text;
  std::string rest = text;
  auto wrong = [&](const std::string& what) { return fail(fmt::format("place '{}' {}", text, what), 2); };
  size_t colon = module_end(rest), last = rest.rfind(':');
  bool is_line = last != rest.npos && last > 0 && rest[last - 1] != ':' && is_decimal(rest.substr(last + 1));
  if (colon != rest.npos && !(is_line && colon == last)) {
    place.module = ModuleGlob(rest.substr(0, colon));
    if (place.module.empty()) return wrong("has nothing before its colon: write MODULE:PLACE");
    rest.erase(0, colon + 1);
    last = rest.rfind(':');
  }
  if (is_line) {
    auto line = number_in(rest.substr(last + 1));
    if (!line || *line == 0 || *line > 1'000'000'000) return wrong("has no line number that a file could have");
    place.source = rest.substr(0, last);
    place.line = static_cast<unsigned>(*line);
    return place;
  }
  if (rest.empty()) return wrong("names no place: write SYMBOL+OFFSET, FILE:LINE, MODULE:0xOFFSET or 0xADDRESS");
  if (rest.starts_with("0x") || is_decimal(rest)) {
    place.number = number_in(rest);
    if (!place.number) return wrong("is no number: digits 0 to 9 and a to f follow 0x");
    return place;
  }
  place.symbol = rest;
  size_t plus = rest.rfind('+');
  if (plus != rest.npos && plus > 0 && !rest.ends_with("operator+") && !rest.ends_with("operator++")) {
    auto offset = number_in(rest.substr(plus + 1));
    if (!offset)
      return wrong(fmt::format("has no number behind its +: write {0}+0x12 or {0}+18", rest.substr(0, plus)));
    place.symbol.erase(plus);
    place.offset = *offset;
  }
  if (place.symbol.find_first_of("*?") != std::string::npos && !place.symbol.starts_with("operator"))
    return wrong("has a wildcard: a place is one instruction; for functions there is -f");
  return place;
}

Result<Places> Places::parse(const std::vector<std::string>& texts) {
  Places places;
  for (const std::string& text : texts) places.places_.push_back(SONDE_TRY(parse_one(text)));
  return places;
}

Result<std::vector<ImageAddr>> Places::find_one(const Place& place, const LoadedImage& loaded) {
  const Image& image = *loaded.image;
  std::vector<ImageAddr> found;
  if (place.number) {
    std::optional<ImageAddr> at;
    if (!place.module.empty()) at = at_file_offset(image, *place.number);
    else if (loaded.range.contains(Addr(*place.number))) at = loaded.to_image(Addr(*place.number));
    if (!at || !is_code(image, *at)) {
      if (place.module.empty()) return found;
      return fail(fmt::format("{}: no code lies at that offset of {}", place.text, image.path()), 2);
    }
    found.push_back(*at);
  } else if (place.line) {
    LineCode code = image.line_code(place.source, place.line);
    if (code.file_known && code.line == 0)
      return fail(fmt::format("{}: {} has no code from that line on", place.text, place.source), 2);
    std::map<const Function*, ImageAddr> first;  // of several pieces of a line in one function
    for (ImageAddr at : code.addresses)
      if (auto hit = image.find(at)) first.try_emplace(hit->function, at);
    for (auto [function, at] : first) found.push_back(at);
  } else {
    for (const Function* f : functions_called(image, place.symbol)) {
      if (!f->sizeless && place.offset >= f->range.size())
        return fail(fmt::format("{} is outside of {}, which has {}", place.text, display_name(image, *f),
                                counted(f->range.size(), "byte")),
                    2);
      found.push_back(f->range.begin + static_cast<int64_t>(place.offset));
    }
  }
  for (ImageAddr at : found) SONDE_TRY_VOID(check_instruction(place.text, image, at));
  return found;
}

Result<std::vector<ImageAddr>> Places::find(const LoadedImage& loaded, bool is_program) {
  if (is_program) program_ = loaded.image.get();
  std::vector<ImageAddr> all;
  for (Place& place : places_) {
    bool everywhere = !place.in_program;
    if (place.module.empty() ? !is_program && !everywhere : !place.module.matches(*loaded.image)) continue;
    auto found = SONDE_TRY(find_one(place, loaded));
    if (found.empty()) continue;
    place.found = true;
    place.in_program |= is_program;
    all.insert(all.end(), found.begin(), found.end());
  }
  std::ranges::sort(all);
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

std::vector<std::string> Places::waiting() const {
  std::vector<std::string> texts;
  for (const Place& p : places_)
    if (!p.found) texts.push_back(p.text);
  return texts;
}

std::optional<Error> Places::unmatched(std::span<const std::shared_ptr<const Image>> images) const {
  std::string message;
  for (const Place& p : places_) {
    if (p.found) continue;
    std::vector<const Image*> meant;
    for (auto& image : images)
      if (p.module.empty() || p.module.matches(*image)) meant.push_back(image.get());
    message += message.empty() ? "" : ". ";
    if (meant.empty() && !p.module.file.empty()) continue;
    if (meant.empty()) {
      std::vector<std::string> files;
      for (auto& image : images) files.push_back(base_name(image->path()));
      message +=
          fmt::format("no loaded file is called {}{}", p.module.text, nearest_text(nearest(p.module.text, files)));
    } else if (p.number) {
      message += fmt::format("{}: no code of a file lies at that address of the process", p.text);
    } else if (p.line) {
      message += fmt::format("{}: no debug information of a loaded file knows {}", p.text, p.source);
    } else {
      const Image* first = p.module.empty() && program_ ? program_ : meant.front();
      message += fmt::format("no function is called {}{}", p.symbol, nearest_functions_text(p.symbol, first, meant));
      for (auto& fact : facts_about(p.symbol, *first)) message += "; " + fact;
    }
  }
  if (message.empty()) return std::nullopt;
  return Error{printable(message), 2};
}

}  // namespace sonde::host
