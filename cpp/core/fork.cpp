// SPDX-License-Identifier: Apache-2.0
#include "remap/fork.h"

#include <pthread.h>

#include "remap/error.h"

namespace remap {
namespace detail {

// Written only by the atfork handler, which runs in the child while it still has a single thread.
std::atomic<unsigned> forks{0};

void throw_forked() {
  throw Error(ErrorKind::forked_process,
              "This process was forked from the one that owns the arena and must not touch it. Nothing changed; start "
              "workers with the 'spawn' method, or open a session in the child.");
}

}  // namespace detail

namespace {

// When the library is loaded, so before there is anything that a child could touch.
struct Registration {
  Registration() {
    pthread_atfork(nullptr, nullptr, [] { detail::forks.fetch_add(1, std::memory_order_relaxed); });
  }
} registration;

}  // namespace
}  // namespace remap
