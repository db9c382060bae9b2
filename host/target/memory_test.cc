#include "host/target/memory.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

namespace sonde::host {
namespace {

constexpr uint64_t kPage = 4096;

// A stopped child with three pages: words that count up, no access, read-only words.
struct Child {
  uint8_t* pages;
  pid_t pid;
  Child() {
    pages = static_cast<uint8_t*>(mmap(nullptr, 3 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    for (uint64_t i = 0; i < 3 * kPage / 8; i++) std::memcpy(pages + 8 * i, &i, 8);
    mprotect(pages + kPage, kPage, PROT_NONE);
    mprotect(pages + 2 * kPage, kPage, PROT_READ);
    pid = fork();
    if (pid == 0) {
      for (raise(SIGSTOP);; raise(SIGSTOP)) std::memset(pages, 0x77, 64);
    }
    wait_stopped();
  }
  void wait_stopped() const { waitpid(pid, nullptr, WUNTRACED); }
  void change() const { kill(pid, SIGCONT), wait_stopped(); }
  ~Child() {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    munmap(pages, 3 * kPage);
  }
  Addr at(uint64_t offset) const { return Addr(reinterpret_cast<uint64_t>(pages) + offset); }
  std::shared_ptr<ProcessMemory> memory() const { return std::make_shared<ProcessMemory>(pid, *read_maps(pid)); }
};

}  // namespace

TEST_CASE("memory: a process's words, across pages and up to where they end") {
  Child child;
  auto memory = child.memory();
  uint64_t word = 0;
  CHECK(memory->read_as(child.at(80), &word));
  CHECK(word == 10);
  CHECK(memory->read_as(child.at(kPage - 4), &word));  // pages without access can be read through /proc/PID/mem
  CHECK(word == (uint64_t{512} << 32 | 0));
  CHECK(!memory->read_as(Addr(8), &word));
  CHECK(!memory->read_as(Addr(~uint64_t{3}), &word));
  uint8_t buffer[64];
  CHECK(memory->read_now(child.at(3 * kPage - 16), buffer) >= 16);

  AddrRange stack;
  CHECK(memory->stack_at(child.at(0), &stack));
  CHECK(stack.contains(child.at(kPage - 8)));
  CHECK(!memory->stack_at(child.at(2 * kPage), &stack));
  CHECK(!memory->stack_at(Addr(8), &stack));

  AnyMemory any = memory->any_memory();
  CHECK(any.read(child.at(88), &word));
  CHECK(word == 11);
}

TEST_CASE("memory: an overflowed stack begins at sp, which stands below it in its guard page") {
  auto* pages = static_cast<uint8_t*>(mmap(nullptr, 3 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  Addr begin(reinterpret_cast<uint64_t>(pages)), stack_begin = begin + int64_t{kPage};
  mprotect(pages + kPage, kPage, PROT_READ | PROT_WRITE);
  auto memory = std::make_shared<ProcessMemory>(getpid(), *read_maps(getpid()));
  AddrRange stack;
  REQUIRE(memory->stack_at(begin + 4000, &stack));
  CHECK(stack.begin == begin + 4000);
  CHECK(stack.contains(stack_begin + 8));
  CHECK(!stack.contains(begin + int64_t{2 * kPage}));
  uint64_t word;
  CHECK(memory->read_as(stack_begin, &word));
  SnapshotMemory snapshot(memory);
  CHECK(!snapshot.stack_at(begin + 4000, &stack));
  snapshot.copy(stack_begin, 256);
  REQUIRE(snapshot.stack_at(begin + 4000, &stack));
  CHECK(stack == AddrRange{begin + 4000, stack_begin + 256});
  munmap(pages, 3 * kPage);
}

TEST_CASE("memory: a snapshot keeps what it copied and refuses what may have changed") {
  Child child;
  SnapshotMemory snapshot(child.memory());
  CHECK(snapshot.copy(child.at(0), 128).size() == 128);
  child.change();
  uint64_t word = 0;
  CHECK(snapshot.read_as(child.at(16), &word));
  CHECK(word == 2);
  CHECK(!snapshot.read_as(child.at(124), &word));  // half of it was copied
  CHECK(!snapshot.read_as(child.at(1024), &word));
  CHECK(snapshot.read_as(child.at(2 * kPage), &word));  // read-only: cannot have changed
  CHECK(word == 2 * kPage / 8);
  AddrRange stack;
  CHECK(snapshot.stack_at(child.at(8), &stack));
  CHECK(stack == AddrRange{child.at(0), child.at(128)});
  CHECK(!snapshot.stack_at(child.at(1024), &stack));
  CHECK(child.memory()->read_as(child.at(16), &word));
  CHECK(word == 0x7777777777777777);
}

}  // namespace sonde::host
