// See check.h.
#include "host/check/check.h"

#include <elf.h>
#include <fmt/format.h>

#include <algorithm>

#include "core/isa/x86_64.h"
#include "host/check/flow.h"
#include "host/tables/print.h"

namespace sonde::host::check {
namespace {

// As the walker tells such rows (core/walk/place.h): neither found by sp or fp, nor the return address just below the CFA.
bool describes_another(const Row& row) {
  bool pushed = row.ra_kind == ValueKind::at_cfa && row.ra_offset == -8;
  bool by_frame = row.cfa_kind == CfaKind::reg_offset && (row.cfa_reg == X86_64::rsp || row.cfa_reg == X86_64::rbp);
  return !pushed && !by_frame;
}

class Checker {
 public:
  Checker(const Image& image, const Table& table) : image_(image), table_(table), code_(image), pads_(image) {}

  Report run() {
    for (Part& part : code_.parts())
      for (Op& op : part.ops)
        if (uint64_t pad = pads_.pad_of(op.pc); pad && op.act == Act::call)
          if (Part* to = code_.part_at(pad))
            if (Op* target = to->find(pad)) target->leader = true;
    for (Part& part : code_.parts())
      if (part.entry) merge(part, follow(code_, part, table_, pads_, part.begin));
    for (uint64_t entry : code_.inner_entries()) {
      Part& part = *code_.part_at(entry);
      if (begins_with_a_frame(part)) merge_inner(follow(code_, part, table_, pads_, entry));
    }
    for (Part& part : code_.parts()) add_report(part);
    return std::move(report_);
  }

 private:
  // Its first row is not one of a function that was just called: a cold part, or several functions under one row.
  bool begins_with_a_frame(const Part& part) const {
    const Row* row = table_.lookup(ImageAddr(part.begin));
    return row && row->cfa_kind == CfaKind::reg_offset && row->cfa_reg == X86_64::rsp && row->cfa_offset > 8 &&
           row->ra_kind == ValueKind::at_cfa && row->ra_offset == -8;
  }

  // Of code that another function lies around only the frame is judged: what it keeps of the registers nobody says.
  void merge_inner(FunctionFlow flow) {
    for (auto& [pc, seen] : flow.seen) {
      seen.judgement.wrong &= kWrongCfa | kWrongReturn;
      if (seen.judgement.verdict == Verdict::wrong && !seen.judgement.wrong) seen.judgement.verdict = Verdict::unknown;
      keep(pc, std::move(seen));
    }
  }

  void keep(uint64_t pc, Seen seen) {
    auto [it, fresh] = seen_.try_emplace(pc, seen);
    if (!fresh && it->second.judgement.verdict < seen.judgement.verdict) it->second = std::move(seen);
  }

  // An instruction that several functions lead to has the worst of their answers.
  void merge(const Part& part, FunctionFlow flow) {
    clobbered_[part.function] = flow.clobbered;
    for (auto& [pc, seen] : flow.seen) {
      // What is exported keeps to the calling convention.
      if (!image_.functions()[part.function].global) seen.judgement.wrong &= static_cast<uint8_t>(~flow.clobbered);
      if (seen.judgement.verdict == Verdict::wrong && !seen.judgement.wrong) seen.judgement.verdict = Verdict::unknown;
      keep(pc, std::move(seen));
    }
  }

  void add_report(const Part& part) {
    if (part.ops.empty()) return;
    FunctionReport out{.function = part.function, .findings = {}};
    if (auto it = clobbered_.find(part.function); it != clobbered_.end()) out.clobbered = it->second;
    for (const Op& op : part.ops) {
      auto it = seen_.find(op.pc);
      if (it == seen_.end() && is_filler(op)) continue;  // between blocks and behind the last one
      Verdict verdict = it == seen_.end() ? Verdict::unreached : it->second.judgement.verdict;
      out.counts[static_cast<unsigned>(verdict)]++;
      report_.judged.push_back({op.pc, verdict});
      if (verdict >= Verdict::unknown) out.findings.push_back(finding(op, it->second));
    }
    for (unsigned v = 0; v < kVerdicts; v++) report_.counts[v] += out.counts[v];
    report_.functions.push_back(std::move(out));
  }

  bool is_filler(const Op& op) const {
    auto insn = decode(code_.bytes(op.pc).first(op.length), op.pc);
    return insn && is_padding(*insn);
  }

  Finding finding(const Op& op, const Seen& seen) const {
    return {.pc = ImageAddr(op.pc),
            .verdict = seen.judgement.verdict,
            .length = op.length,
            .wrong = seen.judgement.wrong,
            .elsewhere = seen.row && !(seen.row->flags & kRowInexpressible) && describes_another(*seen.row),
            .insn = format_insn(code_.bytes(op.pc).first(op.length), op.pc),
            .row = format_row(table_, seen.row),
            .truth = seen.truth};
  }

  const Image& image_;
  const Table& table_;
  Code code_;
  LandingPads pads_;
  std::unordered_map<uint64_t, Seen> seen_;
  std::unordered_map<uint32_t, uint8_t> clobbered_;
  Report report_;
};

}  // namespace

Verdict Report::at(ImageAddr pc) const {
  auto it = std::ranges::lower_bound(judged, pc.value, {}, &Judged::pc);
  return it != judged.end() && it->pc == pc.value ? it->verdict : Verdict::unreached;
}

std::vector<ImageRange> Report::refuted() const {
  std::vector<ImageRange> ranges;
  for (const FunctionReport& f : functions)
    for (const Finding& finding : f.findings)
      if (finding.verdict == Verdict::wrong) ranges.push_back({finding.pc, finding.pc + finding.length});
  std::ranges::sort(ranges, {}, &ImageRange::begin);
  return ranges;
}

Result<Report> check_image(const Image& image, const Table& table) {
  if (image.machine() != EM_X86_64)
    return fail(fmt::format("{} is for another machine: only x86-64 files can be checked", image.path()));
  return Checker(image, table).run();
}

std::string describe_wrong(uint8_t wrong) {
  std::string text;
  auto add = [&](std::string_view word) { text += text.empty() ? "" : ", ", text += word; };
  if (wrong & kWrongCfa) add("cfa");
  if (wrong & kWrongReturn) add("ra");
  for (unsigned i = 0; i < X86_64::kSaved.size(); i++)
    if (wrong >> i & 1) add(register_name(EM_X86_64, X86_64::kSaved[i]));
  return text;
}

}  // namespace sonde::host::check
