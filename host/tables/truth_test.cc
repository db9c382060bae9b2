// Every row of real files against elfutils' own reading of .eh_frame (libdw's dwarf_cfi_addrframe): registers and memory
// get arbitrary values, and the caller's registers that our row gives must equal those that libdw's operations give.
#include <doctest/doctest.h>
#include <dwarf.h>
#include <elfutils/libdw.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gelf.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>

#include "core/unwind/step.h"
#include "host/tables/compile.h"

namespace sonde::host {
namespace {

struct ArbitraryMemory {
  static uint64_t at(uint64_t address) {
    uint64_t word = (address ^ 0x5bf03635) * 0x9e3779b97f4a7c15;
    return word ^ word >> 29;
  }
  bool read(Addr address, uint64_t* value) { return *value = at(address.value), true; }
};

struct File {
  explicit File(const std::string& path) : fd(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    elf_version(EV_CURRENT);
    elf = elf_begin(fd, ELF_C_READ_MMAP, nullptr);
    GElf_Ehdr header;
    if (!elf || !gelf_getehdr(elf, &header)) return;
    source.machine = header.e_machine;
    for (size_t i = 0; i < header.e_phnum; i++) {
      GElf_Phdr segment;
      gelf_getphdr(elf, static_cast<int>(i), &segment);
      if (segment.p_type == PT_LOAD && segment.p_flags & PF_X)
        source.executable.push_back({ImageAddr(segment.p_vaddr), ImageAddr(segment.p_vaddr + segment.p_memsz)});
    }
    size_t names;
    elf_getshdrstrndx(elf, &names);
    for (Elf_Scn* scn = nullptr; (scn = elf_nextscn(elf, scn));) {
      GElf_Shdr section;
      gelf_getshdr(scn, &section);
      if (std::string_view(elf_strptr(elf, names, section.sh_name)) != ".eh_frame") continue;
      Elf_Data* data = elf_rawdata(scn, nullptr);
      source.sections.push_back({{static_cast<const uint8_t*>(data->d_buf), data->d_size}, ImageAddr(section.sh_addr)});
    }
    cfi = dwarf_getcfi_elf(elf);
  }
  ~File() {
    dwarf_cfi_end(cfi);
    elf_end(elf);
    close(fd);
  }
  File(const File&) = delete;
  int fd;
  Elf* elf = nullptr;
  Dwarf_CFI* cfi = nullptr;
  RowSources source;
};

// libdw's operations evaluated. Without value: undefined.
template <class Isa>
struct Truth {
  const RegSet<Isa>& regs;
  uint64_t cfa = 0;

  std::optional<uint64_t> run(const Dwarf_Op* ops, size_t count, bool address) {
    std::vector<uint64_t> stack;
    auto pop = [&] {
      REQUIRE(!stack.empty());
      uint64_t top = stack.back();
      stack.pop_back();
      return top;
    };
    bool is_value = false;
    for (size_t i = 0; i < count; i++) {
      const Dwarf_Op& op = ops[i];
      uint8_t atom = op.atom;
      if (atom >= DW_OP_lit0 && atom <= DW_OP_lit31) {
        stack.push_back(atom - DW_OP_lit0);
      } else if (atom >= DW_OP_breg0 && atom <= DW_OP_breg31) {
        stack.push_back(regs.get(atom - DW_OP_breg0) + op.number);
      } else if (atom >= DW_OP_reg0 && atom <= DW_OP_reg31) {
        return regs.get(atom - DW_OP_reg0);
      } else {
        switch (atom) {
          case DW_OP_bregx: stack.push_back(regs.get(static_cast<unsigned>(op.number)) + op.number2); break;
          case DW_OP_regx: return regs.get(static_cast<unsigned>(op.number));
          case DW_OP_call_frame_cfa: stack.push_back(cfa); break;
          case DW_OP_plus_uconst: stack.back() += op.number; break;
          case DW_OP_const1u:
          case DW_OP_const2u:
          case DW_OP_const4u:
          case DW_OP_constu: stack.push_back(op.number); break;
          case DW_OP_const1s:
          case DW_OP_const2s:
          case DW_OP_const4s:
          case DW_OP_consts: stack.push_back(op.number); break;
          case DW_OP_deref: stack.push_back(ArbitraryMemory::at(pop())); break;
          case DW_OP_stack_value: is_value = true; break;
          case DW_OP_plus: {
            uint64_t b = pop();
            stack.back() += b;
            break;
          }
          case DW_OP_minus: {
            uint64_t b = pop();
            stack.back() -= b;
            break;
          }
          case DW_OP_mul: {
            uint64_t b = pop();
            stack.back() *= b;
            break;
          }
          case DW_OP_and: {
            uint64_t b = pop();
            stack.back() &= b;
            break;
          }
          case DW_OP_shl: {
            uint64_t b = pop();
            stack.back() <<= b;
            break;
          }
          case DW_OP_ge: {
            int64_t b = static_cast<int64_t>(pop());
            stack.back() = static_cast<int64_t>(stack.back()) >= b;
            break;
          }
          default: FAIL("operation not known to the test: ", static_cast<int>(atom));
        }
      }
    }
    uint64_t top = pop();
    return address && !is_value ? ArbitraryMemory::at(top) : top;
  }

  std::optional<uint64_t> reg(Dwarf_Frame* frame, unsigned number) {
    Dwarf_Op memory[3], *ops;
    size_t count;
    REQUIRE(dwarf_frame_register(frame, static_cast<int>(number), memory, &ops, &count) == 0);
    if (count == 0 && ops == memory) return std::nullopt;
    if (count == 0) return regs.get(number);
    return run(ops, count, true);
  }
};

struct Count {
  size_t rows = 0, gaps = 0, wrong = 0;
  void expect(bool right, const char* what, uint64_t pc) {
    if (right) return;
    if (wrong++ < 5) MESSAGE(fmt::format("{} differs at {:#x}", what, pc));
  }
};

template <class Isa>
void compare_at(const File& file, const Table& table, uint64_t pc, std::mt19937_64& random, Count* count) {
  Dwarf_Frame* frame = nullptr;
  bool described = dwarf_cfi_addrframe(file.cfi, pc, &frame) == 0;
  const Row* row = table.lookup(ImageAddr(pc));
  if (!described || !row) {
    count->gaps++;
    return count->expect(!described && !row, "coverage", pc);
  }
  count->rows++;
  RegSet<Isa> regs, caller;
  for (unsigned r = 0; r < Isa::kRegs; r++) regs.set(r, random());
  regs.set(Isa::kPc, pc);
  ArbitraryMemory memory;
  StepStatus status = step(table, *row, regs, memory, 0, &caller);

  Truth<Isa> truth{regs};
  Dwarf_Op* ops;
  size_t ops_count;
  Dwarf_Addr begin, end;
  bool signal;
  int return_register = dwarf_frame_info(frame, &begin, &end, &signal);
  // libdw shows registers relative to the CFA, which must come first.
  bool has_cfa = dwarf_frame_cfa(frame, &ops, &ops_count) == 0 && ops_count;
  if (has_cfa) truth.cfa = *truth.run(ops, ops_count, false);
  auto ra = truth.reg(frame, static_cast<unsigned>(return_register));
  free(frame);
  // glibc's rawmemchr on AArch64 returns by x15, which libdw calls undefined as it has no default rule for it.
  if (!ra && return_register == 15 && row->ra_kind == ValueKind::in_register) return;
  if (!ra) return count->expect(status == StepStatus::outermost, "end of stack", pc);
  if (status != StepStatus::ok) return count->expect(false, "status", pc);
  dwarf_cfi_addrframe(file.cfi, pc, &frame);
  count->expect(has_cfa && caller.sp().value == truth.reg(frame, Isa::kSp), "stack pointer", pc);
  count->expect(caller.pc().value == *ra, "return address", pc);
  count->expect(signal == !!(row->flags & kRowSignalFrame), "signal frame", pc);
  for (unsigned reg : Isa::kSaved) {
    auto expected = truth.reg(frame, reg);
    // elfutils 0.188 takes rbx for undefined unless there is a rule (backends/x86_64_cfi.c names register 0 instead of 3).
    if (!expected && std::is_same_v<Isa, X86_64> && reg == X86_64::rbx && caller.get(reg) == regs.get(reg)) continue;
    bool right = expected.has_value() == caller.has(reg) && (!expected || *expected == caller.get(reg));
    count->expect(
        right, fmt::format("register {} ({}{})", reg, expected ? "" : "lost", caller.has(reg) ? "" : " here").c_str(),
        pc);
  }
  free(frame);
}

// Every change of row at its first and last byte, gaps included.
template <class Isa>
void compare(const std::string& path, size_t at_least = 100) {
  if (access(path.c_str(), R_OK)) {
    MESSAGE("skipped: " << path << " is not installed");
    return;
  }
  File file(path);
  REQUIRE(file.cfi);
  auto started = std::chrono::steady_clock::now();
  auto compiled = compile_rows(file.source);
  auto built = std::chrono::steady_clock::now();
  REQUIRE(compiled);
  for (unsigned i = 0; i < kInexpressibles; i++) {
    INFO(describe(static_cast<Inexpressible>(i)));
    CHECK(compiled->stats.inexpressible[i] == 0);
  }
  CHECK(compiled->stats.unusable_entries == 0);
  CHECK(compiled->stats.lost_registers == 0);
  auto table = Table::open(compiled->bytes);
  REQUIRE(table);
  std::mt19937_64 random(4);
  Count count;
  table->for_each([&](ImageAddr begin, ImageAddr end, const Row*) {
    compare_at<Isa>(file, *table, begin.value, random, &count);
    if (end - begin > 1) compare_at<Isa>(file, *table, (end - 1).value, random, &count);
  });
  CHECK(count.wrong == 0);
  CHECK(count.rows > at_least);
  auto milliseconds = std::chrono::duration<double, std::milli>(built - started).count();
  MESSAGE(fmt::format("{}: {} places in rows and {} in gaps compared, built in {:.1f} ms", path, count.rows, count.gaps,
                      milliseconds));
}

TEST_CASE("tables: libc as libdw reads it") { compare<X86_64>("/lib/x86_64-linux-gnu/libc.so.6"); }
TEST_CASE("tables: ld.so as libdw reads it") { compare<X86_64>("/lib64/ld-linux-x86-64.so.2"); }
TEST_CASE("tables: libstdc++ as libdw reads it") { compare<X86_64>("/usr/lib/x86_64-linux-gnu/libstdc++.so.6"); }
TEST_CASE("tables: libcrypto as libdw reads it") { compare<X86_64>("/usr/lib/x86_64-linux-gnu/libcrypto.so.3"); }
TEST_CASE("tables: python3 as libdw reads it") { compare<X86_64>("/usr/bin/python3"); }
// Signed exactly from behind paciasp to behind autiasp, as the instructions themselves say.
TEST_CASE("tables: AArch64 return addresses signed where the code signs them") {
  if (std::system("command -v aarch64-linux-gnu-gcc >/dev/null")) {
    MESSAGE("skipped: aarch64-linux-gnu-gcc is not installed");
    return;
  }
  char folder[] = "/tmp/sonde-pac-test-XXXXXX";
  REQUIRE(mkdtemp(folder));
  std::string out = std::string(folder) + "/pac.so";
  std::string command = fmt::format(
      "printf 'long g(long); long f(long a) {{ return g(a) + 1; }} long h(long a) {{ long b[40]; b[g(a)] = a; return "
      "g(b[3]) * 3; }}'"
      " | aarch64-linux-gnu-gcc -O2 -fno-stack-protector -mbranch-protection=pac-ret -fasynchronous-unwind-tables"
      " -shared -nostdlib -x c -o {} -",
      out);
  REQUIRE(std::system(command.c_str()) == 0);
  compare<Aarch64>(out, 10);
  {
    File file(out);
    auto compiled = compile_rows(file.source);
    REQUIRE(compiled);
    Table table = Table::at(compiled->bytes.data());
    int checked = 0;
    size_t names;
    elf_getshdrstrndx(file.elf, &names);
    for (Elf_Scn* scn = nullptr; (scn = elf_nextscn(file.elf, scn));) {
      GElf_Shdr section;
      gelf_getshdr(scn, &section);
      if (std::string_view(elf_strptr(file.elf, names, section.sh_name)) != ".text") continue;
      Elf_Data* data = elf_rawdata(scn, nullptr);
      bool is_signed = false;
      for (size_t at = 0; at + 4 <= data->d_size; at += 4) {
        uint32_t insn;
        std::memcpy(&insn, static_cast<const char*>(data->d_buf) + at, 4);
        if (const Row* row = table.lookup(ImageAddr(section.sh_addr + at))) {
          CHECK(!!(row->flags & kRowRaSigned) == is_signed);
          checked += is_signed;
        }
        if (insn == 0xd503233f) is_signed = true;
        if (insn == 0xd50323bf) is_signed = false;
      }
    }
    CHECK(checked > 10);
  }
  unlink(out.c_str());
  rmdir(folder);
}

TEST_CASE("tables: AArch64 libc as libdw reads it") { compare<Aarch64>("/usr/aarch64-linux-gnu/lib/libc.so.6"); }

}  // namespace
}  // namespace sonde::host
