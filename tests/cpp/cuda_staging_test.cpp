// SPDX-License-Identifier: Apache-2.0
// Copies from host memory that is not page-locked (HostUse::staged), on the emulated driver.
#include <cstring>
#include <thread>
#include <vector>

#include "cuda_world.h"

namespace {

using namespace remap;
using namespace remap::testing;
using remap::EventHandle;  // and not the driver's
using remap::StreamHandle;

constexpr int kUnknown = 999;
constexpr std::size_t kPages = 400;  // 25 MiB: each of the four slots is used twice, and a part of one
constexpr std::size_t kBytes = kPages * kPage - 12'345;

// Bytes of which no two parts are alike, from an address that no driver would have aligned.
std::vector<std::byte> source() {
  std::vector<std::byte> made(kBytes + 3);
  for (std::size_t i = 0; i < made.size(); ++i) made[i] = static_cast<std::byte>(i * 2'654'435'761u >> 13);
  return made;
}

struct World {
  std::shared_ptr<Backend> backend;
  Shown shown;
  StreamHandle stream;
  EventHandle event;
  std::vector<std::byte> own = source();
  const std::byte* from = own.data() + 3;

  explicit World(const CudaOptions& options = {})
      : backend(open_cuda(options)), shown(*backend, kPages), stream(backend->create_stream()), event(backend->create_event(false)) {
    backend->register_host(from, kBytes, HostUse::staged);
  }
  void copy() { backend->copy(stream, shown.at, from, kBytes); }
  void clear() {
    backend->fill(stream, shown.at, 0, shown.bytes());
    finish();
  }
  void finish() {
    backend->record(event, stream);
    CHECK(backend->synchronize(event, kWait));
  }
  bool arrived() const { return std::memcmp(shown.at, from, kBytes) == 0 && all_are(shown.at + kBytes, 0, shown.bytes() - kBytes); }
  void close() {
    backend->unregister_host(from, kBytes);
    backend->destroy_event(event);
    backend->destroy_stream(stream);
    shown.release();
    CHECK(same(backend->usage(), Usage{}));
  }
};

CLEAN_TEST(staged_copies_arrive_whole_and_none_is_of_pageable_memory) {
  for (const bool pieces : {false, true}) {  // host memory in pieces that end inside of a slot
    emulate();
    World world(pieces ? small_pieces() : CudaOptions{});
    for (int round = 0; round < 2; ++round) {
      world.clear();
      world.copy();
      world.finish();
      CHECK(world.arrived());
    }
    CHECK(CONTROL(remapEmulatedPageable)() == 0);
    world.close();
  }
}

// The call returns before the stream has come as far, and an event behind it is behind all of the copy.
CLEAN_TEST(a_staged_copy_is_enqueued_like_any_other) {
  emulate();
  configure("h2d_bytes_per_s", 200'000'000);
  World world;
  const StreamHandle other = world.backend->create_stream();
  const EventHandle gate = world.backend->create_event(false), free = world.backend->create_event(false);
  std::byte* locked = world.backend->allocate_host(kPage);
  world.clear();
  world.backend->copy(other, world.shown.at, world.from, kBytes);  // 0.13 s
  world.backend->record(gate, other);
  world.backend->stream_wait(world.stream, gate);
  world.backend->fill(world.stream, world.shown.at, 0, kBytes);
  world.copy();
  CHECK(!world.backend->query(gate));
  // A third stream is not behind any of that.
  const StreamHandle third = world.backend->create_stream();
  world.backend->fill(third, locked, 1, kPage);
  world.backend->record(free, third);
  CHECK(world.backend->synchronize(free, kWait));
  world.finish();
  CHECK(world.arrived() && CONTROL(remapEmulatedPageable)() == 0);
  for (const EventHandle event : {gate, free}) world.backend->destroy_event(event);
  for (const StreamHandle stream : {other, third}) world.backend->destroy_stream(stream);
  world.backend->free_host(locked, kPage);
  world.close();
}

CLEAN_TEST(staged_memory_takes_nothing_of_the_budget) {
  emulate();
  CudaOptions options;
  options.host_budget_bytes = kPage;
  World world(options);
  std::byte* all = world.backend->allocate_host(kPage);
  world.clear();
  world.copy();
  world.finish();
  CHECK(world.arrived());
  CHECK_ERROR(ErrorKind::limit_exceeded, world.backend->allocate_host(1));
  world.backend->free_host(all, kPage);
  world.backend->free_host(world.backend->allocate_host(kPage), kPage);  // the slots count in no budget
  world.close();
}

// While copies from it are under way, and while another thread enqueues more.
CLEAN_TEST(staged_memory_is_page_locked_in_place_and_staged_again) {
  emulate();
  configure("h2d_bytes_per_s", 400'000'000);
  for (const bool pieces : {false, true}) {
    World world(pieces ? small_pieces() : CudaOptions{});
    for (int round = 0; round < 2; ++round) {
      world.clear();
      world.copy();
      std::thread locking([&] { world.backend->use_host(world.from, kBytes, HostUse::locked); });  // in round 1 it is so still
      world.copy();
      locking.join();
      const auto staged = calls("cuLaunchHostFunc");
      world.copy();
      CHECK(calls("cuLaunchHostFunc") == staged);
      world.finish();
      CHECK(world.arrived());
      world.clear();
      world.backend->use_host(world.from, kBytes, HostUse::staged);
      world.copy();
      CHECK(calls("cuLaunchHostFunc") > staged);
      world.finish();
      CHECK(world.arrived() && CONTROL(remapEmulatedPageable)() == 0);
    }
    world.backend->use_host(world.from, kBytes, HostUse::locked);  // and so it may go
    world.close();
  }
}

CLEAN_TEST(a_batch_may_hold_staged_copies_and_others) {
  emulate();
  World world;
  std::byte* locked = world.backend->allocate_host(3 * kPage);
  std::memset(locked, 9, 3 * kPage);
  world.clear();
  const std::size_t half = kBytes / 2;
  const CopyRange ranges[] = {{world.shown.at + kBytes, locked, 100},
                              {world.shown.at, world.from, half},
                              {world.shown.at + kBytes + 100, locked, 100},
                              {world.shown.at + kBytes + 200, locked + kPage, 100},
                              {world.shown.at + half, world.from + half, kBytes - half}};
  world.backend->copy_batch(world.stream, ranges, 5);
  world.finish();
  CHECK(std::memcmp(world.shown.at, world.from, kBytes) == 0 && all_are(world.shown.at + kBytes, 9, 300));
  CHECK(CONTROL(remapEmulatedPageable)() == 0);
  world.backend->free_host(locked, 3 * kPage);
  world.close();
}

CLEAN_TEST(ranges_that_meet_and_adopted_streams_are_refused) {
  emulate();
  World world;
  for (const HostUse use : {HostUse::staged, HostUse::locked}) {
    CHECK_ERROR(ErrorKind::invalid_state, world.backend->register_host(world.from + 5, 10, use));
  }
  CHECK_ERROR(ErrorKind::invalid_argument, world.backend->register_host(nullptr, 8, HostUse::staged));
  CHECK_ERROR(ErrorKind::invalid_argument, world.backend->unregister_host(world.from, kBytes - 1));
  const StreamHandle theirs = world.backend->adopt_stream(2);
  CHECK_ERROR(ErrorKind::invalid_argument, world.backend->copy(theirs, world.shown.at, world.from, kBytes));
  world.backend->forget_stream(theirs);
  world.close();
}

// Each call that a staged copy makes fails once, at each part: the caller is told, nothing reads the source behind that, and the next
// copy arrives.
CLEAN_TEST(a_staged_copy_fails_at_any_call) {
  emulate();
  World world;
  for (const char* name : {"cuLaunchHostFunc", "cuStreamWaitEvent", "cuEventRecord", "cuMemcpyHtoDAsync", "cuEventCreate",
                           "cuStreamCreateWithPriority", "cuMemHostRegister"}) {
    bool made = false;  // whether that call was among them
    for (std::uint64_t nth = 1; nth <= 9; nth += 2) {
      const StreamHandle fresh = world.backend->create_stream();  // whose lane is new
      arm(name, nth, kUnknown);
      bool failed = false;
      try {
        world.backend->copy(fresh, world.shown.at, world.from, kBytes);
      } catch (const Error& error) {
        failed = made = true;
        CHECK(error.kind() == ErrorKind::driver);
        CHECK(*field(error, "call") == Error::Value{std::string(name)});
        CHECK(live("work") == 0);
      }
      CONTROL(remapEmulatedDisarm)();
      if (!failed) {  // it is not called so often
        world.backend->destroy_stream(fresh);
        continue;
      }
      world.backend->fill(fresh, world.shown.at, 0, world.shown.bytes());
      world.backend->copy(fresh, world.shown.at, world.from, kBytes);
      world.backend->record(world.event, fresh);
      CHECK(world.backend->synchronize(world.event, kWait) && world.arrived());
      world.backend->destroy_stream(fresh);
    }
    CHECK(made);
  }
  world.close();
}

// A lane that cannot be given back leaves its stream, which is destroyed by the next try.
CLEAN_TEST(a_stream_with_a_lane_is_destroyed_by_the_second_try) {
  emulate();
  World world;
  for (const char* name : {"cuStreamDestroy", "cuEventDestroy", "cuMemHostUnregister"}) {
    const StreamHandle stream = world.backend->create_stream();
    world.backend->copy(stream, world.shown.at, world.from, kBytes);
    arm(name, 1, kUnknown);
    CHECK_ERROR(ErrorKind::driver, world.backend->destroy_stream(stream));
    world.backend->destroy_stream(stream);
  }
  world.close();
}

// Last: nothing can be given back. A device that is lost under staged copies: their host functions never run, and nothing hangs.
TEST(a_lost_context_ends_staged_copies) {
  emulate();
  configure("lose_context", 1);
  {
    World world;
    arm("run:cuMemcpyHtoDAsync", 2, 700);
    bool told = false;
    try {
      world.copy();
      world.finish();
    } catch (const Error&) {
      told = true;
    }
    CHECK(told);
    world.backend = nullptr;
  }
}

}  // namespace
