// An ELF core file: what the kernel wrote when a process died, or gcore while it lived. Threads with their registers, memory,
// and which files were mapped where; pages that the core leaves out are read from those files.
#pragma once

#include <elf.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "host/image/maps.h"
#include "host/target/memory.h"
#include "host/target/threads.h"

namespace sonde::host {

struct CoreSegment {
  AddrRange range;
  uint64_t file_offset, file_size;  // of what the core holds of it, from the range's begin
  uint64_t wanted_size;  // file_size where the core is not cut off
  bool readable, writable, executable;
};

class CoreFile : public TargetMemory {
 public:
  static Result<std::unique_ptr<CoreFile>> open(const std::string& path);
  ~CoreFile() override;

  pid_t pid() const { return pid_; }
  int signal() const { return signal_; }  // that ended the process; 0: gcore
  const std::string& program() const { return program_; }  // its name, at most 15 characters
  std::span<const StoppedThread> threads() const { return threads_; }

  // Opens the files that were mapped with code, the vDSO included, and keeps them for reading pages that the core left
  // out. `executable`: where the program itself is now ("": where the core says). A file that is gone or whose build id
  // differs from the one in the core's memory is looked for by build id where debug files are. What is missing is said in
  // `problems`, once for each file.
  std::vector<LoadedImage> load_images(const std::string& executable, std::vector<std::string>* problems);
  // What was mapped where, by name.
  std::vector<std::pair<AddrRange, std::string>> files() const;
  // Those of the images whose memory has nothing to recognise the right file by.
  std::span<const AddrRange> doubtful() const { return doubtful_; }

  bool read(Addr at, std::span<uint8_t> into) override;
  bool stack_at(Addr sp, AddrRange* stack) override;

 private:
  struct MappedFile {
    AddrRange range;
    uint64_t offset;
    std::string path;
  };

  CoreFile() = default;
  Result<void> read_headers(const std::string& path);
  Result<void> read_notes(std::span<const uint8_t> notes);
  void add_thread(std::span<const uint8_t> prstatus);
  Result<void> read_file_note(std::span<const uint8_t> note);
  void read_auxiliary_vector(std::span<const uint8_t> note);
  const CoreSegment* segment(Addr at) const;
  size_t read_some(Addr at, std::span<uint8_t> into) const;
  // `name`: of a mapped file as the core has it; `path`: where it is now.
  bool is_image(const std::string& name, const std::string& path) const;
  std::optional<LoadedImage> place(const std::string& name, std::shared_ptr<const Image> image) const;
  enum class Identity : uint8_t { same, other, unknown };
  std::vector<uint8_t> first_page(const std::string& name) const;
  std::string build_id(const std::string& name) const;
  Identity identify(const std::string& name, const Image& image) const;
  void load(const std::string& name, const std::string& path, std::vector<std::string>* problems);
  void note_cut(const std::string& path, uint64_t needed);
  std::optional<LoadedImage> load_vdso() const;

  std::span<const uint8_t> bytes_;  // the file, mapped
  pid_t pid_ = 0;
  int signal_ = 0;
  std::string program_;
  std::vector<StoppedThread> threads_;
  std::vector<CoreSegment> segments_;  // sorted
  std::vector<MappedFile> files_;  // sorted
  Addr entry_, vdso_;
  std::vector<LoadedImage> images_;
  std::vector<AddrRange> doubtful_;
  std::string cut_;  // what is missing of the file itself
};

}  // namespace sonde::host
