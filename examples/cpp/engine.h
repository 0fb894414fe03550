// What an engine does with remap; of this example it is the file to read. The engine has everything left out that is not
// remap: its layers are bytes, its kernels copy and fill, its KV cache is pages.
//
//   Engine()      one arena for weights and KV cache: layers, filled from master copies in host memory, a ring, a KV region
//   pass()        what brackets a forward pass, and each layer in it
//   give_to_kv()  layer 3's pages become KV cache; layers 1 and 3 are streamed through one ring buffer from then on
//   give_back()   the pages become weights again
//
// Every call of the library may throw remap::Error, and has changed nothing then. main.cpp shows how they are caught.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "remap/arena.h"       // pages, regions, owners
#include "remap/backends.h"    // make_host_backend, make_cuda_backend
#include "remap/error.h"       // every error of the library
#include "remap/executor.h"    // applies plans
#include "remap/plan.h"        // what a plan is
#include "remap/prefetcher.h"  // streams layers

namespace example {

inline constexpr remap::TenantId kTenant = 1;  // one attached model; any number that is not kNobody
inline constexpr remap::LayerId kLayers = 4;
inline constexpr std::size_t kLayerPages = 3, kFirstKvPages = 2;
// Both are streamed. One lends its pages to the ring, so what is gained is the pages of the other.
inline constexpr remap::LayerId kRingLayer = 1, kGivenLayer = 3;

// The byte at each place of a layer's weights: it tells the layer and the place.
inline std::byte weight(remap::LayerId layer, std::size_t at) {
  return static_cast<std::byte>(layer * 61 + at * 7 + at / 253 + 1);
}

// Memory that copies read at full speed: page-locked on cuda. (A weights file that is mapped already: register_host().)
inline std::shared_ptr<std::byte> host_bytes(const std::shared_ptr<remap::Backend>& backend, std::size_t bytes) {
  return {backend->allocate_host(bytes), [backend, bytes](std::byte* at) {
            try {
              backend->free_host(at, bytes);
            } catch (const remap::Error&) {  // the device has failed: a destructor has nobody to tell
            }
          }};
}

// The two kinds of steps that plans are made of.
inline remap::Step set_owner(std::vector<remap::PageId> pages, remap::Owner from, remap::Owner to) {
  remap::Step step;
  step.kind = remap::Step::Kind::set_owner;
  step.set_owner = {std::move(pages), from, to, kTenant};
  return step;
}
inline remap::Step point(remap::RegionId region, std::vector<remap::PageId> pages, bool deferred, remap::LayerId layer = 0) {
  remap::Step step;
  step.kind = remap::Step::Kind::point;
  step.point = {region, 0, std::move(pages), deferred, layer};
  return step;
}

// The executor and the prefetcher do not know each other: this tells the one what the other's worker has done.
class Released final : public remap::PointObserver {
 public:
  explicit Released(std::shared_ptr<remap::Prefetcher> prefetcher) : prefetcher_(std::move(prefetcher)) {}
  bool released(std::uint32_t layer, const std::function<bool()>& current) noexcept override {
    return prefetcher_->released(layer, current);
  }
  bool failed(std::uint32_t layer, std::exception_ptr error, const std::function<bool()>& current) noexcept override {
    return prefetcher_->failed(layer, error, current);
  }

 private:
  std::shared_ptr<remap::Prefetcher> prefetcher_;
};

struct Layer {
  std::size_t bytes = 0;
  std::shared_ptr<std::byte> master;  // the layer's bytes in host memory: read again and again, never written
  std::vector<remap::PageId> home;    // the pages that it owns while it is resident
  remap::RegionId region = 0;
  std::byte* address = nullptr;     // its tensors live here. Never changes, whatever stands behind it
  std::shared_ptr<std::byte> seen;  // what the last pass read there
};

// Members are destroyed from the last to the first: the executor's worker stops, the prefetcher's copies end, the arena unmaps,
// and only then does the memory go that copies read.
class Engine {
 public:
  std::shared_ptr<remap::Backend> backend;
  std::size_t page_bytes = std::size_t{64} << 10;
  std::vector<Layer> layers{kLayers};
  std::shared_ptr<remap::Arena> arena;
  remap::RegionId ring = 0, kv = 0;
  std::shared_ptr<remap::Prefetcher> prefetcher;
  std::unique_ptr<remap::Executor> executor;
  remap::StreamHandle stream = 0;   // computation's. 0: the calling thread computes, as on a CPU
  remap::EventHandle computed = 0;  // see mark()

  // device: "cpu" or "cuda:N". mode: strict maps only what is owned, so that a stray access faults; for debugging.
  Engine(const std::string& device, remap::Mode mode) {
    const std::size_t pages = kLayers * kLayerPages + kFirstKvPages;  // all the device memory that this engine will ever use
    if (device == "cpu") {
      backend = remap::make_host_backend({pages * page_bytes, page_bytes, 1});
    } else {
      remap::CudaOptions options;  // libcuda is loaded here: the program was linked without it
      options.device = std::stoi(device.substr(5));
      backend = remap::make_cuda_backend(options);
      page_bytes = std::max(page_bytes, backend->granularity());  // 2 MiB on a GPU
      stream = backend->create_stream();  // an engine that has a CUstream: adopt_stream()
    }
    computed = backend->create_event(false);
    // Creates all pages now. Nothing that comes later creates or destroys one.
    arena = std::make_shared<remap::Arena>(backend, remap::ArenaOptions{pages * page_bytes, page_bytes, mode});
    executor = std::make_unique<remap::Executor>(arena);

    const remap::StreamHandle loading = backend->create_stream();
    std::vector<remap::LayerMemory> memory;
    for (remap::LayerId i = 0; i < kLayers; ++i) {
      Layer& layer = layers[i];
      layer.bytes = kLayerPages * page_bytes - std::size_t{100} * i;  // need not fill its last page
      layer.master = host_bytes(backend, layer.bytes);
      layer.seen = host_bytes(backend, layer.bytes);
      for (std::size_t at = 0; at < layer.bytes; ++at) layer.master.get()[at] = weight(i, at);
      layer.home = arena->take(kLayerPages, remap::Owner::params, kTenant);
      layer.region = arena->add_layer_region(kTenant, "layer." + std::to_string(i), layer.home);
      layer.address = arena->address(layer.region);
      backend->copy(loading, layer.address, layer.master.get(), layer.bytes);
      memory.push_back({layer.address, layer.master.get(), layer.bytes});
    }
    backend->record(computed, loading);
    backend->synchronize(computed, std::chrono::nanoseconds::max());  // throws if a copy has failed
    backend->destroy_stream(loading);
    prefetcher = std::make_shared<remap::Prefetcher>(backend, memory);

    // The ring's own view: one buffer. It shows the pages that it will be made of from the start, so that nothing has to be
    // mapped when streaming begins.
    ring = arena->add_ring_region(kTenant, kLayerPages);
    arena->designate_ring(ring, 0, layers[kRingLayer].home);
    // Where a layer will be pointed can be made ready as well: pointing is one exchange then (on the host; no-op on cuda).
    if (mode == remap::Mode::aliased) arena->prepare_view(layers[kGivenLayer].region, layers[kRingLayer].home);

    // The KV region has a place for every page that it may ever be given, in the order in which they would be: first what is
    // free, then what can be taken from layers. Whether a place may be used is a question of who owns its page.
    const std::vector<remap::PageId> first = arena->free_pages();
    std::vector<remap::PageId> places = first;
    places.insert(places.end(), layers[kGivenLayer].home.begin(), layers[kGivenLayer].home.end());
    kv = arena->add_kv_region(kTenant, places.size());
    arena->designate(kv, 0, places);
    executor->apply({arena->epoch(), {set_owner(first, remap::Owner::free, remap::Owner::kv)}}, {mark(), stream});
    executor->zero_due();  // whatever the pages held before, also of a process that has ended
    executor->commit(nullptr);
  }
  ~Engine() {
    try {
      if (stream != 0) backend->destroy_stream(stream);  // waits for its work: the arena unmaps without waiting for anybody
      executor->stop();  // its worker may be waiting for the event
      backend->destroy_event(computed);
    } catch (const remap::Error&) {  // as in host_bytes
    }
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // One forward pass. A layer that is resident costs one load in wait() and done(), so every layer has them.
  void pass() {
    prefetcher->begin_pass(stream);
    for (remap::LayerId i = 0; i < kLayers; ++i) {
      prefetcher->wait(i);  // the layer's bytes are in place: now, or, on a stream, when the stream gets here
      read(layers[i].seen.get(), layers[i].address, layers[i].bytes);
      prefetcher->done(i);  // behind this its ring buffer may be overwritten
    }
    prefetcher->end_pass();
  }

  // Between passes. Returns the plan, so that main.cpp can try it once more.
  remap::Plan give_to_kv() {
    const std::vector<remap::PageId>& buffer = layers[kRingLayer].home;
    const Layer& given = layers[kGivenLayer];
    const remap::Plan plan{arena->epoch(),  // made for this state of the arena, and refused in any other
                           {set_owner(buffer, remap::Owner::params, remap::Owner::ring),
                            point(ring, buffer, false),
                            point(given.region, buffer, true, kGivenLayer),  // layer 1's region shows these pages already
                            set_owner(given.home, remap::Owner::params, remap::Owner::kv)}};
    const remap::Applied applied = executor->apply(plan, {mark(), stream});
    // The pages are KV now, and may be written before a single layer has moved. Own ones still hold the layer's bytes; one
    // that comes from another tenant would be zeroed before it may be written (`zero_due()`).
    write_kv(kFirstKvPages, kLayerPages, 0xB2);

    remap::StreamConfiguration streaming;
    streaming.streamed = {kRingLayer, kGivenLayer};
    streaming.ring = {arena->address(ring)};
    streaming.ring_bytes = kLayerPages * page_bytes;
    streaming.fresh = true;  // what the buffer holds was not brought there by the prefetcher
    settle(std::move(streaming), applied);
    return plan;
  }

  // Between passes. No block of the KV cache may be live in these pages: an engine has moved them out, or preempted requests.
  void give_back() {
    const Layer& given = layers[kGivenLayer];
    executor->drain();    // the worker has done what the last plan left to it,
    prefetcher->drain();  // and no copy is under way into pages that are about to change hands
    const remap::Applied applied = executor->apply(
        {arena->epoch(),
         {set_owner(given.home, remap::Owner::kv, remap::Owner::params),
          set_owner(layers[kRingLayer].home, remap::Owner::ring, remap::Owner::params),
          point(given.region, given.home, true, kGivenLayer)}},
        {mark(), stream});
    remap::StreamConfiguration resident;  // nothing streams any more
    // Both homes hold something else until they were loaded, once.
    resident.home = {{kRingLayer, 0, layers[kRingLayer].bytes}, {kGivenLayer, 0, given.bytes}};
    settle(std::move(resident), applied);
  }

  // An event behind all that computation has enqueued. 0 where the calling thread computes: nothing is in flight then.
  remap::EventHandle mark() {
    if (stream == 0) return 0;
    backend->record(computed, stream);
    return computed;
  }
  void finish() {
    if (stream != 0) backend->synchronize(mark(), std::chrono::nanoseconds::max());
  }

  // Stand-ins for kernels. read: `to` is host memory.
  void read(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (stream == 0) {
      std::memcpy(to, from, bytes);
    } else {
      backend->copy(stream, to, from, bytes);
    }
  }
  void write_kv(std::size_t first_page, std::size_t pages, std::uint8_t value) {
    std::byte* at = arena->address(kv) + first_page * page_bytes;
    if (stream == 0) {
      std::memset(at, value, pages * page_bytes);
    } else {
      backend->fill(stream, at, value, pages * page_bytes);
    }
  }

 private:
  // What comes behind every apply(): say what streams from now on, then make the plan final.
  void settle(remap::StreamConfiguration configuration, const remap::Applied& applied) {
    // The worker points layer 3's region elsewhere while we go on; wait() blocks until it has. (strict: apply() has done it.)
    if (applied.points_deferred != 0) configuration.held = {kGivenLayer};
    configuration.after = mark();  // copies, and the worker, come behind the last reader of what they change
    executor->zero_due();  // pages that were another tenant's: here there is none
    prefetcher->configure(configuration);
    executor->commit(std::make_shared<Released>(prefetcher), configuration.after);
  }
};

}  // namespace example
