#include <cstdio>
#include "throws.h"
int main() { std::printf("%d\n", run_throws(500)); }
