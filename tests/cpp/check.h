// The smallest test harness that needs no package: CHECK throws with file and line, RUN names a case, main returns failures.
#pragma once

#include <cstdio>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>

#include "remap/error.h"

#define CHECK(condition)                                                                              \
  do {                                                                                                \
    if (!(condition)) {                                                                               \
      std::ostringstream text_;                                                                       \
      text_ << __FILE__ << ":" << __LINE__ << ": CHECK(" << #condition << ") failed";                 \
      throw std::logic_error(text_.str());                                                            \
    }                                                                                                 \
  } while (false)

#define CHECK_ERROR(kind_, expression)                                                                \
  do {                                                                                                \
    bool threw_ = false;                                                                              \
    try {                                                                                             \
      (void)(expression);                                                                             \
    } catch (const remap::Error& error_) {                                                            \
      threw_ = error_.kind() == (kind_);                                                              \
    }                                                                                                 \
    if (!threw_) {                                                                                    \
      std::ostringstream text_;                                                                       \
      text_ << __FILE__ << ":" << __LINE__ << ": " << #expression << " did not throw " << #kind_;     \
      throw std::logic_error(text_.str());                                                            \
    }                                                                                                 \
  } while (false)

namespace remap::testing {

inline int& failures() {
  static int count = 0;
  return count;
}

template <typename Case>
void run(const char* name, Case&& body) {
  try {
    body();
    std::printf("ok    %s\n", name);
  } catch (const std::exception& error) {
    ++failures();
    std::printf("FAIL  %s\n      %s\n", name, error.what());
  }
  std::fflush(stdout);
}

}  // namespace remap::testing

#define RUN(function) remap::testing::run(#function, function)
