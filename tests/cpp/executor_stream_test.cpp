// Plans where computation runs on a stream, on the fake device: what waits for what, who waits at all, what is zeroed when, and
// what an undone plan leaves behind.
#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "check.h"
#include "fake_device.h"
#include "remap/executor.h"

using namespace remap;
using remap::testing::FakeDevice;

namespace {

constexpr std::size_t kPage = FakeDevice::kPage;
constexpr std::size_t kPages = 12;
constexpr TenantId kA = 1, kB = 2;

Step owner(std::vector<PageId> pages, Owner from, Owner to, TenantId tenant) {
  Step step;
  step.kind = Step::Kind::set_owner;
  step.set_owner = {std::move(pages), from, to, tenant};
  return step;
}

Step point(RegionId region, std::vector<PageId> pages, bool deferred, std::uint32_t layer = 0, std::size_t first = 0) {
  Step step;
  step.kind = Step::Kind::point;
  step.point = {region, first, std::move(pages), deferred, layer};
  return step;
}

struct Observer final : PointObserver {
  void released(std::uint32_t) noexcept override { ++released_count; }
  void failed(std::uint32_t, std::exception_ptr) noexcept override { ++failed_count; }
  std::atomic<int> released_count{0};
  std::atomic<int> failed_count{0};
};

// A has layers 0 1 and 2 3 and a ring, B has layer 4 5; both may be given 6 .. 11, and A its own layers, as KV. Each computes
// on a stream of its own.
struct World {
  std::shared_ptr<FakeDevice> device;
  std::shared_ptr<Arena> arena;
  std::unique_ptr<Executor> executor;
  RegionId one = 0, two = 0, other = 0, ring = 0, kv_a = 0, kv_b = 0;
  StreamHandle a = 0, b = 0;

  explicit World(Mode mode = Mode::aliased, std::uint64_t seed = 1, bool exchange = false)
      : device(std::make_shared<FakeDevice>(seed, exchange)) {
    arena = std::make_shared<Arena>(device, ArenaOptions{kPages * kPage, kPage, mode});
    executor = std::make_unique<Executor>(arena);
    one = arena->add_layer_region(kA, "one", arena->take(2, Owner::params, kA));
    two = arena->add_layer_region(kA, "two", arena->take(2, Owner::params, kA));
    other = arena->add_layer_region(kB, "other", arena->take(2, Owner::params, kB));
    ring = arena->add_ring_region(kA, 2);
    kv_a = arena->add_kv_region(kA, 10);
    arena->designate(kv_a, 0, {6, 7, 8, 9, 10, 11, 0, 1, 2, 3});
    kv_b = arena->add_kv_region(kB, 6);
    arena->designate(kv_b, 0, {6, 7, 8, 9, 10, 11});
    a = device->create_stream();
    b = device->create_stream();
    device->finish();
  }
  Applied apply(std::vector<Step> steps, const Ordering& ordering = {}) {
    Plan plan;
    plan.epoch = arena->epoch();
    plan.steps = std::move(steps);
    return executor->apply(plan, ordering);
  }
  Applied change(std::vector<Step> steps, const Ordering& ordering = {}) {
    const Applied applied = apply(std::move(steps), ordering);
    executor->commit(nullptr, ordering.after);
    return applied;
  }
  EventHandle behind(StreamHandle stream) {
    const EventHandle event = device->create_event();
    device->record(event, stream);
    return event;
  }
  std::byte* slot(RegionId kv, std::size_t index) const { return arena->address(kv) + index * kPage; }
  void write(StreamHandle stream, std::byte* at, int tag) {
    device->compute_write(stream, at, kPage, static_cast<std::byte>(tag));
  }
  void read(StreamHandle stream, std::byte* at, int tag) {
    device->compute(stream, at, kPage, static_cast<std::byte>(tag));
  }
};

// True if the fake device saw a rule broken.
bool violates(const std::function<void()>& body) {
  try {
    body();
    return false;
  } catch (const std::logic_error&) {
    return true;
  }
}

void growing_in_aliased_mode_waits_for_nothing() {
  World world;
  world.write(world.a, world.arena->address(world.two), 7);
  const std::uint64_t waited = world.device->waited;
  const std::size_t calls = world.device->calls.size();
  // The stream has not moved: home pages become KV, a region is left to the worker, and no call is made.
  world.device->frozen = true;
  world.apply({owner({0, 1}, Owner::params, Owner::ring, kA), point(world.two, {0, 1}, true, 1),
               owner({2, 3}, Owner::params, Owner::kv, kA)},
              {world.behind(world.a), world.a});
  CHECK(world.device->calls.size() == calls && world.device->waited == waited);
  world.device->frozen = false;
  world.executor->commit(nullptr, world.behind(world.a));
  world.executor->drain();
  world.device->finish();
}

void zeroing_is_enqueued_where_the_tenant_computes() {
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
void zeroes_come_behind_the_former_tenant() {
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
void zeroes_come_behind_the_event_of_their_plan() {
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
void waited_zeroes_come_behind_the_former_tenant_too() {
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
void a_fill_of_an_undone_plan_destroys_nothing() {
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
void an_undone_fill_on_another_stream() {
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

// The same for a plan that was rolled back after it was applied, with what B did meanwhile.
void a_rolled_back_plan_leaves_nothing_on_its_way() {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    World world(Mode::aliased, seed);
    for (int i = 0; i < 6; ++i) world.write(world.b, world.arena->address(world.other), 1);
    world.apply({owner({6, 8}, Owner::free, Owner::kv, kB)}, {0, world.b});
    world.write(world.b, world.slot(world.kv_b, 0), 2);
    world.executor->rollback();
    world.arena->check();
    CHECK(world.arena->counts()[Owner::free] == 6);
    CHECK(world.change({owner({6, 8}, Owner::free, Owner::kv, kA)}, {0, world.a}).zeroed_bytes == 2 * kPage);
    for (const std::size_t slot : {0U, 2U}) {
      world.read(world.a, world.slot(world.kv_a, slot), 0);
      world.write(world.a, world.slot(world.kv_a, slot), 4);
      world.read(world.a, world.slot(world.kv_a, slot), 4);
    }
    world.device->finish();
  }
}

// Zeroing is the last thing that a plan does: whatever else can fail fails before it, and takes no bytes.
void nothing_is_zeroed_by_a_plan_that_fails_before() {
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

// A page comes to another tenant by way of a committed plan that freed it; and as KV, where it is zeroed.
void pages_do_not_change_tenant_within_a_plan() {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    World world(mode);
    world.change({owner({6, 7}, Owner::free, Owner::kv, kA)});
    const std::size_t calls = world.device->calls.size();
    CHECK_ERROR(ErrorKind::invalid_argument,
                world.apply({owner({6}, Owner::kv, Owner::free, kA), owner({6}, Owner::free, Owner::kv, kB)}));
    CHECK_ERROR(ErrorKind::invalid_argument,
                world.apply({owner({0}, Owner::params, Owner::free, kA), owner({0}, Owner::free, Owner::kv, kB)}));
    CHECK_ERROR(ErrorKind::invalid_argument, world.apply({owner({8}, Owner::free, Owner::params, kB)}));
    CHECK_ERROR(ErrorKind::invalid_argument,
                world.apply({owner({8}, Owner::free, Owner::kv, kB), owner({8}, Owner::kv, Owner::ring, kB)}));
    CHECK(world.device->calls.size() == calls);
    world.change({owner({6}, Owner::kv, Owner::free, kA), owner({6}, Owner::free, Owner::kv, kA)});  // its own
    world.change({owner({6}, Owner::kv, Owner::free, kA)});
    CHECK(world.change({owner({6}, Owner::free, Owner::kv, kB)}).zeroed_bytes == kPage);
    world.arena->check();
  }
}

// A later step of the plan takes a page away again: it is not the tenant's at the end, so nobody zeroes it.
void what_moves_on_within_a_plan_is_not_zeroed() {
  World world;
  const Applied applied = world.change({owner({6, 7}, Owner::free, Owner::kv, kA), owner({7}, Owner::kv, Owner::free, kA),
                                        owner({6}, Owner::kv, Owner::free, kA), owner({6}, Owner::free, Owner::kv, kA)},
                                       {0, world.a});
  CHECK(applied.zeroed_bytes == kPage);
  world.device->finish();
  world.arena->check();
}

void strict_mode_unmaps_behind_the_event() {
  int seen = 0;
  for (const bool said : {true, false}) {
    World world(Mode::strict);
    const bool wrong = violates([&] {
      world.change({owner({6, 7}, Owner::free, Owner::kv, kA)}, {0, world.a});
      world.device->finish();
      world.read(world.a, world.slot(world.kv_a, 0), 0);
      CHECK(world.device->step(world.a));  // has begun
      world.change({owner({6}, Owner::kv, Owner::free, kA)}, {said ? world.behind(world.a) : 0, world.a});
      world.device->finish();
      world.arena->check();
    });
    CHECK(wrong == !said);
    seen += wrong ? 1 : 0;
  }
  CHECK(seen == 1);
}

// aliased: a ring whose buffers change pages is unmapped at once, so its copies must have ended; where nothing was shown, or
// what is shown stays, nothing is waited for.
void a_ring_moves_behind_the_event() {
  World world;
  const StreamHandle copies = world.device->create_stream();
  const std::uint64_t waited = world.device->waited;
  const std::vector<std::byte> master(2 * kPage, std::byte{6});
  world.write(world.a, world.arena->address(world.two), 7);
  world.apply({owner({0, 1}, Owner::params, Owner::ring, kA), point(world.ring, {0, 1}, false), point(world.one, {0, 1}, true)},
              {world.behind(world.a), world.a});
  CHECK(world.device->waited == waited);
  world.executor->commit(nullptr);
  world.executor->drain();
  world.device->copy(copies, world.arena->address(world.ring), master.data(), master.size());
  CHECK(world.device->step(copies));  // has begun
  world.apply({owner({2, 3}, Owner::params, Owner::ring, kA), point(world.ring, {2, 3}, false), point(world.two, {2, 3}, true),
               owner({0, 1}, Owner::ring, Owner::params, kA)},
              {world.behind(copies), world.a});
  CHECK(world.device->waited > waited);
  world.executor->commit(nullptr);
  world.executor->drain();
  world.device->finish();
}

// A failed wait for the event fails the plan before anything is changed.
void an_event_that_fails_changes_nothing() {
  World world(Mode::strict);
  world.change({owner({6, 7}, Owner::free, Owner::kv, kA)});
  world.device->fail_call(Call::synchronize, 1);
  CHECK_ERROR(ErrorKind::driver, world.apply({owner({6}, Owner::kv, Owner::free, kA)}, {world.behind(world.a), 0}));
  CHECK(world.arena->counts()[Owner::kv] == 2 && world.arena->shown(world.kv_a)[0] == 6);
  world.arena->check();
  CHECK_ERROR(ErrorKind::invalid_argument, world.apply({owner({8}, Owner::free, Owner::kv, kA)}, {4711, 0}));
  World aliased;
  CHECK_ERROR(ErrorKind::invalid_argument, aliased.apply({owner({8}, Owner::free, Owner::kv, kA)}, {0, 4711}));
  aliased.arena->check();
  CHECK(!aliased.arena->broken() && aliased.arena->counts()[Owner::free] == 6);
}

// Steps of one commit wait for its event once; those of another commit for their own recording of it.
void a_commit_waits_once() {
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
void the_worker_waits_without_the_lock() {
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
void an_event_that_fails_is_told_for_each_step() {
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
void re_pointing_without_exchange() {
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
      CHECK((world.device->calls == std::vector<std::pair<Call, std::uint64_t>>{{Call::unmap, 2}, {Call::map, 2}, {Call::set_access, 2}}));
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

// The worker does an earlier plan's step while a later plan is applied and not decided; then that one is rolled back.
void a_rollback_behind_the_workers_back() {
  for (const bool exchange : {true, false}) {
    World world(Mode::aliased, 1, exchange);
    const auto observer = std::make_shared<Observer>();
    world.device->frozen = true;
    world.apply({owner({0, 1}, Owner::params, Owner::ring, kA), point(world.two, {0, 1}, true, 1)});
    world.executor->commit(observer, world.behind(world.a));
    world.apply({point(world.two, {1, 0}, true, 1)});
    world.device->frozen = false;
    world.executor->drain();
    CHECK(observer->released_count == 1 && (world.arena->shown(world.two) == std::vector<PageId>{1, 0}));
    world.executor->rollback();
    // Nobody will come to point it again, and its layer was released.
    CHECK((world.arena->shown(world.two) == std::vector<PageId>{0, 1}));
    world.arena->check();
  }
}

// Each backend call of changes between two tenants fails once: undone, nobody's bytes touched, and the next try works. What
// was made is given back at the end.
void every_call_fails_once() {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    for (unsigned nth = 1;; ++nth) {
      World world(mode, nth);
      bool failed = false;
      world.device->fail_any(nth);
      const auto attempt = [&](const std::function<void()>& action) {
        for (int tries = 0;; ++tries) {
          try {
            action();
            return;
          } catch (const Error& error) {
            CHECK(error.kind() == ErrorKind::driver && tries == 0);
            failed = true;
            world.arena->check();
          }
        }
      };
      EventHandle after = 0;
      attempt([&] { world.change({owner({6, 7, 8}, Owner::free, Owner::kv, kA)}, {0, world.a}); });
      world.write(world.a, world.slot(world.kv_a, 1), 8);
      attempt([&] { after = after != 0 ? after : world.device->create_event(); });
      attempt([&] { world.device->record(after, world.a); });
      attempt([&] { world.change({owner({6, 8}, Owner::kv, Owner::free, kA)}, {after, world.a}); });
      attempt([&] { world.change({owner({6, 8, 9}, Owner::free, Owner::kv, kB)}, {0, world.b}); });
      world.read(world.b, world.slot(world.kv_b, 0), 0);
      world.read(world.b, world.slot(world.kv_b, 2), 0);
      world.read(world.a, world.slot(world.kv_a, 1), 8);
      attempt([&] { world.device->record(after, world.b); });
      attempt([&] { world.change({owner({6}, Owner::kv, Owner::free, kB)}, {after, world.b}); });
      attempt([&] { world.change({owner({6}, Owner::free, Owner::kv, kA)}, {0, world.a}); });
      world.read(world.a, world.slot(world.kv_a, 0), 0);
      world.device->heal();
      world.device->finish();
      world.arena->check();
      world.executor->stop();
      world.arena->close();
      world.device->destroy_event(after);
      const Usage usage = world.device->usage();
      CHECK(usage.events == 0 && usage.streams == 2 && usage.mapped_bytes == 0 && usage.page_bytes == 0);
      if (!failed) break;
    }
  }
}

}  // namespace

int main() {
  RUN(growing_in_aliased_mode_waits_for_nothing);
  RUN(zeroing_is_enqueued_where_the_tenant_computes);
  RUN(zeroes_come_behind_the_former_tenant);
  RUN(zeroes_come_behind_the_event_of_their_plan);
  RUN(waited_zeroes_come_behind_the_former_tenant_too);
  RUN(a_fill_of_an_undone_plan_destroys_nothing);
  RUN(an_undone_fill_on_another_stream);
  RUN(a_rolled_back_plan_leaves_nothing_on_its_way);
  RUN(nothing_is_zeroed_by_a_plan_that_fails_before);
  RUN(pages_do_not_change_tenant_within_a_plan);
  RUN(what_moves_on_within_a_plan_is_not_zeroed);
  RUN(strict_mode_unmaps_behind_the_event);
  RUN(a_ring_moves_behind_the_event);
  RUN(an_event_that_fails_changes_nothing);
  RUN(a_commit_waits_once);
  RUN(the_worker_waits_without_the_lock);
  RUN(an_event_that_fails_is_told_for_each_step);
  RUN(re_pointing_without_exchange);
  RUN(a_rollback_behind_the_workers_back);
  RUN(every_call_fails_once);
  return remap::testing::failures();
}
