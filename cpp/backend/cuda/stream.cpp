// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/stream.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace remap::cuda {
namespace {

using Clock = std::chrono::steady_clock;

// synchronize() with a deadline looks again and again: first without a pause, since a short copy's end is near and the shortest
// sleep takes 60 us (on an H100: 69 us for a copy of 64 KiB where looking alone takes 8); then rarely, as a wait for a layer takes a
// millisecond or more, and the core has better things to do.
constexpr std::chrono::microseconds kLooking{30};
constexpr std::chrono::microseconds kFirstSleep{5};
constexpr std::chrono::microseconds kLongestSleep{100};
// Waits longer than this have no deadline: now + timeout must not overflow.
constexpr std::chrono::hours kForever{24 * 365};

// Copies that go to the driver in one call, at most: it was seen to crash on batches of 50,000 (vllm-project/vllm#49276, driver 580).
constexpr std::size_t kBatch = 512;

// Threads that fill a staging slot, the driver's included; staging.h says what they bring.
constexpr std::size_t kFillingThreads = 4;

StreamPointer native(StreamHandle stream) noexcept { return reinterpret_cast<StreamPointer>(stream); }
DevicePointer device_pointer(const void* at) noexcept {
  return static_cast<DevicePointer>(reinterpret_cast<std::uintptr_t>(at));
}

[[noreturn]] void unknown(const char* call, const char* what, std::uint64_t handle) {
  throw Error(ErrorKind::invalid_argument,
              std::string(call) + ": " + what + " " + std::to_string(handle) +
                  " is not one of this backend (or is destroyed, or forgotten). Nothing changed.",
              {{"operation", std::string(call)}, {"handle", static_cast<std::int64_t>(handle)}});
}

}  // namespace

Streams::~Streams() {
  try {
    const Context::Use use(context_, "close");
    for (const auto& stream : streams_) {
      if (stream.second != kOwn) continue;
      (void)driver_.cuStreamSynchronize(native(stream.first));
      (void)driver_.cuStreamDestroy(native(stream.first));
    }
    lanes_.clear();
    for (const auto& event : events_) (void)driver_.cuEventDestroy(event.second->native);
  } catch (const Error&) {
    // No context to work in: the process is ending, and its end gives everything back.
  }
}

void Streams::add_usage(Usage& usage) const {
  const std::shared_lock<std::shared_mutex> lock(books_);
  usage.streams = own_streams_;
  usage.events = events_.size();
}

// ---- streams ---------------------------------------------------------------------------------------------------------
StreamHandle Streams::create_stream() {
  const Context::Use use(context_, "create_stream");
  StreamPointer stream = nullptr;
  check(driver_, "create_stream", "cuStreamCreateWithPriority",
        driver_.cuStreamCreateWithPriority(&stream, kStreamNonBlocking, kDefaultPriority));
  const auto handle = reinterpret_cast<StreamHandle>(stream);
  try {
    const std::lock_guard<std::shared_mutex> lock(books_);
    // A stream that its owner destroyed without forgetting it here may have had this value: it is ours now.
    streams_.insert_or_assign(handle, kOwn);
    ++own_streams_;
  } catch (...) {
    (void)driver_.cuStreamDestroy(stream);
    throw;
  }
  return handle;
}

void Streams::destroy_stream(StreamHandle stream) {
  if (origin_of(stream, "destroy_stream") != Origin::own) {
    throw Error(ErrorKind::invalid_argument,
                "destroy_stream: stream " + std::to_string(stream) + " was adopted and is its owner's. Nothing changed. " +
                    "Forget it instead.",
                {{"operation", std::string("destroy_stream")}, {"handle", static_cast<std::int64_t>(stream)}});
  }
  const Context::Use use(context_, "destroy_stream");
  // The work is over when it has failed, too: nothing is pending any more then.
  if (const Result code = driver_.cuStreamSynchronize(native(stream)); code != result::kSuccess) {
    if (driver_.cuStreamQuery(native(stream)) == result::kNotReady) {
      fail(driver_, "destroy_stream", "cuStreamSynchronize", code);
    }
  }
  std::unique_ptr<StagingLane> lane;
  {
    const std::lock_guard<std::shared_mutex> lock(books_);
    if (const auto found = lanes_.find(stream); found != lanes_.end()) lane.swap(found->second);
  }
  if (lane) {
    try {
      lane->close();
    } catch (...) {
      const std::lock_guard<std::shared_mutex> lock(books_);
      lanes_[stream].swap(lane);
      throw;
    }
  }
  // Under the lock: the driver may give the value to the next stream at once, which create_stream then enters after this.
  const std::lock_guard<std::shared_mutex> lock(books_);
  check(driver_, "destroy_stream", "cuStreamDestroy", driver_.cuStreamDestroy(native(stream)));
  streams_.erase(stream);
  lanes_.erase(stream);
  --own_streams_;
}

StreamHandle Streams::adopt_stream(std::uint64_t value) {
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorKind::invalid_argument, "adopt_stream: stream " + std::to_string(value) + " " + why + " Nothing changed.",
                {{"operation", std::string("adopt_stream")}, {"native", static_cast<std::int64_t>(value)},
                 {"device", std::int64_t{context_.device()}}});
  };
  if (value == 0) refuse("is no handle; the legacy default stream is 1.");
  if (value > kStreamPerThread) {
    {
      const std::shared_lock<std::shared_mutex> lock(books_);
      const auto found = streams_.find(value);
      if (found != streams_.end() && found->second == kOwn) refuse("is one that this backend made.");
    }
    const Context::Use use(context_, "adopt_stream");
    ContextPointer context = nullptr;
    const Result code = driver_.cuStreamGetCtx(native(value), &context);
    if (code == result::kInvalidHandle || code == result::kInvalidContext) refuse("is not a stream that the driver knows.");
    check(driver_, "adopt_stream", "cuStreamGetCtx", code);
    // Also other contexts of this device are refused: an event is recorded in the context that it was made in only.
    if (context != context_.get()) {
      refuse("belongs to another device, or to another context than the primary one of device " +
             std::to_string(context_.device()) + ". Use a stream of torch or of the CUDA runtime on that device.");
    }
  }
  const std::lock_guard<std::shared_mutex> lock(books_);
  std::size_t& adoptions = streams_.try_emplace(value, 0).first->second;
  if (adoptions == kOwn) refuse("is one that this backend made.");  // since: its owner has destroyed the one of that name
  ++adoptions;
  return value;
}

void Streams::forget_stream(StreamHandle stream) {
  const std::lock_guard<std::shared_mutex> lock(books_);
  const auto found = streams_.find(stream);
  if (found == streams_.end() || found->second == kOwn) unknown("forget_stream", "stream", stream);
  if (--found->second == 0) streams_.erase(found);
}

Streams::Origin Streams::origin_of(StreamHandle stream, const char* call) const {
  const std::shared_lock<std::shared_mutex> lock(books_);
  const auto found = streams_.find(stream);
  if (found == streams_.end()) unknown(call, "stream", stream);
  return found->second == kOwn ? Origin::own : Origin::adopted;
}

void Streams::require_stream(StreamHandle stream, const char* call) const { (void)origin_of(stream, call); }

// In a capture a wait would be for an event from outside, which invalidates it, and a copy would be replayed with the graph long
// after its addresses and its place in the schedule have changed. Our own streams are never captured.
void Streams::refuse_capture(StreamHandle stream, Origin origin, const char* call) const {
  if (origin == Origin::own) return;
  int status = kCaptureStatusNone;
  const Result code = driver_.cuStreamIsCapturing(native(stream), &status);
  if (code != result::kStreamCaptureImplicit) {  // the default stream while another one is captured
    check(driver_, call, "cuStreamIsCapturing", code);
    if (status == kCaptureStatusNone) return;
  }
  throw Error(ErrorKind::invalid_state,
              std::string(call) + ": stream " + std::to_string(stream) +
                  " is being captured into a graph, which this work must not be part of. Nothing changed. Call it outside of the "
                  "capture: capture layers one by one and wait between their replays.",
              {{"operation", std::string(call)}, {"stream", static_cast<std::int64_t>(stream)}});
}

Result Streams::enqueue(StreamPointer stream, const CopyPart& part, const char** entry) const {
  switch (part.direction) {
    case Direction::to_device:
      *entry = "cuMemcpyHtoDAsync";
      return driver_.cuMemcpyHtoDAsync(device_pointer(part.to), part.from, part.bytes, stream);
    case Direction::to_host:
      *entry = "cuMemcpyDtoHAsync";
      return driver_.cuMemcpyDtoHAsync(part.to, device_pointer(part.from), part.bytes, stream);
    case Direction::inside_device:
      *entry = "cuMemcpyDtoDAsync";
      return driver_.cuMemcpyDtoDAsync(device_pointer(part.to), device_pointer(part.from), part.bytes, stream);
    case Direction::staged:  // `copy` takes these itself
    case Direction::unknown: break;
  }
  *entry = "cuMemcpyAsync";
  return driver_.cuMemcpyAsync(device_pointer(part.to), device_pointer(part.from), part.bytes, stream);
}

Result Streams::enqueue(StreamPointer stream, const CopyPart* parts, std::size_t count, const char** entry) const {
  std::vector<DevicePointer> to;
  std::vector<DevicePointer> from;
  std::vector<std::size_t> bytes;
  for (auto* list : {&to, &from}) list->reserve(count);
  bytes.reserve(count);
  for (const CopyPart* part = parts; part != parts + count; ++part) {
    to.push_back(device_pointer(part->to));
    from.push_back(device_pointer(part->from));
    bytes.push_back(part->bytes);
  }
  CopyAttributes attributes;
  attributes.source_order = kSourceInStreamOrder;
  attributes.flags = kBesideCompute;  // by copy engines: passes run meanwhile, and their multiprocessors are theirs
  std::size_t first = 0;
  std::size_t failed = 0;
  *entry = "cuMemcpyBatchAsync";
  return driver_.cuMemcpyBatchAsync(to.data(), from.data(), bytes.data(), count, &attributes, &first, 1, &failed, stream);
}

StagingLane& Streams::lane_of(StreamHandle stream, Origin origin, const char* call) {
  if (origin != Origin::own) {
    throw Error(ErrorKind::invalid_argument,
                std::string(call) + ": staged host memory is copied on streams of this backend's alone, and stream " +
                    std::to_string(stream) + " was adopted. Nothing changed.",
                {{"operation", std::string(call)}, {"handle", static_cast<std::int64_t>(stream)}});
  }
  {
    const std::shared_lock<std::shared_mutex> lock(books_);
    if (const auto found = lanes_.find(stream); found != lanes_.end() && found->second) return *found->second;
  }
  // Made without the lock, since that takes a millisecond. Copies on one stream are one after another, so no other makes it meanwhile.
  std::call_once(filled_, [this] {
    const std::size_t processors = std::max(1U, std::thread::hardware_concurrency());
    try {
      filling_ = std::make_unique<host::CopyPool>(std::min(kFillingThreads, processors));
    } catch (const Error&) {  // no more threads for this process: the driver's fills slots alone
      filling_ = std::make_unique<host::CopyPool>(1);
    }
  });
  auto made = std::make_unique<StagingLane>(context_, locked_, *filling_, call);
  const std::lock_guard<std::shared_mutex> lock(books_);
  std::unique_ptr<StagingLane>& place = lanes_[stream];
  place.swap(made);
  return *place;
}

// Some of a call's work may be under way, and its caller, who is told of an error, may use the memory for something else.
void Streams::fail_midway(StreamPointer stream, const char* call, const char* entry, Result code) const {
  const bool ended = driver_.cuStreamSynchronize(stream) == result::kSuccess;
  fail(driver_, call, entry, code, {},
       ended ? "The work enqueued before it has ended; the contents of the targets are undefined."
             : "The work enqueued before it may still run: destroy the stream before the memory is used again.");
}

void Streams::copy(StreamHandle stream, const std::vector<CopyPart>& parts, const char* call) {
  const Origin origin = origin_of(stream, call);
  const Context::Use use(context_, call);
  refuse_capture(stream, origin, call);
  const auto where = native(stream);
  const std::size_t most = batches_ && stream != kStreamLegacy ? kBatch : 1;
  const auto staged = [](const CopyPart& part) { return part.direction == Direction::staged; };
  StagingLane* const lane = std::any_of(parts.begin(), parts.end(), staged) ? &lane_of(stream, origin, call) : nullptr;
  for (auto next = parts.begin(); next != parts.end();) {
    const char* entry = nullptr;
    if (staged(*next)) {
      const Result code = lane->copy(where, next->to, next->from, next->bytes, &entry);
      if (code != result::kSuccess) fail_midway(where, call, entry, code);
      ++next;
      continue;
    }
    const auto end = next + static_cast<std::ptrdiff_t>(std::min<std::size_t>(most, parts.end() - next));
    const auto taken = static_cast<std::size_t>(std::find_if(next, end, staged) - next);
    const Result code = taken == 1 ? enqueue(where, *next, &entry) : enqueue(where, &*next, taken, &entry);
    // Whether a batch that is refused was refused whole is not documented.
    if (code != result::kSuccess && next == parts.begin() && taken == 1) fail(driver_, call, entry, code);
    if (code != result::kSuccess) fail_midway(where, call, entry, code);
    next += static_cast<std::ptrdiff_t>(taken);
  }
}

void Streams::fill(StreamHandle stream, std::byte* to, std::uint8_t value, const std::vector<std::size_t>& parts) {
  const Origin origin = origin_of(stream, "fill");
  const Context::Use use(context_, "fill");
  refuse_capture(stream, origin, "fill");
  const std::byte* const begin = to;
  for (const std::size_t bytes : parts) {
    const Result code = driver_.cuMemsetD8Async(device_pointer(to), value, bytes, native(stream));
    if (code != result::kSuccess && to == begin) fail(driver_, "fill", "cuMemsetD8Async", code);
    if (code != result::kSuccess) fail_midway(native(stream), "fill", "cuMemsetD8Async", code);
    to += bytes;
  }
}

// ---- events ----------------------------------------------------------------------------------------------------------
// Timed only where a caller will ask: the device writes the time of each recording down then. With blocking sync: a thread that
// waits without a deadline sleeps until the device interrupts it. Such waits are a worker's, off the critical path, while the
// cores that the driver's spinning would take are the engine's.
EventHandle Streams::create_event(bool timed) {
  const Context::Use use(context_, "create_event");
  EventPointer event = nullptr;
  const unsigned flags = timed ? kEventBlockingSync : kEventBlockingSync | kEventDisableTiming;
  check(driver_, "create_event", "cuEventCreate", driver_.cuEventCreate(&event, flags));
  try {
    const std::lock_guard<std::shared_mutex> lock(books_);
    events_.emplace(last_event_ + 1, std::make_shared<Event>(event, timed));
    return ++last_event_;
  } catch (...) {
    (void)driver_.cuEventDestroy(event);
    throw;
  }
}

std::shared_ptr<Streams::Event> Streams::event_of(EventHandle event, const char* call) const {
  const auto found = events_.find(event);
  if (found == events_.end() || found->second->going) unknown(call, "event", event);
  return found->second;
}

Streams::Held Streams::hold(EventHandle event, const char* call) const {
  const std::shared_lock<std::shared_mutex> lock(books_);
  return Held(event_of(event, call));  // does not wait: the one holder of an event's lock has put it out of sight before
}

void Streams::destroy_event(EventHandle event) {
  const Context::Use use(context_, "destroy_event");
  std::shared_ptr<Event> going;
  {
    const std::lock_guard<std::shared_mutex> lock(books_);
    going = event_of(event, "destroy_event");
    going->going = true;
  }
  Result code = result::kSuccess;
  {
    const std::lock_guard<std::shared_mutex> alone(going->in_use);
    code = driver_.cuEventDestroy(going->native);
  }
  const std::lock_guard<std::shared_mutex> lock(books_);
  going->going = false;  // it is there still, if that failed
  check(driver_, "destroy_event", "cuEventDestroy", code);
  events_.erase(event);
}

void Streams::record(EventHandle event, StreamHandle stream) {
  const Origin origin = origin_of(stream, "record");
  const Context::Use use(context_, "record");
  const Held recorded = hold(event, "record");
  refuse_capture(stream, origin, "record");
  check(driver_, "record", "cuEventRecord", driver_.cuEventRecord(recorded->native, native(stream)));
  recorded->recorded.store(true, std::memory_order_relaxed);
}

void Streams::stream_wait(StreamHandle stream, EventHandle event) {
  const Origin origin = origin_of(stream, "stream_wait");
  const Context::Use use(context_, "stream_wait");
  const Held waited = hold(event, "stream_wait");
  refuse_capture(stream, origin, "stream_wait");
  check(driver_, "stream_wait", "cuStreamWaitEvent", driver_.cuStreamWaitEvent(native(stream), waited->native, 0));
}

bool Streams::complete(EventHandle event, const char* call) const {
  const Held asked = hold(event, call);
  const Result code = driver_.cuEventQuery(asked->native);
  if (code == result::kNotReady) return false;
  check(driver_, call, "cuEventQuery", code);
  return true;
}

bool Streams::query(EventHandle event) const {
  const Context::Use use(context_, "query");
  return complete(event, "query");
}

bool Streams::synchronize(EventHandle event, std::chrono::nanoseconds timeout) const {
  const Context::Use use(context_, "synchronize");
  if (complete(event, "synchronize")) return true;
  if (timeout <= std::chrono::nanoseconds::zero()) return false;
  if (timeout >= kForever) {
    const EventPointer waited = hold(event, "synchronize")->native;
    check(driver_, "synchronize", "cuEventSynchronize", driver_.cuEventSynchronize(waited));
    return true;
  }
  const auto begun = Clock::now();
  const auto deadline = begun + timeout;
  const auto looked = begun + std::min<std::chrono::nanoseconds>(timeout, kLooking);
  while (Clock::now() < looked) {
    if (complete(event, "synchronize")) return true;
    std::this_thread::yield();
  }
  std::chrono::nanoseconds sleep = kFirstSleep;
  for (;;) {
    const auto left = deadline - Clock::now();
    if (left <= std::chrono::nanoseconds::zero()) return false;
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(sleep, left));
    sleep = std::min<std::chrono::nanoseconds>(2 * sleep, kLongestSleep);
    if (complete(event, "synchronize")) return true;
  }
}

double Streams::elapsed(EventHandle from, EventHandle to) const {
  const Context::Use use(context_, "elapsed");
  std::shared_ptr<Event> first;
  std::shared_ptr<Event> second;
  std::optional<Held> one;
  std::optional<Held> another;
  {
    const std::shared_lock<std::shared_mutex> lock(books_);
    first = event_of(from, "elapsed");
    second = event_of(to, "elapsed");
    // In one order whichever way round they are asked about, and one lock not twice.
    one.emplace(from < to ? first : second);
    if (from != to) another.emplace(from < to ? second : first);
  }
  for (const auto& [event, handle] : {std::pair(first.get(), from), std::pair(second.get(), to)}) {
    if (event->timed) continue;
    throw Error(ErrorKind::invalid_state, "elapsed: the event only orders. Nothing changed; create it with timed = true.",
                {{"event", static_cast<std::int64_t>(handle)}});
  }
  const auto refuse = [](EventHandle event) {
    throw Error(ErrorKind::invalid_state, "elapsed: expected two recorded and completed events. Synchronize first.",
                {{"event", static_cast<std::int64_t>(event)}});
  };
  if (!first->recorded.load(std::memory_order_relaxed)) refuse(from);
  if (!second->recorded.load(std::memory_order_relaxed)) refuse(to);
  float milliseconds = 0;
  const Result code = driver_.cuEventElapsedTime(&milliseconds, first->native, second->native);
  if (code == result::kNotReady) refuse(driver_.cuEventQuery(first->native) == result::kNotReady ? from : to);
  check(driver_, "elapsed", "cuEventElapsedTime", code);
  return static_cast<double>(milliseconds) / 1e3;
}

}  // namespace remap::cuda
