// Stream captures: who is capturing, in which mode, and what that forbids to whom. No graph is built.
#include <utility>

#include "emulator.h"
#include "streams.h"

namespace remap::emulated {
namespace {

thread_local int thread_mode = kCaptureGlobal;

}  // namespace

CUresult Streams::begin_capture(CUstream handle, int mode) {
  CUresult refused = kSuccess;
  const Shared stream = known(handle, "cuStreamBeginCapture", &refused);
  if (!stream) return refused;
  if (stream->legacy) return emulator_.violate(kCaptureUnsupported, "cuStreamBeginCapture: the legacy default stream");
  if (stream->capture != kCaptureNone || mode < kCaptureGlobal || mode > kCaptureRelaxed) {
    return emulator_.violate(kInvalidValue, "cuStreamBeginCapture: capturing already, or mode " + std::to_string(mode));
  }
  stream->capture = kCaptureActive;
  stream->capture_mode = mode;
  stream->capture_thread = std::this_thread::get_id();
  return kSuccess;
}

CUresult Streams::end_capture(CUstream handle, CUgraph* graph) {
  CUresult refused = kSuccess;
  const Shared stream = known(handle, "cuStreamEndCapture", &refused);
  if (!stream) return refused;
  if (graph == nullptr || stream->capture == kCaptureNone) {
    return emulator_.violate(kInvalidValue, "cuStreamEndCapture: not capturing");
  }
  if (stream->capture_mode != kCaptureRelaxed && stream->capture_thread != std::this_thread::get_id()) {
    return emulator_.violate(kCaptureWrongThread, "cuStreamEndCapture: another thread began it");
  }
  const bool gone = stream->capture == kCaptureGone;
  stream->capture = kCaptureNone;
  *graph = nullptr;
  return gone ? kCaptureInvalidated : kSuccess;
}

CUresult Streams::is_capturing(CUstream handle, int* status) {
  CUresult refused = kSuccess;
  const Shared stream = known(handle, "cuStreamIsCapturing", &refused);
  if (!stream) return refused;
  if (status == nullptr) return emulator_.violate(kInvalidValue, "cuStreamIsCapturing: no place for the status");
  if (stream->legacy) {
    for (const Shared& other : all_) {
      if (other->blocking && other->context == stream->context && other->capture == kCaptureActive) return kCaptureImplicit;
    }
  }
  *status = stream->capture;
  return kSuccess;
}

CUresult Streams::exchange_capture_mode(int* mode) {
  if (mode == nullptr || *mode < kCaptureGlobal || *mode > kCaptureRelaxed) return kInvalidValue;
  std::swap(*mode, thread_mode);
  return kSuccess;
}

CUresult Streams::unsafe(const char* entry) {
  if (thread_mode == kCaptureRelaxed) return kSuccess;
  bool forbidden = false;
  for (const Shared& stream : all_) {
    if (stream->capture != kCaptureActive || stream->capture_mode == kCaptureRelaxed) continue;
    const bool of_this_thread = stream->capture_thread == std::this_thread::get_id();
    const bool of_all = stream->capture_mode == kCaptureGlobal && thread_mode == kCaptureGlobal;
    if (!of_this_thread && !of_all) continue;
    stream->capture = kCaptureGone;
    forbidden = true;
  }
  if (!forbidden) return kSuccess;
  return emulator_.violate(kCaptureUnsupported,
                           std::string(entry) + " is unsafe while a stream is being captured, and ended that");
}

CUresult Streams::refused_by_capture(Stream& stream, const char* entry) {
  if (stream.capture != kCaptureNone) {
    stream.capture = kCaptureGone;
    return emulator_.violate(kCaptureUnsupported, std::string(entry) + " on a stream that is being captured");
  }
  if (!stream.legacy) return kSuccess;
  bool implicit = false;
  for (const Shared& other : all_) {
    if (!other->blocking || other->context != stream.context || other->capture != kCaptureActive) continue;
    other->capture = kCaptureGone;
    implicit = true;
  }
  if (!implicit) return kSuccess;
  return emulator_.violate(kCaptureImplicit, std::string(entry) + " on the legacy default stream, which a blocking stream " +
                                                 "that is being captured would have to wait for");
}

}  // namespace remap::emulated
