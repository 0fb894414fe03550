// Plans: refused, applied, undone; deferred re-pointing; and what happens when undoing fails too.
#include "remap/executor.h"

#include <cstring>
#include <map>
#include <memory>

#include "plans.h"

using namespace remap;
using namespace remap::testing;

namespace {

constexpr std::size_t kPage = HostArena::kPage;

struct World : TwoLayers {
  explicit World(Mode mode, bool exchange = true) : TwoLayers(mode, exchange, 8, {4, 5}) {
    std::memset(arena->address(one), 1, 2 * kPage);
    std::memset(arena->address(two), 2, 2 * kPage);
  }
  bool reads(RegionId region, int value) const {
    const std::byte* at = arena->address(region);
    return at[0] == static_cast<std::byte>(value) && at[2 * kPage - 1] == static_cast<std::byte>(value);
  }
  Plan sweep() const { return stream(false); }
  void intact() const { CHECK(reads(one, 1) && reads(two, 2)); }
  void reached() const { CHECK(reads(two, 1)); }
};

TEST(applies_and_goes_back) {
  everywhere<World>([](World& world) {
    const auto observer = std::make_shared<Observer>();
    const std::uint64_t epoch = world.arena->epoch();
    const Applied applied = world.executor->apply(world.stream());
    world.decide(observer);
    const bool strict = world.arena->mode() == Mode::strict;
    CHECK(applied.epoch == epoch + 1 && world.arena->epoch() == epoch + 1 && applied.pages_moved == 6);
    CHECK(applied.points_deferred == (strict ? 0u : 1u) && observer->released_count == (strict ? 0 : 1));
    CHECK(strict || observer->last == 1);
    CHECK((world.arena->shown(world.two) == std::vector<PageId>{0, 1}) && world.reads(world.two, 1));
    CHECK(world.arena->counts()[Owner::kv] == 4 && world.arena->counts()[Owner::ring] == 2);
    std::byte* kv = world.arena->address(world.kv);
    CHECK(kv[2 * kPage] == std::byte{2});
    std::memset(kv, 9, 4 * kPage);
    world.arena->check();
    world.executor->apply(world.back());
    world.decide(observer);
    CHECK(world.reads(world.one, 1) && world.reads(world.two, 9));  // its pages, with what KV wrote there
    CHECK(world.arena->counts()[Owner::params] == 4 && world.arena->counts()[Owner::free] == 4);
  });
}

TEST(no_change_begins_before_the_last_is_committed) {
  everywhere<World>([](World& world) {
    world.apply({owner({4, 5}, Owner::free, Owner::kv), owner({4}, Owner::kv, Owner::free)});  // steps build on each other
    const auto applied = world.state();
    CHECK_ERROR(ErrorKind::invalid_state, world.executor->apply(world.stream()));
    CHECK(world.state() == applied && world.reads(world.one, 1) && world.reads(world.two, 2));
    world.decide();
    CHECK(world.arena->counts()[Owner::kv] == 1);
  });
}

TEST(every_call_fails) { every_call_of_a_plan_fails<World>(); }

// Layer two is computed elsewhere: its pages are KV, and its region shows nothing.
struct Leaving : World {
  using World::World;
  Plan leave() const { return plan({point(two, {kNoPage, kNoPage}, true, 1), owner({2, 3}, Owner::params, Owner::kv)}); }
  Plan come() const { return plan({owner({2, 3}, Owner::kv, Owner::params), point(two, {2, 3}, true, 1)}); }
  Plan sweep() const { return leave(); }
  void reached() const {
    CHECK(arena->counts()[Owner::kv] == 2 && arena->counts()[Owner::ring] == 0 && reads(one, 1));
    std::memset(arena->address(kv) + 2 * kPage, 7, 2 * kPage);
  }
};

TEST(a_layer_that_is_computed_elsewhere_comes_back) {
  everywhere<Leaving>([](Leaving& world) {
    const auto observer = std::make_shared<Observer>();
    const bool strict = world.arena->mode() == Mode::strict;
    for (int times = 1; times <= 3; ++times) {
      const Applied applied = world.executor->apply(world.leave());
      world.decide(observer);
      CHECK(applied.points_deferred == 0 && applied.pages_moved == 2);
      CHECK(world.arena->shown(world.two)[0] == (strict ? kNoPage : 2) && observer->released_count == (strict ? 0 : times - 1));
      world.reached();
      world.arena->check();
      world.executor->apply(world.come());
      world.decide(observer);
      CHECK((world.arena->shown(world.two) == std::vector<PageId>{2, 3}) && world.reads(world.two, 7));
      CHECK(world.arena->counts()[Owner::params] == 4);
      world.arena->check();
    }
  });
}

TEST(every_call_of_leaving_fails) { every_call_of_a_plan_fails<Leaving>(); }

// What is due needs the regions and pages that it names.
TEST(a_tenant_of_a_change_that_is_not_committed_is_not_removed) {
  everywhere<World>([](World& world) {
    world.arena->take(1, Owner::params, 2, {4, 5});
    world.executor->apply(world.stream());
    CHECK_ERROR(ErrorKind::invalid_state, world.arena->remove_tenant(kTenant));
    CHECK_ERROR(ErrorKind::invalid_state, world.arena->remove_tenant(kTenant, true));
    CHECK(world.executor->undecided() && !world.arena->broken());
    world.arena->remove_tenant(2);  // the change does not concern it
    world.decide();
    world.arena->remove_tenant(kTenant);
    CHECK(world.arena->counts()[Owner::free] == 8);
  });
}

TEST(what_cannot_be_is_refused_before_any_backend_call) {
  everywhere<World>([](World& world) {
    const bool strict = world.arena->mode() == Mode::strict;
    const std::vector<std::vector<Step>> bad{
        {owner({0}, Owner::free, Owner::kv)},
        {owner({8}, Owner::free, Owner::kv)},
        {owner({4, 4}, Owner::free, Owner::kv)},
        {owner({0}, Owner::params, Owner::ring, 2)},
        {owner({0}, Owner::params, Owner::quarantine)},
        {owner({4}, static_cast<Owner>(9), Owner::kv)},
        {owner({4}, Owner::free, Owner::kv, kNobody)},
        {owner({4}, Owner::free, Owner::kv, kUnknownBytes)},
        {owner({4}, Owner::free, Owner::kv), owner({4}, Owner::free, Owner::kv)},
        {point(world.kv, {4}, false)},
        {point(77, {4}, false)},
        {point(world.two, {0}, true)},
        {point(world.two, {0, kNoPage}, true)},
        {point(world.two, {0, 8}, true)},
        {point(world.ring, {0, 1, 2}, false)},
        // What a layer shows when the plan is done must be its own home or its tenant's ring.
        {owner({2, 3}, Owner::params, Owner::kv)},
        {owner({0}, Owner::params, Owner::free)},
        {owner({0}, Owner::params, Owner::ring)},  // a ring's page before a page of the home
        {point(world.two, {0, 1}, false)},
        {owner({4, 5}, Owner::free, Owner::ring), point(world.two, {4, 3}, false)},
        {owner({6}, Owner::free, Owner::kv)},  // without a place
        {point(world.ring, {4, 5}, false)},
    };
    for (std::size_t i = 0; i + (strict ? 0 : 1) < bad.size(); ++i) {
      world.refuses(ErrorKind::invalid_argument, world.plan(bad[i]));
    }
    world.refuses(ErrorKind::stale_plan, {world.arena->epoch() - 1, {owner({4}, Owner::free, Owner::kv)}});
    CHECK_ERROR(ErrorKind::invalid_state, world.executor->commit(nullptr));
  });
}

TEST(nothing_is_asked_of_a_closed_arena) {
  World world(Mode::aliased);
  world.executor->apply(world.stream());
  world.arena->close();
  CHECK(!world.executor->undecided());
  CHECK_ERROR(ErrorKind::invalid_state, world.executor->commit(nullptr));
}

// A commit that cannot start what the change deferred changes nothing.
TEST(a_stopped_executor_commits_nothing_deferred) {
  World world(Mode::aliased);
  world.executor->stop();
  world.executor->apply(world.stream());
  const auto applied = world.state();
  CHECK_ERROR(ErrorKind::invalid_state, world.executor->commit(nullptr));
  CHECK(world.executor->undecided() && world.state() == applied);
  world.executor->drain();
  CHECK_ERROR(ErrorKind::invalid_argument, Executor(nullptr));
}

// Each tenant has two layers of one page; the second comes through the first one's page. Both steps fail.
TEST(failures_are_asked_and_mended_by_tenant) {
  const HostArena world(HostArena::host(8), 8, Mode::aliased);
  Arena& arena = *world.arena;
  Executor& executor = *world.executor;
  const auto observer = std::make_shared<Observer>();
  std::map<TenantId, RegionId> second, ring;
  for (const TenantId tenant : {TenantId{1}, TenantId{2}}) {
    world.add_layer("one", 1, tenant);
    second[tenant] = world.add_layer("two", 1, tenant);
    ring[tenant] = arena.add_ring_region(tenant, 1);
  }
  for (const TenantId tenant : {TenantId{1}, TenantId{2}}) {
    const PageId page = 2 * (tenant - 1);
    world.apply({owner({page}, Owner::params, Owner::ring, tenant), point(ring[tenant], {page}, false),
                 point(second[tenant], {page}, true, tenant), owner({page + 1}, Owner::params, Owner::free, tenant)});
    world.fault->arm(Call::exchange, 1);
    world.decide(observer);
  }
  CHECK(executor.failed_points() == 2 && executor.failed_points(1) == 1 && executor.failed_points(2) == 1);
  CHECK(executor.failed_points(3) == 0);
  executor.retry_failed(3);
  CHECK(executor.failed_points() == 2);
  executor.retry_failed(2);
  CHECK(executor.failed_points() == 1 && executor.failed_points(1) == 1 && executor.failed_points(2) == 0);
  CHECK(observer->released_count == 1 && observer->last == 2);
  CHECK((arena.shown(second[2]) == std::vector<PageId>{2}) && (arena.shown(second[1]) == std::vector<PageId>{1}));
  world.fault->arm(Call::exchange, 1, true);
  CHECK_ERROR(ErrorKind::driver, executor.retry_failed(1));
  CHECK(executor.failed_points(1) == 1);
  world.fault->disarm();
  executor.forget(2);
  CHECK(executor.failed_points(1) == 1);
  executor.retry_failed(1);
  CHECK(executor.failed_points() == 0 && (arena.shown(second[1]) == std::vector<PageId>{0}));
  arena.check();
}

// Without exchange a region is unmapped before it is mapped anew: if it can be mapped neither anew nor as before, nobody may
// use it, which its layer is told; and the arena still closes.
TEST(a_worker_that_cannot_undo_breaks_the_arena) {
  World world(Mode::aliased, false);
  const auto observer = std::make_shared<Observer>();
  world.executor->apply(world.stream());
  world.fault->arm(Call::map, 1, true);
  world.decide(observer);
  CHECK(observer->failed_count == 1 && world.arena->broken() && world.arena->counts()[Owner::quarantine] == 2);
  world.fault->disarm();
  CHECK_ERROR(ErrorKind::arena_broken, world.executor->retry_failed());
  world.end();
}

// The next plan changes the target before the failed step was tried again: it ends at the newest target.
TEST(a_retry_points_at_the_present_target) {
  World world(Mode::aliased);
  const auto observer = std::make_shared<Observer>();
  world.executor->apply(world.stream());
  world.fault->arm(Call::exchange, 1);
  world.decide(observer);
  CHECK(world.executor->failed_points() == 1);
  world.executor->apply(world.back());
  world.decide(observer);
  world.executor->retry_failed();
  CHECK((world.arena->shown(world.two) == std::vector<PageId>{2, 3}) && world.reads(world.two, 2));
  world.arena->check();
}

// A region in a declared range shows what it shows, whatever plan comes.
TEST(declared_ranges_refuse_plans) {
  everywhere<World>([](World& world) {
    Arena& arena = *world.arena;
    const bool strict = arena.mode() == Mode::strict;
    const auto refused = [&](RegionId region, std::vector<Step> steps) {
      // One byte of the region's last page is enough.
      const std::byte* at = arena.address(region) + arena.region_bytes(region) - 1;
      arena.declare_registered(at, 1);
      const Error error = world.refuses(ErrorKind::invalid_state, world.plan(std::move(steps)));
      std::map<std::string, std::int64_t> fields;
      for (const auto& [name, value] : error.fields()) fields[name] = std::get<std::int64_t>(value);
      CHECK(fields.at("region") == static_cast<std::int64_t>(region));
      CHECK(fields.at("address") == static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(at)));
      arena.check();
      arena.withdraw_registered(at, 1);
    };
    const Step lend = owner({0, 1}, Owner::params, Owner::ring);
    refused(world.two, {lend, point(world.two, {0, 1}, true, 1)});
    refused(world.two, {lend, point(world.two, {0, 1}, false, 1)});
    refused(world.ring, {lend, point(world.ring, {0, 1}, false)});
    if (strict) refused(world.kv, {owner({4}, Owner::free, Owner::kv)});

    // What it shows already; and, aliased, KV whoever owns it.
    arena.declare_registered(arena.address(world.two), 1);
    if (!strict) arena.declare_registered(arena.address(world.kv), 6 * kPage);
    world.apply({point(world.two, {2, 3}, true, 1), owner({4, 5}, Owner::free, Owner::kv)});
    CHECK_ERROR(ErrorKind::invalid_state, arena.declare_registered(arena.address(world.one), 1));  // not decided
    world.decide();
    world.apply({owner({4, 5}, Owner::kv, Owner::free)});
    world.decide();
    arena.withdraw_registered(arena.address(world.two), 1);
    if (!strict) arena.withdraw_registered(arena.address(world.kv), 6 * kPage);

    // Still to be re-pointed: who looked its pages up has the wrong ones.
    world.executor->apply(world.stream());
    world.fault->arm_any(1, true);
    world.decide();
    world.fault->disarm();
    if (!strict) CHECK_ERROR(ErrorKind::invalid_state, arena.declare_registered(arena.address(world.two), 1));
    world.executor->retry_failed();
    arena.declare_registered(arena.address(world.two), 1);
    CHECK_ERROR(ErrorKind::invalid_state, world.executor->apply(world.back()));
    CHECK_ERROR(ErrorKind::invalid_state, arena.remove_tenant(kTenant));
    arena.check();
  });  // closes, declared or not
}

}  // namespace
