// The Prefetcher on the fake backend: every computation must see exactly its layer's bytes from its beginning to its end,
// whatever the interleaving, whatever is called in which order, whatever fails.
#include "remap/prefetcher.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <random>

#include "prefetcher_world.h"
#include "remap/backends.h"

using namespace remap;
using namespace remap::testing;

namespace {

std::size_t shared(std::size_t m, std::size_t beta) {
  std::size_t count = 0;
  for (std::size_t j = 0; j < m; ++j) count += (j >= beta || j + beta < m) ? 1 : 0;
  return count;
}

// Every streamed set of n layers (by its bits), every beta, host and stream readers.
TEST(the_grid_computes_with_its_own_bytes_and_never_misses) {
  for (std::uint32_t n = 1; n <= 8; ++n) {
    for (std::uint32_t set = 0; set < (1U << n); ++set) {
      std::vector<LayerId> streamed;
      for (LayerId layer = 0; layer < n; ++layer) {
        if ((set >> layer & 1U) != 0) streamed.push_back(layer);
      }
      for (std::size_t beta = 1; beta <= kRing; ++beta) {
        for (const bool host : {true, false}) {
          World world(n, set * 31 + beta);
          const StreamHandle stream = host ? 0 : world.backend->create_stream();
          for (const LayerId layer : streamed) world.regions[layer].fill(std::byte{0xDF});
          world.configure(world.configuration(streamed, beta));
          for (int pass = 0; pass < 4; ++pass) {
            world.backend->random_steps(20);
            world.pass(stream);
            if (pass > 0) CHECK(world.prefetcher->stats().last_pass_copies == shared(streamed.size(), beta));
          }
          world.backend->finish();
          CHECK(world.prefetcher->stats().misses == 0);
          CHECK(world.prefetcher->stats().passes == 4);
        }
      }
    }
  }
}

// Whole layers or their tails, in chunks or not, in any order of use or in the layers' own, with readers on the host
// and on streams, with and without KV blocks that stream, passes left in the middle, and changes at which parts come home and other owners write at once to
// what they get.
TEST(random_interleavings) {
  std::uint64_t misses = 0, abandoned = 0, parts = 0, streamed_blocks = 0;
  for (std::uint64_t seed = 0; seed < 8000; ++seed) {
    std::mt19937_64 random(seed);
    const bool whole = random() % 2 == 0, orderly = random() % 2 == 0;
    const auto n = static_cast<LayerId>(random() % 8 + 1);
    std::vector<std::size_t> sizes(n, kBytes);
    for (std::size_t& size : sizes) size = whole || random() % 2 == 0 ? kBytes : random() % kBytes + 1;
    World world(sizes, seed, seed % 4);  // a copy in one piece, or in chunks of 1, 2 or 3 bytes
    const bool blocks = seed % 3 != 0;
    if (blocks) world.stream_blocks();
    FakeBackend& backend = *world.backend;
    std::vector<StreamHandle> streams = {0, backend.create_stream(), backend.create_stream()};
    // Host readers, one stream, or each layer on any of two or three.
    const std::uint64_t mode = random() % 4;
    const auto pick = [&] { return mode < 2 ? streams[mode] : streams[random() % mode]; };
    const EventHandle fences[] = {backend.create_event(true), backend.create_event(true), backend.create_event(true)};
    bool others = false;  // have written since the last change
    for (int round = 0; round < 8; ++round) {
      for (LayerId layer = 0; layer < n; ++layer) {
        if (random() % 8 == 0 && world.prefetcher->arrived(layer)) CHECK(world.prefetcher->ready(layer));
      }
      if (round == 0 || random() % 2 == 0) {
        std::vector<LayerId> layers;
        for (LayerId layer = 0; layer < n; ++layer) {
          if (random() % 2 == 0) layers.push_back(layer);
        }
        const std::size_t bytes = whole || random() % 4 == 0 ? kBytes : random() % kBytes;
        StreamConfiguration c = world.change(layers, random() % kRing + 1, bytes);
        if (random() % 2 == 0) std::rotate(c.ring.begin(), c.ring.begin() + 1, c.ring.end());
        parts += c.offsets.empty() ? 0 : c.home.size();
        for (LayerId layer = 0; layer < n; ++layer) {
          if (random() % 4 == 0 && !World::is_in(c.held, layer)) c.held.push_back(layer);
        }
        // All earlier readers of homes, whatever their stream: the second stream waits for the first.
        backend.record(fences[0], streams[1]);
        backend.stream_wait(streams[2], fences[0]);
        others = random() % 2 == 0;
        if (others) {  // and for copies into homes; the pages' next owners write behind them, a host's thread at once
          backend.record(fences[1], world.prefetcher->copy_stream());
          backend.stream_wait(streams[2], fences[1]);
          if (mode != 1) backend.finish();
          world.for_others(c, bytes, [&](std::byte* at, std::size_t size) {
            backend.compute_write(streams[2], at, size, kOther);
          });
          if (mode != 1) backend.finish();
        }
        backend.record(fences[2], streams[2]);
        c.after = fences[2];
        world.configure(c, bytes);
        backend.random_steps(10);
        for (const LayerId layer : c.held) {
          CHECK(!world.prefetcher->ready(layer));
          CHECK(!world.prefetcher->wait(layer, pick(), kNow));
          // Re-pointed behind the same event: nothing reads or writes through the old view.
          while (others && !backend.query(fences[2])) CHECK(backend.step_any());
          world.prefetcher->released(layer);
        }
      }
      const StreamHandle begun = orderly && mode == 1 && random() % 2 == 0 ? streams[1] : 0;  // named once
      std::vector<BlockRun> runs;
      for (std::size_t at = random() % kShown; blocks && random() % 4 != 0 && at < kShown; ++at) {
        const std::size_t count = random() % std::min(kShown - at, kHosts) + 1;
        runs.push_back({at, random() % (kHosts - count + 1), count});
        at += count;
      }
      world.begin(begun, runs);
      streamed_blocks += runs.size();
      const LayerId stop = orderly || random() % 2 == 0 ? n : static_cast<LayerId>(random() % n);
      for (LayerId i = 0; i < stop; ++i) {
        backend.random_steps(random() % 6);
        const LayerId layer = orderly || random() % 8 != 0 ? i : static_cast<LayerId>(random() % n);
        begun != 0 ? world.use_on(layer, begun) : world.use(layer, pick());
        if (!orderly && random() % 8 == 0) world.use(layer, pick());
      }
      if (stop < n && random() % 2 == 0) {  // left between wait and done
        const StreamHandle stream = pick();
        world.wait(stop, begun != 0 ? begun : stream);
        world.compute(stop, stream);
      }
      if (stop == n || random() % 2 == 0) {
        world.prefetcher->end_pass();
      } else {
        world.pass(pick());
        ++abandoned;
      }
    }
    backend.finish();
    world.prefetcher->drain();
    if (others) {
      const StreamConfiguration c = world.configuration(world.streamed, 0, world.tail);
      StreamConfiguration shown = c;
      shown.ring = world.views;
      world.for_others(shown, world.tail, [](const std::byte* at, std::size_t size) {
        CHECK(std::all_of(at, at + size, [](std::byte byte) { return byte == kOther; }));
      });
    }
    const PrefetchStats stats = world.prefetcher->stats();
    if (orderly) CHECK(stats.misses == 0);
    if (whole) CHECK(stats.copied_bytes == stats.copies * kBytes);
    CHECK((stats.block_bytes != 0) <= blocks);
    CHECK(seed % 4 == 0 && !blocks ? stats.copies == backend.copies.size() : stats.copies <= backend.copies.size());
    misses += stats.misses;
    world.prefetcher.reset();
    CHECK(backend.usage().streams == 2);
    CHECK(backend.usage().events == 3);
  }
  CHECK(misses > 0);  // the test did go out of order
  CHECK(abandoned > 0);
  CHECK(parts > 1000);
  CHECK(streamed_blocks > 1000);
}

TEST(block_copies_are_of_the_present_pass_and_in_the_order_of_its_layers) {
  World world(5);
  world.stream_blocks();
  world.configure(world.configuration({1, 4}, 1));
  world.backend->finish();
  const auto copied = [&] {
    const std::vector<LayerId> all = world.copied();
    world.backend->copies.clear();
    return all;
  };
  static_cast<void>(copied());  // the ring is filled ahead of any pass
  const std::uint64_t before = world.prefetcher->stats().block_bytes;
  world.begin(0, {{1, 3, 2}, {4, 0, 1}});
  CHECK(world.prefetcher->stats().block_bytes - before == 2 * 3 * kRanges * kUnit);  // two layers ahead, no more
  for (LayerId layer = 0; layer < 5; ++layer) world.use(layer, 0);
  CHECK(world.prefetcher->stats().block_bytes - before == 5 * 3 * kRanges * kUnit);
  CHECK(world.backend->batches == 5 && world.backend->fills == 0);  // a call a layer
  world.prefetcher->end_pass();
  world.begin(0, {});
  for (LayerId layer = 0; layer < 5; ++layer) CHECK(world.prefetcher->ready(layer) == (layer != 1 && layer != 4));
  CHECK(world.prefetcher->stats().block_bytes - before == 5 * 3 * kRanges * kUnit);
}

TEST(a_pass_over_blocks_waits_for_what_fills_them) {
  World world(2);
  world.stream_blocks();
  const StreamHandle filling = world.backend->create_stream();
  const EventHandle filled = world.backend->create_event(true);
  const std::byte late = World::block_tag(1, 1, 8);
  world.hosts[1][1][8 * kUnit] = kOther;
  world.backend->compute_write(filling, &world.hosts[1][1][8 * kUnit], 1, late);
  world.backend->record(filled, filling);
  world.begin(0, {{0, 8, 1}}, filled);
  for (LayerId layer = 0; layer < 2; ++layer) world.use(layer, 0);
  world.prefetcher->end_pass();
}

TEST(blocks_are_refused_where_nobody_said_that_they_stream) {
  World world(2);
  CHECK_ERROR(ErrorKind::invalid_argument, world.prefetcher->begin_pass(0, {{0, 0, 1}}));
  CHECK(!world.prefetcher->in_pass());
  BlockLayout layout;
  for (int wrong = 0; wrong < 5; ++wrong) {
    layout = {{{{world.shown[0][0].data(), world.shown[0][1].data()}}}, kUnit, kBlockBuffers};
    if (wrong == 0) layout.layers.clear();
    if (wrong == 1) layout.layers.resize(3, layout.layers.front());
    if (wrong == 2) layout.unit_bytes = 0;
    if (wrong == 3) layout.buffers = 0;
    if (wrong == 4) layout.layers.front().front().host = nullptr;
    CHECK_ERROR(ErrorKind::invalid_argument, world.prefetcher->stream_blocks(layout));
  }
  world.stream_blocks();
  CHECK_ERROR(ErrorKind::invalid_state, world.stream_blocks());
}

TEST(copies_are_issued_first_needed_first) {
  World world(8);
  world.configure(world.configuration({0, 5}, 1));
  world.prefetcher->drain();
  world.backend->copies.clear();
  StreamConfiguration c = world.configuration({2, 3, 6}, 2);
  c.home = {{5, 0, kBytes}, {0, 0, kBytes}};
  world.configure(c);
  CHECK((world.copied() == std::vector<LayerId>{0, 2, 3, 5}));
  world.pass(0);
  CHECK((world.copied() == std::vector<LayerId>{0, 2, 3, 5, 6, 2}));  // 3 has its buffer for itself
}

TEST(kept_contents_are_not_copied_again) {
  World world(6);
  world.configure(world.configuration({0, 1, 2, 3}, 2));
  world.prefetcher->drain();
  CHECK((world.copied() == std::vector<LayerId>{0, 1}));
  world.configure(world.configuration({0, 1, 4}, 2));
  CHECK((world.copied() == std::vector<LayerId>{0, 1}));
  world.pass(0);
  StreamConfiguration c = world.configuration({0, 1, 4}, 2);
  c.fresh = true;
  world.backend->copies.clear();
  world.configure(c);
  CHECK((world.copied() == std::vector<LayerId>{0, 1}));
  world.pass(0);
}

TEST(failed_re_pointing_is_told_until_configured) {
  World world(3);
  StreamConfiguration c = world.configuration({1}, 1);
  c.held = {1};
  world.configure(c);
  world.prefetcher->failed(1, std::make_exception_ptr(Error(ErrorKind::out_of_memory, "no")));
  CHECK_ERROR(ErrorKind::out_of_memory, world.prefetcher->wait(1));
  CHECK_ERROR(ErrorKind::out_of_memory, world.prefetcher->wait(1));
  world.configure(world.configuration({}, 0));
  CHECK_ERROR(ErrorKind::out_of_memory, world.prefetcher->wait(1));
  world.configure(world.configuration({1}, 1));
  world.pass(0);
}

TEST(a_conflict_is_an_error_and_changes_nothing) {
  World world(3);
  world.configure(world.configuration({0, 1, 2}, 1));
  world.prefetcher->begin_pass();
  world.wait(0, 0);
  CHECK_ERROR(ErrorKind::invalid_state, world.prefetcher->wait(1));
  CHECK_ERROR(ErrorKind::invalid_state, world.prefetcher->configure(world.configuration({}, 0)));
  world.compute(0, 0);
  world.prefetcher->done(0);
  world.use(1, 0);
  world.use(2, 0);
  world.prefetcher->end_pass();
  CHECK_ERROR(ErrorKind::invalid_state, world.prefetcher->end_pass());
  CHECK(world.prefetcher->stats().misses == 0);
}

// The ring's pages are taken from layers' homes: what leaves the ring is reloaded, after its last reader.
TEST(a_home_that_was_a_buffer_is_loaded_behind_its_readers) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    World world(2, seed);
    world.prefetcher = std::make_unique<Prefetcher>(
        world.backend, std::vector<LayerMemory>{{world.regions[0].data(), world.masters[0].data(), kBytes},
                                                {world.ring[0].data(), world.masters[1].data(), kBytes}});
    const StreamHandle stream = world.backend->create_stream();
    // Alone in its buffer, so that no copy is issued behind its reader that would hold back the reload.
    world.configure(world.configuration({1}, 1));
    world.pass(stream);
    StreamConfiguration c = world.configuration({0}, 2);
    c.ring.erase(c.ring.begin());
    c.home = {{1, 0, kBytes}};
    world.configure(c);
    world.backend->finish();
    CHECK(world.ring[0][0] == World::tag(1));
    CHECK(world.ring[1][0] == World::tag(0));
  }
}

// Who asks sees that a layer has come home, without a pass; in a pass, or while it is held, only who waits does.
TEST(a_layer_that_came_home_is_seen_without_a_pass) {
  World world(3);
  world.configure(world.configuration({0, 1}, 1));
  StreamConfiguration c = world.configuration({}, 0);
  c.home = {{0, 0, kBytes}, {1, 0, kBytes}};
  c.held = {1};
  world.configure(c);
  CHECK(!world.prefetcher->arrived(0) && world.prefetcher->loading());
  world.backend->finish();
  CHECK(!world.prefetcher->ready(0));  // an atomic load: it looks at nothing
  CHECK(world.prefetcher->arrived(0) && world.prefetcher->ready(0));
  CHECK(!world.prefetcher->arrived(1) && !world.prefetcher->arrived(7));
  world.prefetcher->released(1);
  world.prefetcher->begin_pass();
  world.backend->finish();
  CHECK(!world.prefetcher->arrived(1));
  CHECK((world.prefetcher->unwaited() == std::vector<LayerId>{1}));
  world.prefetcher->end_pass();
  CHECK(world.prefetcher->arrived(1) && !world.prefetcher->loading());
  CHECK(world.regions[1][0] == World::tag(1));
}

TEST(contents_are_kept_only_at_the_same_offset_and_place) {
  World world(3);
  world.slice(3, 1);
  world.prefetcher->drain();
  world.backend->copies.clear();
  world.slice(3, 1);
  CHECK(world.backend->copies.empty());
  world.slice(4, 1);
  CHECK(world.backend->copies.size() == 1);
  CHECK(world.backend->copies[0].second == world.masters[0].data() + 2);
  world.prefetcher->drain();
  StreamConfiguration c = world.change({0, 1, 2}, 1, 4);
  for (std::size_t& place : c.places) --place;
  world.backend->copies.clear();
  world.prefetcher->configure(c);
  CHECK(world.backend->copies.size() == 1);
}

// Two shrinks without a pass between, then growth over what is still to be loaded.
TEST(parts_add_up_and_growth_cuts_them) {
  World world(2);
  world.slice(5, 1);
  world.prefetcher->drain();
  for (Buffer& region : world.regions) std::fill(region.begin() + 1, region.end(), kOther);
  StreamConfiguration c = world.change({0, 1}, 1, 4);
  world.configure(c, 4);  // held: nothing is loaded yet
  c = world.change({0, 1}, 1, 2);
  world.configure(c, 2);
  c = world.change({0, 1}, 1, 3);  // layer 0's and 1's byte 3 goes again before it came
  world.configure(c, 3);
  CHECK(c.home.empty());
  world.backend->copies.clear();
  world.release(c);
  world.prefetcher->drain();
  for (const Buffer& region : world.regions) {
    CHECK(region[1] != kOther && region[2] != kOther && region[3] == kOther);
  }
  world.pass(0);
  CHECK(!world.prefetcher->loading());
  // A part that meets an outstanding one: both are loaded anew, once.
  world.slice(5, 1);
  world.prefetcher->drain();
  c = world.change({0, 1}, 1, 3);
  world.configure(c, 3);
  world.prefetcher->configure(c);
  world.backend->copies.clear();
  world.release(c);
  const auto home = [&](const auto& copy) { return copy.first == world.regions[1].data() + 1; };
  CHECK(std::count_if(world.backend->copies.begin(), world.backend->copies.end(), home) == 1);
  world.pass(0);
}

TEST(what_was_to_be_loaded_of_a_layer_that_goes_elsewhere_is_forgotten) {
  World world(2);
  world.slice(5, 1);
  world.prefetcher->drain();
  for (Buffer& region : world.regions) std::fill(region.begin() + 1, region.end(), kOther);
  StreamConfiguration c = world.change({}, 0, 6);
  world.configure(c, 6);  // held: nothing is loaded yet
  CHECK(world.prefetcher->loading() && !world.prefetcher->ready(1));
  StreamConfiguration gone;
  gone.elsewhere = {1};
  world.prefetcher->configure(gone);
  world.release(c);
  world.prefetcher->drain();
  CHECK(world.regions[1][1] == kOther && world.regions[0][1] != kOther && world.prefetcher->ready(1));
  gone.elsewhere = {2};
  CHECK_ERROR(ErrorKind::invalid_argument, world.prefetcher->configure(gone));
  gone.elsewhere = {1, 1};
  CHECK_ERROR(ErrorKind::invalid_argument, world.prefetcher->configure(gone));
}

TEST(bad_configurations_change_nothing) {
  World world({6, 6, 3, 6});
  world.configure(world.configuration({0, 1, 2}, 2));
  world.pass(0);
  const auto refused = [&](StreamConfiguration c, auto&& change) {
    change(c);
    CHECK_ERROR(ErrorKind::invalid_argument, world.prefetcher->configure(c));
  };
  const auto whole = [&](auto&& change) { refused(world.configuration({0, 1}, 2), change); };
  whole([](StreamConfiguration& c) { c.streamed = {0, 9}; });
  whole([](StreamConfiguration& c) { c.streamed = {1, 0}; });
  whole([](StreamConfiguration& c) { c.streamed = {1, 1}; });
  whole([](StreamConfiguration& c) { c.ring.clear(); });
  whole([](StreamConfiguration& c) { c.ring[1] = c.ring[0]; });
  whole([](StreamConfiguration& c) { c.ring[0] = nullptr; });
  whole([](StreamConfiguration& c) { c.ring_bytes = kBytes - 1; });
  whole([](StreamConfiguration& c) { c.home = {{4, 0, kBytes}}; });
  whole([](StreamConfiguration& c) { c.home = {{0, 0, kBytes}}; });
  whole([](StreamConfiguration& c) { c.home = {{3, 0, kBytes}, {3, 0, kBytes}}; });
  whole([](StreamConfiguration& c) { c.held = {4}; });
  whole([](StreamConfiguration& c) { c.held = {2, 2}; });
  CHECK_ERROR(ErrorKind::invalid_argument, world.prefetcher->wait(4));
  CHECK_ERROR(ErrorKind::invalid_argument, world.prefetcher->done(4));
  world.pass(0);
  CHECK(world.prefetcher->stats().last_pass_copies == 2);

  world.configure(world.configuration({0, 1, 2}, 2, 3), 3);
  const auto sliced = [&](auto&& change) { refused(world.change({0, 1, 2}, 2, 2), change); };
  sliced([](StreamConfiguration& c) { c.offsets.pop_back(); });
  sliced([](StreamConfiguration& c) { c.places.pop_back(); });
  sliced([](StreamConfiguration& c) { c.offsets[0] = 6; });
  sliced([](StreamConfiguration& c) { c.offsets[0] = 7; });
  sliced([](StreamConfiguration& c) { c.offsets[0] = 3, c.home.clear(), c.places[0] = 4; });
  sliced([](StreamConfiguration& c) { c.places[1] = kBytes + 1; });
  sliced([](StreamConfiguration& c) { c.places[1] = ~std::size_t{0}; });
  sliced([](StreamConfiguration& c) { c.ring_bytes = kBytes - 1; });
  sliced([](StreamConfiguration& c) { c.home[0].layer = 4; });
  sliced([](StreamConfiguration& c) { c.home[1].layer = 0; });
  sliced([](StreamConfiguration& c) { c.home[0].bytes = 0; });
  sliced([](StreamConfiguration& c) { ++c.home[0].bytes; });
  sliced([](StreamConfiguration& c) { c.home[0].bytes = ~std::size_t{0}; });
  sliced([](StreamConfiguration& c) { c.home[0].first = 4; });
  sliced([](StreamConfiguration& c) {
    c.streamed = {1, 2}, c.offsets = {4, 1}, c.places = {4, 4}, c.home.push_back({0, 3, 3});
  });
  sliced([](StreamConfiguration& c) { c.streamed.clear(); });
  world.pass(0);
  world.pass(0);
  CHECK(world.prefetcher->stats().last_pass_copies == 2);
  const StreamConfiguration good = world.change({0, 1, 2}, 2, 2);
  world.configure(good, 2);
  world.release(good);
  world.pass(0);
}

// Of whole layers, or of tails that shrink; the next pass begins anew, and everything is loaded again.
TEST(a_failed_copy_is_an_error_never_a_hang) {
  const std::vector<LayerId> layers{0, 2, 3, 4};
  for (const bool sliced : {false, true}) {
    for (const Reader reader : kReaders) {
      for (unsigned nth = 1; nth <= 12; ++nth) {
        World world(5, nth);
        StreamHandle stream = reader == Reader::host ? 0 : world.backend->create_stream();
        if (sliced) {
          world.configure(world.configuration(layers, 1, 4), 4);
          world.pass_by(reader, stream);
          world.backend->finish();
          for (const LayerId layer : layers) {
            std::fill(world.regions[layer].begin() + 2, world.regions[layer].end(), kOther);
          }
        }
        world.backend->fail_copy(nth);
        const StreamConfiguration c = sliced ? world.change(layers, 2, 2) : world.configuration(layers, 2);
        world.configure(c, sliced ? 2 : kBytes);
        world.release(c);
        bool threw = false;
        for (int pass = 0; pass < 4 && !threw; ++pass) {
          try {
            world.pass_by(reader, stream);
            world.backend->random_steps(40);
            world.prefetcher->drain();
          } catch (const Error& error) {
            CHECK(error.kind() == ErrorKind::driver);
            threw = true;
          }
        }
        CHECK(threw);
        CHECK_ERROR(ErrorKind::driver, world.prefetcher->drain());
        world.backend->finish();
        if (reader != Reader::host) stream = world.backend->create_stream();  // the failed event took the old one with it
        const StreamHandle copies = world.prefetcher->copy_stream();
        for (int pass = 0; pass < 2; ++pass) world.pass_by(reader, stream);
        CHECK(world.prefetcher->copy_stream() != copies);
        world.backend->finish();
        world.prefetcher->drain();
      }
    }
  }
}

// In chunks of three bytes a layer's four are two copies, with a fill between them where others get in; still one copy to whoever
// waits, and to the statistics.
TEST(a_copy_goes_in_chunks) {
  World world(2, 1, 3);
  world.configure(world.configuration({0, 1}, 2));
  world.pass(0);
  CHECK((world.copied() == std::vector<LayerId>{0, 0, 1, 1}));
  CHECK(world.backend->fills == 2);
  for (std::size_t i = 0; i < world.backend->copies.size(); ++i) {
    const std::byte* buffer = world.ring[i / 2 % 2].data();
    CHECK(world.backend->copies[i].first == buffer + (i % 2 == 0 ? 0 : 3));
  }
  const PrefetchStats stats = world.prefetcher->stats();
  CHECK(stats.copies == 2 && stats.copied_bytes == 2 * kBytes);
}

// A chunk is a batch: it ends in the middle of a run if it has to, and the next one begins behind a fill.
TEST(block_copies_go_in_chunks) {
  World world(2, 1, 3 * kUnit / 2);
  world.stream_blocks();
  world.backend->finish();
  world.backend->copies.clear();
  const std::uint64_t fills = world.backend->fills;
  world.begin(0, {{1, 3, 2}, {4, 0, 1}});
  for (LayerId layer = 0; layer < 2; ++layer) world.use(layer, 0);
  world.prefetcher->end_pass();
  const std::size_t chunks = 2 * kRanges;  // of one and a half units: a layer's are three units a range
  CHECK(world.backend->fills - fills == 2 * (chunks - 1));
  CHECK(world.backend->batches == 2 * kRanges);  // every other one has the end of a run and all of the next
}

TEST(statistics) {
  World world(4);
  world.configure(world.configuration({0, 1, 2, 3}, 2));
  world.pass(0);
  world.prefetcher->begin_pass();
  CHECK(world.prefetcher->in_pass());
  world.pass(0);
  world.prefetcher->drain();
  const PrefetchStats stats = world.prefetcher->stats();
  CHECK(stats.passes == 2);
  CHECK(stats.abandoned == 1);
  CHECK(stats.copies == 10);
  CHECK(stats.copied_bytes == 10 * kBytes);
  CHECK(stats.timed_bytes >= kBytes && stats.timed_bytes <= 10 * kBytes && stats.timed_bytes % kBytes == 0);  // one at a time
  CHECK(stats.copy_s > 0);
  CHECK(stats.last_pass_copies == 4);
  CHECK(stats.last_pass_s > 0);
  CHECK(stats.misses == 0);
}

// Every subset of waits, host and stream: exactly the layers that were away and not waited for are told, and only in a pass.
TEST(a_pass_tells_which_layers_it_did_not_wait_for) {
  for (const bool host : {true, false}) {
    for (std::uint32_t waited = 0; waited < 32; ++waited) {
      World world(5);
      const StreamHandle stream = host ? 0 : world.backend->create_stream();
      StreamConfiguration c = world.configuration({1, 3}, 2);
      c.home = {{4, 0, kBytes}};
      world.configure(c);
      CHECK(world.prefetcher->unwaited().empty());  // no pass is open
      world.prefetcher->begin_pass(stream);
      CHECK((world.prefetcher->unwaited() == std::vector<LayerId>{1, 3, 4}));
      std::vector<LayerId> missed;
      for (LayerId layer = 0; layer < 5; ++layer) {
        const bool away = layer == 1 || layer == 3 || layer == 4;
        if ((waited >> layer & 1U) != 0) {
          world.use(layer, stream);
        } else if (away) {
          world.prefetcher->done(layer);  // is no wait
          missed.push_back(layer);
        }
      }
      CHECK(world.prefetcher->unwaited() == missed);
      world.prefetcher->end_pass();
      CHECK(world.prefetcher->unwaited().empty());
      world.backend->finish();
    }
  }
}

// A layer that was held when the pass began and was released before anybody waited: there is nothing to wait for any more, but
// who computed without asking may have done so before. Nor is it ready to those who look whether a pass has to wait.
TEST(a_layer_released_in_a_pass_is_still_to_be_waited_for) {
  World world(3);
  StreamConfiguration c = world.configuration({}, 0);
  c.held = {1};
  world.configure(c);
  world.prefetcher->begin_pass();
  world.prefetcher->released(1);
  CHECK(!world.prefetcher->ready(1));
  CHECK((world.prefetcher->unwaited() == std::vector<LayerId>{1}));
  CHECK(world.prefetcher->wait(1, 0, kNow));
  CHECK(world.prefetcher->ready(1));
  CHECK(world.prefetcher->unwaited().empty());
  world.prefetcher->end_pass();
  CHECK(world.prefetcher->ready(1));

  world.configure(c);
  world.prefetcher->begin_pass();
  world.prefetcher->released(1);
  world.prefetcher->end_pass();  // without a wait: from now on it is ready all the same
  CHECK(world.prefetcher->ready(1));
}

TEST(a_wait_that_failed_or_timed_out_is_none) {
  World world(2);
  StreamConfiguration c = world.configuration({1}, 1);
  c.held = {1};
  world.configure(c);
  world.prefetcher->begin_pass();
  CHECK(!world.prefetcher->wait(1, 0, kNow));
  world.prefetcher->failed(1, std::make_exception_ptr(Error(ErrorKind::out_of_memory, "no")));
  CHECK_ERROR(ErrorKind::out_of_memory, world.prefetcher->wait(1));
  CHECK((world.prefetcher->unwaited() == std::vector<LayerId>{1}));
  world.prefetcher->begin_pass();  // the open one is abandoned, and a new one begins
  CHECK((world.prefetcher->unwaited() == std::vector<LayerId>{1}));
  world.prefetcher->end_pass();
}

// By the next close(), and once more by the destructor.
TEST(what_cannot_be_given_back_is_tried_again) {
  for (const Call call : {Call::destroy_stream, Call::destroy_event}) {
    for (const bool closed : {true, false}) {
      World world(2);
      world.configure(world.configuration({0, 1}, 1));
      world.pass(0);
      world.prefetcher->drain();
      world.backend->fail_call(call, 1, closed);
      if (closed) {
        for (int tries = 0; tries < 2; ++tries) CHECK_ERROR(ErrorKind::driver, world.prefetcher->close());
        world.backend->heal();
        world.prefetcher->close();
        world.prefetcher->close();  // idempotent
      }
      world.prefetcher.reset();
      CHECK(world.backend->usage().streams == 0 && world.backend->usage().events == 0);
    }
  }
}

TEST(addresses_that_wrap_are_refused) {
  const auto host = remap::make_host_backend({1 << 20, 4096, 1});
  std::byte byte{};
  CHECK_ERROR(ErrorKind::invalid_argument, Prefetcher(nullptr, {}));
  CHECK_ERROR(ErrorKind::invalid_argument, Prefetcher(host, {{&byte, nullptr, ~std::size_t{0}}}));
  CHECK_ERROR(ErrorKind::invalid_argument, Prefetcher(host, {{nullptr, &byte, ~std::size_t{0}}}));
  CHECK(host->usage().streams == 0);
}

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

// Changes and passes while calls fail as `arm` says. Whatever is thrown, what is computed is right, the end is reached
// once the fault is gone, and nothing is left behind. How many calls threw.
unsigned session_with_faults(Reader reader, std::uint64_t seed, const std::function<void(FakeBackend&)>& arm) {
  World world(6, seed, seed % 3);  // whole, or in chunks
  FakeBackend& backend = *world.backend;
  const StreamHandle stream = reader == Reader::host ? 0 : backend.create_stream();
  const EventHandle after = backend.create_event(true);
  const auto pass = [&] { world.pass_by(reader, stream); };
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
  for (const Reader reader : kReaders) {
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
