#include "remap/fork.h"

#include <pthread.h>

#include <atomic>

#include "remap/error.h"

namespace remap {
namespace {

// Written only by the atfork handler, which runs in the child while it still has a single thread.
std::atomic<unsigned> generation{0};

void in_child() { generation.fetch_add(1, std::memory_order_relaxed); }

struct Registration {
  Registration() { pthread_atfork(nullptr, nullptr, in_child); }
};

}  // namespace

unsigned fork_generation() noexcept {
  static const Registration registration;
  return generation.load(std::memory_order_relaxed);
}

void refuse_fork(unsigned made_under) {
  if (fork_generation() != made_under) {
    throw Error(ErrorKind::forked_process,
                "This process was forked from the one that owns the arena and must not touch it. Nothing changed; start "
                "workers with the 'spawn' method, or open a session in the child.");
  }
}

}  // namespace remap
