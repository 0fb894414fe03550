// Regions whose head is their home and whose tail is the ring: plans applied, undone and deferred, and what of a region is
// touched. And the arena's calls that choose pages.
#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>

#include "backend/forward.h"
#include "check.h"
#include "remap/backends.h"
#include "remap/decorators.h"
#include "remap/executor.h"

using namespace remap;

namespace {

constexpr std::size_t kPage = 64 << 10;
constexpr TenantId kTenant = 1;

Step owner(std::vector<PageId> pages, Owner from, Owner to) {
  Step step;
  step.kind = Step::Kind::set_owner;
  step.set_owner = {std::move(pages), from, to, kTenant};
  return step;
}

Step point(RegionId region, std::vector<PageId> pages, std::size_t first = 0) {
  Step step;
  step.kind = Step::Kind::point;
  step.point = {region, first, std::move(pages), true, region};
  return step;
}

// As a GPU's driver: page tables cannot be swapped.
class WithoutExchange final : public Forward<Backend> {
 public:
  using Forward<Backend>::Forward;
  bool can_exchange() const noexcept override { return false; }
  void exchange(std::byte*, std::byte*, std::size_t) override { throw std::logic_error("not to be called"); }
};

// Three layers of four pages (0 .. 3, 4 .. 7, 8 .. 11), each page with its number in it, and a ring of four slots.
struct World {
  std::shared_ptr<FaultBackend> fault;
  std::shared_ptr<TraceBackend> trace;
  std::shared_ptr<Arena> arena;
  std::unique_ptr<Executor> executor;
  std::vector<RegionId> layers;
  RegionId ring = 0, kv = 0;

  World(Mode mode, bool exchange) {
    HostOptions options;
    options.capacity_bytes = 14 * kPage;
    options.page_bytes = kPage;
    std::shared_ptr<Backend> host = make_host_backend(options);
    fault = make_fault_backend(exchange ? host : std::make_shared<WithoutExchange>(host));
    trace = make_trace_backend(fault);
    arena = std::make_shared<Arena>(trace, ArenaOptions{14 * kPage, kPage, mode});
    executor = std::make_unique<Executor>(arena);
    for (const char* name : {"a", "b", "c"}) {
      layers.push_back(arena->add_layer_region(kTenant, name, arena->take(4, Owner::params, kTenant)));
    }
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
    return {arena->epoch(),
            {owner({3}, Owner::params, Owner::ring), point(ring, {3}, 3), point(layers[1], {4, 5, 6, 3}),
             point(layers[2], {8, 9, 10, 3}), owner({7, 11}, Owner::params, Owner::kv)}};
  }
  Plan two() const {
    return {arena->epoch(),
            {owner({2}, Owner::params, Owner::ring), point(ring, {2}, 2), point(layers[1], {4, 5, 2, 3}),
             point(layers[2], {8, 9, 2, 3}), owner({6, 10}, Owner::params, Owner::kv)}};
  }
  Plan back() const {
    return {arena->epoch(),
            {owner({6, 10}, Owner::kv, Owner::params), owner({2}, Owner::ring, Owner::params),
             point(layers[1], {4, 5, 6, 3}), point(layers[2], {8, 9, 10, 3})}};
  }
  void carry_out(const Plan& plan) {
    executor->apply(plan);
    arena->check();
    executor->commit(nullptr);
    executor->drain();
    arena->check();
  }
  void shows(std::size_t layer, const std::vector<PageId>& pages) const {
    CHECK(arena->shown(layers[layer]) == pages);
    for (std::size_t slot = 0; slot < pages.size(); ++slot) {
      const std::byte* at = arena->address(layers[layer]) + slot * kPage;
      CHECK(*at == static_cast<std::byte>(pages[slot]) && at[kPage - 1] == static_cast<std::byte>(pages[slot]));
    }
  }
};

template <typename Body>
void everywhere(Body&& body) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    for (const bool exchange : {true, false}) body(mode, exchange);
  }
}

void a_region_shows_its_head_and_the_rings_tail() {
  everywhere([](Mode mode, bool exchange) {
    World world(mode, exchange);
    for (int round = 0; round < 2; ++round) {
      world.carry_out(world.one());
      world.shows(0, {0, 1, 2, 3});
      world.shows(1, {4, 5, 6, 3});
      world.shows(2, {8, 9, 10, 3});
      world.carry_out(world.two());
      world.shows(1, {4, 5, 2, 3});
      world.shows(2, {8, 9, 2, 3});
      world.carry_out(world.back());
      world.shows(1, {4, 5, 6, 3});
      world.carry_out({world.arena->epoch(),
                       {owner({7, 11}, Owner::kv, Owner::params), owner({3}, Owner::ring, Owner::params),
                        point(world.layers[1], {4, 5, 6, 7}), point(world.layers[2], {8, 9, 10, 11})}});
      for (const std::size_t layer : {0, 1, 2}) {
        const auto first = static_cast<PageId>(4 * layer);
        world.shows(layer, {first, first + 1, first + 2, first + 3});
      }
    }
    CHECK(world.arena->counts(kTenant)[Owner::params] == 12);
  });
}

void one_more_page_maps_one_slot() {
  World world(Mode::aliased, false);
  world.carry_out(world.one());
  world.trace->clear_log();
  world.trace->set_logging(true);
  world.carry_out(world.two());
  world.trace->set_logging(false);
  std::size_t maps = 0;
  for (const TraceRecord& record : world.trace->log()) {
    if (record.call != Call::map && record.call != Call::unmap) continue;
    ++maps;
    CHECK(record.args[1] == (record.call == Call::map ? 1 : kPage));  // pages, or bytes
  }
  CHECK(maps == 4);  // for two regions, and nothing for the ring
}

// Whatever fails while a slice is applied: everything is as before, or the arena says that it is broken.
void every_call_fails() {
  unsigned failed = 0, broken = 0;
  everywhere([&](Mode mode, bool exchange) {
    for (const bool for_ever : {false, true}) {
      for (unsigned nth = 1; nth <= 20; ++nth) {
        World world(mode, exchange);
        world.carry_out(world.one());
        const std::vector<Owner> before = world.arena->owners();
        const Plan plan = world.two();
        world.fault->arm_any(nth, for_ever);
        try {
          world.executor->apply(plan);
          world.fault->disarm();
          world.executor->rollback();
        } catch (const Error&) {
          ++failed;
        }
        world.fault->disarm();
        world.arena->check();
        if (world.arena->broken()) {
          ++broken;
          continue;
        }
        CHECK(world.arena->owners() == before);
        world.shows(1, {4, 5, 6, 3});
        world.shows(2, {8, 9, 10, 3});
        world.carry_out(world.two());
      }
    }
  });
  CHECK(failed > 20);
  CHECK(broken > 0);
}

void what_is_neither_head_nor_tail_is_refused() {
  const auto violated = [](const std::vector<PageId>& shown) {
    World world(Mode::aliased, false);
    world.carry_out(world.one());
    Plan plan{world.arena->epoch(), {point(world.layers[1], shown)}};
    try {
      world.executor->apply(plan);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::invalid_argument);
      world.arena->check();
      return true;
    }
    world.arena->check();
    world.executor->rollback();
    world.arena->check();
    return false;
  };
  CHECK(violated({3, 5, 6, 3}));   // a home page behind a ring page
  CHECK(violated({5, 4, 6, 3}));   // the head out of order
  CHECK(violated({4, 5, 10, 3}));  // another layer's home
  CHECK(violated({4, 5, 6, 7}));   // KV
  CHECK(!violated({4, 5, 6, 3}));
}

void pages_are_taken_around_what_is_excluded() {
  World world(Mode::aliased, true);
  Arena& arena = *world.arena;
  CHECK(arena.tenants() == (std::vector<TenantId>{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, kNobody, kNobody}));
  CHECK_ERROR(ErrorKind::out_of_memory, arena.take(2, Owner::params, 2, {12}));
  CHECK_ERROR(ErrorKind::invalid_argument, arena.take(1, Owner::params, 2, {14}));
  CHECK(arena.free_pages() == (std::vector<PageId>{12, 13}));
  CHECK(arena.take(1, Owner::params, 2, {12, 0}) == std::vector<PageId>{13});
  CHECK(arena.take(1, Owner::kv, 3) == std::vector<PageId>{12});
  CHECK(arena.tenants()[13] == 2 && arena.tenants()[12] == 3);
}

}  // namespace

int main() {
  RUN(a_region_shows_its_head_and_the_rings_tail);
  RUN(one_more_page_maps_one_slot);
  RUN(every_call_fails);
  RUN(what_is_neither_head_nor_tail_is_refused);
  RUN(pages_are_taken_around_what_is_excluded);
  return remap::testing::failures();
}
