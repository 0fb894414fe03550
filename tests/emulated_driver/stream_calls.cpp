// Entry points: streams, events, captures.
#include "emulator.h"
#include "entry_points.h"

namespace remap::emulated::entry {

// Priorities are kept, within the range of today's devices, and decide nothing here.
CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  return serve("cuStreamCreateWithPriority", kUnsafeWithContext,
               [&](Emulator& e, Lock&) { return e.streams.create(stream, flags, priority); });
}
CUresult cuStreamGetPriority(CUstream stream, int* priority) {
  return serve("cuStreamGetPriority", kWithContext, [&](Emulator& e, Lock&) { return e.streams.priority_of(stream, priority); });
}
CUresult cuStreamDestroy(CUstream stream) {
  return serve("cuStreamDestroy", kUnsafeWithContext, [&](Emulator& e, Lock&) { return e.streams.destroy(stream); });
}
CUresult cuStreamSynchronize(CUstream stream) {
  return serve("cuStreamSynchronize", kUnsafeWithContext,
               [&](Emulator& e, Lock& lock) { return e.streams.synchronize(lock, stream); });
}
CUresult cuStreamQuery(CUstream stream) {
  return serve("cuStreamQuery", kUnsafeWithContext, [&](Emulator& e, Lock&) { return e.streams.query(stream); });
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  return serve("cuStreamWaitEvent", kEnqueuesWithContext, [&](Emulator& e, Lock& lock) { return e.streams.wait(lock, stream, event, flags); });
}
CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  return serve("cuStreamGetCtx", kWithContext, [&](Emulator& e, Lock&) { return e.streams.context_of(stream, context); });
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  return serve("cuEventCreate", kWithContext, [&](Emulator& e, Lock&) { return e.streams.create_event(event, flags); });
}
CUresult cuEventDestroy(CUevent event) {
  return serve("cuEventDestroy", kWithContext, [&](Emulator& e, Lock&) { return e.streams.destroy_event(event); });
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  return serve("cuEventRecord", kEnqueuesWithContext, [&](Emulator& e, Lock& lock) { return e.streams.record(lock, event, stream); });
}
CUresult cuEventQuery(CUevent event) {
  return serve("cuEventQuery", kUnsafeWithContext, [&](Emulator& e, Lock&) { return e.streams.query_event(event); });
}
CUresult cuEventSynchronize(CUevent event) {
  return serve("cuEventSynchronize", kUnsafeWithContext,
               [&](Emulator& e, Lock& lock) { return e.streams.synchronize_event(lock, event); });
}
CUresult cuEventElapsedTime(float* milliseconds, CUevent from, CUevent to) {
  return serve("cuEventElapsedTime", kWithContext, [&](Emulator& e, Lock&) {
    if (milliseconds == nullptr) return e.violate(kInvalidValue, "cuEventElapsedTime: no place for the answer");
    return e.streams.elapsed(milliseconds, from, to);
  });
}

CUresult cuStreamIsCapturing(CUstream stream, int* status) {
  return serve("cuStreamIsCapturing", kWithContext, [&](Emulator& e, Lock&) { return e.streams.is_capturing(stream, status); });
}
CUresult cuStreamBeginCapture(CUstream stream, int mode) {
  return serve("cuStreamBeginCapture", kWithContext, [&](Emulator& e, Lock&) { return e.streams.begin_capture(stream, mode); });
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  return serve("cuStreamEndCapture", kWithContext, [&](Emulator& e, Lock&) { return e.streams.end_capture(stream, graph); });
}
CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  return serve("cuThreadExchangeStreamCaptureMode", kInit, [&](Emulator& e, Lock&) {
    if (mode == nullptr || *mode < kCaptureGlobal || *mode > kCaptureRelaxed) {
      return e.violate(kInvalidValue, "cuThreadExchangeStreamCaptureMode: not a mode");
    }
    Streams::exchange_capture_mode(mode);
    return CUresult{kSuccess};
  });
}

}  // namespace remap::emulated::entry
