#include "host/target/presence.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

using namespace sonde::host;

namespace {

// A process that goes on, and those that it forks meanwhile, until they are told to end.
struct Child {
  pid_t pid = -1;
  int go = -1, unread = -1;  // the other end, so that there is one

  template <class Life>
  explicit Child(Life life) {
    int to_go[2], ready[2];
    REQUIRE(pipe2(to_go, O_CLOEXEC) == 0);
    REQUIRE(pipe2(ready, O_CLOEXEC) == 0);
    pid = fork();
    if (pid == 0) {
      life();
      (void)!write(ready[1], "", 1);
      char byte;
      (void)!read(to_go[0], &byte, 1);
      _exit(0);
    }
    close(ready[1]);
    go = to_go[1], unread = to_go[0];
    char byte;
    (void)!read(ready[0], &byte, 1);  // 0 bytes: it became another program or ended
    close(ready[0]);
  }
  void end() {
    if (go < 0) return;
    (void)!write(go, "everyone", 8);  // a byte for each: the end of the pipe is a later child's too
    close(std::exchange(go, -1)), close(unread);
    waitpid(pid, nullptr, 0);
  }
  ~Child() { end(); }
};

void map(int fd) {
  if (mmap(nullptr, kPresenceBytes, PROT_NONE, MAP_SHARED, fd, 0) == MAP_FAILED) _exit(1);
  close(fd);
}

bool holds(const std::vector<pid_t>& processes, pid_t pid) {
  return std::ranges::find(processes, pid) != processes.end();
}

}  // namespace

TEST_CASE("presence: known while it is mapped, by whichever process, and only then") {
  auto presence = Presence::create();
  REQUIRE(presence);
  Child first([&] { map(presence->fd()); });
  CHECK(presence->anyone());
  CHECK(presence->processes() == std::vector{first.pid});
  Child other([] {});  // has the descriptor, not the mapping
  CHECK(presence->processes() == std::vector{first.pid});
  Child forks([&] {
    map(presence->fd());
    if (fork()) _exit(0);  // the orphan goes on
  });
  first.end();
  CHECK(presence->anyone());
  auto left = presence->processes();
  CHECK(left.size() == 1);
  CHECK(!holds(left, forks.pid));
  forks.end();
  for (int i = 0; i < 600 && presence->anyone(); i++) usleep(10'000);
  CHECK(!presence->anyone());
  CHECK(presence->processes().empty());
}

TEST_CASE("presence: a program that was started by exec is another's") {
  auto presence = Presence::create();
  REQUIRE(presence);
  Child child([&] {
    map(presence->fd());
    execl("/bin/sleep", "sleep", "30", nullptr);
  });
  CHECK(!presence->anyone());
  kill(child.pid, SIGKILL);
}

TEST_CASE("presence: processes that share their memory are one") {
  auto presence = Presence::create();
  REQUIRE(presence);
  Child child([&] {
    map(presence->fd());
    if (fork() == 0) {
      if (vfork() == 0) sleep(1), _exit(0);
      _exit(0);
    }
  });
  size_t most = 0;
  for (int i = 0; i < 50 || (most < 2 && i < 1000); i++, usleep(10'000))
    most = std::max(most, presence->processes().size());
  CHECK(most == 2);  // the child and its child, whose vfork child is left out
}
