// What the commands' options have in common: checks of their values and the words for what is wrong with them. The parser
// takes an empty value for none, "-1" for a large number and a flag's value for the flag, and speaks of conversions.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace sonde::cli {

constexpr uint64_t kMostRows = 1'000'000'000;  // also of levels of a tree
constexpr uint64_t kLargestId = 1 << 22;  // of a process or thread (PID_MAX_LIMIT of the kernel)

// Checks for CLI::Option::check.
CLI::Validator whole_number(uint64_t least, uint64_t most);
CLI::Validator number(double least, double most);
CLI::Validator one_of(std::vector<std::string> words);
CLI::Validator existing_folder();

// To be called when all options are there: an empty value is none, and flags take none. The program that is recorded
// may be given empty arguments.
void refuse_empty_values(CLI::App& app);

// The parser's error in one sentence: what is wrong, where, what to do.
std::string in_words(const CLI::App& command, const std::string& command_name, const CLI::Error& error);

}  // namespace sonde::cli
