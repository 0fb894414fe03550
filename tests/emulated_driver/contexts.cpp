#include "contexts.h"

#include <string>

namespace remap::emulated {

CUcontext Contexts::handle_of(CUdevice device) {
  constexpr std::uintptr_t kTag = 0x0c00'0000'0000;
  return reinterpret_cast<CUcontext>(kTag + static_cast<std::uintptr_t>(device) * 0x1000);
}

std::vector<CUcontext>& Contexts::stack() {
  thread_local std::vector<CUcontext> contexts;
  return contexts;
}

CUcontext Contexts::retain(CUdevice device) {
  const CUcontext context = handle_of(device);
  State& state = states_[context];
  state.device = device;
  ++state.retained;
  return context;
}

unsigned Contexts::references(CUdevice device) const {
  const auto found = states_.find(handle_of(device));
  return found == states_.end() ? 0 : found->second.retained;
}

void Contexts::release(CUdevice device) {
  State& state = states_.at(handle_of(device));
  if (--state.retained == 0) state.error = kSuccess;
}

unsigned Contexts::references() const {
  unsigned sum = 0;
  for (const auto& [context, state] : states_) sum += state.retained;
  return sum;
}

CUdevice Contexts::device_of(CUcontext context) const {
  const auto found = states_.find(context);
  return found == states_.end() ? -1 : found->second.device;
}

CUresult Contexts::state(CUcontext context) const {
  const auto found = states_.find(context);
  if (found == states_.end()) return kInvalidContext;
  return found->second.retained == 0 ? kContextIsDestroyed : found->second.error;
}

void Contexts::heal() {
  for (auto& [context, state] : states_) state.error = kSuccess;
}

CUresult Contexts::push(CUcontext context) {
  const CUresult found = state(context);
  if (found == kInvalidContext || found == kContextIsDestroyed) {
    return journal_.violate(found, "cuCtxPushCurrent: unknown or released context");
  }
  stack().push_back(context);
  return kSuccess;
}

CUresult Contexts::pop(CUcontext* context) {
  if (stack().empty()) return journal_.violate(kInvalidContext, "cuCtxPopCurrent: no current context");
  if (context != nullptr) *context = stack().back();
  stack().pop_back();
  return kSuccess;
}

CUresult Contexts::set_current(CUcontext context) {
  if (context != nullptr) {
    const CUresult found = state(context);
    if (found == kInvalidContext || found == kContextIsDestroyed) {
      return journal_.violate(found, "cuCtxSetCurrent: unknown or released context");
    }
  }
  if (!stack().empty()) stack().pop_back();
  if (context != nullptr) stack().push_back(context);
  return kSuccess;
}

}  // namespace remap::emulated
