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

// What an engine and a session do, at random: passes on two streams in alternation and on the calling thread; changes of what
// is streamed while the device is passes behind; pages that change hands and are written at once by their new owner on the
// computation's stream; regions that are held until the worker has seen `after`; passes left in the middle.
TEST(the_host_runs_ahead_of_changes) {
  std::uint64_t behind = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    std::mt19937_64 random(seed);
    const auto n = static_cast<LayerId>(random() % 6 + 2);
    World world(n, seed);
    FakeBackend& backend = *world.backend;
    Prefetcher& prefetcher = *world.prefetcher;
    const StreamHandle streams[] = {0, backend.create_stream(), backend.create_stream()};
    StreamHandle last = streams[1];
    const EventHandle turn = backend.create_event(true);
    std::vector<EventHandle> afters;
    std::vector<LayerId> held;     // by the worker, until `after` is complete
    EventHandle held_after = 0;
    std::vector<Buffer*> others;   // memory that has another owner since the last change
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
          if (was && !is) c.home.push_back({layer, 0, kBytes});
          if (was != is) c.held.push_back(layer);
        }
        // The other owners look at what they have once more, before they give some of it back.
        for (Buffer* memory : others) {
          if (last != 0) {
            backend.compute(last, memory->data(), kBytes, kOther);
          } else {
            backend.compute_now(memory->data(), kBytes, kOther);
          }
        }
        others.clear();
        if (last == 0) {  // the thread's computation is finished; copies are not
          prefetcher.drain();
        } else {  // the stream that the new owners write on comes behind copies in flight
          backend.record(turn, prefetcher.copy_stream());
          backend.stream_wait(last, turn);
          backend.record(afters.emplace_back(backend.create_event(true)), last);
          c.after = afters.back();
          if (!backend.query(c.after)) ++behind;
        }
        held = c.held;
        held_after = c.after;
        world.configure(c);
        // New owners: of the homes of what is streamed now, and of buffers that are no longer in the ring.
        const auto own = [&](Buffer& memory) {
          others.push_back(&memory);
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
