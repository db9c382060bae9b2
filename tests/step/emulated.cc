#include "tests/step/emulated.h"

#include <elf.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "core/isa/code.h"

namespace sonde::stepping {
namespace {

constexpr const char* kEmulator = "qemu-aarch64";
constexpr const char* kLibraries = "/usr/aarch64-linux-gnu";
constexpr const char* kProcessor = "max,pauth-impdef=on";  // signs return addresses, by a fast algorithm
constexpr double kLongestAnswer = 60;
constexpr unsigned kInsnBytes = 4;
constexpr int kTrap = 5;  // SIGTRAP in the protocol

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The protocol has numbers of its own for signals (GDB, include/gdb/signals.def).
struct Number {
  int here, there;
};
constexpr Number kSignals[] = {{SIGHUP, 1},   {SIGINT, 2},    {SIGQUIT, 3},  {SIGILL, 4},   {SIGTRAP, 5},
                               {SIGABRT, 6},  {SIGFPE, 8},    {SIGKILL, 9},  {SIGBUS, 10},  {SIGSEGV, 11},
                               {SIGSYS, 12},  {SIGPIPE, 13},  {SIGALRM, 14}, {SIGTERM, 15}, {SIGSTOP, 17},
                               {SIGTSTP, 18}, {SIGCONT, 19},  {SIGCHLD, 20}, {SIGPROF, 27}, {SIGUSR1, 30},
                               {SIGUSR2, 31}, {SIGVTALRM, 26}};
int number_there(int signal) {
  auto found = std::ranges::find(kSignals, signal, &Number::here);
  return found == std::end(kSignals) ? 0 : found->there;
}
int number_here(int signal) {
  auto found = std::ranges::find(kSignals, signal, &Number::there);
  return found == std::end(kSignals) ? 0 : found->here;
}

uint64_t from_hex(std::string_view text) {
  uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value, 16);
  return value;
}

// 16 digits, the lowest byte first.
uint64_t word_from_hex(std::string_view text) { return __builtin_bswap64(from_hex(text.substr(0, 16))); }

}  // namespace

bool is_for_aarch64(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  Elf64_Ehdr header{};
  in.read(reinterpret_cast<char*>(&header), sizeof header);
  return in.gcount() == sizeof header && memcmp(header.e_ident, ELFMAG, SELFMAG) == 0 && header.e_machine == EM_AARCH64;
}

// Arm ARM C4.1.93 "Branches, Exception Generating and System instructions", C6.2.4 "ADD (immediate)".
Insn aarch64_insn(uint32_t word) {
  Insn insn{.length = kInsnBytes};
  auto is = [&](uint32_t mask, uint32_t value) { return (word & mask) == value; };
  const uint32_t from = word >> 5 & 31;
  if (is(0xfc000000, 0x94000000) || is(0xfffffc1f, 0xd63f0000) || is(0xfefff800, 0xd63f0800))
    insn.effect = Effect::call;
  else if (is(0xfffffc1f, 0xd65f0000) || is(0xfffffbff, 0xd65f0bff)) insn.effect = Effect::ret;
  else if (is(0xfffffc1f, 0xd61f0000) || is(0xfefff800, 0xd61f0800)) insn.effect = Effect::jump_indirect;
  else if (is(0xffe0001f, 0xd4000001)) insn.effect = Effect::system_call;
  else if (is(0xff80001f, 0x9100001f) && from != 31) insn.effect = Effect::sets_sp;
  return insn;
}

Insn Emulated::classify(std::span<const uint8_t> bytes) const {
  uint32_t word = 0;
  if (bytes.size() >= sizeof word) memcpy(&word, bytes.data(), sizeof word);
  return aarch64_insn(word);
}

host::Result<std::unique_ptr<Emulated>> Emulated::launch(const Command& command) {
  char folder[] = "/tmp/sonde_step_XXXXXX";
  if (!mkdtemp(folder)) return host::fail(fmt::format("{}: {}", folder, strerror(errno)));
  const std::string path = fmt::format("{}/stub", folder);
  std::vector<std::string> words = {kEmulator, "-L", kLibraries, "-cpu", kProcessor, "-g", path};
  words.insert(words.end(), command.words.begin(), command.words.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setsid();
    int in = open(command.input.empty() ? "/dev/null" : command.input.c_str(), O_RDONLY),
        out = open("/dev/null", O_WRONLY);
    dup2(in, 0), dup2(out, 1), dup2(out, 2);
    for (int fd = 3; fd < 256; fd++) close(fd);
    personality(ADDR_NO_RANDOMIZE);
    execvp(argv[0], argv.data());
    _exit(127);
  }
  std::unique_ptr<Emulated> program(new Emulated(pid));
  program->file_ = command.words[0];
  const bool connected = program->connect(path);
  unlink(path.c_str()), rmdir(folder);
  if (!connected || program->ask("?", kLongestAnswer).empty() || !program->get_regs())
    return host::fail(fmt::format("{}: {} does not answer", command.words[0], kEmulator));
  program->reload();
  uint64_t word = 0;
  std::string same = program->ask(fmt::format("m{:x},8", program->pc()), kLongestAnswer);
  if (!program->read_now_as(Addr(program->pc()), &word) || same.size() != 16 || word != word_from_hex(same))
    return host::fail(fmt::format("{}: its memory lies elsewhere in that of {}", command.words[0], kEmulator));
  program->read_entry();
  return program;
}

Emulated::~Emulated() {
  if (socket_ >= 0) close(socket_);
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, __WALL);
}

bool Emulated::connect(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  socket_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto begin = std::chrono::steady_clock::now();
  while (::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    if (seconds_since(begin) > kLongestAnswer || waitpid(pid_, nullptr, __WALL | WNOHANG) == pid_) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

// With it goes the acknowledgement of the answer before, which the stub waits for.
bool Emulated::send_packet(std::string_view packet) {
  uint8_t sum = 0;
  for (char c : packet) sum = static_cast<uint8_t>(sum + static_cast<uint8_t>(c));
  std::string out = fmt::format("{}${}#{:02x}", acknowledges_ ? "+" : "", packet, sum);
  acknowledges_ = false;
  return ::send(socket_, out.data(), out.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(out.size());
}

std::string Emulated::answer(double seconds) {
  const auto begin = std::chrono::steady_clock::now();
  for (;;) {
    size_t first = input_.find('$'), last = first == input_.npos ? first : input_.find('#', first);
    if (last != input_.npos && input_.size() >= last + 3) {
      std::string packet = input_.substr(first + 1, last - first - 1);
      input_.erase(0, last + 3);
      acknowledges_ = true;
      return packet;
    }
    double left = seconds - seconds_since(begin);
    pollfd waits{socket_, POLLIN, 0};
    if (left <= 0 || poll(&waits, 1, static_cast<int>(left * 1000) + 1) <= 0) return {};
    char buffer[4096];
    ssize_t n = recv(socket_, buffer, sizeof buffer, 0);
    if (n <= 0) return {};
    input_.append(buffer, static_cast<size_t>(n));
  }
}

std::string Emulated::ask(std::string_view packet, double seconds) {
  return send_packet(packet) ? answer(seconds) : std::string();
}

bool Emulated::get_regs() {
  constexpr size_t kDigits = 16;
  std::string text = ask("g", kLongestAnswer);
  if (text.size() < kDigits * Aarch64::kRegs) return false;
  for (unsigned reg = 0; reg < Aarch64::kRegs; reg++)
    regs_.set(reg, word_from_hex(std::string_view(text).substr(kDigits * reg)));
  return true;
}

bool Emulated::resume(std::string_view packet, double seconds) {
  moved();
  std::string text = ask(packet, seconds);
  if (text.size() >= 3 && (text[0] == 'T' || text[0] == 'S')) {
    signal_ = static_cast<int>(from_hex(std::string_view(text).substr(1, 2)));
    if (get_regs()) return true;
    end_ = "lost";
  } else if (text.size() >= 3 && (text[0] == 'W' || text[0] == 'X')) {
    int number = static_cast<int>(from_hex(std::string_view(text).substr(1, 2)));
    end_ = fmt::format("{} {}", text[0] == 'W' ? "exit status" : "signal", number);
  } else {
    int status = 0;
    bool gone = text.empty() && waitpid(pid_, &status, __WALL | WNOHANG) == pid_;
    end_ = gone && WIFSIGNALED(status) ? fmt::format("{} died of signal {}", kEmulator, WTERMSIG(status))
           : text.empty()              ? "no answer"
                                       : text;
  }
  return false;
}

void Emulated::read_entry() {
  std::string auxv = ask("qXfer:auxv:read::0,1000", kLongestAnswer), bytes;
  for (size_t i = 1; i < auxv.size(); i++) {  // behind the "l" that says it is all
    if (auxv[i] == '}' && i + 1 < auxv.size()) bytes += static_cast<char>(auxv[++i] ^ 0x20);
    else bytes += auxv[i];
  }
  for (size_t at = 0; at + 16 <= bytes.size(); at += 16) {
    uint64_t pair[2];
    memcpy(pair, bytes.data() + at, sizeof pair);
    if (pair[0] == AT_ENTRY) entry_ = pair[1];
  }
}

host::Result<std::vector<host::Mapping>> Emulated::read_mappings() const {
  auto mappings = SONDE_TRY(host::read_maps(pid_));
  for (host::Mapping& m : mappings) {
    m.executable = false;
    if (m.writable || m.path.empty() || m.path[0] != '/') continue;
    auto [known, fresh] = code_.try_emplace(m.path);
    if (fresh && is_for_aarch64(m.path)) {
      auto image = host::Image::open(m.path);
      if (image)
        for (const host::Segment& s : (*image)->segments())
          if (s.executable) known->second.emplace_back(s.offset.value, s.offset.value + s.file_size);
    }
    const uint64_t begin = m.offset.value, end = begin + m.range.size();
    m.executable =
        std::ranges::any_of(known->second, [&](auto& code) { return begin < code.second && code.first < end; });
  }
  return mappings;
}

std::vector<host::ArenaSpecial> Emulated::specials() {
  std::vector<host::ArenaSpecial> found;
  for (const host::Mapping& m : mappings()) {
    std::array<uint64_t, 512> page;
    if (m.writable || !m.path.empty() || m.range.size() != sizeof page || !read_now_as(m.range.begin, &page)) continue;
    for (size_t i = 0; i + 1 < page.size(); i++)
      if (Code<Aarch64>::is_signal_return(page[i], page[i + 1])) {
        Addr at = m.range.begin + static_cast<int64_t>(8 * i);
        found.push_back({{at, at + 8}, SpecialKind::signal_return});
      }
  }
  return found;
}

SystemCall Emulated::system_call() const {
  using Kind = SystemCall::Kind;
  auto x = [&](unsigned reg) { return regs_.get(reg); };
  SystemCall call{Kind::other, {x(0), x(1), x(2), x(3)}};
  switch (x(8)) {  // include/uapi/asm-generic/unistd.h
    case 222: call.kind = Kind::map; break;
    case 226:
    case 288: call.kind = Kind::protect; break;
    case 215: call.kind = Kind::unmap; break;
    case 216: call.kind = Kind::remap; break;
    case 134: call.kind = Kind::action; break;
    case 139: call.kind = Kind::signal_return; break;
    case 221:
    case 281: call.kind = Kind::execute; break;
  }
  return call;
}

void Emulated::stepped_on(uint64_t next, uint64_t next_sp, Shadow& shadow) {
  if (pc() == next && sp() == next_sp) return;
  steps_++;
  shadow.stepped(insn_at(next), next, next_sp, pc(), sp());
}

bool Emulated::step(Shadow& shadow) {
  const uint64_t at = pc(), before = sp();
  const Insn insn = insn_at(at);
  const SystemCall call = insn.effect == Effect::system_call ? system_call() : SystemCall{};
  const bool changes_code = maps_code(call);
  note_action(call);
  uint64_t interrupted = 0, its_sp = 0;
  if (call.kind == SystemCall::Kind::signal_return) {
    read_now_as(Addr(before + static_cast<uint64_t>(Code<Aarch64>::signal_register(Aarch64::pc))), &interrupted);
    read_now_as(Addr(before + static_cast<uint64_t>(Code<Aarch64>::signal_register(Aarch64::sp))), &its_sp);
  }
  if (!resume("s", kLongestAnswer)) return false;
  if (call.kind == SystemCall::Kind::execute && pc() != at + kInsnBytes)
    return end_ = "replaced by another program", false;
  if (changes_code) reload();
  steps_++;
  if (call.kind == SystemCall::Kind::signal_return) {
    shadow.signal_returned(its_sp);
    stepped_on(interrupted, its_sp, shadow);
  } else if (insn.effect == Effect::system_call) {
    shadow.stepped(insn, at, before, at + kInsnBytes, before);
    stepped_on(at + kInsnBytes, before, shadow);
  } else if (signal_ == kTrap || pc() != at || sp() != before) {
    shadow.stepped(insn, at, before, pc(), sp());
  }
  while (signal_ != kTrap)
    if (!deliver(signal_, shadow)) return false;
  return true;
}

bool Emulated::send(int signal, Shadow& shadow) { return deliver(number_there(signal), shadow); }

// The kernel's frame for a handler, whose first instruction may have made its own below it: it holds the registers that were
// interrupted. 0: none.
uint64_t Emulated::frame_of(const RegSet<Aarch64>& interrupted) {
  constexpr uint64_t kMostBelow = 4096;
  std::vector<uint64_t> words((kMostBelow + Code<Aarch64>::kSignalFrameBytes) / 8);
  const uint64_t begin = sp();
  size_t bytes = read_now(Addr(begin), {reinterpret_cast<uint8_t*>(words.data()), words.size() * 8});
  for (uint64_t below = 0; below <= kMostBelow && below + Code<Aarch64>::kSignalFrameBytes <= bytes; below += 16) {
    const uint64_t* saved = words.data() + (below + static_cast<uint64_t>(Code<Aarch64>::signal_register(0))) / 8;
    if (std::equal(saved, saved + Aarch64::kRegs, interrupted.value)) return begin + below;
  }
  return 0;
}

// It stands behind the first instruction of its handler then, or one instruction further if it has none.
bool Emulated::deliver(int signal, Shadow& shadow) {
  const RegSet<Aarch64> before = regs_;
  const Insn insn = insn_at(pc());
  if (!resume(fmt::format("vCont;S{:02x}", signal), kLongestAnswer)) return false;
  const uint64_t handler = handlers_[static_cast<uint64_t>(number_here(signal))];
  const uint64_t frame = handler && pc() - handler <= kInsnBytes ? frame_of(before) : 0;
  if (!frame) return shadow.stepped(insn, before.pc().value, before.sp().value, pc(), sp()), true;
  signals_++;
  shadow.interrupted(before.pc().value, before.sp().value, frame,
                     regs_.get(Aarch64::x30) & ~Code<Aarch64>::kSignatureBits);
  stepped_on(handler, frame, shadow);
  return true;
}

bool Emulated::run_to(uint64_t to, double seconds) {
  if (ask(fmt::format("Z0,{:x},4", to), kLongestAnswer) != "OK") return false;
  bool there = false;
  const auto begin = std::chrono::steady_clock::now();
  std::string packet = "c";
  while (!there) {
    if (!resume(packet, seconds - seconds_since(begin))) return false;
    there = signal_ == kTrap && pc() == to;
    packet = signal_ == kTrap ? "c" : fmt::format("vCont;C{:02x}", signal_);
  }
  ask(fmt::format("z0,{:x},4", to), kLongestAnswer);
  reload();
  return true;
}

}  // namespace sonde::stepping
