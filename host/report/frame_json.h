// A frame as JSON, where it comes from and whether it is believed: one form in all commands (docs/formats.md).
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>

#include "core/walk/frame.h"
#include "host/image/image.h"

namespace sonde::host {

// "reliable", "unreliable", "guessed".
const char* verdict_word(const Frame& frame);
// Adds `source_file`, `source_line` and `source_column` of the function itself, where they are known, and `inlined`. source: as
// Image::source_rows gives them.
void add_source(nlohmann::ordered_json& out, std::span<const SourceRow> source);
// Adds the keys `source`, `flags`, `verdict` and `reason`.
void add_judgement(nlohmann::ordered_json& out, const Frame& frame);

}  // namespace sonde::host
