// Passes on streams, on the fake backend: the host runs passes ahead of the device, nothing blocks it, and still every
// computation sees its layer's bytes; and what remains when calls fail.
#include <algorithm>
#include <functional>
#include <random>

#include "prefetcher_world.h"

using namespace remap;
using namespace remap::testing;

namespace {

TEST(passes_on_a_stream_block_nobody) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    for (const bool begun_there : {true, false}) {
      World world(7, seed);
      const StreamHandle stream = world.backend->create_stream();
      CHECK(!world.prefetcher->uses_streams());
      world.configure(world.configuration({0, 2, 3, 5, 6}, seed % kRing + 1));
      for (std::uint64_t pass = 1; pass <= 60; ++pass) {  // more copies than tickets
        if (begun_there) {
          CHECK(world.pass_on(stream) == pass);
        } else {
          world.pass(stream);
        }
        world.backend->random_steps(seed % 3 * 20);  // nothing at all has run, or something
      }
      CHECK(world.prefetcher->uses_streams());
      CHECK(world.backend->queued(stream) > 0);
      world.backend->finish();
      CHECK(world.prefetcher->stats().misses == 0);
      world.prefetcher->drain();
    }
  }
}

TEST(a_stream_that_nobody_knows_is_refused_at_once) {
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

// A resident layer's uses leave no trace, so a copy into its region knows its readers by `after` only. Without it the
// fake backend sees the copy overwrite what is being computed with: the check does look.
TEST(a_reload_waits_for_readers_on_a_stream) {
  int seen = 0;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    for (const bool ordered : {true, false}) {
      World world(2, seed);
      FakeBackend& backend = *world.backend;
      const StreamHandle stream = backend.create_stream();
      const EventHandle after = backend.create_event(true);
      for (int pass = 0; pass < 4; ++pass) world.pass_on(stream);
      backend.record(after, stream);
      StreamConfiguration c = world.configuration({}, 0);
      c.home = {{0, 0, kBytes}, {1, 0, kBytes}};
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

// After a failed copy the next pass begins anew. That one may wait: for the old stream's work.
TEST(a_failed_copy_under_passes_in_flight) {
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
TEST(a_pass_that_cannot_begin_leaves_nothing) {
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

// Who reads: the calling thread, a stream named at every layer, or one on which the pass was begun.
enum class Reader { host, named, begun };

// Changes and passes while calls fail as `arm` says. Whatever is thrown, what is computed is right, the end is reached
// once the fault is gone, and nothing is left behind. How many calls threw.
unsigned session_with_faults(Reader reader, std::uint64_t seed, const std::function<void(FakeBackend&)>& arm) {
  World world(6, seed, seed % 3);  // whole, or in chunks
  FakeBackend& backend = *world.backend;
  const StreamHandle stream = reader == Reader::host ? 0 : backend.create_stream();
  const EventHandle after = backend.create_event(true);
  const auto pass = [&] {
    if (reader != Reader::begun) return world.pass(stream);
    world.prefetcher->begin_pass(stream);
    for (LayerId layer = 0; layer < 6; ++layer) world.use_on(layer, stream);
    world.prefetcher->end_pass();
  };
  arm(backend);
  unsigned thrown = 0;
  const auto attempt = [&](const std::function<void()>& action) {
    const bool open = world.prefetcher->in_pass();  // then configure is refused
    try {
      action();
    } catch (const Error& error) {
      ++thrown;
      CHECK(error.kind() == ErrorKind::driver || (error.kind() == ErrorKind::invalid_state && (open || thrown > 1)));
    }
  };
  for (int round = 0; round < 4; ++round) {
    StreamConfiguration c = world.configuration(round % 2 == 0 ? std::vector<LayerId>{0, 2, 3}
                                                               : std::vector<LayerId>{0, 1, 2, 4, 5}, round % 2 + 2);
    if (reader != Reader::host) {
      attempt([&] { backend.record(after, stream); });
      c.after = after;
    }
    attempt([&] { world.configure(c); });
    for (int i = 0; i < 2; ++i) {
      attempt(pass);
      attempt([&] {
        if (world.prefetcher->in_pass()) world.prefetcher->end_pass();
      });
    }
    attempt([&] { static_cast<void>(world.prefetcher->take_timings()); });
    backend.random_steps(50);
  }
  backend.heal();
  pass();  // may block, if the copy stream has to be replaced
  if (reader == Reader::begun) {
    const std::uint64_t number = world.pass_on(stream);
    backend.finish();
    world.prefetcher->drain();
    CHECK(world.prefetcher->take_timings().back().pass == number);
  } else {
    pass();
  }
  backend.finish();
  world.prefetcher->drain();
  world.prefetcher.reset();
  CHECK(backend.usage().events == 1);
  CHECK(backend.usage().streams == (reader == Reader::host ? 0 : 1));
  return thrown;
}

// Each call of all in turn, once or all from then on; and all of one kind, from its n-th on.
TEST(every_call_fails_and_nothing_is_left) {
  unsigned thrown = 0;
  for (const Reader reader : {Reader::host, Reader::named, Reader::begun}) {
    for (const bool always : {false, true}) {
      unsigned nth = 1;
      for (unsigned now = 1; now > 0 || nth <= 200; ++nth) {
        now = session_with_faults(reader, nth, [&](FakeBackend& backend) { backend.fail_any(nth, always); });
        thrown += now;
      }
    }
    for (const Call call :
         {Call::create_stream, Call::destroy_stream, Call::copy, Call::fill, Call::create_event, Call::destroy_event,
          Call::record, Call::stream_wait, Call::query, Call::synchronize, Call::elapsed}) {
      for (unsigned nth = 1; nth <= 30; ++nth) {
        thrown += session_with_faults(reader, nth, [&](FakeBackend& backend) { backend.fail_call(call, nth, true); });
      }
    }
  }
  CHECK(thrown > 1000);
}

}  // namespace
