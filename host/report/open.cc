#include "host/report/open.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <string.h>
#include <sys/wait.h>

#include <map>
#include <tuple>

#include "host/image/image.h"
#include "host/trace/file.h"

namespace sonde::host {

namespace {

class TraceSource : public RecordSource {
 public:
  explicit TraceSource(TraceReader reader) : reader_(std::move(reader)) {}
  Result<void> each(const RecordSink& sink) override { return reader_.each(sink); }
  Result<std::map<uint32_t, SumTree>> sums() const { return reader_.sums(); }
  const TraceMeta& meta() const { return reader_.meta(); }

 private:
  TraceReader reader_;
};

std::string base_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

std::string describe_end(int wait_status) {
  if (wait_status < 0) return "";
  if (WIFSIGNALED(wait_status))
    return fmt::format("killed by signal {} ({})", WTERMSIG(wait_status), strsignal(WTERMSIG(wait_status)));
  return fmt::format("exit status {}", WEXITSTATUS(wait_status));
}

// Which function a site is one of: its file, by build id where it has one, and its place there. The name and whether it
// was probed stand beside that: a build id may be forged, and a row of the probed must not be one of a refused.
using FunctionKey = std::tuple<std::string, uint64_t, std::string, int>;

FunctionKey key_of(const TraceMeta& meta, const TraceSite& site) {
  int probed = site.internal ? 2 : !site.method.empty();
  if (site.image >= meta.images.size()) return {"", site.address, site.name, probed};
  const TraceImage& image = meta.images[site.image];
  // Two builds under one path differ in size mostly where no build id tells them apart.
  std::string file =
      image.build_id.empty() ? fmt::format("{} {}", image.end - image.begin, image.path) : image.build_id;
  return {file, site.address - image.bias, site.name, probed};
}

// "_Z1fv+0x12", of a point, becomes "f()+0x12".
std::string readable_name(const TraceSite& site) {
  size_t plus = site.point ? site.name.rfind("+0x") : site.name.npos;
  if (plus == site.name.npos) return demangle(site.name);
  return demangle(std::string_view(site.name).substr(0, plus)) + site.name.substr(plus);
}

// A site of an image that the file does not have (a damaged trace) keeps its address as its name.
void add_site(Recording& recording, const TraceMeta& meta, uint32_t number, std::map<FunctionKey, uint32_t>& known) {
  const TraceSite& site = meta.sites[number];
  RecordedSite out;
  out.address = site.address;
  uint64_t bias = 0;
  if (site.image < meta.images.size()) {
    out.module = base_name(meta.images[site.image].path);
    bias = meta.images[site.image].bias;
  }
  out.name = site.name.empty() ? fmt::format("{}+{:#x}", out.module.empty() ? "?" : out.module, site.address - bias)
                               : readable_name(site);
  if (!site.internal) out.method = site.method;
  if (out.point = site.point; !out.point) out.no_hijack = site.no_hijack;
  if (auto lost = meta.site_lost.find(number); lost != meta.site_lost.end()) out.lost = lost->second;
  auto [first, added] = known.try_emplace(key_of(meta, site), number);
  out.function = first->second;
  if (added && site.method.empty() && !site.internal) recording.refused.push_back({out.name, out.module, site.refusal});
  recording.sites.push_back(std::move(out));
}

}  // namespace

Result<Recording> open_recording(const std::string& path) {
  auto source = std::make_shared<TraceSource>(SONDE_TRY(TraceReader::open(path)));
  const TraceMeta& meta = source->meta();
  Recording recording;
  recording.path = path;
  recording.command = fmt::format("{}", fmt::join(meta.command, " "));
  recording.ended = describe_end(meta.wait_status);
  recording.start_ticks = meta.start.ticks;
  recording.end_ticks = meta.end.ticks;
  recording.stacks = meta.stacks;
  recording.notes = meta.notes;
  recording.trap_cost_ns = meta.trap_cost_ns;
  recording.summed = meta.policy == "sum";
  if (recording.summed) recording.sums = SONDE_TRY_CONTEXT(source->sums(), path);
  recording.lost_no_thread_state = meta.lost_no_thread_state;
  recording.lost_no_ring = meta.lost_no_ring;
  recording.ring_waits = meta.ring_waits;
  recording.ring_waited_ticks = meta.ring_waited_ticks;
  recording.complete = meta.complete;
  recording.not_written = meta.unwritten_records;
  recording.not_written_why = meta.failure;
  if (meta.end.ticks > meta.start.ticks)
    recording.ticks_per_second = TickClock(meta.start, meta.end).ticks_per_ns() * 1e9;
  else recording.notes.push_back("without the end of the recording, times are in ticks of the processor, shown as ns");
  for (const TraceThread& t : meta.threads)
    recording.threads.push_back({t.pid, t.tid, t.name, t.calls, t.waits, t.waited_ticks, t.lost, t.signal_stack,
                                 recording.summed && t.calls > t.records ? t.calls - t.records : 0});
  for (const TraceImage& i : meta.images)
    recording.images.push_back({i.path, i.build_id, {Addr(i.begin), Addr(i.end)}, i.bias, i.from_ticks, i.to_ticks});
  std::map<FunctionKey, uint32_t> known;
  for (uint32_t s = 0; s < meta.sites.size(); s++) add_site(recording, meta, s, known);
  if (meta.longest_pause_ns > 0)
    recording.notes.push_back(fmt::format("the program stood still for at most {:.2f} ms while functions were probed",
                                          static_cast<double>(meta.longest_pause_ns) / 1e6));
  recording.records = source;
  return recording;
}

}  // namespace sonde::host
