// One state of a stepped program: what sonde's walks say, held against the truth. Counts, and words about what is wrong.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/step/shadow.h"
#include "tests/step/walks.h"

namespace sonde::stepping {

enum class Answer : uint8_t { right, refused, wrong };

struct Counts {
  uint64_t states = 0;  // compared with the truth
  uint64_t reliable = 0;  // whole stacks, each frame reliable and true
  uint64_t wrong = 0;  // called reliable, and not the truth: must be zero
  uint64_t forms_differ = 0;  // with and without cache, reliable only and best effort: must be zero
  uint64_t unknown = 0,
           unknown_reliable = 0;  // states whose truth nobody knows; and those of them that sonde called reliable
  uint64_t rewritten = 0;  // frames whose slot no longer held what the call had put there, and sonde gave what it held
  uint64_t best_effort_right = 0;  // of the unreliable ones: best effort gives the true chain all the same
  size_t deepest = 0;
  uint64_t plain_refused = 0, plain_wrong = 0;  // the rows as they stand
  uint64_t plain_bad_where_unreliable = 0;  // of the states that sonde calls unreliable
  std::map<std::string, uint64_t> reasons;  // of unreliable states
  std::map<std::string, uint64_t> places, wrong_places;  // "reason place"
  std::vector<std::string> first_wrong;  // in words
};

// The true chain, innermost first. slots[i]: where chain[i] is held, 0 for the first, for interrupted pcs and where calls push nothing;
// sps[i]: the stack pointer that frame i has once its callee has returned.
struct Truth {
  std::vector<uint64_t> chain, slots, sps;
  bool known = true, to_the_end = true;
};
Truth truth_of(const Shadow& shadow, const Program& program);

Answer judge(const Chain& chain, const Truth& truth, Program& program);

class Comparison {
 public:
  Comparison(Program& program, Walks& walks) : program_(program), walks_(walks) {}
  // The state that the program stands in. True if sonde calls it reliable; *compared: its truth is known.
  bool compare(const Truth& truth, bool* compared);
  Counts counts;
  uint64_t show = 0;  // so many unreliable states of each place in words
  Answer last_plain = Answer::right;

 private:
  // 0: right so far as it is called reliable, pcs and where they were found. Else the number of the first false frame + 1.
  size_t first_false(const Walk& walk, const Truth& truth);
  std::string in_words(const Walk& walk, const Truth& truth, size_t first) const;

  Program& program_;
  Walks& walks_;
};

}  // namespace sonde::stepping
