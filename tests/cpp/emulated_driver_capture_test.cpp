// The emulated driver itself, captures: what they forbid, to whom, and what ends them.
#include <thread>
#include <utility>

#include "emulated_world.h"

using namespace remap::testing;

namespace {

TEST(captures) {
  World world;
  const CUstream stream = world.stream;
  int status = -1;
  CUgraph graph = nullptr;
  FINE(CU(cuStreamIsCapturing)(stream, &status));
  CHECK(status == kCaptureNone);
  BREAKS(kInvalidValue, CU(cuStreamEndCapture)(stream, &graph));
  BREAKS(kCaptureUnsupported, CU(cuStreamBeginCapture)(default_stream(kLegacyStream), kCaptureRelaxed));
  BREAKS(kInvalidValue, CU(cuStreamBeginCapture)(stream, 7));

  FINE(CU(cuStreamBeginCapture)(stream, kCaptureRelaxed));
  FINE(CU(cuStreamIsCapturing)(stream, &status));
  CHECK(status == kCaptureActive);
  FINE(CU(cuEventQuery)(world.event));  // in relaxed mode nothing is unsafe
  FINE(CU(cuStreamEndCapture)(stream, &graph));

  const std::vector<std::pair<const char*, CUresult (*)(World&)>> forbidden = {
      {"copy", [](World& w) { return CU(cuMemcpyHtoDAsync)(w.region.slot(0), w.locked.at, 8, w.stream); }},
      {"fill", [](World& w) { return CU(cuMemsetD8Async)(w.region.slot(0), 0, 8, w.stream); }},
      {"record", [](World& w) { return CU(cuEventRecord)(w.event, w.stream); }},
      {"wait", [](World& w) { return CU(cuStreamWaitEvent)(w.stream, w.event, 0); }},
      {"query", [](World& w) { return CU(cuStreamQuery)(w.stream); }},
      {"synchronize", [](World& w) { return CU(cuStreamSynchronize)(w.stream); }},
  };
  for (const auto& [name, call] : forbidden) {
    FINE(CU(cuStreamBeginCapture)(stream, kCaptureRelaxed));
    BREAKS(kCaptureUnsupported, call(world));
    FINE(CU(cuStreamIsCapturing)(stream, &status));
    CHECK(status == kCaptureGone);
    GIVES(kCaptureInvalidated, 0u, CU(cuStreamEndCapture)(stream, &graph));
  }
  world.close();
}

TEST(unsafe_calls_end_captures_of_their_mode) {
  World world;
  CUgraph graph = nullptr;
  const auto query_elsewhere = [&](int mode) {
    CUresult result = kSuccess;
    std::thread([&] {
      FINE(CU(cuCtxPushCurrent)(world.device.context));
      FINE(CU(cuThreadExchangeStreamCaptureMode)(&mode));
      CHECK(mode == kCaptureGlobal);  // what a thread begins with
      result = CU(cuEventQuery)(world.event);
      FINE(CU(cuCtxPopCurrent)(nullptr));
    }).join();
    return result;
  };
  FINE(CU(cuStreamBeginCapture)(world.stream, kCaptureGlobal));
  GIVES(kSuccess, 0u, query_elsewhere(kCaptureRelaxed));
  GIVES(kSuccess, 0u, query_elsewhere(kCaptureThreadLocal));
  BREAKS(kCaptureUnsupported, query_elsewhere(kCaptureGlobal));
  GIVES(kCaptureInvalidated, 0u, CU(cuStreamEndCapture)(world.stream, &graph));

  FINE(CU(cuStreamBeginCapture)(world.stream, kCaptureThreadLocal));
  GIVES(kSuccess, 0u, query_elsewhere(kCaptureGlobal));
  std::thread([&] {
    FINE(CU(cuCtxPushCurrent)(world.device.context));
    BREAKS(kCaptureWrongThread, CU(cuStreamEndCapture)(world.stream, &graph));
    FINE(CU(cuCtxPopCurrent)(nullptr));
  }).join();
  BREAKS(kCaptureUnsupported, CU(cuEventQuery)(world.event));
  GIVES(kCaptureInvalidated, 0u, CU(cuStreamEndCapture)(world.stream, &graph));
  int mode = 9;
  BREAKS(kInvalidValue, CU(cuThreadExchangeStreamCaptureMode)(&mode));

  // A blocking stream that is captured would have to be waited for by the legacy one.
  CUstream blocking = nullptr;
  FINE(CU(cuStreamCreate)(&blocking, 0));
  FINE(CU(cuStreamBeginCapture)(blocking, kCaptureRelaxed));
  int status = 0;
  GIVES(kCaptureImplicit, 0u, CU(cuStreamIsCapturing)(nullptr, &status));
  BREAKS(kCaptureImplicit, CU(cuMemsetD8Async)(world.region.slot(0), 0, 8, nullptr));
  GIVES(kCaptureInvalidated, 0u, CU(cuStreamEndCapture)(blocking, &graph));
  FINE(CU(cuStreamDestroy)(blocking));
  world.close();
}

}  // namespace
