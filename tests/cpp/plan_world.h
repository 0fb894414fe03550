// Plans on the fake device: two tenants, each computing on a stream of its own.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "fake_device.h"
#include "plans.h"

namespace remap::testing {

inline constexpr std::size_t kPage = FakeDevice::kPage;
inline constexpr std::size_t kPages = 12;
inline constexpr TenantId kA = 1, kB = 2;

// A has layers 0 1 and 2 3 and a ring, B has layer 4 5; both may be given 6 .. 11, and A its own layers, as KV. Each computes
// on a stream of its own.
struct PlanWorld {
  std::shared_ptr<FakeDevice> device;
  std::shared_ptr<Arena> arena;
  std::unique_ptr<Executor> executor;
  RegionId one = 0, two = 0, other = 0, ring = 0, kv_a = 0, kv_b = 0;
  StreamHandle a = 0, b = 0;

  explicit PlanWorld(Mode mode = Mode::aliased, std::uint64_t seed = 1, bool exchange = false)
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
  struct Changed : Applied {
    std::size_t zeroed_bytes = 0;
  };
  Changed change(std::vector<Step> steps, const Ordering& ordering = {}) {
    Changed changed{apply(std::move(steps), ordering)};
    changed.zeroed_bytes = executor->zero_due();
    executor->commit(nullptr, ordering.after);
    return changed;
  }
  EventHandle behind(StreamHandle stream) {
    const EventHandle event = device->create_event(true);
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
inline bool violates(const std::function<void()>& body) {
  try {
    body();
    return false;
  } catch (const std::logic_error&) {
    return true;
  }
}

}  // namespace remap::testing
