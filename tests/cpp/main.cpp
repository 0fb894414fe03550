// Runs the tests of the program that it is linked into: all of them, or those that are named.
#include <cstdlib>
#include <cstring>

#include "check.h"

int main(int argc, char** argv) {
  ::unsetenv("REMAP_HOST_BUDGET");  // what holds here the tests say themselves
  int failures = 0;
  int ran = 0;
  for (const auto& [name, body] : remap::testing::cases()) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) wanted = wanted || std::strcmp(argv[i], name) == 0;
    if (!wanted) continue;
    ++ran;
    try {
      body();
      std::printf("ok    %s\n", name);
    } catch (const std::exception& error) {
      ++failures;
      std::printf("FAIL  %s\n      %s\n", name, error.what());
    }
    std::fflush(stdout);
  }
  return ran == 0 ? 1 : failures;
}
