// The part of the CUDA driver's binary interface that the emulated driver serves, declared anew: cuda.h is not needed.
// abi_check.cpp compares it with cuda.h where that is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace remap::emulated {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;
// What stands behind these is never looked at: they are numbers that are given out once and never again, so that a handle
// that was destroyed is always found out.
using CUcontext = struct ContextHandle*;
using CUstream = struct StreamHandle*;
using CUevent = struct EventHandle*;
using CUgraph = struct GraphHandle*;
using CUhostFn = void (*)(void*);

enum : CUresult {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kContextIsDestroyed = 709,
  kHostAlreadyRegistered = 712,
  kHostNotRegistered = 713,
  kLaunchFailed = 719,
  kNotPermitted = 800,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureImplicit = 906,
  kCaptureWrongThread = 908,
};

struct CUmemLocation {
  int type;
  int id;
};
struct CUmemAllocationProp {
  int type;
  int requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};
struct CUuuid {
  char bytes[16];
};
struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};

struct CUmemcpyAttributes {
  int srcAccessOrder;
  CUmemLocation srcLocHint;
  CUmemLocation dstLocHint;
  unsigned int flags;
};

enum : int {
  kSourceInStreamOrder = 1,
  kSourceDuringCall = 2,
  kSourceInAnyOrder = 3,
  kPinnedAllocation = 1,
  kDeviceLocation = 1,
  kPosixFd = 1,
  kFabricHandle = 8,
  kAccessNone = 0,
  kAccessRead = 1,
  kAccessReadWrite = 3,
  kCaptureNone = 0,
  kCaptureActive = 1,
  kCaptureGone = 2,
  kCaptureGlobal = 0,
  kCaptureThreadLocal = 1,
  kCaptureRelaxed = 2,
};
enum : unsigned {
  kPreferOverlap = 1,
  kStreamNonBlocking = 1,
  kEventBlockingSync = 1,
  kEventDisableTiming = 2,
  kHostPortable = 1,
  kHostDeviceMap = 2,
  kHostReadOnly = 8,
};
enum : std::uintptr_t { kLegacyStream = 1, kPerThreadStream = 2 };

}  // namespace remap::emulated
