// Where files lie in a process: /proc/PID/maps, and images placed by it.
#pragma once

#include <sys/types.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "host/image/image.h"

namespace sonde::host {

struct Mapping {
  AddrRange range;
  FileOffset offset;
  bool readable, writable, executable, shared;
  uint64_t device, inode;
  std::string path;  // without " (deleted)"; "[vdso]", "[stack]", "" for anonymous
  bool deleted;
};
Result<std::vector<Mapping>> read_maps(pid_t pid);
Result<std::vector<Mapping>> parse_maps(std::string_view text);

struct LoadedImage {
  std::shared_ptr<const Image> image;
  uint64_t bias;    // target address = image address + bias
  AddrRange range;  // from the first to behind the last mapping of the file
  Addr to_target(ImageAddr a) const { return Addr(a.value + bias); }
  ImageAddr to_image(Addr a) const { return ImageAddr(a.value - bias); }
};
// All ELF images mapped executable in the process, the vDSO included, sorted by address. Files are opened through
// /proc/PID/root and /proc/PID/map_files where the path no longer leads to them. Images that cannot be read are left out
// and reported in `problems`.
Result<std::vector<LoadedImage>> loaded_images(pid_t pid, std::vector<std::string>* problems);
// Those that are mapped executable according to `mappings`, which may say more than the kernel does.
std::vector<LoadedImage> mapped_images(pid_t pid, std::span<const Mapping> mappings,
                                       std::vector<std::string>* problems);

}  // namespace sonde::host
