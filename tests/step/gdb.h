// What gdb says. It is told that the stepped program is a remote one: this is the stub at the other end, which answers for the
// instruction that the program stands at. So one gdb looks at all states of a run.
#pragma once

#include <memory>
#include <string>

#include "tests/step/tracee.h"
#include "tests/step/walks.h"

namespace sonde::stepping {

class Gdb {
 public:
  // `program`: its file; `script`: gdb_stacks.py; `folder`: for the socket.
  Gdb(Tracee& tracee, std::string program, std::string script, std::string folder);
  ~Gdb();
  // nothing if gdb did not answer; then *problem says why, and no more is asked.
  bool chain(size_t limit, Chain* chain, std::string* problem);

 private:
  bool start(std::string* problem);
  bool serve(std::string* answer, std::string* problem);
  bool take_packets();
  std::string reply_to(const std::string& packet);
  void send(const std::string& payload);

  Tracee& tracee_;
  std::string program_, script_, folder_, input_;
  pid_t pid_ = 0;
  int listener_ = -1, connection_ = -1, to_gdb_ = -1, from_gdb_ = -1;
  uint64_t generation_ = 0;
  bool no_ack_ = false, failed_ = false;
};

}  // namespace sonde::stepping
