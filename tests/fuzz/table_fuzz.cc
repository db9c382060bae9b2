// Any bytes as a packed table, with the checksum made right so that the checks behind it are reached.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/unwind/table.h"
#include "host/tables/print.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sonde;
  std::vector<uint8_t> bytes(data, data + size);
  if (size >= sizeof(TableHeader)) {
    auto* header = reinterpret_cast<TableHeader*>(bytes.data());
    header->magic = kTableMagic, header->version = kTableVersion, header->size = size;
    header->checksum = table_checksum(std::span(bytes).subspan(kChecksummedFrom));
  }
  auto table = Table::open(bytes);
  if (!table) return 0;
  for (const Row& row : table->rows()) host::format_row(*table, &row);
  table->for_each([&](ImageAddr begin, ImageAddr end, const Row* row) {
    if (table->lookup(begin) != row || table->lookup(end - 1) != row) std::abort();
  });
  return 0;
}
