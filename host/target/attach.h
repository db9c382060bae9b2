// Puts the agent into a program that runs, and says which thread of it may be made to call functions of its C library.
//
//   memory files         made by the program's process, opened from here: no rights and no namespaces stand between
//   a lent thread        stands outside the loader and the allocator, by a reliable walk of its stack; the others run
//   dlopen(agent)        on a stack of its own
//
// The program's environment, descriptors and signal actions are as before afterwards.
#pragma once

#include <memory>
#include <string>

#include "host/target/agent_file.h"
#include "host/target/hurry.h"
#include "host/target/stack_target.h"
#include "host/target/tracee.h"

namespace sonde::host {

// A thread that stands at a place where it may call dlopen, and is made to do what the program does not notice.
class LentThread {
 public:
  // Waits up to some seconds for a thread to come to such a place.
  static Result<LentThread> find(pid_t pid);
  LentThread(LentThread&&) = default;

  Tracee& tracee() { return tracee_; }
  Addr syscall_instruction() const { return syscall_; }
  // Calls an exported function of the program's C library.
  Result<uint64_t> call(const std::string& function, std::initializer_list<uint64_t> arguments);
  // Memory of the program's process for texts and results, given back at the end.
  Result<Addr> put(const std::string& text);
  Result<std::string> read_text(Addr at);
  ~LentThread();

 private:
  LentThread(StillThread still, Tracee tracee, std::shared_ptr<StackTarget> images, Addr syscall)
      : still_(std::move(still)),
        tracee_(std::move(tracee)),
        images_(std::move(images)),
        syscall_(syscall),
        hurry_(tracee_.thread()) {}
  Result<void> make_scratch();
  StillThread still_;  // outlives tracee_
  Tracee tracee_;
  std::shared_ptr<StackTarget> images_;
  Addr syscall_, scratch_;
  uint64_t used_ = 0;
  Hurry hurry_;  // or it waits for its turn among many that never rest, after each of its system calls, which stop it
};

struct Attached {
  pid_t pid = 0;
  std::string program;
  int session_fd = -1, presence_fd = -1;  // ours
  int their_session_fd = -1, their_presence_fd = -1;  // the same files in the program's process
  Addr agent_handle;  // of dlopen
};

// What forbids to attach to the process, before anything is touched; its id, if a thread's was given. `left`: whether an agent is
// in it whose recorder is gone; that must be taken out first.
Result<pid_t> check_attachable(pid_t pid, const AgentFile& agent, bool* left);

// The process whose recorder stopped living without taking its agent out: takes it out. Value: as that of Target::detach.
Result<std::string> take_out_left(pid_t pid, const AgentFile& agent);

// Closing the descriptors is up to the caller (theirs: Target::install).
Result<Attached> attach(pid_t pid, const AgentFile& agent, LentThread& lent);

}  // namespace sonde::host
