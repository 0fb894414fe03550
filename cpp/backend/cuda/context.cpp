// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/context.h"

namespace remap::cuda {

Context::Context(const Driver& driver, Device device) : driver_(driver), device_(device) {
  check(driver_, "open", "cuDevicePrimaryCtxRetain", driver_.cuDevicePrimaryCtxRetain(&context_, device_));
}

Context::~Context() {
  if (!process_is_exiting()) (void)driver_.cuDevicePrimaryCtxRelease(device_);
}

Context::Use::Use(const Context& context, const char* operation) : driver_(context.driver_) {
  if (process_is_exiting()) {
    throw Error(ErrorKind::driver,
                std::string(operation) + ": the process is ending and the driver may be gone. Nothing changed. Close sessions "
                "before the process ends.",
                {{"operation", std::string(operation)}, {"code", std::int64_t{result::kDeinitialized}},
                 {"name", std::string("CUDA_ERROR_DEINITIALIZED")}});
  }
  check(driver_, operation, "cuCtxGetCurrent", driver_.cuCtxGetCurrent(&before_));
  if (before_ != context.context_) {
    check(driver_, operation, "cuCtxPushCurrent", driver_.cuCtxPushCurrent(context.context_));
    pushed_ = true;
  }
  if (const Result code = driver_.cuThreadExchangeStreamCaptureMode(&mode_); code != result::kSuccess) {
    leave();
    fail(driver_, operation, "cuThreadExchangeStreamCaptureMode", code);
  }
}

Context::Use::~Use() {
  if (mode_ != kCaptureModeRelaxed) (void)driver_.cuThreadExchangeStreamCaptureMode(&mode_);
  leave();
}

// The call's effect stands, so a failure here is not one of the call. If popping fails, setting puts the caller's context back.
void Context::Use::leave() noexcept {
  if (!pushed_) return;
  ContextPointer popped = nullptr;
  if (driver_.cuCtxPopCurrent(&popped) != result::kSuccess) (void)driver_.cuCtxSetCurrent(before_);
}

}  // namespace remap::cuda
