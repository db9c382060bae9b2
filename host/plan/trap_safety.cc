#include "host/plan/trap_safety.h"

#include <fmt/format.h>

#include "host/plan/runtime.h"

namespace sonde::host {

std::string trap_obstacle(const LoadedImage& loaded, const ImagePlan& plan) {
  const Image& image = *loaded.image;
  // They make code at run time, with system calls and signal handlers of their own.
  if (no_hijack_in_image(image) == NoHijack::runtime_scans_stacks)
    return fmt::format("{} is a runtime that makes code of its own", image.path());
  if (!plan.doubtful.empty())
    return fmt::format("{}+{:#x} may be a system call or data", image.path(),
                       loaded.to_image(plan.doubtful.front()).value);
  for (const SystemCallPlan& call : plan.system_calls)
    if (call.site.method == Method::refused)
      return fmt::format("the system call at {}+{:#x} cannot be watched: {}", image.path(),
                         loaded.to_image(call.site.patch).value, describe(call.site.refusal));
  return "";
}

}  // namespace sonde::host
