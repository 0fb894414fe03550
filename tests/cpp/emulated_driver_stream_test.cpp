// The emulated driver itself, streams and events: each rule broken once, each order looked at through memory.
#include <sys/mman.h>

#include <cstring>
#include <thread>

#include "emulated_world.h"
#include "threads.h"

using namespace remap::testing;

namespace {

TEST(copies_and_fills_run_in_order) {
  World world;
  std::memset(world.locked.at, 0x11, kPage);
  FINE(CU(cuMemcpyHtoDAsync)(world.region.slot(0), world.locked.at, kPage, world.stream));
  FINE(CU(cuMemsetD8Async)(world.region.slot(0), 0x22, kPage / 2, world.stream));
  FINE(CU(cuMemcpyDtoDAsync)(world.region.slot(1), world.region.slot(0), kPage, world.stream));
  FINE(CU(cuMemcpyDtoHAsync)(world.locked.at + kPage, world.region.slot(1), kPage, world.stream));
  FINE(CU(cuMemcpyAsync)(address(world.locked.at + 2 * kPage), address(world.locked.at + kPage), kPage, world.stream));
  FINE(CU(cuMemsetD8Async)(address(world.locked.at), 0x33, 1, world.stream));  // a device can write page-locked memory
  FINE(CU(cuMemcpyAsync)(0, 0, 0, world.stream));
  FINE(CU(cuStreamSynchronize)(world.stream));
  FINE(CU(cuStreamQuery)(world.stream));
  CHECK(world.locked.at[2 * kPage] == 0x22 && world.locked.at[3 * kPage - 1] == 0x11 && world.locked.at[0] == 0x33);
  CHECK(CONTROL(remapEmulatedPageable)() == 0);
  world.close();
}

TEST(arguments_of_copies) {
  World world;
  unsigned char own[64] = {};
  FINE(CU(cuMemcpyHtoDAsync)(world.region.slot(0), own, sizeof own, world.stream));
  CHECK(CONTROL(remapEmulatedPageable)() == 1);  // allowed, and counted
  const CUdeviceptr device = world.region.slot(0);
  BREAKS(kInvalidValue, CU(cuMemcpyHtoDAsync)(address(world.locked.at), own, 64, world.stream));
  BREAKS(kInvalidValue, CU(cuMemcpyHtoDAsync)(device, reinterpret_cast<void*>(device + 64), 64, world.stream));
  BREAKS(kInvalidValue, CU(cuMemcpyDtoHAsync)(nullptr, device, 64, world.stream));
  BREAKS(kInvalidValue, CU(cuMemcpyDtoDAsync)(device, address(own), 64, world.stream));
  BREAKS(kInvalidValue, CU(cuMemcpyAsync)(device, device + 32, 64, world.stream));                       // overlap
  BREAKS(kInvalidValue, CU(cuMemcpyAsync)(world.region.slot(1), device, 2 * kPage, world.stream));       // into a hole
  BREAKS(kInvalidValue, CU(cuMemcpyAsync)(address(world.locked.at + 4 * kPage - 8), device, 64, world.stream));  // half locked
  BREAKS(kInvalidValue, CU(cuMemsetD8Async)(address(own), 0, 8, world.stream));
  BREAKS(kInvalidValue, CU(cuMemsetD8Async)(world.region.slot(3), 0, 8, world.stream));
  BREAKS(kInvalidValue, CU(cuLaunchHostFunc)(world.stream, nullptr, nullptr));
  POISONS(CU(cuMemcpyAsync)(device, address(world.locked.at), 64, reinterpret_cast<CUstream>(&world)));
  FINE(CU(cuStreamSynchronize)(world.stream));

  auto* constant = static_cast<unsigned char*>(mmap(nullptr, kPage, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  FINE(CU(cuMemHostRegister)(constant, kPage, kHostReadOnly));
  FINE(CU(cuMemcpyHtoDAsync)(device, constant, kPage, world.stream));
  BREAKS(kInvalidValue, CU(cuMemcpyDtoHAsync)(constant, device, kPage, world.stream));
  FINE(CU(cuStreamSynchronize)(world.stream));
  FINE(CU(cuMemHostUnregister)(constant));
  munmap(constant, kPage);
  world.close();
}

TEST(unmapping_under_work_in_flight) {
  World world;
  Gate gate;
  gate.close_on(world.stream);
  FINE(CU(cuMemcpyHtoDAsync)(world.region.slot(1), world.locked.at, kPage, world.stream));
  FINE(CU(cuMemcpyHtoDAsync)(world.region.slot(0), world.locked.at, kPage, world.stream));
  FINE(CU(cuEventRecord)(world.event, world.stream));
  GIVES(kSuccess, 1u, CU(cuMemUnmap)(world.region.slot(1), kPage));  // the driver does not look
  CHECK(last_violation().find("cuMemcpyHtoDAsync in flight") != std::string::npos);
  const unsigned char before = world.region.bytes_of(0)[0];
  GIVES(kIllegalAddress, 1u, (gate.open(), CU(cuStreamSynchronize)(world.stream)));
  GIVES(kIllegalAddress, 0u, CU(cuEventQuery)(world.event));
  GIVES(kIllegalAddress, 0u, CU(cuStreamQuery)(world.stream));
  CHECK(world.region.bytes_of(0)[0] == before);  // what stood behind the failure was skipped
  // Another stream goes on, until it waits for the failed one.
  CUstream other = nullptr;
  FINE(CU(cuStreamCreate)(&other, kStreamNonBlocking));
  FINE(CU(cuMemsetD8Async)(world.region.slot(0), 0x44, kPage, other));
  FINE(CU(cuStreamSynchronize)(other));
  CHECK(world.region.bytes_of(0)[0] == 0x44);
  FINE(CU(cuStreamWaitEvent)(other, world.event, 0));
  GIVES(kIllegalAddress, 0u, CU(cuStreamSynchronize)(other));
  FINE(CU(cuStreamDestroy)(other));
  FINE(CU(cuMemMap)(world.region.slot(1), kPage, 0, world.region.handles[1], 0));
  world.close();
}

TEST(losing_access_under_work_in_flight) {
  World world;
  Gate gate;
  gate.close_on(world.stream);
  FINE(CU(cuMemcpyHtoDAsync)(world.region.slot(0), world.locked.at, kPage, world.stream));
  FINE(CU(cuMemcpyDtoHAsync)(world.locked.at, world.region.slot(1), kPage, world.stream));
  world.region.allow(0, 1, kAccessRead);
  GIVES(kIllegalAddress, 1u, (gate.open(), CU(cuStreamSynchronize)(world.stream)));
  CONTROL(remapEmulatedReset)();  // heals the stream
  FINE(CU(cuMemcpyDtoHAsync)(world.locked.at, world.region.slot(0), kPage, world.stream));  // reading is allowed
  FINE(CU(cuStreamSynchronize)(world.stream));
  world.close();
}

TEST(unregistering_under_work_in_flight) {
  World world;
  Gate gate;
  gate.close_on(world.stream);
  FINE(CU(cuMemcpyDtoHAsync)(world.locked.at, world.region.slot(0), kPage, world.stream));
  GIVES(kSuccess, 1u, CU(cuMemHostUnregister)(world.locked.at));
  FINE(CU(cuMemHostRegister)(world.locked.at, 4 * kPage, kHostPortable));  // another registration
  GIVES(kIllegalAddress, 1u, (gate.open(), CU(cuStreamSynchronize)(world.stream)));
  world.close();
}

TEST(a_lost_context_is_lost_to_all) {
  World world;
  configure("lose_context", 1);
  CONTROL(remapEmulatedArm)("run:cuMemsetD8Async", 1, kLaunchFailed, 0);
  std::memset(world.region.bytes_of(0), 1, kPage);
  FINE(CU(cuMemsetD8Async)(world.region.slot(0), 2, kPage, world.stream));
  GIVES(kLaunchFailed, 0u, CU(cuStreamSynchronize)(world.stream));
  CHECK(world.region.bytes_of(0)[0] == 2 && world.region.bytes_of(0)[kPage - 1] == 1);  // half done
  GIVES(kLaunchFailed, 0u, CU(cuMemUnmap)(world.region.slot(0), kPage));
  GIVES(kLaunchFailed, 0u, CU(cuEventRecord)(world.event, world.stream));
  CONTROL(remapEmulatedReset)();
  FINE(CU(cuEventRecord)(world.event, world.stream));
  world.close();
}

TEST(events) {
  World world;
  CUevent second = nullptr;
  FINE(CU(cuEventCreate)(&second, kEventBlockingSync));
  float milliseconds = -1;
  FINE(CU(cuEventQuery)(world.event));  // never recorded: complete
  FINE(CU(cuEventSynchronize)(world.event));
  GIVES(kInvalidHandle, 0u, CU(cuEventElapsedTime)(&milliseconds, world.event, second));
  Gate gate;
  FINE(CU(cuEventRecord)(world.event, world.stream));
  FINE(CU(cuEventSynchronize)(world.event));
  gate.close_on(world.stream);
  FINE(CU(cuEventRecord)(second, world.stream));
  GIVES(kNotReady, 0u, CU(cuEventQuery)(second));
  GIVES(kNotReady, 0u, CU(cuStreamQuery)(world.stream));
  GIVES(kNotReady, 0u, CU(cuEventElapsedTime)(&milliseconds, world.event, second));
  gate.open();
  FINE(CU(cuEventSynchronize)(second));
  FINE(CU(cuEventElapsedTime)(&milliseconds, world.event, second));
  CHECK(milliseconds >= 0);
  FINE(CU(cuEventElapsedTime)(&milliseconds, second, world.event));
  CHECK(milliseconds <= 0);
  FINE(CU(cuEventDestroy)(second));
  POISONS(CU(cuEventRecord)(second, world.stream));
  POISONS(CU(cuEventQuery)(second));
  POISONS(CU(cuEventSynchronize)(second));
  POISONS(CU(cuStreamWaitEvent)(world.stream, second, 0));
  POISONS(CU(cuEventElapsedTime)(&milliseconds, world.event, second));
  POISONS(CU(cuEventDestroy)(second));
  // A null handle is seen by a driver as well, and refused.
  BREAKS(kInvalidHandle, CU(cuEventRecord)(nullptr, world.stream));
  BREAKS(kInvalidHandle, CU(cuEventQuery)(nullptr));
  BREAKS(kInvalidHandle, CU(cuEventSynchronize)(nullptr));
  BREAKS(kInvalidHandle, CU(cuStreamWaitEvent)(world.stream, nullptr, 0));
  BREAKS(kInvalidHandle, CU(cuEventElapsedTime)(&milliseconds, world.event, nullptr));
  BREAKS(kInvalidHandle, CU(cuEventDestroy)(nullptr));
  BREAKS(kInvalidValue, CU(cuEventCreate)(&second, 64));
  BREAKS(kInvalidValue, CU(cuStreamWaitEvent)(world.stream, world.event, 4));
  FINE(CU(cuEventCreate)(&second, kEventDisableTiming));
  FINE(CU(cuEventRecord)(second, world.stream));
  FINE(CU(cuEventSynchronize)(second));
  GIVES(kInvalidHandle, 0u, CU(cuEventElapsedTime)(&milliseconds, world.event, second));
  FINE(CU(cuEventDestroy)(second));
  world.close();
}

TEST(a_wait_binds_to_the_recording_at_its_call) {
  World world;
  CUstream waiting = nullptr;
  FINE(CU(cuStreamCreate)(&waiting, kStreamNonBlocking));
  Gate first;
  Gate second;
  first.close_on(world.stream);
  FINE(CU(cuEventRecord)(world.event, world.stream));
  FINE(CU(cuStreamWaitEvent)(waiting, world.event, 0));
  second.close_on(world.stream);
  FINE(CU(cuEventRecord)(world.event, world.stream));  // anew, while the wait is pending
  GIVES(kNotReady, 0u, CU(cuStreamQuery)(waiting));
  first.open();
  FINE(CU(cuStreamSynchronize)(waiting));  // does not wait for the second recording
  GIVES(kNotReady, 0u, CU(cuEventQuery)(world.event));
  FINE(CU(cuEventDestroy)(world.event));  // pending: forgotten, the work goes on
  second.open();
  FINE(CU(cuStreamSynchronize)(world.stream));
  FINE(CU(cuEventCreate)(&world.event, 0));
  FINE(CU(cuStreamWaitEvent)(waiting, world.event, 0));  // never recorded
  FINE(CU(cuStreamSynchronize)(waiting));
  FINE(CU(cuStreamDestroy)(waiting));
  world.close();
}

TEST(destroying_a_stream_does_not_wait_and_does_not_drop_work) {
  World world;
  CUstream stream = nullptr;
  FINE(CU(cuStreamCreate)(&stream, kStreamNonBlocking));
  Gate gate;
  gate.close_on(stream);
  FINE(CU(cuMemsetD8Async)(world.region.slot(0), 0x55, kPage, stream));
  FINE(CU(cuEventRecord)(world.event, stream));
  FINE(CU(cuStreamDestroy)(stream));
  CHECK(CONTROL(remapEmulatedLive)("work") > 0);
  gate.await();  // else a context that is lost below would have it skipped
  POISONS(CU(cuStreamSynchronize)(stream));
  POISONS(CU(cuStreamQuery)(stream));
  POISONS(CU(cuEventRecord)(world.event, stream));
  POISONS(CU(cuStreamWaitEvent)(stream, world.event, 0));
  POISONS(CU(cuMemsetD8Async)(world.region.slot(0), 0, 1, stream));
  POISONS(CU(cuStreamDestroy)(stream));
  CUcontext context = nullptr;
  POISONS(CU(cuStreamGetCtx)(stream, &context));
  GIVES(kInvalidHandle, 0u, CU(cuStreamGetCtx)(reinterpret_cast<CUstream>(&world), &context));  // lenient: see streams.cpp
  GIVES(kSuccess, 1u, CU(cuMemUnmap)(world.region.slot(0), kPage));  // its work is still in flight
  FINE(CU(cuMemMap)(world.region.slot(0), kPage, 0, world.region.handles[0], 0));
  world.region.allow(0, 1, kAccessReadWrite);
  gate.open();
  FINE(CU(cuEventSynchronize)(world.event));
  CHECK(world.region.bytes_of(0)[kPage - 1] == 0x55);
  FINE(CU(cuStreamGetCtx)(world.stream, &context));
  CHECK(context == world.device.context);
  BREAKS(kInvalidValue, CU(cuStreamCreate)(&stream, 8));
  world.close();
}

TEST(default_streams) {
  World world;
  const CUstream legacy = default_stream(kLegacyStream);
  const CUstream per_thread = default_stream(kPerThreadStream);
  CUstream blocking = nullptr;
  FINE(CU(cuStreamCreate)(&blocking, 0));
  CUcontext context = nullptr;
  FINE(CU(cuStreamGetCtx)(legacy, &context));
  CHECK(context == world.device.context);
  // The legacy stream waits for blocking ones and they for it; a non-blocking one takes no part.
  Gate gate;
  gate.close_on(blocking);
  FINE(CU(cuMemsetD8Async)(world.region.slot(0), 1, kPage, blocking));
  FINE(CU(cuMemsetD8Async)(world.region.slot(0), 2, kPage, nullptr));  // 0 is the legacy stream as well
  FINE(CU(cuMemsetD8Async)(world.region.slot(0), 3, kPage, per_thread));
  GIVES(kNotReady, 0u, CU(cuStreamQuery)(legacy));
  GIVES(kNotReady, 0u, CU(cuStreamQuery)(per_thread));
  FINE(CU(cuMemsetD8Async)(world.region.slot(1), 9, kPage, world.stream));
  FINE(CU(cuStreamSynchronize)(world.stream));
  gate.open();
  FINE(CU(cuStreamSynchronize)(per_thread));
  CHECK(world.region.bytes_of(0)[0] == 3 && world.region.bytes_of(0)[kPage - 1] == 3);
  FINE(CU(cuStreamSynchronize)(legacy));
  // Another thread's per-thread stream is another stream.
  Gate own;
  own.close_on(per_thread);
  std::thread([&] {
    FINE(CU(cuCtxPushCurrent)(world.device.context));
    FINE(CU(cuStreamSynchronize)(per_thread));
    FINE(CU(cuCtxPopCurrent)(nullptr));
  }).join();
  own.open();
  FINE(CU(cuStreamSynchronize)(per_thread));
  BREAKS(kInvalidHandle, CU(cuStreamDestroy)(legacy));
  CHECK(CONTROL(remapEmulatedLive)("streams") == 2);  // default ones do not count
  FINE(CU(cuStreamDestroy)(blocking));
  world.close();
}

TEST(calls_inside_a_host_function_are_refused) {
  World world;
  CUresult result = kSuccess;
  const auto call = [](void* out) {
    CUevent event = nullptr;
    *static_cast<CUresult*>(out) = CU(cuEventCreate)(&event, 0);
  };
  Gate gate;
  gate.close_on(world.stream);
  FINE(CU(cuLaunchHostFunc)(world.stream, call, &result));
  GIVES(kSuccess, 1u, (gate.open(), CU(cuStreamSynchronize)(world.stream)));
  CHECK(result == kNotPermitted);
  world.close();
}

TEST(copies_take_as_long_as_the_link_would) {
  World world;
  constexpr std::uint64_t kBytesPerSecond = 4 << 20;  // a page takes 15.6 ms
  configure("h2d_bytes_per_s", kBytesPerSecond);
  configure("jitter_us", 50);
  CUevent end = nullptr;
  FINE(CU(cuEventCreate)(&end, 0));
  FINE(CU(cuEventRecord)(world.event, world.stream));
  FINE(CU(cuMemcpyHtoDAsync)(world.region.slot(0), world.locked.at, kPage, world.stream));
  FINE(CU(cuEventRecord)(end, world.stream));
  FINE(CU(cuEventSynchronize)(end));
  float milliseconds = 0;
  FINE(CU(cuEventElapsedTime)(&milliseconds, world.event, end));
  CHECK(milliseconds >= 1e3F * static_cast<float>(kPage) / static_cast<float>(kBytesPerSecond));
  FINE(CU(cuEventDestroy)(end));
  world.close();
}

// Many threads, each with streams of its own; for the sanitizers, and for the counts at the end.
TEST(many_threads) {
  Device device;
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kRounds = 60;
  on_threads(kThreads, [&](std::size_t t) {
    FINE(CU(cuCtxPushCurrent)(device.context));
    CUstream first = nullptr;
    CUstream second = nullptr;
    CUevent event = nullptr;
    FINE(CU(cuStreamCreate)(&first, kStreamNonBlocking));
    FINE(CU(cuStreamCreate)(&second, kStreamNonBlocking));
    FINE(CU(cuEventCreate)(&event, 0));
    for (std::size_t round = 0; round < kRounds; ++round) {
      Region region(3, 2);
      const auto value = static_cast<unsigned char>(1 + (t * kRounds + round) % 250);
      FINE(CU(cuMemsetD8Async)(region.slot(0), value, kPage, first));
      FINE(CU(cuEventRecord)(event, first));
      FINE(CU(cuStreamWaitEvent)(second, event, 0));
      FINE(CU(cuMemcpyDtoDAsync)(region.slot(1), region.slot(0), kPage, second));
      FINE(CU(cuEventRecord)(event, second));
      FINE(CU(cuEventSynchronize)(event));
      CHECK(region.bytes_of(1)[0] == value && region.bytes_of(1)[kPage - 1] == value);
      region.close();
    }
    FINE(CU(cuStreamDestroy)(first));
    FINE(CU(cuStreamDestroy)(second));
    FINE(CU(cuEventDestroy)(event));
    FINE(CU(cuCtxPopCurrent)(nullptr));
  });
  device.close();
}

}  // namespace
