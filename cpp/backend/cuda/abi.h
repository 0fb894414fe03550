// SPDX-License-Identifier: Apache-2.0
// The part of the CUDA driver's binary interface that the backend calls, declared anew: no toolkit is needed to build.
//
// tests/cpp/cuda_abi_test.cpp compares every size, offset, value and signature with cuda.h where that is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace remap::cuda {

using Result = int;                           // CUresult
using Device = int;                           // CUdevice
using DevicePointer = unsigned long long;     // CUdeviceptr
using AllocationHandle = unsigned long long;  // CUmemGenericAllocationHandle
using ContextPointer = struct ContextObject*;
using StreamPointer = struct StreamObject*;
using EventPointer = struct EventObject*;

namespace result {
constexpr Result kSuccess = 0;
constexpr Result kOutOfMemory = 2;
constexpr Result kDeinitialized = 4;
constexpr Result kNoDevice = 100;
constexpr Result kInvalidContext = 201;
constexpr Result kInvalidHandle = 400;
constexpr Result kNotReady = 600;
constexpr Result kIllegalAddress = 700;
constexpr Result kHostMemoryAlreadyRegistered = 712;
constexpr Result kLaunchFailed = 719;
constexpr Result kNotPermitted = 800;
constexpr Result kNotSupported = 801;
constexpr Result kStreamCaptureUnsupported = 900;
constexpr Result kStreamCaptureImplicit = 906;
constexpr Result kLastCaptureError = 908;  // of those about stream capture, which begin at 900
}  // namespace result

namespace attribute {  // CUdevice_attribute
constexpr int kIntegrated = 18;
constexpr int kPciBus = 33;
constexpr int kPciDevice = 34;
constexpr int kPciDomain = 50;
constexpr int kComputeMajor = 75;
constexpr int kComputeMinor = 76;
constexpr int kPageableThroughHostPageTables = 100;
constexpr int kVirtualMemoryManagement = 102;
constexpr int kPosixFileDescriptor = 103;
constexpr int kGpuDirectRdmaWithVmm = 110;
constexpr int kReadOnlyHostRegister = 113;
constexpr int kFabric = 128;
}  // namespace attribute

constexpr int kLocationDevice = 1;    // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kAllocationPinned = 1;  // CU_MEM_ALLOCATION_TYPE_PINNED

constexpr int kHandleNone = 0;    // CUmemAllocationHandleType
constexpr int kHandlePosixFd = 1;
constexpr int kHandleFabric = 8;

constexpr int kGranularityMinimum = 0;  // CUmemAllocationGranularity_flags
constexpr int kGranularityRecommended = 1;

constexpr int kAccessNone = 0;  // CUmemAccess_flags
constexpr int kAccessRead = 1;
constexpr int kAccessReadWrite = 3;

constexpr unsigned kStreamNonBlocking = 1;      // CU_STREAM_NON_BLOCKING
constexpr int kDefaultPriority = 0;
constexpr std::uint64_t kStreamLegacy = 1;      // CU_STREAM_LEGACY
constexpr std::uint64_t kStreamPerThread = 2;   // CU_STREAM_PER_THREAD
constexpr unsigned kEventBlockingSync = 1;      // CU_EVENT_BLOCKING_SYNC
constexpr unsigned kEventDisableTiming = 2;     // CU_EVENT_DISABLE_TIMING
constexpr int kCaptureStatusNone = 0;           // CU_STREAM_CAPTURE_STATUS_NONE
constexpr int kCaptureModeRelaxed = 2;          // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr unsigned kHostRegisterPortable = 1;   // CU_MEMHOSTREGISTER_PORTABLE
constexpr unsigned kHostRegisterReadOnly = 8;   // CU_MEMHOSTREGISTER_READ_ONLY
constexpr std::uint64_t kProcAddressLegacy = 1;  // CU_GET_PROC_ADDRESS_LEGACY_STREAM

struct MemoryLocation {  // CUmemLocation
  int type = 0;
  int id = 0;
};
struct AllocationProperties {  // CUmemAllocationProp
  int type = 0;
  int requested_handle_types = 0;
  MemoryLocation location;
  void* win32_handle_metadata = nullptr;
  struct Flags {
    unsigned char compression_type = 0;
    unsigned char gpu_direct_rdma_capable = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
  } flags;
};
struct Uuid {  // CUuuid
  char bytes[16] = {};
};
struct AccessDescriptor {  // CUmemAccessDesc
  MemoryLocation location;
  int flags = 0;
};

using HostFunction = void (*)(void* data);  // CUhostFn

constexpr int kSourceInStreamOrder = 1;  // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
constexpr unsigned kBesideCompute = 1;   // CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
struct CopyAttributes {                  // CUmemcpyAttributes
  int source_order = 0;
  MemoryLocation source_hint;
  MemoryLocation target_hint;
  unsigned flags = 0;
};

// X(name, version, parameters): the name and the version that cuGetProcAddress is asked with. The version decides which binary
// interface the answer has, so it is the one whose signature stands here and never the driver's own: cuStreamGetCtx,
// asked at 12050, takes one parameter more.
#define REMAP_CUDA_ENTRY_POINTS(X)                                                                                             \
  X(cuInit, 2000, (unsigned flags))                                                                                            \
  X(cuDriverGetVersion, 2020, (int* version))                                                                                  \
  X(cuGetErrorName, 6000, (Result code, const char** text))                                                                    \
  X(cuGetErrorString, 6000, (Result code, const char** text))                                                                  \
  X(cuDeviceGetCount, 2000, (int* count))                                                                                      \
  X(cuDeviceGet, 2000, (Device * device, int ordinal))                                                                         \
  X(cuDeviceGetName, 2000, (char* name, int length, Device device))                                                            \
  X(cuDeviceGetAttribute, 2000, (int* value, int attribute, Device device))                                                    \
  X(cuDeviceTotalMem, 3020, (std::size_t * bytes, Device device))                                                              \
  X(cuDeviceGetUuid, 11040, (Uuid * uuid, Device device))                                                                      \
  X(cuDevicePrimaryCtxRetain, 7000, (ContextPointer * context, Device device))                                                 \
  X(cuDevicePrimaryCtxRelease, 11000, (Device device))                                                                         \
  X(cuCtxPushCurrent, 4000, (ContextPointer context))                                                                          \
  X(cuCtxPopCurrent, 4000, (ContextPointer * context))                                                                         \
  X(cuCtxGetCurrent, 4000, (ContextPointer * context))                                                                         \
  X(cuCtxSetCurrent, 4000, (ContextPointer context))                                                                           \
  X(cuMemGetInfo, 3020, (std::size_t * free_bytes, std::size_t * total_bytes))                                                 \
  X(cuMemGetAllocationGranularity, 10020, (std::size_t * bytes, const AllocationProperties* properties, int option))           \
  X(cuMemAddressReserve, 10020,                                                                                                \
    (DevicePointer * at, std::size_t bytes, std::size_t alignment, DevicePointer hint, unsigned long long flags))              \
  X(cuMemAddressFree, 10020, (DevicePointer at, std::size_t bytes))                                                            \
  X(cuMemCreate, 10020,                                                                                                        \
    (AllocationHandle * page, std::size_t bytes, const AllocationProperties* properties, unsigned long long flags))            \
  X(cuMemRelease, 10020, (AllocationHandle page))                                                                              \
  X(cuMemExportToShareableHandle, 10020, (void* shared, AllocationHandle page, int type, unsigned long long flags))            \
  X(cuMemImportFromShareableHandle, 10020, (AllocationHandle * page, void* shared, int type))                                  \
  X(cuMemMap, 10020,                                                                                                           \
    (DevicePointer at, std::size_t bytes, std::size_t offset, AllocationHandle page, unsigned long long flags))                \
  X(cuMemUnmap, 10020, (DevicePointer at, std::size_t bytes))                                                                  \
  X(cuMemSetAccess, 10020,                                                                                                     \
    (DevicePointer at, std::size_t bytes, const AccessDescriptor* descriptors, std::size_t count))                             \
  X(cuMemHostRegister, 6050, (void* at, std::size_t bytes, unsigned flags))                                                    \
  X(cuMemHostUnregister, 4000, (void* at))                                                                                     \
  X(cuStreamCreateWithPriority, 5050, (StreamPointer * stream, unsigned flags, int priority))                                  \
  X(cuStreamDestroy, 4000, (StreamPointer stream))                                                                             \
  X(cuStreamSynchronize, 2000, (StreamPointer stream))                                                                         \
  X(cuStreamQuery, 2000, (StreamPointer stream))                                                                               \
  X(cuStreamWaitEvent, 3020, (StreamPointer stream, EventPointer event, unsigned flags))                                       \
  X(cuStreamGetCtx, 9020, (StreamPointer stream, ContextPointer * context))                                                    \
  X(cuStreamIsCapturing, 10000, (StreamPointer stream, int* status))                                                           \
  X(cuThreadExchangeStreamCaptureMode, 10010, (int* mode))                                                                     \
  X(cuMemcpyHtoDAsync, 3020, (DevicePointer to, const void* from, std::size_t bytes, StreamPointer stream))                    \
  X(cuMemcpyDtoHAsync, 3020, (void* to, DevicePointer from, std::size_t bytes, StreamPointer stream))                          \
  X(cuMemcpyDtoDAsync, 3020, (DevicePointer to, DevicePointer from, std::size_t bytes, StreamPointer stream))                  \
  X(cuMemcpyAsync, 4000, (DevicePointer to, DevicePointer from, std::size_t bytes, StreamPointer stream))                      \
  X(cuLaunchHostFunc, 10000, (StreamPointer stream, HostFunction function, void* data))                                        \
  X(cuMemsetD8Async, 3020, (DevicePointer to, unsigned char value, std::size_t bytes, StreamPointer stream))                   \
  X(cuEventCreate, 2000, (EventPointer * event, unsigned flags))                                                               \
  X(cuEventDestroy, 4000, (EventPointer event))                                                                                \
  X(cuEventRecord, 2000, (EventPointer event, StreamPointer stream))                                                           \
  X(cuEventQuery, 2000, (EventPointer event))                                                                                  \
  X(cuEventSynchronize, 2000, (EventPointer event))                                                                            \
  X(cuEventElapsedTime, 2000, (float* milliseconds, EventPointer from, EventPointer to))

// Entry points of newer drivers; null where this one lacks them.
#define REMAP_CUDA_NEWER_ENTRY_POINTS(X)                                                                                       \
  X(cuMemcpyBatchAsync, 12080,                                                                                                 \
    (DevicePointer * to, DevicePointer * from, std::size_t * bytes, std::size_t count, CopyAttributes * attributes,            \
     std::size_t * first_of_attributes, std::size_t attribute_count, std::size_t * failed, StreamPointer stream))

using GetProcAddress = Result (*)(const char* name, void** function, int version, std::uint64_t flags, int* status);

}  // namespace remap::cuda
