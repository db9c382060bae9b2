// `sonde record`: launches a program with its functions probed and writes the trace. The story of a recording is run().
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/commands.h"
#include "cli/progress.h"
#include "host/image/select.h"
#include "host/plan/places.h"
#include "host/target/attach.h"
#include "host/target/exec_watch.h"
#include "host/target/hurry.h"
#include "host/target/launch.h"
#include "host/target/presence.h"
#include "host/target/program_file.h"
#include "host/target/service.h"
#include "host/target/trap_cost.h"
#include "host/trace/recorder.h"
#include "host/words.h"

namespace sonde::cli {

namespace {

using namespace host;

constexpr auto kUnsaidWait = std::chrono::milliseconds(300), kMomentAfterInterrupt = std::chrono::milliseconds(1000);
constexpr uint64_t kTreeBytes = 4 << 20;  // of a thread, with --sum: about 28,000 nodes

struct Options {
  std::vector<std::string> command, functions, places;
  std::string output = "sonde.trace", max_size;
  int pid = 0;  // of the process to attach to; else `command` is launched
  bool stacks = false, drop = false, sum = false, force_trap = false, no_trap = false, quiet = false, json = false;
};

// Signals that reach sonde while the program runs. Those that somebody sent are passed on; what the terminal sends goes
// to the program anyway.
std::atomic<pid_t> program_pid = 0;
std::atomic<int> interrupted = 0, asked_to_end = 0;

void on_signal(int signal, siginfo_t* info, void*) {
  if (signal == SIGINT) interrupted++;
  if (signal != SIGUSR1 && signal != SIGUSR2) asked_to_end++;
  pid_t pid = program_pid.load();
  if (pid > 0 && info->si_code <= 0) kill(pid, signal);
}

// A limit on file sizes is a full disk, a reader that went away is one too: an error of that write, not the end of sonde,
// whose exit status is the program's. After the launch: the program does not inherit this.
void outlive_failed_writes() {
  ::signal(SIGXFSZ, SIG_IGN);
  ::signal(SIGPIPE, SIG_IGN);
}

// A limit on address space or file sizes is the program's to use up: the mapping, which counts for both, is kept small then.
constexpr uint64_t kRingBytesUnderLimits = 1 << 20;

bool is_limited(decltype(RLIMIT_AS) resource) {
  rlimit limit;
  return getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
}

// The limit on file sizes holds for shared memory too: an error to be told, not a signal. The program keeps what it had.
host::Result<std::unique_ptr<Session>> create_session(const SessionOptions& options) {
  auto before = ::signal(SIGXFSZ, SIG_IGN);
  auto session = Session::create(options);
  ::signal(SIGXFSZ, before);
  return session;
}

// A number that the program will find free, out of its way.
int lend_descriptor(int fd) {
  int lent = fcntl(fd, F_DUPFD_CLOEXEC, 100);
  return lent >= 0 ? lent : fcntl(fd, F_DUPFD_CLOEXEC, 3);
}

void watch_signals() {
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}) {
    struct sigaction before, action{};
    sigaction(signal, nullptr, &before);
    if (before.sa_handler == SIG_IGN) continue;
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    sigaction(signal, &action, nullptr);
  }
}

// Ends as the program did, so that whoever started sonde sees no difference.
[[noreturn]] void die_of(int signal) {
  rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
  ::signal(signal, SIG_DFL);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  sigprocmask(SIG_UNBLOCK, &set, nullptr);
  raise(signal);
  _exit(128 + signal);
}

uint64_t parse_size(const std::string& text) {
  if (text.empty()) return 0;
  size_t used = 0;
  uint64_t value = 0;
  try {
    if (std::isdigit(static_cast<unsigned char>(text[0]))) value = std::stoull(text, &used);
  } catch (const std::exception&) {
  }
  static const std::string kUnits = "KMGT";
  std::string unit = text.substr(used);
  if (unit.ends_with('B')) unit.pop_back();
  size_t power = unit.empty() ? 0 : kUnits.find(static_cast<char>(std::toupper(unit[0]))) + 1;
  bool too_large = value > std::numeric_limits<uint64_t>::max() >> (10 * power);
  if (used == 0 || unit.size() > 1 || (power == 0 && !unit.empty()) || value == 0 || too_large)
    throw CommandError{{fmt::format("--max-size '{}' is not a size: write 500M or 2G", text), 2}};
  return value << (10 * power);
}

// What is to be probed: functions, instructions, or both.
class Wanted {
 public:
  Wanted(const std::vector<std::string>& functions, const std::vector<std::string>& places)
      : functions_(require(Selection::parse(functions))),
        places_(require(Places::parse(places))),
        with_functions_(!functions.empty() || places.empty()) {}

  host::Result<Chosen> choose(const LoadedImage& loaded, bool is_program) {
    Chosen chosen;
    if (with_functions_) chosen.functions = functions_.select(*loaded.image, is_program);
    chosen.points = SONDE_TRY(places_.find(loaded, is_program));
    return chosen;
  }
  std::optional<host::Error> unmatched(std::span<const std::shared_ptr<const Image>> images) const {
    if (auto error = places_.unmatched(images)) return error;
    return with_functions_ ? functions_.unmatched(images) : std::nullopt;
  }
  // Patterns and places that found nothing so far.
  std::vector<std::string> waiting() const {
    auto texts = with_functions_ ? functions_.waiting() : std::vector<std::string>();
    for (std::string& text : places_.waiting()) texts.push_back(std::move(text));
    return texts;
  }
  std::vector<std::string> notes() const {
    auto notes = functions_.notes();
    for (std::string& text : places_.notes()) notes.push_back(std::move(text));
    return notes;
  }

 private:
  Selection functions_;
  Places places_;
  bool with_functions_;  // a place alone means no function
};

class Recording {
 public:
  Recording(Options options, int& status) : options_(std::move(options)), status_(status) {}

  void run() {
    options_.quiet |= options_.json;
    if (options_.sum && options_.stacks)
      throw CommandError{{"-s and --sum exclude each other: sums have no single hits that a stack could belong to", 2}};
    if (options_.sum && options_.drop)
      throw CommandError{
          {"--drop and --sum exclude each other: with --sum there are no records that could be dropped", 2}};
    Wanted wanted(options_.functions, options_.places);
    if (options_.pid) attach_and_record(wanted);
    else launch_and_record(wanted);
  }

 private:
  void launch_and_record(Wanted& wanted) {
    uint64_t max_bytes = parse_size(options_.max_size);
    AgentFile agent = require(find_agent());
    SessionOptions session_options = this->session_options();
    if (is_limited(RLIMIT_AS) || is_limited(RLIMIT_FSIZE)) session_options.ring_bytes = kRingBytesUnderLimits;
    session_ = require(create_session(session_options));

    presence_.emplace(require(Presence::create()));
    int session_fd = lend_descriptor(session_->fd()), presence_fd = lend_descriptor(presence_->fd());
    std::optional<ExitStatus> ended;
    Launched launched = require(launch({options_.command, agent.path, {session_fd, presence_fd}}, &ended));
    close(session_fd), close(presence_fd);
    outlive_failed_writes();
    if (ended) return pass_on(ended->wait_status);

    // The program stands before its first constructor. Nothing below may leave it half prepared: on an error it is ended.
    program_pid = launched.pid;
    std::optional<Progress> progress(std::in_place, options_.quiet);
    Selector selector = selector_of(wanted, progress);
    TargetOptions target_options{.stacks = options_.stacks,
                                 .sum = options_.sum,
                                 .allow_traps = !options_.no_trap,
                                 .force_traps = options_.force_trap};
    target_.emplace(launched.pid, agent, launched.program, launched.syscall_instruction, target_options);
    try {
      require(target_->install(launched.tracee, session_fd, presence_fd, session_->header()));
      require(target_->update(launched.tracee, selector));
      progress.reset();
      require_match(wanted);
      writer_.emplace(require(TraceWriter::create(options_.output, max_bytes)));
    } catch (...) {
      kill(launched.pid, SIGKILL);
      throw;
    }
    start_trace(launched.pid);
    recorder_.emplace(*session_, *writer_);
    ExecWatch execs(launched.pid, launched.program);
    watch_signals();
    session_->set_state(SessionState::recording);
    require(launched.tracee.detach());
    // From here on the program runs, and nothing below may stop it.

    Service service(*target_, session_->header(), selector, [this](pid_t pid) { take_in_flight(pid); });
    int wait_status = attend(service, execs);
    if (wait_status >= 0) attend_children(service);
    note_waiting(wanted);
    stop_recording();
    finish(service, wait_status);
    if (wait_status >= 0) pass_on(wait_status);
  }

  // A program that runs: the agent goes in, calls are recorded until Ctrl-C, or while a command runs, and all is taken out.
  void attach_and_record(Wanted& wanted) {
    uint64_t max_bytes = parse_size(options_.max_size);
    AgentFile agent = require(find_agent());
    bool left;
    pid_t pid = require(check_attachable(options_.pid, agent, &left));
    watch_signals();
    if (left) {
      if (std::string stays = require(take_out_left(pid, agent)); !stays.empty()) throw CommandError{{stays}};
      if (!options_.quiet) tell("sonde: note: an agent that a killed recorder had left in process {} is out\n", pid);
    }
    std::optional<Hurry> hurry(std::in_place);  // a busy program shall not keep the recorder from going in and out
    std::optional<Progress> progress(std::in_place, options_.quiet);
    Selector selector = selector_of(wanted, progress);
    put_agent_into(pid, agent);
    std::chrono::nanoseconds pause{0};
    try {
      require(target_->arm_running(selector, &pause));
      progress.reset();
      require_match(wanted);
      writer_.emplace(require(TraceWriter::create(options_.output, max_bytes)));
    } catch (...) {
      if (auto left = target_->detach(pid, &pause); !left || !left->empty())
        tell("sonde: note: {}\n", printable(left ? *left : "detaching: " + left.error().message));
      throw;
    }
    outlive_failed_writes();
    if (!target_->minds_handlers())
      meta_.notes.push_back(fmt::format(
          "a thread of process {} never left a system call that installs handlers: its signal handlers may see "
          "a pc in the copy of a function's first instructions",
          pid));
    start_trace(pid);
    hurry.reset();
    recorder_.emplace(*session_, *writer_);
    session_->set_state(SessionState::recording);
    if (!options_.quiet)
      tell("sonde: recording process {} ({}); {}\n", pid, printable(status_field(pid, "Name")),
           options_.command.empty() ? "Ctrl-C ends it" : "until the command ends");
    Service service(*target_, session_->header(), selector, [this](pid_t ending) { take_in_flight(ending); });
    int command_status = attend_attached(service);
    note_waiting(wanted);
    hurry.emplace();
    stop_attached();
    take_out(&pause);
    hurry.reset();
    service.note_pause(pause);
    finish(service, -1);
    if (!options_.quiet)
      tell("sonde: process {} stood still for at most {:.2f} ms at a time\n", pid,
           static_cast<double>(service.longest_pause_ns()) / 1e6);
    if (command_status >= 0) pass_on(command_status);
  }

  // Both must outlive it; progress that is over is not told any more.
  static Selector selector_of(Wanted& wanted, std::optional<Progress>& progress) {
    return [&](const LoadedImage& loaded, bool is_program) -> host::Result<Chosen> {
      auto chosen = wanted.choose(loaded, is_program);
      if (progress && chosen) progress->add(chosen->functions.size() + chosen->points.size());
      return chosen;
    };
  }

  SessionOptions session_options() const {
    SessionOptions chosen;
    chosen.policy = options_.sum ? FullPolicy::sum : options_.drop ? FullPolicy::drop : FullPolicy::wait;
    if (options_.sum) chosen.ring_bytes = kTreeBytes;
    return chosen;
  }

  void put_agent_into(pid_t pid, const AgentFile& agent) {
    LentThread lent = require(LentThread::find(pid));
    Attached attached = require(host::attach(pid, agent, lent));
    session_ = require(Session::create(session_options(), attached.session_fd));
    presence_.emplace(require(Presence::create(attached.presence_fd)));
    close(attached.session_fd), close(attached.presence_fd);
    TargetOptions target_options{.stacks = options_.stacks,
                                 .sum = options_.sum,
                                 .allow_traps = !options_.no_trap,
                                 .launched = false,
                                 .handle = attached.agent_handle};
    target_.emplace(pid, agent, attached.program, lent.syscall_instruction(), target_options);
    require(target_->install(lent.tracee(), attached.their_session_fd, attached.their_presence_fd, session_->header()));
  }

  // Until the process ends, or somebody wants an end, or the command that says for how long has ended: its wait status.
  int attend_attached(Service& service) {
    pid_t command = options_.command.empty() ? 0 : start_command();
    for (;;) {
      serve(service);
      int wait_status;
      if (command && waitpid(command, &wait_status, WNOHANG) == command) return wait_status;
      if (!presence_->anyone()) break;
      if (interrupted || asked_to_end) break;
      usleep(static_cast<useconds_t>(recorder_->pause_ns() / 1000));
    }
    if (!presence_->anyone())
      meta_.notes.push_back(fmt::format("process {} ended while it was recorded", target_->pid()));
    int wait_status = -1;
    if (command) kill(command, SIGTERM), waitpid(command, &wait_status, 0);
    return -1;
  }

  // Not probed itself: it only says how long to record.
  pid_t start_command() {
    pid_t pid = fork();
    if (pid != 0) return pid;
    std::vector<char*> argv;
    for (const std::string& word : options_.command) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    execvp(argv[0], argv.data());
    int error = errno;
    tell("sonde: cannot run '{}': {}\n", printable(options_.command.front()), std::strerror(error));
    _exit(error == ENOENT ? 127 : 126);
  }

  // The recording ends while everybody stands, so that each call either has returned or is in flight.
  void stop_attached() {
    std::vector<StoppedProcess> stopped;
    auto processes = presence_->processes();
    for (pid_t pid : processes)
      if (auto one = StoppedProcess::stop(pid)) stopped.push_back(std::move(*one));
    session_->set_state(SessionState::stopped);
    for (pid_t pid : processes) take_in_flight(pid);
  }

  void take_out(std::chrono::nanoseconds* pause) {
    for (pid_t pid : presence_->processes()) {
      auto left = target_->detach(pid, pause);
      if (left && left->empty()) continue;
      meta_.notes.push_back(left ? *left : "detaching: " + left.error().message);
      if (!options_.quiet) tell("sonde: note: {}\n", printable(meta_.notes.back()));
    }
  }

  void note_waiting(const Wanted& wanted) {
    for (const std::string& pattern : wanted.waiting())
      meta_.notes.push_back(
          fmt::format("{} matched nothing: no such file was loaded, or it has no such function or place", pattern));
  }

  // A pattern that nothing matches is a mistake; it is told before the program has run.
  void require_match(const Wanted& wanted) {
    std::vector<std::shared_ptr<const Image>> images;
    for (const TargetImage& image : target_->images()) images.push_back(image.loaded.image);
    if (auto error = wanted.unmatched(images)) {
      // With -p the command, if there is one, is not what was searched.
      std::string program = options_.pid ? "" : options_.command.front();
      if (std::string interpreter = script_interpreter(program); !interpreter.empty())
        error->message += printable(fmt::format(
            "; {} is a script: its interpreter {} and the libraries of that were searched", program, interpreter));
      throw CommandError{*error};
    }
    if (options_.quiet) return;
    for (const std::string& note : wanted.notes()) tell("sonde: note: {}\n", printable(note));
  }

  void start_trace(pid_t pid) {
    meta_.command = options_.command;
    meta_.pid = static_cast<uint32_t>(pid);
    meta_.stacks = options_.stacks;
    meta_.policy = options_.sum ? "sum" : options_.drop ? "drop" : "wait";
    auto by_trap = [](const TargetSite& site) { return site.plan.method == Method::trap; };
    if (std::ranges::any_of(target_->sites(), by_trap)) meta_.trap_cost_ns = measure_trap_ns();
    meta_.start = session_->start_clock();
    writer_->start(meta_);
    write_news();
  }

  // Images and sites that are new since the last call.
  void write_news() {
    uint64_t now = sample_clock().ticks;
    auto images = target_->images();
    size_t known = meta_.images.size();
    for (size_t i = 0; i < images.size(); i++) {
      const LoadedImage& l = images[i].loaded;
      if (i >= known)
        meta_.images.push_back({l.image->path(), std::string(l.image->build_id()), l.range.begin.value,
                                l.range.end.value, l.bias, known == 0 ? meta_.start.ticks : now});
      else if (images[i].gone && meta_.images[i].to_ticks == ~0ull) meta_.images[i].to_ticks = now;
    }
    writer_->images(std::span(meta_.images).subspan(known));
    std::vector<TraceSite> added;
    std::map<Refusal, std::vector<std::string>> points;  // that cannot be probed
    auto sites = target_->sites();
    for (; written_sites_ < sites.size(); written_sites_++) {
      const TargetSite& site = sites[written_sites_];
      std::string name = raw_name(images[site.image].loaded, site);
      bool refused = site.plan.method == Method::refused;
      added.push_back({site.image, site.plan.entry.value, std::move(name), refused ? "" : describe(site.plan.method),
                       refused ? fmt::format("{} (at +{})", describe(site.plan.refusal), site.plan.refusal_offset) : "",
                       site.plan.no_hijack == NoHijack::none ? "" : describe(site.plan.no_hijack), site.internal,
                       site.plan.is_point()});
      if (refused && site.plan.is_point())
        points[site.plan.refusal].push_back(
            point_name(*images[site.image].loaded.image, images[site.image].loaded.to_image(site.plan.entry)));
    }
    writer_->sites(added);
    if (!options_.quiet) tell_refused(points);
  }

  static void tell_refused(const std::map<Refusal, std::vector<std::string>>& points) {
    constexpr size_t kNamed = 3;
    for (const auto& [reason, names] : points) {
      std::span named(names.data(), std::min(names.size(), kNamed));
      std::string more = names.size() > kNamed ? fmt::format(" and {} more", names.size() - kNamed) : "";
      tell("sonde: note: the {} at {}{} {} not probed: {}\n", plural(names.size(), "instruction", "instructions"),
           printable(fmt::format("{}", fmt::join(named, ", "))), more, plural(names.size(), "is", "are"),
           describe(reason));
    }
  }

  static std::string raw_name(const LoadedImage& loaded, const TargetSite& site) {
    if (site.function == kNoFunction) return "";
    const Function& function = loaded.image->functions()[site.function];
    if (!site.plan.is_point() || function.name.empty()) return function.name;
    return fmt::format("{}+{:#x}", function.name, site.plan.entry - loaded.to_target(function.range.begin));
  }

  void serve(Service& service) {
    recorder_->poll();
    if (auto served = service.poll(); !served) {
      meta_.notes.push_back(served.error().message);
    } else if (*served) {
      write_news();
    }
  }

  // Drains until the program ends, or until the second Ctrl-C. Value: its wait status, or -1 if it still runs.
  int attend(Service& service, ExecWatch& execs) {
    drain_first();
    for (;;) {
      serve(service);
      siginfo_t ended{};
      int looked = waitid(P_PID, static_cast<id_t>(target_->pid()), &ended, WEXITED | WNOHANG | WNOWAIT);
      if (looked != 0 && errno == ECHILD) {  // never without a fault of ours, but then no reason to wait for ever
        meta_.notes.emplace_back("the program has ended, but its exit status was lost");
        return W_EXITCODE(1, 0);
      }
      if (looked == 0 && ended.si_pid) {
        execs.look_at_ended(exiting_.contains(target_->pid()) || ended.si_code != CLD_EXITED);
        if (std::string note = execs.note(); !note.empty()) {
          if (!options_.quiet) tell("sonde: note: {}\n", printable(note));
          meta_.notes.push_back(std::move(note));
        }
        int wait_status;
        program_pid = 0;  // no signal for whoever gets its number
        if (waitpid(target_->pid(), &wait_status, 0) == target_->pid()) return wait_status;
      }
      execs.look();
      if (interrupted >= 2) return -1;
      usleep(static_cast<useconds_t>(recorder_->pause_ns() / 1000));
    }
  }

  // The program has ended; its children are the target until the last of them ends, or until somebody wants an end: who
  // did so before, and with it ended the program, gets it a moment later.
  void attend_children(Service& service) {
    using namespace std::chrono;
    service.program_ended();
    const auto begin = steady_clock::now();
    const int asked = asked_to_end;
    for (bool said = options_.quiet; presence_->anyone();) {
      serve(service);
      auto waited = steady_clock::now() - begin;
      if (asked_to_end != asked || (asked && waited > kMomentAfterInterrupt)) return;
      if (!said && waited > kUnsaidWait) {
        size_t n = presence_->processes().size();  // 0: we may look into none of them
        tell("sonde: {} has ended; {}{} it started {} still recorded (Ctrl-C ends the recording)\n",
             printable(options_.command.front()), n ? fmt::format("{} ", n) : "", plural(n, "process", "processes"),
             n == 1 ? "is" : "are");
        said = true;
      }
      usleep(static_cast<useconds_t>(recorder_->pause_ns() / 1000));
    }
  }

  // Ends the recording. Of processes that go on, what they are in the middle of is all that is left to see.
  void stop_recording() {
    bool some = presence_->anyone();
    auto processes = some ? presence_->processes() : std::vector<pid_t>();  // it takes a while
    session_->set_state(SessionState::stopped);
    if (!some) return;
    for (pid_t pid : processes) take_in_flight(pid);
    size_t n = processes.size();
    meta_.notes.push_back(fmt::format("{} {} still ran when the recording ended", n ? std::to_string(n) : "some",
                                      plural(n, "process", "processes")));
    if (!options_.quiet) tell("sonde: note: {}\n", meta_.notes.back());
  }

  // Calls that have begun and not ended in a process that stands still, or will not be watched any longer.
  void take_in_flight(pid_t pid) {
    exiting_.insert(pid);
    recorder_->poll();
    auto calls = target_->in_flight(pid);
    if (!calls) {
      meta_.notes.push_back(calls.error().message);
      return;
    }
    uint64_t now = sample_clock().ticks;
    for (const InFlight& call : *calls) {
      if (options_.sum) {
        if (call.kind != ExitKind::inherited) recorder_->end_summed(static_cast<uint32_t>(pid), call, now);
        continue;
      }
      uint64_t record[] = {call_word(call.kind, call.site, slot_key(call.slot)), call.entry_ticks, now};
      recorder_->append(static_cast<uint32_t>(pid), call.tid, record);
      recorder_->set_signal_stack(static_cast<uint32_t>(pid), call.tid, call.signal_stack);
    }
  }

  void note_small_stacks() {
    if (!options_.stacks) return;
    std::set<uint32_t> noted;
    for (const TargetSite& site : target_->sites()) {
      const TargetImage& image = target_->images()[site.image];
      if (site.internal || !image.small_stacks || !noted.insert(site.image).second) continue;
      meta_.notes.push_back(fmt::format("functions of {} are recorded without stacks: theirs have no room for a walk",
                                        image.loaded.image->path()));
    }
  }

  // Functions that only a trap could have shown, or did no longer.
  void note_traps() {
    if (!target_->no_traps().empty())
      meta_.notes.push_back(fmt::format("functions that only a trap fits are not probed: {}", target_->no_traps()));
    static constexpr const char* kCauses[kDisarmCauses] = {
        "locked itself in with seccomp",
        "set up a signal stack, or one for a coroutine, without room for a trap's signal",
        "",  // more than the traps, see below
        "asked to be traced (it is a debugger, or made one's child)",
        "loaded a library after a fork, where sonde does not look for its system calls"};
    auto n_of = [&](unsigned cause) { return session_->header()->disarmed[cause]; };
    for (unsigned cause = 0; cause < kDisarmCauses; cause++)
      if (uint32_t n = n_of(cause); n && *kCauses[cause])
        meta_.notes.push_back(
            fmt::format("in {} the traps were taken out, and with them the functions that only a trap "
                        "fits: the program {}",
                        counted(n, "process", "processes"), kCauses[cause]));
    uint32_t n = n_of(static_cast<unsigned>(DisarmCause::no_ticks));
    if (n == 0) return;
    // Beside it the number of lost calls would say too little.
    meta_.notes.push_back(fmt::format(
        "{} forbade {} the time stamp counter (strict seccomp, PR_SET_TSC): nothing of {} was recorded from "
        "then on. Calls of functions with a jump are counted as lost (no state left for the thread), those "
        "of functions with a trap are not counted: the traps were taken out",
        counted(n, "process", "processes"), plural(n, "itself", "themselves"), plural(n, "it", "them")));
    if (!options_.quiet) tell("sonde: note: {}\n", meta_.notes.back());
  }

  // Calls without a record: how many there are is known, not which. A thread that ended took with it those that it had
  // left by longjmp or ended within; a process that ended unseen (a fatal signal, exec) those that ran.
  void note_unseen() {
    if (options_.sum) return;  // the trees hold them
    // A call may end in another thread than it began in (coroutines): only what a process as a whole lacks is missing.
    struct Missing {
      int64_t all = 0, of_threads = 0;
    };
    std::map<uint32_t, Missing> missing;
    for (const TraceThread& t : meta_.threads) {
      auto n = static_cast<int64_t>(t.calls - t.records - t.lost_calls);
      missing[t.pid].all += n;
      if (t.outlived && n > 0) missing[t.pid].of_threads += n;
    }
    int64_t of_threads = 0, of_processes = 0;
    for (const auto& [pid, m] : missing) {
      int64_t all = std::max<int64_t>(m.all, 0), ended = std::min(all, m.of_threads);
      of_threads += ended;
      of_processes += all - ended;
    }
    if (of_threads)
      meta_.notes.push_back(fmt::format("{} ended with {}, without a return: {} counted here only",
                                        counted(of_threads, "call"), plural(of_threads, "its thread", "their threads"),
                                        plural(of_threads, "it is", "they are")));
    if (of_processes)
      meta_.notes.push_back(
          fmt::format("{} in flight when {} process ended (killed, or became another "
                      "program): {} counted here only",
                      counted(of_processes, "call was", "calls were"), plural(of_processes, "its", "their"),
                      plural(of_processes, "it is", "they are")));
  }

  void finish(Service& service, int wait_status) {
    recorder_->finish(meta_);
    note_unseen();
    note_traps();
    note_small_stacks();
    meta_.end = sample_clock();
    meta_.wait_status = wait_status;
    meta_.longest_pause_ns = service.longest_pause_ns();
    writer_->end(meta_);
    tell_the_end();
  }

  void tell_the_end() {
    if (options_.quiet && !options_.json) return;
    uint64_t lost = meta_.lost_no_thread_state + meta_.lost_no_ring, waited = meta_.ring_waited_ticks;
    for (const TraceThread& t : meta_.threads) {
      for (uint64_t n : t.lost) lost += n;
      waited += t.waited_ticks;
    }
    size_t functions = 0, instructions = 0, refused = 0;
    for (const TargetSite& site : target_->sites())
      if (!site.internal)
        (site.plan.method == Method::refused ? refused : site.plan.is_point() ? instructions : functions)++;
    double waited_ns = static_cast<double>(TickClock(meta_.start, meta_.end).ns(static_cast<int64_t>(waited)));
    if (options_.json) {
      nlohmann::ordered_json out{{"output", options_.output},
                                 {"calls", recorder_->calls()},
                                 {"stacks", recorder_->stacks()},
                                 {"functions", functions},
                                 {"instructions", instructions},
                                 {"refused", refused},
                                 {"lost", lost},
                                 {"waited_ns", std::llround(waited_ns)},
                                 {"not_written", writer_->unwritten_records()},
                                 {"not_written_why", writer_->failure()},
                                 {"bytes", writer_->bytes()},
                                 {"notes", meta_.notes}};
      return tell("{}\n", out.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    }
    std::string stacks = options_.stacks ? fmt::format(" and {}", counted(recorder_->stacks(), "stack")) : "";
    std::string of = functions || !instructions ? counted(functions, "function") : "";
    if (instructions) of += (of.empty() ? "" : " and ") + counted(instructions, "instruction");
    // Where the file lacks events, "0 lost" would say the opposite.
    std::string losses = writer_->failure().empty() || lost ? fmt::format(", {} lost", lost) : "";
    if (!writer_->failure().empty())
      losses += fmt::format(", {} not written ({})", writer_->unwritten_records(), writer_->failure());
    tell("sonde: {}{} of {} ({} refused){}, waited {:.3f} s; {:.1f} MB in {}\n",
         counted(recorder_->calls(), functions ? "call" : "hit"), stacks, of, refused, losses, waited_ns / 1e9,
         static_cast<double>(writer_->bytes()) / 1e6, options_.output);
    if (writer_->regular())
      tell("sonde: type `sonde report{}` to see them\n", options_.output == "sonde.trace" ? "" : " " + options_.output);
  }

  void pass_on(int wait_status) {
    if (WIFSIGNALED(wait_status)) {
      writer_.reset();
      die_of(WTERMSIG(wait_status));
    }
    status_ = WEXITSTATUS(wait_status);
  }

  Options options_;
  int& status_;
  std::unique_ptr<Session> session_;
  std::optional<Presence> presence_;
  std::optional<Target> target_;
  std::optional<TraceWriter> writer_;
  std::optional<Recorder> recorder_;
  TraceMeta meta_;
  std::set<pid_t> exiting_;  // processes that were seen to end by themselves
  size_t written_sites_ = 0;
};

}  // namespace

void add_record(CLI::App& app, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("record", "Run a program with its functions probed; write a trace");
  command->add_option("-f,--function", options->functions, "Functions to probe: GLOB, MODULE:GLOB, !GLOB (repeatable)")
      ->allow_extra_args(false)
      ->type_name("PATTERN");
  command
      ->add_option("--at", options->places,
                   "An instruction to probe: SYMBOL+OFFSET, FILE:LINE, 0xADDRESS, each after MODULE: or without, "
                   "MODULE:0xFILEOFFSET; GLOB+* is each of a function's, @FILE a file with a place a line (repeatable)")
      ->allow_extra_args(false)
      ->type_name("PLACE");
  command->add_flag("-s,--stack", options->stacks, "Record a stack for each hit");
  command->add_option("-o,--output", options->output, "The trace file")->type_name("FILE")->capture_default_str();
  command->add_option("--max-size", options->max_size, "Write no more than this (500M, 2G); the rest is counted")
      ->type_name("SIZE");
  command->add_flag("--drop", options->drop, "When a ring is full drop records and count them, rather than wait");
  command->add_flag(
      "--sum", options->sum,
      "Keep no records but sums of calls by their callers, in the program: nothing to drain, small traces; "
      "no single calls, no percentiles (p50, p99)");
  auto* no_trap = command->add_flag("--no-trap", options->no_trap,
                                    "Refuse functions that only a one-byte trap fits (a signal for each hit)");
  command
      ->add_flag("--force-trap", options->force_trap,
                 "Probe every function with a trap, for comparing and for tests of traps: slow, microseconds a call "
                 "where a jump takes nanoseconds; an error where traps are not safe")
      ->excludes(no_trap);
  command->add_flag("-q,--quiet", options->quiet, "Print nothing of its own");
  command->add_flag("--json", options->json,
                    "At the end one line of JSON on standard error, and else nothing of its own");
  auto* pid = command->add_option("-p,--pid", options->pid,
                                  "Record a process that runs, until Ctrl-C or while the command given runs");
  pid->type_name("PID")->excludes("--force-trap");
  command->add_option("PROGRAM", options->command, "The program and its arguments")->type_name("[ARGS...]");
  command->positionals_at_end();
  command->prefix_command(false);
  command->footer(
      "Without -f and --at: every function of the program itself. A pattern without MODULE is looked for in the "
      "program, and "
      "only\n"
      "if that has none in its libraries; *:GLOB means all of them. NAME@V1 is one version of a symbol.\n"
      "Forked children are recorded to the end of the last one, daemons too: Ctrl-C ends the recording, not them. A\n"
      "process that becomes another program by exec (a script whose first line is #!/usr/bin/env python3) is not\n"
      "followed there: record that program itself, sonde record python3 SCRIPT.\n"
      "Examples:\n"
      "  sonde record ./app args\n"
      "  sonde record -f 'net::*' -f '!net::debug*' -s ./app args\n"
      "  sonde record -f 'libsqlite3.so.0:sqlite3_*' sqlite3 test.db 'select 1'\n"
      "  sonde record --at parse+0x1c --at reader.c:120 ./app       instructions: how often, from where (-s)\n"
      "  sonde record --sum ./server    call tree, counts and times for hours; no single calls\n"
      "  sonde record -o /tmp/t -- ls -l\n"
      "  sonde record --json -- make 2>&1 >/dev/null | tail -1    what was recorded, for scripts\n"
      "  sonde record -p 4711                 a process that runs, until Ctrl-C\n"
      "  sonde record -f '*:send*' -p 4711 -- sleep 10    the same for ten seconds\n"
      "The exit status is the program's own; with -p that of the command, or 0.");
  command->callback([options, &status] {
    if (!options->pid && options->command.empty())
      throw CommandError{{"PROGRAM or -p PID is required\nsonde record --help says more", 2}};
    Recording(*options, status).run();
  });
}

}  // namespace sonde::cli
