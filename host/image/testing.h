// For the tests of host/image: builds small inputs in the build folder, and asks binutils what is in a file.
#pragma once

#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "host/image/image.h"

namespace sonde::host::testing {

// A folder of its own for each test; emptied.
inline std::string fresh_folder(const std::string& name) {
  std::string folder = std::string(SONDE_BINARY_DIR) + "/image_test/" + name;
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder;
}

inline void write_file(const std::string& path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline std::vector<uint8_t> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Runs a shell command in `folder`, which must succeed; its output by lines.
inline std::vector<std::string> run(const std::string& command, const std::string& folder = "/") {
  FILE* pipe = popen(("cd '" + folder + "' && " + command).c_str(), "r");
  REQUIRE(pipe);
  std::vector<std::string> lines(1);
  for (int c; (c = fgetc(pipe)) != EOF;)
    if (c == '\n') lines.emplace_back();
    else lines.back() += static_cast<char>(c);
  REQUIRE_MESSAGE(pclose(pipe) == 0, command);
  lines.pop_back();
  return lines;
}

inline std::vector<std::string> words(const std::string& line) {
  std::vector<std::string> out;
  for (size_t at = 0; (at = line.find_first_not_of(" \t", at)) != line.npos;) {
    size_t end = std::min(line.find_first_of(" \t", at), line.size());
    out.push_back(line.substr(at, end - at));
    at = end;
  }
  return out;
}

inline std::shared_ptr<const Image> open_image(const std::string& path) {
  auto image = Image::open(path);
  REQUIRE_MESSAGE(image, (image ? "" : image.error().message));
  return *image;
}

inline const Function* function_named(const Image& image, std::string_view name) {
  for (auto& f : image.functions())
    if (f.name == name) return &f;
  return nullptr;
}

}  // namespace sonde::host::testing
