// Plans where computation runs on a stream, on the fake device: what waits for what, and who waits at all.
#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "plan_world.h"

using namespace remap;
using namespace remap::testing;
using World = remap::testing::PlanWorld;

namespace {

// A failed wait for the event fails the plan before anything is changed.
TEST(an_event_that_fails_changes_nothing) {
  World world(Mode::strict);
  const std::vector<Step> steps{owner({0, 1}, Owner::params, Owner::ring, kA), point(world.two, {0, 1}, false, 1)};
  world.device->fail_call(Call::synchronize, 1);
  CHECK_ERROR(ErrorKind::driver, world.apply(steps, {world.behind(world.a), 0}));
  CHECK(world.arena->counts()[Owner::ring] == 0 && world.arena->shown(world.two)[0] == 2);
  world.arena->check();
  CHECK_ERROR(ErrorKind::invalid_argument, world.apply({owner({8}, Owner::free, Owner::kv, kA)}, {4711, 0}));
  CHECK(!world.arena->broken() && world.arena->counts()[Owner::free] == 6);
}

// Another plan comes in while one waits for its event without the lock: the one that waited is stale.
TEST(a_plan_that_waited_is_looked_at_again) {
  World world(Mode::strict);
  world.change({owner({6, 7}, Owner::free, Owner::kv, kA)});
  world.device->frozen = true;
  bool stale = false;
  const EventHandle after = world.behind(world.a);
  std::thread waiting([&] {
    try {
      world.apply({owner({0, 1}, Owner::params, Owner::ring, kA), point(world.two, {0, 1}, false, 1)}, {after, 0});
    } catch (const Error& error) {
      stale = error.kind() == ErrorKind::stale_plan;
    }
  });
  while (world.device->waiting == 0) std::this_thread::yield();
  world.change({owner({7}, Owner::kv, Owner::free, kA)});
  world.device->frozen = false;
  waiting.join();
  CHECK(stale && world.arena->counts()[Owner::kv] == 1 && world.arena->counts()[Owner::ring] == 0);
  world.arena->check();
}

// Steps of one commit wait for its event once; those of another commit for their own recording of it.
TEST(a_commit_waits_once) {
  World world;
  const auto observer = std::make_shared<Observer>();
  const EventHandle after = world.behind(world.a);
  const std::size_t before = world.device->count(Call::synchronize);
  world.apply({owner({0, 1}, Owner::params, Owner::ring, kA), point(world.two, {0, 1}, true, 1),
               point(world.one, {1, 0}, true, 0)});
  world.executor->commit(observer, after);
  world.executor->drain();
  CHECK(observer->released_count == 2 && world.device->count(Call::synchronize) == before + 1);
  world.device->record(after, world.a);
  world.apply({point(world.two, {1, 0}, true, 1)});
  world.executor->commit(observer, after);
  world.executor->drain();
  CHECK(observer->released_count == 3 && world.device->count(Call::synchronize) == before + 2);
}

// Looking, and the next plan, need not wait for the event that the worker waits for.
TEST(the_worker_waits_without_the_lock) {
  World world;
  const auto observer = std::make_shared<Observer>();
  world.device->frozen = true;
  world.apply({owner({0, 1}, Owner::params, Owner::ring, kA), point(world.two, {0, 1}, true, 1)});
  world.executor->commit(observer, world.behind(world.a));
  while (world.device->waiting == 0) std::this_thread::yield();
  CHECK(world.arena->counts()[Owner::ring] == 2);
  world.apply({owner({2, 3}, Owner::params, Owner::kv, kA)}, {world.behind(world.a), world.a});
  world.executor->commit(observer);
  CHECK(observer->released_count == 0 && (world.arena->shown(world.two) == std::vector<PageId>{2, 3}));
  world.arena->check();
  world.device->frozen = false;
  world.executor->drain();
  CHECK(observer->released_count == 1 && (world.arena->shown(world.two) == std::vector<PageId>{0, 1}));
  world.device->finish();
}

// An event that failed is told for every step of its commit; a retry looks at it again only if it was never seen complete.
TEST(an_event_that_fails_is_told_for_each_step) {
  World world;
  const auto observer = std::make_shared<Observer>();
  const EventHandle after = world.behind(world.a);
  world.apply({owner({0, 1}, Owner::params, Owner::ring, kA), point(world.two, {0, 1}, true, 1),
               point(world.one, {1, 0}, true, 0)});
  world.device->fail_call(Call::synchronize, 1);
  world.executor->commit(observer, after);
  world.executor->drain();
  CHECK(observer->failed_count == 2 && world.executor->failed_points() == 2);
  world.executor->retry_failed();
  CHECK(observer->released_count == 2);
  world.apply({point(world.two, {1, 0}, true, 1)});
  world.device->fail_call(Call::map, 1);
  world.executor->commit(observer, after);
  world.executor->drain();
  CHECK(observer->failed_count == 3);
  world.device->destroy_event(after);
  world.executor->retry_failed();
  CHECK(observer->released_count == 3 && (world.arena->shown(world.two) == std::vector<PageId>{1, 0}));
}

// Without exchange: unmap, map all, one set_access; whatever fails, the region shows what it showed.
TEST(re_pointing_without_exchange) {
  for (unsigned nth = 0;; ++nth) {
    World world;
    const auto observer = std::make_shared<Observer>();
    world.apply({owner({0, 1}, Owner::params, Owner::ring, kA), point(world.two, {1, 0}, true, 1)});
    world.device->calls.clear();
    if (nth > 0) world.device->fail_any(nth);
    world.executor->commit(observer);
    world.executor->drain();
    const bool failed = observer->failed_count > 0;
    if (nth == 0) {
      const std::vector<std::pair<Call, std::uint64_t>> expected{{Call::unmap, 2}, {Call::map, 2}, {Call::set_access, 2}};
      CHECK(world.device->calls == expected);
    }
    world.device->heal();
    CHECK((world.arena->shown(world.two) == (failed ? std::vector<PageId>{2, 3} : std::vector<PageId>{1, 0})));
    CHECK(!world.arena->broken());
    world.arena->check();
    world.write(world.a, world.arena->address(world.two), 1);
    world.device->finish();
    world.executor->retry_failed();
    CHECK((world.arena->shown(world.two) == std::vector<PageId>{1, 0}));
    if (!failed && nth > 0) break;
    CHECK(nth < 10);
  }
}

}  // namespace
