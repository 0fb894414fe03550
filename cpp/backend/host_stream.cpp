// SPDX-License-Identifier: Apache-2.0
#include "backend/host_stream.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <string>
#include <thread>
#include <utility>

#include "backend/thread.h"

namespace remap::host {
namespace {

using Clock = std::chrono::steady_clock;

// A layer's copy takes about a millisecond and a sleeping thread some tens of microseconds to wake up, so a waiter looks
// for a moment before it sleeps. Not longer: with few cores it would take time from the thread that it waits for.
constexpr std::chrono::microseconds kSpin{20};
// Waits longer than this have no deadline: now + timeout must not overflow.
constexpr std::chrono::hours kForever{24 * 365};

void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

[[noreturn]] void refuse_untimed(EventHandle event) {
  throw Error(ErrorKind::invalid_state, "elapsed: the event only orders. Nothing changed; create it with timed = true.",
              {{"event", static_cast<std::int64_t>(event)}});
}

[[noreturn]] void unknown(const char* call, const char* what, std::uint64_t handle) {
  throw Error(ErrorKind::invalid_argument,
              std::string(call) + ": " + what + " " + std::to_string(handle) +
                  " is not one of this backend (or is destroyed). Nothing changed.",
              {{"call", std::string(call)}, {"handle", static_cast<std::int64_t>(handle)}});
}

}  // namespace

struct HostStreams::Recording {
  enum State : int { pending, complete };
  std::atomic<int> state{pending};
  // Written before `state` becomes complete, constant after.
  Clock::time_point when;
  std::shared_ptr<const Error> error;
  // For those who sleep.
  std::mutex mutex;
  std::condition_variable changed;
};

struct HostStreams::Operation {
  enum Kind { copy, copy_batch, fill, call, record, wait } kind = copy;
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::vector<CopyRange> ranges;
  std::size_t bytes = 0;
  std::uint8_t value = 0;
  std::shared_ptr<Recording> recording;
  std::function<void()> function;
};

struct HostStreams::Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Operation> queue;  // guarded by mutex
  bool stopping = false;        // guarded by mutex
  std::shared_ptr<const Error> error;  // the worker's own
  std::thread worker;
};

HostStreams::HostStreams(std::size_t copy_threads) : copies_(copy_threads) {}

HostStreams::~HostStreams() {
  for (auto& stream : streams_) finish(*stream.second);
}

void HostStreams::add_usage(Usage& usage) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  usage.streams = streams_.size();
  usage.events = events_.size();
}

// ---- streams ---------------------------------------------------------------------------------------------------------
StreamHandle HostStreams::create_stream() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const StreamHandle handle = ++last_handle_;
  auto& slot = streams_[handle];
  try {
    slot = std::make_unique<Stream>();
    Stream* stream = slot.get();
    stream->worker = start_thread("remap-stream", [this, stream] { work(*stream); });
  } catch (...) {
    streams_.erase(handle);
    throw;
  }
  return handle;
}

void HostStreams::finish(Stream& stream) noexcept {
  {
    const std::lock_guard<std::mutex> lock(stream.mutex);
    stream.stopping = true;
  }
  stream.changed.notify_one();
  stream.worker.join();
}

void HostStreams::destroy_stream(StreamHandle handle) {
  std::unique_ptr<Stream> taken;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = streams_.find(handle);
    if (found == streams_.end()) unknown("destroy_stream", "stream", handle);
    taken = std::move(found->second);
    streams_.erase(found);
  }
  finish(*taken);  // without the lock: others go on meanwhile
}

HostStreams::Stream& HostStreams::stream(StreamHandle handle, const char* call) const {
  const auto found = streams_.find(handle);
  if (found == streams_.end()) unknown(call, "stream", handle);
  return *found->second;
}

void HostStreams::enqueue(Stream& stream, Operation&& operation) {
  {
    const std::lock_guard<std::mutex> lock(stream.mutex);
    stream.queue.push_back(std::move(operation));
  }
  stream.changed.notify_one();
}

void HostStreams::copy(StreamHandle handle, std::byte* to, const std::byte* from, std::size_t bytes) {
  if (to == nullptr || from == nullptr) {
    throw Error(ErrorKind::invalid_argument, "copy: expected two addresses, got null. Nothing changed.",
                {{"bytes", static_cast<std::int64_t>(bytes)}});
  }
  Operation operation;
  operation.kind = Operation::copy;
  operation.to = to;
  operation.from = from;
  operation.bytes = bytes;
  const std::lock_guard<std::mutex> lock(mutex_);
  enqueue(stream(handle, "copy"), std::move(operation));
}

void HostStreams::copy_batch(StreamHandle handle, const CopyRange* ranges, std::size_t count) {
  Operation operation;
  operation.kind = Operation::copy_batch;
  operation.ranges.assign(ranges, ranges + count);
  for (const CopyRange& each : operation.ranges) {
    if (each.to != nullptr && each.from != nullptr) continue;
    throw Error(ErrorKind::invalid_argument, "copy_batch: expected two addresses, got null. Nothing changed.",
                {{"bytes", static_cast<std::int64_t>(each.bytes)}});
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  enqueue(stream(handle, "copy_batch"), std::move(operation));
}

void HostStreams::fill(StreamHandle handle, std::byte* to, std::uint8_t value, std::size_t bytes) {
  if (to == nullptr) {
    throw Error(ErrorKind::invalid_argument, "fill: expected an address, got null. Nothing changed.",
                {{"bytes", static_cast<std::int64_t>(bytes)}});
  }
  Operation operation;
  operation.kind = Operation::fill;
  operation.to = to;
  operation.bytes = bytes;
  operation.value = value;
  const std::lock_guard<std::mutex> lock(mutex_);
  enqueue(stream(handle, "fill"), std::move(operation));
}

void HostStreams::call(StreamHandle handle, std::function<void()> function) {
  Operation operation;
  operation.kind = Operation::call;
  operation.function = std::move(function);
  const std::lock_guard<std::mutex> lock(mutex_);
  enqueue(stream(handle, "call"), std::move(operation));
}

void HostStreams::work(Stream& stream) {
  for (;;) {
    Operation operation;
    {
      std::unique_lock<std::mutex> lock(stream.mutex);
      stream.changed.wait(lock, [&] { return stream.stopping || !stream.queue.empty(); });
      if (stream.queue.empty()) return;
      operation = std::move(stream.queue.front());
      stream.queue.pop_front();
    }
    perform(stream, operation);
  }
}

void HostStreams::perform(Stream& stream, Operation& operation) {
  switch (operation.kind) {
    case Operation::copy:
      if (!stream.error) copies_.copy(operation.to, operation.from, operation.bytes);
      break;
    case Operation::copy_batch:
      for (const CopyRange& each : operation.ranges) {
        if (!stream.error) copies_.copy(each.to, each.from, each.bytes);
      }
      break;
    case Operation::fill:
      if (!stream.error && operation.bytes != 0) std::memset(operation.to, operation.value, operation.bytes);
      break;
    case Operation::call:
      if (stream.error) break;
      try {
        operation.function();
      } catch (const Error& error) {
        stream.error = std::make_shared<const Error>(error);
      } catch (const std::exception& error) {
        stream.error = std::make_shared<const Error>(ErrorKind::driver, std::string("work on a stream failed: ") + error.what());
      }
      break;
    case Operation::record: {
      Recording& recording = *operation.recording;
      recording.when = Clock::now();
      recording.error = stream.error;
      {
        const std::lock_guard<std::mutex> lock(recording.mutex);
        recording.state.store(Recording::complete, std::memory_order_release);
      }
      recording.changed.notify_all();
      break;
    }
    case Operation::wait:
      wait(*operation.recording, std::chrono::nanoseconds::max());
      if (!stream.error) stream.error = operation.recording->error;
      break;
  }
}

// ---- events ----------------------------------------------------------------------------------------------------------
EventHandle HostStreams::create_event(bool timed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const EventHandle handle = ++last_handle_;
  events_.emplace(handle, Event{timed, nullptr});
  return handle;
}

void HostStreams::destroy_event(EventHandle handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (events_.erase(handle) == 0) unknown("destroy_event", "event", handle);
}

void HostStreams::record(EventHandle event, StreamHandle handle) {
  Operation operation;
  operation.kind = Operation::record;
  operation.recording = std::make_shared<Recording>();
  auto recording = operation.recording;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) unknown("record", "event", event);
  enqueue(stream(handle, "record"), std::move(operation));
  found->second.last = std::move(recording);
}

void HostStreams::stream_wait(StreamHandle handle, EventHandle event) {
  Operation operation;
  operation.kind = Operation::wait;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) unknown("stream_wait", "event", event);
  Stream& waiting = stream(handle, "stream_wait");
  if (!found->second.last) return;
  operation.recording = found->second.last;
  enqueue(waiting, std::move(operation));
}

std::shared_ptr<HostStreams::Recording> HostStreams::recording(EventHandle handle, const char* call) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = events_.find(handle);
  if (found == events_.end()) unknown(call, "event", handle);
  return found->second.last;
}

bool HostStreams::wait(Recording& recording, std::chrono::nanoseconds timeout) {
  const auto done = [&] { return recording.state.load(std::memory_order_acquire) == Recording::complete; };
  if (done()) return true;
  if (timeout <= std::chrono::nanoseconds::zero()) return false;
  const auto start = Clock::now();
  const auto spin_until = start + std::min<std::chrono::nanoseconds>(kSpin, timeout);
  while (Clock::now() < spin_until) {
    for (int i = 0; i < 16; ++i) pause();
    if (done()) return true;
  }
  std::unique_lock<std::mutex> lock(recording.mutex);
  if (timeout >= kForever) {
    recording.changed.wait(lock, done);
    return true;
  }
  return recording.changed.wait_until(lock, start + timeout, done);
}

bool HostStreams::query(EventHandle handle) const {
  const auto current = recording(handle, "query");
  if (!current) return true;
  if (current->state.load(std::memory_order_acquire) != Recording::complete) return false;
  if (current->error) throw Error(*current->error);
  return true;
}

bool HostStreams::synchronize(EventHandle handle, std::chrono::nanoseconds timeout) const {
  const auto current = recording(handle, "synchronize");
  if (!current) return true;
  if (!wait(*current, timeout)) return false;
  if (current->error) throw Error(*current->error);
  return true;
}

double HostStreams::elapsed(EventHandle from, EventHandle to) const {
  const auto first = recording(from, "elapsed");
  const auto second = recording(to, "elapsed");
  for (const EventHandle event : {from, to}) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = events_.find(event);
    if (found == events_.end()) unknown("elapsed", "event", event);
    if (!found->second.timed) refuse_untimed(event);
  }
  for (const auto* one : {&first, &second}) {
    if (!*one || (*one)->state.load(std::memory_order_acquire) != Recording::complete) {
      throw Error(ErrorKind::invalid_state, "elapsed: expected two recorded and completed events. Synchronize first.",
                  {{"event", static_cast<std::int64_t>(one == &first ? from : to)}});
    }
    if ((*one)->error) throw Error(*(*one)->error);
  }
  return std::chrono::duration<double>(second->when - first->when).count();
}

}  // namespace remap::host
