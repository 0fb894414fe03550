// The Prefetcher: brings streamed layers into the ring just before they are needed. It copies; it never maps.
//
// One Prefetcher a tenant. The engine brackets each pass (begin_pass, end_pass) and each layer (wait, done); the executor
// tells it between passes what is streamed (configure). LayerSchedule (cpp/schedule/layer_schedule.h) decides which copy
// may be issued when, without knowing any device; this class issues it on its own copy stream and orders everything by
// events.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "remap/backend.h"

namespace remap {

using LayerId = std::uint32_t;

struct LayerMemory {
  std::byte* region = nullptr;        // the layer's tensors live here, at a fixed address
  const std::byte* master = nullptr;  // host copy, in layout order
  std::size_t bytes = 0;              // one copy of this many bytes loads the layer
};

struct StreamConfiguration {
  std::vector<LayerId> streamed;    // ascending; the j-th uses ring buffer j mod ring.size()
  std::vector<std::byte*> ring;     // the ring's own views of its buffers (always mapped, never re-pointed while used)
  std::size_t ring_bytes = 0;       // bytes of each buffer
  std::vector<LayerId> reload;      // layers that own their pages again and must be loaded before their next use
  std::vector<LayerId> held;        // layers whose region is being re-pointed: wait() blocks until released() or failed()
  EventHandle after = 0;            // copies wait for it: the last reader or writer of pages that changed hands (0: nobody)
                                    // The caller keeps it alive until the next configure() or a drain() that returned.
  bool fresh = false;               // other pages stand behind the ring's addresses than before: keep no contents
};

struct PrefetchStats {
  std::uint64_t passes = 0;           // completed by end_pass
  std::uint64_t abandoned = 0;        // begun, never completed
  std::uint64_t copies = 0;
  std::uint64_t copied_bytes = 0;
  double copy_s = 0;                  // time in which copies ran, measured by events, of the copies known to be complete
  std::uint64_t timed_bytes = 0;      // bytes of those copies: timed_bytes / copy_s is the bandwidth
  std::uint64_t misses = 0;           // waits that found their layer not even issued (used out of order)
  double stall_s = 0;                 // time for which wait() blocked its caller, all passes (a stream's waiting is not seen)
  double last_pass_stall_s = 0;
  double last_pass_s = 0;             // begin_pass to end_pass on the host's clock
  std::uint64_t last_pass_copies = 0; // issued since the pass before it ended
};

class Prefetcher {
 public:
  Prefetcher(std::shared_ptr<Backend> backend, std::vector<LayerMemory> layers);
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // Replaces what is streamed. Not inside a pass, nor while a use is open (InvalidState). Copies that may start now are
  // issued at once, in the order in which the pass needs their layers, reloads and ring copies together.
  // Throws and changes nothing if the arguments do not fit (unknown layer, not ascending, bytes > ring_bytes, ...).
  // A buffer whose address and layer stay the same keeps its contents. Layers held or reloading before stay so; a failed
  // layer stays failed unless it is named here.
  // Copies already issued into memory that leaves the ring (or into a reloaded layer's region) may still be running:
  // drain(), or an event recorded on copy_stream(), orders its next writer or re-pointing behind them.
  void configure(const StreamConfiguration& configuration);
  // A held layer's region now shows what the configuration says (called by the re-pointing worker).
  void released(LayerId layer) noexcept;
  // Re-pointing failed: wait(layer) throws this error until the layer is configured again.
  void failed(LayerId layer, std::exception_ptr error) noexcept;

  // Begins a pass; an unfinished pass before it counts as abandoned and its leftovers are used or overwritten.
  // After an error of the copy stream this makes a new copy stream (the old one's remaining work is waited for) and
  // loads everything again; so after an error from wait() or drain(), begin the pass once more.
  void begin_pass();
  // Layers that the pass did not use are skipped. A use still open counts as finished: now for host readers, when the
  // stream gets here for stream readers.
  void end_pass();
  bool in_pass() const noexcept;

  // True if wait(layer) would return at once without looking at any event: resident, loaded and not held.
  bool ready(LayerId layer) const noexcept { return layer < count_ && states_[layer].load(std::memory_order_acquire) == 0; }
  // stream == 0: blocks the calling thread until the layer's bytes are in place (at most `timeout`; false if it passed).
  // stream != 0: the stream waits, the caller does not (it blocks only while the layer's region is held).
  // Throws: InvalidState if another layer's use of the same ring buffer is open (waited for and not done); the error of a
  // failed layer; the copy stream's error. A wait that returned false may be repeated. Every wait that returned true
  // needs its own done(): uses of one layer may be nested.
  bool wait(LayerId layer, StreamHandle stream = 0, std::chrono::nanoseconds timeout = std::chrono::nanoseconds::max());
  // The computation of the layer is finished (stream == 0) or is finished when the stream gets here. A done() without its
  // wait() does nothing. Copies that could not be issued here are tried again later; their error comes out of wait().
  void done(LayerId layer, StreamHandle stream = 0);

  // Blocks until no copy is in flight. Throws the copy stream's error. `fill` of unused ring memory is never done here.
  void drain();
  PrefetchStats stats() const;
  StreamHandle copy_stream() const noexcept;  // changes when begin_pass() or configure() replaces a failed one

 private:
  struct State;
  std::size_t count_ = 0;
  std::unique_ptr<std::atomic<std::uint8_t>[]> states_;  // 0 = ready for ever (until configure); see prefetcher.cpp
  std::unique_ptr<State> state_;
};

}  // namespace remap
