// A Prefetcher over some layers of four bytes on the fake backend, with every layer's bytes telling whose they are.
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

inline constexpr std::size_t kBytes = 4;
inline constexpr std::size_t kRing = 4;
using Buffer = std::array<std::byte, kBytes>;

inline constexpr std::chrono::nanoseconds kBriefly{1};

struct World {
  std::vector<Buffer> masters, regions, ring;
  std::shared_ptr<FakeBackend> backend;
  std::unique_ptr<Prefetcher> prefetcher;
  std::vector<LayerId> streamed;
  std::vector<std::byte*> views;  // the ring as configured

  explicit World(std::size_t layers, std::uint64_t seed = 1, std::size_t chunk_bytes = 0)
      : masters(layers), regions(layers), ring(kRing), backend(std::make_shared<FakeBackend>(seed)) {
    std::vector<LayerMemory> memory;
    for (std::size_t i = 0; i < layers; ++i) {
      masters[i].fill(tag(i));
      regions[i].fill(tag(i));
      memory.push_back({regions[i].data(), masters[i].data(), kBytes});
    }
    for (Buffer& buffer : ring) buffer.fill(std::byte{0xDF});
    prefetcher = std::make_unique<Prefetcher>(backend, memory, chunk_bytes);
  }

  static std::byte tag(std::size_t layer) { return static_cast<std::byte>(layer + 1); }

  StreamConfiguration configuration(std::vector<LayerId> layers, std::size_t buffers) {
    StreamConfiguration c;
    c.streamed = std::move(layers);
    for (std::size_t b = 0; b < buffers; ++b) c.ring.push_back(ring[b].data());
    c.ring_bytes = kBytes;
    return c;
  }
  void configure(const StreamConfiguration& c) {
    prefetcher->configure(c);
    streamed = c.streamed;
    views = c.ring;
  }
  // Where a layer's tensors are: in its ring buffer or at home.
  const std::byte* place(LayerId layer) const {
    const auto at = std::find(streamed.begin(), streamed.end(), layer);
    if (at == streamed.end()) return regions[layer].data();
    return views[static_cast<std::size_t>(at - streamed.begin()) % views.size()];
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
  void compute(LayerId layer, StreamHandle stream) {
    if (stream != 0) {
      backend->compute(stream, place(layer), kBytes, tag(layer));
    } else {
      backend->compute_now(place(layer), kBytes, tag(layer));
    }
  }
  void use(LayerId layer, StreamHandle stream) {
    wait(layer, stream);
    compute(layer, stream);
    prefetcher->done(layer, stream);
  }
  // Each layer with the stream given, in a pass begun without one.
  void pass(StreamHandle stream) {
    prefetcher->begin_pass();
    for (LayerId layer = 0; layer < masters.size(); ++layer) use(layer, stream);
    prefetcher->end_pass();
  }
  // In a pass begun on the stream.
  void use_on(LayerId layer, StreamHandle stream) {
    CHECK(prefetcher->wait(layer, 0, std::chrono::nanoseconds(0)));
    compute(layer, stream);
    prefetcher->done(layer);
  }
  // A pass begun on the stream: nothing in it names the stream again. Nothing may block.
  std::uint64_t pass_on(StreamHandle stream) {
    const std::uint64_t before = backend->waited;
    prefetcher->begin_pass(stream);
    for (LayerId layer = 0; layer < masters.size(); ++layer) use_on(layer, stream);
    const std::uint64_t number = prefetcher->end_pass();
    CHECK(backend->waited == before);
    return number;
  }
  std::vector<LayerId> copied() const {
    std::vector<LayerId> layers;
    for (const auto& [to, from] : backend->copies) layers.push_back(std::to_integer<LayerId>(*from) - 1);
    return layers;
  }
};

}  // namespace remap::testing
