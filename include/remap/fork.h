// SPDX-License-Identifier: Apache-2.0
// A child made by fork shares the arena's memory with its parent and has none of its threads: it must not touch either.
#pragma once

#include <atomic>

namespace remap {

namespace detail {
extern std::atomic<unsigned> forks;
[[noreturn]] void throw_forked();
}  // namespace detail

// Grows by one in every forked child. An object remembers the value it was made under; another value means "forked".
inline unsigned fork_generation() noexcept { return detail::forks.load(std::memory_order_relaxed); }

// Throws ForkedProcess if this process was forked since `made_under` was read. One relaxed load.
inline void refuse_fork(unsigned made_under) {
  if (fork_generation() != made_under) detail::throw_forked();
}

}  // namespace remap
