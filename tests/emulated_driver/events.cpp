#include "emulator.h"
#include "streams.h"

namespace remap::emulated {

Event* Streams::known_event(CUevent handle, const char* entry, CUresult* refused) {
  const auto found = events_.find(handle);
  if (found != events_.end()) return &found->second;
  // A null handle is one that a driver sees. It does not look at what others point to.
  *refused = handle == nullptr ? emulator_.violate(kInvalidHandle, std::string(entry) + ": a null event")
                               : emulator_.poison(std::string(entry) + ": unknown or destroyed event");
  return nullptr;
}

CUresult Streams::create_event(CUevent* handle, unsigned flags) {
  if (handle == nullptr || (flags & ~(kEventBlockingSync | kEventDisableTiming)) != 0) {
    return emulator_.violate(kInvalidValue, "cuEventCreate: no place for a handle, or flags " + std::to_string(flags));
  }
  next_event_ += 0x40;
  *handle = reinterpret_cast<CUevent>(next_event_);
  Event event;
  event.context = Contexts::current();
  event.timing = (flags & kEventDisableTiming) == 0;
  events_.emplace(*handle, std::move(event));
  return kSuccess;
}

// Recordings live on with the work that refers to them.
CUresult Streams::destroy_event(CUevent handle) {
  CUresult refused = kSuccess;
  if (known_event(handle, "cuEventDestroy", &refused) == nullptr) return refused;
  events_.erase(handle);
  return kSuccess;
}

CUresult Streams::record(Lock& lock, CUevent handle, CUstream stream_handle) {
  CUresult refused = kSuccess;
  Event* event = known_event(handle, "cuEventRecord", &refused);
  if (event == nullptr) return refused;
  const Shared stream = known(stream_handle, "cuEventRecord", &refused);
  if (!stream) return refused;
  if (stream->context != event->context) {
    return emulator_.violate(kInvalidHandle, "cuEventRecord: the event and the stream are of two contexts");
  }
  Operation operation;
  operation.kind = Operation::Kind::record;
  operation.entry = "cuEventRecord";
  operation.recording = std::make_shared<Recording>();
  auto recording = operation.recording;
  if (const CUresult result = enqueue(lock, stream_handle, std::move(operation)); result != kSuccess) return result;
  event = known_event(handle, "cuEventRecord", &refused);  // anew: enqueueing may have had to wait
  if (event != nullptr) event->last = std::move(recording);
  return refused;
}

CUresult Streams::wait(Lock& lock, CUstream stream, CUevent handle, unsigned flags) {
  CUresult refused = kSuccess;
  const Event* event = known_event(handle, "cuStreamWaitEvent", &refused);
  if (event == nullptr) return refused;
  if (flags != 0) return emulator_.violate(kInvalidValue, "cuStreamWaitEvent: flags " + std::to_string(flags));
  Operation operation;
  operation.kind = Operation::Kind::wait;
  operation.entry = "cuStreamWaitEvent";
  operation.recording = event->last;  // the last one now; recording anew does not change what this waits for
  return enqueue(lock, stream, std::move(operation));
}

CUresult Streams::query_event(CUevent handle) {
  CUresult refused = kSuccess;
  const Event* event = known_event(handle, "cuEventQuery", &refused);
  if (event == nullptr) return refused;
  if (!event->last) return kSuccess;
  return event->last->complete ? event->last->error : kNotReady;
}

CUresult Streams::synchronize_event(Lock& lock, CUevent handle) {
  CUresult refused = kSuccess;
  const Event* event = known_event(handle, "cuEventSynchronize", &refused);
  if (event == nullptr) return refused;
  const std::shared_ptr<Recording> recording = event->last;
  if (!recording) return kSuccess;
  recorded_.wait(lock, [&] { return recording->complete; });
  return recording->error;
}

CUresult Streams::elapsed(float* milliseconds, CUevent from_handle, CUevent to_handle) {
  CUresult refused = kSuccess;
  const Event* from = known_event(from_handle, "cuEventElapsedTime", &refused);
  if (from == nullptr) return refused;
  const Event* to = known_event(to_handle, "cuEventElapsedTime", &refused);
  if (to == nullptr) return refused;
  if (!from->last || !to->last || !from->timing || !to->timing) return kInvalidHandle;
  if (!from->last->complete || !to->last->complete) return kNotReady;
  if (from->last->error != kSuccess) return from->last->error;
  if (to->last->error != kSuccess) return to->last->error;
  *milliseconds = static_cast<float>((to->last->at_s - from->last->at_s) * 1e3);
  return kSuccess;
}

}  // namespace remap::emulated
