// Changes of several plans: each sees what the ones before have left, all of them are one decision, and pages that go from one
// tenant to another within the change are zeroed behind it.
#include "plan_world.h"

using namespace remap;
using namespace remap::testing;
using World = remap::testing::PlanWorld;

namespace {

Plan plan_of(const World& world, std::vector<Step> steps) { return {world.arena->epoch(), std::move(steps)}; }

Applied extend(const World& world, std::vector<Step> steps, const Ordering& ordering = {}) {
  return world.executor->extend(plan_of(world, std::move(steps)), ordering);
}

std::vector<std::size_t> tables(const Arena& arena) {
  std::vector<std::size_t> all{arena.epoch()};
  for (const Owner each : arena.owners()) all.push_back(static_cast<std::size_t>(each));
  for (const TenantId each : arena.tenants()) all.push_back(each);
  for (RegionId region = 0; region < arena.regions(); ++region) {
    for (const PageId page : arena.shown(region)) all.push_back(page);
  }
  return all;
}

TEST(plans_of_several_tenants_are_one_decision) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    World world(mode);
    const std::uint64_t epoch = world.arena->epoch();
    world.apply({owner({6}, Owner::free, Owner::kv, kA)});
    extend(world, {owner({7}, Owner::free, Owner::kv, kB)});
    extend(world, {owner({6}, Owner::kv, Owner::free, kA)});
    CHECK(world.arena->epoch() == epoch && world.executor->undecided() && world.executor->mark() > 0);
    CHECK_ERROR(ErrorKind::invalid_state, world.apply({owner({8}, Owner::free, Owner::kv, kA)}));
    CHECK_ERROR(ErrorKind::invalid_argument, extend(world, {owner({7}, Owner::free, Owner::kv, kA)}));  // B has it
    world.executor->commit(nullptr);
    CHECK(world.arena->epoch() == epoch + 1 && world.executor->mark() == 0);
    CHECK(world.arena->counts(kA)[Owner::kv] == 0 && world.arena->counts(kB)[Owner::kv] == 1);
    CHECK_ERROR(ErrorKind::invalid_state, extend(world, {owner({8}, Owner::free, Owner::kv, kA)}));
    world.device->finish();
    world.arena->check();
  }
}

TEST(the_last_plans_can_be_undone_alone) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    World world(mode);
    const auto before = tables(*world.arena);
    world.apply({owner({6}, Owner::free, Owner::kv, kA)});
    const auto one = tables(*world.arena);
    const std::size_t mark = world.executor->mark();
    extend(world, {owner({2, 3}, Owner::params, Owner::ring, kA), point(world.ring, {2, 3}, false),
                   point(world.one, {2, 3}, true, 0), owner({0, 1}, Owner::params, Owner::kv, kA)});
    extend(world, {owner({7, 8}, Owner::free, Owner::kv, kB)});
    CHECK_ERROR(ErrorKind::invalid_argument, world.executor->rollback(world.executor->mark() + 1));
    world.executor->rollback(mark);
    CHECK(tables(*world.arena) == one && world.executor->undecided());
    // What was undone leaves nothing to the worker.
    const Applied again = extend(world, {owner({7}, Owner::free, Owner::kv, kB)});
    CHECK(again.pages_moved == 1);
    world.executor->rollback();
    CHECK(tables(*world.arena) == before && !world.executor->undecided());
    CHECK_ERROR(ErrorKind::invalid_state, world.executor->rollback());
    CHECK_ERROR(ErrorKind::invalid_state, world.executor->rollback(0));
    world.change({owner({6}, Owner::free, Owner::kv, kA)});
    world.device->finish();
    world.arena->check();
  }
}

TEST(a_plan_that_fails_leaves_those_before_it) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    World world(mode);
    world.apply({owner({6}, Owner::free, Owner::kv, kA)});
    const auto before = tables(*world.arena);
    world.device->fail_call(Call::fill, 1);
    CHECK_ERROR(ErrorKind::driver, extend(world, {owner({7, 9}, Owner::free, Owner::kv, kB)}, {0, world.b}));
    CHECK(tables(*world.arena) == before && world.executor->undecided());
    extend(world, {owner({7, 9}, Owner::free, Owner::kv, kB)}, {0, world.b});
    world.executor->commit(nullptr);
    world.device->finish();
    world.arena->check();
  }
}

// A has written its page; B gets it in the same change. Until zero_due() A's bytes are there, and the change can be undone; the
// zeroes come behind A's work, wherever that stands.
TEST(a_page_that_changes_tenant_is_due) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      for (const bool undone : {false, true}) {
        World world(mode, seed);
        world.change({owner({6, 7}, Owner::free, Owner::kv, kA)}, {0, world.a});
        for (int i = 0; i < 5; ++i) world.write(world.a, world.slot(world.kv_a, 0), 9);
        const auto before = tables(*world.arena);
        world.apply({owner({6}, Owner::kv, Owner::free, kA)}, {world.behind(world.a), world.a});
        CHECK(extend(world, {owner({6, 8}, Owner::free, Owner::kv, kB)}, {0, world.b}).zeroed_bytes == kPage);  // of 8
        CHECK_ERROR(ErrorKind::invalid_state, world.executor->commit(nullptr));
        if (undone) {
          world.executor->rollback();
          CHECK(tables(*world.arena) == before && world.executor->zero_due() == 0);
          world.read(world.a, world.slot(world.kv_a, 0), 9);
          world.write(world.a, world.slot(world.kv_a, 0), 4);
        } else {
          const std::uint64_t waited = world.device->waited;
          CHECK(world.executor->zero_due() == kPage);
          CHECK(world.executor->zero_due() == 0);
          CHECK(mode == Mode::strict || world.device->waited == waited);
          CHECK_ERROR(ErrorKind::invalid_state, world.executor->rollback());
          CHECK_ERROR(ErrorKind::invalid_state, world.executor->rollback(0));
          CHECK_ERROR(ErrorKind::invalid_state, extend(world, {owner({9}, Owner::free, Owner::kv, kB)}));
          world.executor->commit(nullptr);
          world.read(world.b, world.slot(world.kv_b, 0), 0);
          world.write(world.b, world.slot(world.kv_b, 0), 3);
          world.read(world.b, world.slot(world.kv_b, 0), 3);
        }
        world.device->finish();
        world.arena->check();
      }
    }
  }
}

// The event that the taker's plan names is taken in by extend(): it may be recorded anew before zero_due().
TEST(what_is_due_comes_behind_the_takers_event) {
  for (const bool on_stream : {true, false}) {
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      World world(Mode::aliased, seed);
      world.change({owner({6}, Owner::free, Owner::kv, kA)}, {0, world.a});
      for (int i = 0; i < 5; ++i) world.write(world.a, world.slot(world.kv_a, 0), 9);
      const EventHandle event = world.behind(world.a);
      world.apply({owner({6}, Owner::kv, Owner::free, kA)});
      extend(world, {owner({6}, Owner::free, Owner::kv, kB)}, {event, on_stream ? world.b : 0});
      world.device->record(event, world.b);
      CHECK(world.executor->zero_due() == kPage);
      world.executor->commit(nullptr);
      world.read(world.b, world.slot(world.kv_b, 0), 0);
      world.device->finish();
    }
  }
}

// As layers come home: the page is its new tenant's KV only on the way, and is zeroed wherever it is then.
TEST(what_is_due_may_move_on) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    World world(mode);
    // A's layer `one` streams through `two`; its pages are KV, then B's. (KV region of B: pages 6 to 11 alone, so A's page 6.)
    world.change({owner({6, 7}, Owner::free, Owner::kv, kB)}, {0, world.b});
    for (int i = 0; i < 3; ++i) world.write(world.b, world.slot(world.kv_b, 0), 9);
    world.apply({owner({6, 7}, Owner::kv, Owner::free, kB)}, {world.behind(world.b), world.b});
    extend(world, {owner({6, 7}, Owner::free, Owner::kv, kA)}, {0, world.a});
    extend(world, {owner({6, 7}, Owner::kv, Owner::ring, kA), point(world.ring, {6, 7}, false)}, {0, world.a});
    CHECK(world.executor->zero_due() == 2 * kPage);
    world.executor->commit(nullptr);
    world.read(world.a, world.arena->address(world.ring), 0);
    world.device->finish();
    world.arena->check();
  }
}

// A page of a layer comes home from `free`: it may hold another tenant's bytes, and is zeroed behind the decision, at once if that
// fails; where its tenant has no place to zero it, it is refused.
TEST(a_page_that_comes_home_is_due) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      World world(mode, seed);
      // A's layer `one` streams through its ring, of pages 2 and 3; its own pages are lent, and B has written one of them.
      world.change({owner({2, 3}, Owner::params, Owner::ring, kA), point(world.ring, {2, 3}, false), point(world.one, {2, 3}, true, 0),
                    owner({0, 1}, Owner::params, Owner::free, kA)},
                   {world.behind(world.a), world.a});
      world.executor->drain();
      const RegionId more = world.arena->add_kv_region(7, 2);
      world.arena->designate(more, 0, {0, 1});
      world.change({owner({0, 1}, Owner::free, Owner::kv, 7)}, {0, world.b});
      for (int i = 0; i < 3; ++i) world.write(world.b, world.slot(more, 0), 9);
      world.apply({owner({0, 1}, Owner::kv, Owner::free, 7)}, {world.behind(world.b), world.b});
      const Applied applied =
          extend(world, {owner({0, 1}, Owner::free, Owner::params, kA), point(world.one, {0, 1}, true, 0)}, {0, world.a});
      CHECK(applied.zeroed_bytes == 0 && applied.due == (std::vector<PageId>{0, 1}));
      CHECK(world.executor->zero_due() == 2 * kPage);
      world.executor->commit(nullptr, world.behind(world.a));
      world.read(world.a, mode == Mode::strict ? world.arena->address(world.one) : world.slot(world.kv_a, 6), 0);
      world.device->finish();
      world.executor->drain();
      world.arena->check();
    }
    World world(mode);
    CHECK_ERROR(ErrorKind::invalid_argument, world.apply({owner({8}, Owner::free, Owner::params, 7)}));  // no KV region
    // Strict mode shows it where it is used, and here it is not: only a region that shows it can be zeroed.
    world.apply({owner({8}, Owner::free, Owner::params, kB)});
    if (mode == Mode::strict) {
      CHECK_ERROR(ErrorKind::invalid_state, world.executor->zero_due());
      world.executor->rollback();
    } else {
      CHECK(world.executor->zero_due() == kPage);
      world.executor->commit(nullptr);
    }
    world.device->finish();
    world.arena->check();
  }
}

// B gives it up again within the change: A may have its own bytes back, and a third sees zeroes.
TEST(what_is_due_may_be_given_up) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    for (const bool back : {true, false}) {
      World world(mode);
      world.change({owner({6}, Owner::free, Owner::kv, kA)}, {0, world.a});
      world.write(world.a, world.slot(world.kv_a, 0), 9);
      world.apply({owner({6}, Owner::kv, Owner::free, kA)}, {world.behind(world.a), world.a});
      extend(world, {owner({6}, Owner::free, Owner::kv, kB)}, {0, world.b});
      const std::size_t mark = world.executor->mark();
      extend(world, {owner({6}, Owner::kv, Owner::free, kB)}, {world.behind(world.b), world.b});
      if (back) {
        extend(world, {owner({6}, Owner::free, Owner::kv, kA)}, {0, world.a});
        CHECK(world.executor->zero_due() == 0);
        world.executor->commit(nullptr);
        world.read(world.a, world.slot(world.kv_a, 0), 9);
      } else {
        world.executor->rollback(mark);  // it is due again
        CHECK_ERROR(ErrorKind::invalid_state, world.executor->commit(nullptr));
        CHECK(world.executor->zero_due() == kPage);
        world.executor->commit(nullptr);
        world.read(world.b, world.slot(world.kv_b, 0), 0);
      }
      world.device->finish();
      world.arena->check();
    }
  }
}

TEST(zeroes_that_fail_stay_due) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    World world(mode);
    world.change({owner({6, 8}, Owner::free, Owner::kv, kA)}, {0, world.a});
    world.write(world.a, world.slot(world.kv_a, 0), 9);
    world.write(world.a, world.slot(world.kv_a, 2), 9);
    world.apply({owner({6, 8}, Owner::kv, Owner::free, kA)}, {world.behind(world.a), world.a});
    extend(world, {owner({6, 8}, Owner::free, Owner::kv, kB)}, {0, world.b});
    world.device->fail_call(Call::fill, 2);  // two runs
    CHECK_ERROR(ErrorKind::driver, world.executor->zero_due());
    CHECK_ERROR(ErrorKind::invalid_state, world.executor->commit(nullptr));
    CHECK_ERROR(ErrorKind::invalid_state, world.executor->rollback());
    CHECK(world.executor->zero_due() > 0);
    world.executor->commit(nullptr);
    world.read(world.b, world.slot(world.kv_b, 0), 0);
    world.read(world.b, world.slot(world.kv_b, 2), 0);
    world.device->finish();
    world.arena->check();
  }
}

TEST(each_tenant_has_its_share_of_the_commit) {
  World world;
  const auto of_a = std::make_shared<Observer>(), of_b = std::make_shared<Observer>();
  // A: `one` streams through `two`. B has no ring; its layer goes elsewhere, and comes home within the change.
  world.apply({owner({2, 3}, Owner::params, Owner::ring, kA), point(world.ring, {2, 3}, false),
               point(world.one, {2, 3}, true, 0), owner({0, 1}, Owner::params, Owner::kv, kA)});
  extend(world, {point(world.other, {kNoPage, kNoPage}, true, 7)});
  extend(world, {point(world.other, {4, 5}, true, 7)});
  CHECK_ERROR(ErrorKind::invalid_argument, world.executor->commit({{kA, of_a, 0, false}}));
  CHECK_ERROR(ErrorKind::invalid_argument, world.executor->commit({{kA, of_a, 0, false}, {kA, of_b, 0, false}, {kB, of_b, 0, false}}));
  CHECK(world.executor->undecided());
  world.executor->commit({{kA, of_a, 0, false}, {kB, of_b, 0, false}});
  world.executor->drain();
  CHECK(of_a->released_count == 1 && of_a->last == 0 && of_b->released_count == 1 && of_b->last == 7);
  CHECK(of_a->stale + of_b->stale == 0);
  world.device->finish();
  world.arena->check();
}

// Two plans of a change point one region: the worker points it once, to what the last one says; undone, to what the first says.
TEST(a_region_is_pointed_once_for_a_change) {
  for (const bool undone : {false, true}) {
    World world;
    const auto observer = std::make_shared<Observer>();
    world.apply({owner({2, 3}, Owner::params, Owner::ring, kA), point(world.ring, {2, 3}, false),
                 point(world.one, {2, 3}, true, 0), owner({0, 1}, Owner::params, Owner::kv, kA)});
    const std::size_t mark = world.executor->mark();
    extend(world, {owner({0, 1}, Owner::kv, Owner::params, kA), point(world.one, {0, 1}, true, 0)});
    if (undone) world.executor->rollback(mark);
    world.executor->commit({{kA, observer, 0, false}});
    world.executor->drain();
    CHECK(observer->released_count == 1);
    CHECK(world.arena->shown(world.one) == (undone ? std::vector<PageId>{2, 3} : std::vector<PageId>{0, 1}));
    world.device->finish();
    world.arena->check();
  }
}

// Held in a plan and elsewhere in the next of the same change: the step comes, lets go of the layer and points nothing.
TEST(a_layer_that_goes_elsewhere_behind_a_deferred_step) {
  World world;
  const auto observer = std::make_shared<Observer>();
  world.apply({owner({2, 3}, Owner::params, Owner::ring, kA), point(world.ring, {2, 3}, false),
               point(world.one, {2, 3}, true, 0), owner({0, 1}, Owner::params, Owner::kv, kA)});
  extend(world, {point(world.one, {kNoPage, kNoPage}, true, 0)});
  world.executor->commit({{kA, observer, 0, false}});
  world.executor->drain();
  CHECK(observer->released_count == 1);
  CHECK(world.arena->shown(world.one) == (std::vector<PageId>{0, 1}));
  world.device->finish();
  world.arena->check();
}

}  // namespace
