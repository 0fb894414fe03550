// A Prefetcher over some layers of a few bytes on the fake backend, with every layer's bytes telling whose they are. A
// page is one byte. Whole layers stream, or the last bytes of each, aligned to the end of the ring's buffers.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "check.h"
#include "fake_backend.h"
#include "remap/prefetcher.h"

namespace remap::testing {

inline constexpr std::size_t kBytes = 6;  // of the largest layer and of a buffer of the ring
inline constexpr std::size_t kRing = 4;
inline constexpr std::byte kOther{0xEE};  // what another owner writes into pages that it has been given
using Buffer = std::array<std::byte, kBytes>;

inline constexpr std::chrono::nanoseconds kNow{0}, kBriefly{1};

// Who reads: the calling thread, a stream named at every layer, or one on which the pass was begun.
enum class Reader { host, named, begun };
inline constexpr Reader kReaders[] = {Reader::host, Reader::named, Reader::begun};

inline constexpr std::size_t kUnit = 2;         // bytes of a KV block in a range
inline constexpr std::size_t kShown = 5;        // KV blocks that stream
inline constexpr std::size_t kHosts = 9;        // host blocks
inline constexpr std::size_t kRanges = 2;       // of the KV region, by layer
inline constexpr std::uint32_t kBlockBuffers = 2;

struct World {
  std::vector<std::size_t> sizes;
  std::vector<Buffer> masters, regions, ring;
  std::shared_ptr<FakeBackend> backend;
  std::unique_ptr<Prefetcher> prefetcher;
  std::vector<LayerId> streamed;
  std::vector<std::byte*> views;  // the ring as configured
  std::size_t tail = kBytes;      // of each streamed layer, so many of its last bytes stream

  // By layer and range: host blocks. By buffer and range: what all layers of the buffer show.
  std::vector<std::array<std::array<std::byte, kHosts * kUnit>, kRanges>> hosts;
  std::array<std::array<std::array<std::byte, kShown * kUnit>, kRanges>, kBlockBuffers> shown;
  std::vector<BlockRun> reading;  // the present pass's

  explicit World(std::size_t layers, std::uint64_t seed = 1, std::size_t chunk_bytes = 0)
      : World(std::vector<std::size_t>(layers, kBytes), seed, chunk_bytes) {}
  explicit World(std::vector<std::size_t> layer_sizes, std::uint64_t seed = 1, std::size_t chunk_bytes = 0)
      : sizes(std::move(layer_sizes)),
        masters(sizes.size()),
        regions(sizes.size()),
        ring(kRing),
        backend(std::make_shared<FakeBackend>(seed)) {
    std::vector<LayerMemory> memory;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      masters[i].fill(tag(i));
      regions[i].fill(tag(i));
      memory.push_back({regions[i].data(), masters[i].data(), sizes[i]});
    }
    for (Buffer& buffer : ring) buffer.fill(kOther);
    prefetcher = std::make_unique<Prefetcher>(backend, memory, chunk_bytes);
  }

  static std::byte block_tag(std::size_t layer, std::size_t range, std::size_t host) {
    return static_cast<std::byte>((layer * kRanges + range) * kHosts + host + 40);
  }
  void stream_blocks() {
    BlockLayout layout;
    layout.unit_bytes = kUnit;
    layout.buffers = kBlockBuffers;
    hosts.resize(sizes.size());
    for (auto& buffer : shown) {
      for (auto& range : buffer) range.fill(kOther);
    }
    for (std::size_t layer = 0; layer < sizes.size(); ++layer) {
      std::vector<BlockRange>& ranges = layout.layers.emplace_back();
      for (std::size_t r = 0; r < kRanges; ++r) {
        for (std::size_t at = 0; at < kHosts * kUnit; ++at) hosts[layer][r][at] = block_tag(layer, r, at / kUnit);
        ranges.push_back({shown[layer % kBlockBuffers][r].data(), hosts[layer][r].data()});
      }
    }
    prefetcher->stream_blocks(layout);
  }
  void begin(StreamHandle stream, std::vector<BlockRun> blocks, EventHandle filled = 0) {
    prefetcher->begin_pass(stream, blocks, filled);
    reading = std::move(blocks);
  }

  static std::byte tag(std::size_t layer) { return static_cast<std::byte>(layer + 1); }
  std::vector<LayerId> all() const {
    std::vector<LayerId> layers(sizes.size());
    for (LayerId layer = 0; layer < layers.size(); ++layer) layers[layer] = layer;
    return layers;
  }
  static bool is_in(const std::vector<LayerId>& layers, LayerId layer) {
    return std::find(layers.begin(), layers.end(), layer) != layers.end();
  }
  std::size_t tail_of(LayerId layer) const { return is_in(streamed, layer) ? std::min(tail, sizes[layer]) : 0; }

  // These layers, whole or their last `bytes` bytes.
  StreamConfiguration configuration(std::vector<LayerId> layers, std::size_t buffers, std::size_t bytes = kBytes) {
    StreamConfiguration c;
    if (bytes == 0) layers.clear();
    for (const LayerId layer : layers) {
      if (bytes == kBytes) break;  // whole layers need no offsets
      const std::size_t has = std::min(bytes, sizes[layer]);
      c.offsets.push_back(sizes[layer] - has);
      c.places.push_back(kBytes - has);
    }
    c.streamed = std::move(layers);
    for (std::size_t b = 0; b < buffers; ++b) c.ring.push_back(ring[b].data());
    c.ring_bytes = kBytes;
    return c;
  }
  // The same, coming from what is configured: the parts that come home, and held while regions are re-pointed.
  StreamConfiguration change(const std::vector<LayerId>& layers, std::size_t buffers, std::size_t bytes) {
    StreamConfiguration c = configuration(layers, buffers, bytes);
    for (LayerId layer = 0; layer < sizes.size(); ++layer) {
      const std::size_t has = is_in(c.streamed, layer) ? std::min(bytes, sizes[layer]) : 0, had = tail_of(layer);
      if (has < had) c.home.push_back({layer, sizes[layer] - had, had - has});
      if (has != had) c.held.push_back(layer);
    }
    return c;
  }
  void configure(const StreamConfiguration& c, std::size_t bytes = kBytes) {
    prefetcher->configure(c);
    streamed = c.streamed;
    views = c.ring;
    tail = bytes;
  }
  void release(const StreamConfiguration& c) {
    for (const LayerId layer : c.held) prefetcher->released(layer);
  }
  // The last bytes of all layers stream.
  void slice(std::size_t bytes, std::size_t buffers) {
    const StreamConfiguration c = change(all(), buffers, bytes);
    configure(c, bytes);
    release(c);
  }
  // What is not at home, and what is not shown of the ring, has other owners.
  template <typename Body>
  void for_others(const StreamConfiguration& c, std::size_t bytes, Body&& body) {
    for (const LayerId layer : c.streamed) {
      const std::size_t has = std::min(bytes, sizes[layer]);
      body(regions[layer].data() + sizes[layer] - has, has);
    }
    for (Buffer& buffer : ring) {
      const bool shown = !c.streamed.empty() && std::find(c.ring.begin(), c.ring.end(), buffer.data()) != c.ring.end();
      if (!shown || bytes < kBytes) body(buffer.data(), shown ? kBytes - bytes : kBytes);
    }
  }

  void wait(LayerId layer, StreamHandle stream) {
    if (stream != 0) {
      CHECK(prefetcher->wait(layer, stream));
      return;
    }
    for (int tries = 0; !prefetcher->wait(layer, 0, kBriefly); ++tries) {
      CHECK(tries < 100000);
      backend->random_steps(1);
    }
  }
  void read(StreamHandle stream, const std::byte* at, std::size_t bytes, std::byte expected) {
    if (bytes == 0) return;
    if (stream != 0) {
      backend->compute(stream, at, bytes, expected);
    } else {
      backend->compute_now(at, bytes, expected);
    }
  }
  // Where a layer's tensors are: the head at home, the tail in the layer's buffer.
  void compute(LayerId layer, StreamHandle stream) {
    for (const BlockRun& run : reading) {
      for (std::size_t i = 0; i < run.count * kRanges; ++i) {
        const std::size_t r = i % kRanges, n = i / kRanges;
        const auto& buffer = shown[layer % kBlockBuffers][r];
        read(stream, buffer.data() + (run.block + n) * kUnit, kUnit, block_tag(layer, r, run.host + n));
      }
    }
    const std::size_t away = tail_of(layer);
    read(stream, regions[layer].data(), sizes[layer] - away, tag(layer));
    if (away == 0) return;
    const auto at = static_cast<std::size_t>(std::find(streamed.begin(), streamed.end(), layer) - streamed.begin());
    read(stream, views[at % views.size()] + kBytes - (tail == kBytes ? kBytes : away), away, tag(layer));
  }
  void use(LayerId layer, StreamHandle stream) {
    wait(layer, stream);
    compute(layer, stream);
    prefetcher->done(layer, stream);
  }
  // Each layer with the stream given, in a pass begun without one.
  void pass(StreamHandle stream) {
    begin(0, {});
    for (LayerId layer = 0; layer < masters.size(); ++layer) use(layer, stream);
    prefetcher->end_pass();
  }
  // In a pass begun on the stream.
  void use_on(LayerId layer, StreamHandle stream) {
    CHECK(prefetcher->wait(layer, 0, kNow));
    compute(layer, stream);
    prefetcher->done(layer);
  }
  // A pass begun on the stream: nothing in it names the stream again. Nothing may block.
  std::uint64_t pass_on(StreamHandle stream) {
    const std::uint64_t before = backend->waited;
    begin(stream, {});
    for (LayerId layer = 0; layer < masters.size(); ++layer) use_on(layer, stream);
    const std::uint64_t number = prefetcher->end_pass();
    CHECK(backend->waited == before);
    return number;
  }
  // May block, if the copy stream has to be replaced.
  void pass_by(Reader reader, StreamHandle stream) {
    if (reader != Reader::begun) return pass(stream);
    begin(stream, {});
    for (LayerId layer = 0; layer < masters.size(); ++layer) use_on(layer, stream);
    prefetcher->end_pass();
  }
  std::vector<LayerId> copied() const {
    std::vector<LayerId> layers;
    for (const auto& [to, from] : backend->copies) layers.push_back(std::to_integer<LayerId>(*from) - 1);
    return layers;
  }
};

}  // namespace remap::testing
