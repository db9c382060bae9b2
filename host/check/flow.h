// One function executed along all its paths, and each of its instructions compared with its row.
//
// Paths that are not certain are weak: behind a call, which may never return, and out of a jump table, whose length nobody
// states. They are given up where another path brings a different stack pointer to the same place, or where the table
// itself changes its row along them.
#pragma once

#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "host/check/code.h"
#include "host/check/judge.h"
#include "host/check/landing_pads.h"

namespace sonde::host::check {

struct Seen {
  Judgement judgement;
  const Row* row = nullptr;
  std::string truth;  // of all but right ones
};

struct FunctionFlow {
  std::map<uint64_t, Seen> seen;  // by pc: every instruction that a path leads to
  uint8_t clobbered = 0;  // bit i: saved[i] no exit gives back as it came: a convention of its own, or not known
  bool gave_up = false;  // too large
};

// From the beginning of the part, or from `begin` in it, where calls enter too.
FunctionFlow follow(Code& code, Part& part, const Table& table, const LandingPads& pads, uint64_t begin);

}  // namespace sonde::host::check
