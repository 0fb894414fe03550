#include "streams.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <system_error>

#include "emulator.h"

namespace remap::emulated {
namespace {

constexpr int kGreatestPriority = -5;  // of a device of today
constexpr std::uintptr_t kHandleStep = 0x40;

bool overlap(CUdeviceptr a, std::size_t a_bytes, CUdeviceptr b, std::size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

bool Operation::uses(CUdeviceptr at, std::size_t size) const {
  const auto in = [&](const Place& place) {
    return place.kind != Place::Kind::none && overlap(at, size, place.at, bytes);
  };
  return in(to) || in(from);
}

Streams::Shared Streams::start(CUcontext context, bool blocking) {
  auto stream = std::make_shared<Stream>();
  stream->context = context;
  stream->device = emulator_.contexts.device_of(context);
  stream->blocking = blocking;
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals belong to the application's own threads
  try {
    std::thread([this, stream] { work(stream); }).detach();
  } catch (const std::system_error&) {
    stream.reset();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (stream) all_.insert(stream);
  return stream;
}

Streams::Shared Streams::default_stream(std::uintptr_t kind) {
  const CUcontext context = Contexts::current();
  const bool legacy = kind != kPerThreadStream;
  Shared& found = default_[{context, legacy ? std::thread::id() : std::this_thread::get_id()}];
  if (!found) {
    found = start(context, !legacy);  // the per-thread one is a blocking stream, and orders itself with the legacy one
    if (found) found->legacy = legacy;
  }
  return found;
}

Streams::Shared Streams::find(CUstream handle) {
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  if (number <= kPerThreadStream) return Contexts::current() != nullptr ? default_stream(number) : nullptr;
  const auto found = handles_.find(handle);
  return found == handles_.end() ? nullptr : found->second;
}

bool Streams::given_out(CUstream handle) const {
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  return number > kFirstStream && number <= next_stream_ && (number - kFirstStream) % kHandleStep == 0;
}

Streams::Shared Streams::known(CUstream handle, const char* entry, CUresult* refused) {
  Shared found = find(handle);
  if (!found) *refused = emulator_.poison(std::string(entry) + ": unknown or destroyed stream");
  return found;
}

CUresult Streams::create(CUstream* handle, unsigned flags, int priority) {
  if (handle == nullptr || (flags & ~kStreamNonBlocking) != 0) {
    return emulator_.violate(kInvalidValue, "cuStreamCreate: no place for a handle, or flags " + std::to_string(flags));
  }
  Shared stream = start(Contexts::current(), (flags & kStreamNonBlocking) == 0);
  if (!stream) return kOutOfMemory;
  stream->own = true;
  stream->priority = std::clamp(priority, kGreatestPriority, 0);
  next_stream_ += kHandleStep;
  *handle = reinterpret_cast<CUstream>(next_stream_);
  handles_.emplace(*handle, std::move(stream));
  return kSuccess;
}

CUresult Streams::destroy(CUstream handle) {
  const auto found = handles_.find(handle);
  if (reinterpret_cast<std::uintptr_t>(handle) <= kPerThreadStream) {
    return emulator_.violate(kInvalidHandle, "cuStreamDestroy: a default stream");
  }
  if (found == handles_.end()) return emulator_.poison("cuStreamDestroy: unknown or destroyed stream");
  found->second->destroyed = true;
  found->second->changed.notify_all();
  handles_.erase(found);
  return kSuccess;
}

void Streams::forget_context(CUcontext context) {
  for (auto each = default_.begin(); each != default_.end();) {
    if (each->first.first != context) {
      ++each;
      continue;
    }
    each->second->destroyed = true;
    each->second->changed.notify_all();
    each = default_.erase(each);
  }
}

CUresult Streams::error_of(const Stream& stream) const {
  return stream.error != kSuccess ? stream.error : emulator_.contexts.state(stream.context);
}

CUresult Streams::synchronize(Lock& lock, CUstream handle) {
  CUresult refused = kSuccess;
  const Shared stream = known(handle, "cuStreamSynchronize", &refused);
  if (!stream) return refused;
  if (const CUresult captured = refused_by_capture(*stream, "cuStreamSynchronize"); captured != kSuccess) return captured;
  if (stream->legacy) order_with_legacy(*stream);  // what it would wait for is part of its work
  const std::uint64_t until = stream->enqueued;
  stream->changed.wait(lock, [&] { return stream->finished >= until; });
  return error_of(*stream);
}

CUresult Streams::query(CUstream handle) {
  CUresult refused = kSuccess;
  const Shared stream = known(handle, "cuStreamQuery", &refused);
  if (!stream) return refused;
  if (const CUresult captured = refused_by_capture(*stream, "cuStreamQuery"); captured != kSuccess) return captured;
  if (stream->legacy) order_with_legacy(*stream);
  return stream->idle() ? error_of(*stream) : kNotReady;
}

CUresult Streams::context_of(CUstream handle, CUcontext* context) {
  const Shared stream = find(handle);
  if (!stream && given_out(handle)) return emulator_.poison("cuStreamGetCtx: destroyed stream");
  // Asked of what a user gave, which nobody could check before: no rule was broken. A driver need not survive a pointer that
  // was never a stream; to be lenient here lets tests pass such numbers in.
  if (!stream || context == nullptr) return kInvalidHandle;
  *context = stream->context;
  return kSuccess;
}

CUresult Streams::priority_of(CUstream handle, int* priority) {
  CUresult refused = kSuccess;
  const Shared stream = known(handle, "cuStreamGetPriority", &refused);
  if (!stream) return refused;
  if (priority == nullptr) return emulator_.violate(kInvalidValue, "cuStreamGetPriority: no place for the answer");
  *priority = stream->priority;
  return kSuccess;
}

void Streams::line_up(const Stream& stream, const Operation* before, Operation& next) {
  CopyEngine* const among = before != nullptr ? before->engine : nullptr;
  if (next.way != Operation::Way::none) {
    CopyEngine* const engine = &engines_[{stream.device, next.way}];
    if (before != nullptr && among != engine) return;
    next.engine = engine;
    next.ticket = ++last_ticket_;
    engine->line.push_back(next.ticket);
    return;
  }
  const bool waits = next.kind == Operation::Kind::wait && next.recording && !next.recording->complete;
  const bool event = next.kind == Operation::Kind::record || next.kind == Operation::Kind::wait;
  const bool nothing = next.kind == Operation::Kind::copy && next.bytes == 0;
  if (nothing || (event && !waits)) next.engine = among;
}

void Streams::append(Stream& stream, Operation operation) {
  const Operation* before = nullptr;
  if (stream.running) before = &*stream.running;
  if (!stream.queue.empty()) before = &stream.queue.back();
  line_up(stream, before, operation);
  stream.queue.push_back(std::move(operation));
  ++stream.enqueued;
  stream.changed.notify_all();
}

std::shared_ptr<Recording> Streams::mark(Stream& stream) {
  Operation operation;
  operation.kind = Operation::Kind::record;
  operation.recording = std::make_shared<Recording>();
  auto recording = operation.recording;
  append(stream, std::move(operation));
  return recording;
}

// The legacy default stream waits for all work of the context's blocking streams, and they for its.
void Streams::order_with_legacy(Stream& stream) {
  const auto follow = [&](Stream& other) {
    if (&other == &stream || other.idle() || other.context != stream.context || other.capture != kCaptureNone) return;
    Operation operation;
    operation.kind = Operation::Kind::wait;
    operation.recording = mark(other);
    operation.for_order_alone = true;
    append(stream, std::move(operation));
  };
  if (stream.legacy) {
    for (const Shared& other : all_) {
      if (other->blocking) follow(*other);
    }
  } else if (stream.blocking) {
    const auto legacy = default_.find({stream.context, std::thread::id()});
    if (legacy != default_.end() && legacy->second) follow(*legacy->second);
  }
}

CUresult Streams::enqueue(Lock& lock, CUstream handle, Operation operation) {
  CUresult refused = kSuccess;
  const Shared stream = known(handle, operation.entry, &refused);
  if (!stream) return refused;
  const auto has_room = [&] { return stream->enqueued - stream->finished < emulator_.settings.channel_ops; };
  if (!has_room()) {
    ++blocked_;
    stream->changed.wait(lock, [&] { return stream->destroyed || has_room(); });
    --blocked_;
    if (stream->destroyed) return emulator_.poison(std::string(operation.entry) + ": the stream was destroyed meanwhile");
  }
  if (const CUresult captured = refused_by_capture(*stream, operation.entry); captured != kSuccess) return captured;
  order_with_legacy(*stream);
  append(*stream, std::move(operation));
  return kSuccess;
}

const char* Streams::in_flight(CUdeviceptr at, std::size_t bytes) const {
  for (const Shared& stream : all_) {
    if (error_of(*stream) != kSuccess) continue;  // the rest of its work is skipped
    if (stream->running && stream->running->uses(at, bytes)) return stream->running->entry;
    for (const Operation& operation : stream->queue) {
      if (operation.uses(at, bytes)) return operation.entry;
    }
  }
  return nullptr;
}

void Streams::quiesce(Lock& lock, CUdeviceptr at, std::size_t bytes) {
  touched_.wait(lock, [&] {
    return std::none_of(all_.begin(), all_.end(),
                        [&](const Shared& stream) { return stream->touching && stream->running->uses(at, bytes); });
  });
}

std::size_t Streams::owned_by(CUcontext context) const {
  const auto streams = std::count_if(handles_.begin(), handles_.end(),
                                     [context](const auto& entry) { return entry.second->context == context; });
  const auto events = std::count_if(events_.begin(), events_.end(),
                                    [context](const auto& entry) { return entry.second.context == context; });
  return static_cast<std::size_t>(streams + events);
}

std::size_t Streams::unfinished() const {
  std::size_t sum = 0;
  for (const Shared& stream : all_) sum += static_cast<std::size_t>(stream->enqueued - stream->finished);
  return sum;
}

void Streams::heal() {
  for (const Shared& stream : all_) stream->error = kSuccess;
}

}  // namespace remap::emulated
