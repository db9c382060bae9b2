#include "cli/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "host/image/image.h"
#include "host/image/names.h"
#include "host/image/near.h"

namespace sonde::cli {

namespace {

using host::printable;

// The whole text is one value, in decimal.
template <class T>
bool parses(const std::string& text, T& value) {
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

CLI::Validator checked(std::function<std::string(const std::string&)> check) {
  return {[check](std::string& text) { return check(text); }, ""};
}

std::string number_text(double value) { return fmt::format("{}", value); }

bool is_flag(const CLI::Option& option) { return option.get_items_expected_max() == 0; }

std::vector<std::string> option_names(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

// "--stast" among --stats and others; "" if none is near.
std::string meant(const CLI::App& command, const std::string& word) {
  std::string name = word.substr(0, word.find('='));
  for (const std::string& near : host::nearest(name, option_names(command)))
    if (near.starts_with(name) || host::edit_distance(name, near, 3) < 3) return near;
  return "";
}

std::string behind(const std::string& text, std::string_view what) {
  size_t at = text.find(what);
  return at == text.npos ? "" : text.substr(at + what.size());
}

std::string unexpected(const CLI::App& command, const std::string& command_name, const std::string& text) {
  std::string words = behind(text, ": "), word = words.substr(0, words.find(' '));
  if (word.empty() || !word.starts_with('-'))
    return fmt::format("'{}' is more than {} takes", printable(words), command_name);
  std::string near = meant(command, word);
  return fmt::format("{} has no option {}{}", command_name, printable(word),
                     near.empty() ? "" : fmt::format("; did you mean {}?", near));
}

}  // namespace

CLI::Validator whole_number(uint64_t least, uint64_t most) {
  return checked([=](const std::string& text) {
    uint64_t value;
    if (parses(text, value) && value >= least && value <= most) return std::string();
    return fmt::format("'{}' is no whole number from {} to {}", printable(text), least, most);
  });
}

CLI::Validator number(double least, double most) {
  return checked([=](const std::string& text) {
    double value;
    if (parses(text, value) && value >= least && value <= most) return std::string();
    return fmt::format("'{}' is no number from {} to {}", printable(text), number_text(least), number_text(most));
  });
}

CLI::Validator one_of(std::vector<std::string> words) {
  return checked([words = std::move(words)](const std::string& text) {
    if (std::ranges::find(words, text) != words.end()) return std::string();
    return fmt::format("'{}' is none of: {}", printable(text), fmt::join(words, ", "));
  });
}

CLI::Validator existing_folder() {
  return checked([](const std::string& text) {
    struct stat st;
    if (stat(text.c_str(), &st) == 0 && S_ISDIR(st.st_mode)) return std::string();
    return fmt::format("'{}' is no folder", printable(text));
  });
}

void refuse_empty_values(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    if (is_flag(*option)) {
      option->disable_flag_override();
    } else if (option->get_name() != "PROGRAM") {
      option->check(checked([type = option->get_type_name()](const std::string& text) {
        return text.empty() ? fmt::format("a value is missing: {} is empty", type.empty() ? "it" : type)
                            : std::string();
      }));
    }
  }
  for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) refuse_empty_values(*command);
}

std::string in_words(const CLI::App& command, const std::string& command_name, const CLI::Error& error) {
  std::string text = error.what(), kind = error.get_name(), name = text.substr(0, text.find(": "));
  if (text.starts_with("The following argument")) return unexpected(command, command_name, text);
  if (kind != "ArgumentMismatch") return text;
  if (std::string missing = behind(text, " required "); missing.ends_with(" missing"))
    return fmt::format("{} wants a value: {} {}", name, name, missing.substr(0, missing.size() - 8));
  if (std::string times = behind(text, "required but received "); !times.empty())
    return fmt::format("{} is given {} times: give it once", name, times);
  if (size_t at = text.find(" was given a disallowed"); at != text.npos)
    return fmt::format("{}{} takes no value", at == 1 ? "-" : "--", text.substr(0, at));
  return text;
}

}  // namespace sonde::cli
