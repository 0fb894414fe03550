// The Prefetcher on the host backend's real threads, for the sanitizers: every byte that a computation reads is its layer's.
#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <thread>

#include "check.h"
#include "remap/backends.h"
#include "remap/prefetcher.h"
#include "threads.h"

using namespace remap;
using namespace remap::testing;

namespace {

constexpr std::size_t kBytes = 48 << 10;
constexpr std::size_t kRing = 3;
constexpr std::size_t kUnit = 4 << 10;  // of a KV block in a layer
constexpr std::size_t kBlocks = 4;      // that stream
using Bytes = std::vector<std::byte>;

struct World {
  std::vector<Bytes> masters, regions, ring;
  std::vector<Bytes> hosts, shown;  // KV blocks: by layer in host memory, and by buffer
  std::shared_ptr<Backend> backend;
  std::unique_ptr<Prefetcher> prefetcher;
  StreamConfiguration configuration;

  explicit World(std::size_t layers) {
    HostOptions options;
    options.page_bytes = 2 << 20;
    options.capacity_bytes = 2 << 20;
    options.copy_threads = 2;
    backend = remap::make_host_backend(options);
    std::vector<LayerMemory> memory;
    for (std::size_t i = 0; i < layers; ++i) {
      masters.emplace_back(kBytes, tag(i));
      regions.emplace_back(kBytes, tag(i));
    }
    ring.assign(kRing, Bytes(kBytes, std::byte{0xDF}));
    for (std::size_t i = 0; i < layers; ++i) memory.push_back({regions[i].data(), masters[i].data(), kBytes});
    prefetcher = std::make_unique<Prefetcher>(backend, memory);
    configuration.ring_bytes = kBytes;
    shown.assign(2, Bytes(kBlocks * kUnit, std::byte{0xDF}));
    BlockLayout layout;
    layout.unit_bytes = kUnit;
    layout.buffers = 2;
    for (std::size_t i = 0; i < layers; ++i) {
      hosts.emplace_back(kBlocks * kUnit);
      for (std::size_t at = 0; at < hosts[i].size(); ++at) hosts[i][at] = block_tag(i, at / kUnit);
    }
    for (std::size_t i = 0; i < layers; ++i) layout.layers.push_back({{shown[i % 2].data(), hosts[i].data()}});
    prefetcher->stream_blocks(layout);
  }

  static std::byte tag(std::size_t layer) { return static_cast<std::byte>(layer + 1); }
  static std::byte block_tag(std::size_t layer, std::size_t host) { return static_cast<std::byte>(64 + layer * kBlocks + host); }

  // Where a streamed layer's tail begins.
  static std::size_t offset_of(const StreamConfiguration& c) { return c.offsets.empty() ? 0 : c.offsets.front(); }
  static bool streams(const StreamConfiguration& c, LayerId layer) {
    return std::binary_search(c.streamed.begin(), c.streamed.end(), layer);
  }
  // A random set, or slices of it, instead of what is streamed; what was streamed before is reloaded.
  StreamConfiguration next(std::mt19937_64& random, bool hold) {
    StreamConfiguration next;
    next.ring_bytes = kBytes;
    for (LayerId layer = 0; layer < masters.size(); ++layer) {
      if (random() % 2 == 0) next.streamed.push_back(layer);
    }
    const std::size_t beta = random() % kRing + 1;
    for (std::size_t b = 0; b < beta; ++b) next.ring.push_back(ring[b].data());
    const std::size_t had = offset_of(configuration), has = random() % 4 * (kBytes / 4);
    if (has != 0) {
      next.offsets.assign(next.streamed.size(), has);
      next.places = next.offsets;
    }
    for (const LayerId layer : configuration.streamed) {
      const std::size_t until = streams(next, layer) ? has : kBytes;
      if (until > had) next.home.push_back({layer, had, until - had});
    }
    for (LayerId layer = 0; hold && layer < masters.size(); ++layer) {
      if (random() % 3 == 0) next.held.push_back(layer);
    }
    return next;
  }
  void configure(const StreamConfiguration& next) {
    prefetcher->configure(next);
    configuration = next;
  }
  // Bytes that are read at home.
  std::size_t head_of(LayerId layer) const { return streams(configuration, layer) ? offset_of(configuration) : kBytes; }
  const std::byte* place(LayerId layer) const {
    const auto& streamed = configuration.streamed;
    const auto at = std::lower_bound(streamed.begin(), streamed.end(), layer);
    if (at == streamed.end() || *at != layer) return regions[layer].data();
    return configuration.ring[static_cast<std::size_t>(at - streamed.begin()) % configuration.ring.size()];
  }
  void read(LayerId layer) const {
    const std::byte* tail = place(layer);
    const std::size_t head = head_of(layer);
    for (std::size_t i = 0; i < kBytes; ++i) CHECK((i < head ? regions[layer].data() : tail)[i] == tag(layer));
  }
  // What the backend copies as it stands when the copy runs.
  void copy(StreamHandle stream, std::byte* to, LayerId layer) {
    const std::size_t head = head_of(layer);
    if (head > 0) backend->copy(stream, to, regions[layer].data(), head);
    if (head < kBytes) backend->copy(stream, to + head, place(layer) + head, kBytes - head);
  }
  void wait(LayerId layer) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!prefetcher->wait(layer, 0, std::chrono::milliseconds(5))) CHECK(std::chrono::steady_clock::now() < limit);
  }
};

// Passes on two streams in turn, begun there or with the stream named at every layer, several in flight; changes while
// the streams are busy (other owners write at once to what they get), and a worker that releases regions behind the
// change's event. Nothing blocks the engine but a held layer. The computation of a layer is a copy of what it sees.
TEST(passes_on_streams_with_changes_under_way) {
  constexpr LayerId kLayers = 7;
  constexpr std::size_t kPasses = 5;
  World world(kLayers);
  std::mt19937_64 random(3);
  Backend& backend = *world.backend;
  const StreamHandle streams[] = {backend.create_stream(), backend.create_stream()};
  const EventHandle turn = backend.create_event(true);
  StreamHandle last = streams[0];
  Looking looking([&] {
    static_cast<void>(world.prefetcher->stats());
    static_cast<void>(world.prefetcher->take_timings());
    static_cast<void>(world.prefetcher->uses_streams());
  });
  for (int round = 0; round < 50; ++round) {
    StreamConfiguration next = world.next(random, true);
    backend.record(turn, world.prefetcher->copy_stream());
    backend.stream_wait(last, turn);
    const EventHandle after = backend.create_event(true);
    backend.record(after, last);
    next.after = after;
    const std::size_t head = World::offset_of(next);
    for (const LayerId layer : next.streamed) {
      backend.fill(last, world.regions[layer].data() + head, 0xDF, kBytes - head);
    }
    world.configure(next);
    Thread worker([&] {
      CHECK(backend.synchronize(after, std::chrono::seconds(60)));
      for (const LayerId layer : next.held) world.prefetcher->released(layer);
    });
    std::vector<Bytes> seen;
    for (std::size_t use = 0; use < kPasses * kLayers; ++use) seen.emplace_back(kBytes);
    std::vector<Bytes> parts(kPasses * kLayers);    // of the blocks that the pass reads
    std::vector<BlockRun> runs(kPasses);
    for (std::size_t pass = 0; pass < kPasses; ++pass) {
      const StreamHandle stream = streams[random() % 2];
      if (stream != last) {
        backend.record(turn, last);
        backend.stream_wait(stream, turn);
        last = stream;
      }
      const bool begun_there = random() % 2 == 0;
      BlockRun& run = runs[pass];
      run.count = random() % 3;  // 0: it reads none
      run.block = random() % (kBlocks - run.count + 1);
      run.host = random() % (kBlocks - run.count + 1);
      world.prefetcher->begin_pass(begun_there ? stream : 0, run.count == 0 ? std::vector<BlockRun>{} : std::vector{run});
      const LayerId left = pass % 3 == 1 && random() % 2 == 0 ? 4 : kLayers;  // abandoned between wait and done
      for (LayerId layer = 0; layer < kLayers; ++layer) {
        Bytes& target = seen[pass * kLayers + layer];
        if (layer > left) {
          std::fill(target.begin(), target.end(), World::tag(layer));
          continue;
        }
        if (begun_there) {
          world.wait(layer);
        } else {
          CHECK(world.prefetcher->wait(layer, stream));
        }
        world.copy(stream, target.data(), layer);
        Bytes& part = parts[pass * kLayers + layer];
        part.resize(run.count * kUnit);
        if (run.count != 0) backend.copy(stream, part.data(), world.shown[layer % 2].data() + run.block * kUnit, part.size());
        if (layer < left) world.prefetcher->done(layer, begun_there ? 0 : stream);
      }
      if (left == kLayers || pass + 1 == kPasses) world.prefetcher->end_pass();
    }
    worker.join();
    backend.record(turn, last);
    CHECK(backend.synchronize(turn, std::chrono::seconds(60)));
    backend.destroy_event(after);
    for (std::size_t use = 0; use < seen.size(); ++use) {
      CHECK(std::count(seen[use].begin(), seen[use].end(), World::tag(use % kLayers)) == kBytes);
      for (std::size_t at = 0; at < parts[use].size(); ++at) {
        CHECK(parts[use][at] == World::block_tag(use % kLayers, runs[use / kLayers].host + at / kUnit));
      }
    }
  }
  looking.stop();
  CHECK(world.prefetcher->stats().misses == 0);
  world.prefetcher->drain();
  world.prefetcher.reset();
  backend.destroy_event(turn);
  for (const StreamHandle stream : streams) backend.destroy_stream(stream);
  CHECK(backend.usage().streams == 0 && backend.usage().events == 0);
}

// Two threads compute the same layers, neither knowing how far the other is.
TEST(two_computing_threads) {
  World world(8);
  world.configuration.streamed = {0, 2, 3, 5, 7};
  world.configuration.ring = {world.ring[0].data(), world.ring[1].data()};
  world.prefetcher->configure(world.configuration);
  const auto body = [&](std::size_t) {
    for (int use = 0; use < 400; ++use) {
      const auto layer = static_cast<LayerId>(use % 8);
      for (;;) {
        try {
          world.wait(layer);
          break;
        } catch (const Error& error) {
          CHECK(error.kind() == ErrorKind::invalid_state);  // the other one still reads from this buffer
          std::this_thread::yield();
        }
      }
      world.read(layer);
      world.prefetcher->done(layer);
    }
  };
  world.prefetcher->begin_pass();
  on_threads(2, body);
  world.prefetcher->end_pass();
}

}  // namespace
