// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/first_touch.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>
#include <vector>

#include "backend/thread.h"
#include "remap/error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace remap::cuda {
namespace {

constexpr std::size_t kPiece = std::size_t{32} << 20;  // whole huge pages: no two threads touch one
constexpr std::size_t kMostThreads = 8;

int touch_piece(std::byte* at, std::size_t bytes) {
  if (::madvise(at, bytes, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;
  const auto os_page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  for (std::size_t offset = 0; offset < bytes; offset += os_page) {  // Linux before 5.14
    auto* byte = reinterpret_cast<volatile std::byte*>(at + offset);
    *byte = *byte;
  }
  return 0;
}

// The threads' shared state. Pieces are handed out one by one, so that a thread that is held up holds up one piece. Nothing else
// is shared: pieces do not overlap, and who started the threads joins them before it looks at the memory.
class Pieces {
 public:
  Pieces(std::byte* at, std::size_t bytes) : at_(at), bytes_(bytes) {}

  void work() noexcept {
    while (failure_.load(std::memory_order_relaxed) == 0) {
      const std::size_t offset = next_.fetch_add(kPiece, std::memory_order_relaxed);
      if (offset >= bytes_) return;
      const int code = touch_piece(at_ + offset, std::min(kPiece, bytes_ - offset));
      int none = 0;
      if (code != 0) failure_.compare_exchange_strong(none, code, std::memory_order_relaxed);
    }
  }
  int failure() const noexcept { return failure_.load(std::memory_order_relaxed); }

 private:
  std::byte* const at_;
  const std::size_t bytes_;
  std::atomic<std::size_t> next_{0};
  std::atomic<int> failure_{0};
};

// Threads that are joined whatever happens: they work on the frame that this stands in.
class Helpers {
 public:
  explicit Helpers(std::size_t most) { threads_.reserve(most); }
  ~Helpers() {
    for (std::thread& each : threads_) each.join();
  }
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;

  bool start(Pieces& pieces) {
    try {
      threads_.push_back(start_thread("remap-touch", [&pieces] { pieces.work(); }));
    } catch (const Error&) {
      return false;  // no more threads for this process: those that run do the rest
    }
    return true;
  }

 private:
  std::vector<std::thread> threads_;
};

}  // namespace

std::size_t first_touch_threads(std::size_t bytes) noexcept {
  const std::size_t processors = std::max(1U, std::thread::hardware_concurrency());
  return std::max<std::size_t>(1, std::min({processors, kMostThreads, bytes / kPiece}));
}

int first_touch(std::byte* at, std::size_t bytes, std::size_t threads) {
  Pieces pieces(at, bytes);
  {
    Helpers helpers(threads);
    for (std::size_t i = 1; i < threads && helpers.start(pieces); ++i) {
    }
    pieces.work();
  }
  return pieces.failure();
}

}  // namespace remap::cuda
