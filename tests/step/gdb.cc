#include "tests/step/gdb.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <charconv>
#include <fstream>
#include <iterator>
#include <sstream>

namespace sonde::stepping {
namespace {

constexpr int kPatience = 120'000;  // milliseconds without a word from gdb

std::string hex(std::span<const uint8_t> bytes) {
  std::string text;
  for (uint8_t byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

uint64_t number(std::string_view text) {
  uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value, 16);
  return value;
}

std::string file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// A piece of what qXfer reads: "offset,length" in hexadecimal.
std::string piece(const std::string& whole, std::string_view where) {
  size_t comma = where.find(',');
  uint64_t offset = number(where.substr(0, comma)), length = number(where.substr(comma + 1));
  if (offset >= whole.size()) return "l";
  std::string part = whole.substr(offset, length), escaped = offset + part.size() < whole.size() ? "m" : "l";
  for (char c : part) {
    if (c == '#' || c == '$' || c == '}' || c == '*') escaped += '}', escaped += static_cast<char>(c ^ 0x20);
    else escaped += c;
  }
  return escaped;
}

}  // namespace

Gdb::Gdb(Tracee& tracee, std::string program, std::string script, std::string folder)
    : tracee_(tracee), program_(std::move(program)), script_(std::move(script)), folder_(std::move(folder)) {}

Gdb::~Gdb() {
  for (int fd : {listener_, connection_, to_gdb_, from_gdb_})
    if (fd >= 0) close(fd);
  if (pid_ > 0) kill(pid_, SIGKILL), waitpid(pid_, nullptr, 0);
}

bool Gdb::start(std::string* problem) {
  std::string path = fmt::format("{}/gdb.{}", folder_, getpid());
  unlink(path.c_str());
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) return *problem = path + " is too long a name for a socket", false;
  path.copy(address.sun_path, path.size());
  listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int to[2], from[2];
  if (bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 || listen(listener_, 1) != 0 ||
      pipe(to) != 0 || pipe(from) != 0)
    return *problem = "no socket for gdb", false;
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setsid();  // gdb takes the terminal if there is one, which would stop everybody here
    dup2(to[0], 0);
    int out = open((folder_ + "/gdb.log").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    dup2(out, 1), dup2(out, 2);
    if (from[1] != 3) dup2(from[1], 3);
    for (int fd = 4; fd < 64; fd++) close(fd);
    setenv("STEP_SOCKET", path.c_str(), 1), setenv("STEP_PROGRAM", program_.c_str(), 1);
    unsetenv("DEBUGINFOD_URLS");
    execlp("gdb", "gdb", "-q", "-nx", "-batch", "-x", script_.c_str(), nullptr);
    _exit(127);
  }
  close(to[0]), close(from[1]);
  to_gdb_ = to[1], from_gdb_ = from[0];
  fcntl(to_gdb_, F_SETFD, FD_CLOEXEC), fcntl(from_gdb_, F_SETFD, FD_CLOEXEC);
  signal(SIGPIPE, SIG_IGN);
  return true;
}

bool Gdb::chain(size_t limit, Chain* chain, std::string* problem) {
  if (failed_) return false;
  failed_ = true;
  if (pid_ == 0 && !start(problem)) return false;
  // Libraries have come or gone: gdb connects anew.
  std::string request = fmt::format("{} {}\n", generation_ == tracee_.code_generation() ? "same" : "new", limit);
  generation_ = tracee_.code_generation();
  if (write(to_gdb_, request.data(), request.size()) != static_cast<ssize_t>(request.size()))
    return *problem = "gdb has ended: see gdb.log", false;
  std::string answer;
  if (!serve(&answer, problem)) return false;
  std::istringstream words(answer);
  words >> std::hex;
  for (uint64_t pc; words >> pc;) chain->pcs.push_back(pc);
  if (chain->pcs.empty()) return *problem = "gdb: " + answer, false;
  failed_ = false;
  return true;
}

// Answers gdb's packets until its script has written a line.
bool Gdb::serve(std::string* answer, std::string* problem) {
  for (;;) {
    pollfd fds[] = {{from_gdb_, POLLIN, 0}, {connection_ >= 0 ? connection_ : listener_, POLLIN, 0}};
    if (poll(fds, 2, kPatience) <= 0) return *problem = "gdb does not answer: see gdb.log", false;
    if (fds[1].revents) {
      if (connection_ < 0) {
        connection_ = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
        no_ack_ = false, input_.clear();
      } else if (!take_packets()) {
        close(connection_), connection_ = -1;
      }
      continue;
    }
    if (!fds[0].revents) continue;
    char buffer[65536];
    ssize_t n = read(from_gdb_, buffer, sizeof buffer);
    if (n <= 0) return *problem = "gdb has ended: see gdb.log", false;
    answer->append(buffer, static_cast<size_t>(n));
    if (answer->ends_with('\n')) return true;
  }
}

bool Gdb::take_packets() {
  char buffer[65536];
  ssize_t n = read(connection_, buffer, sizeof buffer);
  if (n <= 0) return false;
  input_.append(buffer, static_cast<size_t>(n));
  for (;;) {
    size_t begin = input_.find('$'), end = input_.find('#', begin == std::string::npos ? 0 : begin);
    if (begin == std::string::npos || end == std::string::npos || end + 2 >= input_.size()) return true;
    std::string packet = input_.substr(begin + 1, end - begin - 1);
    input_.erase(0, end + 3);
    if (!no_ack_ && write(connection_, "+", 1) != 1) return false;
    if (packet == "QStartNoAckMode") send("OK"), no_ack_ = true;
    else send(reply_to(packet));
    if (packet == "D" || packet.starts_with("D;")) return false;
  }
}

void Gdb::send(const std::string& payload) {
  uint8_t sum = 0;
  for (char c : payload) sum = static_cast<uint8_t>(sum + static_cast<uint8_t>(c));
  std::string packet = fmt::format("${}#{:02x}", payload, sum);
  for (size_t done = 0; done < packet.size();) {
    ssize_t n = write(connection_, packet.data() + done, packet.size() - done);
    if (n <= 0) return;
    done += static_cast<size_t>(n);
  }
}

std::string Gdb::reply_to(const std::string& packet) {
  const user_regs_struct& r = tracee_.regs();
  auto begins = [&](std::string_view with) { return packet.starts_with(with); };
  if (begins("qSupported")) return "PacketSize=8000;QStartNoAckMode+;qXfer:auxv:read+;qXfer:exec-file:read+";
  if (packet == "?") return fmt::format("T05thread:{:x};", tracee_.pid());
  if (packet == "qC") return fmt::format("QC{:x}", tracee_.pid());
  if (packet == "qfThreadInfo") return fmt::format("m{:x}", tracee_.pid());
  if (packet == "qsThreadInfo") return "l";
  if (packet == "qAttached") return "1";
  if (begins("H") || begins("T") || packet == "D" || begins("D;") || begins("qSymbol")) return "OK";
  constexpr std::string_view kAuxv = "qXfer:auxv:read::", kExec = "qXfer:exec-file:read:";
  if (begins(kAuxv)) return piece(file(fmt::format("/proc/{}/auxv", tracee_.pid())), packet.substr(kAuxv.size()));
  if (begins(kExec)) return piece(program_, packet.substr(packet.rfind(':') + 1));
  if (packet == "g") {  // as gdb numbers them; what follows gs is not there
    const uint64_t words[] = {r.rax, r.rbx, r.rcx, r.rdx, r.rsi, r.rdi, r.rbp, r.rsp, r.r8,
                              r.r9,  r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rip};
    const uint32_t halves[] = {static_cast<uint32_t>(r.eflags), static_cast<uint32_t>(r.cs),
                               static_cast<uint32_t>(r.ss),     static_cast<uint32_t>(r.ds),
                               static_cast<uint32_t>(r.es),     static_cast<uint32_t>(r.fs),
                               static_cast<uint32_t>(r.gs)};
    return hex({reinterpret_cast<const uint8_t*>(words), sizeof words}) +
           hex({reinterpret_cast<const uint8_t*>(halves), sizeof halves});
  }
  if (begins("m")) {
    size_t comma = packet.find(',');
    uint64_t at = number(std::string_view(packet).substr(1, comma - 1));
    std::vector<uint8_t> bytes(std::min<uint64_t>(number(std::string_view(packet).substr(comma + 1)), 0x3f00));
    return tracee_.read(Addr(at), bytes) ? hex(bytes) : "E01";
  }
  return "";
}

}  // namespace sonde::stepping
