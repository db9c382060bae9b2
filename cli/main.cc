#include <cstdio>

int main() {
  std::puts("sonde 0.1.0");
  return 0;
}
