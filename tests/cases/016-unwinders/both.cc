// Its own exceptions go by libgcc, those of the plug-in by LLVM's unwinder, which is bound before the global scope.
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include "throws.h"
static const char *unwinder_of(const char *plugin) {
  static char text[4096];
  void *handle = plugin ? dlopen(plugin, RTLD_NOW | RTLD_NOLOAD) : RTLD_DEFAULT;
  Dl_info info;
  if (!dladdr(dlsym(handle, "_Unwind_RaiseException"), &info)) return "?";
  const char *slash = std::strrchr(info.dli_fname, '/');
  return std::strcpy(text, slash ? slash + 1 : info.dli_fname);
}
int main() {
  void *plugin = dlopen("./out/plugin-llvm.so", RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
  if (!plugin) return std::puts(dlerror()), 1;
  auto other = reinterpret_cast<int (*)(int)>(dlsym(plugin, "run_throws"));
  std::printf("%s\n", unwinder_of(nullptr));
  std::printf("%s\n", unwinder_of("./out/plugin-llvm.so"));
  int mine = 0, its = 0;
  for (int i = 0; i < 10; i++) mine += run_throws(50), its += other(50);
  std::printf("%d %d\n", mine, its);
}
