// Changes of several plans: each is checked against what the ones before leave, nothing changes before all of them are applied as one,
// and pages that go from one tenant to another are zeroed behind the change.
#include <random>

#include "plan_world.h"

using namespace remap;
using namespace remap::testing;
using World = remap::testing::PlanWorld;

namespace {

// Each plan has a savepoint of its own.
struct Change : Draft {
  const World& world;
  explicit Change(const World& its) : Draft(its.arena), world(its) {}
  std::vector<PageId> add(std::vector<Step> steps) {
    const std::size_t place = begin();
    try {
      return Draft::add(Plan{world.arena->epoch(), std::move(steps)}).late;
    } catch (...) {
      cut(place);
      throw;
    }
  }
};

std::vector<std::size_t> tables(const Arena& arena) {
  std::vector<std::size_t> all{arena.epoch()};
  for (const Owner each : arena.owners()) all.push_back(static_cast<std::size_t>(each));
  for (const TenantId each : arena.tenants()) all.push_back(each);
  for (RegionId region = 0; region < arena.regions(); ++region) {
    for (const PageId page : arena.shown(region)) all.push_back(page);
  }
  return all;
}

std::vector<Step> stream_one(const World& world) {  // A's layer `one` streams through `two`, its own pages are KV
  return {owner({2, 3}, Owner::params, Owner::ring, kA), point(world.ring, {2, 3}, false), point(world.one, {2, 3}, true, 0),
          owner({0, 1}, Owner::params, Owner::kv, kA)};
}

TEST(plans_of_several_tenants_are_one_change) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    World world(mode);
    const auto before = tables(*world.arena);
    Change change(world);
    change.add({owner({6}, Owner::free, Owner::kv, kA)});
    change.add({owner({7}, Owner::free, Owner::kv, kB)});
    change.add({owner({6}, Owner::kv, Owner::free, kA)});
    CHECK(change.plans() == 3 && tables(*world.arena) == before && !world.executor->undecided());
    CHECK_ERROR(ErrorKind::invalid_argument, change.add({owner({7}, Owner::free, Owner::kv, kA)}));  // B has it
    CHECK(change.plans() == 3);
    world.executor->apply(change);
    world.executor->zero_due();
    CHECK(change.plans() == 0 && world.executor->undecided());
    CHECK_ERROR(ErrorKind::invalid_state, change.add({owner({8}, Owner::free, Owner::kv, kA)}));
    CHECK_ERROR(ErrorKind::invalid_state, world.apply({owner({8}, Owner::free, Owner::kv, kA)}));
    world.executor->commit(nullptr);
    CHECK(world.arena->epoch() == before[0] + 1);
    CHECK(world.arena->counts(kA)[Owner::kv] == 0 && world.arena->counts(kB)[Owner::kv] == 1);
    world.device->finish();
    world.arena->check();
  }
}

TEST(a_draft_looks_as_it_will_be_and_forgets) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    World world(mode);
    const auto before = tables(*world.arena);
    const PageOrder order({8, 7, 6, 0, 99});  // the last one does not exist
    Change change(world);
    CHECK(change.free_pages() == world.arena->free_pages() && !change.unmaps(world.ring));
    change.add({owner({6}, Owner::free, Owner::kv, kA)});
    change.add(stream_one(world));
    change.add({owner({7, 8}, Owner::free, Owner::kv, kB)});
    change.add({owner({0}, Owner::kv, Owner::free, kA)});
    CHECK(change.free_pages() == (std::vector<PageId>{0, 9, 10, 11}) && change.count_free(order) == 1 && !change.unmaps(world.ring));
    CHECK(change.holders({8, 6, 0, 1}) == (Draft::Holders{{kB, {8}}, {kA, {6, 1}}}));
    CHECK_ERROR(ErrorKind::invalid_argument, change.holders({kPages}));
    change.cut(1);
    CHECK(change.free_pages() == (std::vector<PageId>{7, 8, 9, 10, 11}) && !change.unmaps(world.ring));
    CHECK(change.first_free(order, 1) == std::vector<PageId>{8} && change.first_free(order, 9) == (std::vector<PageId>{8, 7}));
    change.cut(5);
    CHECK(change.plans() == 1);
    change.cut(0);
    CHECK(change.free_pages() == world.arena->free_pages() && tables(*world.arena) == before);
    world.arena->designate_ring(world.ring, 0, mode == Mode::strict ? std::vector<PageId>{} : std::vector<PageId>{2, 7});
    change.add(stream_one(world));
    CHECK(change.unmaps(world.ring) == (mode == Mode::aliased));  // page 7; empty slots unmap nothing
    change.cut(0);
    // What was dropped leaves nothing to the worker.
    change.add({owner({7}, Owner::free, Owner::kv, kB)});
    CHECK(world.executor->apply(change).points_deferred == 0);
    world.executor->zero_due();
    world.executor->commit(nullptr);
    world.device->finish();
    world.arena->check();
  }
}

TEST(a_draft_of_an_arena_that_has_changed_is_stale) {
  World world;
  Change change(world);
  change.add({owner({6}, Owner::free, Owner::kv, kA)});
  world.change({owner({7}, Owner::free, Owner::kv, kB)});
  CHECK_ERROR(ErrorKind::stale_plan, change.add({owner({8}, Owner::free, Owner::kv, kA)}));
  CHECK_ERROR(ErrorKind::stale_plan, world.executor->apply(change));
  change.cut(0);
  change.add({owner({8}, Owner::free, Owner::kv, kA)});
  world.executor->apply(change);
  world.executor->zero_due();
  world.executor->commit(nullptr);
  CHECK_ERROR(ErrorKind::invalid_argument, Draft(nullptr));
  world.device->finish();
}

TEST(a_change_that_fails_leaves_all_as_it_was) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    for (unsigned nth = 1;; ++nth) {
      World world(mode);
      const auto before = tables(*world.arena);
      Change change(world);
      change.add({owner({6}, Owner::free, Owner::kv, kA)});
      change.add(stream_one(world));
      change.add({owner({7, 9}, Owner::free, Owner::kv, kB)});
      world.device->fail_any(nth);
      bool failed = false;
      try {
        world.executor->apply(change, {{kA, {0, world.a}}, {kB, {0, world.b}}});
      } catch (const Error& error) {
        failed = error.kind() == ErrorKind::driver;
        CHECK(failed);
      }
      world.device->heal();
      if (!failed) {
        CHECK(nth > 2);
        break;
      }
      CHECK(tables(*world.arena) == before && !world.executor->undecided() && change.plans() == 3);
      world.arena->check();
      world.executor->apply(change, {{kA, {0, world.a}}, {kB, {0, world.b}}});
      world.executor->zero_due();
      world.executor->commit(nullptr, world.behind(world.a));
      world.read(world.b, world.slot(world.kv_b, 1), 0);
      world.device->finish();
      world.executor->drain();
      world.arena->check();
    }
  }
}

// A has written its page; B gets it in the same change. Until zero_due() A's bytes are there, for its blocks to move; the zeroes come
// behind that, wherever it stands.
TEST(a_page_that_changes_tenant_is_due) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      World world(mode, seed);
      world.change({owner({6, 7}, Owner::free, Owner::kv, kA)}, {0, world.a});
      for (int i = 0; i < 5; ++i) world.write(world.a, world.slot(world.kv_a, 0), 9);
      Change change(world);
      CHECK(change.add({owner({6}, Owner::kv, Owner::free, kA)}).empty());
      CHECK(change.add({owner({6, 8}, Owner::free, Owner::kv, kB)}) == std::vector<PageId>{6});
      const Applied applied = world.executor->apply(change, {{kA, {world.behind(world.a), world.a}}, {kB, {0, world.b}}});
      CHECK(world.executor->zero_free() == kPage && applied.due == std::vector<PageId>{6});
      CHECK_ERROR(ErrorKind::invalid_state, world.executor->commit(nullptr));
      for (int i = 0; i < 5; ++i) world.read(world.a, world.slot(world.kv_a, 0), 9);
      const std::uint64_t waited = world.device->waited;
      CHECK(world.executor->zero_due({world.behind(world.a)}) == kPage);
      CHECK(world.executor->zero_due() == 0);
      CHECK(mode == Mode::strict || world.device->waited == waited);
      CHECK(world.arena->shown(world.kv_a)[0] == 6);
      world.executor->commit(nullptr, world.behind(world.a));
      CHECK(world.arena->shown(world.kv_a)[0] == (mode == Mode::strict ? kNoPage : 6));
      world.read(world.b, world.slot(world.kv_b, 0), 0);
      world.write(world.b, world.slot(world.kv_b, 0), 3);
      world.read(world.b, world.slot(world.kv_b, 0), 3);
      world.device->finish();
      world.arena->check();
    }
  }
}

// A page that was nobody's passes through A's hands, whose blocks may move there and on.
TEST(a_page_that_passes_through_other_hands_is_due) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    for (const bool to_b : {true, false}) {
      World world(mode);
      world.change({owner({6}, Owner::free, Owner::kv, kB)}, {0, world.b});
      world.change({owner({6}, Owner::kv, Owner::free, kB)}, {world.behind(world.b), world.b});  // B's bytes, if any
      Change change(world);
      CHECK(change.add({owner({6}, Owner::free, Owner::kv, kA)}).empty());
      change.add({owner({6}, Owner::kv, Owner::free, kA)});
      if (to_b) CHECK(change.add({owner({6}, Owner::free, Owner::kv, kB)}) == std::vector<PageId>{6});
      world.executor->apply(change, {{kA, {world.behind(world.a), world.a}}, {kB, {0, world.b}}});
      CHECK(world.executor->zero_free() == 0);
      world.write(world.a, world.slot(world.kv_a, 0), 9);
      CHECK(world.executor->zero_due({world.behind(world.a)}) == (to_b ? kPage : 0));
      world.executor->commit(nullptr, world.behind(world.a));
      if (to_b) {
        world.read(world.b, world.slot(world.kv_b, 0), 0);
      } else {  // what B has left may be there still
        CHECK(world.change({owner({6}, Owner::free, Owner::kv, kA)}, {0, world.a}).zeroed_bytes == kPage);
        world.read(world.a, world.slot(world.kv_a, 0), 0);
      }
      world.device->finish();
      world.arena->check();
    }
  }
}

// The event that the taker names is taken in by apply(): it may be recorded anew before zero_due().
TEST(what_is_due_comes_behind_the_takers_event) {
  for (const bool on_stream : {true, false}) {
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      World world(Mode::aliased, seed);
      world.change({owner({6}, Owner::free, Owner::kv, kA)}, {0, world.a});
      for (int i = 0; i < 5; ++i) world.write(world.a, world.slot(world.kv_a, 0), 9);
      const EventHandle event = world.behind(world.a);
      Change change(world);
      change.add({owner({6}, Owner::kv, Owner::free, kA)});
      change.add({owner({6}, Owner::free, Owner::kv, kB)});
      world.executor->apply(change, {{kB, {event, on_stream ? world.b : 0}}});
      world.device->record(event, world.b);
      CHECK(world.executor->zero_due() == kPage);
      world.executor->commit(nullptr);
      world.read(world.b, world.slot(world.kv_b, 0), 0);
      world.device->finish();
    }
  }
}

// The page is its new tenant's KV only on the way, and is zeroed wherever it is then.
TEST(what_is_due_may_move_on) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    World world(mode);
    world.change({owner({6, 7}, Owner::free, Owner::kv, kB)}, {0, world.b});
    for (int i = 0; i < 3; ++i) world.write(world.b, world.slot(world.kv_b, 0), 9);
    Change change(world);
    change.add({owner({6, 7}, Owner::kv, Owner::free, kB)});
    change.add({owner({6, 7}, Owner::free, Owner::kv, kA)});
    change.add({owner({6, 7}, Owner::kv, Owner::ring, kA), point(world.ring, {6, 7}, false)});
    const EventHandle after = world.behind(world.b);
    world.executor->apply(change, {{kA, {0, world.a}}, {kB, {after, world.b}}});
    CHECK(world.executor->zero_due() == 2 * kPage);
    world.executor->commit(nullptr, after);
    world.read(world.a, world.arena->address(world.ring), 0);
    world.device->finish();
    world.arena->check();
  }
}

// A page of a layer comes home from `free`: it may hold another tenant's bytes, and is zeroed behind the change; where its tenant has no
// place to zero it, it is refused.
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
      Change change(world);
      change.add({owner({0, 1}, Owner::kv, Owner::free, 7)});
      change.add({owner({0, 1}, Owner::free, Owner::params, kA), point(world.one, {0, 1}, true, 0)});
      const EventHandle after = world.behind(world.b);
      const Applied applied = world.executor->apply(change, {{7, {after, world.b}}, {kA, {0, world.a}}});
      CHECK(world.executor->zero_free() == 0 && applied.due == (std::vector<PageId>{0, 1}));
      CHECK(world.executor->zero_due() == 2 * kPage);
      world.executor->commit({{kA, nullptr, world.behind(world.a), false}, {7, nullptr, after, false}});
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
      world.executor->forget(kB);
    } else {
      CHECK(world.executor->zero_due() == kPage);
    }
    world.executor->commit(nullptr);
    world.device->finish();
    world.arena->check();
  }
}

// B gives it up again within the change: nobody misses what lay there. A gets zeroes, since B's blocks may have moved there and on.
TEST(what_is_due_may_be_given_up) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    for (const bool back : {true, false}) {
      World world(mode);
      world.change({owner({6}, Owner::free, Owner::kv, kA)}, {0, world.a});
      world.write(world.a, world.slot(world.kv_a, 0), 9);
      Change change(world);
      change.add({owner({6}, Owner::kv, Owner::free, kA)});
      CHECK(change.add({owner({6}, Owner::free, Owner::kv, kB)}) == std::vector<PageId>{6});
      change.add({owner({6}, Owner::kv, Owner::free, kB)});
      if (back) CHECK(change.add({owner({6}, Owner::free, Owner::kv, kA)}) == std::vector<PageId>{6});
      const EventHandle after = world.behind(world.a);
      world.executor->apply(change, {{kA, {after, world.a}}, {kB, {world.behind(world.b), world.b}}});
      world.write(world.b, world.slot(world.kv_b, 0), 5);
      CHECK(world.executor->zero_due({world.behind(world.b)}) == (back ? kPage : 0));
      world.executor->commit({{kA, nullptr, after, false}, {kB, nullptr, world.behind(world.b), false}});
      if (!back) CHECK(world.change({owner({6}, Owner::free, Owner::kv, kA)}, {0, world.a}).zeroed_bytes == kPage);
      world.read(world.a, world.slot(world.kv_a, 0), 0);
      world.device->finish();
      world.arena->check();
    }
  }
}

TEST(what_fails_stays_due) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    World world(mode);
    world.change({owner({6, 8}, Owner::free, Owner::kv, kA)}, {0, world.a});
    world.write(world.a, world.slot(world.kv_a, 0), 9);
    world.write(world.a, world.slot(world.kv_a, 2), 9);
    Change change(world);
    change.add({owner({6, 8}, Owner::kv, Owner::free, kA)});
    change.add({owner({6, 8}, Owner::free, Owner::kv, kB)});
    const EventHandle after = world.behind(world.a);
    world.executor->apply(change, {{kA, {after, world.a}}, {kB, {0, world.b}}});
    world.device->fail_call(Call::fill, 2);  // two runs
    CHECK_ERROR(ErrorKind::driver, world.executor->zero_due());
    CHECK_ERROR(ErrorKind::invalid_state, world.executor->commit(nullptr));
    CHECK(world.executor->zero_due() > 0);
    if (mode == Mode::strict) {
      for (const Call call : {Call::synchronize, Call::unmap}) {
        world.device->fail_call(call, call == Call::unmap ? 2 : 1);  // of two slots
        CHECK_ERROR(ErrorKind::driver, world.executor->commit(nullptr, after));
        CHECK(world.executor->undecided());
        world.arena->check();
      }
    }
    world.executor->commit(nullptr, after);
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
  Change change(world);
  change.add(stream_one(world));
  change.add({point(world.other, {kNoPage, kNoPage}, true, 7)});
  change.add({point(world.other, {4, 5}, true, 7)});
  world.executor->apply(change);
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

// Two plans of a change point one region: it is pointed once, to what the last one says; nobody waits for a layer that ends elsewhere.
TEST(a_region_is_pointed_once_for_a_change) {
  for (const bool home : {true, false}) {
    for (const Mode mode : {Mode::aliased, Mode::strict}) {
      World world(mode);
      const auto observer = std::make_shared<Observer>();
      Change change(world);
      change.add(stream_one(world));
      change.add(home ? std::vector<Step>{owner({0, 1}, Owner::kv, Owner::params, kA), point(world.one, {0, 1}, true, 0)}
                      : std::vector<Step>{point(world.one, {kNoPage, kNoPage}, true, 0)});
      const std::size_t maps = world.device->count(Call::map);
      world.executor->apply(change);
      world.executor->zero_due();
      world.executor->commit({{kA, observer, 0, false}});
      world.executor->drain();
      CHECK(observer->released_count == (home && mode == Mode::aliased ? 1 : 0));
      CHECK(world.device->count(Call::map) - maps == (mode == Mode::aliased ? 1u : 2u));  // the ring; strict: pages that are KV on the way
      const std::vector<PageId> shown = world.arena->shown(world.one);
      CHECK(shown == (home || mode == Mode::aliased ? std::vector<PageId>{0, 1} : std::vector<PageId>{kNoPage, kNoPage}));
      world.device->finish();
      world.arena->check();
    }
  }
}

// The obvious way to carry out several plans is one after the other. As one change they lead to the same.
TEST(one_change_of_many_plans_is_as_many_changes) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const Mode mode = seed % 2 == 0 ? Mode::aliased : Mode::strict;
    World one(mode, seed), many(mode, seed);
    std::mt19937_64 random(seed);
    const auto below = [&](std::size_t end) { return static_cast<std::size_t>(random() % end); };
    Change change(one);
    bool streams = false;
    std::size_t kept = 0;
    for (int times = 0; times < 12; ++times) {
      const TenantId tenant = below(2) == 0 ? kA : kB;
      std::vector<PageId> its, free;
      for (PageId page = 6; page < kPages; ++page) {
        if (below(2) == 0) continue;
        const Draft::Holders now = change.holders({page});
        if (now.empty()) free.push_back(page);
        if (!now.empty() && now[0].first == tenant) its.push_back(page);
      }
      std::vector<Step> steps;
      if (below(4) == 0) {
        steps = streams ? std::vector<Step>{owner({0, 1}, Owner::kv, Owner::params, kA), owner({2, 3}, Owner::ring, Owner::params, kA),
                                            point(one.one, {0, 1}, true, 0)}
                        : stream_one(one);
        streams = !streams;
      } else if (below(2) == 0 && !its.empty()) {
        steps = {owner(its, Owner::kv, Owner::free, tenant)};
      } else if (!free.empty()) {
        steps = {owner(free, Owner::free, Owner::kv, tenant)};
      }
      if (steps.empty()) continue;
      change.add(steps);
      if (below(5) == 0) {  // it is dropped again
        change.cut(change.plans() - 1);
        if (steps.size() > 1) streams = !streams;
        continue;
      }
      many.apply(steps);
      many.executor->zero_due();
      many.executor->commit(nullptr);
      many.executor->drain();
      CHECK(change.free_pages() == many.arena->free_pages() && change.plans() == ++kept);
    }
    one.executor->apply(change);
    one.executor->zero_due();
    one.executor->commit(nullptr);
    one.executor->drain();
    auto first = tables(*one.arena), second = tables(*many.arena);
    first[0] = second[0] = 0;  // one epoch, or many
    if (mode == Mode::aliased) {  // the ring's region shows what it was pointed at last, which nobody uses
      CHECK(one.arena->owners() == many.arena->owners() && one.arena->tenants() == many.arena->tenants());
      CHECK(one.arena->shown(one.one) == many.arena->shown(many.one));
    } else {
      CHECK(first == second);
    }
    one.device->finish();
    one.arena->check();
    many.arena->check();
  }
}

}  // namespace
