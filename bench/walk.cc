// Walkers of the own thread's stack, side by side in one run: sonde's, two limits, and the peers (walk_bench.h).
//
// Each walk stands at the end of a path through generated functions (walk_sites.S) and is timed alone, between two
// serialised time stamps whose own cost is taken off. Every stack is checked against the path. Rounds take turns over all
// walkers, so that a busy machine disturbs all of them alike; ratios are those of one round.
//
// usage: walk_bench [--rounds N] [--frame-pointers] [--check]
//        walk_bench --cold WALKER DEPTH [MB]   the first walk of a process, in ns, caches full of MB (64) megabytes of other data
#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>

#include "bench/walk_bench.h"

extern "C" const uint64_t bench_sites_fp[], bench_sites_bare[];
extern "C" unsigned bench_enter(const uint64_t* path);

using namespace sonde::bench;

namespace {

constexpr unsigned kSites = 16000;
constexpr unsigned kMostLeft = 4;  // one in so many stacks may be left by the short way

uint64_t ticks() {
  uint32_t low, high;
  asm volatile("lfence; rdtsc; lfence" : "=a"(low), "=d"(high)::"memory");
  return uint64_t{high} << 32 | low;
}

double ns_per_tick() {
  static double ratio = [] {
    auto now = [] {
      timespec t;
      clock_gettime(CLOCK_MONOTONIC, &t);
      return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
    };
    double t0 = now();
    uint64_t c0 = ticks();
    while (now() - t0 < 2e7) {
    }
    return (now() - t0) / static_cast<double>(ticks() - c0);
  }();
  return ratio;
}

using Path = std::vector<uint64_t>;  // functions to call, outermost first; behind them the leaf

struct Scenario {
  std::string name;
  std::vector<Path> paths;
  bool in_handler = false;
  unsigned threads = 1;
};

// What a thread is doing.
struct Job {
  const Walker* walker;
  bool in_handler = false;
  uint64_t ticks = 0, frames = 0, walks = 0, wrong = 0;  // ticks: of the pass in the middle, times the passes
  uint64_t left =
      0;  // of the walks of one pass, when everything was warm: those that the short way left to the long one
  const Path* path = nullptr;
  bool check = false;
  bool must_be_whole = false;
};
thread_local Job* job;
thread_local uint64_t found[kMostFrames];

// The path's return addresses, innermost first, must follow each other in what was found.
bool is_true(const Job& j, unsigned count) {
  std::vector<uint64_t> expected;
  for (size_t i = j.path->size() - 1; i-- > 0;) expected.push_back((*j.path)[i]);
  static std::map<uint64_t, uint64_t> returns;
  if (returns.empty())
    for (const uint64_t* sites : {bench_sites_fp, bench_sites_bare})
      for (unsigned i = 0; i < kSites; i++) returns[sites[2 * i]] = sites[2 * i + 1];
  for (uint64_t& e : expected) e = returns.at(e);
  std::vector<uint64_t> all(found, found + count);
  if (j.walker->packed)
    for (uint64_t& a : all) a = a << 16 >> 16;
  return std::search(all.begin(), all.end(), expected.begin(), expected.end()) != all.end();
}

[[gnu::noinline]] void measure() {
  Job& j = *job;
  uint64_t begin = ticks();
  unsigned count = j.walker->walk(found);
  uint64_t end = ticks();
  j.ticks += end - begin, j.frames += count, j.walks++;
  if (j.check && (!is_true(j, count) || (j.must_be_whole && !last_was_whole()))) j.wrong++;
}

[[gnu::noinline]] void trap() { asm volatile("int3"); }
extern "C" [[gnu::noinline]] unsigned leaf(const uint64_t*) {
  if (job->in_handler) trap();
  else measure();
  asm volatile("");  // no jump
  return 0;
}
void on_trap(int) {
  measure();
  asm volatile("");
}

[[gnu::noinline]] void run_path(const Path& path) {
  job->path = &path;
  end_frame_pointers_at(reinterpret_cast<uint64_t>(__builtin_frame_address(0)));
  bench_enter(path.data());
}

struct Sample {
  double ns_per_walk = 0, ns_per_frame = 0;
  uint64_t wrong = 0, left = 0;
};

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

unsigned no_walk(uint64_t*) { return 0; }
const Walker kNoWalk = {.name = "nothing", .walk = no_walk};

// Passes over all paths. The time of a pass is that of the one in the middle, so a few that were interrupted do not count.
Job run_job(const Walker& walker, const Scenario& scenario, unsigned times, bool check) {
  static thread_local Job j;
  j = {.walker = &walker, .in_handler = scenario.in_handler, .check = check, .must_be_whole = check && walker.packed};
  job = &j;
  std::vector<double> passes;
  for (unsigned i = 0; i < times; i++) {
    j.ticks = 0;
    for (const Path& path : scenario.paths) run_path(path);
    passes.push_back(static_cast<double>(j.ticks));
  }
  j.ticks = static_cast<uint64_t>(median(passes) * times);
  return j;
}

// One round of one walker: a pass that warms everything, then as many as take a few milliseconds.
Job time_it(const Walker& walker, const Scenario& scenario, bool check) {
  uint64_t wrong = run_job(walker, scenario, 1, check).wrong;
  uint64_t left = left_by_the_short_way();
  Job once = run_job(walker, scenario, 1, false);
  left = left_by_the_short_way() - left;
  uint64_t enough = static_cast<uint64_t>(3e6 / ns_per_tick());
  unsigned times = static_cast<unsigned>(std::clamp<uint64_t>(enough / (once.ticks + 1), 1, 200));
  Job j = run_job(walker, scenario, times, false);
  j.wrong = wrong, j.left = left;
  return j;
}

struct Together {
  const Walker* walker;
  const Scenario* scenario;
  std::atomic<unsigned>* ready;
  bool check;
  Job result;
};
void* run_thread(void* together_) {
  auto& t = *static_cast<Together*>(together_);
  begin_thread();
  run_job(*t.walker, *t.scenario, 1, false);
  t.ready->fetch_add(1);
  while (t.ready->load() < t.scenario->threads) {
  }
  t.result = time_it(*t.walker, *t.scenario, t.check);
  end_thread();
  return nullptr;
}

Sample sample(const Walker& walker, const Scenario& scenario, bool check, double overhead) {
  std::vector<Together> jobs(scenario.threads);
  std::atomic<unsigned> ready = 0;
  std::vector<pthread_t> threads(scenario.threads);
  for (auto& t : jobs) t = {&walker, &scenario, &ready, check, {}};
  for (unsigned i = 0; i < scenario.threads; i++) pthread_create(&threads[i], nullptr, run_thread, &jobs[i]);
  Sample s;
  for (unsigned i = 0; i < scenario.threads; i++) {
    pthread_join(threads[i], nullptr);
    const Job& j = jobs[i].result;
    double walk = static_cast<double>(j.ticks) / static_cast<double>(j.walks) * ns_per_tick() - overhead;
    s.ns_per_walk += walk / scenario.threads;
    s.ns_per_frame +=
        walk * static_cast<double>(j.walks) / static_cast<double>(std::max<uint64_t>(j.frames, 1)) / scenario.threads;
    s.wrong += j.wrong, s.left = std::max(s.left, j.left);
  }
  return s;
}

Path path_of(const uint64_t* sites, const std::vector<unsigned>& numbers) {
  Path path;
  for (unsigned n : numbers) path.push_back(sites[2 * n]);
  path.push_back(reinterpret_cast<uint64_t>(&leaf));
  return path;
}

// `count` stacks of one depth that part like the branches of a tree: the outer frames are common to many.
std::vector<Path> branching(const uint64_t* sites, unsigned count, unsigned depth) {
  std::vector<Path> paths;
  unsigned levels = 1;
  while (1u << (levels - 1) < count) levels++;
  for (unsigned p = 0; p < count; p++) {
    std::vector<unsigned> numbers;
    for (unsigned i = 0; i < depth; i++) {
      unsigned level = i * levels / depth, branch = p >> (levels - 1 - level);
      std::mt19937 random(i * 1000 + level * 100000 + branch);
      numbers.push_back(random() % kSites);
    }
    paths.push_back(path_of(sites, numbers));
  }
  return paths;
}

// Every site once, in stacks of 64.
std::vector<Path> all_sites(const uint64_t* sites) {
  std::vector<unsigned> order(kSites);
  for (unsigned i = 0; i < kSites; i++) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937(7));
  std::vector<Path> paths;
  for (unsigned i = 0; i < kSites; i += 64)
    paths.push_back(path_of(sites, {order.begin() + i, order.begin() + std::min(kSites, i + 64)}));
  return paths;
}

// The first walk of a process, with caches full of something else.
int cold(const std::string& name, unsigned depth, size_t sweep) {
  for (const auto& list : {own_walkers(), peers()})
    for (const Walker& walker : list) {
      if (walker.name != name) continue;
      map_tables();
      begin_thread();
      Scenario scenario{"", branching(walker.frame_pointers ? bench_sites_fp : bench_sites_bare, 1, depth)};
      run_job(kNoWalk, scenario, 1, false);
      ns_per_tick();
      std::vector<uint64_t> other(sweep << 17);  // megabytes
      for (size_t i = 0; i < other.size(); i++) other[i] = i * other[(i * 31) % other.size()] + 1;
      Job j{.walker = &walker};
      job = &j;
      run_path(scenario.paths[0]);
      std::printf("%.0f\n", static_cast<double>(j.ticks) * ns_per_tick());
      return 0;
    }
  return 2;
}

double run_cold(const char* program, const Walker& walker, unsigned depth) {
  std::string command = fmt::format("'{}' --cold '{}' {}", program, walker.name, depth);
  FILE* pipe = popen(command.c_str(), "r");
  double ns = 0;
  if (!pipe || std::fscanf(pipe, "%lf", &ns) != 1) ns = 0;
  if (pipe) pclose(pipe);
  return ns;
}

}  // namespace

int main(int argc, char** argv) {
  unsigned rounds = 9;
  bool with_fp = false, check_only = false;
  for (int i = 1; i < argc; i++) {
    std::string_view a = argv[i];
    if (a == "--rounds" && i + 1 < argc) rounds = static_cast<unsigned>(std::atoi(argv[++i]));
    else if (a == "--frame-pointers") with_fp = true;
    else if (a == "--check") check_only = true;
    else if (a == "--cold" && i + 2 < argc)
      return cold(argv[i + 1], static_cast<unsigned>(std::atoi(argv[i + 2])),
                  i + 3 < argc ? static_cast<size_t>(std::atoi(argv[i + 3])) : 64);
    else return std::fprintf(stderr, "usage: walk_bench [--rounds N] [--frame-pointers] [--check]\n"), 2;
  }
  if (check_only) rounds = 1;
  std::vector<Walker> walkers = own_walkers();
  for (Walker& peer : peers()) walkers.push_back(peer);
  map_tables();
  struct sigaction action{};
  action.sa_handler = on_trap;
  sigaction(SIGTRAP, &action, nullptr);

  const uint64_t* sites = with_fp ? bench_sites_fp : bench_sites_bare;
  auto scenarios_on = [](const uint64_t* s) {
    return std::vector<Scenario>{
        {"10", branching(s, 64, 10)},
        {"50", branching(s, 64, 50)},
        {"200", branching(s, 64, 200)},
        {"16000", all_sites(s)},
        {"handler 10", branching(s, 64, 10), true},
        {"handler 50", branching(s, 64, 50), true},
        {"2 threads 50", branching(s, 64, 50), false, 2},
        {"2 threads 16000", all_sites(s), false, 2},
        {"one stack 50", branching(s, 1, 50)},
    };
  };
  std::vector<Scenario> scenarios = scenarios_on(sites), fp_scenarios = scenarios_on(bench_sites_fp);
  size_t columns = scenarios.size() + 1;  // and the cold one
  // figures[walker][column]: one value a round
  std::vector<std::vector<std::vector<double>>> figures(walkers.size(), std::vector<std::vector<double>>(columns));
  uint64_t wrong = 0;
  for (unsigned round = 0; round < rounds; round++) {
    for (size_t s = 0; s < scenarios.size(); s++) {
      double overhead = sample(kNoWalk, scenarios[s], false, 0).ns_per_walk;
      for (size_t w = 0; w < walkers.size(); w++) {
        const Walker& walker = walkers[w];
        if (!walker.missing.empty()) continue;
        Sample one = sample(walker, walker.frame_pointers ? fp_scenarios[s] : scenarios[s], round == 0, overhead);
        figures[w][s].push_back(one.ns_per_frame);
        if (one.wrong)
          std::printf("wrong: %s, %s: %lu stacks\n", walker.name.c_str(), scenarios[s].name.c_str(), one.wrong),
              wrong++;
        // A walk that leaves the short way takes ten times as long: a count that needs no quiet machine.
        if (round == 0 && one.left * kMostLeft > scenarios[s].paths.size())
          std::printf("slow: %s, %s: %lu of %zu stacks, walked before, were left by the short way\n",
                      walker.name.c_str(), scenarios[s].name.c_str(), one.left, scenarios[s].paths.size()),
              wrong++;
      }
    }
    for (size_t w = 0; w < walkers.size() && !check_only; w++)
      if (walkers[w].missing.empty())
        if (double ns = run_cold(argv[0], walkers[w], 50); ns > 0) figures[w].back().push_back(ns / 1000);
  }
  if (check_only) return std::printf("%s\n", wrong ? "wrong or slow stacks" : "all stacks are true"), wrong != 0;

  fmt::print(
      "ns a frame, code {} frame pointers; 64 stacks in rotation where nothing else is said; median of {} (spread)\n",
      with_fp ? "with" : "without", rounds);
  fmt::print("{:<28}", "");
  for (auto& s : scenarios) fmt::print("{:>21}", s.name);
  fmt::print("{:>21}\n", "cold 50, us a walk");
  for (size_t w = 0; w < walkers.size(); w++) {
    fmt::print("{:<28}", walkers[w].name);
    if (!walkers[w].missing.empty()) fmt::print(" not measured: {}", walkers[w].missing);
    for (auto& f : figures[w])
      if (!f.empty())
        fmt::print("{:>21}", fmt::format("{:.1f} ({:.1f}..{:.1f})", median(f), *std::min_element(f.begin(), f.end()),
                                         *std::max_element(f.begin(), f.end())));
    fmt::print("\n");
  }
  auto number = [&](std::string_view name) {
    for (size_t w = 0; w < walkers.size(); w++)
      if (walkers[w].name == name) return w;
    std::abort();
  };
  auto ratio = [&](size_t a, size_t b, size_t column) {
    std::vector<double> all;
    for (size_t i = 0; i < std::min(figures[a][column].size(), figures[b][column].size()); i++)
      all.push_back(figures[a][column][i] / figures[b][column][i]);
    return median(all);
  };
  size_t best = number("sonde, best effort"), sure = number("sonde, reliable"), ideal = number("ideal table walk"),
         gnu = number("GNU libunwind, unw_backtrace"), libgcc = number("libgcc");
  struct Bound {
    const char* text;
    size_t a, b;
  } bounds[] = {{"sonde / ideal", best, ideal},
                {"reliable / best effort", sure, best},
                {"unw_backtrace / sonde", gnu, best},
                {"libgcc / sonde", libgcc, best}};
  for (auto& b : bounds) {
    fmt::print("{:<28}", b.text);
    for (size_t c = 0; c < columns; c++)
      if (!figures[b.a][c].empty() && !figures[b.b][c].empty()) fmt::print("{:>21.2f}", ratio(b.a, b.b, c));
    fmt::print("\n");
  }
  return wrong != 0;
}
