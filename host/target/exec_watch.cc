#include "host/target/exec_watch.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

namespace sonde::host {

namespace {

constexpr auto kEvery = std::chrono::milliseconds(5);
constexpr size_t kLongestCommand = 300;

std::string file_of(pid_t pid) {
  char path[PATH_MAX];
  ssize_t length = readlink(fmt::format("/proc/{}/exe", pid).c_str(), path, sizeof path);
  return length < 0 ? "" : std::string(path, static_cast<size_t>(length));
}

std::string quoted(const std::string& word) {
  constexpr const char* kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=:,./@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == word.npos) return word;
  std::string text = "'";
  for (char c : word) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

// As one would type it.
std::string command_of(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/cmdline", pid), std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(file), {}), text;
  for (size_t at = 0; at < bytes.size();) {
    size_t end = std::min(bytes.find('\0', at), bytes.size());
    text += (text.empty() ? "" : " ") + quoted(bytes.substr(at, end - at));
    at = end + 1;
  }
  return text.size() <= kLongestCommand ? text : "";
}

}  // namespace

ExecWatch::ExecWatch(pid_t pid, std::string program)
    : pid_(pid), program_(std::move(program)), comm_(comm()), stack_(stack()) {}

// 0: not known. Field 28 of /proc/PID/stat, the 26th behind the name in parentheses.
uint64_t ExecWatch::stack() const {
  std::ifstream file(fmt::format("/proc/{}/stat", pid_));
  std::string text;
  std::getline(file, text);
  std::istringstream fields(text.substr(text.rfind(')') + 1));
  std::string field;
  for (int i = 0; i < 26; i++) fields >> field;
  return fields ? std::strtoull(field.c_str(), nullptr, 10) : 0;
}

std::string ExecWatch::comm() const {
  std::ifstream file(fmt::format("/proc/{}/comm", pid_));
  std::string name;
  std::getline(file, name);
  return name;
}

void ExecWatch::look() {
  auto now = std::chrono::steady_clock::now();
  if (now < next_) return;
  next_ = now + kEvery;
  std::string file = file_of(pid_);
  if (file.empty()) return;  // a zombie, or with more rights than ours
  uint64_t stack = this->stack();
  bool same = file == program_ || file == program_ + " (deleted)";
  if (!became_ && same && (stack == stack_ || stack == 0 || stack_ == 0)) {
    comm_ = comm();  // programs rename their first thread
    return;
  }
  became_ = true;  // perhaps not for the last time: `env` becomes a shell that becomes the program
  file_ = file;
  command_ = command_of(pid_);
}

void ExecWatch::look_at_ended(bool as_itself) {
  if (became_ || as_itself) return;
  std::string name = comm();
  if (name.empty() || name == comm_) return;
  became_ = true;
  comm_ = name;
}

std::string ExecWatch::note() const {
  if (!became_) return "";
  std::string what = file_.empty() ? comm_ : file_;
  std::string how =
      command_.empty() ? "start that program itself with sonde record" : "to record it: sonde record -- " + command_;
  return fmt::format(
      "the program became another one by exec ({}), which sonde does not follow: the calls of {} are those before it; "
      "{}",
      what, program_.substr(program_.rfind('/') + 1), how);
}

}  // namespace sonde::host
