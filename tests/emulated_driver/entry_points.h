// The entry points and the version at which each got the binary interface that stands here. Name and version decide which
// function cuGetProcAddress gives, as in the driver. The functions are in *_calls.cpp.
#pragma once

#include "driver_abi.h"

// X(name, version, parameters)
#define REMAP_EMULATED_ENTRY_POINTS(X)                                                                                         \
  X(cuInit, 2000, (unsigned flags))                                                                                            \
  X(cuDriverGetVersion, 2020, (int* version))                                                                                  \
  X(cuGetErrorName, 6000, (CUresult code, const char** text))                                                                  \
  X(cuGetErrorString, 6000, (CUresult code, const char** text))                                                                \
  X(cuDeviceGetCount, 2000, (int* count))                                                                                      \
  X(cuDeviceGet, 2000, (CUdevice * device, int ordinal))                                                                       \
  X(cuDeviceGetName, 2000, (char* name, int length, CUdevice device))                                                          \
  X(cuDeviceGetAttribute, 2000, (int* value, int attribute, CUdevice device))                                                  \
  X(cuDeviceTotalMem, 3020, (std::size_t * bytes, CUdevice device))                                                            \
  X(cuDeviceGetUuid, 9020, (CUuuid * uuid, CUdevice device))                                                                   \
  X(cuDeviceGetUuid, 11040, (CUuuid * uuid, CUdevice device))                                                                  \
  X(cuDevicePrimaryCtxRetain, 7000, (CUcontext * context, CUdevice device))                                                    \
  X(cuDevicePrimaryCtxRelease, 11000, (CUdevice device))                                                                       \
  X(cuCtxPushCurrent, 4000, (CUcontext context))                                                                               \
  X(cuCtxPopCurrent, 4000, (CUcontext * context))                                                                              \
  X(cuCtxGetCurrent, 4000, (CUcontext * context))                                                                              \
  X(cuCtxSetCurrent, 4000, (CUcontext context))                                                                                \
  X(cuMemGetInfo, 3020, (std::size_t * free_bytes, std::size_t * total_bytes))                                                 \
  X(cuMemGetAllocationGranularity, 10020, (std::size_t * bytes, const CUmemAllocationProp* properties, int option))            \
  X(cuMemAddressReserve, 10020,                                                                                                \
    (CUdeviceptr * at, std::size_t bytes, std::size_t alignment, CUdeviceptr hint, unsigned long long flags))                  \
  X(cuMemAddressFree, 10020, (CUdeviceptr at, std::size_t bytes))                                                              \
  X(cuMemCreate, 10020,                                                                                                        \
    (CUmemGenericAllocationHandle * page, std::size_t bytes, const CUmemAllocationProp* properties,                            \
     unsigned long long flags))                                                                                                \
  X(cuMemRelease, 10020, (CUmemGenericAllocationHandle page))                                                                  \
  X(cuMemExportToShareableHandle, 10020,                                                                                       \
    (void* shared, CUmemGenericAllocationHandle page, int type, unsigned long long flags))                                     \
  X(cuMemImportFromShareableHandle, 10020, (CUmemGenericAllocationHandle * page, void* shared, int type))                      \
  X(cuMemMap, 10020,                                                                                                           \
    (CUdeviceptr at, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle page, unsigned long long flags))      \
  X(cuMemUnmap, 10020, (CUdeviceptr at, std::size_t bytes))                                                                    \
  X(cuMemSetAccess, 10020, (CUdeviceptr at, std::size_t bytes, const CUmemAccessDesc* descriptors, std::size_t count))         \
  X(cuMemHostRegister, 6050, (void* at, std::size_t bytes, unsigned flags))                                                    \
  X(cuMemHostUnregister, 4000, (void* at))                                                                                     \
  X(cuStreamCreateWithPriority, 5050, (CUstream * stream, unsigned flags, int priority))                                       \
  X(cuStreamDestroy, 4000, (CUstream stream))                                                                                  \
  X(cuStreamSynchronize, 2000, (CUstream stream))                                                                              \
  X(cuStreamQuery, 2000, (CUstream stream))                                                                                    \
  X(cuStreamWaitEvent, 3020, (CUstream stream, CUevent event, unsigned flags))                                                 \
  X(cuStreamGetCtx, 9020, (CUstream stream, CUcontext * context))                                                              \
  X(cuStreamGetPriority, 5050, (CUstream stream, int* priority))                                                               \
  X(cuStreamIsCapturing, 10000, (CUstream stream, int* status))                                                                \
  X(cuStreamBeginCapture, 10010, (CUstream stream, int mode))                                                                  \
  X(cuStreamEndCapture, 10000, (CUstream stream, CUgraph * graph))                                                             \
  X(cuThreadExchangeStreamCaptureMode, 10010, (int* mode))                                                                     \
  X(cuLaunchHostFunc, 10000, (CUstream stream, CUhostFn function, void* data))                                                 \
  X(cuMemcpyHtoDAsync, 3020, (CUdeviceptr to, const void* from, std::size_t bytes, CUstream stream))                           \
  X(cuMemcpyDtoHAsync, 3020, (void* to, CUdeviceptr from, std::size_t bytes, CUstream stream))                                 \
  X(cuMemcpyDtoDAsync, 3020, (CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream))                           \
  X(cuMemcpyAsync, 4000, (CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream))                               \
  X(cuMemcpyBatchAsync, 12080,                                                                                                 \
    (CUdeviceptr * to, CUdeviceptr * from, std::size_t * bytes, std::size_t count, CUmemcpyAttributes * attributes,            \
     std::size_t * first_of_attributes, std::size_t attribute_count, std::size_t * failed, CUstream stream))                   \
  X(cuMemsetD8Async, 3020, (CUdeviceptr to, unsigned char value, std::size_t bytes, CUstream stream))                          \
  X(cuEventCreate, 2000, (CUevent * event, unsigned flags))                                                                    \
  X(cuEventDestroy, 4000, (CUevent event))                                                                                     \
  X(cuEventRecord, 2000, (CUevent event, CUstream stream))                                                                     \
  X(cuEventQuery, 2000, (CUevent event))                                                                                       \
  X(cuEventSynchronize, 2000, (CUevent event))                                                                                 \
  X(cuEventElapsedTime, 2000, (float* milliseconds, CUevent from, CUevent to))                                                 \
  X(cuEventElapsedTime, 12080, (float* milliseconds, CUevent from, CUevent to))

namespace remap::emulated::entry {

#define REMAP_EMULATED_DECLARE(name, version, parameters) CUresult name parameters;
REMAP_EMULATED_ENTRY_POINTS(REMAP_EMULATED_DECLARE)
#undef REMAP_EMULATED_DECLARE

}  // namespace remap::emulated::entry
