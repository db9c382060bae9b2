// Chooses the command and prints errors. Exit status: the traced program's own for `record`; otherwise 0, 1 failed,
// 2 the command was wrong, 3 a stack is not reliable (`stack --reliable`).
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <exception>

#include "cli/commands.h"

int main(int argc, char** argv) {
  CLI::App app{"Function probes and trustworthy stack traces for user programs.", "sonde"};
  app.set_version_flag("--version", "sonde 0.1.0");
  app.require_subcommand(1);
  app.footer("Examples:\n"
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
    sonde::cli::add_check(app, status);
    sonde::cli::add_dump(app, status);
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const sonde::cli::CommandError& error) {
    fmt::print(stderr, "{}sonde: {}{}\n", isatty(2) ? "\033[31m" : "", error.error.message, isatty(2) ? "\033[0m" : "");
    return error.error.exit_status;
  } catch (const std::exception& error) {  // output that cannot be written, or no memory
    std::fprintf(stderr, "sonde: %s\n", error.what());
    return 1;
  }
  return status;
}
