// Two tenants on the fake device, each computing on its own stream with the host running ahead: plans, re-pointing by the
// worker, prefetching, and pages that go to and fro between weights, KV and the other tenant, at random and all at once. The
// fake device sees every wrong byte, every copy into bytes in use and every address without a page.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <thread>

#include "../../python/prefetcher_observer.h"
#include "check.h"
#include "fake_device.h"
#include "remap/executor.h"

using namespace remap;
using remap::testing::FakeDevice;

namespace {

constexpr std::size_t kPage = FakeDevice::kPage;
constexpr std::size_t kLayers = 4;
constexpr std::size_t kLayerPages = 2;
constexpr std::size_t kFree = 6;
constexpr std::size_t kPages = 2 * kLayers * kLayerPages + kFree;

int seeds() {
  const char* text = std::getenv("REMAP_STRESS_ROUNDS");
  return text != nullptr ? std::atoi(text) : 800;
}

struct Shared {
  std::shared_ptr<FakeDevice> device;
  std::shared_ptr<Arena> arena;
  std::unique_ptr<Executor> executor;
  std::vector<EventHandle> events;
  std::uint64_t zeroed = 0;
  std::map<PageId, std::pair<TenantId, std::byte>> left;  // what a free page's last tenant left in it

  EventHandle record(StreamHandle stream) {
    events.push_back(device->create_event(true));
    device->record(events.back(), stream);
    return events.back();
  }
};

// A session's part for one tenant: layer 0's home is the ring, the other streamed layers' homes are KV.
struct Tenant {
  Shared& shared;
  TenantId id;
  StreamHandle stream;
  std::vector<std::vector<std::byte>> masters;
  std::vector<std::vector<PageId>> homes;
  std::vector<RegionId> regions;
  RegionId ring = 0, kv = 0;
  std::shared_ptr<Prefetcher> prefetcher;
  std::shared_ptr<PrefetcherObserver> observer;
  std::vector<LayerId> streamed;
  std::map<PageId, std::byte> written;  // KV pages and what is in them
  std::map<PageId, std::size_t> slot;
  unsigned tags = 0;

  Tenant(Shared& all, TenantId number) : shared(all), id(number), stream(all.device->create_stream()) {
    Arena& arena = *shared.arena;
    std::vector<LayerMemory> memory;
    for (std::size_t i = 0; i < kLayers; ++i) {
      homes.push_back(arena.take(kLayerPages, Owner::params, id));
      regions.push_back(arena.add_layer_region(id, "layer", homes[i]));
      masters.emplace_back(kLayerPages * kPage, static_cast<std::byte>(id * 64 + i));
    }
    for (std::size_t i = 0; i < kLayers; ++i) {
      memory.push_back({arena.address(regions[i]), masters[i].data(), masters[i].size()});
      shared.device->copy(stream, arena.address(regions[i]), masters[i].data(), masters[i].size());
    }
    ring = arena.add_ring_region(id, kLayerPages);
    arena.designate_ring(ring, 0, homes[0]);
    kv = arena.add_kv_region(id, kLayers * kLayerPages + kFree);
    for (std::size_t i = 0; i < kLayers; ++i) designate(i * kLayerPages, homes[i]);
    prefetcher = std::make_shared<Prefetcher>(shared.device, memory);
    observer = std::make_shared<PrefetcherObserver>(prefetcher);
  }
  void designate(std::size_t first, const std::vector<PageId>& pages) {
    shared.arena->designate(kv, first, pages);
    for (std::size_t i = 0; i < pages.size(); ++i) slot[pages[i]] = first + i;
  }
  std::byte* at(PageId page) const { return shared.arena->address(kv) + slot.at(page) * kPage; }
  static bool is(const std::vector<LayerId>& set, LayerId layer) {
    return std::find(set.begin(), set.end(), layer) != set.end();
  }

  void write(PageId page) {
    const auto tag = static_cast<std::byte>(128 + (tags++ * 2 + id) % 127);
    shared.device->compute_write(stream, at(page), kPage, tag);
    written[page] = tag;
  }
  void read(PageId page) { shared.device->compute(stream, at(page), kPage, written.at(page)); }
  void lose(const std::vector<PageId>& pages) {
    for (const PageId page : pages) {
      read(page);
      written.erase(page);
    }
  }

  void apply(Plan& plan, const Ordering& ordering) {
    plan.epoch = shared.arena->epoch();
    shared.zeroed += shared.executor->apply(plan, ordering).zeroed_bytes;
  }
  static Step own(std::vector<PageId> pages, Owner from, Owner to, TenantId tenant) {
    Step step;
    step.kind = Step::Kind::set_owner;
    step.set_owner = {std::move(pages), from, to, tenant};
    return step;
  }

  // Free pages become KV, where they read zero or what this tenant left there itself, or KV pages free.
  void exchange_pages(const std::vector<PageId>& pages, bool take) {
    Plan plan;
    if (take) {
      plan.steps = {own(pages, Owner::free, Owner::kv, id)};
      apply(plan, {0, stream});
      for (const PageId page : pages) {
        const auto last = shared.left.find(page);
        const bool mine = last != shared.left.end() && last->second.first == id;
        shared.device->compute(stream, at(page), kPage, mine ? last->second.second : std::byte{0});
        write(page);
      }
    } else {
      for (const PageId page : pages) shared.left[page] = {id, written.at(page)};
      lose(pages);
      plan.steps = {own(pages, Owner::kv, Owner::free, id)};
      apply(plan, {shared.record(stream), stream});
    }
    shared.executor->commit(observer);
  }

  void change(const std::vector<LayerId>& next) {
    const bool strict = shared.arena->mode() == Mode::strict;
    bool settled = is(next, 0) == is(streamed, 0);
    for (const LayerId layer : next) settled = settled && (is(streamed, layer) || prefetcher->ready(layer));
    if (!settled) {
      // Copies in flight write where pages change hands now. The worker's are waited for, the device's are come behind.
      shared.executor->drain();
      shared.device->stream_wait(stream, shared.record(prefetcher->copy_stream()));
    }
    Plan plan;
    StreamConfiguration c;
    const auto show = [&](RegionId region, const std::vector<PageId>& pages, bool deferred, LayerId layer) {
      Step step;
      step.kind = Step::Kind::point;
      step.point = {region, 0, pages, deferred, layer};
      plan.steps.push_back(step);
      if (deferred && !strict) c.held.push_back(layer);
    };
    for (LayerId layer = 0; layer < kLayers; ++layer) {
      if (!is(streamed, layer) || is(next, layer)) continue;
      if (layer != 0) lose(homes[layer]);
      plan.steps.push_back(own(homes[layer], layer == 0 ? Owner::ring : Owner::kv, Owner::params, id));
      c.home.push_back({layer, 0, kLayerPages * kPage});
    }
    if (is(next, 0) && !is(streamed, 0)) plan.steps.push_back(own(homes[0], Owner::params, Owner::ring, id));
    if (is(next, 0)) show(ring, homes[0], false, 0);
    for (LayerId layer = 1; layer < kLayers; ++layer) {
      if (is(streamed, layer) != is(next, layer)) show(regions[layer], is(next, layer) ? homes[0] : homes[layer], true, layer);
    }
    std::vector<PageId> gained;
    for (LayerId layer = 1; layer < kLayers; ++layer) {
      if (!is(next, layer) || is(streamed, layer)) continue;
      plan.steps.push_back(own(homes[layer], Owner::params, Owner::kv, id));
      gained.insert(gained.end(), homes[layer].begin(), homes[layer].end());
    }
    const EventHandle after = shared.record(stream);
    apply(plan, {after, stream});
    for (const PageId page : gained) write(page);  // usable at once
    c.streamed = next;
    if (!next.empty()) c.ring = {shared.arena->address(ring)};
    c.ring_bytes = kLayerPages * kPage;
    c.fresh = !is(streamed, 0);
    c.after = after;
    prefetcher->configure(c);
    shared.executor->commit(observer, after);
    streamed = next;
  }

  void pass(std::mt19937_64& random) {
    const std::size_t stop = random() % 4 != 0 ? kLayers : random() % kLayers;
    prefetcher->begin_pass(stream);
    for (LayerId layer = 0; layer < stop; ++layer) {
      CHECK(prefetcher->wait(layer, 0, std::chrono::seconds(60)));
      shared.device->compute(stream, shared.arena->address(regions[layer]), masters[layer].size(), masters[layer][0]);
      if (layer + 1 == stop && stop < kLayers) break;  // left in the middle of it
      prefetcher->done(layer);
      shared.device->random_steps(random() % 4);
    }
    for (const auto& [page, tag] : written) {
      if (random() % 3 == 0) read(page);
    }
    prefetcher->end_pass();
  }
};

void two_tenants(Mode mode, bool exchange, std::uint64_t seed, std::uint64_t& zeroed) {
  std::mt19937_64 random(seed);
  Shared shared;
  shared.device = std::make_shared<FakeDevice>(seed, exchange);
  shared.arena = std::make_shared<Arena>(shared.device, ArenaOptions{kPages * kPage, kPage, mode});
  shared.executor = std::make_unique<Executor>(shared.arena);
  std::vector<std::unique_ptr<Tenant>> tenants;
  for (const TenantId id : {1U, 2U}) tenants.push_back(std::make_unique<Tenant>(shared, id));
  std::vector<PageId> free = shared.arena->free_pages();
  CHECK(free.size() == kFree);
  for (const auto& tenant : tenants) tenant->designate(kLayers * kLayerPages, free);

  std::atomic<bool> stop{false};
  std::atomic<bool> wrong{false};
  std::thread observer([&] {
    while (!stop) {
      try {
        shared.arena->check();
      } catch (const std::logic_error&) {
        wrong = true;
      }
      for (const auto& tenant : tenants) static_cast<void>(tenant->prefetcher->stats());
      std::this_thread::yield();
    }
  });
  std::exception_ptr error;
  try {
    for (int round = 0; round < 14; ++round) {
      Tenant& tenant = *tenants[random() % 2];
      switch (random() % 3) {
        case 0: {
          std::vector<LayerId> next;
          if (random() % 4 != 0) {
            next.push_back(0);
            for (LayerId layer = 1; layer < kLayers; ++layer) {
              if (random() % 2 == 0) next.push_back(layer);
            }
            if (next.size() == 1) next.push_back(1 + static_cast<LayerId>(random() % (kLayers - 1)));
          }
          tenant.change(next);
          break;
        }
        case 1: {
          const bool take = random() % 2 == 0;
          std::vector<PageId> pages;
          for (const PageId page : free) {
            const bool possible = take ? shared.arena->owners()[page] == Owner::free : tenant.written.count(page) != 0;
            if (possible && random() % 2 == 0) pages.push_back(page);
          }
          if (!pages.empty()) tenant.exchange_pages(pages, take);
          break;
        }
        default:
          for (std::size_t i = random() % 3; i > 0; --i) tenant.pass(random);
      }
      shared.device->random_steps(random() % 30);
    }
    for (const auto& tenant : tenants) tenant->pass(random);
    shared.executor->drain();
    CHECK(shared.executor->failed_points() == 0);
    shared.device->finish();
    for (const auto& tenant : tenants) tenant->prefetcher->drain();
  } catch (...) {
    error = std::current_exception();
  }
  stop = true;
  observer.join();
  if (error) std::rethrow_exception(error);
  CHECK(!wrong);
  shared.arena->check();
  shared.executor->stop();
  for (const auto& tenant : tenants) shared.device->destroy_stream(tenant->stream);
  tenants.clear();
  shared.arena->close();
  for (const EventHandle event : shared.events) shared.device->destroy_event(event);
  const Usage usage = shared.device->usage();
  CHECK(usage.events == 0 && usage.streams == 0 && usage.page_bytes == 0 && usage.reserved_bytes == 0);
  zeroed += shared.zeroed;
}

void many(Mode mode, bool exchange) {
  std::uint64_t zeroed = 0;
  for (int seed = 0; seed < seeds(); ++seed) {
    try {
      two_tenants(mode, exchange, static_cast<std::uint64_t>(seed), zeroed);
    } catch (const std::exception& error) {
      throw std::logic_error("seed " + std::to_string(seed) + ": " + error.what());
    }
  }
  CHECK(zeroed > 0);
}

void aliased() { many(Mode::aliased, false); }
void aliased_with_exchange() { many(Mode::aliased, true); }
void strict() { many(Mode::strict, false); }

}  // namespace

int main() {
  RUN(aliased);
  RUN(aliased_with_exchange);
  RUN(strict);
  return remap::testing::failures();
}
