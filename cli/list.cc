// `sonde list`: what could be probed in a file, and how. Plans every chosen function as `record` would, with the file at
// a made-up address; nothing is run and nothing is changed.
#include <elf.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "host/image/select.h"
#include "host/plan/places.h"
#include "host/plan/plan.h"
#include "host/plan/runtime.h"
#include "host/plan/trap_safety.h"
#include "host/words.h"

namespace sonde::cli {
namespace {

using namespace host;

struct Options {
  std::string file;
  std::vector<std::string> patterns, places;
  bool json = false, no_trap = false;
};

// A program's name as the shell would find it.
std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos || access(name.c_str(), F_OK) == 0) return name;
  const char* path = getenv("PATH");
  for (std::string_view rest = path ? path : ""; !rest.empty();) {
    auto end = std::min(rest.find(':'), rest.size());
    std::string candidate = fmt::format("{}/{}", rest.substr(0, end), name);
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return name;
}

// Where the kernel and the loader usually put such a file, with room on both sides for detours.
LoadedImage place(std::shared_ptr<const Image> image) {
  uint64_t bias = image->type() == ET_EXEC ? 0 : image->interpreter() ? 0x555555554000 : 0x7ffff7000000;
  ImageAddr low(~0ull), high;
  for (auto& s : image->segments()) low = std::min(low, s.range.begin), high = std::max(high, s.range.end);
  return {std::move(image), bias, {Addr(low.value + bias), Addr(high.value + bias)}};
}

ImagePlan make_plan(const LoadedImage& loaded, std::vector<uint32_t> functions, std::vector<ImageAddr> points,
                    bool traps) {
  Addr agent(0x7ffff7fc0000);
  PlanRequest request{};
  request.image = &loaded;
  request.functions = std::move(functions);
  request.points = std::move(points);
  request.entry_trampoline = agent;
  request.used = {{Addr(), Addr(0x10000)}, loaded.range, {agent, agent + 0x40000}};
  request.allow_traps = traps;
  request.system_calls = true;
  request.no_hijack = no_hijack_beside(*loaded.image);
  return require(plan_image(request));
}

// What `record` would do in a process with this file, as far as the file says: without traps where it forbids them.
ImagePlan make_plan(const LoadedImage& loaded, const std::vector<uint32_t>& functions,
                    const std::vector<ImageAddr>& points, bool traps, std::string* obstacle) {
  ImagePlan plan = make_plan(loaded, functions, points, traps);
  if (traps) *obstacle = trap_obstacle(loaded, plan);
  return obstacle->empty() ? plan : make_plan(loaded, functions, points, false);
}

// One line's worth: the method, or why there is none, and what of a call is not seen.
struct Verdict {
  std::string method;  // describe(Method)
  std::string reason;  // of a refusal, or why only entries are seen
};

Verdict judge(const LoadedImage& loaded, const SitePlan& site, Instructions& instructions) {
  if (site.is_point() && site.refusal == Refusal::inside_instruction)
    return {describe(site.method), describe(site.refusal) + instructions.beside_text(loaded.to_image(site.entry))};
  if (site.is_point() && site.method != Method::refused)
    return {describe(site.method), site.patch == site.entry ? "" : "behind the landing pad"};
  if (site.method == Method::refused)
    return {describe(site.method), fmt::format("{} (at +{:#x})", describe(site.refusal), site.refusal_offset)};
  if (site.no_hijack != NoHijack::none)
    return {describe(site.method), fmt::format("entry only: {}", describe(site.no_hijack))};
  return {describe(site.method), ""};
}

struct Counts {
  std::map<Method, size_t> methods;
  std::map<std::string, size_t> refusals, entry_only;
};

Counts count(const ImagePlan& plan) {
  Counts counts;
  for (auto& site : plan.sites) {
    counts.methods[site.method]++;
    if (site.method == Method::refused) counts.refusals[describe(site.refusal)]++;
    else if (!site.is_point() && site.no_hijack != NoHijack::none) counts.entry_only[describe(site.no_hijack)]++;
  }
  return counts;
}

void print_text(const LoadedImage& loaded, const ImagePlan& plan, const std::string& obstacle) {
  const Image& image = *loaded.image;
  fmt::print("{:>18} {:>8}  {:<12} {}\n", "ADDRESS", "SIZE", "METHOD", "FUNCTION");
  Instructions instructions(image);
  bool points = false, functions = false;
  for (auto& site : plan.sites) {
    (site.is_point() ? points : functions) = true;
    auto [method, reason] = judge(loaded, site, instructions);
    std::string size = "-", name = point_name(image, loaded.to_image(site.entry));
    if (!site.is_point()) {
      const Function& f = image.functions()[site.function];
      size = std::to_string(f.range.size()), name = display_name(image, f);
    }
    fmt::print("{:#018x} {:>8}  {:<12} {}{}{}\n", loaded.to_image(site.entry).value, size, method, name,
               reason.empty() ? "" : "  -- ", reason);
  }
  Counts counts = count(plan);
  size_t refused = counts.methods[Method::refused], all = plan.sites.size();
  const char* what = !points ? "function" : !functions ? "instruction" : "place";
  fmt::print("\n{} of {} can be probed ({:.1f} %)\n", all - refused, counted(all, what),
             all ? 100.0 * static_cast<double>(all - refused) / static_cast<double>(all) : 0.0);
  for (auto& [method, n] : counts.methods)
    if (method != Method::refused) fmt::print("{:>8}  by {}\n", n, describe(method));
  for (auto& [reason, n] : counts.refusals) fmt::print("{:>8}  refused: {}\n", n, reason);
  for (auto& [reason, n] : counts.entry_only) fmt::print("{:>8}  entry only: {}\n", n, reason);
  if (!obstacle.empty()) fmt::print("no traps in a program with this file: {}\n", printable(obstacle));
}

const char* source_name(FunctionSource source) {
  switch (source) {
    case FunctionSource::symtab: return "symtab";
    case FunctionSource::dynsym: return "dynsym";
    case FunctionSource::eh_frame: return "eh_frame";
  }
  return "?";
}

nlohmann::ordered_json json_of_point(const LoadedImage& loaded, const SitePlan& site, Instructions& starts) {
  ImageAddr at = loaded.to_image(site.entry);
  nlohmann::ordered_json line{
      {"address", at.value}, {"name", point_name(*loaded.image, at)}, {"method", describe(site.method)}};
  if (site.method == Method::refused) line["refused"] = describe(site.refusal), line["offset"] = site.refusal_offset;
  else if (site.refusal != Refusal::none) line["no_jump"] = describe(site.refusal);
  if (site.method != Method::refused && site.patch != site.entry) line["patched"] = loaded.to_image(site.patch).value;
  if (site.refusal != Refusal::inside_instruction) return line;
  auto& near = line["instructions"] = nlohmann::ordered_json::array();
  for (ImageAddr a : starts.beside(at)) near.push_back(a.value);
  return line;
}

void print_json(const LoadedImage& loaded, const ImagePlan& plan, const std::string& obstacle) {
  const Image& image = *loaded.image;
  nlohmann::ordered_json out{{"file", image.path()}, {"build_id", image.build_id()}, {"stripped", image.stripped()}};
  auto functions = nlohmann::ordered_json::array(), instructions = functions;
  Instructions starts(image);
  for (auto& site : plan.sites) {
    if (site.is_point()) {
      instructions.push_back(json_of_point(loaded, site, starts));
      continue;
    }
    const Function& f = image.functions()[site.function];
    nlohmann::ordered_json line{{"address", f.range.begin.value}, {"size", f.range.size()},
                                {"name", display_name(image, f)}, {"symbol", f.name},
                                {"aliases", f.aliases},           {"source", source_name(f.source)},
                                {"method", describe(site.method)}};
    if (site.method == Method::refused) line["refused"] = describe(site.refusal), line["offset"] = site.refusal_offset;
    else if (site.no_hijack != NoHijack::none) line["entry_only"] = describe(site.no_hijack);
    functions.push_back(std::move(line));
  }
  Counts counts = count(plan);
  nlohmann::ordered_json numbers{{"functions", functions.size()}};
  if (!instructions.empty()) numbers["instructions"] = instructions.size();
  out["functions"] = std::move(functions);
  if (!instructions.empty()) out["instructions"] = std::move(instructions);
  auto& summary = out["summary"] = std::move(numbers);
  for (auto& [method, n] : counts.methods) summary["methods"][describe(method)] = n;
  for (auto& [reason, n] : counts.refusals) summary["refusals"][reason] = n;
  for (auto& [reason, n] : counts.entry_only) summary["entry_only"][reason] = n;
  summary["system_calls"] = plan.system_calls.size();
  if (!obstacle.empty()) summary["no_traps"] = obstacle;
  fmt::print("{}\n", out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

int run(const Options& options) {
  Selection selection = require(Selection::parse(options.patterns));
  Places places = require(Places::parse(options.places));
  auto image = require(Image::open(find_program(options.file)));
  if (image->machine() != EM_X86_64)
    throw CommandError{{fmt::format("{} is for AArch64: its functions cannot be planned here", image->path()), 1}};
  std::vector<uint32_t> functions;
  if (options.places.empty() || !options.patterns.empty()) {  // a place alone means no function
    functions = selection.select(*image, true);
    if (auto error = selection.unmatched({&image, 1})) throw CommandError{*error};
  }
  // Addresses are the file's own.
  auto points = require(places.find_any({image, 0, {Addr(), Addr(~0ull)}}, true));
  if (auto error = places.unmatched({&image, 1})) throw CommandError{*error};
  for (auto& note : selection.notes()) tell("sonde: note: {}\n", printable(note));
  for (auto& note : places.notes()) tell("sonde: note: {}\n", printable(note));
  LoadedImage loaded = place(image);
  std::string obstacle;
  ImagePlan plan = make_plan(loaded, functions, points, !options.no_trap, &obstacle);
  if (options.json) print_json(loaded, plan, obstacle);
  else print_text(loaded, plan, obstacle);
  return 0;
}

}  // namespace

void add_list(CLI::App& app, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("list", "Print what can be probed in a file and by which method, or why not");
  command->add_option("file", options->file, "A program (also by its name in PATH) or a library")
      ->required()
      ->type_name("FILE");
  command->add_option("patterns", options->patterns, "Only these functions: GLOB, MODULE:GLOB, !GLOB")
      ->type_name("PATTERN");
  command
      ->add_option("--at", options->places,
                   "These instructions: SYMBOL+OFFSET, GLOB+* (each of a function's), FILE:LINE, 0xADDRESS, "
                   "MODULE:0xFILEOFFSET, @FILE with a place a line (repeatable)")
      ->allow_extra_args(false)
      ->type_name("PLACE");
  command->add_flag("--no-trap", options->no_trap, "Refuse functions that only a one-byte trap fits");
  command->add_flag("--json", options->json, "Print JSON");
  command->footer(
      "Without PATTERN and --at: every function of the file. Addresses are the file's own.\n"
      "`entry only` functions are counted, the ends of their calls are not seen.\n\n"
      "Examples:\n"
      "  sonde list ./app                                    all functions of a program\n"
      "  sonde list ./app 'net::*' '!net::debug*'            some of them\n"
      "  sonde list sqlite3                                  a stripped program: by its unwind tables\n"
      "  sonde list /lib/x86_64-linux-gnu/libc.so.6 'mem*'   a library's functions\n"
      "  sonde list ./app --at 'parse+*'                     each instruction of a function, and how all of them at "
      "once\n"
      "  sonde list --json ./app | jq '.functions[] | select(.method == \"refused\") | .name'");
  command->callback([options, &status] { status = run(*options); });
}

}  // namespace sonde::cli
