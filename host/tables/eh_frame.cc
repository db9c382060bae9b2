// Entries -> pieces of code with one row -> one sorted list of changes. Entries may come in any order, overlap, be empty
// or lie outside of the code.
#include "host/tables/eh_frame.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "core/base/check.h"
#include "host/tables/builder.h"
#include "host/tables/cfi_program.h"
#include "host/tables/row_from_cfi.h"

namespace sonde::host {
namespace {

constexpr uint32_t kMachineX86_64 = 62, kMachineAarch64 = 183;
constexpr uint64_t kMaxPltPieces = 1 << 20;  // expanded in one image, so that no input makes a table without bounds

// One entry's code, or the part of it that is executable; its changes are pieces_[first, first + count).
struct Span {
  uint64_t begin, end;
  uint32_t first, count;
};

class Compiler {
 public:
  explicit Compiler(const EhFrameSource& source) : source_(source), builder_(source.machine) {
    // Row 0 is always the one that says: stop here.
    Row stop;
    stop.flags = kRowInexpressible;
    stop_ = *builder_.row(stop);
    for (const ImageRange& code : source.executable) {  // sorted; made disjoint
      if (!executable_.empty() && code.begin <= executable_.back().end)
        executable_.back().end = std::max(executable_.back().end, code.end);
      else
        executable_.push_back(code);
    }
  }

  Result<CompiledTable> run() {
    for (const CfiSection& section : source_.sections) add_section(section);
    std::sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    merge();
    CompiledTable out;
    out.bytes = SONDE_TRY(builder_.finish(changes_, end_));
    auto table = Table::open(out.bytes);
    SONDE_CHECK(table.has_value());
    table->for_each([&](ImageAddr, ImageAddr, const Row* row) { row ? stats_.changes++ : stats_.gaps++; });
    stats_.rows = table->header().row_count;
    stats_.expressions = table->header().expression_count;
    stats_.table_bytes = out.bytes.size();
    out.stats = stats_;
    return out;
  }

 private:
  void add_section(const CfiSection& section) {
    CfiEntries entries = read_entries(section);
    stats_.source_bytes += section.bytes.size();
    stats_.common_entries += entries.cies.size();
    stats_.entries += entries.fdes.size();
    stats_.unusable_entries += entries.unusable;
    CfiProgram program(section, source_.machine);
    RowMaker maker(section, source_.machine, builder_);
    for (const Fde& fde : entries.fdes) add_entry(fde, program, maker);
  }

  void add_entry(const Fde& fde, CfiProgram& program, RowMaker& maker) {
    if (fde.range.begin == fde.range.end) return void(stats_.empty_entries++);
    size_t spans_before = spans_.size();
    uint64_t covered = 0;
    auto code = std::upper_bound(executable_.begin(), executable_.end(), fde.range.begin,
                                 [](ImageAddr begin, const ImageRange& range) { return begin < range.end; });
    for (; code != executable_.end() && code->begin < fde.range.end; ++code) {
      spans_.push_back({std::max(code->begin, fde.range.begin).value, std::min(code->end, fde.range.end).value, 0, 0});
      covered += spans_.back().end - spans_.back().begin;
    }
    if (covered != fde.range.size()) stats_.outside_entries++;
    if (spans_.size() == spans_before) return;
    // Expansion of PLT rules walks over code that exists, not over what the entry claims.
    code_ = {ImageAddr(spans_[spans_before].begin), ImageAddr(spans_.back().end)};
    uint32_t first = static_cast<uint32_t>(pieces_.size());
    if (auto failed = add_pieces(fde, program, maker)) {
      pieces_.resize(first);
      pieces_.push_back({fde.range.begin.value, stopped(*failed)});
    }
    for (size_t i = spans_before; i < spans_.size(); i++)
      spans_[i].first = first, spans_[i].count = static_cast<uint32_t>(pieces_.size()) - first;
  }

  std::optional<Inexpressible> add_pieces(const Fde& fde, CfiProgram& program, RowMaker& maker) {
    if (!fde.cie->understood) return Inexpressible::unknown_augmentation;
    std::optional<RowResult> plt;  // of the piece before, which ends where the next one starts
    uint64_t plt_begin = 0;
    auto expand = [&](uint64_t end) {
      if (plt) expand_plt(*plt, plt_begin, end);
      plt.reset();
    };
    ProgramError error = program.run(fde, [&](uint64_t address, const FrameState& state) {
      expand(address);
      RowResult made = maker.make(state, *fde.cie);
      stats_.lost_registers += made.lost_register;
      if (made.reason) return pieces_.push_back({address, stopped(*made.reason)});
      if (made.plt) plt = made, plt_begin = address;
      pieces_.push_back({address, number(made.row)});
    });
    expand(fde.range.end.value);
    if (error == ProgramError::unknown_operation) return Inexpressible::unknown_operation;
    if (error == ProgramError::malformed) return Inexpressible::malformed_program;
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
    pieces_.pop_back();
    for (uint64_t at = begin; at < end;) {
      bool pushed = (at & 15) >= made.plt->threshold;
      stats_.plt_stubs += pushed;
      pieces_.push_back({at, number(pushed ? high : low)});
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
      uint64_t begin = std::max(pieces_[i].address, span.begin);
      uint64_t end = i + 1 < span.first + span.count ? std::min(pieces_[i + 1].address, span.end) : span.end;
      if (begin < end) visit(begin, end, pieces_[i].row);
    }
  }

  void merge() {
    for (size_t i = 0; i < spans_.size();) {
      size_t next = i + 1;
      uint64_t end = spans_[i].end;
      for (; next < spans_.size() && spans_[next].begin < end; next++) end = std::max(end, spans_[next].end);
      if (!changes_.empty() && end_ < spans_[i].begin) changes_.push_back({end_, kGapRow});
      if (next == i + 1)
        for_pieces(spans_[i], [&](uint64_t begin, uint64_t, uint16_t row) { changes_.push_back({begin, row}); });
      else
        merge_overlapping(std::span(spans_).subspan(i, next - i));
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
      changes_.push_back({address, row});
    }
  }

  const EhFrameSource& source_;
  TableBuilder builder_;
  TableStats stats_;
  uint16_t stop_;
  ImageRange code_{};
  uint64_t plt_pieces_ = 0, end_ = 0;
  std::vector<ImageRange> executable_;
  std::vector<Span> spans_;
  std::vector<RowChange> pieces_, changes_;
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
    case Inexpressible::too_many_rows: return "too many distinct rows";
  }
  return "unknown";
}

Result<CompiledTable> compile_eh_frame(const EhFrameSource& source) {
  if (source.machine != kMachineX86_64 && source.machine != kMachineAarch64)
    return fail(fmt::format("unwind tables for machine {} are not supported", source.machine));
  return Compiler(source).run();
}

}  // namespace sonde::host
