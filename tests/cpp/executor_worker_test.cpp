// The re-pointing worker beside everybody else: nobody who only looks, and no plan that calls no driver, waits for the driver's
// calls that the worker makes. A driver that stays in a call until it is let go takes the place of a slow one: what would wait for
// it waits for ever, and the test hangs.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "core/pointing.h"
#include "plans.h"

using namespace remap;
using namespace remap::testing;


namespace {

constexpr std::size_t kPage = HostArena::kPage;
constexpr std::size_t kLayerPages = 40;  // more than one piece

// As a GPU's driver: page tables cannot be swapped, and a call may take long. Calls of the thread that made it go through.
class Gate final : public WithoutExchange {
 public:
  using WithoutExchange::WithoutExchange;
  void map(std::byte* at, const PageHandle* pages, std::size_t count, std::size_t page_bytes) override {
    pass(count);
    WithoutExchange::map(at, pages, count, page_bytes);
  }
  void unmap(std::byte* at, std::size_t bytes) override {
    pass(bytes / kPage);
    WithoutExchange::unmap(at, bytes);
  }
  // Events stay incomplete, however long somebody waits.
  bool synchronize(EventHandle event, std::chrono::nanoseconds timeout) override {
    if (!held_) return WithoutExchange::synchronize(event, timeout);
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(timeout, std::chrono::milliseconds(5)));
    return false;
  }
  void hold_events(bool hold) { held_ = hold; }
  void shut() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = false;
  }
  void let_through(int calls) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tickets_ += calls;
    changed_.notify_all();
  }
  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  // Until somebody else is inside a call and stays there.
  void await_caller() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return inside_ && tickets_ == 0; });
  }
  std::size_t largest() const noexcept { return largest_; }  // pages of one call of others

 private:
  void pass(std::size_t pages) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (std::this_thread::get_id() == owner_) return;
    largest_ = std::max(largest_, pages);
    inside_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_ || tickets_ > 0; });
    if (!open_) --tickets_;
    inside_ = false;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  const std::thread::id owner_ = std::this_thread::get_id();
  bool open_ = true;
  bool inside_ = false;
  std::atomic<bool> held_{false};
  int tickets_ = 0;
  std::size_t largest_ = 0;
};

std::vector<PageId> from(PageId first, std::size_t count) {
  std::vector<PageId> pages(count);
  for (std::size_t i = 0; i < count; ++i) pages[i] = first + static_cast<PageId>(i);
  return pages;
}

Step show(RegionId region, std::vector<PageId> pages) { return point(region, std::move(pages), true, 1); }

// Two layers of kLayerPages pages, and some free ones that have a place in a KV region.
struct World : HostArena {
  std::shared_ptr<Gate> gate;
  std::shared_ptr<Observer> observer = std::make_shared<Observer>();
  RegionId one = 0, two = 0, kv = 0;

  World() : World(std::make_shared<Gate>(host(2 * kLayerPages + 8))) {}
  explicit World(std::shared_ptr<Gate> backend)
      : HostArena(backend, 2 * kLayerPages + 8, Mode::aliased), gate(std::move(backend)) {
    one = add_layer("one", kLayerPages);
    two = add_layer("two", kLayerPages);
    kv = arena->add_kv_region(kTenant, kLayerPages + 4);
    arena->designate(kv, 0, from(2 * kLayerPages, 4));
    arena->designate(kv, 4, home_of_two());
    std::memset(arena->address(one), 1, kLayerPages * kPage);
    std::memset(arena->address(two), 2, kLayerPages * kPage);
  }
  ~World() { gate->open(); }  // a check that failed must not leave the worker inside a call: its end is waited for
  static std::vector<PageId> home_of_one() { return from(0, kLayerPages); }
  static std::vector<PageId> home_of_two() { return from(kLayerPages, kLayerPages); }
  // Layer two streams through layer one's pages, which become the ring; its own become KV. The worker stays in its first call.
  void give_and_hold() {
    apply({owner(home_of_one(), Owner::params, Owner::ring), owner(home_of_two(), Owner::params, Owner::kv),
           show(one, home_of_one()), show(two, home_of_one())});
    gate->shut();
    executor->commit(observer);
    gate->await_caller();
  }
};

std::vector<Step> home(World& world) {
  return {owner(World::home_of_two(), Owner::kv, Owner::params), owner(World::home_of_one(), Owner::ring, Owner::params),
          show(world.two, World::home_of_two())};
}

TEST(nobody_waits_for_a_call_of_the_workers) {
  World world;
  world.give_and_hold();
  const std::uint64_t epoch = world.arena->epoch();
  CHECK(!world.arena->broken() && !world.arena->closed() && !world.executor->undecided());
  CHECK(world.arena->counts()[Owner::kv] == kLayerPages && world.arena->owners().size() == 2 * kLayerPages + 8);
  world.apply({owner(from(2 * kLayerPages, 4), Owner::free, Owner::kv)});  // growing: no call of the driver
  world.executor->commit(nullptr);
  CHECK(world.arena->epoch() == epoch + 1 && world.arena->counts()[Owner::kv] == kLayerPages + 4);
  world.arena->check();  // beside half a re-pointing
  CHECK(world.observer->released_count == 1);  // layer one shows what it should: nothing to do there
  world.gate->open();
  world.executor->drain();
  CHECK(world.observer->released_count == 2 && world.arena->shown(world.two) == World::home_of_one());
}

// A tenant whose stream has not come to its event keeps nobody else waiting; and two tenants' layers are pointed in turns.
TEST(tenants_take_turns) {
  World world;
  constexpr TenantId kOther = kTenant + 1;
  const RegionId theirs = world.arena->add_layer_region(kOther, "theirs", world.arena->take(2, Owner::params, kOther));
  const RegionId ours = world.arena->add_layer_region(kOther, "ring's", world.arena->take(2, Owner::params, kOther));
  const std::vector<PageId> ring = world.arena->shown(ours), home = world.arena->shown(theirs);
  const StreamHandle stream = world.gate->create_stream();
  const EventHandle event = world.gate->create_event(false);
  world.gate->hold_events(true);
  world.gate->record(event, stream);
  world.apply({owner(World::home_of_one(), Owner::params, Owner::ring), owner(World::home_of_two(), Owner::params, Owner::kv),
               show(world.one, World::home_of_one()), show(world.two, World::home_of_one())});
  world.executor->commit(world.observer, event);
  const auto observer = std::make_shared<Observer>();
  Step lend = owner(ring, Owner::params, Owner::ring), free = owner(home, Owner::params, Owner::free);
  lend.set_owner.tenant = free.set_owner.tenant = kOther;
  world.apply({lend, free, show(ours, ring), show(theirs, ring)});
  world.executor->commit(observer);
  while (observer->released_count < 2) std::this_thread::yield();  // or it hangs
  CHECK(world.observer->released_count == 0 && world.arena->shown(theirs) == ring);
  world.gate->hold_events(false);
  world.executor->drain();
  CHECK(world.observer->released_count == 2 && world.arena->shown(world.two) == World::home_of_one());
  world.arena->check();
  world.gate->destroy_event(event);
  world.gate->destroy_stream(stream);
}

TEST(re_points_in_pieces) {
  World world;
  world.give_and_hold();
  world.gate->let_through(2);  // one piece: unmap and map
  world.gate->await_caller();
  const std::vector<PageId> shown = world.arena->shown(world.two);
  const auto changed = static_cast<std::size_t>(
      std::count_if(shown.begin(), shown.end(), [](PageId page) { return page < kLayerPages; }));
  CHECK(changed == piece_pages(kPage) && changed < kLayerPages && changed == world.gate->largest());
  world.arena->check();
  world.gate->open();
  world.executor->drain();
  CHECK(world.arena->shown(world.two) == World::home_of_one());
}

TEST(pieces_of_large_pages_are_of_no_more_bytes) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  CHECK(piece_pages(4096) == 16 && piece_pages(2 * kMiB) == 16);
  CHECK(piece_pages(8 * kMiB) == 4 && piece_pages(32 * kMiB) == 1 && piece_pages(64 * kMiB) == 1);
}

// A plan is applied while the worker is inside a call for an older one: nobody is told that the layer is ready before it shows
// what the newer plan wants.
TEST(what_a_newer_plan_changes_is_not_released) {
  World world;
  world.give_and_hold();
  world.apply({owner(World::home_of_two(), Owner::kv, Owner::params), owner(World::home_of_one(), Owner::ring, Owner::params),
               show(world.two, World::home_of_two())});
  CHECK(world.observer->released_count == 1);
  world.gate->open();
  world.executor->commit(world.observer);
  world.executor->drain();
  CHECK(world.observer->released_count == 2 && world.observer->failed_count == 0);  // one a layer: the older step was taken over
  CHECK(world.arena->shown(world.two) == World::home_of_two());
  world.arena->check();
}

// While a change is applied and not committed, its layers are nobody's to point: who let a layer go for it would let it go before it
// is held for it.
TEST(what_is_not_committed_is_not_pointed) {
  World world;
  world.give_and_hold();
  world.apply({owner(World::home_of_two(), Owner::kv, Owner::params), owner(World::home_of_one(), Owner::ring, Owner::params),
               show(world.two, World::home_of_two())});
  world.gate->open();
  world.executor->drain();  // the worker has come to the older step, and can go no further
  CHECK(world.observer->released_count == 1 && world.arena->shown(world.two) == World::home_of_one());
  world.executor->commit(world.observer);
  world.executor->drain();
  CHECK(world.observer->released_count == 2 && world.executor->failed_points() == 0);
  CHECK(world.arena->shown(world.two) == World::home_of_two());
  world.arena->check();
}

// Nor is the step of an earlier change done, which a layer that goes elsewhere leaves to the worker: whoever is told of it loads what
// its own change wanted.
TEST(what_goes_elsewhere_is_not_released_before_that_is_committed) {
  World world;
  world.give_and_hold();
  world.apply({show(world.two, std::vector<PageId>(kLayerPages, kNoPage))});
  world.gate->open();
  world.executor->drain();
  CHECK(world.observer->released_count == 1 && world.executor->undecided());
  world.executor->commit(world.observer);
  world.executor->drain();
  CHECK(world.observer->released_count == 2 && world.executor->failed_points() == 0);
  world.arena->check();
}

// A layer that was let go of is used again. A step that is still to come for it, because two plans followed each other closely,
// would point it for the next plan under the work that uses it: there is none.
TEST(a_plan_takes_over_the_steps_before_it) {
  World world;
  const StreamHandle stream = world.gate->create_stream();
  const EventHandle event = world.gate->create_event(false);
  world.gate->hold_events(true);  // the worker waits for the device
  world.gate->record(event, stream);
  const auto give = [&] {
    world.apply({owner(World::home_of_one(), Owner::params, Owner::ring), owner(World::home_of_two(), Owner::params, Owner::kv),
                 show(world.one, World::home_of_one()), show(world.two, World::home_of_one())});
    world.executor->commit(world.observer, event);
  };
  give();
  world.apply(home(world));
  world.executor->commit(world.observer, event);
  give();
  world.gate->hold_events(false);
  world.executor->drain();
  CHECK(world.observer->released_count == 2 && world.arena->shown(world.two) == World::home_of_one());
  CHECK(world.executor->failed_points() == 0);
  world.arena->check();
  world.gate->destroy_event(event);
  world.gate->destroy_stream(stream);
}

// Layer two streams, of a tenant that uses it no more until it is woken.
void give_asleep(World& world, EventHandle after = 0) {
  world.apply({owner(World::home_of_one(), Owner::params, Owner::ring), owner(World::home_of_two(), Owner::params, Owner::kv),
               show(world.one, World::home_of_one()), show(world.two, World::home_of_one())});
  world.executor->commit(world.observer, after, true);
  world.executor->drain();
}

TEST(a_layer_that_comes_home_before_its_tenant_wakes_costs_no_call) {
  World world;
  world.gate->shut();  // whoever calls the driver hangs
  for (int times = 1; times <= 3; ++times) {
    give_asleep(world);
    CHECK(world.arena->shown(world.two) == World::home_of_two() && world.arena->counts()[Owner::kv] == kLayerPages);
    CHECK(world.observer->released_count == 2 * times - 1);  // layer one shows its home: nothing sleeps there
    world.arena->check();
    world.apply(home(world));
    world.executor->commit(world.observer, 0, true);
    world.executor->drain();
    CHECK(world.observer->released_count == 2 * times && world.observer->stale == 0);
    CHECK(world.arena->shown(world.two) == World::home_of_two() && world.arena->counts()[Owner::kv] == 0);
    world.arena->check();
  }
  world.executor->wake(kTenant);
  world.executor->drain();
  CHECK(world.observer->released_count == 6);  // nothing has slept on
}

TEST(who_wakes_is_pointed_behind_the_event_of_that_moment) {
  World world;
  give_asleep(world);
  world.executor->wake(kTenant + 1);
  world.executor->drain();
  CHECK(world.observer->released_count == 1 && world.arena->shown(world.two) == World::home_of_two());
  const StreamHandle stream = world.gate->create_stream();
  const EventHandle event = world.gate->create_event(false);
  world.gate->hold_events(true);
  world.gate->record(event, stream);
  world.executor->wake(kTenant, event);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(world.observer->released_count == 1);
  world.gate->hold_events(false);
  world.executor->drain();
  CHECK(world.observer->released_count == 2 && world.arena->shown(world.two) == World::home_of_one());
  world.arena->check();
  world.gate->destroy_event(event);
  world.gate->destroy_stream(stream);
}

TEST(what_sleeps_is_forgotten_with_its_tenant) {
  World world;
  give_asleep(world);
  const std::weak_ptr<Observer> observer = world.observer;
  world.executor->forget(kTenant);
  world.observer.reset();
  CHECK(observer.expired());  // nobody keeps it
  world.executor->wake(kTenant);
  world.executor->drain();
  CHECK(world.arena->shown(world.two) == World::home_of_two());
}

// A layer that streamed goes elsewhere before the worker has pointed it at the ring: there is nothing to point any more.
TEST(a_layer_that_goes_elsewhere_costs_no_call) {
  World world;
  world.gate->shut();  // whoever calls the driver hangs
  give_asleep(world);
  const std::vector<PageId> nothing(kLayerPages, kNoPage);
  for (int times = 0; times < 2; ++times) {
    world.apply({show(world.two, nothing)});
    world.executor->commit(world.observer);
    world.executor->wake(kTenant);
    world.executor->drain();
    CHECK(world.arena->shown(world.two) == World::home_of_two() && world.executor->failed_points() == 0);
    world.arena->check();
  }
  world.apply(home(world));
  world.executor->commit(world.observer);
  world.executor->drain();
  CHECK(world.arena->shown(world.two) == World::home_of_two());
  world.arena->check();
}

TEST(awake_steps_are_done_at_once) {
  World world;
  give_asleep(world);
  world.apply({owner(from(2 * kLayerPages, 4), Owner::free, Owner::kv), show(world.two, World::home_of_one())});
  world.executor->commit(world.observer);  // the same target once more: who sleeps is woken by it
  world.executor->drain();
  CHECK(world.arena->shown(world.two) == World::home_of_one());
  world.arena->check();
}

}  // namespace
