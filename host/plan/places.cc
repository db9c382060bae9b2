#include "host/plan/places.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <map>
#include <unordered_map>

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

constexpr int64_t kLandingPadBytes = 4;

// One line of a file of places: without what surrounds the place.
std::string place_in(std::string line) {
  line.erase(std::min(line.find('#'), line.size()));
  size_t begin = line.find_first_not_of(" \t\r"), end = line.find_last_not_of(" \t\r");
  return begin == line.npos ? "" : line.substr(begin, end - begin + 1);
}

}  // namespace

std::string point_name(const Image& image, ImageAddr at) {
  if (auto hit = image.find(at)) {
    const Function& f = *hit->function;
    if (!f.name.empty()) return fmt::format("{}+{:#x}", demangle(f.name), hit->offset);
  }
  return fmt::format("{}+{:#x}", base_name(image.path()), at.value);
}

bool is_landing_pad(const Image& image, ImageAddr at) {
  auto insn = decode(image.bytes({at, at + kLandingPadBytes}), at.value);
  return insn && insn->landing_pad;
}

void Instructions::decode_function(const Function& function, ImageRange range) {
  function_ = &function, end_ = range.begin;
  starts_.clear();
  auto code = image_.bytes(range);
  for (size_t i = 0; i < code.size();) {
    auto insn = decode(code.subspan(i), range.begin.value + i);
    if (!insn) break;
    starts_.push_back(end_);
    i += insn->length;
    end_ = range.begin + static_cast<int64_t>(i);
  }
}

std::span<const ImageAddr> Instructions::around(ImageAddr at) {
  auto hit = image_.find(at);
  if (!hit) return {};
  const Function& f = *hit->function;
  // Where a function without a size ends, nobody knows.
  if (f.sizeless) decode_function(f, {f.range.begin, at + 1});
  else if (&f != function_) decode_function(f, f.range);
  return at < end_ ? std::span<const ImageAddr>(starts_)
                   : std::span<const ImageAddr>();  // what lies behind does not matter
}

std::span<const ImageAddr> Instructions::of(const Function& function) {
  if (function.sizeless) return {};
  if (&function != function_) decode_function(function, function.range);
  return end_ >= function.range.end ? std::span<const ImageAddr>(starts_) : std::span<const ImageAddr>();
}

bool Instructions::begins(ImageAddr at) { return std::ranges::binary_search(around(at), at); }

std::vector<ImageAddr> Instructions::beside(ImageAddr at) {
  auto starts = around(at);
  auto behind = std::ranges::upper_bound(starts, at);
  std::vector<ImageAddr> both;
  if (behind != starts.begin()) both.push_back(*std::prev(behind));
  if (behind != starts.end()) both.push_back(*behind);
  return both;
}

std::string Instructions::beside_text(ImageAddr at) {
  std::string text;
  for (ImageAddr a : beside(at)) text += (text.empty() ? "; instructions begin at " : " and ") + point_name(image_, a);
  return text;
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
  if (rest.ends_with("+*") && rest.size() > 2) {
    place.symbol.resize(rest.size() - 2);
    place.every = true;
    return place;
  }
  size_t plus = rest.rfind('+');
  if (plus != rest.npos && plus > 0 && !rest.ends_with("operator+") && !rest.ends_with("operator++")) {
    auto offset = number_in(rest.substr(plus + 1));
    if (!offset)
      return wrong(fmt::format("has no number behind its +: write {0}+0x12 or {0}+18", rest.substr(0, plus)));
    place.symbol.erase(plus);
    place.offset = *offset;
  }
  if (place.symbol.find_first_of("*?") != std::string::npos && !place.symbol.starts_with("operator"))
    return wrong(
        "has a wildcard: a place is one instruction; write GLOB+* for every one of the functions that "
        "GLOB matches");
  return place;
}

Result<Places> Places::parse(const std::vector<std::string>& texts) {
  Places places;
  for (const std::string& text : texts) {
    if (!text.starts_with('@')) {
      places.places_.push_back(SONDE_TRY(parse_one(text)));
      continue;
    }
    std::string path = text.substr(1);
    std::ifstream in(path);
    if (!in) return fail(fmt::format("the file of places {} cannot be read", path), 2);
    size_t number = 0;
    for (std::string line; std::getline(in, line);) {
      number++;
      std::string one = place_in(std::move(line));
      if (one.empty()) continue;
      auto place = parse_one(one);
      if (!place) return fail(fmt::format("{}:{}: {}", path, number, place.error().message), 2);
      places.places_.push_back(std::move(*place));
    }
    if (in.bad()) return fail(fmt::format("the file of places {} cannot be read", path), 2);
  }
  return places;
}

// Finds places in one image.
class Places::Finder {
 public:
  // `called`: the places that will be looked for.
  Finder(const LoadedImage& loaded, std::span<const Place* const> called)
      : loaded_(loaded), image_(*loaded.image), instructions_(image_) {
    for (const Place* p : called)
      if (!p->symbol.empty() && !p->every) by_name_[p->symbol];
    if (by_name_.empty()) return;
    // By that name, its parameters or a version left out or not; what an indirect function's own code is, nobody means.
    for (const Function& f : image_.functions()) {
      if (f.ifunc) continue;
      if (f.name.empty()) add(display_name(image_, f), f);
      for (const CallName& n : call_names(f))
        if (!n.versioned) add(n.name, f);
    }
  }

  Result<std::vector<ImageAddr>> find(const Place& place) {
    if (place.number) return at_number(place);
    if (place.line) return at_line(place);
    if (place.every) return of_functions(place);
    std::vector<ImageAddr> found;
    // As an instruction of a function without a name is called.
    ImageAddr whole(place.offset);
    if (place.symbol == base_name(image_.path()) && is_code(image_, whole)) return std::vector{whole};
    for (const Function* f : by_name_.at(place.symbol)) {
      if (!f->sizeless && place.offset >= f->range.size())
        return fail(fmt::format("{} is outside of {}, which has {}", place.text, display_name(image_, *f),
                                counted(f->range.size(), "byte")),
                    2);
      found.push_back(f->range.begin + static_cast<int64_t>(place.offset));
    }
    return found;
  }

  std::vector<std::string> skipped;  // functions that a glob matches and whose instructions cannot be told apart

  // Where an instruction begins, all is well.
  Result<void> check(const std::string& text, ImageAddr at) {
    if (instructions_.begins(at)) return {};
    auto hit = image_.find(at);
    if (!hit) return fail(fmt::format("{}: {} belongs to no function that is known", text, point_name(image_, at)), 2);
    if (instructions_.around(at).empty())
      return fail(
          fmt::format("{}: the code of {} cannot be read up to there", text, display_name(image_, *hit->function)), 2);
    return fail(fmt::format("{} is inside an instruction{}", text, instructions_.beside_text(at)), 2);
  }

 private:
  void add(const std::string& name, const Function& f) {
    auto it = by_name_.find(name);
    if (it != by_name_.end() && (it->second.empty() || it->second.back() != &f)) it->second.push_back(&f);
  }

  Result<std::vector<ImageAddr>> at_number(const Place& place) const {
    std::optional<ImageAddr> at;
    if (!place.module.empty()) at = at_file_offset(image_, *place.number);
    else if (loaded_.range.contains(Addr(*place.number))) at = loaded_.to_image(Addr(*place.number));
    if (at && is_code(image_, *at)) return std::vector{*at};
    if (place.module.empty()) return {};
    return fail(fmt::format("{}: no code lies at that offset of {}", place.text, image_.path()), 2);
  }

  Result<std::vector<ImageAddr>> at_line(const Place& place) const {
    LineCode code = image_.line_code(place.source, place.line);
    if (code.file_known && code.line == 0)
      return fail(fmt::format("{}: {} has no code from that line on", place.text, place.source), 2);
    std::map<const Function*, ImageAddr> first;  // of several pieces of a line in one function
    for (ImageAddr at : code.addresses)
      if (auto hit = image_.find(at)) first.try_emplace(hit->function, at);
    std::vector<ImageAddr> found;
    for (auto [function, at] : first) found.push_back(at);
    return found;
  }

  Result<std::vector<ImageAddr>> of_functions(const Place& place) {
    std::vector<ImageAddr> found;
    std::vector<std::string> unknown;
    for (const Function& f : image_.functions()) {
      if (f.ifunc) continue;
      auto matches = [&](const CallName& n) { return !n.versioned && matches_glob(place.symbol, n.name); };
      bool its = f.name.empty() ? matches_glob(place.symbol, display_name(image_, f))
                                : std::ranges::any_of(call_names(f), matches);
      if (!its) continue;
      auto own = instructions_.of(f);
      if (own.empty()) unknown.push_back(display_name(image_, f));
      found.insert(found.end(), own.begin(), own.end());
    }
    if (found.empty() && !unknown.empty())
      return fail(fmt::format("{}: where the instructions of {} begin is not known", place.text, unknown.front()), 2);
    skipped.insert(skipped.end(), unknown.begin(), unknown.end());
    return found;
  }

  const LoadedImage& loaded_;
  const Image& image_;
  std::unordered_map<std::string, std::vector<const Function*>> by_name_;
  Instructions instructions_;
};

Result<std::vector<ImageAddr>> Places::find(const LoadedImage& loaded, bool is_program) {
  auto all = SONDE_TRY(find(loaded, is_program, false));
  std::vector<ImageAddr> alone;
  for (ImageAddr at : all)
    if (!is_landing_pad(*loaded.image, at) || !std::ranges::binary_search(all, at + kLandingPadBytes))
      alone.push_back(at);
  return alone;
}

Result<std::vector<ImageAddr>> Places::find_any(const LoadedImage& loaded, bool is_program) {
  return find(loaded, is_program, true);
}

Result<std::vector<ImageAddr>> Places::find(const LoadedImage& loaded, bool is_program, bool any) {
  if (is_program) program_ = loaded.image.get();
  std::vector<Place*> meant;
  for (Place& place : places_) {
    bool everywhere = !place.in_program;
    if (place.module.empty() ? is_program || everywhere : place.module.matches(*loaded.image)) meant.push_back(&place);
  }
  std::vector<ImageAddr> all;
  Finder finder(loaded, std::vector<const Place*>(meant.begin(), meant.end()));
  for (Place* place : meant) {
    auto found = SONDE_TRY(finder.find(*place));
    if (found.empty()) continue;
    place->found = true;
    place->in_program |= is_program;
    for (ImageAddr at : found)
      if (!any && !place->every) SONDE_TRY_VOID(finder.check(place->text, at));
    all.insert(all.end(), found.begin(), found.end());
  }
  for (const std::string& name : finder.skipped)
    notes_.push_back(fmt::format("no instruction of {} is probed: where they begin is not known", name));
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
