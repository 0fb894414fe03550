// The Prefetcher on the host backend's real threads, for the sanitizers: every byte that a computation reads is its layer's.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <thread>

#include "check.h"
#include "remap/backends.h"
#include "remap/prefetcher.h"

using remap::Backend;
using remap::Error;
using remap::ErrorKind;
using remap::LayerId;
using remap::LayerMemory;
using remap::Prefetcher;
using remap::StreamConfiguration;
using remap::StreamHandle;

namespace {

constexpr std::size_t kBytes = 48 << 10;
constexpr std::size_t kRing = 3;
using Bytes = std::vector<std::byte>;

struct World {
  std::vector<Bytes> masters, regions, ring;
  std::shared_ptr<Backend> backend;
  std::unique_ptr<Prefetcher> prefetcher;
  StreamConfiguration configuration;

  explicit World(std::size_t layers) {
    remap::HostOptions options;
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
  }

  static std::byte tag(std::size_t layer) { return static_cast<std::byte>(layer + 1); }

  // Where a streamed layer's tail begins.
  static std::size_t offset_of(const StreamConfiguration& c) { return c.offsets.empty() ? 0 : c.offsets.front(); }
  static bool streams(const StreamConfiguration& c, LayerId layer) {
    return std::binary_search(c.streamed.begin(), c.streamed.end(), layer);
  }
  // Streams a random set, or slices of it; what was streamed before is reloaded. Between passes, with nothing running: poisons
  // what is free.
  void change(std::mt19937_64& random, bool hold) {
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
    if (hold) {
      for (LayerId layer = 0; layer < masters.size(); ++layer) {
        if (random() % 3 == 0) next.held.push_back(layer);
      }
    }
    prefetcher->drain();
    for (const LayerId layer : next.streamed) {
      std::fill(regions[layer].begin() + static_cast<std::ptrdiff_t>(has), regions[layer].end(), std::byte{0xDF});
    }
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
  void wait(LayerId layer) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!prefetcher->wait(layer, 0, std::chrono::milliseconds(5))) CHECK(std::chrono::steady_clock::now() < limit);
  }
};

// Runs `body` in a thread and hands on what it throws.
class Thread {
 public:
  explicit Thread(std::function<void()> body)
      : thread_([this, body = std::move(body)] {
          try {
            body();
          } catch (...) {
            error_ = std::current_exception();
          }
        }) {}
  void join() {
    thread_.join();
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::exception_ptr error_;
  std::thread thread_;
};

void host_passes_beside_observers_and_a_worker() {
  World world(9);
  std::mt19937_64 random(1);
  std::atomic<bool> stop{false};
  Thread observer([&] {
    while (!stop) {
      static_cast<void>(world.prefetcher->stats());
      static_cast<void>(world.prefetcher->ready(4));
      static_cast<void>(world.prefetcher->in_pass());
      static_cast<void>(world.prefetcher->unwaited());
      world.prefetcher->drain();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  });
  std::exception_ptr error;
  try {
    for (int round = 0; round < 60; ++round) {
      world.change(random, true);
      const std::vector<LayerId> held = world.configuration.held;
      Thread worker([&world, held] {
        for (const LayerId layer : held) world.prefetcher->released(layer);
      });
      for (int pass = 0; pass < 4; ++pass) {
        const bool abandon = random() % 4 == 0;
        world.prefetcher->begin_pass();
        for (LayerId layer = 0; layer < world.masters.size(); ++layer) {
          world.wait(layer);
          world.read(layer);
          if (abandon && layer == 5) break;
          world.prefetcher->done(layer);
        }
        CHECK(abandon || world.prefetcher->unwaited().empty());
        if (!abandon || pass == 3) world.prefetcher->end_pass();
      }
      worker.join();
      if (round % 10 == 0) world.prefetcher->drain();
    }
  } catch (...) {
    error = std::current_exception();
  }
  stop = true;
  observer.join();
  if (error) std::rethrow_exception(error);
  const remap::PrefetchStats stats = world.prefetcher->stats();
  CHECK(stats.misses == 0);
  CHECK(stats.copies > 0);
  CHECK(stats.passes + stats.abandoned == 240);
}

void many_passes_in_flight_on_a_stream() {
  World world(7);
  std::mt19937_64 random(2);
  const StreamHandle stream = world.backend->create_stream();
  const remap::EventHandle end = world.backend->create_event(true);
  for (int round = 0; round < 25; ++round) {
    world.change(random, false);
    // The computation of a layer is a copy of what it sees.
    std::vector<Bytes> seen;
    for (int pass = 0; pass < 6; ++pass) {
      for (LayerId layer = 0; layer < 7; ++layer) seen.emplace_back(kBytes);
    }
    for (std::size_t use = 0; use < seen.size(); ++use) {
      const auto layer = static_cast<LayerId>(use % 7);
      if (layer == 0) world.prefetcher->begin_pass();
      CHECK(world.prefetcher->wait(layer, stream));
      const std::size_t head = world.head_of(layer);
      if (head > 0) world.backend->copy(stream, seen[use].data(), world.regions[layer].data(), head);
      if (head < kBytes) world.backend->copy(stream, seen[use].data() + head, world.place(layer) + head, kBytes - head);
      world.prefetcher->done(layer, stream);
      if (layer == 6) world.prefetcher->end_pass();
    }
    world.backend->record(end, stream);
    CHECK(world.backend->synchronize(end, std::chrono::seconds(60)));
    for (std::size_t use = 0; use < seen.size(); ++use) {
      for (const std::byte byte : seen[use]) CHECK(byte == World::tag(use % 7));
    }
  }
  CHECK(world.prefetcher->stats().misses == 0);
  world.prefetcher->drain();
  world.prefetcher.reset();
  CHECK(world.backend->usage().streams == 1);
  CHECK(world.backend->usage().events == 1);
  world.backend->destroy_event(end);
  world.backend->destroy_stream(stream);
}

// Passes begun on two streams in turn, changes while the streams are busy (other owners write at once to what they get), and
// a worker that releases regions behind the change's event. Nothing blocks the engine but a held layer.
void passes_on_streams_with_changes_under_way() {
  World world(7);
  std::mt19937_64 random(3);
  Backend& backend = *world.backend;
  const StreamHandle streams[] = {backend.create_stream(), backend.create_stream()};
  const remap::EventHandle turn = backend.create_event(true);
  StreamHandle last = streams[0];
  std::atomic<bool> stop{false};
  Thread observer([&] {
    while (!stop) {
      static_cast<void>(world.prefetcher->stats());
      static_cast<void>(world.prefetcher->take_timings());
      static_cast<void>(world.prefetcher->uses_streams());
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  });
  std::exception_ptr error;
  try {
    for (int round = 0; round < 40; ++round) {
      StreamConfiguration next;
      next.ring_bytes = kBytes;
      for (LayerId layer = 0; layer < 7; ++layer) {
        if (random() % 2 == 0) next.streamed.push_back(layer);
      }
      if (!next.streamed.empty()) {
        for (std::size_t b = random() % kRing + 1; b > 0; --b) next.ring.push_back(world.ring[b - 1].data());
      }
      for (const LayerId layer : world.configuration.streamed) {
        if (!std::binary_search(next.streamed.begin(), next.streamed.end(), layer)) next.home.push_back({layer, 0, kBytes});
      }
      for (LayerId layer = 0; layer < 7; ++layer) {
        if (random() % 3 == 0) next.held.push_back(layer);
      }
      backend.record(turn, world.prefetcher->copy_stream());
      backend.stream_wait(last, turn);
      const remap::EventHandle after = backend.create_event(true);
      backend.record(after, last);
      next.after = after;
      for (const LayerId layer : next.streamed) backend.fill(last, world.regions[layer].data(), 0xDF, kBytes);
      world.prefetcher->configure(next);
      world.configuration = next;
      Thread worker([&world, &backend, after, held = next.held] {
        CHECK(backend.synchronize(after, std::chrono::seconds(60)));
        for (const LayerId layer : held) world.prefetcher->released(layer);
      });
      std::vector<Bytes> seen;
      for (int use = 0; use < 3 * 7; ++use) seen.emplace_back(kBytes);
      for (int pass = 0; pass < 3; ++pass) {
        const StreamHandle stream = streams[random() % 2];
        if (stream != last) {
          backend.record(turn, last);
          backend.stream_wait(stream, turn);
          last = stream;
        }
        world.prefetcher->begin_pass(stream);
        const LayerId left = pass == 1 && random() % 2 == 0 ? 4 : 7;  // abandoned between wait and done
        for (LayerId layer = 0; layer < 7 && layer <= left; ++layer) {
          world.wait(layer);
          backend.copy(stream, seen[static_cast<std::size_t>(pass) * 7 + layer].data(), world.place(layer), kBytes);
          if (layer < left) world.prefetcher->done(layer);
        }
        for (LayerId layer = left + 1; layer < 7; ++layer) {
          std::fill(seen[static_cast<std::size_t>(pass) * 7 + layer].begin(),
                    seen[static_cast<std::size_t>(pass) * 7 + layer].end(), World::tag(layer));
        }
        if (left == 7 || pass == 2) world.prefetcher->end_pass();
      }
      worker.join();
      backend.record(turn, last);
      CHECK(backend.synchronize(turn, std::chrono::seconds(60)));
      backend.destroy_event(after);
      for (std::size_t use = 0; use < seen.size(); ++use) {
        for (const std::byte byte : seen[use]) CHECK(byte == World::tag(use % 7));
      }
    }
  } catch (...) {
    error = std::current_exception();
  }
  stop = true;
  observer.join();
  if (error) std::rethrow_exception(error);
  CHECK(world.prefetcher->stats().misses == 0);
  world.prefetcher.reset();
  backend.destroy_event(turn);
  for (const StreamHandle stream : streams) backend.destroy_stream(stream);
  CHECK(backend.usage().streams == 0 && backend.usage().events == 0);
}

// Two threads compute the same layers, neither knowing how far the other is.
void two_computing_threads() {
  World world(8);
  world.configuration.streamed = {0, 2, 3, 5, 7};
  world.configuration.ring = {world.ring[0].data(), world.ring[1].data()};
  world.prefetcher->configure(world.configuration);
  const auto body = [&world] {
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
  Thread one(body);
  Thread two(body);
  one.join();
  two.join();
  world.prefetcher->end_pass();
}

}  // namespace

int main() {
  RUN(host_passes_beside_observers_and_a_worker);
  RUN(many_passes_in_flight_on_a_stream);
  RUN(passes_on_streams_with_changes_under_way);
  RUN(two_computing_threads);
  return remap::testing::failures();
}
