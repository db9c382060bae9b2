#include "host/target/hurry.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace sonde::host {

bool Scheduling::set(pid_t tid) const { return syscall(SYS_sched_setattr, tid, this, 0) == 0; }

Hurry::Hurry(pid_t tid, int by) : tid_(-1) {
  if (syscall(SYS_sched_getattr, tid, &before_, sizeof before_, 0) != 0 || before_.policy != SCHED_OTHER) return;
  Scheduling first = before_;
  first.flags = Scheduling().flags;
  first.nice = std::max(std::min(before_.nice, 0) - by, -20);
  if (first.set(tid)) tid_ = tid;
}

Hurry::~Hurry() {
  // The kernel lets nobody without CAP_SYS_NICE take the flag back; the priority it does.
  if (tid_ >= 0 && !before_.set(tid_)) setpriority(PRIO_PROCESS, static_cast<id_t>(tid_), before_.nice);
}

Hurry::Hurry(Hurry&& other) noexcept : tid_(std::exchange(other.tid_, -1)), before_(other.before_) {}

}  // namespace sonde::host
