// Two tenants: plans, re-pointing by the worker, prefetching, pages that go to and fro between weights, KV and the other tenant,
// and layers that give their pages up for good and come back to others, at random and all at once, beside a thread that looks at
// the tables. On the fake device each computes
// on its own stream with the host running ahead; the device sees every wrong byte, every copy into bytes in use and
// every address without a page. On the host backend, for the sanitizers, threads and memory are real: every byte that
// is read must be what was written last.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>

#include "../../python/prefetcher_observer.h"
#include "fake_device.h"
#include "plans.h"
#include "threads.h"

using namespace remap;
using namespace remap::testing;

namespace {

constexpr std::size_t kLayers = 4;
constexpr std::size_t kLayerPages = 2;
constexpr std::size_t kFree = 6;
constexpr std::size_t kPages = 2 * kLayers * kLayerPages + kFree;

int rounds(int usual) {
  const char* text = std::getenv("REMAP_STRESS_ROUNDS");
  return text != nullptr ? std::atoi(text) : usual;
}

// What computes: a stream of the fake device, or the calling thread.
struct Machine {
  std::shared_ptr<FakeDevice> device;  // or none
  std::shared_ptr<Backend> backend = device;
  std::size_t page_bytes = FakeDevice::kPage;

  static Machine fake(std::uint64_t seed, bool exchange) {
    return Machine{std::make_shared<FakeDevice>(seed, exchange)};
  }
  static Machine host() { return Machine{nullptr, HostArena::host(kPages), HostArena::kPage}; }
  StreamHandle create_stream() const { return device ? device->create_stream() : 0; }
  void write(StreamHandle stream, std::byte* at, std::size_t bytes, std::byte tag) const {
    if (device) {
      device->compute_write(stream, at, bytes, tag);
    } else {
      std::memset(at, std::to_integer<int>(tag), bytes);
    }
  }
  void read(StreamHandle stream, const std::byte* at, std::size_t bytes, std::byte tag) const {
    if (device) {
      device->compute(stream, at, bytes, tag);
    } else {
      CHECK(at[0] == tag && std::memcmp(at, at + 1, bytes - 1) == 0);
    }
  }
  void random_steps(std::uint64_t most) const {
    if (device) device->random_steps(most);
  }
};

struct Shared {
  Machine machine;
  std::shared_ptr<Arena> arena;
  std::unique_ptr<Executor> executor;
  std::vector<EventHandle> events;
  std::uint64_t zeroed = 0;
  std::map<PageId, std::pair<TenantId, std::byte>> left;  // what a free page's last tenant left in it

  EventHandle record(StreamHandle stream) {
    if (!machine.device) return 0;
    events.push_back(machine.device->create_event(true));
    machine.device->record(events.back(), stream);
    return events.back();
  }
};

// A session's part for one tenant: layer 0's home is the ring, the other streamed layers' homes are KV. Cold layers have none.
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
  std::vector<LayerId> streamed, cold;
  std::map<PageId, std::byte> written;  // KV pages and what is in them
  std::map<PageId, std::size_t> slot;
  unsigned tags = 0;
  std::size_t page_bytes, layer_bytes;

  Tenant(Shared& all, TenantId number) 
      : shared(all),
        id(number),
        stream(all.machine.create_stream()),
        page_bytes(all.machine.page_bytes),
        layer_bytes(kLayerPages * page_bytes) {
    Arena& arena = *shared.arena;
    std::vector<LayerMemory> memory;
    for (std::size_t i = 0; i < kLayers; ++i) {
      homes.push_back(arena.take(kLayerPages, Owner::params, id));
      regions.push_back(arena.add_layer_region(id, "layer", homes[i]));
      masters.emplace_back(layer_bytes, static_cast<std::byte>(id * 64 + i));
    }
    for (std::size_t i = 0; i < kLayers; ++i) {
      memory.push_back({arena.address(regions[i]), masters[i].data(), layer_bytes});
      shared.machine.write(stream, arena.address(regions[i]), layer_bytes, masters[i][0]);
    }
    ring = arena.add_ring_region(id, kLayerPages);
    arena.designate_ring(ring, 0, homes[0]);
    kv = arena.add_kv_region(id, kPages);
    for (std::size_t i = 0; i < kLayers; ++i) designate(i * kLayerPages, homes[i]);
    prefetcher = std::make_shared<Prefetcher>(shared.machine.backend, memory);
    observer = std::make_shared<PrefetcherObserver>(prefetcher);
  }
  void designate(std::size_t first, const std::vector<PageId>& pages) {
    shared.arena->designate(kv, first, pages);
    for (std::size_t i = 0; i < pages.size(); ++i) slot[pages[i]] = first + i;
  }
  std::byte* at(PageId page) const { return shared.arena->address(kv) + slot.at(page) * page_bytes; }
  static bool is(const std::vector<LayerId>& set, LayerId layer) {
    return std::find(set.begin(), set.end(), layer) != set.end();
  }

  void write(PageId page) {
    const auto tag = static_cast<std::byte>(128 + (tags++ * 2 + id) % 127);
    shared.machine.write(stream, at(page), page_bytes, tag);
    written[page] = tag;
  }
  void read(PageId page) { shared.machine.read(stream, at(page), page_bytes, written.at(page)); }
  void lose(const std::vector<PageId>& pages) {
    for (const PageId page : pages) {
      read(page);
      written.erase(page);
    }
  }

  void apply(std::vector<Step> steps, const Ordering& ordering) {
    shared.executor->apply({shared.arena->epoch(), std::move(steps)}, ordering);
    shared.zeroed += shared.executor->zero_due();
  }

  // Free pages become KV, where they read zero or what this tenant left there itself, or KV pages free.
  void exchange_pages(const std::vector<PageId>& pages, bool take) {
    EventHandle after = 0;
    if (take) {
      apply({owner(pages, Owner::free, Owner::kv, id)}, {0, stream});
      for (const PageId page : pages) {
        const auto last = shared.left.find(page);
        const bool mine = last != shared.left.end() && last->second.first == id;
        shared.machine.read(stream, at(page), page_bytes, mine ? last->second.second : std::byte{0});
        write(page);
      }
    } else {
      for (const PageId page : pages) shared.left[page] = {id, written.at(page)};
      lose(pages);
      after = shared.record(stream);
      apply({owner(pages, Owner::kv, Owner::free, id)}, {after, stream});
    }
    shared.executor->commit(observer, after);
  }

  // Copies in flight write where pages change hands now. The worker's are waited for, the device's are come behind.
  void settle() const {
    shared.executor->drain();
    if (shared.machine.device) {
      shared.machine.device->stream_wait(stream, shared.record(prefetcher->copy_stream()));
    } else {
      prefetcher->drain();
    }
  }

  // A layer's pages become anybody's; they have its bytes.
  void give_up(LayerId layer) {
    for (const PageId page : homes[layer]) shared.left[page] = {id, masters[layer][0]};
    cold.push_back(layer);
    rehome(layer, {}, {owner(std::exchange(homes[layer], {}), Owner::params, Owner::free, id)});
  }
  // KV pages become the layer's.
  void come(LayerId layer, const std::vector<PageId>& pages) {
    lose(pages);
    homes[layer] = pages;
    cold.erase(std::find(cold.begin(), cold.end(), layer));
    rehome(layer, pages, {owner(pages, Owner::kv, Owner::params, id)});
  }
  void rehome(LayerId layer, const std::vector<PageId>& pages, std::vector<Step> owners) {
    settle();
    const auto shown = pages.empty() ? std::vector<PageId>(kLayerPages, kNoPage) : pages;
    Step home;
    home.kind = Step::Kind::set_home;
    home.set_home = {regions[layer], pages};
    std::vector<Step> steps = std::move(owners);
    if (pages.empty()) {
      steps.insert(steps.begin(), {point(regions[layer], shown, true, layer), home});
    } else {
      steps.insert(steps.begin(), home);
      steps.push_back(point(regions[layer], shown, true, layer));
    }
    StreamConfiguration c = configuration(streamed);
    if (!pages.empty()) {
      c.home.push_back({layer, 0, layer_bytes});
      if (shared.arena->mode() != Mode::strict) c.held.push_back(layer);
    }
    const EventHandle after = c.after = shared.record(stream);
    apply(std::move(steps), {after, stream});
    prefetcher->configure(c);
    shared.executor->commit(observer, after);
  }
  StreamConfiguration configuration(const std::vector<LayerId>& next) const {
    StreamConfiguration c;
    c.streamed = next;
    if (!next.empty()) c.ring = {shared.arena->address(ring)};
    c.ring_bytes = layer_bytes;
    c.elsewhere = cold;
    std::sort(c.elsewhere.begin(), c.elsewhere.end());
    return c;
  }

  // asleep: no pass comes before `pass` wakes it.
  void change(const std::vector<LayerId>& next, bool asleep) {
    const bool strict = shared.arena->mode() == Mode::strict;
    bool settled = is(next, 0) == is(streamed, 0);
    for (const LayerId layer : next) settled = settled && (is(streamed, layer) || prefetcher->arrived(layer));
    if (!settled) settle();
    std::vector<Step> steps;
    StreamConfiguration c = configuration(next);
    const auto show = [&](RegionId region, const std::vector<PageId>& pages, bool deferred, LayerId layer) {
      steps.push_back(point(region, pages, deferred, layer));
      if (deferred && !strict) c.held.push_back(layer);
    };
    for (LayerId layer = 0; layer < kLayers; ++layer) {
      if (!is(streamed, layer) || is(next, layer)) continue;
      if (layer != 0) lose(homes[layer]);
      steps.push_back(owner(homes[layer], layer == 0 ? Owner::ring : Owner::kv, Owner::params, id));
      c.home.push_back({layer, 0, layer_bytes});
    }
    if (is(next, 0) && !is(streamed, 0)) steps.push_back(owner(homes[0], Owner::params, Owner::ring, id));
    if (is(next, 0)) show(ring, homes[0], false, 0);
    for (LayerId layer = 1; layer < kLayers; ++layer) {
      if (is(streamed, layer) != is(next, layer)) show(regions[layer], is(next, layer) ? homes[0] : homes[layer], true, layer);
    }
    std::vector<PageId> gained;
    for (LayerId layer = 1; layer < kLayers; ++layer) {
      if (!is(next, layer) || is(streamed, layer)) continue;
      steps.push_back(owner(homes[layer], Owner::params, Owner::kv, id));
      gained.insert(gained.end(), homes[layer].begin(), homes[layer].end());
    }
    const EventHandle after = shared.record(stream);
    apply(std::move(steps), {after, stream});
    for (const PageId page : gained) write(page);  // usable at once
    c.fresh = !is(streamed, 0);
    c.after = after;
    prefetcher->configure(c);
    shared.executor->commit(observer, after, asleep);
    streamed = next;
  }

  void pass(std::mt19937_64& random) {
    const std::size_t stop = random() % 4 != 0 ? kLayers : random() % kLayers;
    shared.executor->wake(id, shared.record(stream));
    prefetcher->begin_pass(stream);
    for (LayerId layer = 0; layer < stop; ++layer) {
      CHECK(prefetcher->wait(layer, 0, std::chrono::seconds(60)));
      if (!is(cold, layer)) shared.machine.read(stream, shared.arena->address(regions[layer]), layer_bytes, masters[layer][0]);
      if (layer + 1 == stop && stop < kLayers) break;  // left in the middle of it
      prefetcher->done(layer);
      shared.machine.random_steps(random() % 4);
    }
    for (const auto& [page, tag] : written) {
      if (random() % 3 == 0) read(page);
    }
    prefetcher->end_pass();
  }
};

struct World : Shared {
  std::vector<std::unique_ptr<Tenant>> tenants;
  std::uint64_t gone = 0, came = 0;  // layers

  World(Machine with, Mode mode) {
    machine = std::move(with);
    const ArenaOptions options{kPages * machine.page_bytes, machine.page_bytes, mode};
    arena = std::make_shared<Arena>(machine.backend, options);
    executor = std::make_unique<Executor>(arena);
    for (const TenantId id : {1U, 2U}) tenants.push_back(std::make_unique<Tenant>(*this, id));
    const std::vector<PageId> free = arena->free_pages();
    CHECK(free.size() == kFree);
    for (const auto& tenant : tenants) {
      std::size_t first = kLayers * kLayerPages;
      tenant->designate(first, free);
      first += kFree;
      for (const std::vector<PageId>& home : tenants[2 - tenant->id]->homes) {
        tenant->designate(first, home);
        first += kLayerPages;
      }
    }
  }
  // No layer's home.
  std::vector<PageId> loose() const {
    std::vector<PageId> pages;
    for (PageId page = 0; page < kPages; ++page) {
      const bool claimed = std::any_of(tenants.begin(), tenants.end(), [&](const auto& tenant) {
        return std::any_of(tenant->homes.begin(), tenant->homes.end(), [&](const std::vector<PageId>& home) {
          return std::find(home.begin(), home.end(), page) != home.end();
        });
      });
      if (!claimed) pages.push_back(page);
    }
    return pages;
  }
  void look(std::uint64_t& epoch) const {
    arena->check();  // between two steps of a plan nobody sees the tables
    const PageCounts counts = arena->counts();
    std::size_t sum = 0;
    for (const std::size_t count : counts.by_owner) sum += count;
    CHECK(sum == counts.total && arena->epoch() >= epoch);
    epoch = arena->epoch();
    for (const auto& tenant : tenants) {
      for (const RegionId region : tenant->regions) CHECK(arena->shown(region).size() == kLayerPages);
      static_cast<void>(tenant->prefetcher->stats());
    }
    static_cast<void>(executor->failed_points());
    static_cast<void>(arena->free_pages());
  }
  void play(std::mt19937_64& random) {
    Tenant& tenant = *tenants[random() % 2];
    switch (random() % 4) {
      case 3: {
        const auto layer = static_cast<LayerId>(1 + random() % (kLayers - 1));
        std::vector<PageId> mine;
        for (const PageId page : loose()) {
          if (tenant.written.count(page) != 0) mine.push_back(page);
        }
        if (!Tenant::is(tenant.cold, layer)) {
          if (Tenant::is(tenant.streamed, layer) || !tenant.prefetcher->arrived(layer)) break;
          tenant.give_up(layer);
          ++gone;
        } else if (mine.size() >= kLayerPages) {
          std::shuffle(mine.begin(), mine.end(), random);
          mine.resize(kLayerPages);
          tenant.come(layer, mine);
          ++came;
        }
        break;
      }
      case 0: {
        std::vector<LayerId> next;
        if (random() % 4 != 0) {
          next.push_back(0);
          for (LayerId layer = 1; layer < kLayers; ++layer) {
            if (random() % 2 == 0 && !Tenant::is(tenant.cold, layer)) next.push_back(layer);
          }
          if (next.size() == 1) {  // the ring alone
            const auto layer = 1 + static_cast<LayerId>(random() % (kLayers - 1));
            if (Tenant::is(tenant.cold, layer)) next.clear();
            else next.push_back(layer);
          }
        }
        tenant.change(next, random() % 2 == 0);
        break;
      }
      case 1: {
        const bool take = random() % 2 == 0;
        std::vector<PageId> pages;
        for (const PageId page : loose()) {
          const bool possible = take ? arena->owners()[page] == Owner::free : tenant.written.count(page) != 0;
          if (possible && random() % 2 == 0) pages.push_back(page);
        }
        if (!pages.empty()) tenant.exchange_pages(pages, take);
        break;
      }
      default:
        for (std::size_t i = random() % 3; i > 0; --i) tenant.pass(random);
    }
    machine.random_steps(random() % 30);
  }
  // Whatever is still going on: everything is given back.
  void end() {
    arena->check();
    executor.reset();
    for (const auto& tenant : tenants) {
      if (machine.device) machine.device->destroy_stream(tenant->stream);
    }
    tenants.clear();
    arena->close();
    for (const EventHandle event : events) machine.backend->destroy_event(event);
    CHECK(empty(machine.backend->usage()));
  }
};

struct Seen {
  std::uint64_t zeroed = 0, gone = 0, came = 0;
};

void two_tenants(const Machine& machine, Mode mode, std::uint64_t seed, int rounds, Seen& seen) {
  std::mt19937_64 random(seed);
  World world(machine, mode);
  std::uint64_t epoch = 0;
  Looking looking([&] { world.look(epoch); });
  for (int round = 0; round < rounds; ++round) world.play(random);
  for (const auto& tenant : world.tenants) tenant->pass(random);
  world.executor->drain();
  CHECK(world.executor->failed_points() == 0);
  if (machine.device) machine.device->finish();
  for (const auto& tenant : world.tenants) tenant->prefetcher->drain();
  looking.stop();
  world.end();
  seen.zeroed += world.zeroed;
  seen.gone += world.gone;
  seen.came += world.came;
}

void on_the_device(Mode mode, bool exchange) {
  Seen seen;
  const auto seeds = static_cast<std::uint64_t>(rounds(800));
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    try {
      two_tenants(Machine::fake(seed, exchange), mode, seed, 18, seen);
    } catch (const std::exception& error) {
      throw std::logic_error("seed " + std::to_string(seed) + ": " + error.what());
    }
  }
  CHECK(seen.zeroed > 0 && seen.gone > 0 && seen.came > 0);
}

void on_the_host(Mode mode) {
  Seen seen;
  two_tenants(Machine::host(), mode, 2024, rounds(300), seen);
  CHECK(seen.zeroed > 0 && seen.gone > 0 && seen.came > 0);
}

TEST(aliased) { on_the_device(Mode::aliased, false); }
TEST(aliased_with_exchange) { on_the_device(Mode::aliased, true); }
TEST(strict) { on_the_device(Mode::strict, false); }
TEST(aliased_on_the_host) { on_the_host(Mode::aliased); }
TEST(strict_on_the_host) { on_the_host(Mode::strict); }

// The worker is stopped with work in its queue, again and again.
TEST(stops_with_work_left) {
  for (int i = 0; i < 20; ++i) {
    World world(Machine::host(), Mode::aliased);
    world.tenants[0]->change({0, 1, 2, 3}, false);
    world.executor->stop();
    world.tenants[0]->prefetcher->drain();
    world.end();
  }
}

}  // namespace
