// The emulated driver itself: what calls cost when tests say so, and what goes on meanwhile. That something takes at least so
// long is asserted, and what comes before what; never that something is quick.
#include <atomic>
#include <chrono>
#include <thread>

#include "emulated_world.h"

using namespace remap::testing;
using std::chrono::nanoseconds;
using std::chrono::steady_clock;

namespace {

constexpr std::uint64_t kMs = 1'000'000;

template <typename Call>
nanoseconds length_of(Call&& call) {
  const auto begun = steady_clock::now();
  call();
  return steady_clock::now() - begun;
}

TEST(mapping_calls_cost_what_was_set_for_each_page) {
  Device device;
  Region region(4, 4);
  FINE(CU(cuMemUnmap)(region.at, 4 * kPage));
  configure("map_ns", 2 * kMs);
  configure("unmap_ns", 3 * kMs);
  configure("set_access_ns", 4 * kMs);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(length_of([&] { FINE(CU(cuMemMap)(region.slot(i), kPage, 0, region.handles[i], 0)); }) >= nanoseconds(2 * kMs));
  }
  CHECK(length_of([&] { region.allow(0, 3, kAccessReadWrite); }) >= nanoseconds(3 * 4 * kMs));
  CHECK(length_of([&] { FINE(CU(cuMemUnmap)(region.slot(1), 3 * kPage)); }) >= nanoseconds(3 * 3 * kMs));
  FINE(CU(cuMemUnmap)(region.slot(0), kPage));
  for (const char* name : {"map_ns", "unmap_ns", "set_access_ns"}) configure(name, 0);
  for (std::size_t i = 0; i < 4; ++i) FINE(CU(cuMemMap)(region.slot(i), kPage, 0, region.handles[i], 0));
  region.close();
  device.close();
}

// Whether a whole piece of work, enqueued after set-access had begun on another thread, ended before that did.
bool overtakes_set_access(World& world, std::uint64_t cost_ns) {
  configure("set_access_ns", cost_ns);
  const std::uint64_t before = CONTROL(remapEmulatedCalls)("cuMemSetAccess");
  std::atomic<bool> ended{false};
  std::thread mapper([&] {
    FINE(CU(cuCtxSetCurrent)(world.device.context));
    world.region.allow(0, 1, kAccessReadWrite);
    ended = true;
  });
  while (CONTROL(remapEmulatedCalls)("cuMemSetAccess") == before) std::this_thread::yield();
  FINE(CU(cuMemsetD8Async)(world.region.slot(1), 0x5A, kPage, world.stream));
  FINE(CU(cuStreamSynchronize)(world.stream));
  const bool overtook = !ended;
  mapper.join();
  configure("set_access_ns", 0);
  return overtook;
}

TEST(other_calls_do_not_wait_for_a_mapping_call) {
  World world;
  // However slow the machine is, some cost is long enough for a piece of work to fit into it.
  std::uint64_t cost_ns = 20 * kMs;
  while (!overtakes_set_access(world, cost_ns) && cost_ns < 20'000 * kMs) cost_ns *= 4;
  CHECK(cost_ns < 20'000 * kMs);
  world.close();
}

TEST(with_the_driver_lock_enqueueing_waits_for_a_mapping_call) {
  World world;
  configure("driver_lock", 1);
  world.region.allow(0, 1, kAccessNone);
  configure("set_access_ns", 50 * kMs);
  const std::uint64_t before = CONTROL(remapEmulatedCalls)("cuMemSetAccess");
  std::thread mapper([&] {
    FINE(CU(cuCtxSetCurrent)(world.device.context));
    world.region.allow(0, 1, kAccessReadWrite);
  });
  while (CONTROL(remapEmulatedCalls)("cuMemSetAccess") == before) std::this_thread::yield();
  // Without the lock this would run before there is access, and break a rule.
  FINE(CU(cuMemsetD8Async)(world.region.slot(0), 0x5A, kPage, world.stream));
  FINE(CU(cuStreamSynchronize)(world.stream));
  mapper.join();
  CHECK(world.region.bytes_of(0)[0] == 0x5A);
  world.close();
}

// What is unmapped is gone while the call lasts, and what is mapped is not there before it returns.
TEST(nothing_can_be_used_while_it_is_unmapped) {
  World world;
  configure("unmap_ns", 50 * kMs);
  const std::uint64_t before = CONTROL(remapEmulatedCalls)("cuMemUnmap");
  CUresult unmapped = kSuccess;
  std::thread mapper([&] {
    FINE(CU(cuCtxSetCurrent)(world.device.context));
    unmapped = CU(cuMemUnmap)(world.region.slot(1), kPage);
  });
  while (CONTROL(remapEmulatedCalls)("cuMemUnmap") == before) std::this_thread::yield();
  CHECK(CONTROL(remapEmulatedLive)("mappings") == 1);
  CHECK(CU(cuMemsetD8Async)(world.region.slot(1), 1, kPage, world.stream) == kInvalidValue);
  mapper.join();
  CHECK(unmapped == kSuccess);
  FINE(CU(cuMemMap)(world.region.slot(1), kPage, 0, world.region.handles[1], 0));
  world.close();
}

TEST(pinning_takes_time) {
  Device device;
  Locked locked;  // at no cost
  FINE(CU(cuMemHostUnregister)(locked.at));
  configure("pin_ns_per_gib", 10'000 * kMs * (std::uint64_t{1} << 30) / (1000 * 4 * kPage));  // 10 ms for all of it
  CHECK(length_of([&] { FINE(CU(cuMemHostRegister)(locked.at, 4 * kPage, kHostPortable)); }) >= nanoseconds(9 * kMs));
  locked.close();
  device.close();
}

}  // namespace
