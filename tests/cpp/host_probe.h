// What the tests of the host backend ask the kernel, and small helpers over Usage and Error.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <string>

#include "backend/host_memory.h"
#include "check.h"
#include "usage.h"

namespace remap::testing {

// Asks the kernel, which says EFAULT where the process would get SIGSEGV.
inline bool readable(const std::byte* at) {
  int pipe_ends[2];
  CHECK(::pipe(pipe_ends) == 0);
  const bool ok = ::syscall(SYS_write, pipe_ends[1], at, 1) == 1;
  ::close(pipe_ends[0]);
  ::close(pipe_ends[1]);
  return ok;
}
inline bool writable(std::byte* at) {
  int pipe_ends[2];
  CHECK(::pipe(pipe_ends) == 0);
  const char byte = 'w';
  CHECK(::write(pipe_ends[1], &byte, 1) == 1);
  const bool ok = ::syscall(SYS_read, pipe_ends[0], at, 1) == 1;
  ::close(pipe_ends[0]);
  ::close(pipe_ends[1]);
  return ok;
}

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

inline std::int64_t field(const Error& error, const std::string& name) {
  for (const auto& one : error.fields()) {
    if (one.first == name) return std::get<std::int64_t>(one.second);
  }
  throw std::logic_error("no field " + name);
}

inline Usage usage_of(const host::HostMemory& memory) {
  Usage usage;
  memory.add_usage(usage);
  return usage;
}

}  // namespace remap::testing
