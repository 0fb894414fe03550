// SPDX-License-Identifier: Apache-2.0
// Filling memory in: the kernel finds and zeroes an OS page when it is touched first. For all that a model's master copies take,
// that is worth several threads.
#pragma once

#include <cstddef>

namespace remap::cuda {

// How many threads fill `bytes` in: as many as the machine has, up to eight (the kernel's own locks and the memory's bandwidth
// leave little to win beyond), and one only for work done before another has started.
std::size_t first_touch_threads(std::size_t bytes) noexcept;

// Fills in all of [at, at + bytes): private or shared memory of the caller's that may be written, which no other code uses yet;
// `at` and `bytes` are multiples of an OS page. Contents stay as they are. 0, or the errno of what failed first: then some of the
// range is filled in, and no thread works on it any more.
//
// The caller is one of the threads. If the system gives fewer than were wanted, those do it. Pages are placed on the NUMA node
// of the thread that touches them, and new threads run where the caller may: a caller that wants one node binds the process to
// it.
int first_touch(std::byte* at, std::size_t bytes, std::size_t threads);

}  // namespace remap::cuda
