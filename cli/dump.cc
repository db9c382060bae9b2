// `sonde dump STAGE`: each stage of the work prints what it made.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "host/tables/image_table.h"
#include "host/tables/print.h"

namespace sonde::cli {
namespace {

struct TableOptions {
  std::string file, at;
  bool stats = false, json = false;
};

ImageAddr parse_address(const std::string& text) {
  size_t used = 0;
  uint64_t value = 0;
  try {
    value = std::stoull(text, &used, 0);
  } catch (const std::exception&) {
  }
  if (used == 0 || used != text.size() || text[0] == '-')
    throw CommandError{{fmt::format("--at: \"{}\" is no address; write it as 0x1234", text), 2}};
  return ImageAddr(value);
}

struct Named {
  const char* key;
  const char* label;
  uint64_t value;
};

std::vector<Named> counts_of(const host::TableStats& stats) {
  return {{"entries", "frame description entries", stats.entries},
          {"common_entries", "common information entries", stats.common_entries},
          {"debug_entries", "entries of .debug_frame for code without others", stats.debug_entries},
          {"sframe_entries", "entries of .sframe for code without others", stats.sframe_entries},
          {"unusable_entries", "entries with unknown range (gaps)", stats.unusable_entries},
          {"empty_entries", "entries of length zero", stats.empty_entries},
          {"outside_entries", "entries (partly) outside of code", stats.outside_entries},
          {"overlapping_entries", "entries that overlap", stats.overlapping_entries},
          {"plt_stubs", "linkage stubs made plain rows", stats.plt_stubs},
          {"lost_registers", "changes with a register lost", stats.lost_registers},
          {"changes", "rows (places where another one begins)", stats.changes},
          {"gaps", "gaps", stats.gaps},
          {"by_expression", "rows that need an expression", stats.by_expression},
          {"inexpressible_rows", "inexpressible rows", stats.inexpressible_changes},
          {"rows", "distinct rows", stats.rows},
          {"expressions", "distinct expressions", stats.expressions},
          {"source_bytes", "bytes of .eh_frame and .eh_frame_hdr", stats.source_bytes},
          {"table_bytes", "bytes of the table", stats.table_bytes}};
}

void print_stats(const host::TableStats& stats, bool json) {
  nlohmann::ordered_json out, reasons = nlohmann::ordered_json::object();
  for (const Named& count : counts_of(stats)) {
    out[count.key] = count.value;
    if (!json) fmt::print("{:>10}  {}\n", count.value, count.label);
  }
  if (!json && stats.source_bytes)
    fmt::print("{:>9.2f}x  table to source\n",
               static_cast<double>(stats.table_bytes) / static_cast<double>(stats.source_bytes));
  if (!json && stats.changes)
    fmt::print("{:>10.2f}  inexpressible in 100,000 rows\n",
               1e5 * static_cast<double>(stats.inexpressible_changes) / static_cast<double>(stats.changes));
  for (unsigned i = 0; i < host::kInexpressibles; i++) {
    const char* reason = host::describe(static_cast<host::Inexpressible>(i));
    reasons[reason] = stats.inexpressible[i];
    if (!json && stats.inexpressible[i]) fmt::print("{:>10}  inexpressible: {}\n", stats.inexpressible[i], reason);
  }
  if (!json)
    for (const std::string& why : stats.refused) fmt::print("not read: {}\n", why);
  out["inexpressible"] = reasons;
  out["refused"] = stats.refused;
  if (json) fmt::print("{}\n", out.dump());
}

void print_row(const Table& table, ImageAddr begin, ImageAddr end, const Row* row, bool json) {
  if (!json) return fmt::print("{:#x}..{:#x} {}\n", begin.value, end.value, host::format_row(table, row));
  nlohmann::ordered_json line = {{"begin", begin.value}, {"end", end.value}, {"row", host::format_row(table, row)}};
  fmt::print("{}\n", line.dump());
}

void dump_table(const TableOptions& options) {
  auto image = require(host::Image::open(options.file));
  host::CompiledTable compiled = require(host::compile_table(*image));
  if (options.stats) return print_stats(compiled.stats, options.json);
  auto table = Table::open(compiled.bytes);
  if (!table) throw CommandError{{options.file + ": table " + host::describe(table.error())}};
  if (options.at.empty())
    return table->for_each(
        [&](ImageAddr begin, ImageAddr end, const Row* row) { print_row(*table, begin, end, row, options.json); });
  ImageAddr at = parse_address(options.at);
  bool found = false;
  table->for_each([&](ImageAddr begin, ImageAddr end, const Row* row) {
    if (at < begin || at >= end) return;
    print_row(*table, begin, end, row, options.json);
    found = true;
  });
  if (!found) print_row(*table, at, at + 1, nullptr, options.json);
}

void add_table(CLI::App& dump) {
  auto options = std::make_shared<TableOptions>();
  CLI::App* command =
      dump.add_subcommand("table", "The unwind table that is made from a file's .eh_frame, .debug_frame and .sframe");
  command->add_option("FILE", options->file, "ELF file")->type_name("ELF-FILE")->required();
  auto* stats = command->add_flag("--stats", options->stats, "Counts and sizes instead of rows");
  command->add_option("--at", options->at, "Only the row in force at this address of the file")
      ->type_name("ADDRESS")
      ->excludes(stats);
  command->add_flag("--json", options->json, "One JSON object per line");
  command->footer(
      "Examples:\n"
      "  sonde dump table ./app                   each range of code and how to find its caller\n"
      "  sonde dump table ./app --at 0x1139       the row in force there\n"
      "  sonde dump table libc.so.6 --stats       sizes, and what could not be expressed");
  command->callback([options] { dump_table(*options); });
}

}  // namespace

void add_dump(CLI::App& app, int&) {
  CLI::App* dump = app.add_subcommand("dump", "What a stage of the work made");
  dump->require_subcommand(1);
  dump->footer(
      "Examples:\n"
      "  sonde dump table ./app                   each range of code and how to find its caller\n"
      "  sonde dump table ./app --at 0x1139       the row in force there\n"
      "  sonde dump table libc.so.6 --stats       sizes, and what could not be expressed");
  add_table(*dump);
}

}  // namespace sonde::cli
