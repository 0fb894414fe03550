// What is measured of passes: on streams by events and never by waiting, on the calling thread by its clock; and that a
// measurement fails nothing.
#include <algorithm>

#include "prefetcher_world.h"
#include "schedule/pass_timer.h"

using namespace remap;
using namespace remap::testing;

namespace {

// What stands still while the wait's copy runs is the stall, step by step; a copy that has arrived costs no event.
TEST(a_stall_is_what_the_stream_waits) {
  World world(2);
  FakeBackend& backend = *world.backend;
  const StreamHandle stream = backend.create_stream();
  const StreamHandle copies = world.prefetcher->copy_stream();
  world.configure(world.configuration({0, 1}, 1));
  world.prefetcher->begin_pass(stream);
  CHECK(world.prefetcher->wait(0));
  world.compute(0, stream);
  world.prefetcher->done(0);
  CHECK(world.prefetcher->wait(1));
  world.compute(1, stream);
  world.prefetcher->done(1);
  CHECK(world.prefetcher->end_pass() == 1);
  CHECK(world.prefetcher->take_timings().empty());  // nothing has run

  CHECK(backend.step(stream) && backend.step(stream));  // the pass's begin; the wait is reached
  int stalled = 0;
  while (!backend.step(stream)) {
    CHECK(backend.step(copies));
    stalled += 1;
  }
  CHECK(stalled == 5);  // the copy's start event, its two steps, the event that times it, its own event
  backend.finish();
  const std::vector<PassTiming> first = world.prefetcher->take_timings();
  CHECK(first.size() == 1 && first[0].pass == 1);
  // A wait and the event behind it are a step each; the other layer's copy cannot begin before this one is computed with.
  CHECK(first[0].stall_s >= stalled + 2 && first[0].stall_s < first[0].seconds);
  CHECK(world.prefetcher->stats().stall_s == first[0].stall_s);
  CHECK(world.prefetcher->stats().last_pass_s == first[0].seconds);
  CHECK(world.prefetcher->stats().last_pass_stall_s == first[0].stall_s);
  CHECK(world.prefetcher->take_timings().empty());  // taken

  // Layer 0 has been fetched for the next pass: waiting for it enqueues nothing.
  world.prefetcher->begin_pass(stream);
  const std::size_t before = backend.queued(stream);
  CHECK(world.prefetcher->wait(0));
  CHECK(backend.queued(stream) == before);
  world.prefetcher->end_pass();
  backend.finish();
  const std::vector<PassTiming> second = world.prefetcher->take_timings();
  CHECK(second.size() == 1 && second[0].pass == 2 && second[0].stall_s == 0 && second[0].seconds > 0);
}

// A held layer is the only thing that blocks; what the stream has nothing to do for meanwhile is its stall.
TEST(a_held_layer_stalls_the_stream_that_ran_dry) {
  World world(2);
  FakeBackend& backend = *world.backend;
  const StreamHandle streams[] = {backend.create_stream(), backend.create_stream()};
  StreamConfiguration c = world.configuration({1}, 1);
  c.held = {1};
  world.configure(c);
  backend.finish();  // the copy into the ring needs no region
  world.prefetcher->begin_pass(streams[0]);
  CHECK(!world.prefetcher->wait(1, 0, std::chrono::milliseconds(1)));
  backend.finish();
  for (int i = 0; i < 9; ++i) backend.compute_write(streams[1], world.ring[2].data(), kBytes, kOther);
  CHECK(!world.prefetcher->wait(1, 0, std::chrono::milliseconds(1)));
  backend.finish();
  world.prefetcher->released(1);
  CHECK(world.prefetcher->wait(1, 0, kNow));
  world.compute(1, streams[0]);
  world.prefetcher->done(1);
  world.prefetcher->end_pass();
  backend.finish();
  const std::vector<PassTiming> timings = world.prefetcher->take_timings();
  CHECK(timings.size() == 1 && timings[0].stall_s > 0 && timings[0].stall_s < timings[0].seconds);
  CHECK(world.prefetcher->stats().stall_s == timings[0].stall_s);  // not what the host was blocked as well
}

TEST(a_failure_to_time_a_pass_fails_nothing) {
  for (const Call call : {Call::create_event, Call::record, Call::query, Call::elapsed}) {
    for (unsigned nth = 1; nth <= 6; ++nth) {
      World world(2);
      const StreamHandle stream = world.backend->create_stream();
      // Nothing is streamed, so that only the timing calls the backend.
      world.backend->fail_call(call, nth);
      std::uint64_t done = 0;
      std::vector<std::uint64_t> timed;
      while (done < 6) {
        done = world.pass_on(stream);
        world.backend->finish();
        for (const PassTiming& each : world.prefetcher->take_timings()) timed.push_back(each.pass);
      }
      CHECK(timed.size() == (call == Call::create_event && nth > 2 ? 6 : 5));  // two events are used again and again
      CHECK(timed.back() == 6 || nth >= 5);
      world.prefetcher.reset();
      CHECK(world.backend->usage().events == 0);
    }
  }
}

// A graph may be captured while nothing is streamed; a wait that would become part of it is refused.
TEST(a_captured_stream_may_pass_but_not_wait) {
  World world(2);
  const StreamHandle stream = world.backend->create_stream();
  world.backend->capture(stream, true);
  CHECK(world.pass_on(stream) == 1);
  world.configure(world.configuration({0, 1}, 1));
  world.prefetcher->begin_pass(stream);
  CHECK_ERROR(ErrorKind::invalid_state, world.prefetcher->wait(0));
  world.backend->capture(stream, false);
  CHECK(world.pass_on(stream) == 2);
  world.backend->finish();
  const std::vector<PassTiming> timings = world.prefetcher->take_timings();
  CHECK(timings.size() == 1 && timings[0].pass == 2);
}

TEST(passes_in_flight_are_bounded) {
  World world(3);
  const StreamHandle stream = world.backend->create_stream();
  world.configure(world.configuration({0, 1, 2}, 1));
  for (int pass = 0; pass < 300; ++pass) world.pass_on(stream);
  const std::size_t events = world.backend->usage().events;
  CHECK(events < 2 * 256 + PassTimer::kPasses * (2 + 2 * 3) + 64);  // tickets, passes, readers
  world.backend->finish();
  const std::vector<PassTiming> timings = world.prefetcher->take_timings();
  CHECK(timings.size() == PassTimer::kPasses);
  for (std::size_t i = 0; i < timings.size(); ++i) CHECK(timings[i].pass == 300 - PassTimer::kPasses + 1 + i);
  for (int pass = 0; pass < 300; ++pass) {
    world.pass_on(stream);
    world.backend->finish();
  }
  for (int pass = 0; pass < 50; ++pass) {
    world.prefetcher->begin_pass(stream);
    CHECK(world.prefetcher->wait(0));
    world.compute(0, stream);  // left between wait and done: such a pass has no time
    world.backend->random_steps(5);
  }
  CHECK(world.backend->usage().events <= events + 4);  // used again
  CHECK(world.prefetcher->take_timings().size() == PassTimer::kPasses);  // nobody took them for long
}

}  // namespace
