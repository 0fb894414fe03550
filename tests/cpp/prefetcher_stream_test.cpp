// Passes on streams, on the fake backend: the host runs passes ahead of the device, nothing blocks it, and still every
// computation sees its layer's bytes; what is measured of them; and what remains when calls fail.
#include <algorithm>
#include <functional>
#include <random>

#include "prefetcher_world.h"
#include "schedule/pass_timer.h"

using remap::Call;
using remap::Error;
using remap::ErrorKind;
using remap::EventHandle;
using remap::LayerId;
using remap::PassTimer;
using remap::PassTiming;
using remap::Prefetcher;
using remap::StreamConfiguration;
using remap::StreamHandle;
using remap::testing::Buffer;
using remap::testing::FakeBackend;
using remap::testing::kBytes;
using remap::testing::kRing;
using remap::testing::World;

namespace {

constexpr std::byte kOther{0xEE};  // what another owner writes into pages that it has been given
constexpr std::chrono::nanoseconds kNow{0};

void a_pass_on_a_stream_blocks_nobody() {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    World world(7, seed);
    const StreamHandle stream = world.backend->create_stream();
    CHECK(!world.prefetcher->uses_streams());
    world.configure(world.configuration({0, 2, 3, 5, 6}, seed % kRing + 1));
    for (std::uint64_t pass = 1; pass <= 40; ++pass) {
      CHECK(world.pass_on(stream) == pass);
      world.backend->random_steps(seed % 3 * 20);  // nothing at all has run, or something
    }
    CHECK(world.prefetcher->uses_streams());
    CHECK(world.backend->queued(stream) > 0);
    world.backend->finish();
    CHECK(world.prefetcher->stats().misses == 0);
    world.prefetcher->drain();
  }
}

// What stands still while the wait's copy runs is the stall, step by step; a copy that has arrived costs no event.
void a_stall_is_what_the_stream_waits() {
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
  CHECK(stalled == 4);  // the copy's start event, its two steps, its end event
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
void a_held_layer_stalls_the_stream_that_ran_dry() {
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
}

void a_failure_to_time_a_pass_fails_nothing() {
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

void a_stream_that_nobody_knows_is_refused_at_once() {
  World world(2);
  const StreamHandle stream = world.backend->create_stream();
  CHECK_ERROR(ErrorKind::invalid_argument, world.prefetcher->begin_pass(4711));
  CHECK(!world.prefetcher->in_pass());
  world.configure(world.configuration({0, 1}, 1));
  world.prefetcher->begin_pass(stream);
  CHECK(world.prefetcher->wait(0));
  CHECK_ERROR(ErrorKind::invalid_argument, world.prefetcher->begin_pass(4711));
  CHECK(world.prefetcher->in_pass());  // the one before goes on
  world.compute(0, stream);
  world.prefetcher->done(0);
  CHECK(world.prefetcher->wait(1));
  world.compute(1, stream);
  world.prefetcher->done(1);
  CHECK(world.prefetcher->end_pass() == 1);
  world.backend->finish();
  CHECK(world.prefetcher->take_timings().size() == 1);
  CHECK(world.prefetcher->stats().abandoned == 0);
}

// A graph may be captured while nothing is streamed; a wait that would become part of it is refused.
void a_captured_stream_may_pass_but_not_wait() {
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

void passes_in_flight_are_bounded() {
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
  CHECK(world.backend->usage().events == events);  // used again
  CHECK(world.prefetcher->take_timings().size() == PassTimer::kPasses);  // nobody took them for long
}

void passes_of_both_kinds() {
  World world(3);
  FakeBackend& backend = *world.backend;
  const StreamHandle stream = backend.create_stream();
  world.configure(world.configuration({0, 1, 2}, 2));
  world.pass(0);
  const std::vector<PassTiming> host = world.prefetcher->take_timings();  // known at once
  CHECK(host.size() == 1 && host[0].pass == 1 && host[0].seconds == world.prefetcher->stats().last_pass_s);
  world.prefetcher->begin_pass(stream);
  for (LayerId layer = 0; layer < 3; ++layer) world.use_on(layer, stream);
  for (int i = 0; i < 5000; ++i) backend.compute_write(stream, world.ring[3].data(), kBytes, kOther);
  CHECK(world.prefetcher->end_pass() == 2);
  // Outside the pass no stream means none: this thread waits, for copies that wait for the stream's readers.
  CHECK(!world.prefetcher->wait(0, 0, kNow));
  world.wait(0, 0);
  world.prefetcher->done(0);
  world.pass(0);
  const std::vector<PassTiming> later = world.prefetcher->take_timings();
  CHECK(later.size() == 1 && later[0].pass == 3);
  const double last = world.prefetcher->stats().last_pass_s;
  backend.finish();
  const std::vector<PassTiming> earlier = world.prefetcher->take_timings();
  CHECK(earlier.size() == 1 && earlier[0].pass == 2);
  CHECK(world.prefetcher->stats().last_pass_s == last);  // of the newest pass, whichever became known last
  CHECK(world.prefetcher->stats().passes == 3);
}

void an_abandoned_pass_has_no_time() {
  World world(3);
  const StreamHandle stream = world.backend->create_stream();
  world.configure(world.configuration({0, 1, 2}, 1));
  world.pass_on(stream);
  std::size_t events = 0;
  for (int i = 0; i < 50; ++i) {
    world.prefetcher->begin_pass(stream);
    CHECK(world.prefetcher->wait(0));
    world.compute(0, stream);  // left between wait and done
    world.backend->random_steps(5);
    if (i == 10) events = world.backend->usage().events;
    if (i > 10) CHECK(world.backend->usage().events <= events + 4);
  }
  CHECK(world.pass_on(stream) == 2);
  world.backend->finish();
  const std::vector<PassTiming> timings = world.prefetcher->take_timings();
  CHECK(timings.size() == 2 && timings[0].pass == 1 && timings[1].pass == 2);
  CHECK(world.prefetcher->stats().abandoned == 50);
}

// A resident layer's uses leave no trace, so a copy into its region knows its readers by `after` only. Without it the
// fake backend sees the copy overwrite what is being computed with: the check does look.
void a_reload_waits_for_readers_on_a_stream() {
  int seen = 0;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    for (const bool ordered : {true, false}) {
      World world(2, seed);
      FakeBackend& backend = *world.backend;
      const StreamHandle stream = backend.create_stream();
      const EventHandle after = backend.create_event();
      for (int pass = 0; pass < 4; ++pass) world.pass_on(stream);
      backend.record(after, stream);
      StreamConfiguration c = world.configuration({}, 0);
      c.reload = {0, 1};
      c.after = ordered ? after : 0;
      bool violated = false;
      try {
        world.configure(c);
        world.pass_on(stream);
        backend.finish();
      } catch (const std::logic_error&) {
        violated = true;
      }
      CHECK(!violated || !ordered);
      seen += violated ? 1 : 0;
      if (violated) {
        try {
          while (backend.step_any()) {
          }
        } catch (const std::logic_error&) {
          continue;
        }
      }
    }
  }
  CHECK(seen > 50);
}

// What an engine and a session do, at random: passes on two streams in alternation and on the calling thread; changes of what
// is streamed while the device is passes behind; pages that change hands and are written at once by their new owner on the
// computation's stream; regions that are held until the worker has seen `after`; passes left in the middle.
void the_host_runs_ahead_of_changes() {
  std::uint64_t behind = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    std::mt19937_64 random(seed);
    const auto n = static_cast<LayerId>(random() % 6 + 2);
    World world(n, seed);
    FakeBackend& backend = *world.backend;
    Prefetcher& prefetcher = *world.prefetcher;
    const StreamHandle streams[] = {0, backend.create_stream(), backend.create_stream()};
    StreamHandle last = streams[1];
    const EventHandle turn = backend.create_event();
    std::vector<EventHandle> afters;
    std::vector<LayerId> held;     // by the worker, until `after` is complete
    EventHandle held_after = 0;
    const bool alternate = random() % 2 == 0;
    std::uint64_t newest = 0;
    // The computation goes on on another stream, or on the host.
    const auto turn_to = [&](StreamHandle next) {
      if (last != 0 && next != last) {
        backend.record(turn, last);
        if (next != 0) {
          backend.stream_wait(next, turn);
        } else {
          CHECK(backend.synchronize(turn, std::chrono::nanoseconds::max()));
        }
      }
      last = next;
    };
    const auto work = [&] {  // the worker
      if (held.empty() || (held_after != 0 && !backend.query(held_after))) return;
      for (const LayerId layer : held) prefetcher.released(layer);
      held.clear();
    };
    for (int round = 0; round < 6; ++round) {
      if (round == 0 || random() % 2 == 0) {
        std::vector<LayerId> layers;
        for (LayerId layer = 0; layer < n; ++layer) {
          if (random() % 2 == 0) layers.push_back(layer);
        }
        StreamConfiguration c = world.configuration(layers, random() % kRing + 1);
        if (layers.empty()) c.ring.clear();
        // A change waits for the worker.
        for (int tries = 0; !held.empty(); ++tries) {
          CHECK(tries < 100000);
          backend.random_steps(2);
          work();
        }
        for (LayerId layer = 0; layer < n; ++layer) {
          const bool was = std::binary_search(world.streamed.begin(), world.streamed.end(), layer);
          const bool is = std::binary_search(layers.begin(), layers.end(), layer);
          if (was && !is) c.reload.push_back(layer);
          if (was != is) c.held.push_back(layer);
        }
        if (last == 0) {  // the thread's computation is finished; copies are not
          prefetcher.drain();
        } else {  // the stream that the new owners write on comes behind copies in flight
          backend.record(turn, prefetcher.copy_stream());
          backend.stream_wait(last, turn);
          backend.record(afters.emplace_back(backend.create_event()), last);
          c.after = afters.back();
          if (!backend.query(c.after)) ++behind;
        }
        held = c.held;
        held_after = c.after;
        world.configure(c);
        // New owners: of the homes of what is streamed now, and of buffers that are no longer in the ring.
        const auto own = [&](Buffer& memory) {
          if (last != 0) {
            for (int use = 0; use < 2; ++use) {
              backend.compute_write(last, memory.data(), kBytes, kOther);
              backend.compute(last, memory.data(), kBytes, kOther);
            }
          } else {
            memory.fill(kOther);
          }
        };
        for (const LayerId layer : layers) {
          if (std::find(held.begin(), held.end(), layer) != held.end()) own(world.regions[layer]);
        }
        for (Buffer& buffer : world.ring) {
          if (std::find(c.ring.begin(), c.ring.end(), buffer.data()) == c.ring.end()) own(buffer);
        }
        // Read again by the new owner just before it gives them back: see the top of the next change.
      }
      for (std::uint64_t pass = random() % 4; pass > 0; --pass) {
        const StreamHandle stream = alternate ? streams[random() % 3] : last;
        turn_to(stream);
        prefetcher.begin_pass(stream);
        const LayerId stop = random() % 3 == 0 ? static_cast<LayerId>(random() % n) : n;
        for (LayerId layer = 0; layer < n; ++layer) {
          for (int tries = 0; !prefetcher.wait(layer, 0, kNow); ++tries) {
            CHECK(stream == 0 || std::find(held.begin(), held.end(), layer) != held.end());
            CHECK(tries < 100000);
            backend.random_steps(2);
            work();
          }
          world.compute(layer, stream);
          if (layer == stop) break;  // left between wait and done
          prefetcher.done(layer);
          backend.random_steps(random() % 4 == 0 ? 6 : 0);
        }
        if (stop == n || random() % 2 == 0) prefetcher.end_pass();
        for (const PassTiming& each : prefetcher.take_timings()) {
          CHECK(each.pass <= prefetcher.stats().passes && each.stall_s <= each.seconds);
          if (!alternate) CHECK(each.pass > newest);
          newest = std::max(newest, each.pass);
        }
      }
      if (prefetcher.in_pass()) prefetcher.end_pass();
    }
    while (!held.empty()) {
      backend.random_steps(2);
      work();
    }
    backend.finish();
    prefetcher.drain();
    world.prefetcher.reset();
    CHECK(backend.usage().streams == 2);
    CHECK(backend.usage().events == 1 + afters.size());
  }
  CHECK(behind > 1000);  // the device was busy at changes
}

// After a failed copy the next pass begins anew. That one may wait: for the old stream's work.
void a_failed_copy_under_passes_in_flight() {
  for (unsigned nth = 1; nth <= 14; ++nth) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      World world(5, seed);
      StreamHandle stream = world.backend->create_stream();
      world.backend->fail_copy(nth);
      world.configure(world.configuration({0, 2, 3, 4}, 2));
      bool threw = false;
      for (int pass = 0; pass < 8 && !threw; ++pass) {
        try {
          world.prefetcher->begin_pass(stream);
          for (LayerId layer = 0; layer < 5; ++layer) world.use_on(layer, stream);
          world.prefetcher->end_pass();
          world.backend->random_steps(40);
        } catch (const Error& error) {
          CHECK(error.kind() == ErrorKind::driver);
          threw = true;
        }
      }
      world.backend->finish();
      if (!threw) CHECK_ERROR(ErrorKind::driver, world.prefetcher->drain());
      stream = world.backend->create_stream();  // the failed event took the old one with it
      const StreamHandle copies = world.prefetcher->copy_stream();
      world.prefetcher->begin_pass(stream);
      CHECK(world.prefetcher->copy_stream() != copies);
      for (int pass = 0; pass < 3; ++pass) world.pass_on(stream);
      world.backend->finish();
      world.prefetcher->drain();
      CHECK(!world.prefetcher->take_timings().empty());
    }
  }
}

// The next pass cannot begin either, again and again: nothing of it stays.
void a_pass_that_cannot_begin_leaves_nothing() {
  World world(3);
  const StreamHandle stream = world.backend->create_stream();
  world.pass_on(stream);
  world.backend->finish();
  world.backend->fail_copy(1);
  world.configure(world.configuration({0, 1, 2}, 1));
  world.backend->finish();
  CHECK_ERROR(ErrorKind::driver, world.prefetcher->drain());
  const std::size_t events = world.backend->usage().events;
  for (const Call call : {Call::create_stream, Call::destroy_stream}) {
    world.backend->fail_call(call, 1, true);
    for (int i = 0; i < 5; ++i) CHECK_ERROR(ErrorKind::driver, world.prefetcher->begin_pass(stream));
    CHECK(!world.prefetcher->in_pass() && world.backend->usage().events == events);
    world.backend->heal();
  }
  world.prefetcher->begin_pass(stream);
  world.pass_on(stream);
  world.backend->finish();
  world.prefetcher.reset();
  CHECK(world.backend->usage().events == 0 && world.backend->usage().streams == 1);
}

// Every call of a session with passes on a stream fails in turn, once or for ever from then on. Whatever was thrown, what
// is computed is right, the end is reached once the fault is gone, and nothing is left behind.
void every_call_fails_and_nothing_is_left() {
  unsigned thrown = 0;
  unsigned calls = 0;
  for (const bool always : {false, true}) {
    for (unsigned nth = 1;; ++nth) {
      World world(6, nth);
      FakeBackend& backend = *world.backend;
      const StreamHandle stream = backend.create_stream();
      const EventHandle after = backend.create_event();
      backend.fail_any(nth, always);
      bool failed = false;
      const auto attempt = [&](const std::function<void()>& action) {
        try {
          action();
        } catch (const Error& error) {
          failed = true;
          ++thrown;
          CHECK(error.kind() == ErrorKind::driver || error.kind() == ErrorKind::invalid_state);
        }
      };
      for (int round = 0; round < 4; ++round) {
        attempt([&] { backend.record(after, stream); });
        attempt([&] {
          StreamConfiguration c = world.configuration(round % 2 == 0 ? std::vector<LayerId>{0, 2, 3}
                                                                     : std::vector<LayerId>{0, 1, 2, 4, 5}, 3);
          c.after = after;
          world.configure(c);
        });
        for (int pass = 0; pass < 2; ++pass) {
          attempt([&] {
            world.prefetcher->begin_pass(stream);
            for (LayerId layer = 0; layer < 6; ++layer) world.use_on(layer, stream);
          });
          attempt([&] {
            if (world.prefetcher->in_pass()) world.prefetcher->end_pass();
          });
        }
        attempt([&] { static_cast<void>(world.prefetcher->take_timings()); });
        backend.random_steps(50);
      }
      backend.heal();
      world.prefetcher->begin_pass(stream);  // may block, if the copy stream has to be replaced
      world.pass_on(stream);
      const std::uint64_t number = world.pass_on(stream);
      backend.finish();
      world.prefetcher->drain();
      CHECK(world.prefetcher->take_timings().back().pass == number);
      world.prefetcher.reset();
      CHECK(backend.usage().events == 1);
      CHECK(backend.usage().streams == 1);
      if (!failed && nth > 200) {
        calls = nth;
        break;
      }
    }
  }
  CHECK(thrown > 200 && calls > 200);
}

}  // namespace

int main() {
  RUN(a_pass_on_a_stream_blocks_nobody);
  RUN(a_stall_is_what_the_stream_waits);
  RUN(a_held_layer_stalls_the_stream_that_ran_dry);
  RUN(a_failure_to_time_a_pass_fails_nothing);
  RUN(a_stream_that_nobody_knows_is_refused_at_once);
  RUN(a_captured_stream_may_pass_but_not_wait);
  RUN(passes_in_flight_are_bounded);
  RUN(passes_of_both_kinds);
  RUN(an_abandoned_pass_has_no_time);
  RUN(a_reload_waits_for_readers_on_a_stream);
  RUN(the_host_runs_ahead_of_changes);
  RUN(a_failed_copy_under_passes_in_flight);
  RUN(a_pass_that_cannot_begin_leaves_nothing);
  RUN(every_call_fails_and_nothing_is_left);
  return remap::testing::failures();
}
