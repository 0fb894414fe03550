// Slices on the fake backend: heads at home, tails through the ring, parts that come home; whatever the interleaving.
#include <algorithm>
#include <array>
#include <memory>
#include <random>

#include "check.h"
#include "fake_backend.h"
#include "remap/prefetcher.h"

using remap::Error;
using remap::ErrorKind;
using remap::LayerId;
using remap::LayerMemory;
using remap::Prefetcher;
using remap::StreamConfiguration;
using remap::StreamHandle;
using remap::testing::FakeBackend;

namespace {

constexpr std::size_t kBytes = 6;  // of a layer and of a ring buffer; a page is one byte
constexpr std::byte kOther{0xEE};  // who has a page meanwhile writes this

using Memory = std::array<std::byte, kBytes>;

// Layers of up to six pages, of which the last `tail` stream, aligned to the end of the buffers. Only what is streamed of a
// buffer may be written to, and only what is at home of a layer.
struct World {
  std::vector<Memory> masters, regions, ring;
  std::vector<std::size_t> sizes;
  std::shared_ptr<FakeBackend> backend;
  std::unique_ptr<Prefetcher> prefetcher;
  std::size_t tail = 0, buffers = 0;
  std::vector<LayerId> streamed;

  explicit World(std::vector<std::size_t> layer_sizes, std::uint64_t seed = 1)
      : masters(layer_sizes.size()),
        regions(layer_sizes.size()),
        ring(3),
        sizes(std::move(layer_sizes)),
        backend(std::make_shared<FakeBackend>(seed)) {
    std::vector<LayerMemory> memory;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      masters[i].fill(tag(i));
      regions[i].fill(tag(i));
      memory.push_back({regions[i].data(), masters[i].data(), sizes[i]});
    }
    for (Memory& buffer : ring) buffer.fill(kOther);
    prefetcher = std::make_unique<Prefetcher>(backend, memory);
  }

  static std::byte tag(std::size_t layer) { return static_cast<std::byte>(layer + 1); }
  std::size_t tail_of(LayerId layer) const {
    return std::binary_search(streamed.begin(), streamed.end(), layer) ? std::min(tail, sizes[layer]) : 0;
  }

  // From the present slices to these: offsets, places and the parts that come home.
  StreamConfiguration configuration(const std::vector<LayerId>& layers, std::size_t pages, std::size_t beta) const {
    StreamConfiguration c;
    for (LayerId layer = 0; layer < sizes.size(); ++layer) {
      const bool streams = pages > 0 && std::find(layers.begin(), layers.end(), layer) != layers.end();
      const std::size_t has = streams ? std::min(pages, sizes[layer]) : 0;
      const std::size_t had = tail_of(layer);
      if (streams) {
        c.streamed.push_back(layer);
        c.offsets.push_back(sizes[layer] - has);
        c.places.push_back(kBytes - has);
      }
      if (has < had) c.home.push_back({layer, sizes[layer] - had, had - has});
      if (has != had) c.held.push_back(layer);
    }
    for (std::size_t b = 0; b < beta && !c.streamed.empty(); ++b) c.ring.push_back(const_cast<std::byte*>(ring[b].data()));
    c.ring_bytes = kBytes;
    return c;
  }
  void configure(const StreamConfiguration& c, std::size_t pages) {
    prefetcher->configure(c);
    streamed = c.streamed;
    tail = streamed.empty() ? 0 : pages;
    buffers = c.ring.size();
  }
  void release(const StreamConfiguration& c) {
    for (const LayerId layer : c.held) prefetcher->released(layer);
  }
  void change(std::size_t pages, std::size_t beta) {
    std::vector<LayerId> all;
    for (LayerId layer = 0; layer < sizes.size(); ++layer) all.push_back(layer);
    const StreamConfiguration c = configuration(all, pages, beta);
    configure(c, pages);
    release(c);
  }
  // Where the tail is read: in the layer's buffer.
  const std::byte* tail_place(LayerId layer) const {
    const auto at = std::find(streamed.begin(), streamed.end(), layer) - streamed.begin();
    return ring[static_cast<std::size_t>(at) % buffers].data() + kBytes - tail_of(layer);
  }
  void compute(LayerId layer, StreamHandle stream) {
    const std::size_t away = tail_of(layer), head = sizes[layer] - away;
    const auto read = [&](const std::byte* at, std::size_t bytes) {
      if (bytes == 0) return;
      if (stream != 0) {
        backend->compute(stream, at, bytes, tag(layer));
      } else {
        backend->compute_now(at, bytes, tag(layer));
      }
    };
    read(regions[layer].data(), head);
    if (away != 0) read(tail_place(layer), away);
  }
  void use(LayerId layer, StreamHandle stream) {
    if (stream != 0) {
      CHECK(prefetcher->wait(layer, stream));
    } else {
      for (int tries = 0; !prefetcher->wait(layer, 0, std::chrono::nanoseconds(1)); ++tries) {
        CHECK(tries < 100000);
        backend->random_steps(1);
      }
    }
    compute(layer, stream);
    prefetcher->done(layer, stream);
  }
  void pass(StreamHandle stream) {
    prefetcher->begin_pass();
    for (LayerId layer = 0; layer < sizes.size(); ++layer) use(layer, stream);
    prefetcher->end_pass();
  }
  // What nobody streams through the ring belongs to others.
  void check_ring() const {
    for (std::size_t b = 0; b < ring.size(); ++b) {
      const std::size_t unused = b < buffers ? kBytes - tail : kBytes;
      for (std::size_t i = 0; i < unused; ++i) CHECK(ring[b][i] == kOther);
    }
  }
};

void a_slice_brings_its_bytes_to_its_place_and_no_others() {
  World world({6, 6, 4, 1});
  world.change(3, 1);
  world.backend->finish();
  CHECK(world.backend->copies.front().first == world.ring[0].data() + 3);
  CHECK(world.backend->copies.front().second == world.masters[0].data() + 3);
  for (int pass = 0; pass < 2; ++pass) {
    world.pass(0);
    world.check_ring();
  }
  const remap::PrefetchStats stats = world.prefetcher->stats();
  world.pass(0);
  CHECK(world.prefetcher->stats().copied_bytes - stats.copied_bytes == 3 + 3 + 3 + 1);
  CHECK(world.prefetcher->stats().misses == 0);
  // The last layer's copy is put at the end of the buffer, as its region shows it there.
  const auto small = std::find_if(world.backend->copies.begin(), world.backend->copies.end(),
                                  [&](const auto& copy) { return copy.second == world.masters[3].data(); });
  CHECK(small != world.backend->copies.end() && small->first == world.ring[0].data() + 5);
}

void contents_are_kept_only_at_the_same_offset_and_place() {
  World world({6, 6, 6});
  world.change(3, 1);
  world.prefetcher->drain();
  world.backend->copies.clear();
  world.change(3, 1);
  CHECK(world.backend->copies.empty());
  world.change(4, 1);
  CHECK(world.backend->copies.size() == 1);
  CHECK(world.backend->copies[0].second == world.masters[0].data() + 2);
  world.prefetcher->drain();
  StreamConfiguration c = world.configuration({0, 1, 2}, 4, 1);
  for (std::size_t& place : c.places) --place;
  world.backend->copies.clear();
  world.prefetcher->configure(c);
  CHECK(world.backend->copies.size() == 1);
}

void wait_sees_the_ring_and_the_part_that_comes_home() {
  for (const bool on_stream : {false, true}) {
    World world({6, 6, 6});
    const StreamHandle stream = on_stream ? world.backend->create_stream() : 0;
    world.change(4, 1);
    world.pass(stream);
    world.backend->finish();
    for (std::size_t i = 2; i < kBytes; ++i) world.regions[1][i] = kOther;
    world.backend->copies.clear();
    const StreamConfiguration c = world.configuration({0, 1, 2}, 2, 1);
    CHECK(c.home.size() == 3 && c.home[1].first == 2 && c.home[1].bytes == 2);
    world.configure(c, 2);
    // Regions are still to be re-pointed: what comes home would be written into the ring.
    for (const auto& copy : world.backend->copies) CHECK(copy.first == world.ring[0].data() + 4);
    CHECK(world.prefetcher->loading());
    CHECK(!world.prefetcher->wait(1, stream, std::chrono::nanoseconds(0)));
    world.release(c);
    world.prefetcher->begin_pass(stream);
    world.use(0, stream);
    CHECK(world.prefetcher->wait(1, stream));
    if (!on_stream) {
      for (std::size_t i = 0; i < 4; ++i) CHECK(world.regions[1][i] == World::tag(1));
      for (std::size_t i = 4; i < kBytes; ++i) CHECK(world.ring[0][i] == World::tag(1));
    }
    world.compute(1, stream);
    world.prefetcher->done(1, stream);
    world.use(2, stream);
    world.prefetcher->end_pass();
    world.backend->finish();
    CHECK(world.regions[1][4] == kOther);  // not what goes on streaming
    world.pass(stream);
    world.backend->finish();
    world.pass(stream);  // a layer that was seen loaded is no longer listed
    CHECK(!world.prefetcher->loading());
    for (LayerId layer = 0; layer < 3; ++layer) CHECK(!world.prefetcher->ready(layer));
    world.change(0, 0);
    world.pass(stream);
    world.backend->finish();
    world.pass(stream);
    for (LayerId layer = 0; layer < 3; ++layer) CHECK(world.prefetcher->ready(layer));
  }
}

// Two shrinks without a pass between, then growth over what is still to be loaded.
void parts_add_up_and_growth_cuts_them() {
  World world({6, 6});
  world.change(5, 1);
  world.prefetcher->drain();
  for (Memory& region : world.regions) std::fill(region.begin() + 1, region.end(), kOther);
  StreamConfiguration c = world.configuration({0, 1}, 4, 1);
  world.configure(c, 4);  // held: nothing is loaded yet
  c = world.configuration({0, 1}, 2, 1);
  world.configure(c, 2);
  c = world.configuration({0, 1}, 3, 1);  // layer 0's and 1's byte 3 goes again before it came
  world.configure(c, 3);
  CHECK(c.home.empty());
  world.backend->copies.clear();
  world.release(c);
  world.prefetcher->drain();
  for (const Memory& region : world.regions) {
    CHECK(region[1] != kOther && region[2] != kOther && region[3] == kOther);
  }
  world.pass(0);
  CHECK(!world.prefetcher->loading());
  // A part that meets an outstanding one: both are loaded anew, once.
  world.change(5, 1);
  world.prefetcher->drain();
  c = world.configuration({0, 1}, 3, 1);
  world.configure(c, 3);
  world.prefetcher->configure(c);
  world.backend->copies.clear();
  world.release(c);
  const auto home = [&](const auto& copy) { return copy.first == world.regions[1].data() + 1; };
  CHECK(std::count_if(world.backend->copies.begin(), world.backend->copies.end(), home) == 1);
  world.pass(0);
}

void random_interleavings() {
  std::uint64_t parts = 0;
  for (std::uint64_t seed = 0; seed < 4000; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<std::size_t> sizes(random() % 6 + 2);
    for (std::size_t& size : sizes) size = random() % 2 == 0 ? kBytes : random() % kBytes + 1;
    World world(sizes, seed);
    FakeBackend& backend = *world.backend;
    const std::vector<StreamHandle> streams = {0, backend.create_stream(), backend.create_stream()};
    const std::uint64_t mode = random() % 4;  // host readers, one stream, or each layer on any of two or three
    const auto pick = [&] { return mode < 2 ? streams[mode] : streams[random() % mode]; };
    const remap::EventHandle fences[] = {backend.create_event(true), backend.create_event(true), backend.create_event(true)};
    for (int round = 0; round < 10; ++round) {
      if (round == 0 || random() % 2 == 0) {
        const std::size_t pages = random() % (kBytes + 1);
        std::vector<LayerId> layers;
        for (LayerId layer = 0; layer < sizes.size(); ++layer) {
          if (random() % 8 != 0) layers.push_back(layer);
        }
        StreamConfiguration c = world.configuration(layers, pages, random() % 3 + 1);
        parts += c.home.size();
        // As a session does: copies into homes, and whatever reads, come first; the pages' next owners write behind them.
        backend.record(fences[0], streams[1]);
        backend.stream_wait(streams[2], fences[0]);
        backend.record(fences[1], world.prefetcher->copy_stream());
        backend.stream_wait(streams[2], fences[1]);
        std::vector<std::size_t> had(sizes.size());
        for (LayerId layer = 0; layer < sizes.size(); ++layer) had[layer] = world.tail_of(layer);
        const std::size_t ring_before = world.tail, buffers_before = world.buffers;
        if (mode != 1) backend.finish();  // a host's thread writes at once
        for (std::size_t j = 0; j < c.streamed.size(); ++j) {
          const LayerId layer = c.streamed[j];
          const std::size_t until = sizes[layer] - had[layer];
          if (c.offsets[j] < until) {
            backend.compute_write(streams[2], world.regions[layer].data() + c.offsets[j], until - c.offsets[j], kOther);
          }
        }
        const std::size_t ring_after = c.streamed.empty() ? 0 : pages;
        for (std::size_t b = 0; b < buffers_before; ++b) {
          const std::size_t stays = b < c.ring.size() ? std::min(ring_after, ring_before) : 0;
          if (stays < ring_before) {
            backend.compute_write(streams[2], world.ring[b].data() + kBytes - ring_before, ring_before - stays, kOther);
          }
        }
        backend.record(fences[2], streams[2]);
        c.after = fences[2];
        if (mode != 1) backend.finish();
        world.configure(c, pages);
        backend.random_steps(10);
        for (const LayerId layer : c.held) {
          CHECK(!world.prefetcher->ready(layer));
          CHECK(!world.prefetcher->wait(layer, pick(), std::chrono::nanoseconds(0)));
          // Re-pointed behind the same event: nothing reads or writes through the old view.
          while (!backend.query(fences[2])) CHECK(backend.step_any());
          world.prefetcher->released(layer);
        }
      }
      const StreamHandle one = pick();
      world.prefetcher->begin_pass();
      const auto stop = static_cast<LayerId>(random() % 4 == 0 ? random() % sizes.size() : sizes.size());
      for (LayerId layer = 0; layer < stop; ++layer) {
        backend.random_steps(random() % 6);
        world.use(layer, random() % 4 == 0 ? pick() : one);
      }
      if (random() % 2 == 0) world.prefetcher->end_pass();
      if (world.prefetcher->in_pass()) world.pass(one);
    }
    backend.finish();
    world.prefetcher->drain();
    world.check_ring();
    CHECK(world.prefetcher->stats().copies == backend.copies.size());
    world.prefetcher.reset();
    CHECK(backend.usage().streams == 2);
    CHECK(backend.usage().events == 3);
  }
  CHECK(parts > 1000);
}

void failures_are_errors_and_all_is_loaded_again() {
  unsigned thrown = 0;
  for (const bool host : {true, false}) {
    for (unsigned nth = 1; nth <= 9; ++nth) {
      World world({6, 6, 6}, nth);
      StreamHandle stream = host ? 0 : world.backend->create_stream();
      world.change(4, 1);
      world.pass(stream);
      world.backend->finish();
      for (Memory& region : world.regions) std::fill(region.begin() + 2, region.end(), kOther);
      world.backend->fail_copy(nth);
      world.change(2, 2);
      try {
        for (int pass = 0; pass < 4; ++pass) {
          world.pass(stream);
          world.backend->random_steps(40);
          world.prefetcher->drain();
        }
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::driver);
        ++thrown;
        if (!host) {
          world.backend->finish();
          stream = world.backend->create_stream();
        }
      }
      world.pass(stream);
      world.pass(stream);
      world.backend->finish();
      world.prefetcher->drain();
    }
  }
  CHECK(thrown > 10);
}

void bad_slices_change_nothing() {
  World world({6, 6, 3});
  world.change(3, 2);
  world.pass(0);
  const auto refused = [&](auto&& change) {
    StreamConfiguration c = world.configuration({0, 1, 2}, 2, 2);
    change(c);
    CHECK_ERROR(ErrorKind::invalid_argument, world.prefetcher->configure(c));
  };
  refused([](StreamConfiguration& c) { c.offsets.pop_back(); });
  refused([](StreamConfiguration& c) { c.places.pop_back(); });
  refused([](StreamConfiguration& c) { c.offsets[0] = 6; });
  refused([](StreamConfiguration& c) { c.offsets[0] = 7; });
  refused([](StreamConfiguration& c) { c.offsets[0] = 3, c.home.clear(), c.places[0] = 4; });
  refused([](StreamConfiguration& c) { c.places[1] = kBytes + 1; });
  refused([](StreamConfiguration& c) { c.places[1] = ~std::size_t{0}; });
  refused([](StreamConfiguration& c) { c.ring_bytes = kBytes - 1; });
  refused([](StreamConfiguration& c) { c.home[0].layer = 3; });
  refused([](StreamConfiguration& c) { c.home[1].layer = 0; });
  refused([](StreamConfiguration& c) { c.home[0].bytes = 0; });
  refused([](StreamConfiguration& c) { ++c.home[0].bytes; });
  refused([](StreamConfiguration& c) { c.home[0].bytes = ~std::size_t{0}; });
  refused([](StreamConfiguration& c) { c.home[0].first = 4; });
  refused([](StreamConfiguration& c) {
    c.streamed = {1, 2}, c.offsets = {4, 1}, c.places = {4, 4}, c.home.push_back({0, 3, 3});
  });
  refused([](StreamConfiguration& c) { c.streamed.clear(); });
  world.pass(0);
  world.pass(0);
  CHECK(world.prefetcher->stats().last_pass_copies == 2);
  world.change(2, 2);  // and this is a good one
  world.pass(0);
}

}  // namespace

int main() {
  RUN(a_slice_brings_its_bytes_to_its_place_and_no_others);
  RUN(contents_are_kept_only_at_the_same_offset_and_place);
  RUN(wait_sees_the_ring_and_the_part_that_comes_home);
  RUN(parts_add_up_and_growth_cuts_them);
  RUN(random_interleavings);
  RUN(failures_are_errors_and_all_is_loaded_again);
  RUN(bad_slices_change_nothing);
  return remap::testing::failures();
}
