// Mappings and loaded images against the loader's own list, and files that are no longer what they were.
#include "host/image/maps.h"

#include <link.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "host/image/testing.h"

using namespace sonde;
using namespace sonde::host;
using namespace sonde::host::testing;

TEST_CASE("maps: lines are taken apart, and what is no line is refused") {
  auto maps = parse_maps(
      "00400000-00401000 r-xp 00001000 08:02 173521 /usr/bin/a b (deleted)\n"
      "7ffc0000-7ffd0000 rw-p 00000000 00:00 0                          [stack]\n"
      "7fff8000-7fff9000 ---s 00000000 00:05 7 /x\\012y\n"
      "ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 \n");
  REQUIRE(maps);
  REQUIRE(maps->size() == 4);
  auto& a = (*maps)[0];
  CHECK(a.range == AddrRange{Addr(0x400000), Addr(0x401000)});
  CHECK((a.readable && !a.writable && a.executable && !a.shared));
  CHECK(a.offset.value == 0x1000);
  CHECK(a.device == (8ull << 32 | 2));
  CHECK(a.inode == 173521);
  CHECK(a.path == "/usr/bin/a b");
  CHECK(a.deleted);
  CHECK((*maps)[1].path == "[stack]");
  CHECK_FALSE((*maps)[1].deleted);
  CHECK((*maps)[2].path == "/x\ny");
  CHECK((*maps)[2].shared);
  CHECK((*maps)[3].path == "");
  CHECK((*maps)[3].range.begin.value == 0xffffffffff600000);
  for (const char* bad : {"x\n", "00400000-00401000 r-xp\n", "00401000-00400000 r-xp 0 08:02 1 /a\n",
                          "1-2 r-x 0 0:0 0\n", "1-99999999999999999999 r-xp 0 0:0 0\n", "\n"}) {
    CAPTURE(bad);
    CHECK_FALSE(parse_maps(bad));
  }
  CHECK(parse_maps("")->empty());
}

TEST_CASE("maps: the images of this process are the loader's, at the loader's addresses") {
  struct Loaded {
    uint64_t bias, entry_page;
  };
  std::map<std::string, uint64_t> truth;  // canonical path -> bias
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        auto& truth = *static_cast<std::map<std::string, uint64_t>*>(out);
        std::string name = info->dlpi_name;
        if (name.empty()) name = "/proc/self/exe";
        truth[name.starts_with('/') ? std::filesystem::canonical(name).string() : "[vdso]"] = info->dlpi_addr;
        return 0;
      },
      &truth);
  std::vector<std::string> problems;
  auto images = loaded_images(getpid(), &problems);
  REQUIRE(images);
  CHECK(problems.empty());
  std::map<std::string, uint64_t> got;
  for (auto& i : *images) got[i.image->path()] = i.bias;
  REQUIRE(truth.contains("[vdso]"));
  CHECK(truth["[vdso]"] == getauxval(AT_SYSINFO_EHDR));
  CHECK(got == truth);
  auto here = reinterpret_cast<uint64_t>(&loaded_images);
  for (auto& i : *images) {
    if (!i.range.contains(Addr(here))) continue;
    auto hit = i.image->find(i.to_image(Addr(here)));
    REQUIRE(hit);
    CHECK(demangle(hit->function->name).starts_with("sonde::host::loaded_images(int, "));
  }
  CHECK(std::ranges::is_sorted(*images, {}, [](auto& i) { return i.range.begin; }));
}

TEST_CASE("maps: a process that is not there") {
  auto maps = read_maps(0x3fffffff);
  REQUIRE_FALSE(maps);
  CHECK(maps.error().message == "there is no process 1073741823");
}

namespace {

struct Child {
  pid_t pid;
  explicit Child(const std::string& program) : pid(fork()) {
    if (pid == 0) {
      execl(program.c_str(), program.c_str(), nullptr);
      _exit(127);
    }
    // Until it stops itself in main it is still being loaded.
    waitpid(pid, nullptr, WUNTRACED);
  }
  ~Child() {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
};

}  // namespace

TEST_CASE("maps: a program deleted or replaced while it runs is read from the process, not from its old path") {
  auto folder = fresh_folder("replaced");
  write_file(folder + "/a.c",
             "#include <signal.h>\nvoid first(void) { raise(SIGSTOP); }\nint main(void) { first(); return 0; }\n");
  write_file(folder + "/b.c",
             "#include <signal.h>\nint pad;\nvoid second(void) { raise(SIGSTOP); pad = 1; }\nint main(void) { "
             "second(); return 0; }\n");
  run("gcc -Wl,-z,noseparate-code -o a a.c && gcc -Wl,-z,noseparate-code -o b b.c", folder);
  std::string program = folder + "/a";
  Child child(program);
  auto has = [&](const char* function, std::vector<std::string>* problems) {
    auto images = loaded_images(child.pid, problems);
    REQUIRE(images);
    for (auto& i : *images)
      if (i.image->path() == program) return function_named(*i.image, function) ? 1 : 0;
    return -1;  // the program itself is not among them
  };
  CHECK(has("first", nullptr) == 1);
  std::filesystem::rename(folder + "/b", program);  // as a linker or package manager replaces files
  std::vector<std::string> problems;
  int found = has("first", &problems);
  // Reading through map_files takes privileges; without them the program is reported as a problem, never misread.
  bool privileged = access(("/proc/self/map_files"), R_OK) == 0 && geteuid() == 0;
  if (privileged) CHECK(found == 1);
  else CHECK((found == -1 && problems.size() == 1));
  CHECK(has("second", nullptr) != 1);
}
