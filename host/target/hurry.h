// Who gets a processor first. Everything here does nothing where it is not permitted (CAP_SYS_NICE).
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace sonde::host {

// struct sched_attr of <linux/sched/types.h>, which cannot be included together with <sched.h>.
struct Scheduling {
  uint32_t size = sizeof(Scheduling), policy = 0;  // SCHED_OTHER
  uint64_t flags = 1;  // SCHED_FLAG_RESET_ON_FORK: not inherited
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime = 0, deadline = 0, period = 0;

  bool set(pid_t tid) const;  // 0: the calling thread
};

// A thread of the ordinary policy comes before others while this lives. What it starts meanwhile is as anybody else.
class Hurry {
 public:
  explicit Hurry(pid_t tid = 0, int by = 10);  // 0: the calling thread
  ~Hurry();
  Hurry(Hurry&& other) noexcept;

 private:
  pid_t tid_;  // -1: nothing is to be put back
  Scheduling before_;
};

}  // namespace sonde::host
