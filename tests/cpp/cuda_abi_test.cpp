// The declarations of cpp/backend/cuda/abi.h against the toolkit's own: compiled only where cuda.h is installed. That it compiles
// is most of the test.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>

#include "backend/cuda/abi.h"
#include "check.h"
#include "same_call.h"

namespace {

using namespace remap::cuda;
using remap::testing::SameCall;

// PFN_name_vVERSION is what cuGetProcAddress answers for that name and version.
#define CHECK_ENTRY_POINT(name, version, parameters)                                             \
  using Our_##name = Result(*) parameters;                                                       \
  static_assert(SameCall<Our_##name, PFN_##name##_v##version>::value, #name " at " #version);
REMAP_CUDA_ENTRY_POINTS(CHECK_ENTRY_POINT)
#if CUDA_VERSION >= 12080
REMAP_CUDA_NEWER_ENTRY_POINTS(CHECK_ENTRY_POINT)
#endif
static_assert(SameCall<GetProcAddress, PFN_cuGetProcAddress_v12000>::value);
// The comparison can fail: one parameter more, another size, a value for a pointer.
static_assert(!SameCall<Our_cuStreamGetCtx, PFN_cuStreamGetCtx_v12050>::value);
static_assert(!SameCall<Result (*)(int*, unsigned), PFN_cuEventCreate_v2000>::value);
static_assert(!SameCall<Result (*)(unsigned long long), PFN_cuInit_v2000>::value);

static_assert(sizeof(Result) == sizeof(CUresult) && sizeof(Device) == sizeof(CUdevice));
static_assert(std::is_same_v<DevicePointer, CUdeviceptr>);
static_assert(std::is_same_v<AllocationHandle, CUmemGenericAllocationHandle>);

#define SAME_PLACE(ours, our_field, theirs, their_field)                                                              \
  static_assert(sizeof(ours) == sizeof(theirs) && offsetof(ours, our_field) == offsetof(theirs, their_field) &&       \
                sizeof(ours{}.our_field) == sizeof(theirs{}.their_field))
SAME_PLACE(MemoryLocation, type, CUmemLocation, type);
SAME_PLACE(MemoryLocation, id, CUmemLocation, id);
SAME_PLACE(AllocationProperties, type, CUmemAllocationProp, type);
SAME_PLACE(AllocationProperties, requested_handle_types, CUmemAllocationProp, requestedHandleTypes);
SAME_PLACE(AllocationProperties, location, CUmemAllocationProp, location);
SAME_PLACE(AllocationProperties, win32_handle_metadata, CUmemAllocationProp, win32HandleMetaData);
SAME_PLACE(AllocationProperties, flags.compression_type, CUmemAllocationProp, allocFlags.compressionType);
SAME_PLACE(AllocationProperties, flags.gpu_direct_rdma_capable, CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
SAME_PLACE(AllocationProperties, flags.usage, CUmemAllocationProp, allocFlags.usage);
SAME_PLACE(AllocationProperties, flags.reserved, CUmemAllocationProp, allocFlags.reserved);
SAME_PLACE(AccessDescriptor, location, CUmemAccessDesc, location);
SAME_PLACE(AccessDescriptor, flags, CUmemAccessDesc, flags);
#if CUDA_VERSION >= 12080
SAME_PLACE(CopyAttributes, source_order, CUmemcpyAttributes, srcAccessOrder);
SAME_PLACE(CopyAttributes, source_hint, CUmemcpyAttributes, srcLocHint);
SAME_PLACE(CopyAttributes, target_hint, CUmemcpyAttributes, dstLocHint);
SAME_PLACE(CopyAttributes, flags, CUmemcpyAttributes, flags);
static_assert(kSourceInStreamOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
static_assert(kBesideCompute == CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
#endif

// A number of ours and the toolkit's; pointers made of integers are no constant expressions.
TEST(numbers) {
  const struct {
    const char* name;
    long long ours, theirs;
  } pairs[] = {
#define PAIR(ours, theirs) {#ours, static_cast<long long>(ours), static_cast<long long>(theirs)}
      PAIR(result::kSuccess, CUDA_SUCCESS),
      PAIR(result::kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY),
      PAIR(result::kDeinitialized, CUDA_ERROR_DEINITIALIZED),
      PAIR(result::kNoDevice, CUDA_ERROR_NO_DEVICE),
      PAIR(result::kInvalidContext, CUDA_ERROR_INVALID_CONTEXT),
      PAIR(result::kInvalidHandle, CUDA_ERROR_INVALID_HANDLE),
      PAIR(result::kNotReady, CUDA_ERROR_NOT_READY),
      PAIR(result::kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS),
      PAIR(result::kHostMemoryAlreadyRegistered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED),
      PAIR(result::kLaunchFailed, CUDA_ERROR_LAUNCH_FAILED),
      PAIR(result::kNotPermitted, CUDA_ERROR_NOT_PERMITTED),
      PAIR(result::kNotSupported, CUDA_ERROR_NOT_SUPPORTED),
      PAIR(result::kStreamCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
      PAIR(result::kStreamCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT),
      PAIR(result::kLastCaptureError, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD),
      PAIR(attribute::kIntegrated, CU_DEVICE_ATTRIBUTE_INTEGRATED),
      PAIR(attribute::kPciBus, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID),
      PAIR(attribute::kPciDevice, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID),
      PAIR(attribute::kPciDomain, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID),
      PAIR(attribute::kComputeMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
      PAIR(attribute::kComputeMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
      PAIR(attribute::kPageableThroughHostPageTables, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES),
      PAIR(attribute::kVirtualMemoryManagement, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED),
      PAIR(attribute::kPosixFileDescriptor, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
      PAIR(attribute::kGpuDirectRdmaWithVmm, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
      PAIR(attribute::kReadOnlyHostRegister, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED),
      PAIR(attribute::kFabric, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED),
      PAIR(kLocationDevice, CU_MEM_LOCATION_TYPE_DEVICE),
      PAIR(kAllocationPinned, CU_MEM_ALLOCATION_TYPE_PINNED),
      PAIR(kHandleNone, CU_MEM_HANDLE_TYPE_NONE),
      PAIR(kHandlePosixFd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
      PAIR(kHandleFabric, CU_MEM_HANDLE_TYPE_FABRIC),
      PAIR(kGranularityMinimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
      PAIR(kGranularityRecommended, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
      PAIR(kAccessNone, CU_MEM_ACCESS_FLAGS_PROT_NONE),
      PAIR(kAccessRead, CU_MEM_ACCESS_FLAGS_PROT_READ),
      PAIR(kAccessReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE),
      PAIR(kStreamNonBlocking, CU_STREAM_NON_BLOCKING),
      PAIR(kEventBlockingSync, CU_EVENT_BLOCKING_SYNC),
      PAIR(kCaptureStatusNone, CU_STREAM_CAPTURE_STATUS_NONE),
      PAIR(kCaptureModeRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED),
      PAIR(kHostRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE),
      PAIR(kHostRegisterReadOnly, CU_MEMHOSTREGISTER_READ_ONLY),
      PAIR(kProcAddressLegacy, CU_GET_PROC_ADDRESS_LEGACY_STREAM),
  };
  for (const auto& pair : pairs) {
    if (pair.ours != pair.theirs) throw std::logic_error(pair.name);
  }
  CHECK(reinterpret_cast<CUstream>(kStreamLegacy) == CU_STREAM_LEGACY);
  CHECK(reinterpret_cast<CUstream>(kStreamPerThread) == CU_STREAM_PER_THREAD);
}

}  // namespace
