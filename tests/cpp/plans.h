// Plans: their steps, who is told of them, and an arena on the host backend whose calls can be made to fail.
#pragma once

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "backend/forward.h"
#include "check.h"
#include "remap/backends.h"
#include "remap/decorators.h"
#include "remap/executor.h"
#include "usage.h"

namespace remap::testing {

inline constexpr TenantId kTenant = 1;

inline Step owner(std::vector<PageId> pages, Owner from, Owner to, TenantId tenant = kTenant) {
  Step step;
  step.kind = Step::Kind::set_owner;
  step.set_owner = {std::move(pages), from, to, tenant};
  return step;
}

inline Step point(RegionId region, std::vector<PageId> pages, bool deferred, std::uint32_t layer = 0,
                  std::size_t first = 0) {
  Step step;
  step.kind = Step::Kind::point;
  step.point = {region, first, std::move(pages), deferred, layer};
  return step;
}

struct Observer final : PointObserver {
  bool released(std::uint32_t layer, const std::function<bool()>& current) noexcept override {
    return told(layer, current, released_count);
  }
  bool failed(std::uint32_t layer, std::exception_ptr, const std::function<bool()>& current) noexcept override {
    return told(layer, current, failed_count);
  }
  bool told(std::uint32_t layer, const std::function<bool()>& current, std::atomic<int>& count) noexcept {
    if (!current()) {
      ++stale;
      return false;
    }
    last = layer;
    ++count;
    return true;
  }
  std::atomic<int> released_count{0}, failed_count{0}, stale{0};
  std::atomic<std::uint32_t> last{99};
};

// As a GPU's driver: page tables cannot be swapped.
class WithoutExchange : public Forward<Backend> {
 public:
  using Forward<Backend>::Forward;
  bool can_exchange() const noexcept override { return false; }
  void exchange(std::byte*, std::byte*, std::size_t) override { throw std::logic_error("not to be called"); }
};

struct HostArena {
  static constexpr std::size_t kPage = 64 << 10;
  std::shared_ptr<FaultBackend> fault;
  std::shared_ptr<Arena> arena;
  std::unique_ptr<Executor> executor;

  HostArena(std::shared_ptr<Backend> backend, std::size_t pages, Mode mode)
      : fault(make_fault_backend(std::move(backend))),
        arena(std::make_shared<Arena>(fault, ArenaOptions{pages * kPage, kPage, mode})),
        executor(std::make_unique<Executor>(arena)) {}
  static std::shared_ptr<Backend> host(std::size_t pages, bool exchange = true) {
    std::shared_ptr<Backend> made = make_host_backend({pages * kPage, kPage, 1});
    return exchange ? made : std::make_shared<WithoutExchange>(made);
  }

  RegionId add_layer(const char* name, std::size_t pages, TenantId tenant = kTenant) const {
    return arena->add_layer_region(tenant, name, arena->take(pages, Owner::params, tenant));
  }
  Plan plan(std::vector<Step> steps) const { return {arena->epoch(), std::move(steps)}; }
  Applied apply(std::vector<Step> steps) const { return executor->apply(plan(std::move(steps))); }
  void decide(const std::shared_ptr<Observer>& observer = nullptr) const {
    executor->zero_due();
    executor->commit(observer);
    executor->drain();
    arena->check();
  }
  // All that a call may change.
  std::vector<std::size_t> state() const {
    std::vector<std::size_t> all{arena->epoch(), arena->regions(), executor->undecided() ? 1u : 0u,
                                 executor->failed_points()};
    for (const Owner each : arena->owners()) all.push_back(static_cast<std::size_t>(each));
    for (const TenantId each : arena->tenants()) all.push_back(each);
    for (RegionId region = 0; region < 32; ++region) {
      try {
        for (const PageId page : arena->shown(region)) all.push_back(page);
      } catch (const Error&) {
        all.push_back(~std::size_t{0});
      }
    }
    return all;
  }
  // Refused with this error, before any call, and nothing has changed.
  Error refuses(ErrorKind kind, const Plan& refused) const {
    const auto before = state();
    const std::uint64_t calls = fault->calls();
    try {
      executor->apply(refused);
    } catch (const Error& error) {
      CHECK(error.kind() == kind && state() == before && fault->calls() == calls);
      return error;
    }
    throw std::logic_error("a plan was not refused");
  }
  // Whatever has happened to it: everything can be given back.
  void end() const {
    fault->disarm();
    executor->stop();
    arena->check();
    arena->close();
    CHECK(empty(fault->usage()));
  }
};

// Two layers of two pages (0 1, 2 3), a ring region, and a KV region where the free pages `loose` and 2 3 have places.
struct TwoLayers : HostArena {
  RegionId one = 0, two = 0, ring = 0, kv = 0;
  std::vector<PageId> loose;

  TwoLayers(Mode mode, bool exchange, std::size_t pages, std::vector<PageId> free)
      : HostArena(host(pages, exchange), pages, mode), loose(std::move(free)) {
    one = add_layer("one", 2);
    two = add_layer("two", 2);
    ring = arena->add_ring_region(kTenant, 2);
    kv = arena->add_kv_region(kTenant, 6);
    arena->designate(kv, 0, loose);
    arena->designate(kv, loose.size(), {2, 3});
  }
  // Both layers are streamed through layer one's pages; layer two's become KV, and so do the free ones.
  Plan stream(bool deferred = true) const {
    return plan({owner({0, 1}, Owner::params, Owner::ring), point(ring, {0, 1}, false), point(two, {0, 1}, deferred, 1),
                 owner({2, 3}, Owner::params, Owner::kv), owner(loose, Owner::free, Owner::kv)});
  }
  Plan back() const {
    return plan({owner(loose, Owner::kv, Owner::free), owner({2, 3}, Owner::kv, Owner::params),
                 owner({0, 1}, Owner::ring, Owner::params), point(two, {2, 3}, true, 1)});
  }
};

// In both modes, with and without exchange.
template <typename World, typename Body>
void everywhere(Body&& body) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    for (const bool exchange : {true, false}) {
      World world(mode, exchange);
      body(world);
      world.end();
    }
  }
}

// Each backend call of world.sweep() fails, once or from then on: undone, with every byte as it was (world.intact()),
// and the plan works when it is made again (world.reached()); or undoing has failed as well, which the arena says,
// pages are quarantined and counted, and only close() is allowed.
template <typename World>
void every_call_of_a_plan_fails() {
  int broken = 0;
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    for (const bool exchange : {true, false}) {
      for (const bool for_ever : {false, true}) {
        bool failed = true;
        for (std::uint64_t n = 1; failed; ++n) {
          World world(mode, exchange);
          const Plan plan = world.sweep();
          const auto before = world.state();
          failed = false;
          world.fault->arm_any(n, for_ever);
          try {
            world.executor->apply(plan);
          } catch (const Error& error) {
            failed = true;
            CHECK(error.kind() == (world.arena->broken() ? ErrorKind::arena_broken : ErrorKind::driver));
          }
          world.fault->disarm();
          world.arena->check();
          if (world.arena->broken()) {
            ++broken;
            const PageCounts counts = world.arena->counts();
            CHECK(for_ever && counts[Owner::quarantine] > 0 && counts.total == world.arena->total_pages());
            CHECK_ERROR(ErrorKind::arena_broken, world.executor->apply(plan));
          } else {
            if (failed) {
              CHECK(world.state() == before);
              world.intact();
              world.executor->apply(plan);
            }
            world.decide();
            world.reached();
          }
          world.end();
        }
      }
    }
  }
  CHECK(broken > 0);
}

}  // namespace remap::testing
