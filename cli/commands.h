// One function per command, each in the file of its name: adds the subcommand with its options and help to `app`.
// When the command is chosen its callback runs it and sets `status`, the exit status of sonde; an error is returned by
// throwing CommandError, which main.cc prints as one line.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "host/error.h"

namespace sonde::cli {

struct CommandError {
  host::Error error;
};

// The value, or a CommandError for main to print.
template <class T>
T require(host::Result<T> result) {
  if (!result) throw CommandError{std::move(result).error()};
  if constexpr (!std::is_void_v<T>) return *std::move(result);
}

// To standard error. A message that cannot be written (a full disk, a reader that went away) is no reason to end otherwise.
template <class... Args>
void tell(fmt::format_string<Args...> format, Args&&... args) {
  std::string text = fmt::format(format, std::forward<Args>(args)...);
  std::fwrite(text.data(), 1, text.size(), stderr);
}

void add_record(CLI::App& app, int& status);
void add_report(CLI::App& app, int& status);
void add_list(CLI::App& app, int& status);
void add_stack(CLI::App& app, int& status);
void add_detach(CLI::App& app, int& status);
void add_check(CLI::App& app, int& status);
void add_dump(CLI::App& app, int& status);

}  // namespace sonde::cli
