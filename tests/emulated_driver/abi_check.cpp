// Compares what driver_abi.h and entry_points.h declare with cuda.h, where that is installed and knows all of it (12.8):
// nothing but static_asserts.
#if __has_include(<cuda.h>) && __has_include(<cudaTypedefs.h>)
#include <cuda.h>
#include <cudaTypedefs.h>

#if CUDA_VERSION >= 12080
#include "../cpp/same_call.h"
#include "entry_points.h"

namespace remap::emulated {
namespace {

using remap::testing::SameCall;

#define REMAP_SAME_CALL(name, version, parameters) \
  static_assert(SameCall<CUresult(*) parameters, PFN_##name##_v##version>::value, #name " at " #version);
REMAP_EMULATED_ENTRY_POINTS(REMAP_SAME_CALL)
#undef REMAP_SAME_CALL

#define REMAP_SAME_PLACE(type, field) \
  static_assert(sizeof(type) == sizeof(::type) && offsetof(type, field) == offsetof(::type, field))
REMAP_SAME_PLACE(CUmemLocation, id);
REMAP_SAME_PLACE(CUmemAccessDesc, flags);
REMAP_SAME_PLACE(CUmemAllocationProp, requestedHandleTypes);
REMAP_SAME_PLACE(CUmemAllocationProp, location);
REMAP_SAME_PLACE(CUmemAllocationProp, win32HandleMetaData);
REMAP_SAME_PLACE(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
REMAP_SAME_PLACE(CUmemcpyAttributes, srcLocHint);
REMAP_SAME_PLACE(CUmemcpyAttributes, dstLocHint);
REMAP_SAME_PLACE(CUmemcpyAttributes, flags);

// Pairs of a number of ours and the toolkit's.
constexpr long long kPairs[][2] = {
    {kInvalidValue, CUDA_ERROR_INVALID_VALUE}, {kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY},
    {kNotInitialized, CUDA_ERROR_NOT_INITIALIZED}, {kInvalidDevice, CUDA_ERROR_INVALID_DEVICE},
    {kInvalidContext, CUDA_ERROR_INVALID_CONTEXT}, {kInvalidHandle, CUDA_ERROR_INVALID_HANDLE},
    {kNotFound, CUDA_ERROR_NOT_FOUND}, {kNotReady, CUDA_ERROR_NOT_READY}, {kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS},
    {kContextIsDestroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED}, {kLaunchFailed, CUDA_ERROR_LAUNCH_FAILED},
    {kHostAlreadyRegistered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED}, {kNotPermitted, CUDA_ERROR_NOT_PERMITTED},
    {kHostNotRegistered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED}, {kNotSupported, CUDA_ERROR_NOT_SUPPORTED},
    {kCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED}, {kCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT},
    {kCaptureInvalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED}, {kPinnedAllocation, CU_MEM_ALLOCATION_TYPE_PINNED},
    {kCaptureWrongThread, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD}, {kDeviceLocation, CU_MEM_LOCATION_TYPE_DEVICE},
    {kPosixFd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR}, {kFabricHandle, CU_MEM_HANDLE_TYPE_FABRIC},
    {kAccessNone, CU_MEM_ACCESS_FLAGS_PROT_NONE}, {kAccessRead, CU_MEM_ACCESS_FLAGS_PROT_READ},
    {kAccessReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}, {kCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE},
    {kCaptureActive, CU_STREAM_CAPTURE_STATUS_ACTIVE}, {kCaptureGone, CU_STREAM_CAPTURE_STATUS_INVALIDATED},
    {kCaptureGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL}, {kCaptureThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL},
    {kCaptureRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED}, {kStreamNonBlocking, CU_STREAM_NON_BLOCKING},
    {kEventBlockingSync, CU_EVENT_BLOCKING_SYNC}, {kEventDisableTiming, CU_EVENT_DISABLE_TIMING},
    {kHostPortable, CU_MEMHOSTREGISTER_PORTABLE}, {kHostDeviceMap, CU_MEMHOSTREGISTER_DEVICEMAP},
    {kHostReadOnly, CU_MEMHOSTREGISTER_READ_ONLY}, {kSourceInStreamOrder, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM},
    {kSourceDuringCall, CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL},
    {kSourceInAnyOrder, CU_MEMCPY_SRC_ACCESS_ORDER_ANY}, {kPreferOverlap, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE}};
constexpr bool all_same() {
  for (const auto& pair : kPairs) {
    if (pair[0] != pair[1]) return false;
  }
  return true;
}
static_assert(all_same());

}  // namespace
}  // namespace remap::emulated
#endif
#endif
