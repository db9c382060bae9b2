// One call plans one image: see plan.h for the contract, planner.h for the choice of methods.
#include "host/plan/plan.h"

#include <algorithm>

#include "core/base/check.h"
#include "host/image/names.h"
#include "host/plan/hijack.h"
#include "host/plan/planner.h"
#include "host/plan/runtime.h"
#include "host/plan/system_calls.h"

namespace sonde::host {
namespace {

constexpr uint16_t kX86_64 = 62;  // EM_X86_64
constexpr std::string_view kAgentFile = "libsonde-agent.so";

bool is_agent(const Image& image) { return base_name(image.path()) == kAgentFile; }

Refusal refused_at_once(const CodeView& view, const Image& image, const Function& f, uint64_t entry) {
  if (is_agent(image)) return Refusal::engine;
  if (f.cold_part) return Refusal::cold_part;
  if (!view.in_text(entry)) return Refusal::not_code;
  return Refusal::none;
}

NoHijack no_hijack(const CodeView& view, const Function& f, CodeRange range) {
  if (NoHijack named = no_hijack_by_name(f.name); named != NoHijack::none) return named;
  for (const std::string& alias : f.aliases)
    if (NoHijack named = no_hijack_by_name(std::string_view(alias).substr(0, alias.find('@'))); named != NoHijack::none)
      return named;
  return no_hijack_by_code(view, range);
}

}  // namespace

Result<ImagePlan> plan_image(const PlanRequest& request) {
  const LoadedImage& loaded = *request.image;
  const Image& image = *loaded.image;
  if (image.machine() != kX86_64) return fail(image.path() + ": not x86-64 code, cannot be probed here");
  CodeView view = view_code(loaded);
  auto functions = image.functions();
  ImagePlan plan;
  plan.sites.resize(request.functions.size() + request.points.size());
  std::vector<CodeRange> ranges;
  NoHijack whole_image = request.no_hijack != NoHijack::none ? request.no_hijack : no_hijack_in_image(image);
  for (size_t i = 0; i < request.functions.size(); i++) {
    SitePlan& site = plan.sites[i];
    SONDE_CHECK(request.functions[i] < functions.size());
    const Function& f = functions[request.functions[i]];
    site.function = request.functions[i];
    site.entry = site.patch = loaded.to_target(f.range.begin);
    ranges.push_back(view.functions[site.function]);
    site.refusal = refused_at_once(view, image, f, site.entry.value);
    if (site.refusal == Refusal::none)
      site.no_hijack = whole_image != NoHijack::none ? whole_image : no_hijack(view, f, ranges.back());
  }
  for (size_t i = 0; i < request.points.size(); i++) {
    SitePlan& site = plan.sites[request.functions.size() + i];
    site.function = kNoFunction;
    site.entry = site.patch = loaded.to_target(request.points[i]);
    site.no_hijack = NoHijack::point;
    if (is_agent(image)) site.refusal = Refusal::engine;
  }
  if (plan.sites.empty()) {  // most libraries make no system calls either
    SystemCalls calls = request.system_calls ? find_system_calls(view, nullptr) : SystemCalls{};
    if (calls.found.empty() && calls.doubtful.empty()) return plan;
  }
  add_landing_pads(loaded, view);
  Planner planner(view, request);
  planner.find_points(std::span(plan.sites).subspan(ranges.size()), ranges);
  planner.plan_system_calls(plan);
  planner.plan(plan.sites, ranges);
  planner.finish(plan);
  return plan;
}

void refuse_trap(SitePlan& site) {
  SONDE_CHECK(site.method == Method::trap);
  site.method = Method::refused;
}

}  // namespace sonde::host
