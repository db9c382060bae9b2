// Stops real processes. What the program sees is told by the program itself, through a shared page.
#include "host/target/threads.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <thread>

namespace sonde::host {
namespace {

struct Shared {
  std::atomic<uint64_t> counter[8];
  std::atomic<int> ready, go, result;
};

// A child that runs `body` and is killed at the end of the test.
struct Child {
  Shared* shared;
  pid_t pid;
  explicit Child(std::function<void(Shared&)> body) {
    shared =
        static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    pid = fork();
    if (pid == 0) {
      alarm(30);
      body(*shared);
      _exit(0);
    }
  }
  ~Child() {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    munmap(shared, sizeof *shared);
  }
  void wait_for(std::atomic<int>& flag, int value) const {
    for (int i = 0; i < 5000 && flag != value; i++) usleep(1000);
    REQUIRE(flag == value);
  }
  char state() const {
    std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
    std::string text((std::istreambuf_iterator<char>(in)), {});
    return text.at(text.rfind(')') + 2);
  }
};

}  // namespace

TEST_CASE("threads: a busy process with threads stands still, and runs on") {
  Child child([](Shared& s) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; t++)
      threads.emplace_back([&s, t] {
        s.ready++;
        for (;;) s.counter[t]++;
      });
    for (;;) pause();
  });
  child.wait_for(child.shared->ready, 4);
  for (int round = 0; round < 20; round++) {
    auto stopped = StoppedProcess::stop(child.pid);
    REQUIRE(stopped);
    CHECK(stopped->threads().size() == 5);
    uint64_t before[4], total = 0;
    for (int t = 0; t < 4; t++) before[t] = child.shared->counter[t];
    usleep(2000);
    for (int t = 0; t < 4; t++) CHECK(child.shared->counter[t] == before[t]);
    for (auto& thread : stopped->threads()) CHECK(thread.regs.has(X86_64::rip));
    stopped->resume();
    for (int i = 0; i < 2000 && total == 0; i++) {
      usleep(1000);
      total = child.shared->counter[0] - before[0];
    }
    CHECK(total > 0);
  }
}

TEST_CASE("threads: one at a time stands while it is looked at, the others run") {
  Child child([](Shared& s) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; t++)
      threads.emplace_back([&s, t] {
        s.counter[4 + t] = static_cast<uint64_t>(gettid());
        s.ready++;
        for (;;) s.counter[t]++;
      });
    for (;;) pause();
  });
  child.wait_for(child.shared->ready, 3);
  auto tids = live_threads(child.pid);
  CHECK(tids.size() == 4);
  for (int t = 0; t < 3; t++) {
    pid_t tid = static_cast<pid_t>(child.shared->counter[4 + t].load());
    int visits = 0, other = (t + 1) % 3;
    std::chrono::nanoseconds pause{0};
    auto look = [&](const StoppedThread& thread) {
      visits++;
      CHECK(thread.tid == tid);
      CHECK(thread.regs.has(X86_64::rip));
      uint64_t own = child.shared->counter[t], others = child.shared->counter[other];
      usleep(20000);
      CHECK(child.shared->counter[t] == own);
      for (int i = 0; i < 5000 && child.shared->counter[other] == others; i++) usleep(1000);
      CHECK(child.shared->counter[other] > others);
    };
    auto visit = visit_thread(child.pid, tid, look, &pause);
    REQUIRE(visit);
    CHECK(*visit == Visit::done);
    CHECK(visits == 1);
    CHECK(pause >= std::chrono::milliseconds(20));
    uint64_t before = child.shared->counter[t];
    for (int i = 0; i < 5000 && child.shared->counter[t] == before; i++) usleep(1000);
    CHECK(child.shared->counter[t] > before);
    CHECK(status_field(tid, "TracerPid") == "0");
  }
  std::chrono::nanoseconds pause{0};
  auto gone = visit_thread(child.pid, 0x3fffff, [](const StoppedThread&) {}, &pause);
  REQUIRE(gone);
  CHECK(*gone == Visit::gone);
}

TEST_CASE("threads: a call that gives up when stopped is made again") {
  Child child([](Shared& s) {
    int poll = epoll_create1(0), event = eventfd(0, 0);
    epoll_event wanted{EPOLLIN, {}};
    epoll_ctl(poll, EPOLL_CTL_ADD, event, &wanted);
    s.ready = 1;
    epoll_event got;
    int n = epoll_wait(poll, &got, 1, 500);
    s.result = n == 0 ? 1 : n < 0 ? 1000 + errno : 2;
    pause();
  });
  child.wait_for(child.shared->ready, 1);
  while (child.state() != 'S') usleep(1000);
  std::chrono::nanoseconds pause{0};
  REQUIRE(visit_thread(child.pid, child.pid, [](const StoppedThread&) {}, &pause));
  while (child.state() != 'S' && child.shared->result == 0) usleep(1000);
  REQUIRE(StoppedProcess::stop(child.pid));
  child.wait_for(child.shared->result, 1);
}

TEST_CASE("threads: no signal is lost or doubled") {
  Child child([](Shared& s) {
    static Shared* counters;
    counters = &s;
    struct sigaction action{};
    action.sa_handler = [](int) { counters->counter[0]++; };
    sigaction(SIGRTMIN, &action, nullptr);
    s.ready = 1;
    for (;;) s.counter[1]++;
  });
  child.wait_for(child.shared->ready, 1);
  constexpr uint64_t kSignals = 10000;
  std::atomic<bool> done = false;
  std::thread sender([&] {
    union sigval value{};
    for (uint64_t sent = 0; sent < kSignals; sent++) {
      while (sigqueue(child.pid, SIGRTMIN, value) != 0) sched_yield();  // the queue is full
      usleep(1);
    }
    done = true;
  });
  std::chrono::nanoseconds pause{0};
  for (int i = 0; !done || i < 100; i++) {
    REQUIRE(StoppedProcess::stop(child.pid));
    REQUIRE(visit_thread(child.pid, child.pid, [](const StoppedThread&) {}, &pause));
  }
  sender.join();
  for (int i = 0; i < 2000 && child.shared->counter[0] < kSignals; i++) usleep(1000);
  usleep(5000);
  CHECK(child.shared->counter[0] == kSignals);
}

TEST_CASE("threads: a process that was stopped by a signal stays so") {
  Child child([](Shared& s) {
    s.ready = 1;
    for (;;) s.counter[0]++;
  });
  child.wait_for(child.shared->ready, 1);
  kill(child.pid, SIGSTOP);
  while (child.state() != 'T') usleep(1000);
  REQUIRE(StoppedProcess::stop(child.pid));
  usleep(5000);
  CHECK(child.state() == 'T');
  std::chrono::nanoseconds pause{0};
  REQUIRE(visit_thread(child.pid, child.pid, [](const StoppedThread&) {}, &pause));
  usleep(5000);
  CHECK(child.state() == 'T');
  uint64_t before = child.shared->counter[0];
  usleep(5000);
  CHECK(child.shared->counter[0] == before);
}

TEST_CASE("threads: errors say what is the matter") {
  SUBCASE("nobody there") {
    auto none = StoppedProcess::stop(0x3fffff);
    REQUIRE(!none);
    CHECK(none.error().message == "no process with id 4194303");
    CHECK(!StoppedProcess::stop(-1));
  }
  SUBCASE("a zombie") {
    Child child([](Shared&) {});
    while (child.state() != 'Z') usleep(1000);
    auto dead = StoppedProcess::stop(child.pid);
    REQUIRE(!dead);
    CHECK(dead.error().message.find("zombie") != std::string::npos);
    CHECK(dead.error().message.find(std::to_string(getpid())) != std::string::npos);
  }
  SUBCASE("traced by another") {
    Child child([](Shared& s) {
      pid_t target = fork();
      if (target == 0)
        for (;;) pause();
      ptrace(PTRACE_SEIZE, target, nullptr, nullptr);
      s.result = target;
      s.ready = 1;
      pause();
    });
    child.wait_for(child.shared->ready, 1);
    pid_t target = child.shared->result;
    auto traced = StoppedProcess::stop(target);
    kill(target, SIGKILL);
    REQUIRE(!traced);
    CHECK(traced.error().message.find("already traced by process " + std::to_string(child.pid) + " (") !=
          std::string::npos);
  }
}

// Whoever stops a child of its own may see it end instead. Its status is still there for who launched it.
TEST_CASE("threads: a child that ends while it is being stopped keeps its exit status") {
  int ended = 0, kept = 0;
  for (int round = 0; round < 400; round++) {
    pid_t child = fork();
    if (child == 0) {
      for (int i = 0; i < round % 40 * 1000; i++) asm volatile("");
      if (round % 2) kill(getpid(), SIGKILL);
      _exit(7);
    }
    {
      auto stopped = StoppedProcess::stop(child);
      ended += !stopped;
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    kept +=
        round % 2 ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : WIFEXITED(status) && WEXITSTATUS(status) == 7;
  }
  MESSAGE(ended, " of 400 had ended when they were to stand");
  CHECK(kept == 400);
}

}  // namespace sonde::host
