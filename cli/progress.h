// Says that something takes long: on a terminal in a line that is renewed and at last erased, elsewhere by one line if it
// takes longer than two seconds.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

namespace sonde::cli {

class Progress {
 public:
  explicit Progress(bool quiet);
  ~Progress();
  Progress(const Progress&) = delete;

  // So many functions of one more module are to be prepared.
  void add(uint64_t functions) { functions_ += functions, modules_ += functions > 0; }

 private:
  void run();
  std::string text() const;

  std::atomic<uint64_t> functions_ = 0, modules_ = 0;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  std::thread teller_;
};

}  // namespace sonde::cli
