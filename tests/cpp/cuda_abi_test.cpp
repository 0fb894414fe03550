// The declarations of cpp/backend/cuda/abi.h against the toolkit's own: compiled only where cuda.h is installed. That it compiles
// is most of the test.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>
#include <type_traits>

#include "backend/cuda/abi.h"
#include "check.h"

namespace {

using namespace remap::cuda;

// Passed in the same way: both pointers, or both integers (or enumerations) of one size.
template <typename Ours, typename Theirs>
constexpr bool alike() {
  if (std::is_pointer_v<Ours> || std::is_pointer_v<Theirs>) {
    if (!std::is_pointer_v<Ours> || !std::is_pointer_v<Theirs>) return false;
    using To = std::remove_pointer_t<Ours>;
    using From = std::remove_pointer_t<Theirs>;
    constexpr bool scalars = (std::is_arithmetic_v<To> || std::is_enum_v<To>) &&
                             (std::is_arithmetic_v<From> || std::is_enum_v<From>);
    if constexpr (scalars) {
      return sizeof(To) == sizeof(From) && std::is_floating_point_v<To> == std::is_floating_point_v<From> &&
             std::is_const_v<To> == std::is_const_v<From>;
    } else {
      return std::is_pointer_v<To> == std::is_pointer_v<From> && std::is_void_v<To> == std::is_void_v<From> &&
             std::is_const_v<To> == std::is_const_v<From>;
    }
  }
  return sizeof(Ours) == sizeof(Theirs) && std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs>;
}

template <typename Ours, typename Theirs>
struct SameCall : std::false_type {};
template <typename OurResult, typename... Ours, typename TheirResult, typename... Theirs>
struct SameCall<OurResult (*)(Ours...), TheirResult (*)(Theirs...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(Ours) != sizeof...(Theirs)) {
      return false;
    } else {
      return alike<OurResult, TheirResult>() && (alike<Ours, Theirs>() && ... && true);
    }
  }();
};

// PFN_name_vVERSION is what cuGetProcAddress answers for that name and version.
#define CHECK_ENTRY_POINT(name, version, parameters)                                             \
  using Our_##name = Result(*) parameters;                                                       \
  static_assert(SameCall<Our_##name, PFN_##name##_v##version>::value, #name " at " #version);
REMAP_CUDA_ENTRY_POINTS(CHECK_ENTRY_POINT)
static_assert(SameCall<GetProcAddress, PFN_cuGetProcAddress_v12000>::value);
// The comparison can fail: one parameter more, another size, a value for a pointer.
static_assert(!SameCall<Our_cuStreamGetCtx, PFN_cuStreamGetCtx_v12050>::value);
static_assert(!SameCall<Result (*)(int*, unsigned), PFN_cuEventCreate_v2000>::value);
static_assert(!SameCall<Result (*)(unsigned long long), PFN_cuInit_v2000>::value);

static_assert(sizeof(Result) == sizeof(CUresult));
static_assert(sizeof(Device) == sizeof(CUdevice));
static_assert(std::is_same_v<DevicePointer, CUdeviceptr>);
static_assert(std::is_same_v<AllocationHandle, CUmemGenericAllocationHandle>);

#define SAME_PLACE(ours, our_field, theirs, their_field)                                                              \
  static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field) &&                                         \
                sizeof(ours::our_field) == sizeof(theirs::their_field))
static_assert(sizeof(MemoryLocation) == sizeof(CUmemLocation));
SAME_PLACE(MemoryLocation, type, CUmemLocation, type);
SAME_PLACE(MemoryLocation, id, CUmemLocation, id);
static_assert(sizeof(AllocationProperties) == sizeof(CUmemAllocationProp));
SAME_PLACE(AllocationProperties, type, CUmemAllocationProp, type);
SAME_PLACE(AllocationProperties, requested_handle_types, CUmemAllocationProp, requestedHandleTypes);
SAME_PLACE(AllocationProperties, location, CUmemAllocationProp, location);
SAME_PLACE(AllocationProperties, win32_handle_metadata, CUmemAllocationProp, win32HandleMetaData);
SAME_PLACE(AllocationProperties, flags, CUmemAllocationProp, allocFlags);
static_assert(offsetof(AllocationProperties, flags.compression_type) ==
              offsetof(CUmemAllocationProp, allocFlags.compressionType));
static_assert(offsetof(AllocationProperties, flags.gpu_direct_rdma_capable) ==
              offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));
static_assert(offsetof(AllocationProperties, flags.usage) == offsetof(CUmemAllocationProp, allocFlags.usage));
static_assert(offsetof(AllocationProperties, flags.reserved) == offsetof(CUmemAllocationProp, allocFlags.reserved));
static_assert(sizeof(AccessDescriptor) == sizeof(CUmemAccessDesc));
SAME_PLACE(AccessDescriptor, location, CUmemAccessDesc, location);
SAME_PLACE(AccessDescriptor, flags, CUmemAccessDesc, flags);

static_assert(result::kSuccess == CUDA_SUCCESS);
static_assert(result::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(result::kDeinitialized == CUDA_ERROR_DEINITIALIZED);
static_assert(result::kNoDevice == CUDA_ERROR_NO_DEVICE);
static_assert(result::kInvalidContext == CUDA_ERROR_INVALID_CONTEXT);
static_assert(result::kInvalidHandle == CUDA_ERROR_INVALID_HANDLE);
static_assert(result::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(result::kIllegalAddress == CUDA_ERROR_ILLEGAL_ADDRESS);
static_assert(result::kHostMemoryAlreadyRegistered == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
static_assert(result::kLaunchFailed == CUDA_ERROR_LAUNCH_FAILED);
static_assert(result::kNotPermitted == CUDA_ERROR_NOT_PERMITTED);
static_assert(result::kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(result::kStreamCaptureUnsupported == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
static_assert(result::kStreamCaptureImplicit == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
static_assert(result::kLastCaptureError == CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);

static_assert(attribute::kIntegrated == CU_DEVICE_ATTRIBUTE_INTEGRATED);
static_assert(attribute::kPciBus == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
static_assert(attribute::kPciDevice == CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID);
static_assert(attribute::kPciDomain == CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
static_assert(attribute::kComputeMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(attribute::kComputeMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(attribute::kPageableThroughHostPageTables == CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
static_assert(attribute::kVirtualMemoryManagement == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(attribute::kPosixFileDescriptor == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
static_assert(attribute::kGpuDirectRdmaWithVmm == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
static_assert(attribute::kReadOnlyHostRegister == CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED);
static_assert(attribute::kFabric == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);

static_assert(kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(kAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(kHandleNone == CU_MEM_HANDLE_TYPE_NONE);
static_assert(kHandlePosixFd == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(kHandleFabric == CU_MEM_HANDLE_TYPE_FABRIC);
static_assert(kGranularityMinimum == CU_MEM_ALLOC_GRANULARITY_MINIMUM);
static_assert(kGranularityRecommended == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
static_assert(kAccessNone == CU_MEM_ACCESS_FLAGS_PROT_NONE);
static_assert(kAccessRead == CU_MEM_ACCESS_FLAGS_PROT_READ);
static_assert(kAccessReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kEventBlockingSync == CU_EVENT_BLOCKING_SYNC);
static_assert(kCaptureStatusNone == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(kCaptureModeRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(kHostRegisterReadOnly == CU_MEMHOSTREGISTER_READ_ONLY);
static_assert(kProcAddressLegacy == CU_GET_PROC_ADDRESS_LEGACY_STREAM);

// Pointers made of integers are no constant expressions.
TEST(default_streams) {
  CHECK(reinterpret_cast<CUstream>(kStreamLegacy) == CU_STREAM_LEGACY);
  CHECK(reinterpret_cast<CUstream>(kStreamPerThread) == CU_STREAM_PER_THREAD);
}

}  // namespace
