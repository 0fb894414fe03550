#include "emulator.h"
#include "streams.h"

namespace remap::emulated {

Event* Streams::known_event(CUevent handle, const char* entry) {
  const auto found = events_.find(handle);
  if (found != events_.end()) return &found->second;
  (void)emulator_.violate(kInvalidHandle, std::string(entry) + ": unknown or destroyed event");
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
  if (events_.erase(handle) == 0) return emulator_.violate(kInvalidHandle, "cuEventDestroy: unknown or destroyed event");
  return kSuccess;
}

CUresult Streams::record(CUevent handle, CUstream stream_handle) {
  Event* event = known_event(handle, "cuEventRecord");
  if (event == nullptr) return kInvalidHandle;
  CUresult refused = kSuccess;
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
  const CUresult result = enqueue(stream_handle, std::move(operation));
  if (result == kSuccess) event->last = std::move(recording);
  return result;
}

CUresult Streams::wait(CUstream stream, CUevent handle, unsigned flags) {
  const Event* event = known_event(handle, "cuStreamWaitEvent");
  if (event == nullptr) return kInvalidHandle;
  if (flags != 0) return emulator_.violate(kInvalidValue, "cuStreamWaitEvent: flags " + std::to_string(flags));
  Operation operation;
  operation.kind = Operation::Kind::wait;
  operation.entry = "cuStreamWaitEvent";
  operation.recording = event->last;  // the last one now; recording anew does not change what this waits for
  return enqueue(stream, std::move(operation));
}

CUresult Streams::query_event(CUevent handle) {
  const Event* event = known_event(handle, "cuEventQuery");
  if (event == nullptr) return kInvalidHandle;
  if (!event->last) return kSuccess;
  return event->last->complete ? event->last->error : kNotReady;
}

CUresult Streams::synchronize_event(Lock& lock, CUevent handle) {
  const Event* event = known_event(handle, "cuEventSynchronize");
  if (event == nullptr) return kInvalidHandle;
  const std::shared_ptr<Recording> recording = event->last;
  if (!recording) return kSuccess;
  recorded_.wait(lock, [&] { return recording->complete; });
  return recording->error;
}

CUresult Streams::elapsed(float* milliseconds, CUevent from_handle, CUevent to_handle) {
  const Event* from = known_event(from_handle, "cuEventElapsedTime");
  const Event* to = known_event(to_handle, "cuEventElapsedTime");
  if (from == nullptr || to == nullptr) return kInvalidHandle;
  if (!from->last || !to->last || !from->timing || !to->timing) return kInvalidHandle;
  if (!from->last->complete || !to->last->complete) return kNotReady;
  if (from->last->error != kSuccess) return from->last->error;
  if (to->last->error != kSuccess) return to->last->error;
  *milliseconds = static_cast<float>((to->last->at_s - from->last->at_s) * 1e3);
  return kSuccess;
}

}  // namespace remap::emulated
