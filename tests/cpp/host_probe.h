// What the tests of the host backend ask the kernel.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

#include "backend/host_memory.h"
#include "check.h"
#include "touch.h"
#include "usage.h"

namespace remap::testing {

// Kernel mappings that lie in [begin, begin + bytes), and the largest access among them.
inline std::size_t kernel_mappings(const std::byte* begin, std::size_t bytes) {
  std::ifstream maps("/proc/self/maps");
  const auto low = reinterpret_cast<std::uintptr_t>(begin);
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    const std::size_t dash = line.find('-');
    const auto start = std::stoull(line.substr(0, dash), nullptr, 16);
    const auto end = std::stoull(line.substr(dash + 1), nullptr, 16);
    if (start < low + bytes && end > low) ++count;
  }
  return count;
}

inline Usage usage_of(const host::HostMemory& memory) {
  Usage usage;
  memory.add_usage(usage);
  return usage;
}

}  // namespace remap::testing
