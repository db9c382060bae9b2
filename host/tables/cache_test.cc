// The cache gives the same table, survives every kind of damage, and is never needed.
#include "host/tables/cache.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>

#include "host/tables/image_table.h"

namespace sonde::host {
namespace {

constexpr const char* kFile = "/lib64/ld-linux-x86-64.so.2";

struct Folder {
  Folder() {
    char name[] = "/tmp/sonde-cache-test-XXXXXX";
    REQUIRE(mkdtemp(name));
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  size_t files() const { return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path), {})); }
  std::string path;
};

std::shared_ptr<const Image> open_image() {
  auto image = Image::open(kFile);
  REQUIRE(image);
  return *image;
}

bool equals_compiled(const ImageTable& table, const Image& image) {
  auto compiled = compile_table(image);
  REQUIRE(compiled);
  return std::ranges::equal(table.bytes(), compiled->bytes);
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write_file(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

TEST_CASE("cache: the second time the table comes from the file") {
  Folder folder;
  auto image = open_image();
  auto first = load_table(*image, folder.path), second = load_table(*image, folder.path);
  REQUIRE((first && second));
  CHECK(!(*first)->from_cache());
  CHECK((*second)->from_cache());
  CHECK(equals_compiled(**first, *image));
  CHECK(equals_compiled(**second, *image));
  CHECK(folder.files() == 1);
}

TEST_CASE("cache: a damaged, cut, foreign or misplaced file is made anew") {
  Folder folder;
  auto image = open_image();
  REQUIRE(load_table(*image, folder.path));
  std::string path = folder.path + "/" + std::string(image->build_id()) + ".table";
  const std::string good = read_file(path);
  REQUIRE(!good.empty());
  std::mt19937 random(5);
  for (int round = 0; round < 300; round++) {
    std::string bad = good;
    if (round % 3 == 0) bad.resize(random() % good.size());
    else bad[round % 3 == 1 ? random() % 200 : random() % good.size()] ^= static_cast<char>(1 << random() % 8);
    write_file(path, bad);
    auto table = load_table(*image, folder.path);
    REQUIRE(table);
    CHECK(equals_compiled(**table, *image));
    // What is neither checked nor used: the reserved field of the cache's header.
    CHECK((!(*table)->from_cache() || (bad.size() == good.size() && bad.substr(16) == good.substr(16))));
  }
  // Another file's table under this name.
  auto other = Image::open("/usr/lib/x86_64-linux-gnu/libc.so.6");
  REQUIRE((other && load_table(**other, folder.path)));
  std::filesystem::copy_file(folder.path + "/" + std::string((*other)->build_id()) + ".table", path,
                             std::filesystem::copy_options::overwrite_existing);
  auto table = load_table(*image, folder.path);
  REQUIRE(table);
  CHECK(!(*table)->from_cache());
  CHECK(equals_compiled(**table, *image));
  // Files that others may write to, links and pipes are not read.
  chmod(path.c_str(), 0666);
  CHECK(!(*load_table(*image, folder.path))->from_cache());
  CHECK((*load_table(*image, folder.path))->from_cache());
  std::filesystem::rename(path, folder.path + "/elsewhere");
  std::filesystem::create_symlink(folder.path + "/elsewhere", path);
  CHECK(!(*load_table(*image, folder.path))->from_cache());
  unlink(path.c_str());
  REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  CHECK(!(*load_table(*image, folder.path))->from_cache());
}

TEST_CASE("cache: works without folder, without room and without build id") {
  auto image = open_image();
  auto table = load_table(*image, "/nonexistent/folder");
  REQUIRE(table);
  CHECK(equals_compiled(**table, *image));
  CHECK(load_table(*image, ""));

  Folder folder;
  pid_t child = fork();
  if (child == 0) {  // a file larger than allowed fails as a full disk does
    rlimit limit{4096, 4096};
    setrlimit(RLIMIT_FSIZE, &limit);
    signal(SIGXFSZ, SIG_IGN);
    auto limited = load_table(*image, folder.path);
    _exit(limited && !(*limited)->from_cache() && std::filesystem::is_empty(folder.path) ? 0 : 1);
  }
  int status;
  waitpid(child, &status, 0);
  CHECK(status == 0);

  std::string bytes = read_file(kFile), id;
  for (size_t i = 0; i + 1 < image->build_id().size(); i += 2)
    id += static_cast<char>(std::stoul(std::string(image->build_id().substr(i, 2)), nullptr, 16));
  size_t note = bytes.find(std::string("GNU\0", 4) + id);
  REQUIRE(note != std::string::npos);
  bytes[note - 4] = 77;  // the note's type
  auto anonymous = Image::from_memory({bytes.begin(), bytes.end()}, "anonymous");
  REQUIRE(anonymous);
  CHECK((*anonymous)->build_id().empty());
  REQUIRE(load_table(**anonymous, folder.path));
  CHECK(folder.files() == 0);
}

TEST_CASE("cache: its folder follows the environment") {
  Folder folder;
  std::string old_cache = getenv("XDG_CACHE_HOME") ? getenv("XDG_CACHE_HOME") : "",
              old_home = getenv("HOME") ? getenv("HOME") : "";
  setenv("XDG_CACHE_HOME", folder.path.c_str(), 1);
  CHECK(table_cache_folder() == folder.path + "/sonde");
  setenv("XDG_CACHE_HOME", "relative", 1);
  setenv("HOME", folder.path.c_str(), 1);
  CHECK(table_cache_folder() == folder.path + "/.cache/sonde");
  chmod((folder.path + "/.cache/sonde").c_str(), 0777);
  CHECK(table_cache_folder().empty());
  unsetenv("HOME");
  CHECK(table_cache_folder().empty());
  old_cache.empty() ? unsetenv("XDG_CACHE_HOME") : setenv("XDG_CACHE_HOME", old_cache.c_str(), 1);
  if (!old_home.empty()) setenv("HOME", old_home.c_str(), 1);
}

}  // namespace
}  // namespace sonde::host
