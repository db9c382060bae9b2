#include "host/image/functions.h"

#include <elf.h>
#include <fmt/format.h>

#include <algorithm>

namespace sonde::host {
namespace {

bool typed(const RawSymbol& s) { return s.type == STT_FUNC || s.type == STT_GNU_IFUNC; }
bool untyped(const RawSymbol& s) { return s.type == STT_NOTYPE; }
bool local(const RawSymbol& s) { return s.binding == STB_LOCAL; }

size_t leading_underscores(std::string_view name) { return std::min(name.find_first_not_of('_'), name.size()); }

// Whether a is the better name of the two for a person: what a program calls rather than the library's own alias.
bool better_name(const RawSymbol& a, const RawSymbol& b) {
  auto key = [](const RawSymbol& s) {
    return std::tuple(!typed(s), s.type != STT_GNU_IFUNC, local(s), !s.version.empty() && !s.default_version,
                      leading_underscores(s.name), s.binding != STB_GLOBAL, s.name.size(), s.name);
  };
  return key(a) < key(b);
}

std::string versioned(const RawSymbol& s) {
  if (s.version.empty()) return std::string(s.name);
  return fmt::format("{}{}{}", s.name, s.default_version ? "@@" : "@", s.version);
}

uint64_t believable_size(const RawSymbol& s) {
  return typed(s) && s.limit > s.addr.value && s.size <= s.limit - s.addr.value ? s.size : 0;
}

// All symbols of one address.
struct Group {
  std::span<const RawSymbol> symbols;
  ImageAddr addr() const { return symbols.front().addr; }
  uint64_t limit() const { return symbols.front().limit; }
};

class Builder {
 public:
  Builder(std::span<const FdeRange> ranges, bool stripped, std::span<const ImageRange> stubs)
      : ranges_(ranges), stripped_(stripped), stubs_(stubs) {}

  std::vector<Function> build(std::vector<RawSymbol> symbols) {
    std::erase_if(symbols, [](auto& s) { return !s.executable; });
    std::ranges::sort(symbols, [](auto& a, auto& b) { return a.addr != b.addr ? a.addr < b.addr : better_name(a, b); });
    for (size_t i = 0; i < symbols.size();) {
      size_t end = i + 1;
      while (end < symbols.size() && symbols[end].addr == symbols[i].addr) end++;
      add({std::span(symbols).subspan(i, end - i)});
      i = end;
    }
    if (stripped_) add_unnamed();
    clip();
    return std::move(functions_);
  }

 private:
  // The unwind range that holds addr, if any.
  const FdeRange* range_at(ImageAddr addr) const {
    auto it = std::ranges::upper_bound(ranges_, addr, {}, [](auto& r) { return r.range.begin; });
    return it != ranges_.begin() && (it - 1)->range.contains(addr) ? &*(it - 1) : nullptr;
  }

  void add(Group group) {
    const RawSymbol& best = group.symbols.front();
    ImageAddr addr = group.addr();
    const FdeRange* unwind = range_at(addr);
    bool own_unwind = unwind && unwind->range.begin == addr;
    uint64_t size = 0;
    for (auto& s : group.symbols) size = std::max(size, believable_size(s));
    if (addr < outer_end_ && !own_unwind) return;
    if (size == 0 && unwind && !own_unwind) return;
    boundaries_.push_back(addr);
    if (!typed(best) && !untyped(best)) return;  // an object among the code only ends what comes before
    bool label = untyped(best) && local(best);
    if (label && stripped_) return;

    Function f{.range = {addr, addr}, .name = std::string(best.name), .aliases = {}, .source = FunctionSource::dynsym};
    name(group, f);
    f.cold_part = is_cold_part(f.name);
    f.label = label;
    uint64_t end = addr.value + size;
    if (size == 0) end = own_unwind ? unwind->range.end.value : stripped_ ? addr.value + 1 : 0;
    f.sizeless = size == 0 && !own_unwind && stripped_;
    if (own_unwind && !unwind->entry_state && local(best)) f.cold_part = true;
    f.range.end = ImageAddr(end ? std::min(end, group.limit()) : group.limit());
    outer_end_ = size ? ImageAddr(own_unwind ? std::min(end, unwind->range.end.value) : end) : addr;
    functions_.push_back(std::move(f));
  }

  static void name(Group group, Function& f) {
    for (auto& s : group.symbols) {
      if (!typed(s) && !untyped(s)) continue;
      if (!s.dynamic) f.source = FunctionSource::symtab;
      f.global |= !local(s);
      f.ifunc |= s.type == STT_GNU_IFUNC;
      std::string full = versioned(s);
      if (full != f.name) f.aliases.push_back(std::move(full));
    }
    std::ranges::sort(f.aliases);
    // .symtab names a symbol once more than .dynsym does; foo beside foo@V says nothing new.
    auto [first, last] = std::ranges::unique(f.aliases);
    f.aliases.erase(first, last);
    std::erase_if(f.aliases, [&](auto& a) {
      return a.find('@') == a.npos && std::ranges::any_of(f.aliases, [&](auto& b) {
               return b.size() > a.size() && b.starts_with(a) && b[a.size()] == '@';
             });
    });
  }

  // Code that only its unwind range delimits: unnamed functions between the named ones.
  void add_unnamed() {
    std::vector<Function> named = std::move(functions_);
    functions_.clear();
    size_t next = 0;
    for (auto& r : ranges_) {
      while (next < named.size() && named[next].range.begin <= r.range.begin)
        functions_.push_back(std::move(named[next++]));
      ImageAddr begin = r.range.begin;
      if (!functions_.empty() && functions_.back().range.end > begin) continue;
      if (std::ranges::any_of(stubs_, [&](auto& stub) { return stub.contains(begin); })) continue;
      boundaries_.push_back(begin);
      functions_.push_back({.range = r.range,
                            .name = "",
                            .aliases = {},
                            .source = FunctionSource::eh_frame,
                            .cold_part = !r.entry_state});
    }
    while (next < named.size()) functions_.push_back(std::move(named[next++]));
    std::ranges::sort(boundaries_);
  }

  // No function reaches beyond the start of the next symbol that counts.
  void clip() {
    size_t next = 0;
    for (auto& f : functions_) {
      while (next < boundaries_.size() && boundaries_[next] <= f.range.begin) next++;
      if (next < boundaries_.size()) f.range.end = std::min(f.range.end, boundaries_[next]);
    }
    std::erase_if(functions_, [](auto& f) { return f.range.begin >= f.range.end; });
  }

  std::span<const FdeRange> ranges_;
  bool stripped_;
  std::span<const ImageRange> stubs_;
  std::vector<ImageAddr> boundaries_;  // sorted
  ImageAddr outer_end_;                // end of the last sized function
  std::vector<Function> functions_;
};

}  // namespace

bool is_cold_part(std::string_view name) {
  auto at = name.find(".cold");
  return at != name.npos && at > 0 && (at + 5 == name.size() || name[at + 5] == '.');
}

std::vector<Function> build_functions(std::vector<RawSymbol> symbols, std::span<const FdeRange> ranges, bool stripped,
                                      std::span<const ImageRange> stubs) {
  return Builder(ranges, stripped, stubs).build(std::move(symbols));
}

}  // namespace sonde::host
