// Compares what driver_abi.h and entry_points.h declare with cuda.h, where that is installed and knows all of it (12.8):
// nothing but static_asserts.
#if __has_include(<cuda.h>) && __has_include(<cudaTypedefs.h>)
#include <cuda.h>
#include <cudaTypedefs.h>

#if CUDA_VERSION >= 12080
#include <type_traits>

#include "entry_points.h"

namespace remap::emulated {
namespace {

// Two types that a call passes alike: pointers, or integers and enumerations of one size, or classes of one size.
template <typename A, typename B>
constexpr bool kAlike = (std::is_pointer_v<A> && std::is_pointer_v<B>) ||
                        ((std::is_integral_v<A> || std::is_enum_v<A>) && (std::is_integral_v<B> || std::is_enum_v<B>) &&
                         sizeof(A) == sizeof(B)) ||
                        (std::is_class_v<A> && std::is_class_v<B> && sizeof(A) == sizeof(B));

template <typename A, typename B>
constexpr bool kSameCall = false;
template <typename R, typename... A, typename S, typename... B>
constexpr bool kSameCall<R (*)(A...), S (*)(B...)> = [] {
  if constexpr (sizeof...(A) != sizeof...(B)) {
    return false;
  } else {
    return kAlike<R, S> && (kAlike<A, B> && ...);
  }
}();

#define REMAP_SAME_CALL(name, version, parameters) \
  static_assert(kSameCall<CUresult(*) parameters, PFN_##name##_v##version>, #name " at " #version);
REMAP_EMULATED_ENTRY_POINTS(REMAP_SAME_CALL)
#undef REMAP_SAME_CALL

static_assert(sizeof(CUmemLocation) == sizeof(::CUmemLocation) && offsetof(CUmemLocation, id) == offsetof(::CUmemLocation, id));
static_assert(sizeof(CUmemAccessDesc) == sizeof(::CUmemAccessDesc) &&
              offsetof(CUmemAccessDesc, flags) == offsetof(::CUmemAccessDesc, flags));
static_assert(sizeof(CUmemAllocationProp) == sizeof(::CUmemAllocationProp) &&
              offsetof(CUmemAllocationProp, requestedHandleTypes) == offsetof(::CUmemAllocationProp, requestedHandleTypes) &&
              offsetof(CUmemAllocationProp, location) == offsetof(::CUmemAllocationProp, location) &&
              offsetof(CUmemAllocationProp, win32HandleMetaData) == offsetof(::CUmemAllocationProp, win32HandleMetaData) &&
              offsetof(CUmemAllocationProp, allocFlags) == offsetof(::CUmemAllocationProp, allocFlags));
static_assert(offsetof(::CUmemAllocationProp, allocFlags.gpuDirectRDMACapable) ==
              offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));

template <auto ours, auto theirs>
constexpr bool kSameValue = static_cast<long long>(ours) == static_cast<long long>(theirs);

static_assert(kSameValue<kInvalidValue, CUDA_ERROR_INVALID_VALUE> && kSameValue<kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY> &&
              kSameValue<kNotInitialized, CUDA_ERROR_NOT_INITIALIZED> && kSameValue<kInvalidDevice, CUDA_ERROR_INVALID_DEVICE> &&
              kSameValue<kInvalidContext, CUDA_ERROR_INVALID_CONTEXT> && kSameValue<kInvalidHandle, CUDA_ERROR_INVALID_HANDLE> &&
              kSameValue<kNotFound, CUDA_ERROR_NOT_FOUND> && kSameValue<kNotReady, CUDA_ERROR_NOT_READY> &&
              kSameValue<kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS> &&
              kSameValue<kContextIsDestroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED> &&
              kSameValue<kHostAlreadyRegistered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED> &&
              kSameValue<kHostNotRegistered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED> &&
              kSameValue<kLaunchFailed, CUDA_ERROR_LAUNCH_FAILED> && kSameValue<kNotPermitted, CUDA_ERROR_NOT_PERMITTED> &&
              kSameValue<kNotSupported, CUDA_ERROR_NOT_SUPPORTED> &&
              kSameValue<kCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED> &&
              kSameValue<kCaptureInvalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED> &&
              kSameValue<kCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT> &&
              kSameValue<kCaptureWrongThread, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD>);
static_assert(kSameValue<kPinnedAllocation, CU_MEM_ALLOCATION_TYPE_PINNED> &&
              kSameValue<kDeviceLocation, CU_MEM_LOCATION_TYPE_DEVICE> &&
              kSameValue<kPosixFd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR> &&
              kSameValue<kFabricHandle, CU_MEM_HANDLE_TYPE_FABRIC> &&
              kSameValue<kAccessNone, CU_MEM_ACCESS_FLAGS_PROT_NONE> && kSameValue<kAccessRead, CU_MEM_ACCESS_FLAGS_PROT_READ> &&
              kSameValue<kAccessReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE> &&
              kSameValue<kMemoryTypeHost, CU_MEMORYTYPE_HOST> && kSameValue<kMemoryTypeDevice, CU_MEMORYTYPE_DEVICE> &&
              kSameValue<kPointerMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE>);
static_assert(kSameValue<kCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE> &&
              kSameValue<kCaptureActive, CU_STREAM_CAPTURE_STATUS_ACTIVE> &&
              kSameValue<kCaptureGone, CU_STREAM_CAPTURE_STATUS_INVALIDATED> &&
              kSameValue<kCaptureGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL> &&
              kSameValue<kCaptureThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL> &&
              kSameValue<kCaptureRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED>);
static_assert(kSameValue<kStreamNonBlocking, CU_STREAM_NON_BLOCKING> &&
              kSameValue<kEventBlockingSync, CU_EVENT_BLOCKING_SYNC> &&
              kSameValue<kEventDisableTiming, CU_EVENT_DISABLE_TIMING> &&
              kSameValue<kHostPortable, CU_MEMHOSTREGISTER_PORTABLE> &&
              kSameValue<kHostDeviceMap, CU_MEMHOSTREGISTER_DEVICEMAP> &&
              kSameValue<kHostReadOnly, CU_MEMHOSTREGISTER_READ_ONLY>);

}  // namespace
}  // namespace remap::emulated
#endif
#endif
