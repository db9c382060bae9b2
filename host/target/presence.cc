#include "host/target/presence.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/kcmp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <utility>

namespace sonde::host {

bool maps_memory_file(pid_t pid, int fd) {
  struct stat file;
  if (fstat(fd, &file) != 0) return false;
  std::string inode = fmt::format(" {} ", file.st_ino), line;
  std::ifstream maps(fmt::format("/proc/{}/maps", pid));
  while (std::getline(maps, line))
    if (line.find(inode) != line.npos && line.find("/memfd:") != line.npos) return true;
  return false;
}

Result<Presence> Presence::create(int fd) {
  Presence presence(fd >= 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 3) : memfd_create("sonde", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (presence.fd_ < 0 || ftruncate(presence.fd_, kPresenceBytes) != 0)
    return fail_errno("making the memory by which the program's processes are known");
  return presence;
}

Presence::Presence(Presence&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

Presence::~Presence() {
  if (fd_ >= 0) close(fd_);
}

// A file cannot be sealed against writing while a shared mapping of it could be made writable (fcntl(2), F_SEAL_WRITE:
// EBUSY), and its pages are in nobody's hands otherwise: no process ever touches them.
bool Presence::anyone() const { return fcntl(fd_, F_ADD_SEALS, F_SEAL_WRITE) != 0 && errno == EBUSY; }

std::vector<pid_t> Presence::processes() const {
  std::vector<pid_t> found;
  std::unique_ptr<DIR, int (*)(DIR*)> proc(opendir("/proc"), closedir);
  while (dirent* entry = proc ? readdir(proc.get()) : nullptr) {
    pid_t pid = std::atoi(entry->d_name);
    if (pid <= 0 || !maps_memory_file(pid, fd_)) continue;
    auto shares = [&](pid_t other) { return syscall(SYS_kcmp, pid, other, KCMP_VM, 0, 0) == 0; };
    if (std::ranges::none_of(found, shares)) found.push_back(pid);
  }
  return found;
}

}  // namespace sonde::host
