// Any bytes as a core file: refused with a reason, or threads, memory, stacks and images that can be asked for.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "host/target/core_file.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

// A file in memory that always has the same path.
const char* path_of(const uint8_t* data, size_t size) {
  static int fd = memfd_create("core", 0);
  static char path[32];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  require(ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == static_cast<ssize_t>(size));
  return path;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sonde;
  auto core = host::CoreFile::open(path_of(data, size));
  if (!core) {
    require(core.error().message.size() > 6);
    return 0;
  }
  std::vector<std::string> problems;
  auto images = (*core)->load_images("", &problems);
  for (const host::StoppedThread& thread : (*core)->threads()) {
    uint8_t bytes[64];
    Addr sp = thread.regs.sp(), pc = thread.regs.pc();
    (*core)->read(sp, bytes);
    (*core)->read(pc, bytes);
    AddrRange stack;
    if ((*core)->stack_at(sp, &stack)) require(stack.begin < stack.end && stack.contains(sp));
  }
  for (const host::LoadedImage& image : images) image.image->find(image.image->entry());
  return 0;
}
