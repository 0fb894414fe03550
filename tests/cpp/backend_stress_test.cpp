// Many threads at once, over host + fault + limit + trace. Meant for TSan; the checks hold without it too.
//
// Each thread has a region, pages, streams and events of its own, as the contract asks; all share the backend's tables.
// Cookies: a page is filled with its owner's number and must still hold it when looked at through another address.
#include <algorithm>
#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "remap/backends.h"
#include "remap/decorators.h"
#include "threads.h"

using namespace remap;
using namespace remap::testing;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kPage = 16384;
constexpr auto kForever = std::chrono::nanoseconds::max();

TEST(threads_share_one_backend) {
  constexpr std::size_t kThreads = 8, kRounds = 40, kPages = 4;
  auto trace = make_trace_backend(make_host_backend({kThreads * kPages * kPage, kPage, 2}));
  Limits limits;
  limits.page_bytes = kThreads * kPages * kPage;
  limits.streams = kThreads;
  auto backend = make_limit_backend(trace, limits);
  on_threads(kThreads, [&](std::size_t thread) {
    std::mt19937 random(static_cast<unsigned>(thread));
    const std::size_t bytes = kPages * kPage;
    std::byte* a = backend->reserve(bytes, kPage);
    std::byte* b = backend->reserve(bytes, kPage);
    std::byte* master = backend->allocate_host(bytes);
    const StreamHandle stream = backend->create_stream();
    const EventHandle event = backend->create_event(true);
    for (std::size_t round = 0; round < kRounds; ++round) {
      const auto cookie = static_cast<std::byte>(1 + thread * 16 + round % 16);
      std::vector<PageHandle> pages;
      for (std::size_t i = 0; i < kPages; ++i) pages.push_back(backend->create_page(kPage));
      backend->map(a, pages.data(), kPages, kPage);
      backend->set_access(a, bytes, Access::read_write);
      CHECK(std::all_of(a, a + bytes, [](std::byte value) { return value == std::byte{0}; }));  // nobody's bytes
      std::shuffle(pages.begin(), pages.end(), random);
      backend->map(b, pages.data(), kPages, kPage);
      backend->set_access(b, bytes, Access::read_write);
      std::fill(master, master + bytes, cookie);
      backend->copy(stream, b, master, bytes);
      backend->record(event, stream);
      CHECK(backend->synchronize(event, kForever));
      backend->exchange(a, b, bytes);
      backend->populate(a, bytes);
      for (const std::byte* at : {a, b}) {
        CHECK(std::all_of(at, at + bytes, [&](std::byte value) { return value == cookie; }));
      }
      backend->unmap(a, bytes);
      backend->unmap(b, bytes);
      for (const PageHandle page : pages) backend->destroy_page(page);
      (void)backend->usage();
    }
    backend->destroy_event(event);
    backend->destroy_stream(stream);
    backend->free_host(master, bytes);
    backend->release(a, bytes);
    backend->release(b, bytes);
  });
  const Usage end = backend->usage();
  CHECK(end.page_bytes == 0 && end.mapped_bytes == 0 && end.mappings == 0 && end.host_bytes == 0 && end.streams == 0);
  CHECK(trace->count(Call::create_page) == kThreads * kRounds * kPages && trace->log().size() == trace->count());
  auto fresh = make_host_backend({kThreads * kPages * kPage, kPage, 1});
  trace->set_logging(false);
  const ReplayResult result = replay(trace->log(), *fresh);  // whatever the interleaving was
  if (!result.ok) throw std::logic_error(result.message);
}

TEST(limits_hold_when_threads_race) {
  constexpr std::size_t kLimit = 5;
  Limits limits;
  limits.page_bytes = kLimit * kPage;
  auto backend = make_limit_backend(make_host_backend({64 * kPage, kPage, 1}), limits);
  std::atomic<std::size_t> held{0}, most{0}, refused{0};
  on_threads(8, [&](std::size_t) {
    for (int round = 0; round < 200; ++round) {
      try {
        const PageHandle page = backend->create_page(kPage);
        const std::size_t now = ++held;
        std::size_t seen = most;
        while (now > seen && !most.compare_exchange_weak(seen, now)) {
        }
        --held;
        backend->destroy_page(page);
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::limit_exceeded);
        ++refused;
      }
    }
  });
  CHECK(most <= kLimit && backend->usage().page_bytes == 0);
  std::vector<PageHandle> pages;
  for (std::size_t i = 0; i < kLimit; ++i) pages.push_back(backend->create_page(kPage));
  CHECK_ERROR(ErrorKind::limit_exceeded, backend->create_page(kPage));
}

// Streams wait for each other's events at random; whatever the pattern, everything ends.
TEST(streams_that_wait_for_each_other_always_end) {
  auto backend = make_host_backend({kPage, kPage, 1});
  std::vector<StreamHandle> streams;
  std::vector<EventHandle> events;
  for (int i = 0; i < 4; ++i) streams.push_back(backend->create_stream());
  for (int i = 0; i < 8; ++i) events.push_back(backend->create_event(true));
  std::vector<std::vector<std::byte>> targets(4, std::vector<std::byte>(4096));
  on_threads(4, [&](std::size_t thread) {
    std::mt19937 random(static_cast<unsigned>(thread) + 100);
    for (int i = 0; i < 400; ++i) {
      const EventHandle event = events[random() % events.size()];
      const EventHandle own = events[thread * 2 + random() % 2];
      backend->stream_wait(streams[thread], event);
      backend->fill(streams[thread], targets[thread].data(), static_cast<std::uint8_t>(i), 4096);
      backend->record(own, streams[thread]);
      if (i % 50 == 0) CHECK(backend->synchronize(own, kForever));
      (void)backend->query(event);
    }
  });
  for (const StreamHandle stream : streams) backend->destroy_stream(stream);
  for (const EventHandle event : events) CHECK(backend->query(event));
}

// Copies fail at random moments; every waiter gets an answer, and a new stream works.
TEST(failures_never_leave_anybody_waiting) {
  auto fault = make_fault_backend(make_host_backend({kPage, kPage, 1}));
  std::atomic<int> failed{0}, passed{0};
  fault->fail_async_copy(7, false);
  on_threads(4, [&](std::size_t thread) {
    std::vector<std::byte> from(8192, std::byte{1}), to(8192);
    const EventHandle event = fault->create_event(true);
    for (int round = 0; round < 40; ++round) {
      const StreamHandle stream = fault->create_stream();
      if (thread == 0 && round % 3 == 0) fault->fail_async_copy(1 + static_cast<std::uint64_t>(round) % 5);
      for (int i = 0; i < 3; ++i) fault->copy(stream, to.data(), from.data(), from.size());
      fault->record(event, stream);
      try {
        CHECK(fault->synchronize(event, kForever));
        CHECK(to == from);
        ++passed;
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::driver);
        ++failed;
      }
      fault->destroy_stream(stream);
      std::fill(to.begin(), to.end(), std::byte{0});
    }
  });
  CHECK(failed >= 1 && passed >= 1);
}

}  // namespace
