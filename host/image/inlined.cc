#include "host/image/inlined.h"

#include <dwarf.h>
#include <elfutils/libdw.h>
#include <fnmatch.h>

#include "host/image/names.h"

namespace sonde::host {
namespace {

class Search {
 public:
  explicit Search(const std::string& glob) : glob_(glob) {
    // A method's DIE often has its plain name only: the last component is compared with that.
    auto at = glob.rfind("::");
    last_ = at == glob.npos ? glob : glob.substr(at + 2);
  }

  bool scope(Dwarf_Die& parent, int depth) {
    Dwarf_Die die;
    if (depth > 64 || dwarf_child(&parent, &die) != 0) return false;
    do {
      if (left_-- <= 0) return false;
      switch (dwarf_tag(&die)) {
        case DW_TAG_subprogram:
          if (inlined(die)) return true;
          break;
        case DW_TAG_namespace:
        case DW_TAG_class_type:
        case DW_TAG_structure_type:
        case DW_TAG_module:
          if (scope(die, depth + 1)) return true;
          break;
        default: break;
      }
    } while (dwarf_siblingof(&die, &die) == 0);
    return false;
  }

 private:
  bool inlined(Dwarf_Die& die) {
    Dwarf_Attribute attribute;
    Dwarf_Word value;
    if (!dwarf_attr(&die, DW_AT_inline, &attribute) || dwarf_formudata(&attribute, &value) != 0) return false;
    if (value != DW_INL_inlined && value != DW_INL_declared_inlined) return false;
    for (unsigned key : {DW_AT_linkage_name, DW_AT_MIPS_linkage_name})
      if (dwarf_attr_integrate(&die, key, &attribute))
        if (const char* raw = dwarf_formstring(&attribute)) {
          std::string name = demangle(raw);
          return matches_glob(glob_, name) || matches_glob(glob_, without_parameters(name));
        }
    if (!dwarf_attr_integrate(&die, DW_AT_name, &attribute)) return false;
    const char* name = dwarf_formstring(&attribute);
    return name && matches_glob(last_, name);
  }

  const std::string& glob_;
  std::string last_;
  int left_ = 2'000'000;
};

}  // namespace

bool knows_inlined(const ElfFile& file, const std::string& glob) {
  Dwarf* dwarf = dwarf_begin_elf(file.handle(), DWARF_C_READ, nullptr);
  if (!dwarf) return false;
  Search search(glob);
  bool found = false;
  Dwarf_CU* unit = nullptr;
  Dwarf_Die die;
  while (!found && dwarf_get_units(dwarf, unit, &unit, nullptr, nullptr, &die, nullptr) == 0)
    found = search.scope(die, 0);
  dwarf_end(dwarf);
  return found;
}

}  // namespace sonde::host
