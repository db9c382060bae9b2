// usage: step_counts [--randomize] FILE OFFSETS OUT COMMAND...
// Writes "OFFSET HITS" to OUT for each instruction of FILE, a loaded one, at these file offsets (hexadecimal, ascending, one a line)
// that COMMAND executes. Exit status: the command's.
//
// The truth for tests of instruction probes, by nothing but ptrace: a breakpoint stands on each; where one is met, the program
// goes on by single steps until it has left them again. For programs of one thread. Addresses are randomised only if asked for.
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/personality.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kBreakpoint = 0xcc };

typedef struct {
  uint64_t offset, at;
  uint64_t hits;
  uint8_t byte;
} Place;

static Place* places;
static size_t count;
static pid_t pid;
static int status;

static void check(int good, const char* what) {
  if (good) return;
  perror(what);
  exit(2);
}

static uint8_t put(uint64_t at, uint8_t byte) {
  uint64_t word_at = at & ~7ul, shift = 8 * (at & 7);
  uint64_t word = (uint64_t)ptrace(PTRACE_PEEKTEXT, pid, word_at, NULL);
  check(ptrace(PTRACE_POKETEXT, pid, word_at, (word & ~(0xfful << shift)) | (uint64_t)byte << shift) == 0, "poke");
  return (uint8_t)(word >> shift);
}

// Whether the executable part of `file` is there; then each place has its address.
static int is_mapped(const char* file) {
  char path[64], line[4200], name[4096];
  snprintf(path, sizeof path, "/proc/%d/maps", pid);
  FILE* maps = fopen(path, "r");
  check(maps != NULL, path);
  int found = 0;
  while (fgets(line, sizeof line, maps)) {
    uint64_t begin, end, offset;
    char access[8];
    if (sscanf(line, "%lx-%lx %7s %lx %*s %*s %4095s", &begin, &end, access, &offset, name) != 5) continue;
    if (access[2] != 'x' || strcmp(name, file)) continue;
    found = 1;
    for (size_t i = 0; i < count; i++)
      if (places[i].offset - offset < end - begin) places[i].at = begin + places[i].offset - offset;
  }
  fclose(maps);
  return found;
}

static Place* place_at(uint64_t pc) {
  size_t low = 0, high = count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (places[middle].at < pc) low = middle + 1;
    else high = middle;
  }
  return low < count && places[low].at == pc ? &places[low] : NULL;
}

static uint64_t pc_now(void) { return (uint64_t)ptrace(PTRACE_PEEKUSER, pid, offsetof(struct user, regs.rip), NULL); }

// On to the next stop; a signal is the program's.
static int resume(int how) {
  int signal = 0;
  for (;;) {
    check(ptrace(how, pid, NULL, (void*)(long)signal) == 0, "resume");
    check(waitpid(pid, &status, 0) == pid, "wait");
    if (!WIFSTOPPED(status)) return 0;
    signal = WSTOPSIG(status);
    if (signal == SIGTRAP) return 1;
  }
}

int main(int argc, char** argv) {
  int randomize = argc > 1 && strcmp(argv[1], "--randomize") == 0;
  argc -= randomize, argv += randomize;
  if (argc < 5) return 2;
  FILE* in = fopen(argv[2], "r");
  check(in != NULL, argv[2]);
  uint64_t offset;
  while (fscanf(in, "%lx", &offset) == 1) {
    if ((count & (count - 1)) == 0) places = realloc(places, sizeof *places * (count ? 2 * count : 1));
    places[count++] = (Place){.offset = offset};
  }
  pid = fork();
  if (pid == 0) {
    if (!randomize) personality(ADDR_NO_RANDOMIZE);
    ptrace(PTRACE_TRACEME, 0, NULL, NULL);
    execv(argv[4], argv + 4);
    _exit(127);
  }
  check(waitpid(pid, &status, 0) == pid && WIFSTOPPED(status), "start");
  ptrace(PTRACE_SETOPTIONS, pid, NULL, PTRACE_O_EXITKILL);
  // A library is mapped by some system call of the loader.
  while (!is_mapped(argv[1]))
    if (!resume(PTRACE_SYSCALL)) return 3;
  for (size_t i = 0; i < count; i++) places[i].byte = put(places[i].at, kBreakpoint);
  while (resume(PTRACE_CONT)) {
    Place* place = place_at(pc_now() - 1);
    if (!place) continue;  // a system call's end
    check(ptrace(PTRACE_POKEUSER, pid, offsetof(struct user, regs.rip), place->at) == 0, "pc");
    for (int alive = 1; place && alive; place = alive ? place_at(pc_now()) : NULL) {
      place->hits++;
      put(place->at, place->byte);
      // A repeated instruction (rep movsb) takes a step for each time and is one hit.
      do alive = resume(PTRACE_SINGLESTEP);
      while (alive && pc_now() == place->at);
      if (alive) put(place->at, kBreakpoint);
    }
    if (!WIFSTOPPED(status)) break;
  }
  FILE* out = fopen(argv[3], "w");
  check(out != NULL, argv[3]);
  for (size_t i = 0; i < count; i++)
    if (places[i].hits) fprintf(out, "%lx %lu\n", places[i].offset, places[i].hits);
  fclose(out);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 4;
}
