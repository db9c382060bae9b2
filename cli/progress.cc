#include "cli/progress.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

#include "host/words.h"

namespace sonde::cli {

namespace {
using std::chrono::milliseconds;
constexpr milliseconds kFirstOnTerminal{300}, kNext{200}, kFirstElsewhere{2000};
constexpr const char* kErase = "\r\033[K";

void tell(const std::string& text) { std::fwrite(text.data(), 1, text.size(), stderr); }
}  // namespace

Progress::Progress(bool quiet) {
  if (!quiet) teller_ = std::thread([this] { run(); });
}

Progress::~Progress() {
  if (!teller_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    done_ = true;
  }
  ended_.notify_one();
  teller_.join();
}

std::string Progress::text() const {
  uint64_t functions = functions_, modules = modules_;
  if (functions == 0) return "sonde: preparing...";
  return fmt::format("sonde: preparing {} in {}...", host::counted(functions, "function"),
                     host::counted(modules, "module"));
}

void Progress::run() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  const bool terminal = isatty(2);
  std::unique_lock lock(mutex_);
  auto ended = [this] { return done_; };
  if (ended_.wait_for(lock, terminal ? kFirstOnTerminal : kFirstElsewhere, ended)) return;
  if (!terminal) return tell(text() + "\n");
  do tell(kErase + text());
  while (!ended_.wait_for(lock, kNext, ended));
  tell(kErase);
}

}  // namespace sonde::cli
