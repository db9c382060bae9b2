// Plain C: no C++ library and no unwinder are in this process before the plug-in is.
#include <dlfcn.h>
#include <stdio.h>
#include "throws.h"
__attribute__((noinline)) int calls_plugin(int (*run)(int), int rounds) { return run(rounds) + 0; }
int main(void) {
  printf("%s\n", dlsym(RTLD_DEFAULT, "_Unwind_RaiseException") ? "there" : "not there");
  void *plugin = dlopen("./out/plugin.so", RTLD_NOW | RTLD_LOCAL);
  if (!plugin) return puts(dlerror()), 1;
  int (*run)(int) = (int (*)(int))dlsym(plugin, "run_throws");
  printf("%d\n", calls_plugin(run, 500));
}
