// From raw symbols and unwind ranges to functions: which addresses calls enter, how far each reaches, under which names.
// Pure. The rules, each of which keeps a probe from being put where no call arrives:
//  - a typed function (STT_FUNC, STT_GNU_IFUNC) or a global label without type is an entry, unless it lies inside a
//    sized function and has no unwind entry of its own;
//  - a label without type or a symbol without size is no entry inside an unwind range that begins earlier;
//  - a local label without type names its addresses but is never entered (Function::label);
//  - a size that leaves the section is not believed; without size a function ends with its unwind range, else at the
//    next symbol; in a stripped file, where the next symbol may be missing, it covers its own address only;
//  - unwind ranges without symbol are functions if their first row is that of a call's arrival.
#pragma once

#include <span>
#include <vector>

#include "host/image/fde_ranges.h"
#include "host/image/image.h"
#include "host/image/symbols.h"

namespace sonde::host {

// `unnamed`: unwind ranges that may become functions without name; those inside linkage stubs are left out by the
// caller. `stripped`: symbols hold no .symtab.
std::vector<Function> build_functions(std::vector<RawSymbol> symbols, std::span<const FdeRange> ranges, bool stripped,
                                      std::span<const ImageRange> stubs);

bool is_cold_part(std::string_view raw_name);

}  // namespace sonde::host
