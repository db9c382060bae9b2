#include "host/report/frame_json.h"

#include <nlohmann/json.hpp>

#include "core/walk/reason.h"

namespace sonde::host {

namespace {

void add_line(nlohmann::ordered_json& out, const SourceLine& line) {
  if (line.file.empty()) return;
  out["source_file"] = line.file;
  if (line.line) out["source_line"] = line.line;
  if (line.column) out["source_column"] = line.column;
}

}  // namespace

const char* verdict_word(const Frame& frame) {
  return is_reliable(frame) ? "reliable" : frame.recovered & kMarked ? "guessed" : "unreliable";
}

void add_source(nlohmann::ordered_json& out, std::span<const SourceRow> source) {
  auto inlined = nlohmann::ordered_json::array();
  for (const SourceRow& row : source) {
    if (!row.inlined) {
      add_line(out, row.at);
      continue;
    }
    inlined.push_back({{"function", row.function}});
    add_line(inlined.back(), row.at);
  }
  out["inlined"] = std::move(inlined);
}

void add_judgement(nlohmann::ordered_json& out, const Frame& frame) {
  static constexpr const char* kSources[] = {"frame", "caller", "task", "regs_pc"};
  auto flags = nlohmann::ordered_json::array();
  if (frame.recovered & kRecoveredReturn) flags.push_back("recovered_return");
  if (frame.recovered & kRecoveredGraph) flags.push_back("recovered_graph");
  if (frame.recovered & kInDetour) flags.push_back("in_detour");
  if (frame.recovered & kMarked) flags.push_back("guessed");
  out["source"] = kSources[static_cast<unsigned>(frame.source)];
  out["flags"] = std::move(flags);
  out["verdict"] = verdict_word(frame);
  out["reason"] = sonde::describe(frame.reason);
}

}  // namespace sonde::host
