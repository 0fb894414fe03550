// The cuda backend from many threads: copies go on while mappings change elsewhere, streams and events come and go, and host
// memory is locked and given back. Run under TSan and ASan as well.
#include <cstring>

#include "cuda_world.h"
#include "threads.h"

namespace {

using namespace remap;
using namespace remap::testing;
using remap::EventHandle;  // and not the driver's
using remap::StreamHandle;

constexpr int kRounds = 150;

// Host -> one page -> another page -> host, each round with other bytes.
void copy_around(Backend& backend, int seed) {
  Shown shown(backend, 2);
  std::byte* host = backend.allocate_host(2 * kPage);
  const StreamHandle there = backend.create_stream();
  const StreamHandle back = backend.create_stream();
  const EventHandle arrived = backend.create_event(true);
  const EventHandle done = backend.create_event(true);
  for (int round = 0; round < kRounds; ++round) {
    const int value = (seed + round) % 251;
    std::memset(host, value, kPage);
    backend.copy(there, shown.at, host, kPage);
    backend.copy(there, shown.at + kPage, shown.at, kPage);
    backend.record(arrived, there);
    backend.stream_wait(back, arrived);
    backend.copy(back, host + kPage, shown.at + kPage, kPage);
    backend.record(done, back);
    CHECK(backend.synchronize(done, kWait) && backend.query(arrived));
    CHECK(all_are(host + kPage, value, kPage));
    CHECK(backend.elapsed(arrived, done) >= 0);
  }
  backend.destroy_event(arrived);
  backend.destroy_event(done);
  backend.destroy_stream(there);
  backend.destroy_stream(back);
  backend.free_host(host, 2 * kPage);
  shown.release();
}

// What the executor's worker does: unmap, map, one set-access, with two regions that show the same pages in turn.
void change_mappings(Backend& backend) {
  constexpr std::size_t kCount = 4;
  std::byte* at = backend.reserve(2 * kCount * kPage, kPage);
  std::vector<PageHandle> pages;
  for (std::size_t i = 0; i < kCount; ++i) pages.push_back(backend.create_page(kPage));
  std::byte* shown = nullptr;
  for (int round = 0; round < 2 * kRounds; ++round) {
    std::byte* next = at + (round % 2) * kCount * kPage;
    if (shown != nullptr) backend.unmap(shown, kCount * kPage);
    backend.map(next, pages.data(), kCount, kPage);
    backend.set_access(next, kCount * kPage, Access::read_write);
    if (shown != nullptr) CHECK(next[kPage] == static_cast<std::byte>(round - 1));
    next[kPage] = static_cast<std::byte>(round);
    shown = next;
  }
  backend.unmap(shown, kCount * kPage);
  backend.release(at, 2 * kCount * kPage);
  for (const PageHandle page : pages) backend.destroy_page(page);
}

void come_and_go(Backend& backend) {
  for (int round = 0; round < kRounds; ++round) {
    const StreamHandle stream = backend.create_stream();
    const EventHandle event = backend.create_event(true);
    backend.record(event, stream);
    CHECK(backend.adopt_stream(1) == 1);
    backend.stream_wait(1, event);
    backend.destroy_stream(stream);
    CHECK(backend.query(event));
    backend.destroy_event(event);
    backend.forget_stream(1);
  }
  // Nobody else waits for the default stream: on a busy machine it may not have come to all of these by the end of the test.
  const EventHandle event = backend.create_event(false);
  CHECK(backend.adopt_stream(1) == 1);
  backend.record(event, 1);
  CHECK(backend.synchronize(event, std::chrono::nanoseconds::max()));
  backend.forget_stream(1);
  backend.destroy_event(event);
}

void lock_and_free(Backend& backend) {
  std::vector<std::byte> own(3 * kPage);
  for (int round = 0; round < kRounds; ++round) {
    std::byte* host = backend.allocate_host(kPage);
    backend.register_host(own.data(), own.size(), HostUse::locked);
    std::memset(host, round, kPage);
    backend.unregister_host(own.data(), own.size());
    backend.free_host(host, kPage);
  }
}

CLEAN_TEST(everything_at_once) {
  emulate();
  configure("jitter_us", 200);  // copies begin late, so that more goes on at once
  const auto backend = open_cuda();
  Looking looking([&] { CHECK(backend->usage().streams <= 8); });
  together({[&] { copy_around(*backend, 1); }, [&] { copy_around(*backend, 100); }, [&] { change_mappings(*backend); },
            [&] { come_and_go(*backend); }, [&] { lock_and_free(*backend); }});
  looking.stop();
  CHECK(same(backend->usage(), Usage{}));
}

CLEAN_TEST(backends_open_and_close_side_by_side) {
  emulate();
  on_threads(3, [](std::size_t) {
    for (int round = 0; round < 20; ++round) {
      const auto backend = open_cuda();
      Shown shown(*backend, 2);
      const StreamHandle stream = backend->create_stream();
      backend->fill(stream, shown.at, 1, kPage);
      // Left to the destructor.
    }
  });
}

}  // namespace
