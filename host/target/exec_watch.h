// Notices when a recorded process becomes another program by exec: nothing follows it there. Asked from outside now and
// then, so a program that lives for less than that is known by its name only.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <string>

namespace sonde::host {

class ExecWatch {
 public:
  // `program`: the file that the process runs now.
  ExecWatch(pid_t pid, std::string program);

  // Cheap enough for every turn of a loop: looks only from time to time.
  void look();
  // The process has ended and is not reaped yet. `as_itself`: it was seen to exit as the program that it was, or its new
  // name may be one that it gave itself.
  void look_at_ended(bool as_itself);

  // What it became last, as a sentence with the command that would record it; "" if nothing is known of an exec.
  std::string note() const;

 private:
  std::string comm() const;
  uint64_t stack() const;

  pid_t pid_;
  std::string program_, comm_;
  uint64_t stack_;  // where its first stack begins: another place after each exec, even of the same file
  bool became_ = false;
  std::string file_, command_;  // of the other program; "" if it was not seen alive
  std::chrono::steady_clock::time_point next_;
};

}  // namespace sonde::host
