// What the bench of walkers consists of: walkers that each fill an array with the return addresses they find, from where
// they stand outwards. walk_peers.cc has everybody else's, walk_own.cc sonde's and the two limits, walk.cc runs them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sonde::bench {

constexpr unsigned kMostFrames = 512;

struct Walker {
  std::string name;
  // Frames found, their addresses in `out`. It may show frames of its own first.
  unsigned (*walk)(uint64_t* out);
  bool frame_pointers = false;  // needs them
  bool packed = false;  // only the low 48 bits are an address
  std::string missing{};  // why it cannot be had
};

std::vector<Walker> own_walkers();
std::vector<Walker> peers();

// Before the first walk of a thread and behind its last one.
void begin_thread();
void end_thread();
// sonde's tables of this process; once, when everything is loaded.
void map_tables();
void end_frame_pointers_at(uint64_t fp);
// Of sonde's last walk of this thread: every frame reliable, to the outermost.
bool last_was_whole();
// How many of sonde's walks of this thread the short way (core/walk/usual_steps.h) did not carry to the end.
uint64_t left_by_the_short_way();

}  // namespace sonde::bench
