#include "remap/fork.h"

#include <pthread.h>

#include <atomic>

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

}  // namespace remap
