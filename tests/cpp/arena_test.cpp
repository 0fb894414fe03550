// The Arena's set-up calls and tables: each call whole or without effect, invariants after each, everything given back.
#include "remap/arena.h"

#include <cstring>
#include <memory>
#include <thread>

#include "child.h"
#include "remap/backends.h"
#include "remap/decorators.h"
#include "remap/executor.h"
#include "usage.h"

using namespace remap;
using namespace remap::testing;

namespace {

constexpr std::size_t kPage = 64 << 10;
constexpr std::size_t kPages = 16;

struct World {
  std::shared_ptr<FaultBackend> fault;
  std::unique_ptr<Arena> arena;

  explicit World(Mode mode = Mode::aliased) {
    HostOptions options;
    options.capacity_bytes = kPages * kPage;
    options.page_bytes = kPage;
    fault = make_fault_backend(make_host_backend(options));
    arena = std::make_unique<Arena>(fault, ArenaOptions{kPages * kPage, kPage, mode});
  }
  RegionId layer(TenantId tenant, std::size_t pages) {
    return arena->add_layer_region(tenant, "layer", arena->take(pages, Owner::params, tenant));
  }
  bool empty() const { return remap::testing::empty(fault->usage()); }
};

TEST(removing_fails_whole_and_can_be_repeated) {
  for (std::uint64_t n = 1;; ++n) {
    World world;
    const RegionId one = world.layer(1, 2);
    const RegionId other = world.layer(2, 2);
    world.arena->prepare_view(one, {1, 0});
    const RegionId kv = world.arena->add_kv_region(1, 4);
    world.arena->designate(kv, 0, {8, 9});
    std::memset(world.arena->address(one), 5, kPage);
    world.fault->arm_any(n);
    bool failed = false;
    try {
      world.arena->remove_tenant(1);
    } catch (const Error&) {
      failed = true;
      CHECK(world.arena->counts(1).total == 2 && world.arena->address(one)[0] == std::byte{5});
      world.arena->check();
      world.arena->remove_tenant(1);
    }
    world.fault->disarm();
    CHECK(world.arena->counts(1).total == 0 && world.arena->counts(2).total == 2);
    CHECK_ERROR(ErrorKind::invalid_argument, world.arena->address(one));
    CHECK(world.arena->address(other) != nullptr);
    world.arena->check();
    world.arena->close();
    CHECK(world.empty());
    if (!failed && n > 8) break;
  }
}

TEST(zeroing_that_fails_is_not_half_done) {
  for (const Call call : {Call::fill, Call::record, Call::synchronize, Call::create_stream, Call::create_event}) {
    for (const bool forever : {false, true}) {
      World world;
      const RegionId first = world.layer(1, 4);
      std::memset(world.arena->address(first), 0xA5, 4 * kPage);
      world.arena->remove_tenant(1);
      world.fault->arm(call, 1, forever);
      CHECK_ERROR(ErrorKind::driver, world.layer(2, 4));
      world.fault->disarm();
      world.arena->remove_tenant(2, true);
      world.arena->check();
      const RegionId second = world.layer(2, 4);
      CHECK(world.arena->address(second)[0] == std::byte{0} && world.arena->address(second)[4 * kPage - 1] == std::byte{0});
      world.arena->close();
      CHECK(world.empty());
    }
  }
}

TEST(declared_ranges_stand_still) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    World world(mode);
    Arena& arena = *world.arena;
    const RegionId one = world.layer(1, 2);
    world.layer(2, 2);
    const RegionId ring = arena.add_ring_region(1, 2);
    const RegionId kv = arena.add_kv_region(1, 4);
    arena.designate(kv, 0, {8});
    std::byte* at = arena.address(one);
    CHECK_ERROR(ErrorKind::invalid_argument, arena.declare_registered(at, 0));
    CHECK_ERROR(ErrorKind::invalid_argument, arena.declare_registered(at, ~std::size_t{0}));
    CHECK_ERROR(ErrorKind::invalid_argument, arena.declare_registered(reinterpret_cast<std::byte*>(4096), 1));
    CHECK_ERROR(ErrorKind::invalid_argument, arena.withdraw_registered(at, 1));
    for (const RegionId region : {ring, kv}) arena.declare_registered(arena.address(region) + kPage, 1);
    const std::uint64_t calls = world.fault->calls();
    if (mode == Mode::aliased) {
      CHECK_ERROR(ErrorKind::invalid_state, arena.designate_ring(ring, 0, {0, 1}));
      CHECK_ERROR(ErrorKind::invalid_state, arena.designate(kv, 1, {9}));
    } else {
      arena.designate(kv, 1, {9});  // maps nothing
    }
    CHECK_ERROR(ErrorKind::invalid_state, arena.remove_tenant(1));
    CHECK(world.fault->calls() == calls);
    for (const RegionId region : {ring, kv}) arena.withdraw_registered(arena.address(region) + kPage, 1);
    arena.declare_registered(at, 2 * kPage);
    arena.declare_registered(at + kPage, 1);  // twice, in part
    arena.withdraw_registered(at, 2 * kPage);
    CHECK_ERROR(ErrorKind::invalid_state, arena.remove_tenant(1));
    arena.prepare_view(one, {1, 0});  // shows nothing new
    arena.remove_tenant(2);           // another's
    arena.check();
    arena.withdraw_registered(at + kPage, 1);
    CHECK_ERROR(ErrorKind::invalid_argument, arena.withdraw_registered(at + kPage, 1));
    arena.remove_tenant(1);
    CHECK_ERROR(ErrorKind::invalid_argument, arena.declare_registered(at, 1));  // gone
    arena.check();
  }
}

TEST(undoing_that_fails_breaks_the_arena) {
  World world;
  const RegionId kv = world.arena->add_kv_region(1, 4);
  world.fault->arm(Call::set_access, 1, true);
  world.fault->arm(Call::unmap, 1, true);
  CHECK_ERROR(ErrorKind::arena_broken, world.arena->designate(kv, 0, {0, 1, 2}));
  world.fault->disarm();
  CHECK(world.arena->broken() && world.arena->counts()[Owner::quarantine] == 3 && world.arena->counts().total == kPages);
  CHECK_ERROR(ErrorKind::arena_broken, world.arena->take(1, Owner::params, 1));
  world.arena->check();
  world.arena->close();
  CHECK(world.empty());
}

// Attach and detach leave nothing: neither regions nor addresses. An id is never given to another region.
TEST(fixed_slots_show_their_pages_for_good) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    World world(mode);
    world.arena.reset();
    const auto shared = std::make_shared<Arena>(world.fault, ArenaOptions{kPages * kPage, kPage, mode});
    Arena& arena = *shared;
    const auto bad = ErrorKind::invalid_argument;
    const RegionId before = arena.add_layer_region(2, "layer", arena.take(2, Owner::params, 2));
    std::memset(arena.address(before), 0x5A, 2 * kPage);  // somebody else has written into the pages
    arena.remove_tenant(2);
    const std::vector<PageId> ring = arena.take(2, Owner::ring, 1);
    const RegionId kv = arena.add_kv_region(1, 6);
    arena.designate(kv, 0, {8});
    for (const std::size_t slot : {2, 4}) arena.fix(kv, slot, ring);
    arena.seal(kv);
    arena.check();
    volatile std::byte* at = arena.address(kv);  // the compiler may think that different addresses are different bytes
    CHECK(at[2 * kPage] == std::byte{0} && at[5 * kPage] == std::byte{0});
    at[2 * kPage] = std::byte{7};
    at[5 * kPage] = std::byte{9};
    CHECK(at[4 * kPage] == std::byte{7} && at[3 * kPage] == std::byte{9});
    const std::uint64_t epoch = arena.epoch();
    CHECK_ERROR(bad, arena.fix(kv, 0, {ring[0]}));         // taken
    CHECK_ERROR(bad, arena.fix(kv, 2, {ring[0]}));
    CHECK_ERROR(bad, arena.fix(kv, 1, {9}));               // nobody's ring
    CHECK_ERROR(bad, arena.fix(kv, 6, {ring[0]}));
    CHECK_ERROR(bad, arena.fix(kv, 1, {kNoPage}));
    CHECK_ERROR(bad, arena.designate(kv, 1, {ring[0]}));   // it is fixed
    CHECK_ERROR(bad, arena.designate(kv, 2, {9}));
    Executor executor(shared);
    Step step;
    step.set_owner = {ring, Owner::ring, Owner::free, 1};
    CHECK_ERROR(bad, executor.apply({epoch, {step}}));
    CHECK(arena.epoch() == epoch);
    arena.check();
    arena.remove_tenant(1);
    CHECK(arena.counts()[Owner::free] == kPages);
    const std::vector<PageId> again = arena.take(2, Owner::ring, 3);
    arena.designate_ring(arena.add_ring_region(3, 2), 0, again);
    arena.check();
  }
}

TEST(layers_without_a_home_show_their_tenants_ring_for_good) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    World world(mode);
    world.arena.reset();
    const auto shared = std::make_shared<Arena>(world.fault, ArenaOptions{kPages * kPage, kPage, mode});
    Arena& arena = *shared;
    const auto bad = ErrorKind::invalid_argument;
    const RegionId before = arena.add_layer_region(2, "layer", arena.take(3, Owner::params, 2));
    std::memset(arena.address(before), 0x5A, 3 * kPage);  // somebody else has written into the pages
    arena.remove_tenant(2);
    const std::vector<PageId> ring = arena.take(3, Owner::ring, 1);
    const RegionId whole = arena.add_layer_region(1, "whole", ring);
    const RegionId small = arena.add_layer_region(1, "small", {ring[1], ring[2]});
    const PageId own = arena.take(1, Owner::params, 1)[0];
    arena.check();
    std::byte* at = arena.address(whole);
    CHECK(at[0] == std::byte{0} && at[3 * kPage - 1] == std::byte{0});
    at[kPage] = std::byte{7};
    CHECK(arena.address(small)[0] == std::byte{7});
    arena.add_layer_region(1, "home", {own});
    const std::uint64_t epoch = arena.epoch();
    const Usage usage = world.fault->usage();
    CHECK_ERROR(bad, arena.add_layer_region(1, "the same home", {own}));
    CHECK_ERROR(bad, arena.add_layer_region(1, "both", {ring[0], own}));
    CHECK_ERROR(bad, arena.add_layer_region(1, "both", {own, ring[0]}));
    CHECK_ERROR(bad, arena.add_layer_region(2, "another's", ring));
    CHECK_ERROR(bad, arena.add_layer_region(1, "twice", {ring[0], ring[0]}));
    world.fault->arm(Call::map, 1);
    CHECK_ERROR(ErrorKind::driver, arena.add_layer_region(1, "fails", ring));
    world.fault->disarm();
    CHECK(arena.epoch() == epoch && world.fault->usage().mappings == usage.mappings);
    Executor executor(shared);
    Step gone, free;
    free.set_owner = {ring, Owner::ring, Owner::free, 1};
    CHECK_ERROR(bad, executor.apply({epoch, {free}}));
    gone.kind = Step::Kind::point;
    gone.point = {whole, 0, {own, own, own}, false, 0};
    CHECK_ERROR(bad, executor.apply({epoch, {gone}}));
    arena.check();
    arena.remove_tenant(1);
    CHECK(arena.counts()[Owner::free] == kPages);
    arena.check();
  }
}

TEST(fixing_fails_whole) {
  World world(Mode::aliased);
  Arena& arena = *world.arena;
  const RegionId before = world.layer(2, 2);
  static_cast<void>(before);
  arena.remove_tenant(2);
  const std::vector<PageId> ring = arena.take(2, Owner::ring, 1);
  const RegionId kv = arena.add_kv_region(1, 4);
  const Usage usage = world.fault->usage();
  for (const Call call : {Call::map, Call::set_access, Call::fill}) {
    world.fault->arm(call, 1);
    CHECK_ERROR(ErrorKind::driver, arena.fix(kv, 1, ring));
    world.fault->disarm();
    CHECK(arena.shown(kv) == std::vector<PageId>(4, kNoPage) && world.fault->usage().mappings == usage.mappings);
    arena.check();
  }
  arena.fix(kv, 1, ring);
  arena.check();
}

TEST(removed_regions_leave_nothing) {
  World world;
  const Usage before = world.fault->usage();
  RegionId last = 0;
  for (int cycle = 0; cycle < 2000; ++cycle) {
    const TenantId tenant = static_cast<TenantId>(cycle);
    const RegionId first = world.layer(tenant, 2);
    CHECK(cycle == 0 || first > last);
    world.arena->add_ring_region(tenant, 2);
    last = world.arena->add_kv_region(tenant, 4);
    world.arena->designate(last, 0, {4, 5});
    CHECK(world.arena->regions() == 3);
    world.arena->hold(world.arena->address(last), kPage);  // and lets go
    world.arena->remove_tenant(tenant);
    const Usage after = world.fault->usage();
    CHECK(world.arena->regions() == 0 && after.reserved_bytes == 0 && after.mappings == before.mappings);
    CHECK_ERROR(ErrorKind::invalid_argument, world.arena->shown(first));
    CHECK_ERROR(ErrorKind::invalid_argument, world.arena->designate(last, 0, {4}));
  }
  world.arena->check();
}

// Whoever keeps a tensor keeps its addresses: zeros behind them, until the last one goes.
TEST(a_lease_outlives_its_region) {
  World world;
  const std::shared_ptr<Arena> arena = std::move(world.arena);
  const RegionId id = arena->add_layer_region(1, "layer", arena->take(2, Owner::params, 1));
  std::byte* at = arena->address(id);
  std::memset(at, 5, 2 * kPage);
  std::shared_ptr<Lease> one = arena->hold(at + kPage, kPage);
  std::shared_ptr<Lease> other = arena->hold(at, 2 * kPage);
  CHECK(one == other && one->address() == at && one->bytes() == 2 * kPage);
  CHECK_ERROR(ErrorKind::invalid_argument, arena->hold(at, 2 * kPage + 1));
  CHECK_ERROR(ErrorKind::invalid_argument, arena->hold(at - 1, 1));
  CHECK_ERROR(ErrorKind::invalid_argument, arena->hold(nullptr, 0));
  world.fault->arm(Call::retire, 1);  // then close() tries again
  arena->remove_tenant(1);
  CHECK(world.fault->usage().reserved_bytes == 2 * kPage && world.fault->usage().mapped_bytes == 0);
  arena->check();
  arena->close();
  CHECK(at[0] == std::byte{0} && at[2 * kPage - 1] == std::byte{0});
  at[0] = std::byte{9};  // nobody's
  CHECK(world.fault->usage().reserved_bytes == 2 * kPage && world.fault->usage().page_bytes == 0);
  one.reset();
  CHECK(at[0] == std::byte{9});
  std::thread([last = std::move(other)]() mutable { last.reset(); }).join();
  CHECK(world.empty());
}

// Of an arena that nobody closed, a lease keeps the bytes.
TEST(a_lease_keeps_its_arena) {
  World world;
  std::shared_ptr<Arena> arena = std::move(world.arena);
  const RegionId id = arena->add_layer_region(1, "layer", arena->take(1, Owner::params, 1));
  std::byte* at = arena->address(id);
  at[0] = std::byte{5};
  std::shared_ptr<Lease> lease = arena->hold(at, kPage);
  arena.reset();
  CHECK(at[0] == std::byte{5} && !world.empty());
  lease.reset();
  CHECK(world.empty());
}

// Tensors end on threads of their own while their tenants are removed.
TEST(leases_end_while_tenants_go) {
  World world;
  const std::shared_ptr<Arena> arena = std::move(world.arena);
  for (TenantId tenant = 0; tenant < 500; ++tenant) {
    const RegionId id = arena->add_layer_region(tenant, "layer", arena->take(1, Owner::params, tenant));
    std::shared_ptr<Lease> lease = arena->hold(arena->address(id), kPage);
    std::thread holder([lease = std::move(lease)]() mutable { lease.reset(); });
    arena->remove_tenant(tenant);
    holder.join();
    CHECK(world.fault->usage().reserved_bytes == 0);
  }
  arena->close();
  CHECK(world.empty());
}

TEST(refuses_what_would_break_the_tables) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    World world(mode);
    Arena& arena = *world.arena;
    const RegionId layer = world.layer(1, 2);
    const RegionId ring = arena.add_ring_region(1, 2);
    const RegionId kv = arena.add_kv_region(1, 4);
    arena.designate(kv, 0, {8});
    const std::uint64_t epoch = arena.epoch();
    const Usage before = world.fault->usage();
    const auto bad = ErrorKind::invalid_argument;
    const std::size_t huge = ~std::size_t{0};
    for (const Owner owner : {Owner::free, Owner::quarantine, static_cast<Owner>(9)}) CHECK_ERROR(bad, arena.take(1, owner, 1));
    for (const TenantId tenant : {kNobody, kUnknownBytes}) {
      CHECK_ERROR(bad, arena.take(1, Owner::params, tenant));
      CHECK_ERROR(bad, arena.add_ring_region(tenant, 1));
      CHECK_ERROR(bad, arena.add_kv_region(tenant, 1));
      CHECK_ERROR(bad, arena.add_layer_region(tenant, "layer", {5}));
      CHECK_ERROR(bad, arena.remove_tenant(tenant));
    }
    CHECK(arena.take(1, Owner::kv, 1, {2, 3, 4, 5, 6, 7}) == std::vector<PageId>{9});  // 8 has a place
    CHECK_ERROR(ErrorKind::out_of_memory, arena.take(huge, Owner::params, 1));
    CHECK_ERROR(ErrorKind::out_of_memory, arena.take(kPages - 3, Owner::params, 2, {12}));  // all that are free but one
    CHECK_ERROR(bad, arena.take(1, Owner::params, 2, {kPages}));
    CHECK_ERROR(bad, arena.add_layer_region(1, "layer", {0, 0}));
    CHECK_ERROR(ErrorKind::invalid_state, arena.add_kv_region(1, 4));
    CHECK_ERROR(ErrorKind::limit_exceeded, arena.add_ring_region(1, huge));
    CHECK_ERROR(ErrorKind::limit_exceeded, arena.add_kv_region(2, kMaxSlots + 1));
    CHECK_ERROR(bad, arena.designate(kv, 1, {5, 5}));
    CHECK_ERROR(bad, arena.designate(kv, 1, {kNoPage}));
    CHECK_ERROR(bad, arena.designate(kv, huge, {5, 6}));
    CHECK_ERROR(bad, arena.designate_ring(ring, huge, {0, 1}));
    CHECK_ERROR(bad, arena.designate_ring(ring, 0, {kNoPage}));
    CHECK_ERROR(bad, arena.designate_ring(ring, 0, {kPages}));
    CHECK_ERROR(bad, arena.designate_ring(layer, 0, {0}));
    CHECK_ERROR(bad, arena.prepare_view(layer, {0, kPages}));
    CHECK_ERROR(bad, arena.prepare_view(layer, {kNoPage, kNoPage}));
    CHECK_ERROR(bad, arena.prepare_view(kv, {1, 2, 3, 4}));
    CHECK_ERROR(bad, arena.designate(kv, 1, {8}));  // has a place
    CHECK_ERROR(bad, arena.designate(kv, 0, {7}));  // taken
    CHECK_ERROR(bad, arena.designate(kv, 3, {5, 6}));
    CHECK_ERROR(bad, arena.designate(kv, 5, {}));
    CHECK_ERROR(bad, arena.add_layer_region(1, "layer", {}));
    CHECK_ERROR(bad, arena.add_kv_region(2, 0));
    CHECK_ERROR(bad, arena.address(55));
    CHECK_ERROR(bad, Arena(nullptr, ArenaOptions{kPage, kPage, mode}));
    for (const auto& [bytes, page] : {std::pair{4 * kPage, std::size_t{0}}, {4 * kPage, 1000}, {kPage - 1, kPage}}) {
      CHECK_ERROR(bad, Arena(world.fault, ArenaOptions{bytes, page, mode}));
    }
    CHECK(arena.epoch() == epoch + 1 && same(world.fault->usage(), before));
    arena.check();
  }
}

}  // namespace
