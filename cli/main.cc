// Chooses the command and prints errors. Exit status: the traced program's own for `record`; otherwise 0, 1 failed,
// 2 the command was wrong, 3 a stack is not reliable (`stack --reliable`).
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>

#include "cli/commands.h"
#include "cli/options.h"
#include "host/image/image.h"
#include "host/image/names.h"
#include "host/image/near.h"

using sonde::cli::tell;

namespace {

// What was closed when sonde was started would be the next file that it opens, and its messages would go there. As it would be
// for the program: nothing can be read or written, and the program itself does not inherit it.
void fill_standard_descriptors() {
  constexpr int kUseless[] = {O_WRONLY, O_RDONLY, O_RDONLY};
  for (int fd = 0; fd <= 2; fd++) {
    if (fcntl(fd, F_GETFD) >= 0) continue;
    int got = open("/dev/null", kUseless[fd] | O_CLOEXEC);
    if (got < 0) got = memfd_create("sonde", MFD_CLOEXEC);
    if (got >= 0 && got != fd) close(got);
  }
}

std::string red(const std::string& text) { return isatty(2) ? "\033[31m" + text + "\033[0m" : text; }

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(command->get_name());
  return names;
}

// Without a command, or with a word that is none or would be swallowed. Options of sonde's own are left to the parser.
bool names_no_command(const CLI::App& app, int argc, char** argv) {
  if (argc < 2) {
    tell("{}\n\n{}", red("sonde: which command?"), app.help());
    return true;
  }
  std::string word = argv[1];
  if (argc > 2 && (word == "--help" || word == "-h")) word = argv[2];  // of a command
  if (word == "--version" && argc > 2) {
    tell("{}\n", red(fmt::format("sonde: --version stands alone, not with '{}'", sonde::host::printable(argv[2]))));
    return true;
  }
  auto names = command_names(app);
  if (word.starts_with('-') || std::ranges::find(names, word) != names.end()) return false;
  std::string near;
  for (const std::string& name : sonde::host::nearest(word, names))
    if (near.empty() &&
        (name.starts_with(word) || word.starts_with(name) || sonde::host::edit_distance(word, name, 3) < 3))
      near = fmt::format("; did you mean {}?", name);
  if (near.empty() && (word.find('/') != word.npos || access(word.c_str(), F_OK) == 0))
    near = fmt::format("; to record a program: sonde record {}", word);
  tell("{}\nusage: sonde {} ...\n       sonde COMMAND --help\n",
       red(fmt::format("sonde: '{}' is no command{}", sonde::host::printable(word), near)), fmt::join(names, "|"));
  return true;
}

// What the parser has to say, with the words that were possible where one is missing.
std::string say(const CLI::App* app, const CLI::Error& error) {
  std::string command = "sonde";
  for (auto chosen = app->get_subcommands(); !chosen.empty(); chosen = app->get_subcommands())
    app = chosen.front(), command += " " + app->get_name();
  std::string text = fmt::format("sonde: {}", sonde::cli::in_words(*app, command, error));
  if (auto names = command_names(*app); error.get_name() == "RequiredError" && !names.empty())
    text = fmt::format("sonde: {} wants one of: {}", command, fmt::join(names, ", "));
  return red(text) + fmt::format("\n{} --help says more\n", command);
}

}  // namespace

int main(int argc, char** argv) {
  fill_standard_descriptors();
  CLI::App app{"Function probes and trustworthy stack traces for user programs.", "sonde"};
  app.set_version_flag("--version", "sonde 0.1.0");
  app.require_subcommand(1);
  app.footer(
      "Examples:\n"
      "  sonde record ./app args        record the calls of app's own functions\n"
      "  sonde report                   show them as a tree\n"
      "  sonde list ./app 'net::*'      what can be probed there, and how\n"
      "  sonde stack -p 4711            every thread's stack, each frame with its verdict\n"
      "  sonde check ./libx.so          where its unwind tables are wrong\n"
      "  sonde COMMAND --help           more of each");
  int status = 0;
  try {
    sonde::cli::add_record(app, status);
    sonde::cli::add_report(app, status);
    sonde::cli::add_list(app, status);
    sonde::cli::add_stack(app, status);
    sonde::cli::add_detach(app, status);
    sonde::cli::add_check(app, status);
    sonde::cli::add_dump(app, status);
    sonde::cli::refuse_empty_values(app);
    app.failure_message(say);
    if (names_no_command(app, argc, argv)) return 2;
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const sonde::cli::CommandError& error) {
    tell("{}\n", red("sonde: " + error.error.message));
    return error.error.exit_status;
  } catch (const std::exception& error) {  // output that cannot be written, or no memory
    std::fprintf(stderr, "sonde: %s\n", error.what());
    return 1;
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) {
    tell("{}\n", red(fmt::format("sonde: cannot write the output: {}", std::strerror(errno))));
    return status ? status : 1;
  }
  return status;
}
