// Patterns against a program whose functions are known, and what is said when one matches nothing.
#include "host/image/select.h"

#include <fmt/format.h>

#include <chrono>
#include <set>

#include "host/image/testing.h"

using namespace sonde;
using namespace sonde::host;
using namespace sonde::host::testing;

namespace {

using Names = std::set<std::string>;

constexpr const char* kSource = R"(
#define NI __attribute__((noinline, noclone))
volatile int s;
namespace net {
NI int send(int x) { s = s + x; return s; }
NI int send(char x) { s = s + x; return s; }
struct Socket { NI int open() { s = s + 1; return s; } NI bool operator<(const Socket &) const { return s; } };
namespace debug { NI int log(int) { return s; } }
}
static inline __attribute__((always_inline)) int melted_away(int x) { return x * s; }
extern "C" {
NI int plain(void) { return s; }
NI int planet(void) { return s; }
int cold_one(void) __asm__("work.cold"); NI int cold_one(void) { return s; }
int clone(void) __asm__("work.part.0"); NI int clone(void) { return s + 2; }
NI int work(void) { return s + 3; }
int variable = 3;
void *pick(void) { return (void *)plain; }
NI int choice(void) __attribute__((ifunc("pick")));
__asm__(".text\n.globl outer\n.type outer,@function\nouter: nop\n.globl inner\ninner: ret\n.size outer,.-outer\n");
}
int main(int c, char **) { net::Socket a, b; return net::send(c) + net::send('c') + a.open() + (a < b) + net::debug::log(1) + melted_away(c) + plain() + planet() + work() + clone() + cold_one() + choice(); }
)";

std::string program() {
  static const std::string path = [] {
    auto folder = fresh_folder("select");
    write_file(folder + "/app.cc", kSource);
    run("g++ -O1 -g -o app app.cc && strip -o bare app && echo 'int main(void) { return 0; }' >s.c && gcc -O1 -static "
        "-o static s.c",
        folder);
    return folder + "/app";
  }();
  return path;
}

Selection parse(const std::vector<std::string>& patterns) {
  auto selection = Selection::parse(patterns);
  REQUIRE_MESSAGE(selection, (selection ? "" : selection.error().message));
  return *selection;
}

Names names(const Image& image, const std::vector<uint32_t>& chosen) {
  Names out;
  for (auto i : chosen) out.insert(display_name(image, image.functions()[i]));
  return out;
}

Names chosen(const std::vector<std::string>& patterns) {
  auto image = open_image(program());
  auto selection = parse(patterns);
  return names(*image, selection.select(*image, true));
}

std::string complaint(const std::string& path, const std::vector<std::string>& patterns) {
  auto image = open_image(path);
  auto selection = parse(patterns);
  selection.select(*image, true);
  auto error = selection.unmatched({&image, 1});
  if (error) CHECK(error->exit_status == 2);
  return error ? error->message : "";
}

bool has(const std::string& text, std::string_view part) { return text.find(part) != text.npos; }

}  // namespace

TEST_CASE("select: globs over raw and demangled names, with and without parameters") {
  CHECK(chosen({"plain"}) == Names{"plain"});
  CHECK(chosen({"plan*"}) == Names{"planet"});
  CHECK(chosen({"pla[ni]*"}) == Names{"plain", "planet"});
  CHECK(chosen({"plai?"}) == Names{"plain"});
  CHECK(chosen({"net::send"}) == Names{"net::send(int)", "net::send(char)"});
  CHECK(chosen({"net::send(int)"}) == Names{"net::send(int)"});
  CHECK(chosen({"_ZN3net4sendEi"}) == Names{"net::send(int)"});
  CHECK(chosen({"net::*"}) == Names{"net::send(int)", "net::send(char)", "net::Socket::open()",
                                    "net::Socket::operator<(net::Socket const&) const", "net::debug::log(int)"});
  CHECK(chosen({"net::Socket::operator<"}) == Names{"net::Socket::operator<(net::Socket const&) const"});
  CHECK(chosen({"net::*", "!net::debug::*", "!*Socket*"}) == Names{"net::send(int)", "net::send(char)"});
  CHECK(chosen({"!net::debug::*", "net::d*", "plain"}) == Names{"plain"});
  CHECK(chosen({"plain", "planet", "plain"}) == Names{"plain", "planet"});
  CHECK(chosen({"lain"}).empty());
}

TEST_CASE("select: clones count as their parent; parts that calls do not enter are never meant") {
  CHECK(chosen({"work"}) == Names{"work", "work.part.0"});
  CHECK(chosen({"work.part.0"}) == Names{"work.part.0"});
  CHECK(chosen({"work*"}) == Names{"work", "work.part.0"});
  auto all = chosen({"*"});
  CHECK(all == chosen({}));
  CHECK(all.contains("main"));
  CHECK_FALSE(all.contains("work.cold"));
  CHECK_FALSE(all.contains("choice"));
  auto without = chosen({"!net::*"});
  CHECK(without.size() == all.size() - 5);
}

TEST_CASE("select: modules by name, soname, path; libraries only if the program has nothing") {
  auto app = open_image(program());
  auto lib = open_image("/usr/lib/x86_64-linux-gnu/libsqlite3.so.0");
  auto real = open_image(std::filesystem::canonical("/usr/lib/x86_64-linux-gnu/libsqlite3.so.0"));
  auto count = [&](const char* pattern, const Image& image, bool is_program) {
    auto selection = parse({pattern});
    if (!is_program) selection.select(*app, true);
    return selection.select(image, is_program).size();
  };
  for (auto& image : {lib, real})
    for (const char* pattern :
         {"libsqlite3.so.0:sqlite3_open", "libsqlite3*:sqlite3_open", "libsqlite3.so:sqlite3_open",
          "*/libsqlite3.so.0*:sqlite3_open", "*:sqlite3_open", "sqlite3_open"})
      CHECK_MESSAGE(count(pattern, *image, false) == 1, pattern);
  CHECK(count("libsqlite:sqlite3_open", *lib, false) == 0);
  CHECK(count("libsqlite3.so.1:sqlite3_open", *real, false) == 0);
  CHECK(count("app:sqlite3_open", *lib, false) == 0);
  CHECK(count("app:plain", *app, true) == 1);
  CHECK(count("*", *lib, false) == 0);  // the program's functions only
  CHECK(count("ma*", *lib, false) == 0);  // main is in the program
  auto nothing = parse({});
  CHECK(nothing.select(*lib, false).empty());
}

TEST_CASE("select: versions") {
  auto folder = fresh_folder("select_versions");
  std::string source = std::string(SONDE_SOURCE_DIR) + "/tests/cases/042-symbol-versions/";
  run(fmt::format("gcc -O1 -fPIC -shared -Wl,--version-script={0}map -o v.so {0}lib.c && strip --strip-unneeded v.so",
                  source),
      folder);
  auto image = open_image(folder + "/v.so");
  auto versions = [&](const char* pattern, std::vector<std::string>* notes = nullptr) {
    auto selection = parse({pattern});
    Names out;
    for (auto i : selection.select(*image, true))
      for (auto& alias : image->functions()[i].aliases)
        if (alias.starts_with("foo@")) out.insert(alias);
    if (notes) *notes = selection.notes();
    return out;
  };
  std::vector<std::string> notes;
  CHECK(versions("foo", &notes) == Names{"foo@@V3"});
  CHECK(notes == std::vector<std::string>{"foo means foo@@V3; foo@V1, foo@V2 exist too"});
  CHECK(versions("foo@V1", &notes) == Names{"foo@V1"});
  CHECK(notes.empty());
  CHECK(versions("foo@@V3") == Names{"foo@@V3"});
  CHECK(versions("foo@*") == Names{"foo@V1", "foo@V2", "foo@@V3"});
  CHECK(versions("fo?") == Names{"foo@V1", "foo@V2", "foo@@V3"});
}

TEST_CASE("select: a pattern that matches nothing says what is near and why it may be") {
  auto said = complaint(program(), {"plian"});
  CHECK(has(said, "no function matches 'plian'; nearest: plain, "));
  said = complaint(program(), {"Socket::opn"});
  CHECK(has(said, "net::Socket::open"));
  CHECK(has(complaint(program(), {"send_"}), "net::send"));
  CHECK(has(complaint(program(), {"melted_away"}), "in app it exists only inlined into its callers"));
  CHECK_FALSE(has(complaint(program(), {"melted_awax"}), "inlined"));
  CHECK(has(complaint(program(), {"variable"}), "variable is a variable"));
  CHECK(has(complaint(program(), {"inner"}), "inner is a place inside outer"));
  CHECK(has(complaint(program(), {"work.cold"}), "work.cold is a split-off part, entered by jumps"));
  CHECK(has(complaint(program(), {"choice"}), "choice is indirect"));
  CHECK(has(complaint(program(), {"plain", "plian"}), "'plian'"));
  CHECK(complaint(program(), {"plain"}) == "");
  CHECK(complaint(program(), {"!nothing"}) == "");
  CHECK(has(complaint(program(), {"plain", "!*"}), "take every function away"));
  auto folder = std::filesystem::path(program()).parent_path().string();
  CHECK(has(complaint(folder + "/bare", {"plain"}), "bare is stripped"));
  CHECK(has(complaint(folder + "/static", {"plainly"}), "static is statically linked"));
  said = complaint(program(), {"ap:plain"});
  CHECK(has(said,
            "no loaded file is called ap; a library that is loaded later is named by its path: -f '/path/to/ap:plain'; "
            "nearest: app"));
  CHECK(has(complaint(program(), {"libz*:inflate"}), "named by its path: -f '/path/to/libx.so:inflate'"));
  CHECK(has(complaint(program(), {"./none.so:f"}), "called ./none.so; nor is there a file that could be loaded later"));
  // A library that may be loaded later is no mistake.
  CHECK(complaint(program(), {"plain", "/usr/lib/x86_64-linux-gnu/libsqlite3.so.0:sqlite3_open"}) == "");
}

TEST_CASE("select: what is no pattern") {
  for (const char* text : {"", "!", "app:", ":plain", "!app:"}) {
    auto selection = Selection::parse({text});
    REQUIRE_FALSE(selection);
    CHECK(selection.error().exit_status == 2);
  }
}

TEST_CASE("select: twenty thousand functions in well under a second") {
  auto folder = fresh_folder("select_many");
  std::string source;
  for (int i = 0; i < 20000; i++)
    source += fmt::format(".globl fn_{0}\n.type fn_{0},@function\nfn_{0}: ret\n.size fn_{0},1\n", i);
  write_file(folder + "/many.s", source);
  run("gcc -shared -nostdlib -o many.so many.s", folder);
  auto start = std::chrono::steady_clock::now();
  auto image = open_image(folder + "/many.so");
  auto selection = parse({"fn_1?3*", "fn_199", "!fn_1939?"});
  // fn_1?3 (10), fn_1?3d (100), fn_1?3dd (1000), fn_199; away with fn_1939 0..9
  CHECK(selection.select(*image, true).size() == 10 + 100 + 1000 + 1 - 10);
  auto wrong = parse({"nf_19999"});
  wrong.select(*image, true);
  auto error = wrong.unmatched({&image, 1});
  REQUIRE(error);
  CHECK(has(error->message, "nearest: fn_19999, "));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::milliseconds(700));
}
