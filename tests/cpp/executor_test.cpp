// Plans: refused, applied, undone, rolled back; deferred re-pointing; and what happens when undoing fails too.
#include "remap/executor.h"

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "backend/forward.h"
#include "check.h"
#include "remap/backends.h"
#include "remap/decorators.h"

using namespace remap;

namespace {

constexpr std::size_t kPage = 64 << 10;
constexpr TenantId kTenant = 1;

Step owner(std::vector<PageId> pages, Owner from, Owner to, TenantId tenant = kTenant) {
  Step step;
  step.kind = Step::Kind::set_owner;
  step.set_owner = {std::move(pages), from, to, tenant};
  return step;
}

Step point(RegionId region, std::vector<PageId> pages, bool deferred, std::uint32_t layer = 0) {
  Step step;
  step.kind = Step::Kind::point;
  step.point = {region, 0, std::move(pages), deferred, layer};
  return step;
}

struct Observer final : PointObserver {
  bool released(std::uint32_t layer, const std::function<bool()>& current) noexcept override {
    if (!current()) return false;
    ++released_count;
    last = layer;
    return true;
  }
  bool failed(std::uint32_t layer, std::exception_ptr, const std::function<bool()>& current) noexcept override {
    if (!current()) return false;
    ++failed_count;
    last = layer;
    return true;
  }
  std::atomic<int> released_count{0};
  std::atomic<int> failed_count{0};
  std::atomic<std::uint32_t> last{99};
};

// As a GPU's driver: page tables cannot be swapped.
class WithoutExchange final : public Forward<Backend> {
 public:
  using Forward<Backend>::Forward;
  bool can_exchange() const noexcept override { return false; }
  void exchange(std::byte*, std::byte*, std::size_t) override { throw std::logic_error("not to be called"); }
};

// Two layers of two pages (0 1, 2 3), a ring region, and a KV region where pages 2 3 and the free 4 5 have places.
struct World {
  std::shared_ptr<FaultBackend> fault;
  std::shared_ptr<Arena> arena;
  std::unique_ptr<Executor> executor;
  RegionId one = 0, two = 0, ring = 0, kv = 0;

  explicit World(Mode mode, bool exchange = true) {
    HostOptions options;
    options.capacity_bytes = 8 * kPage;
    options.page_bytes = kPage;
    std::shared_ptr<Backend> host = make_host_backend(options);
    fault = make_fault_backend(exchange ? host : std::make_shared<WithoutExchange>(host));
    arena = std::make_shared<Arena>(fault, ArenaOptions{8 * kPage, kPage, mode});
    executor = std::make_unique<Executor>(arena);
    one = arena->add_layer_region(kTenant, "one", arena->take(2, Owner::params, kTenant));
    two = arena->add_layer_region(kTenant, "two", arena->take(2, Owner::params, kTenant));
    ring = arena->add_ring_region(kTenant, 2);
    kv = arena->add_kv_region(kTenant, 6);
    arena->designate(kv, 0, {4, 5, 2, 3});
    std::memset(arena->address(one), 1, 2 * kPage);
    std::memset(arena->address(two), 2, 2 * kPage);
  }
  // Both layers are streamed through layer one's pages; layer two's become KV, and so do the free ones.
  Plan stream(bool deferred = true) const {
    Plan plan;
    plan.epoch = arena->epoch();
    plan.steps = {owner({0, 1}, Owner::params, Owner::ring), point(ring, {0, 1}, false), point(two, {0, 1}, deferred, 1),
                  owner({2, 3}, Owner::params, Owner::kv), owner({4, 5}, Owner::free, Owner::kv)};
    return plan;
  }
  Plan back() const {
    Plan plan;
    plan.epoch = arena->epoch();
    plan.steps = {owner({4, 5}, Owner::kv, Owner::free), owner({2, 3}, Owner::kv, Owner::params),
                  owner({0, 1}, Owner::ring, Owner::params), point(two, {2, 3}, true, 1)};
    return plan;
  }
  std::vector<std::vector<PageId>> state() const {
    std::vector<std::vector<PageId>> all;
    for (const RegionId region : {one, two, ring, kv}) all.push_back(arena->shown(region));
    std::vector<PageId> owners;
    for (const Owner each : arena->owners()) owners.push_back(static_cast<PageId>(each));
    all.push_back(owners);
    all.push_back({static_cast<PageId>(arena->epoch())});
    return all;
  }
  bool reads(RegionId region, int value) const {
    const std::byte* at = arena->address(region);
    return at[0] == static_cast<std::byte>(value) && at[2 * kPage - 1] == static_cast<std::byte>(value);
  }
};

// With and without exchange.
template <typename Body>
void in_both_modes(Body&& body) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    for (const bool exchange : {true, false}) {
      World world(mode, exchange);
      body(world);
      world.fault->disarm();
      world.executor->stop();
      world.arena->check();
      world.arena->close();
      const Usage usage = world.fault->usage();
      CHECK(usage.page_bytes == 0 && usage.mapped_bytes == 0 && usage.reserved_bytes == 0);
    }
  }
}

void applies_and_goes_back() {
  in_both_modes([](World& world) {
    const auto observer = std::make_shared<Observer>();
    const std::uint64_t epoch = world.arena->epoch();
    const Applied applied = world.executor->apply(world.stream());
    world.executor->commit(observer);
    world.executor->drain();
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
    world.executor->commit(observer);
    world.executor->drain();
    CHECK(world.reads(world.one, 1) && world.reads(world.two, 9));  // its pages, with what KV wrote there
    CHECK(world.arena->counts()[Owner::params] == 4 && world.arena->counts()[Owner::free] == 4);
  });
}

void refuses_before_any_backend_call() {
  in_both_modes([](World& world) {
    const auto before = world.state();
    const std::uint64_t calls = world.fault->calls();
    const auto refused = [&](ErrorKind kind, std::vector<Step> steps, std::uint64_t late = 0) {
      Plan plan;
      plan.epoch = world.arena->epoch() - late;
      plan.steps = std::move(steps);
      CHECK_ERROR(kind, world.executor->apply(plan));
      CHECK(world.state() == before && world.fault->calls() == calls);
    };
    const auto bad = ErrorKind::invalid_argument;
    refused(ErrorKind::stale_plan, {owner({4}, Owner::free, Owner::kv)}, 1);
    refused(bad, {owner({0}, Owner::free, Owner::kv)});
    refused(bad, {owner({8}, Owner::free, Owner::kv)});
    refused(bad, {owner({4, 4}, Owner::free, Owner::kv)});
    refused(bad, {owner({0}, Owner::params, Owner::ring, 2)});
    refused(bad, {owner({0}, Owner::params, Owner::quarantine)});
    refused(bad, {owner({4}, Owner::free, Owner::kv), owner({4}, Owner::free, Owner::kv)});
    refused(bad, {point(world.kv, {4}, false)});
    refused(bad, {point(77, {4}, false)});
    refused(bad, {point(world.two, {0}, true)});
    refused(bad, {point(world.two, {0, kNoPage}, true)});
    refused(bad, {point(world.two, {0, 8}, true)});
    refused(bad, {point(world.ring, {0, 1, 2}, false)});
    CHECK_ERROR(ErrorKind::invalid_state, world.executor->commit(nullptr));
    CHECK_ERROR(ErrorKind::invalid_state, world.executor->rollback());
  });
}

void a_page_without_a_place_is_refused_and_undone() {
  in_both_modes([](World& world) {
    const auto before = world.state();
    Plan plan = world.stream();
    plan.steps.push_back(owner({6}, Owner::free, Owner::kv));
    CHECK_ERROR(ErrorKind::invalid_argument, world.executor->apply(plan));
    CHECK(world.state() == before);
  });
}

void rolls_back() {
  in_both_modes([](World& world) {
    const auto before = world.state();
    world.executor->apply(world.stream());
    CHECK_ERROR(ErrorKind::invalid_state, world.executor->apply(world.stream()));
    world.executor->rollback();
    CHECK(world.state() == before && world.reads(world.one, 1) && world.reads(world.two, 2));
    world.arena->check();
    world.executor->apply(world.stream());
    world.executor->commit(nullptr);
    world.executor->drain();
  });
}

// Steps build on each other, so what was done last is undone first.
void a_page_that_moves_twice_goes_all_the_way_back() {
  in_both_modes([](World& world) {
    const auto before = world.state();
    Plan plan;
    plan.epoch = world.arena->epoch();
    plan.steps = {owner({4, 5}, Owner::free, Owner::kv), owner({4}, Owner::kv, Owner::free)};
    world.executor->apply(plan);
    world.executor->rollback();
    CHECK(world.state() == before);
    world.arena->check();
  });
}

void fail_every_call_once(bool exchange) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    for (std::uint64_t n = 1;; ++n) {
      World world(mode, exchange);
      const auto before = world.state();
      world.fault->arm_any(n);
      bool failed = false;
      try {
        world.executor->apply(world.stream(false));
      } catch (const Error& error) {
        failed = true;
        CHECK(error.kind() == ErrorKind::driver && world.state() == before);
        CHECK(world.reads(world.one, 1) && world.reads(world.two, 2));
        world.arena->check();
        world.fault->disarm();
        world.executor->apply(world.stream(false));
      }
      world.fault->disarm();
      world.executor->commit(nullptr);
      world.arena->check();
      CHECK(world.reads(world.two, 1));
      if (!failed) break;
    }
  }
}

void every_call_fails_once() {
  fail_every_call_once(true);
  fail_every_call_once(false);
}

// Fault while undoing: pages are quarantined and counted, only close() is allowed, and it gives everything back.
void fail_every_call_for_ever(bool exchange) {
  bool broke = false;
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    for (std::uint64_t n = 1;; ++n) {
      World world(mode, exchange);
      const auto before = world.state();
      world.fault->arm_any(n, true);
      bool failed = false;
      try {
        world.executor->apply(world.stream(false));
        world.fault->disarm();
        world.executor->commit(nullptr);
      } catch (const Error& error) {
        failed = true;
        world.fault->disarm();
        CHECK(world.arena->broken() == (error.kind() == ErrorKind::arena_broken));
        if (world.arena->broken()) {
          broke = true;
          const PageCounts counts = world.arena->counts();
          CHECK(counts[Owner::quarantine] > 0 && counts.total == 8);
          CHECK_ERROR(ErrorKind::arena_broken, world.executor->apply(world.stream(false)));
        } else {
          CHECK(world.state() == before);
        }
      }
      world.arena->check();
      world.executor->stop();
      world.arena->close();
      const Usage usage = world.fault->usage();
      CHECK(usage.page_bytes == 0 && usage.mapped_bytes == 0 && usage.reserved_bytes == 0);
      if (!failed) break;
    }
  }
  CHECK(broke);
}

void every_call_fails_for_ever() {
  fail_every_call_for_ever(true);
  fail_every_call_for_ever(false);
}

void what_is_undecided_can_be_asked() {
  in_both_modes([](World& world) {
    const auto observer = std::make_shared<Observer>();
    CHECK(!world.executor->undecided());
    world.executor->apply(world.stream());
    CHECK(world.executor->undecided());
    world.executor->rollback();
    CHECK(!world.executor->undecided());
    world.fault->arm_any(1);
    try {
      world.executor->apply(world.stream());
      world.executor->rollback();
    } catch (const Error&) {
      CHECK(!world.executor->undecided());
    }
    world.fault->disarm();
    world.executor->apply(world.stream());
    // The epoch may move meanwhile: that says nothing about the plan.
    world.arena->take(1, Owner::params, 2, {4, 5});
    CHECK(world.executor->undecided());
    world.executor->commit(observer);
    CHECK(!world.executor->undecided());
  });
}

// Undoing a plan needs the regions and pages that it names.
void a_tenant_of_an_undecided_plan_is_not_removed() {
  in_both_modes([](World& world) {
    const auto before = world.state();
    world.executor->apply(world.stream());
    CHECK_ERROR(ErrorKind::invalid_state, world.arena->remove_tenant(kTenant));
    CHECK_ERROR(ErrorKind::invalid_state, world.arena->remove_tenant(kTenant, true));
    CHECK(world.executor->undecided() && !world.arena->broken());
    world.executor->rollback();
    CHECK(world.state() == before);
    world.arena->take(1, Owner::params, 2, {4, 5});
    world.executor->apply(world.stream());
    world.arena->remove_tenant(2);  // the plan does not name it
    world.executor->rollback();
    world.arena->remove_tenant(kTenant);
    CHECK(world.arena->counts()[Owner::free] == 8);
  });
}

// What a layer shows when the plan is done must be its own home or its tenant's ring.
void a_plan_that_takes_pages_from_under_a_layer_is_refused() {
  in_both_modes([](World& world) {
    const auto before = world.state();
    const auto refused = [&](std::vector<Step> steps) {
      Plan plan;
      plan.epoch = world.arena->epoch();
      plan.steps = std::move(steps);
      const std::uint64_t calls = world.fault->calls();
      CHECK_ERROR(ErrorKind::invalid_argument, world.executor->apply(plan));
      CHECK(world.state() == before && world.fault->calls() == calls);
    };
    refused({owner({2, 3}, Owner::params, Owner::kv)});
    refused({owner({0}, Owner::params, Owner::free)});
    refused({owner({0}, Owner::params, Owner::ring)});  // a ring's page before a page of the home
    refused({point(world.two, {0, 1}, false)});
    refused({owner({4, 5}, Owner::free, Owner::ring), point(world.two, {4, 3}, false)});
    refused({owner({4}, static_cast<Owner>(9), Owner::kv)});
    refused({owner({4}, Owner::free, Owner::kv, kNobody)});
    refused({owner({4}, Owner::free, Owner::kv, kUnknownBytes)});
    if (world.arena->mode() == Mode::strict) refused({point(world.ring, {4, 5}, false)});
  });
}

void nothing_is_asked_of_a_closed_arena() {
  World world(Mode::aliased);
  world.executor->apply(world.stream());
  world.arena->close();
  CHECK(!world.executor->undecided());
  CHECK_ERROR(ErrorKind::invalid_state, world.executor->rollback());
  CHECK_ERROR(ErrorKind::invalid_state, world.executor->commit(nullptr));
}

// A commit that cannot start what the plan deferred changes nothing: the plan can still be rolled back.
void a_stopped_executor_commits_nothing_deferred() {
  World world(Mode::aliased);
  const auto before = world.state();
  world.executor->stop();
  world.executor->apply(world.stream());
  CHECK_ERROR(ErrorKind::invalid_state, world.executor->commit(nullptr));
  CHECK(world.executor->undecided());
  world.executor->rollback();
  CHECK(world.state() == before);
  world.executor->drain();
  CHECK_ERROR(ErrorKind::invalid_argument, Executor(nullptr));
}

// Each tenant has two layers of one page; the second comes through the first one's page. Both steps fail.
void failures_are_asked_and_mended_by_tenant() {
  const auto fault = make_fault_backend(make_host_backend({8 * kPage, kPage, 1}));
  const auto arena = std::make_shared<Arena>(fault, ArenaOptions{8 * kPage, kPage, Mode::aliased});
  Executor executor(arena);
  const auto observer = std::make_shared<Observer>();
  std::map<TenantId, RegionId> second, ring;
  for (const TenantId tenant : {TenantId{1}, TenantId{2}}) {
    arena->add_layer_region(tenant, "one", arena->take(1, Owner::params, tenant));
    second[tenant] = arena->add_layer_region(tenant, "two", arena->take(1, Owner::params, tenant));
    ring[tenant] = arena->add_ring_region(tenant, 1);
  }
  for (const TenantId tenant : {TenantId{1}, TenantId{2}}) {
    const PageId page = 2 * (tenant - 1);
    Plan plan;
    plan.epoch = arena->epoch();
    plan.steps = {owner({page}, Owner::params, Owner::ring, tenant), point(ring[tenant], {page}, false),
                  point(second[tenant], {page}, true, tenant), owner({page + 1}, Owner::params, Owner::free, tenant)};
    executor.apply(plan);
    fault->arm(Call::exchange, 1);
    executor.commit(observer);
    executor.drain();
  }
  CHECK(executor.failed_points() == 2 && executor.failed_points(1) == 1 && executor.failed_points(2) == 1);
  CHECK(executor.failed_points(3) == 0);
  executor.retry_failed(3);
  CHECK(executor.failed_points() == 2);
  executor.retry_failed(2);
  CHECK(executor.failed_points() == 1 && executor.failed_points(1) == 1 && executor.failed_points(2) == 0);
  CHECK(observer->released_count == 1 && observer->last == 2);
  CHECK((arena->shown(second[2]) == std::vector<PageId>{2}) && (arena->shown(second[1]) == std::vector<PageId>{1}));
  fault->arm(Call::exchange, 1, true);
  CHECK_ERROR(ErrorKind::driver, executor.retry_failed(1));
  CHECK(executor.failed_points(1) == 1);
  fault->disarm();
  executor.forget(2);
  CHECK(executor.failed_points(1) == 1);
  executor.retry_failed(1);
  CHECK(executor.failed_points() == 0 && (arena->shown(second[1]) == std::vector<PageId>{0}));
  arena->check();
}

void fail_a_deferred_step(bool exchange) {
  World world(Mode::aliased, exchange);
  const auto observer = std::make_shared<Observer>();
  world.executor->apply(world.stream());
  const Call pointing = world.fault->can_exchange() ? Call::exchange : Call::unmap;
  world.fault->arm(pointing, 1, true);
  world.executor->commit(observer);
  world.executor->drain();
  CHECK(observer->failed_count == 1 && observer->released_count == 0 && world.executor->failed_points() == 1);
  CHECK((world.arena->shown(world.two) == std::vector<PageId>{2, 3}));
  world.arena->check();
  CHECK_ERROR(ErrorKind::driver, world.executor->retry_failed());
  CHECK(world.executor->failed_points() == 1 && observer->failed_count == 2);
  world.fault->disarm();
  world.executor->retry_failed();
  CHECK(world.executor->failed_points() == 0 && observer->released_count == 1 && world.reads(world.two, 1));
  world.arena->check();
}

void a_deferred_failure_is_told_and_tried_again() {
  fail_a_deferred_step(true);
  fail_a_deferred_step(false);
}

// Without exchange a region is unmapped before it is mapped anew: if it can be mapped neither anew nor as before, nobody may
// use it, which its layer is told; and the arena still closes.
void a_worker_that_cannot_undo_breaks_the_arena() {
  World world(Mode::aliased, false);
  const auto observer = std::make_shared<Observer>();
  world.executor->apply(world.stream());
  world.fault->arm(Call::map, 1, true);
  world.executor->commit(observer);
  world.executor->drain();
  CHECK(observer->failed_count == 1 && world.arena->broken() && world.arena->counts()[Owner::quarantine] == 2);
  world.fault->disarm();
  CHECK_ERROR(ErrorKind::arena_broken, world.executor->retry_failed());
  world.executor->stop();
  world.arena->check();
  world.arena->close();
  const Usage usage = world.fault->usage();
  CHECK(usage.page_bytes == 0 && usage.mapped_bytes == 0 && usage.reserved_bytes == 0);
}

// The next plan changes the target before the failed step was tried again: it ends at the newest target.
void a_retry_points_at_the_present_target() {
  World world(Mode::aliased);
  const auto observer = std::make_shared<Observer>();
  world.executor->apply(world.stream());
  world.fault->arm(world.fault->can_exchange() ? Call::exchange : Call::map, 1);
  world.executor->commit(observer);
  world.executor->drain();
  CHECK(world.executor->failed_points() == 1);
  world.executor->apply(world.back());
  world.executor->commit(observer);
  world.executor->drain();
  world.executor->retry_failed();
  CHECK((world.arena->shown(world.two) == std::vector<PageId>{2, 3}) && world.reads(world.two, 2));
  world.arena->check();
}

void a_deferred_step_waits_for_its_event() {
  World world(Mode::aliased);
  const auto observer = std::make_shared<Observer>();
  const StreamHandle stream = world.fault->create_stream();
  const EventHandle event = world.fault->create_event(true);
  std::byte* memory = world.fault->allocate_host(16 << 20);
  for (int i = 0; i < 40; ++i) world.fault->fill(stream, memory, 1, 16 << 20);
  world.fault->record(event, stream);
  world.executor->apply(world.stream());
  world.executor->commit(observer, event);
  if (!world.fault->query(event)) CHECK(observer->released_count == 0 || world.fault->query(event));
  world.executor->drain();
  CHECK(world.fault->query(event) && observer->released_count == 1);
  world.fault->destroy_stream(stream);
  world.fault->destroy_event(event);
  world.fault->free_host(memory, 16 << 20);
}

void forgets_what_a_tenant_leaves() {
  World world(Mode::aliased);
  world.executor->apply(world.stream());
  world.fault->arm(world.fault->can_exchange() ? Call::exchange : Call::unmap, 1, true);
  world.executor->commit(nullptr);
  world.executor->drain();
  CHECK(world.executor->failed_points() == 1);
  world.executor->forget(kTenant + 1);
  CHECK(world.executor->failed_points() == 1);
  world.executor->forget(kTenant);
  CHECK(world.executor->failed_points() == 0);
  world.fault->disarm();
  world.arena->remove_tenant(kTenant);
  world.arena->check();
  CHECK(world.arena->counts()[Owner::free] == 8);
}

// A region in a declared range shows what it shows, whatever plan comes.
void declared_ranges_refuse_plans() {
  in_both_modes([](World& world) {
    Arena& arena = *world.arena;
    const bool strict = arena.mode() == Mode::strict;
    const auto before = world.state();
    const auto refused = [&](RegionId region, std::vector<Step> steps) {
      // One byte of the region's last page is enough.
      const std::byte* at = arena.address(region) + arena.region_bytes(region) - 1;
      arena.declare_registered(at, 1);
      const std::uint64_t calls = world.fault->calls();
      Plan plan;
      plan.epoch = arena.epoch();
      plan.steps = std::move(steps);
      try {
        world.executor->apply(plan);
        CHECK(false);
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::invalid_state);
        std::map<std::string, std::int64_t> fields;
        for (const auto& [name, value] : error.fields()) fields[name] = std::get<std::int64_t>(value);
        CHECK(fields.at("region") == static_cast<std::int64_t>(region));
        CHECK(fields.at("address") == static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(at)));
      }
      CHECK(world.fault->calls() == calls && world.state() == before);
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
    Plan plan;
    plan.epoch = arena.epoch();
    plan.steps = {point(world.two, {2, 3}, true, 1), owner({4, 5}, Owner::free, Owner::kv)};
    world.executor->apply(plan);
    CHECK_ERROR(ErrorKind::invalid_state, arena.declare_registered(arena.address(world.one), 1));  // not decided
    world.executor->commit(nullptr);
    world.executor->drain();
    arena.check();
    plan.epoch = arena.epoch();
    plan.steps = {owner({4, 5}, Owner::kv, Owner::free)};
    world.executor->apply(plan);
    world.executor->commit(nullptr);
    arena.check();
    arena.withdraw_registered(arena.address(world.two), 1);
    if (!strict) arena.withdraw_registered(arena.address(world.kv), 6 * kPage);

    // Still to be re-pointed: who looked its pages up has the wrong ones.
    world.executor->apply(world.stream());
    world.fault->arm_any(1, true);
    world.executor->commit(nullptr);
    world.executor->drain();
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

int main() {
  RUN(applies_and_goes_back);
  RUN(refuses_before_any_backend_call);
  RUN(a_page_without_a_place_is_refused_and_undone);
  RUN(rolls_back);
  RUN(a_page_that_moves_twice_goes_all_the_way_back);
  RUN(every_call_fails_once);
  RUN(every_call_fails_for_ever);
  RUN(what_is_undecided_can_be_asked);
  RUN(nothing_is_asked_of_a_closed_arena);
  RUN(a_tenant_of_an_undecided_plan_is_not_removed);
  RUN(a_plan_that_takes_pages_from_under_a_layer_is_refused);
  RUN(a_stopped_executor_commits_nothing_deferred);
  RUN(failures_are_asked_and_mended_by_tenant);
  RUN(a_deferred_failure_is_told_and_tried_again);
  RUN(a_worker_that_cannot_undo_breaks_the_arena);
  RUN(a_retry_points_at_the_present_target);
  RUN(a_deferred_step_waits_for_its_event);
  RUN(forgets_what_a_tenant_leaves);
  RUN(declared_ranges_refuse_plans);
  return remap::testing::failures();
}
