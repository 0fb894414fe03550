// Zeroing of pages that change tenant, where tenants compute on streams: what it comes behind, who waits for it, and what an
// undone plan leaves behind.
#include "plan_world.h"

using namespace remap;
using namespace remap::testing;
using World = remap::testing::PlanWorld;

namespace {

TEST(zeroing_is_enqueued_where_the_tenant_computes) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    World world(Mode::aliased, seed);
    const std::uint64_t waited = world.device->waited;
    // Never used since the device was started: their contents are unknown.
    const Applied applied = world.change({owner({6, 7, 9}, Owner::free, Owner::kv, kB)}, {0, world.b});
    CHECK(applied.zeroed_bytes == 3 * kPage && world.device->waited == waited);
    CHECK(world.device->count(Call::fill) == 2 + 3);  // runs: 6 7 and 9; the layers' homes before
    for (const std::size_t slot : {0U, 1U, 3U}) {
      world.read(world.b, world.slot(world.kv_b, slot), 0);
      world.write(world.b, world.slot(world.kv_b, slot), 5);
      world.read(world.b, world.slot(world.kv_b, slot), 5);
    }
    // Its own bytes may come back to it.
    world.change({owner({7}, Owner::kv, Owner::free, kB)}, {world.behind(world.b), world.b});
    CHECK(world.change({owner({7}, Owner::free, Owner::kv, kB)}, {0, world.b}).zeroed_bytes == 0);
    world.device->finish();
    world.arena->check();
  }
}

// A's last writes are still to come when its page is B's. The fill waits for them if A's plan said so; the check sees it if
// not.
TEST(zeroes_come_behind_the_former_tenant) {
  int leaked = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    for (const bool said : {true, false}) {
      World world(Mode::aliased, seed);
      const bool wrong = violates([&] {
        world.change({owner({6, 7}, Owner::free, Owner::kv, kA)}, {0, world.a});
        for (int i = 0; i < 5; ++i) world.write(world.a, world.slot(world.kv_a, 0), 9);
        const Ordering ordering{said ? world.behind(world.a) : 0, world.a};
        world.change({owner({6}, Owner::kv, Owner::free, kA)}, ordering);
        const std::uint64_t waited = world.device->waited;
        CHECK(world.change({owner({6}, Owner::free, Owner::kv, kB)}, {0, world.b}).zeroed_bytes == kPage);
        CHECK(world.device->waited == waited);
        world.read(world.b, world.slot(world.kv_b, 0), 0);
        world.write(world.b, world.slot(world.kv_b, 0), 3);
        world.read(world.b, world.slot(world.kv_b, 0), 3);
        world.device->finish();
      });
      CHECK(!wrong || !said);
      leaked += wrong ? 1 : 0;
    }
  }
  CHECK(leaked > 30);
}

// Also if it is the taker that names the event, of another stream than its own.
TEST(zeroes_come_behind_the_event_of_their_plan) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    World world(Mode::aliased, seed);
    world.change({owner({6}, Owner::free, Owner::kv, kA)}, {0, world.a});
    for (int i = 0; i < 5; ++i) world.write(world.a, world.slot(world.kv_a, 0), 9);
    world.change({owner({6}, Owner::kv, Owner::free, kA)});
    world.change({owner({6}, Owner::free, Owner::kv, kB)}, {world.behind(world.a), world.b});
    world.read(world.b, world.slot(world.kv_b, 0), 0);
    world.device->finish();
  }
}

// The same when B's zeroes are waited for (set-up, strict, no stream).
TEST(waited_zeroes_come_behind_the_former_tenant_too) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    World world(mode);
    world.change({owner({6, 7}, Owner::free, Owner::kv, kA)}, {0, world.a});
    for (int i = 0; i < 9; ++i) world.write(world.a, world.slot(world.kv_a, 0), 9);
    world.change({owner({6}, Owner::kv, Owner::free, kA)}, {world.behind(world.a), world.a});
    const Applied applied = world.change({owner({6}, Owner::free, Owner::kv, kB)}, {0, mode == Mode::strict ? world.b : 0});
    CHECK(applied.zeroed_bytes == kPage);
    CHECK(world.device->peek(world.slot(world.kv_b, 0)) == std::byte{0});  // now, not later
    world.device->finish();
    CHECK(world.device->peek(world.slot(world.kv_b, 0)) == std::byte{0});
  }
}

// A's page is taken for B, one of B's fills fails, the plan is undone; A takes its page back and writes to it. The fill of it
// that is on its way must not come last. (B's stream is far behind.)
TEST(a_fill_of_an_undone_plan_destroys_nothing) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    World world(Mode::aliased, seed);
    world.change({owner({6, 8}, Owner::free, Owner::kv, kA)}, {0, world.a});
    world.write(world.a, world.slot(world.kv_a, 0), 9);
    world.change({owner({6, 8}, Owner::kv, Owner::free, kA)}, {world.behind(world.a), world.a});
    world.device->finish();
    for (int i = 0; i < 6; ++i) world.write(world.b, world.arena->address(world.other), 1);
    world.device->fail_call(Call::fill, 2);
    const std::uint64_t epoch = world.arena->epoch();
    CHECK_ERROR(ErrorKind::driver, world.apply({owner({6, 8}, Owner::free, Owner::kv, kB)}, {0, world.b}));
    world.arena->check();
    CHECK(world.arena->epoch() == epoch && world.arena->counts(kB)[Owner::kv] == 0 && !world.arena->broken());
    // Zeroed again, although it is A's own: behind the fill on B's stream.
    CHECK(world.change({owner({6, 8}, Owner::free, Owner::kv, kA)}, {0, world.a}).zeroed_bytes == kPage);
    for (int i = 0; i < 3; ++i) {
      world.write(world.a, world.slot(world.kv_a, 0), 4);
      world.read(world.a, world.slot(world.kv_a, 0), 4);
    }
    world.device->finish();
    world.arena->check();
  }
}

// The tenant itself, computing on another stream by then, has not the fill of the undone plan before it either.
TEST(an_undone_fill_on_another_stream) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    World world(Mode::aliased, seed);
    for (int i = 0; i < 6; ++i) world.write(world.a, world.arena->address(world.one), 1);
    world.device->fail_call(Call::fill, 2);
    CHECK_ERROR(ErrorKind::driver, world.apply({owner({6, 8}, Owner::free, Owner::kv, kA)}, {0, world.a}));
    CHECK(world.change({owner({6}, Owner::free, Owner::kv, kA)}, {0, world.b}).zeroed_bytes == kPage);
    world.read(world.b, world.slot(world.kv_a, 0), 0);
    world.write(world.b, world.slot(world.kv_a, 0), 4);
    world.read(world.b, world.slot(world.kv_a, 0), 4);
    world.device->finish();
  }
}

// Zeroing is the last thing that a plan does: whatever else can fail fails before it, and takes no bytes.
TEST(nothing_is_zeroed_by_a_plan_that_fails_before) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    for (const bool with_stream : {true, false}) {
      for (unsigned nth = 1;; ++nth) {
        World world(mode);
        const EventHandle after = world.behind(world.a);
        const std::size_t begin = world.device->calls.size();
        world.device->fail_any(nth);
        bool failed = false;
        try {
          world.apply({owner({6, 7}, Owner::free, Owner::kv, kA), owner({0, 1}, Owner::params, Owner::ring, kA),
                       point(world.ring, {0, 1}, false), point(world.two, {0, 1}, false, 1),
                       owner({2, 3}, Owner::params, Owner::kv, kA)},
                      {after, with_stream ? world.a : 0});
        } catch (const Error& error) {
          failed = true;
          CHECK(error.kind() == ErrorKind::driver);
        }
        world.device->heal();
        if (!failed) break;
        // Behind a fill only the zeroing itself can fail: both regions had been pointed before it.
        std::size_t pointed = 0;
        for (std::size_t call = begin; call < world.device->calls.size(); ++call) {
          if (world.device->calls[call].first == Call::set_access) ++pointed;
          if (world.device->calls[call].first == Call::fill) CHECK(pointed >= 2);
        }
        CHECK(!world.arena->broken() && world.arena->counts()[Owner::free] == 6);
        CHECK((world.arena->shown(world.two) == std::vector<PageId>{2, 3}));
        world.arena->check();
        CHECK(world.change({owner({6, 7}, Owner::free, Owner::kv, kA)}, {0, world.a}).zeroed_bytes == 2 * kPage);
        world.read(world.a, world.slot(world.kv_a, 0), 0);
        world.device->finish();
      }
    }
  }
}

// A page comes to another tenant by way of an earlier plan that freed it.
TEST(pages_do_not_change_tenant_within_a_plan) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    World world(mode);
    world.change({owner({6, 7}, Owner::free, Owner::kv, kA)});
    const std::size_t calls = world.device->calls.size();
    CHECK_ERROR(ErrorKind::invalid_argument,
                world.apply({owner({6}, Owner::kv, Owner::free, kA), owner({6}, Owner::free, Owner::kv, kB)}));
    CHECK_ERROR(ErrorKind::invalid_argument,
                world.apply({owner({0}, Owner::params, Owner::free, kA), owner({0}, Owner::free, Owner::kv, kB)}));
    CHECK(world.device->calls.size() == calls);
    world.change({owner({6}, Owner::kv, Owner::free, kA), owner({6}, Owner::free, Owner::kv, kA)});  // its own
    world.change({owner({6}, Owner::kv, Owner::free, kA)});
    CHECK(world.change({owner({6}, Owner::free, Owner::kv, kB)}).zeroed_bytes == kPage);
    world.arena->check();
  }
}

// A later step of the plan takes a page away again: it is not the tenant's at the end, so nobody zeroes it.
TEST(what_moves_on_within_a_plan_is_not_zeroed) {
  World world;
  const Applied applied = world.change({owner({6, 7}, Owner::free, Owner::kv, kA), owner({7}, Owner::kv, Owner::free, kA),
                                        owner({6}, Owner::kv, Owner::free, kA), owner({6}, Owner::free, Owner::kv, kA)},
                                       {0, world.a});
  CHECK(applied.zeroed_bytes == kPage);
  world.device->finish();
  world.arena->check();
}

// The giver's stream fails before its page is taken. The taker is told by an error of the plan, once, and its stream lives.
TEST(a_givers_failed_stream_is_not_the_takers) {
  World world;
  const std::vector<std::byte> master(kPage, std::byte{1});
  world.change({owner({6}, Owner::free, Owner::kv, kA)}, {0, world.a});
  world.device->fail_copy(1);
  world.device->copy(world.a, world.slot(world.kv_a, 0), master.data(), kPage);
  world.change({owner({6}, Owner::kv, Owner::free, kA)}, {world.behind(world.a), world.a});
  while (world.device->step_any()) {
  }
  CHECK_ERROR(ErrorKind::driver, world.apply({owner({6}, Owner::free, Owner::kv, kB)}, {0, world.b}));
  world.arena->check();
  CHECK(world.change({owner({6}, Owner::free, Owner::kv, kB)}, {0, world.b}).zeroed_bytes == kPage);
  world.device->finish();
  CHECK(world.device->peek(world.slot(world.kv_b, 0)) == std::byte{0});
}

// A fill that was enqueued and whose end cannot be seen is waited for before the plan is undone: strict unmaps the page.
TEST(no_fill_is_on_its_way_when_strict_unmaps) {
  for (const Call call : {Call::record, Call::synchronize}) {
    World world(Mode::strict);
    world.device->fail_call(call, 1);
    CHECK_ERROR(ErrorKind::driver, world.apply({owner({6, 7}, Owner::free, Owner::kv, kA)}, {0, world.a}));
    world.device->finish();
    CHECK(!world.arena->broken());
    world.arena->check();
    CHECK(world.change({owner({6, 7}, Owner::free, Owner::kv, kA)}).zeroed_bytes == 2 * kPage);
  }
}

}  // namespace
