// For tests: a made-up process. Code ranges with rows, words of memory, stacks, special code, all put into one arena.
// Addresses of code without a call instruction behind them are filled in by call_site().
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <vector>

#include "core/isa/code.h"
#include "core/unwind/arena.h"
#include "core/walk/walker.h"

namespace sonde::test {

template <class Isa>
struct World {
  static constexpr uint64_t kText = 0x400000, kTextEnd = 0x410000, kBias = 0x20000;
  static constexpr uint64_t kStack = 0x7ffe00000000, kStackEnd = 0x7ffe00010000;
  static constexpr uint64_t kTrampolineText = 0x10000000, kEntries = 0x20000000;
  static constexpr bool kX86 = Code<Isa>::kKeyIsSlot;

  std::map<uint64_t, Row> rows;  // from this target address on, until the next
  std::map<uint64_t, uint8_t> memory;
  std::vector<AddrRange> stacks = {{Addr(kStack), Addr(kStackEnd)}};
  std::vector<SpecialEntry> specials;
  std::vector<DetourEntry> detours;
  std::vector<DetourStepEntry> steps;
  std::vector<std::vector<uint8_t>> expressions;
  bool trampolines = false;
  uint64_t generation = 1;
  std::vector<uint64_t> block;

  void word(uint64_t address, uint64_t value) {
    for (int i = 0; i < 8; i++) memory[address + i] = static_cast<uint8_t>(value >> 8 * i);
  }
  void bytes(uint64_t address, std::vector<uint8_t> code) {
    for (uint8_t b : code) memory[address++] = b;
  }
  uint64_t word_at(uint64_t address) const {
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) value = value << 8 | memory.at(address + i);
    return value;
  }
  // A call instruction that ends at `address`, in front of and behind it nops.
  uint64_t call_site(uint64_t address) {
    nops(address - 8, 16);
    bytes(address - (kX86 ? 5 : 4),
          kX86 ? std::vector<uint8_t>{0xe8, 0, 0, 0, 0} : std::vector<uint8_t>{0, 0, 0, 0x94});
    return address;
  }
  void nops(uint64_t address, int count) {
    for (int i = 0; i < count; i++)
      memory[address + i] = kX86 ? 0x90 : std::array<uint8_t, 4>{0x1f, 0x20, 0x03, 0xd5}[i % 4];
  }
  void entry(unsigned number, uint64_t real, uint64_t key) {
    trampolines = true;
    word(kEntries + number * kTrampolineStride, real);
    word(kEntries + number * kTrampolineStride + 8, key);
  }
  static uint64_t trampoline(unsigned number) { return kTrampolineText + number * kTrampolineStride; }
  // The key of an activation whose return address stands just below cfa.
  static uint64_t key(uint64_t cfa) { return kX86 ? cfa - 8 : cfa; }

  static Row outermost() { return Row{.cfa_reg = Isa::kSp}; }
  static Row gap() { return Row{.flags = 0x80}; }  // of this test only
  // Return address just below the CFA, frame pointer below that if `saves_fp`.
  static Row row(uint8_t reg, int cfa, bool saves_fp = false) {
    Row r{.cfa_offset = cfa, .cfa_reg = reg, .ra_kind = ValueKind::at_cfa, .ra_offset = -8};
    if (saves_fp) r.saved[0] = {-16, ValueKind::at_cfa};
    return r;
  }

  std::vector<uint8_t> table() const {
    std::vector<Row> dictionary;
    std::vector<uint8_t> offsets, numbers;
    std::vector<uint16_t> fine;
    std::vector<TableBlock> blocks;
    uint64_t base = kText - kBias;
    auto change = [&](uint64_t address, uint8_t number) {
      offsets.push_back(static_cast<uint8_t>(address));
      numbers.push_back(number);
    };
    uint8_t current = kGapByte;
    auto next = rows.begin();
    for (uint64_t at = kText; at < kTextEnd; at += 1 << kFineShift) {
      if (at % (1 << kBlockShift) == 0) {
        if (!blocks.empty()) fine.push_back(static_cast<uint16_t>(offsets.size() - blocks.back().first_change));
        blocks.push_back({static_cast<uint32_t>(offsets.size()), static_cast<uint32_t>(fine.size())});
      }
      fine.push_back(static_cast<uint16_t>(offsets.size() - blocks.back().first_change));
      if (at % (1 << kBlockShift) == 0 && (next == rows.end() || next->first != at)) change(at, current);
      for (; next != rows.end() && next->first < at + (1 << kFineShift); ++next) {
        current = next->second == gap() ? kGapByte : static_cast<uint8_t>(dictionary.size());
        if (current != kGapByte) dictionary.push_back(next->second);
        change(next->first, current);
      }
    }
    fine.push_back(static_cast<uint16_t>(offsets.size() - blocks.back().first_change));
    REQUIRE(dictionary.size() < kGapByte);
    std::vector<uint32_t> starts = {0};
    std::vector<uint8_t> text;
    for (auto& e : expressions)
      text.insert(text.end(), e.begin(), e.end()), starts.push_back(static_cast<uint32_t>(text.size()));
    TableHeader h{};
    h.magic = kTableMagic, h.version = kTableVersion, h.machine = kX86 ? 62 : 183;
    h.base = base, h.span = kTextEnd - kText;
    h.row_count = static_cast<uint32_t>(dictionary.size()), h.block_count = static_cast<uint32_t>(blocks.size());
    h.fine_count = static_cast<uint32_t>(fine.size());
    h.expression_count = static_cast<uint32_t>(expressions.size()),
    h.change_count = static_cast<uint32_t>(offsets.size());
    h.expression_bytes = static_cast<uint32_t>(text.size());
    blocks.push_back({h.change_count, kNoFine});
    std::vector<uint8_t> out(sizeof h);
    auto add = [&](const void* data, size_t size) {
      uint32_t at = static_cast<uint32_t>(out.size());
      out.resize((at + size + 7) & ~size_t{7});
      if (size) std::memcpy(out.data() + at, data, size);
      return at;
    };
    h.rows = add(dictionary.data(), dictionary.size() * sizeof(Row));
    h.blocks = add(blocks.data(), blocks.size() * sizeof(TableBlock));
    h.expression_starts = add(starts.data(), starts.size() * 4);
    h.fine = add(fine.data(), fine.size() * 2);
    h.change_offsets = add(offsets.data(), offsets.size());
    h.change_rows = add(numbers.data(), numbers.size());
    h.expressions = add(text.data(), text.size());
    h.size = out.size();
    std::memcpy(out.data(), &h, sizeof h);
    h.checksum = table_checksum({out.data() + kChecksummedFrom, out.size() - kChecksummedFrom});
    std::memcpy(out.data(), &h, sizeof h);
    REQUIRE(Table::open(out));
    return out;
  }

  const TableArena* arena() {
    std::vector<uint8_t> out(sizeof(TableArena));
    auto add = [&](const void* data, size_t size) {
      uint64_t at = out.size();
      out.resize((at + size + 7) & ~size_t{7});
      if (size) std::memcpy(out.data() + at, data, size);
      return at;
    };
    std::ranges::sort(specials, {}, &SpecialEntry::begin);
    std::ranges::sort(detours, {}, &DetourEntry::begin);
    TableArena a{};
    a.generation = generation;
    a.image_count = 1, a.special_count = static_cast<uint32_t>(specials.size());
    a.detour_count = static_cast<uint32_t>(detours.size()), a.step_count = static_cast<uint32_t>(steps.size());
    if (trampolines) a.trampolines = kTrampolineText, a.entries = kEntries;
    auto packed = table();
    ImageEntry image{kText, kTextEnd, kBias, add(packed.data(), packed.size()), kText, kTextEnd, 0, 0, 0, 0, 0};
    a.images_offset = add(&image, sizeof image);
    a.detours_offset = add(detours.data(), detours.size() * sizeof(DetourEntry));
    a.steps_offset = add(steps.data(), steps.size() * sizeof(DetourStepEntry));
    a.specials_offset = add(specials.data(), specials.size() * sizeof(SpecialEntry));
    a.size = out.size();
    std::memcpy(out.data(), &a, sizeof a);
    block.assign((out.size() + 7) / 8, 0);
    std::memcpy(block.data(), out.data(), out.size());
    return reinterpret_cast<const TableArena*>(block.data());
  }

  AnyMemory any_memory() {
    return {this,
            [](void* self, Addr a, uint64_t* value) {
              auto& m = static_cast<World*>(self)->memory;
              *value = 0;
              for (int i = 7; i >= 0; i--) {
                auto found = m.find(a.value + static_cast<uint64_t>(i));
                if (found == m.end()) return false;
                *value = *value << 8 | found->second;
              }
              return true;
            },
            [](void* self, Addr sp, AddrRange* stack) {
              for (auto& s : static_cast<World*>(self)->stacks)
                if (s.contains(sp)) return *stack = s, true;
              return false;
            }};
  }

  struct Stack {
    WalkResult result;
    std::vector<Frame> frames;
    uint64_t pc(size_t i) const { return i < frames.size() ? frames[i].pc.value : 0; }
    std::vector<uint64_t> pcs() const {
      std::vector<uint64_t> all;
      for (auto& f : frames) all.push_back(f.pc.value);
      return all;
    }
    std::vector<Reason> reasons() const {
      std::vector<Reason> all;
      for (auto& f : frames) all.push_back(f.reason);
      return all;
    }
  };

  WalkStart<Isa> start;
  void at(uint64_t pc, uint64_t sp, uint64_t fp = 0) {
    start.regs.valid = 0;
    for (unsigned r = 0; r < Isa::kRegs; r++) start.regs.set(r, 0);
    start.regs.set(Isa::kPc, pc), start.regs.set(Isa::kSp, sp), start.regs.set(Isa::kFp, fp);
  }
  Stack walk(RowCache* cache = nullptr, size_t room = 64) {
    const TableArena* a = arena();
    AnyMemory m = any_memory();
    Stack stack;
    stack.frames.resize(room);
    stack.result = sonde::walk(a, cache, m, start, std::span<Frame>(stack.frames));
    stack.frames.resize(stack.result.frames);
    return stack;
  }
  Stack walk_reliable() {
    start.reliable_only = true;
    Stack stack = walk();
    start.reliable_only = false;
    return stack;
  }
};

}  // namespace sonde::test
