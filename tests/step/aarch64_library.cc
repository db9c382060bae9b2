// Compiled code of all kinds, most of it the C and C++ libraries': sorting by callbacks, containers, streams, regular expressions,
// exceptions through them.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <iostream>
#include <map>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

static int by_value(const void* a, const void* b) { return *static_cast<const int*>(a) - *static_cast<const int*>(b); }

static long containers(int seed) {
  std::map<std::string, std::vector<double>> all;
  for (int i = 0; i < 20; i++) all[std::to_string(i * 7919 % 13)].push_back(std::sqrt(i + seed) * 1.5);
  std::ostringstream out;
  for (auto& [name, values] : all) {
    std::sort(values.begin(), values.end(), std::greater<>());
    out << name << ' ' << values.front() << '\n';
  }
  return static_cast<long>(out.str().size());
}

static long words(const std::string& text) {
  static const std::regex number("[0-9]+x?");
  long sum = 0;
  for (std::sregex_iterator at(text.begin(), text.end(), number), end; at != end; ++at) sum += std::stol(at->str());
  return sum;
}

static long thrown(int n) {
  try {
    if (n % 3 == 0) throw std::runtime_error("three");
    return static_cast<long>(std::vector<int>(4).at(static_cast<size_t>(n)));
  } catch (const std::out_of_range& e) {
    return static_cast<long>(std::strlen(e.what()));
  } catch (const std::exception& e) {
    return e.what()[0];
  }
}

int main() {
  long sum = 0;
  for (int round = 0; round < 1000; round++) {
    int numbers[24];
    for (int i = 0; i < 24; i++) numbers[i] = (i * 7919 + round) % 101;
    qsort(numbers, 24, sizeof numbers[0], by_value);
    char text[200];
    time_t then = round * 86400L;
    tm parts;
    snprintf(text, sizeof text, "%d %5.3f %s %lx %d", numbers[3], numbers[7] / 3.0,
             asctime_r(gmtime_r(&then, &parts), text + 100), sum, round);
    sum += containers(round) + words(text) + thrown(round) + static_cast<long>(strtod(text, nullptr));
    std::cout << sum << std::endl;
  }
}
