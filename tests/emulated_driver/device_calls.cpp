// Entry points: the driver itself, devices, contexts.
#include <cstdio>

#include "emulator.h"
#include "entry_points.h"

namespace remap::emulated::entry {
namespace {

struct ErrorText {
  CUresult code;
  const char* name;
  const char* text;
};
constexpr ErrorText kErrors[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {kHostAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the range is registered already"},
    {kHostNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {kNotPermitted, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "capture was invalidated by an earlier error"},
    {kCaptureImplicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make a captured stream depend on another"},
    {kCaptureWrongThread, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "capture was begun by another thread"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

CUresult look_up(CUresult code, const char* ErrorText::* what, const char** text) {
  if (text == nullptr) return kInvalidValue;
  *text = nullptr;
  for (const ErrorText& each : kErrors) {
    if (each.code == code) *text = each.*what;
  }
  return *text != nullptr ? kSuccess : kInvalidValue;
}

bool known(const Emulator& e, CUdevice device) { return device >= 0 && static_cast<std::uint64_t>(device) < e.settings.devices; }

CUresult unknown(Emulator& e, const char* entry, CUdevice device) {
  return e.violate(kInvalidDevice, std::string(entry) + ": no device " + std::to_string(device));
}

}  // namespace

CUresult cuInit(unsigned flags) {
  return serve("cuInit", kNothing, [&](Emulator& e, Lock&) {
    if (flags != 0) return e.violate(kInvalidValue, "cuInit: flags " + std::to_string(flags));
    if (e.settings.devices == 0) return CUresult{100};
    e.initialized = true;
    return CUresult{kSuccess};
  });
}

CUresult cuDriverGetVersion(int* version) {
  return serve("cuDriverGetVersion", kNothing, [&](Emulator& e, Lock&) {
    *version = static_cast<int>(e.settings.driver_version);
    return CUresult{kSuccess};
  });
}

// Both without the lock: they are asked from error paths, and read constants alone.
CUresult cuGetErrorName(CUresult code, const char** text) { return look_up(code, &ErrorText::name, text); }
CUresult cuGetErrorString(CUresult code, const char** text) { return look_up(code, &ErrorText::text, text); }

// ---- devices -----------------------------------------------------------------------------------------------------------

CUresult cuDeviceGetCount(int* count) {
  return serve("cuDeviceGetCount", kInit, [&](Emulator& e, Lock&) {
    *count = static_cast<int>(e.settings.devices);
    return CUresult{kSuccess};
  });
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return serve("cuDeviceGet", kInit, [&](Emulator& e, Lock&) {
    if (!known(e, ordinal)) return CUresult{kInvalidDevice};  // asking is how one learns: no rule was broken
    *device = ordinal;
    return CUresult{kSuccess};
  });
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  return serve("cuDeviceGetName", kInit, [&](Emulator& e, Lock&) {
    if (!known(e, device)) return unknown(e, "cuDeviceGetName", device);
    std::snprintf(name, static_cast<std::size_t>(length), "Emulated device %d", device);
    return CUresult{kSuccess};
  });
}

CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  return serve("cuDeviceGetAttribute", kInit, [&](Emulator& e, Lock&) {
    if (!known(e, device)) return unknown(e, "cuDeviceGetAttribute", device);
    *value = e.settings.attribute(attribute, device);
    return CUresult{kSuccess};
  });
}

CUresult cuDeviceTotalMem(std::size_t* bytes, CUdevice device) {
  return serve("cuDeviceTotalMem", kInit, [&](Emulator& e, Lock&) {
    if (!known(e, device)) return unknown(e, "cuDeviceTotalMem", device);
    *bytes = e.settings.memory_bytes;
    return CUresult{kSuccess};
  });
}

// No process renumbers devices here, so the number alone tells them apart.
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  return serve("cuDeviceGetUuid", kInit, [&](Emulator& e, Lock&) {
    if (!known(e, device)) return unknown(e, "cuDeviceGetUuid", device);
    *uuid = CUuuid{};
    uuid->bytes[15] = static_cast<char>(device + 1);
    return CUresult{kSuccess};
  });
}

// ---- contexts ----------------------------------------------------------------------------------------------------------

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return serve("cuDevicePrimaryCtxRetain", kInit | kUnsafe, [&](Emulator& e, Lock&) {
    if (!known(e, device)) return unknown(e, "cuDevicePrimaryCtxRetain", device);
    *context = e.contexts.retain(device);
    return CUresult{kSuccess};
  });
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  return serve("cuDevicePrimaryCtxRelease", kInit, [&](Emulator& e, Lock&) {
    if (!known(e, device)) return unknown(e, "cuDevicePrimaryCtxRelease", device);
    if (e.contexts.references(device) == 0) {
      return e.violate(kInvalidContext, "cuDevicePrimaryCtxRelease: released more often than retained");
    }
    if (e.contexts.references(device) == 1) {
      // The driver destroys what is in it. Whoever left something there may still use it.
      const CUcontext context = Contexts::handle_of(device);
      const std::size_t left = e.streams.owned_by(context) + e.host.count_of(context);
      if (left > 0) {
        (void)e.violate(kSuccess, "cuDevicePrimaryCtxRelease: the last reference goes while " + std::to_string(left) +
                                      " streams, events and registrations are left");
      }
      e.streams.forget_context(context);
    }
    e.contexts.release(device);
    return CUresult{kSuccess};
  });
}

CUresult cuCtxPushCurrent(CUcontext context) {
  return serve("cuCtxPushCurrent", kInit, [&](Emulator& e, Lock&) { return e.contexts.push(context); });
}
CUresult cuCtxPopCurrent(CUcontext* context) {
  return serve("cuCtxPopCurrent", kInit, [&](Emulator& e, Lock&) { return e.contexts.pop(context); });
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  return serve("cuCtxGetCurrent", kInit, [&](Emulator&, Lock&) {
    *context = Contexts::current();
    return CUresult{kSuccess};
  });
}
CUresult cuCtxSetCurrent(CUcontext context) {
  return serve("cuCtxSetCurrent", kInit, [&](Emulator& e, Lock&) { return e.contexts.set_current(context); });
}

}  // namespace remap::emulated::entry
