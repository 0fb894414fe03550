// SPDX-License-Identifier: Apache-2.0
// The Prefetcher's state, and its work while it holds its lock. Private to cpp/schedule.
//
// Who writes what, and what orders it
//   * Everything in State is read and written under `mutex` only. Nothing blocks while holding it, except recover() and a
//     backend's copy that failed midway, which wait for the copy stream's work. The mutex also is the order in which work
//     reaches the copy stream, and every operation there waits only for events recorded before it was enqueued: so no
//     cycle of waiting can arise.
//   * `states_` is written under the mutex and read without it by ready(). 0 is stored (release) only after the layer's
//     copy was seen complete or was never needed, so who reads 0 (acquire) may read the bytes.
//   * Bytes of a ring buffer: written by copies in the order of the copy stream; a copy is enqueued behind stream_wait for
//     every event recorded by the buffer's stream readers, and only when it has no open host reader (schedule.open).
//     Readers come after the copy's end event. So write -> read -> write are ordered on every path.
//   * Uses of a layer that is resident (0) leave no trace here, on a stream or not: ready() and done() return at once. What
//     comes behind them all the same: a copy into the layer's region, or into a ring made of its pages, is issued behind
//     configure's `after`; its region is re-pointed by the executor's worker behind the same event. For host readers the
//     caller's thread, which calls configure(), is behind them anyway.
//   * A slice: the layer's head is at home, its tail in the ring, and they never share a page: a home part ends at or before the
//     offset (validate), and outstanding ones are clipped to it (configure). Such a layer is never 0, so every reader comes
//     through wait(), under the mutex: a host reader goes on only after it saw both copies complete (query() or synchronize()
//     of their ends), a stream is ordered behind both ends. kReload is cleared only under the mutex, when the home's copies
//     were seen complete; clearing it publishes nothing, since kStreamed remains. The other way round, bytes of the head are
//     written by copies issued behind configure's `after` and not while the region is held, as those of a layer that reloads.
//   * KV blocks (kBlocks, set for every KV layer by a begin_pass() with blocks, cleared by the next one and by end_pass): their
//     parts go through buffers of their own by a schedule of their own, forgotten at each begin_pass, since the next pass may read
//     others; so its copies are issued for the present pass only. The rules for a buffer are those of the ring: a copy comes
//     behind all its readers, of earlier passes too, and readers come behind the copy. Such a layer is never 0.
//   * A pass on a stream may be several passes ahead of the device. Nothing above depends on how far: wait() orders the
//     stream behind the recording of the copy's end that is the last one now, and a copy is ordered behind the recordings of
//     the buffer's readers that are the last ones now. Later recordings of the same events change neither.
//   * A reader that was never closed (a pass abandoned between wait and done): a host reader ended, since the only way to
//     get to begin_pass/end_pass is that its thread left the computation; a stream reader's kernels were enqueued before
//     this call, so an event recorded now on its stream is behind them. No pass is in progress twice: one engine drives it.
//   * Events are never recorded anew while a thread waits on them without the mutex: tickets are counted references.
//
// States of a layer (bits): 0 = resident, loaded, not held, and if any of this was not so when the pass began, waited for since.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <utility>

#include "remap/prefetcher.h"
#include "remap/sim.h"
#include "schedule/layer_schedule.h"
#include "schedule/pass_timer.h"

namespace remap {

namespace prefetch {  // these names are short: they must not meet another file's

using Clock = std::chrono::steady_clock;

inline constexpr std::uint8_t kStreamed = 1;
inline constexpr std::uint8_t kReload = 2;
inline constexpr std::uint8_t kHeld = 4;
inline constexpr std::uint8_t kFailed = 8;
inline constexpr std::uint8_t kBlocks = 32;   // only in a pass: it reads KV blocks that are copied in
inline constexpr std::uint8_t kUnwaited = 16;  // only in a pass: it was not 0 when the pass began, and no wait was for it yet

// Copies whose completion was not yet seen, at most; beyond, the oldest of them are not followed.
inline constexpr std::size_t kTickets = 256;
// How long a wait stays inside the backend before it looks around again.
inline constexpr std::chrono::nanoseconds kSlice = std::chrono::milliseconds(20);

// Bytes that the fill between two chunks of a copy writes.
inline constexpr std::size_t kGap = 4;

inline double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// The event behind one copy. In use while refs > 0; recorded anew only when it is 0 (or stolen, see acquire()).
struct Ticket {
  EventHandle end = 0;
  std::size_t bytes = 0;
  unsigned refs = 0;
  bool complete = false;
};

// The copy that is being timed: one at a time, so that most copies of a busy stream carry no event but their own.
struct Sample {
  EventHandle start = 0;
  EventHandle end = 0;
  const Ticket* ticket = nullptr;  // null: none
};

struct Reader {
  StreamHandle stream;
  EventHandle event;  // recorded on it, behind its last reader of the buffer
};

struct Slot {
  std::byte* address = nullptr;
  Ticket* ready = nullptr;           // of the last copy into it; null: complete
  std::vector<Reader> readers;
  std::vector<StreamHandle> open;    // one entry a wait() that returned true and has no done() yet
};

// A copy into a layer's own region: of all of it, or of a part. Those of one layer are disjoint.
struct Reload {
  LayerId layer;
  std::size_t first;  // byte of the layer
  std::size_t bytes;
  Ticket* ticket;  // null: not issued
};

// The part of a streamed layer that streams, and its place in the buffer.
struct Slice {
  std::size_t offset = 0;
  std::size_t place = 0;
  bool operator==(const Slice& other) const { return offset == other.offset && place == other.place; }
};

[[noreturn]] void refuse(const std::string& what, Error::Fields fields);

}  // namespace prefetch

using namespace prefetch;

struct Prefetcher::State {
  std::shared_ptr<Backend> backend;
  std::vector<LayerMemory> layers;
  std::size_t chunk_bytes = 0;  // 0: a copy is one
  std::atomic<std::uint8_t>* states = nullptr;

  mutable std::mutex mutex;
  std::condition_variable changed;  // a layer was released or failed
  std::atomic<StreamHandle> stream{0};
  std::atomic<bool> in_pass{false};
  std::atomic<bool> uses_streams{false};
  StreamHandle pass_stream = 0;  // the present pass's

  LayerSchedule schedule;
  std::vector<LayerId> streamed;         // by position
  std::vector<Slice> slices;             // by position
  std::vector<std::uint32_t> position;   // by layer; valid where kStreamed
  std::vector<Slot> slots;
  BlockLayout blocks;                    // empty: none were ever declared
  std::vector<BlockRun> runs;            // the present pass's
  std::size_t run_bytes = 0;             // of one layer
  LayerSchedule block_schedule;          // positions are KV layers
  std::vector<Slot> block_slots;
  std::vector<Reload> reloads;           // not yet seen complete, by layer and byte; of exactly the layers with kReload
  std::vector<std::exception_ptr> errors;  // by layer; valid where kFailed
  // In virtual time the worker is on a clock of its own: when a layer was released by that, by layer. Empty in real time.
  std::vector<double> released_s;
  std::shared_ptr<SimBackend> simulator;

  std::vector<std::unique_ptr<Ticket>> pool;
  std::vector<Ticket*> free;
  std::deque<Ticket*> in_flight;  // in the copy stream's order
  std::vector<EventHandle> spare;
  Sample sample;
  std::vector<CopyRange> ranges, chunk;  // of the copy that is being issued
  // Left over where the next call failed, and used first when it is tried again: destroying it there might fail as well.
  StreamHandle next_stream = 0;   // a copy stream that has not taken over
  std::exception_ptr broken;  // the copy stream's error

  PrefetchStats stats;
  std::unique_ptr<PassTimer> timer;
  std::uint64_t copies_at_end = 0;

  // ---- tickets ---------------------------------------------------------------------------------------------------
  void unref(Ticket* ticket) noexcept;
  void grow();
  Ticket* acquire();
  // True if the copy is complete. Throws the copy stream's error.
  bool poll(Ticket* ticket);
  // Takes complete copies off the list, without blocking. An error is kept for those who wait.
  void collect() noexcept;
  // The next copy will be timed, if none is being timed. A failure here fails no copy: it stays untimed.
  bool begin_sample(StreamHandle copies) noexcept;
  void end_sample(StreamHandle copies, const Ticket* ticket) noexcept;

  // ---- copies ----------------------------------------------------------------------------------------------------
  // Copies `ranges`, of `bytes` bytes together. Post: a ticket with one reference for the caller. If it throws, the targets'
  // contents are unknown. timed: it may tell the link's bandwidth.
  Ticket* issue(std::size_t bytes, const std::vector<Reader>* readers, bool timed);
  // The copies themselves, a chunk at a time. `enqueued`: whether some of them are on their way, also on an error.
  void enqueue(StreamHandle copies, const std::vector<CopyRange>& ranges, bool& enqueued);
  void issue_ring(const LayerSchedule::Copy& copy);
  void issue_blocks(const LayerSchedule::Copy& copy);
  void issue_reload(Reload& reload);
  // The first reload not issued whose region is not held; null: none.
  Reload* next_reload();
  // Issues all that may be issued, the layer that the pass needs first going first. A copy that fails stays to be issued, and
  // is tried again by the next call and by wait(), which reports it: the caller of done() could do nothing about it.
  void pump() noexcept;
  // A new copy stream in place of the failed one. Contents are unknown; reloads are issued again.
  void recover();

  // ---- readers ---------------------------------------------------------------------------------------------------
  // Copies into the slot issued from now on wait for all work that is on the stream now.
  void record_reader(Slot& slot, StreamHandle reader_stream);
  // See the comment on top about uses that were never closed.
  void close_readers();
  void set(LayerId layer, std::uint8_t bits) noexcept { states[layer].store(bits, std::memory_order_release); }
  std::uint8_t get(LayerId layer) const noexcept { return states[layer].load(std::memory_order_relaxed); }

  // A pass begins that reads these blocks, or it ends (none).
  void read_blocks(std::vector<BlockRun> named) noexcept;
  // A pass begins: every layer that is not ready has to be waited for in it; or it ends, and none has to be.
  void expect_waits(bool expected) noexcept;
  void waited(LayerId layer) noexcept { set(layer, static_cast<std::uint8_t>(get(layer) & ~kUnwaited)); }

  // The layer's own region has all that it should have.
  void loaded(LayerId layer) noexcept;
  // Sees whether it has, where that is all that a layer lacks. Not called while somebody walks over `reloads`.
  void look(LayerId layer) noexcept;
  // The ticket that brings a streamed layer's bytes into the ring (null: they are there), issuing the copy if that was not
  // done yet. The use is open afterwards.
  Ticket* claim(LayerId layer);
  Ticket* claim_blocks(LayerId layer);
  // `reader` is finished with the buffer that has this position. True: no stream reads it any more.
  bool finish(const LayerSchedule& uses, std::vector<Slot>& of, std::uint32_t position, StreamHandle reader);
  // Calls each(slot) for all buffers, of both kinds.
  template <typename Each>
  void for_slots(Each&& each) {
    for (std::vector<Slot>* of : {&slots, &block_slots}) {
      for (Slot& slot : *of) each(slot);
    }
  }
  // Issues the copies that the layer needs and were not issued yet, and lists in `awaited` those not complete; empty: all is
  // there.
  void bring(LayerId layer);
  std::vector<Ticket*> awaited;  // bring()'s answer, valid while the mutex is held
  // The layer may be read. Only a streamed layer has a use that must be closed.
  void enter(LayerId layer, StreamHandle reader);
  bool any_open() const noexcept;
  // In virtual time: whether the stream comes to the layer before its region shows what it should. wait() then holds it.
  bool early(LayerId layer, StreamHandle reader);
  void validate(const StreamConfiguration& c) const;
  void validate(const std::vector<BlockRun>& named) const;
  void validate_slices(const StreamConfiguration& c) const;
  // The layers still to be loaded at home under the new configuration. Tickets are shared with `reloads`: one of both must go.
  std::vector<Reload> outstanding(const StreamConfiguration& c) const;
};

}  // namespace remap
