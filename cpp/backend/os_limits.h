// SPDX-License-Identifier: Apache-2.0
// Which limit of the process or of the machine stands behind a system call that the kernel refused: errno alone does not say.
//
// Reading the limits and judging them are separate, so that the judgement can be tested on any numbers. Both happen behind a
// refusal only, and reading takes no memory: there may be none.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "remap/error.h"

namespace remap::os {

constexpr std::size_t kNoLimit = ~std::size_t{0};

struct Limit {
  std::size_t in_use = 0;
  std::size_t most = kNoLimit;
};

struct Limits {
  Limit addresses;  // bytes; RLIMIT_AS
  Limit data;       // bytes of private memory that may be written; RLIMIT_DATA
  Limit locked;     // bytes; RLIMIT_MEMLOCK
  Limit mappings;   // vm.max_map_count
  Limit committed;  // bytes of the whole machine, where it never promises more than it has; vm.overcommit_memory
  Limit files;      // descriptors; RLIMIT_NOFILE
  Limit file_size;  // bytes; RLIMIT_FSIZE
};

// As of now.
Limits read_limits() noexcept;

// The amounts that the refused call would have added.
struct Asked {
  std::size_t addresses = 0;
  std::size_t data = 0;
  std::size_t mappings = 0;
  std::size_t file_size = 0;
};

// The error limit_exceeded, if a call that asked for this could only be refused: `fields`, and limited_by ("RLIMIT_AS",
// "RLIMIT_DATA", "RLIMIT_MEMLOCK", "RLIMIT_NOFILE", "RLIMIT_FSIZE", "vm.max_map_count", "vm.overcommit_memory" or "address space"),
// requested, in_use, limit and errno.
std::optional<Error> limit_met(const std::string& call, int code, const Asked& asked, const Error::Fields& fields,
                               const Limits& limits);

// The error for a refused call: limit_met(); else, for want of memory (ENOMEM), out_of_memory (limited_by "memory", requested,
// errno); else driver (errno).
Error refusal(const std::string& call, int code, const Asked& asked, const Error::Fields& fields);

// Throws what refusal() says if files may not be so long. The kernel would send a signal that ends the process.
void require_file_size(const std::string& call, std::size_t bytes, const Error::Fields& fields);

}  // namespace remap::os
