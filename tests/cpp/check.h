// The smallest test harness that needs no package: CHECK throws with file and line, TEST names a case, and main.cpp
// runs them.
#pragma once

#include <cstdio>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

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

struct Case {
  const char* name;
  void (*body)();
};

// In the order in which they stand in their file.
inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
inline bool add(const char* name, void (*body)()) {
  cases().push_back({name, body});
  return true;
}

}  // namespace remap::testing

#define TEST(name)                                                                 \
  void name();                                                                     \
  [[maybe_unused]] const bool name##_added = remap::testing::add(#name, name);      \
  void name()
