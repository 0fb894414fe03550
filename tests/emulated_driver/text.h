// Numbers in the texts of violations.
#pragma once

#include <cstdio>
#include <string>

namespace remap::emulated {

inline std::string hex(unsigned long long at) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", at);
  return text;
}

// "[at, at + bytes)"
inline std::string range_text(unsigned long long at, std::size_t bytes) {
  return "[" + hex(at) + ", " + hex(at + bytes) + ")";
}

}  // namespace remap::emulated
