// SPDX-License-Identifier: Apache-2.0
// Streams and events of the cuda backend.
//
// A StreamHandle is the CUstream's value, for streams of ours and for adopted ones (1 and 2: the default streams). An
// EventHandle is a number of our own that is never given twice, as the driver may use an event's address again.
//
// Our streams do not block with the legacy default stream: nothing that the process does there waits for a copy. Their priority is
// the usual one. They copy; the few small kernels on them (fills) do not gain by the greatest: beside matrix products that fill an
// H200, 512 MiB in chunks of 32 MiB with a fill between each two came at 0.985 of one copy's rate, and with the greatest at 0.949
// (bench/gpu/measures/chunk_gaps.py, n = 20).
//
// Errors: when work fails on a device its context is lost, and every later call in it says so. query(), synchronize() and
// elapsed() report that through the event they are asked about; stream_wait(), record() and copies when they are called.
//
// Concurrency: the driver orders what threads enqueue on one stream. `books_` guards the tables. It is never held while anything
// is waited for, nor while anything is enqueued: the driver blocks in that if the stream's queue is full (or, in a copy, if the
// host memory is not page-locked), and one tenant's full queue must not keep others from making events or adopting streams.
// Each event has a lock of its own, which is shared while a call uses the event. The call that destroys it first takes it out of
// sight (`going`, under books_), then waits for those calls with that lock, holding no other. To share an event's lock is never
// to wait, since that is done under books_ for events in sight; and books_ is not taken by a thread that has such a lock.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "backend/cuda/context.h"
#include "backend/cuda/staging.h"
#include "remap/backend.h"

namespace remap::cuda {

// Which way a copy goes; `staged`: to the device, from host memory that is not page-locked (staging.h); `unknown` where an address is
// neither ours nor registered here: the driver finds out.
enum class Direction : std::uint8_t { to_device, to_host, inside_device, staged, unknown };

// A copy, or what of one the driver takes at once: host memory is page-locked in pieces, and a copy must lie in one of them.
struct CopyPart {
  std::byte* to;
  const std::byte* from;
  std::size_t bytes;
  Direction direction;
};

class Streams {
 public:
  // batches: copies go to the driver as batches, if it takes them.
  Streams(const Context& context, LockedMemory& locked, bool batches)
      : context_(context),
        driver_(context.driver()),
        locked_(locked),
        batches_(batches && context.driver().cuMemcpyBatchAsync != nullptr) {}
  ~Streams();  // waits for the work of our streams
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  void add_usage(Usage& usage) const;

  StreamHandle create_stream();
  void destroy_stream(StreamHandle stream);
  StreamHandle adopt_stream(std::uint64_t native);
  void forget_stream(StreamHandle stream);
  // Copies the parts, in any order and at once. call: for errors.
  void copy(StreamHandle stream, const std::vector<CopyPart>& parts, const char* call);
  // parts: how many bytes the driver takes at once, one behind the other.
  void fill(StreamHandle stream, std::byte* to, std::uint8_t value, const std::vector<std::size_t>& parts);
  // Throws invalid_argument for an unknown stream.
  void require_stream(StreamHandle stream, const char* call) const;

  EventHandle create_event(bool timed);
  void destroy_event(EventHandle event);
  void record(EventHandle event, StreamHandle stream);
  void stream_wait(StreamHandle stream, EventHandle event);
  bool query(EventHandle event) const;
  bool synchronize(EventHandle event, std::chrono::nanoseconds timeout) const;
  double elapsed(EventHandle from, EventHandle to) const;

 private:
  enum class Origin : std::uint8_t { own, adopted };
  static constexpr std::size_t kOwn = static_cast<std::size_t>(-1);
  struct Event {
    Event(EventPointer pointer, bool with_time) : native(pointer), timed(with_time) {}
    const EventPointer native;
    const bool timed;
    std::atomic<bool> recorded{false};
    bool going = false;       // guarded by books_: being destroyed, unknown to every other call
    std::shared_mutex in_use;
  };
  // An event that is not destroyed while this lives.
  class Held {
   public:
    explicit Held(std::shared_ptr<Event> event) : event_(std::move(event)), lock_(event_->in_use) {}
    Event* operator->() const noexcept { return event_.get(); }

   private:
    std::shared_ptr<Event> event_;
    std::shared_lock<std::shared_mutex> lock_;  // declared last: released before the event may go
  };

  Origin origin_of(StreamHandle stream, const char* call) const;  // takes the lock
  std::shared_ptr<Event> event_of(EventHandle event, const char* call) const;  // pre: lock held
  Held hold(EventHandle event, const char* call) const;                       // takes the lock
  Result enqueue(StreamPointer stream, const CopyPart& part, const char** entry) const;
  Result enqueue(StreamPointer stream, const CopyPart* parts, std::size_t count, const char** entry) const;
  [[noreturn]] void fail_midway(StreamPointer stream, const char* call, const char* entry, Result code) const;
  void refuse_capture(StreamHandle stream, Origin origin, const char* call) const;
  StagingLane& lane_of(StreamHandle stream, Origin origin, const char* call);  // takes the lock
  bool complete(EventHandle event, const char* call) const;  // pre: inside a Context::Use

  const Context& context_;
  const Driver& driver_;
  LockedMemory& locked_;
  const bool batches_;
  mutable std::shared_mutex books_;  // guards all below
  std::unordered_map<StreamHandle, std::size_t> streams_;  // kOwn, or how many have adopted it
  std::unordered_map<EventHandle, std::shared_ptr<Event>> events_;
  std::once_flag filled_;
  std::unique_ptr<host::CopyPool> filling_;  // made with the first lane; outlives them all
  std::unordered_map<StreamHandle, std::unique_ptr<StagingLane>> lanes_;  // of own streams that have copied from staged memory
  std::size_t own_streams_ = 0;
  EventHandle last_event_ = 0;
};

}  // namespace remap::cuda
