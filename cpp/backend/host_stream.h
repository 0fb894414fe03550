// SPDX-License-Identifier: Apache-2.0
// Streams and events of the host backend: each stream is a worker thread with a queue.
//
// Order and progress
//   * A stream does its operations one by one, in the order in which they were enqueued.
//   * A recording is one completion of an event; stream_wait binds to the recording that is current when it is called.
//     A stream therefore only ever waits for something enqueued earlier, so streams cannot wait for each other in a circle.
//   * When an operation fails, its stream is failed for good: later operations are skipped, later recordings complete with
//     the error, and a stream that waits for such a recording fails too (its data would be stale). No waiter hangs.
//
// Concurrency: `mutex_` guards the tables and is held while something is enqueued, so that no thread enqueues on a stream that
// is being destroyed. Each stream's own lock guards its queue and is taken inside `mutex_`; workers take only the latter.
// A recording is written once by its worker and then published by its atomic state; its lock is for sleeping waiters only.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/copy_bytes.h"
#include "remap/backend.h"

namespace remap::host {

class HostStreams {
 public:
  explicit HostStreams(std::size_t copy_threads);
  ~HostStreams();  // waits for all work
  HostStreams(const HostStreams&) = delete;
  HostStreams& operator=(const HostStreams&) = delete;

  void add_usage(Usage& usage) const;

  StreamHandle create_stream();
  void destroy_stream(StreamHandle stream);
  void copy(StreamHandle stream, std::byte* to, const std::byte* from, std::size_t bytes);
  void copy_batch(StreamHandle stream, const CopyRange* ranges, std::size_t count);
  void fill(StreamHandle stream, std::byte* to, std::uint8_t value, std::size_t bytes);
  // Calls `function` in stream order, on the worker. An exception from it fails the stream.
  void call(StreamHandle stream, std::function<void()> function);

  EventHandle create_event(bool timed);
  void destroy_event(EventHandle event);
  void record(EventHandle event, StreamHandle stream);
  void stream_wait(StreamHandle stream, EventHandle event);
  bool query(EventHandle event) const;
  bool synchronize(EventHandle event, std::chrono::nanoseconds timeout) const;
  double elapsed(EventHandle from, EventHandle to) const;

 private:
  struct Recording;
  struct Operation;
  struct Stream;

  Stream& stream(StreamHandle handle, const char* call) const;                       // pre: lock held
  std::shared_ptr<Recording> recording(EventHandle handle, const char* call) const;  // takes the lock; null: never recorded
  static bool wait(Recording& recording, std::chrono::nanoseconds timeout);
  static void enqueue(Stream& stream, Operation&& operation);
  static void finish(Stream& stream) noexcept;
  void work(Stream& stream);
  void perform(Stream& stream, Operation& operation);

  CopyPool copies_;
  mutable std::mutex mutex_;
  std::uint64_t last_handle_ = 0;
  std::map<StreamHandle, std::unique_ptr<Stream>> streams_;
  struct Event {
    bool timed = false;
    std::shared_ptr<Recording> last;  // null before the first
  };
  std::map<EventHandle, Event> events_;
};

}  // namespace remap::host
