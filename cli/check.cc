// sonde check: where a file's unwind tables say what its code does not do.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "host/check/check.h"
#include "host/tables/cache.h"
#include "host/tables/image_table.h"
#include "host/tables/refute.h"
#include "host/words.h"

namespace sonde::cli {
namespace {

using namespace host;

struct Options {
  std::string file;
  bool json = false, missing = false, unknown = false, no_mark = false;
};

const char* note_on(const check::Finding& finding) {
  return finding.elsewhere ? "the row describes another context, not the caller's" : "";
}

void print_function(const Image& image, const check::FunctionReport& report, const Options& options) {
  const Function& f = image.functions()[report.function];
  bool named = false;
  for (const check::Finding& finding : report.findings) {
    bool wrong = finding.verdict == check::Verdict::wrong;
    if (!wrong && !(finding.verdict == check::Verdict::missing ? options.missing : options.unknown)) continue;
    if (!named)
      fmt::print("{} ({:#x}, {})\n", printable(display_name(image, f)), f.range.begin.value,
                 counted(f.range.size(), "byte"));
    named = true;
    std::string what =
        wrong ? fmt::format("wrong: {}", check::describe_wrong(finding.wrong)) : check::describe(finding.verdict);
    fmt::print("  +{:#x} {:#x}  {}  -- {}{}{}\n", static_cast<uint64_t>(finding.pc - f.range.begin), finding.pc.value,
               finding.insn, what, finding.elsewhere ? "; " : "", note_on(finding));
    fmt::print("      row   {}\n      code  {}\n", finding.row, finding.truth);
  }
}

struct Totals {
  uint64_t functions = 0, wrong_functions = 0, missing_functions = 0, unreached_functions = 0;
};

Totals totals_of(const check::Report& report) {
  Totals t;
  auto has = [](const check::FunctionReport& f, check::Verdict v) { return f.counts[static_cast<unsigned>(v)] > 0; };
  for (const check::FunctionReport& f : report.functions) {
    t.functions++;
    t.wrong_functions += has(f, check::Verdict::wrong);
    t.missing_functions += has(f, check::Verdict::missing);
    t.unreached_functions += has(f, check::Verdict::unreached);
  }
  return t;
}

uint64_t count_of(const check::Report& report, check::Verdict verdict) {
  return report.counts[static_cast<unsigned>(verdict)];
}

void print_text(const Image& image, const check::Report& report, const Options& options, bool kept) {
  for (const check::FunctionReport& f : report.functions) print_function(image, f, options);
  Totals t = totals_of(report);
  uint64_t all = 0, wrong = count_of(report, check::Verdict::wrong);
  for (uint64_t n : report.counts) all += n;
  fmt::print("{}: {} of {}\n", printable(image.path()), counted(all, "instruction"), counted(t.functions, "function"));
  fmt::print("{:>10}  right\n", count_of(report, check::Verdict::right));
  fmt::print("{:>10}  wrong, in {}\n", wrong, counted(t.wrong_functions, "function"));
  fmt::print("{:>10}  missing: no row, in {}\n", count_of(report, check::Verdict::missing),
             counted(t.missing_functions, "function"));
  fmt::print("{:>10}  unknown: neither proven nor refuted\n", count_of(report, check::Verdict::unknown));
  fmt::print("{:>10}  unreached: no path leads there that could be followed, in {}\n",
             count_of(report, check::Verdict::unreached), counted(t.unreached_functions, "function"));
  if (wrong && kept) fmt::print("wrong rows are marked: walks through them will be unreliable\n");
}

nlohmann::ordered_json counts_json(const check::Counts& counts) {
  nlohmann::ordered_json out;
  for (unsigned v = check::kVerdicts; v-- > 0;) out[check::describe(static_cast<check::Verdict>(v))] = counts[v];
  return out;
}

nlohmann::ordered_json finding_json(const Function& f, const check::Finding& finding) {
  nlohmann::ordered_json out{{"verdict", check::describe(finding.verdict)},
                             {"address", finding.pc.value},
                             {"offset", finding.pc - f.range.begin},
                             {"instruction", finding.insn}};
  if (finding.verdict == check::Verdict::wrong) out["wrong"] = check::describe_wrong(finding.wrong);
  out["row"] = finding.row, out["code"] = finding.truth;
  if (finding.elsewhere) out["note"] = note_on(finding);
  return out;
}

void print_json(const Image& image, const check::Report& report, bool kept) {
  nlohmann::ordered_json out{{"file", image.path()}, {"build_id", image.build_id()}, {"marked", kept}};
  out["instructions"] = counts_json(report.counts);
  auto& functions = out["functions"] = nlohmann::ordered_json::array();
  for (const check::FunctionReport& r : report.functions) {
    const Function& f = image.functions()[r.function];
    nlohmann::ordered_json line{
        {"address", f.range.begin.value}, {"size", f.range.size()}, {"name", display_name(image, f)}};
    line["instructions"] = counts_json(r.counts);
    if (r.clobbered) line["clobbers"] = check::describe_wrong(r.clobbered);
    auto& findings = line["findings"] = nlohmann::ordered_json::array();
    for (const check::Finding& finding : r.findings) findings.push_back(finding_json(f, finding));
    functions.push_back(std::move(line));
  }
  fmt::print("{}\n", out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

int run(const Options& options) {
  auto image = require(Image::open(options.file));
  CompiledTable compiled = require(compile_table(*image));
  Table table = Table::at(compiled.bytes.data());
  check::Report report = require(check::check_image(*image, table));
  bool kept = false;
  if (!options.no_mark) {
    auto marked = require(mark_refuted(table, report.refuted()));
    kept = keep_checked_table(*image, marked);
  }
  if (options.json) print_json(*image, report, kept);
  else print_text(*image, report, options, kept);
  if (!kept && !options.no_mark && count_of(report, check::Verdict::wrong))
    tell("sonde: note: wrong rows could not be marked: {}\n",
         image->build_id().empty() ? "the file has no build id" : "there is no folder for the cache");
  return count_of(report, check::Verdict::wrong) ? 1 : 0;
}

}  // namespace

void add_check(CLI::App& app, int& status) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("check", "Prove a file's unwind tables against its code, and find what is wrong in them");
  command->add_option("file", options->file, "A program or library, x86-64")->required()->type_name("FILE");
  command->add_flag("--missing", options->missing, "Also print each instruction that has no row");
  command->add_flag("--unknown", options->unknown,
                    "Also print each instruction whose row is neither proven nor refuted");
  command->add_flag("--json", options->json, "Print JSON");
  command->add_flag("--no-mark", options->no_mark, "Only look: do not mark wrong rows in the cache of tables");
  command->footer(
      "Every function is executed abstractly along all its paths: where its frame, its return address and its saved\n"
      "registers are at each instruction. A row is wrong if that contradicts it for certain; both answers are "
      "printed.\n"
      "Wrong rows are marked in the cache of tables, and stacks that need one are called unreliable from then on.\n"
      "Exit status 1 if there is a wrong row.\n\n"
      "Examples:\n"
      "  sonde check ./app                              what is wrong in a program's tables\n"
      "  sonde check --missing ./libcodec.so            also code without any\n"
      "  sonde check /lib/x86_64-linux-gnu/libc.so.6    hand-written assembly is where to look\n"
      "  sonde check --json ./app | jq '.functions[] | select(.instructions.wrong > 0) | .name'");
  command->callback([options, &status] { status = run(*options); });
}

}  // namespace sonde::cli
