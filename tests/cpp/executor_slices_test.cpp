// Regions whose head is their home and whose tail is the ring: plans applied, undone and deferred, and what of a region is
// touched.
#include <cstring>
#include <memory>
#include <numeric>

#include "plans.h"

using namespace remap;
using namespace remap::testing;

namespace {

constexpr std::size_t kPage = HostArena::kPage;
constexpr std::size_t kPages = 14;

// Three layers of four pages (0 .. 3, 4 .. 7, 8 .. 11), each page with its number in it, and a ring of four slots.
struct World : HostArena {
  std::vector<RegionId> layers;
  RegionId ring = 0, kv = 0;

  World(Mode mode, bool exchange) : World(host(kPages, exchange), mode) {}
  World(std::shared_ptr<Backend> backend, Mode mode) : HostArena(std::move(backend), kPages, mode) {
    for (const char* name : {"a", "b", "c"}) layers.push_back(add_layer(name, 4));
    ring = arena->add_ring_region(kTenant, 4);
    arena->designate_ring(ring, 0, {0, 1, 2, 3});
    kv = arena->add_kv_region(kTenant, 12);
    std::vector<PageId> all(12);
    std::iota(all.begin(), all.end(), PageId{0});
    arena->designate(kv, 0, all);
    for (std::size_t page = 0; page < 12; ++page) {
      std::memset(arena->address(layers[page / 4]) + page % 4 * kPage, static_cast<int>(page), kPage);
    }
  }
  // The last page of each layer streams through page 3; then the last two, through 2 and 3.
  Plan one() const {
    return plan({owner({3}, Owner::params, Owner::ring), point(ring, {3}, true, ring, 3), show(1, {4, 5, 6, 3}),
                 show(2, {8, 9, 10, 3}), owner({7, 11}, Owner::params, Owner::kv)});
  }
  Plan two(bool deferred = true) const {
    return plan({owner({2}, Owner::params, Owner::ring), point(ring, {2}, deferred, ring, 2),
                 show(1, {4, 5, 2, 3}, deferred), show(2, {8, 9, 2, 3}, deferred),
                 owner({6, 10}, Owner::params, Owner::kv)});
  }
  Plan back() const {
    return plan({owner({6, 10}, Owner::kv, Owner::params), owner({2}, Owner::ring, Owner::params),
                 show(1, {4, 5, 6, 3}), show(2, {8, 9, 10, 3})});
  }
  Step show(std::size_t layer, std::vector<PageId> pages, bool deferred = true) const {
    return point(layers[layer], std::move(pages), deferred, layers[layer]);
  }
  void carry_out(const Plan& plan) const {
    executor->apply(plan);
    arena->check();
    decide();
  }
  void shows(std::size_t layer, const std::vector<PageId>& pages) const {
    CHECK(arena->shown(layers[layer]) == pages);
    for (std::size_t slot = 0; slot < pages.size(); ++slot) {
      const std::byte* at = arena->address(layers[layer]) + slot * kPage;
      CHECK(*at == static_cast<std::byte>(pages[slot]) && at[kPage - 1] == static_cast<std::byte>(pages[slot]));
    }
  }
  Plan sweep() const {
    carry_out(one());
    return two(false);
  }
  void intact() const {
    shows(1, {4, 5, 6, 3});
    shows(2, {8, 9, 10, 3});
  }
  void reached() const {
    shows(1, {4, 5, 2, 3});
    shows(2, {8, 9, 2, 3});
  }
};

TEST(a_region_shows_its_head_and_the_rings_tail) {
  everywhere<World>([](World& world) {
    for (int round = 0; round < 2; ++round) {
      world.carry_out(world.one());
      world.shows(0, {0, 1, 2, 3});
      world.intact();
      world.carry_out(world.two());
      world.reached();
      world.carry_out(world.back());
      world.intact();
      world.carry_out(world.plan({owner({7, 11}, Owner::kv, Owner::params), owner({3}, Owner::ring, Owner::params),
                                  world.show(1, {4, 5, 6, 7}), world.show(2, {8, 9, 10, 11})}));
      for (const std::size_t layer : {0, 1, 2}) {
        const auto first = static_cast<PageId>(4 * layer);
        world.shows(layer, {first, first + 1, first + 2, first + 3});
      }
    }
    CHECK(world.arena->counts(kTenant)[Owner::params] == 12);
  });
}

TEST(one_more_page_maps_one_slot) {
  const auto trace = make_trace_backend(HostArena::host(kPages, false));
  const World world(trace, Mode::aliased);
  world.carry_out(world.one());
  trace->clear_log();
  world.carry_out(world.two());
  std::size_t maps = 0;
  for (const TraceRecord& record : trace->log()) {
    if (record.call != Call::map && record.call != Call::unmap) continue;
    ++maps;
    CHECK(record.args[1] == (record.call == Call::map ? 1 : kPage));  // pages, or bytes
  }
  CHECK(maps == 4);  // for two regions, and nothing for the ring
}

TEST(every_call_fails) { every_call_of_a_plan_fails<World>(); }

TEST(what_is_neither_head_nor_tail_is_refused) {
  const auto violated = [](const std::vector<PageId>& shown) {
    const World world(Mode::aliased, false);
    world.carry_out(world.one());
    try {
      world.executor->apply(world.plan({world.show(1, shown)}));
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::invalid_argument);
      world.end();
      return true;
    }
    world.decide();
    world.end();
    return false;
  };
  CHECK(violated({3, 5, 6, 3}));   // a home page behind a ring page
  CHECK(violated({5, 4, 6, 3}));   // the head out of order
  CHECK(violated({4, 5, 10, 3}));  // another layer's home
  CHECK(violated({4, 5, 6, 7}));   // KV
  CHECK(!violated({4, 5, 6, 3}));
}

}  // namespace
