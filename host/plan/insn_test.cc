// Instruction lengths and branch targets held against objdump, over a program of the machine.
#include "host/plan/insn.h"

#include <doctest/doctest.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "host/image/image.h"

using namespace sonde;
using namespace sonde::host;

TEST_CASE("lengths and targets of instructions are objdump's") {
  constexpr const char* kFile = "/lib/x86_64-linux-gnu/libc.so.6";
  auto image = Image::open(kFile);
  REQUIRE(image);
  const Section* text = (*image)->section(".text");
  REQUIRE(text);
  auto bytes = (*image)->bytes(*text);
  std::string command = std::string("objdump -d --wide --no-show-raw-insn -j .text --stop-address=0x") + [&] {
    char number[32];
    snprintf(number, sizeof number, "%llx", static_cast<unsigned long long>(text->addr.value + 400000));
    return std::string(number);
  }() + " " + kFile;
  std::unique_ptr<FILE, int (*)(FILE*)> out(popen(command.c_str(), "r"), pclose);
  REQUIRE(out);
  char line[512];
  uint64_t expected = 0;
  size_t instructions = 0, branches = 0, wrong = 0;
  while (fgets(line, sizeof line, out.get())) {
    unsigned long long pc, target;
    char mnemonic[64];
    if (line[0] != ' ' || sscanf(line, " %llx: %63s", &pc, mnemonic) != 2) continue;
    // Where objdump was told to stop may be the middle of an instruction: the last line, half of one.
    if (pc + 15 > text->addr.value + 400000) break;
    if (expected && expected != pc && wrong++ < 5) MESSAGE("length before " << std::string(line));
    auto insn = decode(bytes.subspan(pc - text->addr.value), pc);
    if (!insn) {
      if (wrong++ < 5) MESSAGE("undecoded " << std::string(line));
      expected = 0;
      continue;
    }
    expected = insn->next();
    instructions++;
    bool plain = mnemonic[0] == 'j' || !strcmp(mnemonic, "call");
    if (plain && !strchr(line, '*') && sscanf(line, " %*x: %*s %llx", &target) == 1) {
      branches++;
      if (!is_direct(insn->flow) || insn->target != target) wrong++;
    }
  }
  CHECK(instructions > 80000);
  CHECK(branches > 10000);
  CHECK(wrong == 0);
}
