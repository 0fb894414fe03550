// The emulated driver itself: what work waits for beside its own stream. Copies of one direction share one engine, first come
// first served; a stream's channel holds so much and no more. All is shown by what is over before what, whatever time it takes.
#include <atomic>
#include <thread>

#include "emulated_world.h"

using namespace remap::testing;

namespace {

bool over(CUevent event) { return CU(cuEventQuery)(event) == kSuccess; }

// The world's stream, on which the large copies are, and another one with a small one.
struct Two : World {
  Two() {
    FINE(CU(cuStreamCreate)(&other, kStreamNonBlocking));
    FINE(CU(cuEventCreate)(&small_done, 0));
  }
  void close() {
    FINE(CU(cuStreamSynchronize)(stream));
    FINE(CU(cuStreamSynchronize)(other));
    FINE(CU(cuStreamDestroy)(other));
    FINE(CU(cuEventDestroy)(small_done));
    World::close();
  }
  void large() { FINE(CU(cuMemcpyHtoDAsync)(region.slot(0), locked.at, kPage, stream)); }
  void large_is_enqueued() { FINE(CU(cuEventRecord)(event, stream)); }
  void small() {
    FINE(CU(cuMemcpyHtoDAsync)(region.slot(1), locked.at + kPage, 64, other));
    FINE(CU(cuEventRecord)(small_done, other));
  }
  CUstream other = nullptr;
  CUevent small_done = nullptr;
};

constexpr std::uint64_t kSlow = 2'000'000;  // bytes a second: a large copy takes 33 ms, and the small one would take none
constexpr std::uint64_t kSlowest = 4000;

TEST(a_small_copy_waits_for_a_large_one_of_another_stream) {
  Two two;
  configure("copy_bytes_per_s", kSlow);
  two.large();
  two.large_is_enqueued();
  two.small();
  FINE(CU(cuEventSynchronize)(two.small_done));
  CHECK(over(two.event));
  two.close();
}

TEST(it_waits_for_all_that_stand_back_to_back) {
  Two two;
  configure("copy_bytes_per_s", kSlow);
  two.large();
  two.large();
  FINE(CU(cuEventRecord)(two.event, two.stream));           // an event lets nobody in,
  FINE(CU(cuStreamWaitEvent)(two.stream, two.small_done, 0));  // nor does a wait for what is over (never recorded: it is)
  two.large();
  two.large_is_enqueued();
  two.small();
  FINE(CU(cuEventSynchronize)(two.small_done));
  CHECK(over(two.event));
  two.close();
}

TEST(it_comes_between_where_something_else_lies_between) {
  Two two;
  Gate gate;
  two.large();
  gate.close_on(two.stream);  // stands for a kernel
  two.large();
  two.large_is_enqueued();
  two.small();
  FINE(CU(cuEventSynchronize)(two.small_done));
  CHECK(!over(two.event));
  gate.open();
  FINE(CU(cuEventSynchronize)(two.event));
  two.close();
}

// Whether the small copy came between two large ones with a fill between them.
bool comes_between(Two& two, std::uint64_t bytes_per_s) {
  configure("copy_bytes_per_s", bytes_per_s);
  two.large();
  FINE(CU(cuMemsetD8Async)(two.region.slot(1) + kPage / 2, 1, 1, two.stream));
  two.large();
  two.large_is_enqueued();
  two.small();
  FINE(CU(cuEventSynchronize)(two.small_done));
  const bool between = !over(two.event);
  FINE(CU(cuStreamSynchronize)(two.stream));
  return between;
}

TEST(a_fill_between_lets_others_in) {
  Two two;
  // However slow the machine is, some copy is long enough for the small one to be enqueued meanwhile.
  std::uint64_t bytes_per_s = kSlow;
  while (!comes_between(two, bytes_per_s) && bytes_per_s > kSlowest) bytes_per_s /= 4;
  CHECK(bytes_per_s > kSlowest);
  two.close();
}

// A wait for what is not over lets others in: the copy behind it is in nobody's line until then.
TEST(a_copy_that_waits_for_an_event_is_not_in_line) {
  Two two;
  CUstream third = nullptr;
  CUevent gate_passed = nullptr;
  FINE(CU(cuStreamCreate)(&third, kStreamNonBlocking));
  FINE(CU(cuEventCreate)(&gate_passed, 0));
  Gate gate;
  gate.close_on(third);
  FINE(CU(cuEventRecord)(gate_passed, third));
  two.large();
  FINE(CU(cuStreamWaitEvent)(two.stream, gate_passed, 0));
  two.large();
  two.large_is_enqueued();
  two.small();
  FINE(CU(cuEventSynchronize)(two.small_done));
  CHECK(!over(two.event));
  gate.open();
  FINE(CU(cuEventSynchronize)(two.event));
  FINE(CU(cuEventDestroy)(gate_passed));
  FINE(CU(cuStreamDestroy)(third));
  two.close();
}

// Whether a copy back was over before one of the other direction, whose engine is its own, and a copy inside the device too.
bool passes_the_other_direction(Two& two, std::uint64_t bytes_per_s) {
  configure("h2d_bytes_per_s", bytes_per_s);
  two.large();
  two.large_is_enqueued();
  FINE(CU(cuMemcpyDtoHAsync)(two.locked.at + 2 * kPage, two.region.slot(1), 64, two.other));
  FINE(CU(cuMemcpyDtoDAsync)(two.region.slot(1), two.region.slot(1) + kPage / 2, 64, two.other));
  FINE(CU(cuStreamSynchronize)(two.other));
  const bool passed = !over(two.event);
  FINE(CU(cuStreamSynchronize)(two.stream));
  return passed;
}

TEST(each_direction_has_an_engine) {
  Two two;
  // However slow the machine is, some copy is long enough.
  std::uint64_t bytes_per_s = kSlow;
  while (!passes_the_other_direction(two, bytes_per_s) && bytes_per_s > kSlowest) bytes_per_s /= 4;
  CHECK(bytes_per_s > kSlowest);
  two.close();
}

// Tickets of work that is skipped are given back.
TEST(a_stream_that_failed_holds_nobody_up) {
  Two two;
  CONTROL(remapEmulatedArm)("run:cuMemcpyHtoDAsync", 1, kLaunchFailed, 0);
  for (int i = 0; i < 3; ++i) two.large();
  two.small();
  FINE(CU(cuEventSynchronize)(two.small_done));
  CHECK(CU(cuStreamSynchronize)(two.stream) == kLaunchFailed);
  CONTROL(remapEmulatedReset)();
  two.close();
}

TEST(enqueueing_blocks_while_the_channel_is_full) {
  World world;
  CHECK(CONTROL(remapEmulatedConfigure)("channel_ops", 0) == -1);
  configure("channel_ops", 4);
  Gate gate;
  gate.close_on(world.stream);  // counts: it is not done
  for (int i = 0; i < 3; ++i) FINE(CU(cuMemsetD8Async)(world.region.slot(0), 1, kPage, world.stream));
  std::atomic<bool> enqueued{false};
  std::thread engine([&] {
    FINE(CU(cuCtxSetCurrent)(world.device.context));
    FINE(CU(cuEventRecord)(world.event, world.stream));
    enqueued = true;
  });
  while (CONTROL(remapEmulatedLive)("blocked") == 0 && !enqueued) std::this_thread::yield();
  CHECK(CONTROL(remapEmulatedLive)("work") == 4 && !enqueued);
  CUstream other = nullptr;  // each has its own
  FINE(CU(cuStreamCreate)(&other, kStreamNonBlocking));
  FINE(CU(cuMemsetD8Async)(world.region.slot(1), 1, kPage, other));
  FINE(CU(cuStreamSynchronize)(other));
  FINE(CU(cuStreamDestroy)(other));
  CHECK(!enqueued);
  gate.open();
  engine.join();
  FINE(CU(cuEventSynchronize)(world.event));
  world.close();
}

}  // namespace
