// Memory is filled in by several threads: all of it, once, or none is left at work when it fails.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "backend/cuda/first_touch.h"
#include "backend/cuda/host_budget.h"
#include "check.h"

namespace {

using namespace remap::cuda;

constexpr std::size_t kMiB = std::size_t{1} << 20;

struct Mapped {
  explicit Mapped(std::size_t size)
      : bytes(size), at(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    CHECK(at != MAP_FAILED);
  }
  ~Mapped() { munmap(at, bytes); }
  std::byte* get() const { return static_cast<std::byte*>(at); }
  std::size_t resident() const { return resident_bytes(reinterpret_cast<std::uintptr_t>(at), bytes); }
  const std::size_t bytes;
  void* const at;
};

TEST(threads_are_for_what_is_large) {
  CHECK(first_touch_threads(1) == 1 && first_touch_threads(kMiB) == 1);
  const std::size_t most = first_touch_threads(std::size_t{1} << 40);
  CHECK(most >= 1 && most <= 8 && most <= std::max(1U, std::thread::hardware_concurrency()));
}

TEST(all_of_it_is_there_and_as_it_was) {
  const auto os_page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (const std::size_t bytes : {os_page, 64 * kMiB, 97 * kMiB + os_page}) {
    for (const std::size_t threads : {std::size_t{1}, std::size_t{3}, std::size_t{8}}) {  // more than there are pieces, too
      const Mapped memory(bytes);
      memory.get()[bytes - 1] = std::byte{7};
      CHECK(first_touch(memory.get(), bytes, threads) == 0);
      CHECK(memory.resident() == bytes);
      CHECK(memory.get()[bytes - 1] == std::byte{7} && memory.get()[0] == std::byte{0});
    }
  }
}

TEST(a_failure_ends_it) {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14: before that touching a hole ends the process
  {
    const Mapped memory(static_cast<std::size_t>(sysconf(_SC_PAGESIZE)));
    if (madvise(memory.get(), memory.bytes, kPopulateWrite) != 0) return;
  }
  const auto os_page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (const std::size_t threads : {std::size_t{1}, std::size_t{4}}) {
    const Mapped memory(128 * kMiB);
    CHECK(munmap(memory.get() + 40 * kMiB, os_page) == 0);  // a hole in the second piece
    CHECK(first_touch(memory.get(), memory.bytes, threads) == ENOMEM);
  }
}

}  // namespace
