// Plans, the re-pointing worker, prefetcher passes and a reader of the tables at the same time, for the sanitizers.
//
// One thread is the engine and the session: it applies plans, configures the prefetcher and makes passes. The worker
// re-points. A third thread looks at the arena all the time. Every byte that a pass reads must be its layer's, and every
// byte of KV memory what was last written there.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

#include "../../python/prefetcher_observer.h"
#include "check.h"
#include "remap/arena.h"
#include "remap/backends.h"
#include "remap/executor.h"
#include "remap/prefetcher.h"

using namespace remap;

namespace {

constexpr std::size_t kPage = 64 << 10;
constexpr std::size_t kLayers = 6;
constexpr std::size_t kLayerPages = 2;
constexpr TenantId kTenant = 1;

int rounds() {
  const char* text = std::getenv("REMAP_STRESS_ROUNDS");
  return text != nullptr ? std::atoi(text) : 150;
}

struct World {
  std::shared_ptr<Backend> backend;
  std::shared_ptr<Arena> arena;
  std::unique_ptr<Executor> executor;
  std::shared_ptr<Prefetcher> prefetcher;
  std::shared_ptr<PrefetcherObserver> observer;
  std::vector<std::vector<std::byte>> masters;
  std::vector<std::vector<PageId>> homes;
  std::vector<RegionId> regions;
  RegionId ring = 0, kv = 0;
  std::vector<LayerId> streamed;

  explicit World(Mode mode) {
    HostOptions options;
    options.capacity_bytes = kLayers * kLayerPages * kPage;
    options.page_bytes = kPage;
    backend = make_host_backend(options);
    arena = std::make_shared<Arena>(backend, ArenaOptions{options.capacity_bytes, kPage, mode});
    executor = std::make_unique<Executor>(arena);
    std::vector<LayerMemory> memory;
    for (std::size_t i = 0; i < kLayers; ++i) {
      homes.push_back(arena->take(kLayerPages, Owner::params, kTenant));
      regions.push_back(arena->add_layer_region(kTenant, "layer", homes[i]));
      masters.emplace_back(kLayerPages * kPage, static_cast<std::byte>(i + 1));
      std::memcpy(arena->address(regions[i]), masters[i].data(), masters[i].size());
    }
    for (std::size_t i = 0; i < kLayers; ++i) memory.push_back({arena->address(regions[i]), masters[i].data(), masters[i].size()});
    ring = arena->add_ring_region(kTenant, kLayerPages);
    arena->designate_ring(ring, 0, homes[0]);
    kv = arena->add_kv_region(kTenant, kLayers * kLayerPages);
    for (std::size_t i = 0; i < kLayers; ++i) arena->designate(kv, i * kLayerPages, homes[i]);
    prefetcher = std::make_shared<Prefetcher>(backend, memory);
    observer = std::make_shared<PrefetcherObserver>(prefetcher);
  }

  bool is(const std::vector<LayerId>& set, LayerId layer) const {
    return std::find(set.begin(), set.end(), layer) != set.end();
  }

  // Streams `next` (layer 0's home is the ring) instead of what is streamed now.
  void change(const std::vector<LayerId>& next) {
    bool settled = is(next, 0) == is(streamed, 0);
    for (const LayerId layer : next) settled = settled && (is(streamed, layer) || prefetcher->ready(layer));
    if (!settled) {
      // Copies in flight, or about to be when the worker is done with a region, write where pages change hands now.
      executor->drain();
      prefetcher->drain();
    }
    const bool fresh = !is(streamed, 0);
    Plan plan;
    plan.epoch = arena->epoch();
    StreamConfiguration configuration;
    const auto own = [&](LayerId layer, Owner from, Owner to) {
      Step step;
      step.kind = Step::Kind::set_owner;
      step.set_owner = {homes[layer], from, to, kTenant};
      plan.steps.push_back(step);
    };
    const auto show = [&](RegionId region, const std::vector<PageId>& pages, bool deferred, LayerId layer) {
      Step step;
      step.kind = Step::Kind::point;
      step.point = {region, 0, pages, deferred, layer};
      plan.steps.push_back(step);
      if (deferred && arena->mode() == Mode::aliased) configuration.held.push_back(layer);
    };
    for (LayerId layer = 0; layer < kLayers; ++layer) {
      if (is(streamed, layer) && !is(next, layer)) {
        own(layer, layer == 0 ? Owner::ring : Owner::kv, Owner::params);
        configuration.home.push_back({layer, 0, kLayerPages * kPage});
      }
    }
    if (is(next, 0) && !is(streamed, 0)) own(0, Owner::params, Owner::ring);
    if (is(next, 0)) show(ring, homes[0], false, 0);
    for (LayerId layer = 1; layer < kLayers; ++layer) {
      if (is(streamed, layer) != is(next, layer)) show(regions[layer], is(next, layer) ? homes[0] : homes[layer], true, layer);
    }
    for (LayerId layer = 1; layer < kLayers; ++layer) {
      if (is(next, layer) && !is(streamed, layer)) own(layer, Owner::params, Owner::kv);
    }
    executor->apply(plan);
    // The pages are KV now, whatever the layers' regions still show: written at once.
    for (LayerId layer = 1; layer < kLayers; ++layer) {
      if (is(next, layer)) std::memset(arena->address(kv) + layer * kLayerPages * kPage, 0xDF, kLayerPages * kPage);
    }
    configuration.streamed = next;
    if (!next.empty()) configuration.ring = {arena->address(ring)};
    configuration.ring_bytes = kLayerPages * kPage;
    configuration.fresh = fresh;
    prefetcher->configure(configuration);
    executor->commit(observer);
    streamed = next;
  }

  void pass(std::mt19937_64& random) {
    const bool whole = random() % 4 != 0;
    const std::size_t stop = whole ? kLayers : random() % kLayers;
    prefetcher->begin_pass();
    for (LayerId layer = 0; layer < stop; ++layer) {
      CHECK(prefetcher->wait(layer));
      CHECK(std::memcmp(arena->address(regions[layer]), masters[layer].data(), masters[layer].size()) == 0);
      prefetcher->done(layer);
    }
    if (whole) prefetcher->end_pass();
    else if (prefetcher->in_pass()) prefetcher->end_pass();
    for (LayerId layer = 1; layer < kLayers; ++layer) {
      if (!is(streamed, layer)) continue;
      const std::byte* at = arena->address(kv) + layer * kLayerPages * kPage;
      for (std::size_t i = 0; i < kLayerPages * kPage; i += 61) CHECK(at[i] == std::byte{0xDF});
    }
  }
};

void plans_passes_and_readers(Mode mode) {
  World world(mode);
  std::atomic<bool> stop{false};
  std::atomic<bool> wrong{false};
  std::thread reader([&] {
    std::uint64_t epoch = 0;
    while (!stop.load()) {
      try {
        world.arena->check();
      } catch (const std::logic_error&) {
        // Between two steps of a plan nobody sees the tables, so this can only be a broken invariant.
        wrong.store(true);
      }
      const PageCounts counts = world.arena->counts();
      std::size_t sum = 0;
      for (const std::size_t count : counts.by_owner) sum += count;
      if (sum != counts.total || world.arena->epoch() < epoch) wrong.store(true);
      epoch = world.arena->epoch();
      for (const RegionId region : world.regions) {
        if (world.arena->shown(region).size() != kLayerPages) wrong.store(true);
      }
      (void)world.executor->failed_points();
      (void)world.prefetcher->stats();
      (void)world.arena->free_pages();
      std::this_thread::yield();
    }
  });
  std::mt19937_64 random(2024);
  try {
    for (int round = 0; round < rounds(); ++round) {
      std::vector<LayerId> next;
      if (random() % 5 != 0) {
        next.push_back(0);
        for (LayerId layer = 1; layer < kLayers; ++layer) {
          if (random() % 2 == 0) next.push_back(layer);
        }
        if (next.size() == 1) next.push_back(1 + static_cast<LayerId>(random() % (kLayers - 1)));
      }
      world.change(next);
      for (std::size_t i = random() % 3; i > 0; --i) world.pass(random);
    }
    world.change({});
    world.pass(random);
  } catch (...) {
    stop.store(true);
    reader.join();
    throw;
  }
  stop.store(true);
  reader.join();
  CHECK(!wrong.load());
  world.executor->drain();
  world.arena->check();
  world.prefetcher->drain();
  world.executor->stop();
  world.arena->close();
  CHECK(world.backend->usage().page_bytes == 0 && world.backend->usage().reserved_bytes == 0);
}

void aliased() { plans_passes_and_readers(Mode::aliased); }
void strict() { plans_passes_and_readers(Mode::strict); }

// The worker is stopped with work in its queue, again and again.
void stops_with_work_left() {
  for (int i = 0; i < 20; ++i) {
    World world(Mode::aliased);
    world.change({0, 1, 2, 3, 4, 5});
    world.executor->stop();
    world.executor.reset();
    world.prefetcher->drain();
    world.arena->close();
  }
}

}  // namespace

int main() {
  RUN(aliased);
  RUN(strict);
  RUN(stops_with_work_left);
  return remap::testing::failures();
}
