// The sim backend: its arithmetic against integrals, on random traffic, and many threads at once (meant for TSan).
// What it does with simple numbers is in tests/python/test_sim_backend.py, the contract in test_backend_contract*.py.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <random>
#include <vector>

#include "backend/sim/links.h"
#include "check.h"
#include "remap/backends.h"
#include "remap/sim.h"
#include "threads.h"
#include "usage.h"

using namespace remap;
using namespace remap::testing;

namespace {

constexpr std::size_t kPage = 4096;

SimOptions options() {
  SimOptions made;
  made.capacity_bytes = 64 * kPage;
  made.granularity = kPage;
  made.h2d_bytes_per_s = 3e6;
  made.d2h_bytes_per_s = 2e6;
  made.hbm_bytes_per_s = 8e6;
  made.duplex = 0.6;
  made.copy_setup_s = 1e-3;
  return made;
}

bool close(double a, double b) { return std::fabs(a - b) <= 1e-9 * (1 + std::fabs(a) + std::fabs(b)); }

// How long the engine moves bytes between `from` and `to`, weighted by each copy's share if wanted.
double moving(const std::deque<sim::Busy>& engine, double from, double to, bool weighted) {
  double sum = 0;
  for (const sim::Busy& busy : engine) {
    sum += std::max(0.0, std::min(to, busy.end) - std::max(from, busy.moving)) * (weighted ? busy.share : 1.0);
  }
  return sum;
}

// The smallest end at which `done(end)` has come to `wanted`; done grows.
template <typename Done>
double solve(double begin, double wanted, Done&& done) {
  double low = begin;
  double high = begin + 1;
  while (done(high) < wanted) high = begin + 2 * (high - begin);
  for (int i = 0; i < 200; ++i) {
    const double middle = (low + high) / 2;
    (done(middle) < wanted ? low : high) = middle;
  }
  return high;
}

TEST(copies_take_the_first_gap_and_move_all_of_their_bytes) {
  std::mt19937 random(7);
  const SimOptions made = options();
  for (int round = 0; round < 30; ++round) {
    sim::Links links(made);
    double now = 0;
    for (int count = 0; count < 60; ++count) {
      const bool down = random() % 2 == 0;
      const SimRoute route = down ? SimRoute::to_device : SimRoute::to_host;
      const double rate = down ? made.h2d_bytes_per_s : made.d2h_bytes_per_s;
      const double earliest = now + static_cast<double>(random() % 1000) * 1e-4;
      const std::size_t bytes = 1 + random() % 60000;
      const std::deque<sim::Busy> before = links.busy(route);
      const std::deque<sim::Busy> other = links.busy(down ? SimRoute::to_host : SimRoute::to_device);
      const auto ends = [&](double start) {
        const double first = start + made.copy_setup_s;
        return solve(first, static_cast<double>(bytes),
                     [&](double end) { return rate * (end - first - (1 - made.duplex) * moving(other, first, end, false)); });
      };
      const auto collides = [&](double start, double end) {
        return std::any_of(before.begin(), before.end(),
                           [&](const sim::Busy& busy) { return busy.start < end - 1e-12 && start < busy.end - 1e-12; });
      };
      const double end = links.copy(route, earliest, bytes);

      const std::deque<sim::Busy>& after = links.busy(route);
      CHECK(after.size() == before.size() + 1);
      for (std::size_t i = 1; i < after.size(); ++i) CHECK(after[i - 1].end <= after[i].start);
      const auto placed = std::find_if(after.begin(), after.end(), [&](const sim::Busy& busy) { return busy.end == end; });
      CHECK(placed != after.end() && placed->start >= earliest);
      CHECK(close(placed->moving, placed->start + made.copy_setup_s));
      CHECK(close(end, ends(placed->start)));
      CHECK(close(placed->share, static_cast<double>(bytes) / (end - placed->moving) / made.hbm_bytes_per_s));
      // Wherever else it could have begun earlier, it would have met another one.
      std::vector<double> starts{earliest};
      for (const sim::Busy& busy : before) starts.push_back(busy.end);
      for (const double start : starts) {
        if (start >= earliest && start < placed->start - 1e-12) CHECK(collides(start, ends(start)));
      }
      CHECK(!collides(placed->start, placed->end));
      if (random() % 8 == 0) {
        now += static_cast<double>(random() % 100) * 1e-4;
        links.forget_before(now);
        for (const sim::Busy& busy : links.busy(route)) CHECK(busy.end > now);
      }
    }
  }
}

TEST(kernels_lose_what_copies_take) {
  std::mt19937 random(8);
  for (int round = 0; round < 300; ++round) {
    SimOptions made = options();
    made.duplex = round % 2 == 0 ? 1.0 : 0.6;
    sim::Links links(made);
    for (int count = 0; count < 12; ++count) {
      const SimRoute route = random() % 2 == 0 ? SimRoute::to_device : SimRoute::to_host;
      links.copy(route, static_cast<double>(random() % 1000) * 1e-4, 1 + random() % 60000);
    }
    const double start = static_cast<double>(random() % 1500) * 1e-4;
    const double seconds = static_cast<double>(random() % 1000) * 1e-4;
    const double end = links.compute(start, seconds);
    const double lost = moving(links.busy(SimRoute::to_device), start, end, true) +
                        moving(links.busy(SimRoute::to_host), start, end, true);
    CHECK(end >= start + seconds);
    CHECK(close(end - start - lost, seconds));
    made.contention = false;
    CHECK(links.compute(start, seconds) == start + seconds);  // the options are read when they are needed
  }
}

// Every thread has streams, events and a region of its own; all share the engines and the clock. Two of them are hosts.
void threads_share_one_backend(bool backed) {
  constexpr std::size_t kThreads = 6, kRounds = 200, kPages = 4;
  SimOptions made = options();
  made.backed = backed;
  made.map_s = made.unmap_s = made.set_access_s = made.create_page_s = 1e-6;
  auto backend = make_sim_backend(made);
  std::atomic<std::uint64_t> copies{0};
  on_threads(kThreads, [&](std::size_t thread) {
    const std::size_t bytes = kPages * kPage;
    std::byte* at = backend->reserve(bytes, kPage);
    std::byte* host = backend->allocate_host(bytes);
    std::vector<PageHandle> pages;
    for (std::size_t i = 0; i < kPages; ++i) pages.push_back(backend->create_page(kPage));
    const StreamHandle stream = backend->create_stream();
    const EventHandle begin = backend->create_event(true);
    const EventHandle end = backend->create_event(true);
    double last = 0;
    for (std::size_t round = 0; round < kRounds; ++round) {
      backend->map(at, pages.data(), kPages, kPage);
      backend->set_access(at, bytes, Access::read_write);
      backend->record(begin, stream);
      backend->copy(stream, at, host, bytes);
      backend->copy(stream, host, at, kPage);
      copies += 2;
      backend->fill(stream, at, static_cast<std::uint8_t>(thread), bytes);
      const double kernel = backend->compute(stream, 1e-4);
      CHECK(backend->stream_end(stream) == kernel);
      backend->record(end, stream);
      if (thread < 2) {
        backend->finish(stream);
        CHECK(backend->query(end));
        backend->advance(1e-6);
      } else {
        while (!backend->synchronize(end, std::chrono::microseconds(3000))) {
        }
        CHECK(backend->query(end));
      }
      CHECK(backend->now() >= kernel && backend->now() > last);
      last = backend->now();
      const double spent = static_cast<double>(bytes) / made.h2d_bytes_per_s + 1e-4;
      CHECK(backend->elapsed(begin, end) >= spent);
      if (backed) CHECK(static_cast<std::size_t>(at[bytes - 1]) == thread);
      backend->unmap(at, bytes);
    }
    backend->destroy_event(begin);
    backend->destroy_event(end);
    backend->destroy_stream(stream);
    for (const PageHandle page : pages) backend->destroy_page(page);
    backend->free_host(host, bytes);
    backend->release(at, bytes);
  });
  backend->join();
  CHECK(empty(backend->usage()));
  const SimTraffic down = backend->traffic(SimRoute::to_device);
  const SimTraffic up = backend->traffic(SimRoute::to_host);
  CHECK(down.copies + up.copies == copies);
  // An engine does one copy at a time, and somebody waited for each.
  CHECK(down.busy_s <= backend->now() && up.busy_s <= backend->now() && up.busy_s > 0);
}

TEST(threads_share_one_backend_without_bytes) { threads_share_one_backend(false); }
TEST(threads_share_one_backend_with_bytes) { threads_share_one_backend(true); }

}  // namespace
