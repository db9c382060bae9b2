// Chooses each site's method, cheapest first, and lays out the detours. Sites constrain each other: no byte is patched
// twice, and a byte that a punned jump reads as its displacement is patched by nobody.
#pragma once

#include <map>
#include <optional>
#include <span>

#include "host/plan/address_space.h"
#include "host/plan/system_calls.h"
#include "host/plan/targets.h"
#include "host/plan/window.h"

namespace sonde::host {

class Planner {
 public:
  Planner(const CodeView& view, const PlanRequest& request);

  // Which of the sites' `entry`s, ascending, are instructions that can be probed. Comes first: nothing else covers one of these.
  void find_points(std::span<SitePlan> sites, std::span<const CodeRange> functions);
  // Those that the request asks for, numbered behind its functions and points. Comes before plan(), which moves none of them.
  void plan_system_calls(ImagePlan& plan);
  // Plans sites[i] for functions[i], and what find_points() found. Sites that are refused already are left alone.
  void plan(std::span<SitePlan> sites, std::span<const CodeRange> functions);
  void finish(ImagePlan& plan) const;

 private:
  struct Candidate {
    SitePlan* site;
    uint32_t number;
    CodeRange function;
    Window window;
    uint64_t relied = 0;  // bytes that the detour stands for or a jump reads
  };
  void choose(std::vector<Candidate> candidates, bool force_traps);
  struct Decoded {  // how far a function has been
    uint64_t function = 0, end = 0;
  };
  Refusal check_point(Candidate& c, uint64_t at, Decoded& decoded) const;
  void mark_points();
  std::vector<Candidate> open_points();
  void refuse(Candidate& c, Refusal reason);
  bool plan_jump(Candidate& c);
  bool plan_short_jump(Candidate& c);
  bool plan_punned_jump(Candidate& c);
  bool plan_pun(Candidate& c, const Displaced& displaced, uint32_t prefixes);
  bool plan_trap(Candidate& c);

  // A detour in the main arena.
  bool add_detour(Candidate& c, const Displaced& displaced);
  bool place_detour(Candidate& c, const Displaced& displaced, uint64_t at, uint64_t pointer);
  void set_patch(Candidate& c, Method method, std::vector<uint8_t> bytes);
  std::optional<uint64_t> find_island(uint64_t patch);
  std::optional<uint64_t> place_punned(Candidate& c, const Displaced& displaced, uint64_t from, uint64_t to);
  void reserve_arena(size_t sites);

  const CodeView& view_;
  const PlanRequest& request_;
  Targets targets_;
  AddressSpace space_;
  IntervalSet changed_;  // patched bytes
  IntervalSet locked_;  // bytes that punned jumps depend on, and those of earlier plans
  IntervalSet earlier_;  // the latter: not what the file says
  std::vector<Candidate> points_;
  IntervalSet wanted_;  // points' first bytes, while system calls are planned
  SystemCalls calls_;
  uint64_t arena_ = 0, arena_at_ = 0, arena_end_ = 0;  // the main arena: pointer, then detours
  bool arena_used_ = false;  // at least by its pointer
  uint64_t reach_begin_ = 0, reach_end_ = 0;  // addresses within 2 GB of the whole image
  std::map<uint64_t, std::vector<uint8_t>> writes_;  // outside the main arena
  std::vector<uint8_t> arena_bytes_;
};

}  // namespace sonde::host
