// Sonde's walk of a stepped program, as `sonde stack` makes it of a stopped one: the same tables, special code and step
// loop. And a plain one: rows carried out as they stand, with no special code, no checks, no repair; what a table says.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/walk/walker.h"
#include "host/image/maps.h"
#include "host/tables/cache.h"
#include "tests/step/program.h"

namespace sonde::stepping {

// What somebody says of a stack: pcs from the interrupted one outwards.
struct Chain {
  std::vector<uint64_t> pcs;
  std::vector<uint64_t> sps;  // of each frame, from who tells
};

struct Walk {
  std::vector<Frame> frames;
  WalkResult result;
};

class Walks {
 public:
  explicit Walks(Program& program) : program_(program) {}

  // Reads images and tables anew if execution stands in code that was mapped since.
  void refresh();
  Walk walk(bool reliable_only, bool with_cache);
  Chain plain(size_t limit);

  // "file:function+offset"; "file:0x1234" where nothing is known, "generated code" outside of files.
  std::string name(uint64_t pc, bool is_return) const;
  // "file:function" or "file:section": what a frame that is not believed is counted under.
  std::string place(uint64_t pc, bool is_return) const;
  // The row in force, in words.
  std::string row(uint64_t pc, bool is_return) const;
  const host::LoadedImage* image_at(uint64_t pc) const;

 private:
  template <class Isa>
  Chain plain_from(RegSet<Isa> regs, size_t limit);
  const TableArena* arena() const { return reinterpret_cast<const TableArena*>(arena_.data()); }

  Program& program_;
  uint64_t generation_ = 0;
  std::vector<host::LoadedImage> images_;
  std::vector<host::SharedTable> tables_;
  std::vector<uint8_t> arena_;
  std::unique_ptr<RowCache> cache_;
};

}  // namespace sonde::stepping
