// SPDX-License-Identifier: Apache-2.0
// The Prefetcher: brings streamed layers into the ring just before they are needed. It copies; it never maps.
//
// Computation is either the calling thread's (begin_pass()), and then wait() blocks it; or it is work enqueued on a stream
// (begin_pass(stream)), and then nothing here blocks the thread, which may run several passes ahead: wait() makes the
// stream wait, done() notes how far it will have come. Two things still block in a pass on a stream: wait() for a layer
// whose region is being re-pointed (held: until released() there is nothing right to enqueue), and begin_pass() after an
// error of the copy stream (below). Both kinds of passes may alternate.
//
// One Prefetcher a tenant. The engine brackets each pass (begin_pass, end_pass) and each layer (wait, done); the executor
// tells it between passes which layers stream (configure). LayerSchedule (cpp/schedule/layer_schedule.h) decides which copy
// may be issued when, without knowing any device; this class issues it on its own copy stream and orders everything by
// events.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "remap/backend.h"
#include "remap/fork.h"

namespace remap {

using LayerId = std::uint32_t;

struct LayerMemory {
  std::byte* region = nullptr;        // the layer's tensors live here, at a fixed address
  const std::byte* master = nullptr;  // host copy, in layout order
  std::size_t bytes = 0;              // one copy of this many bytes loads the layer
};

// Bytes [first, first + bytes) of a layer, which come home: their pages are the layer's own again, and they are loaded into its
// region once that is not held. A whole layer is {layer, 0, its bytes}.
struct HomePart {
  LayerId layer = 0;
  std::size_t first = 0;
  std::size_t bytes = 0;
};

struct StreamConfiguration {
  std::vector<LayerId> streamed;    // ascending; the j-th uses ring buffer j mod ring.size()
  std::vector<std::byte*> ring;     // the ring's own views of its buffers (always mapped, never re-pointed while used)
  std::size_t ring_bytes = 0;       // bytes of each buffer
  // Slices: of the j-th streamed layer only [offsets[j], bytes) streams, to places[j] bytes behind the buffer's beginning; what
  // lies before stays at home. Empty: all 0, so whole layers. A buffer may have memory only where something is placed.
  std::vector<std::size_t> offsets;
  std::vector<std::size_t> places;
  std::vector<HomePart> home;       // to be loaded before the layer's next use, at most one part a layer: of one that does not
                                    // stream any more, or of one that goes on streaming the rest (first + bytes <= its offset)
  std::vector<LayerId> elsewhere;   // layers that another instance computes. None of them streams, and what was to be loaded
                                    // of them is wanted no longer. Copies under way: as into memory that leaves the ring.
  std::vector<LayerId> held;        // layers whose region is being re-pointed: wait() blocks until released() or failed()
  EventHandle after = 0;            // copies wait for it: the last reader or writer of pages that changed hands, and of the
                                    // regions to reload (0: none). Uses of layers that were resident leave no trace here:
                                    // with computation on a stream this is an event recorded on it now. Taken in by
                                    // configure(): it may be recorded anew or destroyed once that has returned.
  bool fresh = false;               // other pages stand behind the ring's addresses than before: keep no contents
};

// KV blocks whose home is host memory. Of each KV layer they have parts in some ranges of the KV region, whose addresses show the
// same memory for layers i and i + buffers: so layer i's parts are copied in when layer i - buffers is done with it.
struct BlockRange {
  std::byte* region = nullptr;      // where block 0 lies in this range of the KV region
  const std::byte* host = nullptr;  // where host block 0 lies in the same range of the host store
};
struct BlockLayout {
  std::vector<std::vector<BlockRange>> layers;  // by KV layer, the first layers of the prefetcher
  std::size_t unit_bytes = 0;                   // of a block in a range
  std::uint32_t buffers = 0;
};
// Blocks [block, block + count) of a pass, whose bytes are in host blocks [host, host + count).
struct BlockRun {
  std::size_t block = 0;
  std::size_t host = 0;
  std::size_t count = 0;
};

struct PrefetchStats {
  std::uint64_t passes = 0;           // completed by end_pass
  std::uint64_t abandoned = 0;        // begun, never completed
  std::uint64_t copies = 0;
  std::uint64_t copied_bytes = 0;
  double copy_s = 0;                  // time in which copies ran, measured by events, of copies known to be complete: of one in
                                      // flight at a time, so of all of them only where they do not queue
  std::uint64_t block_bytes = 0;      // of KV blocks copied in for passes: in no other count
  std::uint64_t timed_bytes = 0;      // bytes of those copies: timed_bytes / copy_s is the bandwidth
  std::uint64_t misses = 0;           // waits that found their layer not even issued (used out of order)
  double stall_s = 0;                 // time that computations waited for layers, all passes: what blocked the caller, and of
                                      // passes on a stream what the stream waited, once that is known (see PassTiming)
  double last_pass_stall_s = 0;       // both of the newest pass whose times are known
  double last_pass_s = 0;
  std::uint64_t last_pass_copies = 0; // issued since the pass before it ended
};

// One completed pass. Of the calling thread: by the host's clock, known when it ends. On a stream: by events on it at
// begin_pass() and end_pass() and around each wait whose copy was not complete when it was enqueued (waits made on other
// streams than the pass's are not in it); known when the stream has passed the last of them, and never waited for.
struct PassTiming {
  std::uint64_t pass = 0;  // its number: what end_pass() returned
  double seconds = 0;      // begin_pass to end_pass
  double stall_s = 0;      // of these, waiting for layers
};

// In a forked child every call throws ForkedProcess, and the end of the object does nothing.
class Prefetcher {
 public:
  // chunk_bytes: 0, or a copy of more bytes than that is enqueued in pieces of that size, with a fill of a few bytes between two.
  // A device's copy engine serves one direction first come, first served, whatever the streams' priorities, and goes on with a
  // stream as long as that has copies ready: so a layer's copy keeps all others waiting for its whole length. The fill, which
  // is not the copy engine's work, is where others get in (torchrec #4315, #4339).
  Prefetcher(std::shared_ptr<Backend> backend, std::vector<LayerMemory> layers, std::size_t chunk_bytes = 0);
  ~Prefetcher();
  // Gives the copy stream and all events back; called by the destructor too. Pre: no other call is in progress, and no caller
  // uses copy_stream() any more. Throws the first error when all were tried; the rest is tried by the next
  // call. Afterwards only stats() and close() are allowed.
  void close();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // Replaces the set of streamed layers. Not inside a pass, nor while a use is open (InvalidState). Copies that may start now are
  // issued at once, in the order in which the pass needs their layers, reloads and ring copies together.
  // Throws and changes nothing if the arguments do not fit (unknown layer, not ascending, bytes > ring_bytes, ...).
  // A buffer whose address, layer, offset and place stay the same keeps its contents. Layers held or reloading before stay so
  // (of a layer that streams from now on: what lies before its offset); a failed layer stays failed unless it is named here.
  // Copies already issued into memory that leaves the ring (or into a reloaded layer's region) may still be running:
  // drain(), or an event recorded on copy_stream(), orders its next writer or re-pointing behind them.
  void configure(const StreamConfiguration& configuration);
  // A held layer's region now shows what the configuration says (called by the re-pointing worker). `current` is asked first,
  // under the lock that configure() takes: where it says false nothing happens. Both return what it said; without one, true.
  bool released(LayerId layer, const std::function<bool()>& current = nullptr) noexcept;
  // Re-pointing failed: wait(layer) throws this error until the layer is configured again.
  bool failed(LayerId layer, std::exception_ptr error, const std::function<bool()>& current = nullptr) noexcept;

  // Says where KV blocks are copied in, from now on. Once, outside a pass (InvalidState). InvalidArgument if it is empty, names more
  // layers than there are, or has addresses or sizes of 0; nothing changed then.
  void stream_blocks(const BlockLayout& layout);

  // Begins a pass; an unfinished pass before it counts as abandoned and its leftovers are used or overwritten.
  // stream == 0: the calling thread computes. Otherwise the stream does, behind whatever it has to do by now, and wait() and
  // done() without a stream mean this one until end_pass(). It must live until then, and work that it still has to do then
  // must not be abandoned to another stream that gets the same handle: streams are told apart by their handles.
  // Order between the streams of different passes is the caller's: readers of ring buffers are seen here, others are not.
  // After an error of the copy stream this makes a new copy stream (the old one's remaining work is waited for, also in a
  // pass on a stream) and loads everything again; so after an error from wait() or drain(), begin the pass once more.
  // Throws InvalidArgument if the backend does not know the stream. No pass was begun then, nor after any other error, and
  // an unfinished one goes on. A failure to time the pass is none: it stays untimed.
  // blocks: KV blocks that the pass reads and whose home is host memory; it reads them only. Every KV layer of this pass has to be
  // waited for then, and is done with them at its done(). InvalidArgument without stream_blocks(). filled: an event that the host
  // blocks' bytes come behind (0: they are there). Taken in here, like configure's `after`.
  void begin_pass(StreamHandle stream = 0, std::vector<BlockRun> blocks = {}, EventHandle filled = 0);
  // Layers that the pass did not use are skipped. A use still open counts as finished: now for host readers, when the
  // stream gets here for stream readers. Returns the pass's number: 1, 2, ... of all completed passes.
  std::uint64_t end_pass();
  bool in_pass() const;
  // Ascending: layers of the open pass that were not ready() when it began and that no wait() has returned true for since. What
  // the pass computed with one of them was computed with whatever its region showed. Empty outside of a pass.
  std::vector<LayerId> unwaited() const;

  // Whether a copy into a layer's own region was wanted and not yet seen complete (home). While it is, such a copy may
  // be under way, or start when released() is called: before pages of homes change hands, drain the executor, then order them
  // behind copy_stream().
  bool loading() const;
  // True if wait(layer) would return at once without looking at any event: resident, loaded and not held. A layer that was not so
  // when the pass began becomes so by its wait() only (see unwaited()). Never in a forked child.
  bool ready(LayerId layer) const noexcept {
    return fork_generation() == fork_generation_ && layer < count_ && states_[layer].load(std::memory_order_acquire) == 0;
  }
  // As ready(), and looks at the copies of a layer that comes home: outside of passes it becomes ready when they have ended,
  // although nobody has waited for it. May block as any call that looks at events does.
  bool arrived(LayerId layer);
  // stream == 0, in a pass begun with a stream: that stream. Otherwise:
  // stream == 0: blocks the calling thread until the layer's bytes are in place (at most `timeout`; false if it passed): those
  // in the ring, and those that come home.
  // stream != 0: the stream waits, the caller does not (it blocks only while the layer's region is held).
  // Throws: InvalidState if another layer's use of the same ring buffer is open (waited for and not done); the error of a
  // failed layer; the copy stream's error. A wait that returned false may be repeated. Every wait that returned true
  // needs its own done(): uses of one layer may be nested.
  bool wait(LayerId layer, StreamHandle stream = 0, std::chrono::nanoseconds timeout = std::chrono::nanoseconds::max());
  // The computation of the layer is finished (stream == 0, in a pass begun without a stream) or is finished when the stream
  // (the pass's, if none is given) gets here. A done() without its
  // wait() does nothing. Copies that could not be issued here are tried again later; their error comes out of wait().
  void done(LayerId layer, StreamHandle stream = 0);

  // Blocks until no copy is in flight. Throws the copy stream's error. `fill` of unused ring memory is never done here.
  void drain();
  PrefetchStats stats() const;
  // Completed passes whose times are known and that were not taken yet, oldest first. An abandoned pass has none. Of the
  // passes on streams the last 64 are followed, and 64 known ones are kept: a caller that takes less often misses the oldest.
  std::vector<PassTiming> take_timings();
  // Whether a stream was ever given to begin_pass(), wait() or done(). From then on a call here may have to wait, inside the
  // driver or for a thread that does, until a stream has room for more work: a caller should hold no lock that a stream's
  // host functions want (Python's, say).
  bool uses_streams() const;
  // Ours; never wait for it from the host, record an event on it. Changes when begin_pass() or configure() replaces a failed
  // one. While the executor's worker has work, released() may enqueue copies on it at any moment.
  StreamHandle copy_stream() const;

 private:
  struct State;
  void guard() const { refuse_fork(fork_generation_); }

  const unsigned fork_generation_ = fork_generation();
  std::size_t count_ = 0;
  std::unique_ptr<std::atomic<std::uint8_t>[]> states_;  // 0 = ready for ever (until configure); see prefetcher.cpp
  std::unique_ptr<State> state_;
};

}  // namespace remap
