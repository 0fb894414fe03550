// Zeroing of pages that change tenant, where tenants compute on streams: what it comes behind, and who waits for it.
#include <thread>

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
    const World::Changed applied = world.change({owner({6, 7, 9}, Owner::free, Owner::kv, kB)}, {0, world.b});
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
    const World::Changed applied = world.change({owner({6}, Owner::free, Owner::kv, kB)}, {0, mode == Mode::strict ? world.b : 0});
    CHECK(applied.zeroed_bytes == kPage);
    CHECK(world.device->peek(world.slot(world.kv_b, 0)) == std::byte{0});  // now, not later
    world.device->finish();
    CHECK(world.device->peek(world.slot(world.kv_b, 0)) == std::byte{0});
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
  const World::Changed applied = world.change({owner({6, 7}, Owner::free, Owner::kv, kA), owner({7}, Owner::kv, Owner::free, kA),
                                        owner({6}, Owner::kv, Owner::free, kA), owner({6}, Owner::free, Owner::kv, kA)},
                                       {0, world.a});
  CHECK(applied.zeroed_bytes == kPage);
  world.device->finish();
  world.arena->check();
}

// The giver's stream fails before its page is taken. The taker is told by an error, once, and its stream lives.
TEST(a_givers_failed_stream_is_not_the_takers) {
  World world;
  const std::vector<std::byte> master(kPage, std::byte{1});
  world.change({owner({6}, Owner::free, Owner::kv, kA)}, {0, world.a});
  world.device->fail_copy(1);
  world.device->copy(world.a, world.slot(world.kv_a, 0), master.data(), kPage);
  world.change({owner({6}, Owner::kv, Owner::free, kA)}, {world.behind(world.a), world.a});
  while (world.device->step_any()) {
  }
  world.apply({owner({6}, Owner::free, Owner::kv, kB)}, {0, world.b});
  CHECK_ERROR(ErrorKind::driver, world.executor->zero_free());
  CHECK_ERROR(ErrorKind::invalid_state, world.executor->commit(nullptr));
  CHECK(world.executor->zero_free() == kPage && world.executor->zero_due() == 0);
  world.executor->commit(nullptr);
  world.device->finish();
  world.arena->check();
  CHECK(world.device->peek(world.slot(world.kv_b, 0)) == std::byte{0});
}

// A fill that was enqueued and whose end cannot be seen is waited for: it is made again, and must not come later.
TEST(no_fill_is_on_its_way_behind_an_error) {
  for (const Call call : {Call::record, Call::synchronize}) {
    World world(Mode::strict);
    world.apply({owner({6, 7}, Owner::free, Owner::kv, kA)}, {0, world.a});
    world.device->fail_call(call, 1);
    CHECK_ERROR(ErrorKind::driver, world.executor->zero_free());
    CHECK(world.executor->zero_free() == 2 * kPage && !world.arena->broken());
    world.executor->commit(nullptr);
    world.write(world.a, world.slot(world.kv_a, 0), 4);
    world.device->finish();
    CHECK(world.device->peek(world.slot(world.kv_a, 0)) == std::byte{4});
    world.arena->check();
  }
}

// Who looks at the tables does not wait for the device with who waits for zeroes.
TEST(nobody_else_waits_for_zeroes) {
  World world(Mode::strict);
  world.apply({owner({6, 7}, Owner::free, Owner::kv, kA)}, {0, world.a});
  world.device->frozen = true;
  std::size_t bytes = 0;
  std::thread waiting([&] { bytes = world.executor->zero_due(); });
  while (world.device->waiting == 0) std::this_thread::yield();
  CHECK(world.arena->counts(kA)[Owner::kv] == 2 && !world.arena->busy());
  world.arena->check();
  world.device->frozen = false;
  waiting.join();
  CHECK(bytes == 2 * kPage);
  world.executor->commit(nullptr);
  world.device->finish();
}

}  // namespace
