// Entries -> pieces of code with one row -> one sorted list of changes. Entries may come in any order, overlap, be empty
// or lie outside of the code.
#include "host/tables/compile.h"

#include <fmt/format.h>

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

#include "host/tables/builder.h"
#include "host/tables/cfi_program.h"
#include "host/tables/row_from_cfi.h"

namespace sonde::host {
namespace {

constexpr uint32_t kMachineX86_64 = 62, kMachineAarch64 = 183;
constexpr uint64_t kMaxPltPieces = 1 << 20;  // expanded in one image, so that no input makes a table without bounds

// A change of row, in bytes from the beginning of the entry.
struct Piece {
  uint32_t offset;
  uint16_t row;
};

// A vector that costs little to append to, in large pages where it is large.
template <class T>
class Appended {
 public:
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  void push_back(T item) {
    if (size_ == room_) reserve(2 * room_ + 256);
    items_[size_++] = item;
  }
  void resize(size_t smaller) { size_ = smaller; }
  void reserve(size_t room) {
    if (room <= room_) return;
    constexpr size_t kLargePage = size_t{2} << 20;
    bool large = room * sizeof(T) >= 2 * kLargePage;
    size_t bytes = large ? (room * sizeof(T) + kLargePage - 1) & ~(kLargePage - 1) : room * sizeof(T);
    void* memory = large ? std::aligned_alloc(kLargePage, bytes) : std::malloc(bytes);
    if (!memory) throw std::bad_alloc();
    if (large) madvise(memory, bytes, MADV_HUGEPAGE);
    if (size_) std::memcpy(memory, items_.get(), size_ * sizeof(T));
    items_.reset(static_cast<T*>(memory)), room_ = room;
  }
  const T& operator[](size_t i) const { return items_.get()[i]; }
  const T& back() const { return items_.get()[size_ - 1]; }
  std::span<const T> span() const { return {items_.get(), size_}; }

 private:
  static_assert(std::is_trivially_copyable_v<T>);
  struct Free {
    void operator()(T* items) const { std::free(items); }
  };
  std::unique_ptr<T[], Free> items_;
  size_t size_ = 0, room_ = 0;
};

// One entry's code, or the part of it that is executable; its changes are pieces_[first, first + count).
struct Span {
  uint64_t begin, end;
  uint64_t origin;  // where its pieces count from
  uint32_t first, count;
};

// What RowMaker made of a state, kept for the next equal one: a file has few. One section's, as states refer to its bytes.
class Memo {
 public:
  struct Entry {
    const Cie* cie = nullptr;
    uint16_t row = 0;
    bool lost_register = false;
    std::optional<Inexpressible> reason;
    FrameState state;
  };
  // For a section of so many bytes.
  explicit Memo(size_t section) {
    size_t entries = 16;
    while (entries < section / 256 && entries < 2048) entries *= 2;
    entries_.resize(entries);
    shift_ = static_cast<unsigned>(std::countl_zero(entries) + 1);
  }

  // Where the result for this state is, or belongs; `found`: it is there.
  Entry& at(const FrameState& state, const Slots& slots, const Cie* cie, bool* found) {
    uint64_t place = (state.hash + reinterpret_cast<uintptr_t>(cie)) * 0x9e3779b97f4a7c15;
    Entry& entry = entries_[place >> shift_];
    *found = entry.cie == cie && std::memcmp(&entry.state, &state, state.used(slots)) == 0;
    return entry;
  }

 private:
  unsigned shift_;
  std::vector<Entry> entries_;
};

class Compiler {
 public:
  explicit Compiler(const RowSources& source) : source_(source), builder_(source.machine) {
    Row stop;
    stop.flags = kRowInexpressible;
    stop_ = *builder_.row(stop);
    for (const ImageRange& code : source.executable) {  // sorted; made disjoint
      if (!executable_.empty() && code.begin <= executable_.back().end)
        executable_.back().end = std::max(executable_.back().end, code.end);
      else executable_.push_back(code);
    }
  }

  Result<CompiledTable> run() {
    for (const CfiSection& section : source_.sections) add_section(section);
    begin_source();
    for (const CfiSection& section : source_.debug_frames) add_section(section);
    stats_.debug_entries = end_source();
    begin_source();
    for (const SFrameSection& section : source_.sframes) add_sframe(section);
    stats_.sframe_entries = end_source();
    sort_spans(spans_);
    merge();
    CompiledTable out;
    out.bytes = SONDE_TRY(builder_.finish(changes_.span(), end_));
    const TableHeader& header = Table::at(out.bytes.data()).header();
    stats_.rows = header.row_count;
    stats_.expressions = header.expression_count;
    count_changes();
    stats_.table_bytes = out.bytes.size();
    out.stats = std::move(stats_);
    return out;
  }

 private:
  static bool has_expression(const Row& row) {
    auto is = [](ValueKind kind) { return kind == ValueKind::at_expression || kind == ValueKind::is_expression; };
    return row.cfa_kind == CfaKind::expression || is(row.ra_kind) ||
           std::ranges::any_of(row.saved, [&](const SavedReg& saved) { return is(saved.kind); });
  }
  void count_changes() {
    std::span<const uint32_t> uses = builder_.uses();
    stats_.changes = changes_.size() - uses.back();
    stats_.gaps = uses.back();
    stats_.inexpressible_changes = uses[stop_];
    for (uint32_t row = 0; row < builder_.row_count(); row++)
      if (uses[row] && has_expression(builder_.row(static_cast<uint16_t>(row)))) stats_.by_expression += uses[row];
  }
  static void sort_spans(std::vector<Span>& spans) {
    auto by_begin = [](const Span& a, const Span& b) { return a.begin < b.begin; };
    if (std::is_sorted(spans.begin(), spans.end(), by_begin)) return;
    std::vector<std::pair<uint64_t, uint32_t>> order;  // smaller to move about
    order.reserve(spans.size());
    for (const Span& span : spans) order.emplace_back(span.begin, static_cast<uint32_t>(order.size()));
    std::stable_sort(order.begin(), order.end());  // runs of ascending ones, for which it is the faster one
    std::vector<Span> sorted;
    sorted.reserve(spans.size());
    for (auto [begin, number] : order) sorted.push_back(spans[number]);
    spans = std::move(sorted);
  }

  // What follows is of a source that is asked only about code that no earlier one has entries for.
  void begin_source() { earlier_ = spans_.size(); }
  // Cuts its spans down to that code; how many of its entries are left.
  size_t end_source() {
    if (spans_.size() == earlier_) return 0;
    std::vector<Span> fresh(spans_.begin() + static_cast<long>(earlier_), spans_.end());
    spans_.resize(earlier_);
    sort_spans(spans_);
    sort_spans(fresh);
    std::vector<ImageRange> covered;
    for (const Span& span : spans_)
      if (!covered.empty() && span.begin <= covered.back().end.value)
        covered.back().end = std::max(covered.back().end, ImageAddr(span.end));
      else covered.push_back({ImageAddr(span.begin), ImageAddr(span.end)});
    size_t left = 0;
    for (const Span& span : fresh) {
      size_t before = spans_.size();
      uint64_t at = span.begin;
      auto next = std::upper_bound(covered.begin(), covered.end(), ImageAddr(at),
                                   [](ImageAddr address, const ImageRange& range) { return address < range.end; });
      for (; next != covered.end() && next->begin.value < span.end; ++next) {
        if (at < next->begin.value) spans_.push_back({at, next->begin.value, span.origin, span.first, span.count});
        at = next->end.value;
      }
      if (at < span.end) spans_.push_back({at, span.end, span.origin, span.first, span.count});
      left += spans_.size() > before;
    }
    return left;
  }

  void add_section(const CfiSection& section) {
    spans_.reserve(spans_.size() + section.bytes.size() / 40);
    pieces_.reserve(pieces_.size() + section.bytes.size() / 5);
    CfiProgram program(section, source_.machine);
    RowMaker maker(section, source_.machine, builder_);
    Memo memo(section.bytes.size());
    size_t count = 0;
    CfiEntries entries = read_entries(section, [&](const Fde& fde) {
      count++;
      add_entry(fde.range, [&] { return add_pieces(fde, program, maker, memo); });
    });
    if (!section.debug_frame) {
      stats_.source_bytes += section.bytes.size();
      stats_.common_entries += entries.cies.size();
      stats_.entries += count;
    }
    stats_.unusable_entries += entries.unusable;
  }

  void add_sframe(const SFrameSection& section) {
    auto sframe = SFrame::open(section, source_.machine);
    if (!sframe) return stats_.refused.push_back(sframe.error().message);
    std::vector<SFrameRow> rows;
    for (const SFrameFunction& function : sframe->functions())
      add_entry(function.range, [&] { return add_sframe_pieces(function, *sframe, rows); });
  }

  // Adds spans for the entry's code and what `add` makes as its pieces; if that fails, the whole entry stops walks.
  template <class Add>
  void add_entry(ImageRange range, Add&& add) {
    if (range.begin == range.end) return void(stats_.empty_entries++);
    if (!RowChange::holds(range.begin.value) || !RowChange::holds(range.end.value))
      return void(stats_.outside_entries++);
    size_t spans_before = spans_.size();
    uint64_t covered = 0;
    auto code = std::upper_bound(executable_.begin(), executable_.end(), range.begin,
                                 [](ImageAddr begin, const ImageRange& code) { return begin < code.end; });
    for (; code != executable_.end() && code->begin < range.end; ++code) {
      spans_.push_back(
          {std::max(code->begin, range.begin).value, std::min(code->end, range.end).value, range.begin.value, 0, 0});
      covered += spans_.back().end - spans_.back().begin;
    }
    if (covered != range.size()) stats_.outside_entries++;
    if (spans_.size() == spans_before) return;
    // Expansion of PLT rules walks over code that exists, not over what the entry claims.
    code_ = {ImageAddr(spans_[spans_before].begin), ImageAddr(spans_.back().end)};
    origin_ = range.begin.value;
    uint32_t first = static_cast<uint32_t>(pieces_.size());
    std::optional<Inexpressible> failed;
    if (code_.end.value - origin_ > UINT32_MAX) failed = Inexpressible::malformed_program;
    else failed = add();
    if (failed) {
      pieces_.resize(first);
      pieces_.push_back({0, stopped(*failed)});
    }
    for (size_t i = spans_before; i < spans_.size(); i++)
      spans_[i].first = first, spans_[i].count = static_cast<uint32_t>(pieces_.size()) - first;
  }
  void add_piece(uint64_t address, uint16_t row) {
    if (address < code_.end.value) pieces_.push_back({static_cast<uint32_t>(address - origin_), row});
  }

  std::optional<Inexpressible> add_pieces(const Fde& fde, CfiProgram& program, RowMaker& maker, Memo& memo) {
    if (!fde.cie->understood) return Inexpressible::unknown_augmentation;
    std::optional<RowResult> plt;  // of the piece before, which ends where the next one starts
    uint64_t plt_begin = 0;
    auto expand = [&](uint64_t end) {
      if (plt) expand_plt(*plt, plt_begin, end);
      plt.reset();
    };
    ProgramError error = program.run(fde, [&](uint64_t address, const FrameState& state) {
      expand(address);
      bool known;
      Memo::Entry& entry = memo.at(state, program.slots(), fde.cie, &known);
      if (!known) {
        RowResult made = maker.make(state, program.slots(), *fde.cie);
        if (made.plt) {
          plt = made, plt_begin = address;
          entry.cie = nullptr;
          stats_.lost_registers += made.lost_register;
          return add_piece(address, number(made.row));
        }
        entry.cie = fde.cie, entry.state = state;
        entry.row = 0, entry.lost_register = made.lost_register, entry.reason = made.reason;
        if (!made.reason) {
          auto number = builder_.row(made.row);
          if (number) entry.row = *number;
          else entry.reason = Inexpressible::too_many_rows;
        }
      }
      stats_.lost_registers += entry.lost_register && !entry.reason;
      add_piece(address, entry.reason ? stopped(*entry.reason) : entry.row);
    });
    expand(fde.range.end.value);
    if (error == ProgramError::unknown_operation) return Inexpressible::unknown_operation;
    if (error == ProgramError::malformed) return Inexpressible::malformed_program;
    return std::nullopt;
  }

  std::optional<Inexpressible> add_sframe_pieces(const SFrameFunction& function, const SFrame& sframe,
                                                 std::vector<SFrameRow>& rows) {
    if (!sframe.rows(function, &rows)) return Inexpressible::malformed_sframe;
    uint64_t step = function.repeat ? function.repeat : function.range.size(), end = code_.end.value;
    uint64_t begin = origin_ + (code_.begin.value - origin_) / step * step;
    if ((plt_pieces_ += (end - begin) / step * rows.size()) > kMaxPltPieces && function.repeat)
      return Inexpressible::too_many_rows;
    for (uint64_t at = begin; at < end; at += step)
      for (const SFrameRow& row : rows)
        add_piece(at + row.offset, row.expressible ? number(row.row) : stopped(Inexpressible::sframe_row));
    return std::nullopt;
  }

  // Replaces the last piece, whose CFA depends on the pc, by one or two per stub.
  void expand_plt(const RowResult& made, uint64_t begin, uint64_t end) {
    begin = std::max(begin, code_.begin.value), end = std::min(end, code_.end.value);
    if (begin >= end || (plt_pieces_ += (end - begin) / 8 + 2) > kMaxPltPieces) return;
    Row low = made.row;
    low.cfa_kind = CfaKind::reg_offset;
    low.cfa_reg = made.plt->reg;
    low.cfa_offset = static_cast<int32_t>(made.plt->offset);
    Row high = low;
    high.cfa_offset += 8;
    if (low.cfa_offset != made.plt->offset || high.cfa_offset < low.cfa_offset) return;
    pieces_.resize(pieces_.size() - 1);
    for (uint64_t at = begin; at < end;) {
      bool pushed = (at & 15) >= made.plt->threshold;
      stats_.plt_stubs += pushed;
      add_piece(at, number(pushed ? high : low));
      at = pushed ? (at | 15) + 1 : (at & ~uint64_t{15}) + made.plt->threshold;
    }
  }

  uint16_t number(const Row& row) {
    auto found = builder_.row(row);
    return found ? *found : stopped(Inexpressible::too_many_rows);
  }
  uint16_t stopped(Inexpressible reason) {
    stats_.inexpressible[static_cast<unsigned>(reason)]++;
    return stop_;
  }

  // Calls visit(begin, end, row) for each piece of a span.
  template <class Visit>
  void for_pieces(const Span& span, Visit&& visit) const {
    for (uint32_t i = span.first; i < span.first + span.count; i++) {
      uint64_t begin = std::max(span.origin + pieces_[i].offset, span.begin);
      uint64_t end =
          i + 1 < span.first + span.count ? std::min(span.origin + pieces_[i + 1].offset, span.end) : span.end;
      if (begin < end) visit(begin, end, pieces_[i].row);
    }
  }

  void add_change(uint64_t address, uint16_t row) {
    if (changes_.empty() || changes_.back().row != row) changes_.push_back({address, row});
  }
  void merge() {
    changes_.reserve(pieces_.size() + spans_.size() + 1);
    for (size_t i = 0; i < spans_.size();) {
      size_t next = i + 1;
      uint64_t end = spans_[i].end;
      for (; next < spans_.size() && spans_[next].begin < end; next++) end = std::max(end, spans_[next].end);
      if (!changes_.empty() && end_ < spans_[i].begin) add_change(end_, kGapRow);
      if (next == i + 1) for_pieces(spans_[i], [&](uint64_t begin, uint64_t, uint16_t row) { add_change(begin, row); });
      else merge_overlapping(std::span(spans_).subspan(i, next - i));
      end_ = end;
      i = next;
    }
  }

  // Where entries agree their row holds, where they do not nobody is believed.
  void merge_overlapping(std::span<const Span> cluster) {
    stats_.overlapping_entries += cluster.size();
    struct Edge {
      uint64_t address;
      uint16_t row;
      int count;
    };
    std::vector<Edge> edges;
    for (const Span& span : cluster)
      for_pieces(span, [&](uint64_t begin, uint64_t end, uint16_t row) {
        edges.push_back({begin, row, 1});
        edges.push_back({end, row, -1});
      });
    std::sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) { return a.address < b.address; });
    std::map<uint16_t, int> active;
    bool disagreed = false;
    for (size_t i = 0; i < edges.size();) {
      uint64_t address = edges[i].address;
      for (; i < edges.size() && edges[i].address == address; i++)
        if ((active[edges[i].row] += edges[i].count) == 0) active.erase(edges[i].row);
      if (active.empty()) continue;  // the cluster's end
      bool disagree = active.size() > 1;
      uint16_t row = active.begin()->first;
      if (disagree) row = disagreed ? stop_ : stopped(Inexpressible::overlap);
      disagreed = disagree;
      add_change(address, row);
    }
  }

  const RowSources& source_;
  TableBuilder builder_;
  TableStats stats_;
  uint16_t stop_;
  ImageRange code_{};
  uint64_t origin_ = 0, plt_pieces_ = 0, end_ = 0;
  size_t earlier_ = 0;  // spans of the sources before
  std::vector<ImageRange> executable_;
  std::vector<Span> spans_;
  Appended<Piece> pieces_;
  Appended<RowChange> changes_;
};

}  // namespace

const char* describe(Inexpressible reason) {
  switch (reason) {
    case Inexpressible::malformed_program: return "malformed instructions";
    case Inexpressible::unknown_operation: return "unknown instruction";
    case Inexpressible::unknown_augmentation: return "unknown augmentation";
    case Inexpressible::no_cfa: return "no usable CFA rule";
    case Inexpressible::cfa_expression: return "unknown operation in CFA expression";
    case Inexpressible::no_return_rule: return "no usable return address rule";
    case Inexpressible::stack_pointer_rule: return "stack pointer is not the CFA";
    case Inexpressible::overlap: return "entries disagree";
    case Inexpressible::malformed_sframe: return "malformed SFrame rows";
    case Inexpressible::sframe_row: return "SFrame row without a meaning";
    case Inexpressible::too_many_rows: return "too many distinct rows";
  }
  return "unknown";
}

Result<CompiledTable> compile_rows(const RowSources& source) {
  if (source.machine != kMachineX86_64 && source.machine != kMachineAarch64)
    return fail(fmt::format("unwind tables for machine {} are not supported", source.machine));
  return Compiler(source).run();
}

}  // namespace sonde::host
