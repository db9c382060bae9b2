// See program_file.h. Names are looked up as execvp does.
#include "host/target/program_file.h"

#include <elf.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <vector>

#include "host/image/image.h"

namespace sonde::host {

namespace {

constexpr int kNotFound = 127, kCannotRun = 126;
constexpr size_t kFirstLine = 256;  // that the kernel reads (BINPRM_BUF_SIZE)

bool may_run(const std::string& path) { return faccessat(AT_FDCWD, path.c_str(), X_OK, AT_EACCESS) == 0; }

bool is_folder(const std::string& path) {
  struct stat st;
  return stat(path.c_str(), &st) == 0 && S_ISDIR(st.st_mode);
}

// The first of PATH that can be run, else the first that is there.
std::optional<std::string> find_program(const std::string& program) {
  if (program.find('/') != program.npos) return program;
  const char* path = getenv("PATH");
  std::string folders = path ? path : "/bin:/usr/bin";
  std::optional<std::string> found;
  for (size_t at = 0; at <= folders.size();) {
    size_t end = std::min(folders.find(':', at), folders.size());
    std::string file = end == at ? program : folders.substr(at, end - at) + "/" + program;
    at = end + 1;
    if (access(file.c_str(), F_OK) != 0 || is_folder(file)) continue;
    if (may_run(file)) return file;
    if (!found) found = file;
  }
  return found;
}

std::string first_bytes(const std::string& path) {
  std::string bytes(kFirstLine, 0);
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  ssize_t n = fd < 0 ? -1 : read(fd, bytes.data(), bytes.size());
  if (fd >= 0) close(fd);
  bytes.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return bytes;
}

// "#! /usr/bin/env python3": the word behind "#!".
std::string interpreter_of(const std::string& bytes) {
  size_t begin = bytes.find_first_not_of(" \t", 2);
  if (begin == bytes.npos || bytes[begin] == '\n') return "";
  return bytes.substr(begin, std::min(bytes.find_first_of(" \t\n", begin), bytes.size()) - begin);
}

Result<void> check_script(const std::string& path, const std::string& bytes) {
  std::string interpreter = interpreter_of(bytes);
  if (interpreter.empty() || may_run(interpreter)) return {};
  if (interpreter.ends_with('\r'))
    return fail(
        fmt::format("script '{}' has lines that end as on Windows: its interpreter is not found; remove the carriage "
                    "returns",
                    path),
        kNotFound);
  if (access(interpreter.c_str(), F_OK) == 0)
    return fail(fmt::format("interpreter {} of script '{}' is not executable", interpreter, path), kCannotRun);
  return fail(fmt::format("interpreter {} of script '{}' does not exist: install it, or mend the script's first line",
                          interpreter, path),
              kNotFound);
}

Result<void> check_elf(const std::string& path, const std::string& bytes) {
  Elf64_Ehdr header;
  if (bytes.size() < sizeof header) return fail(fmt::format("'{}' is cut off: no program", path), kCannotRun);
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != EM_X86_64)
    return fail(fmt::format("'{}' is not an x86-64 program", path), kCannotRun);
  struct stat file;  // the kernel calls it no program then, and execvp would give it to a shell
  if (stat(path.c_str(), &file) == 0 &&
      header.e_phoff + uint64_t{header.e_phnum} * sizeof(Elf64_Phdr) > static_cast<uint64_t>(file.st_size))
    return fail(fmt::format("'{}' is cut off: no program", path), kCannotRun);
  auto image = Image::open(path);
  if (!image) return {};  // what is wrong is said later, if the kernel takes it
  auto loader = (*image)->interpreter();
  if (loader && access(loader->c_str(), F_OK) != 0)
    return fail(fmt::format("loader {} of program '{}' does not exist", *loader, path), kNotFound);
  return {};
}

}  // namespace

Result<void> check_program_file(const std::string& program) {
  auto path = find_program(program);
  if (!path)
    return fail(fmt::format("cannot run '{}': no such program in PATH; use ./NAME for a file here", program),
                kNotFound);
  if (access(path->c_str(), F_OK) != 0)
    return fail(fmt::format("cannot run '{}': {}", *path, std::strerror(errno)),
                errno == ENOENT ? kNotFound : kCannotRun);
  if (is_folder(*path))
    return fail(fmt::format("cannot run '{}': it is a folder; name a program in it", *path), kCannotRun);
  if (!may_run(*path)) {
    if (errno == EACCES)
      return fail(fmt::format("cannot run '{0}': it is not executable; if it is a program: chmod +x {0}", *path),
                  kCannotRun);
    return fail(fmt::format("cannot run '{}': {}", *path, std::strerror(errno)), kCannotRun);
  }
  std::string bytes = first_bytes(*path);
  if (bytes.starts_with("#!")) return check_script(*path, bytes);
  if (bytes.starts_with(ELFMAG)) return check_elf(*path, bytes);
  return {};
}

std::string script_interpreter(const std::string& program) {
  auto path = find_program(program);
  std::string bytes = path ? first_bytes(*path) : "";
  return bytes.starts_with("#!") ? interpreter_of(bytes) : "";
}

}  // namespace sonde::host
