// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/device.h"

namespace remap::cuda {

Device device_of(const Driver& driver, int ordinal) {
  int count = 0;
  check(driver, "open", "cuDeviceGetCount", driver.cuDeviceGetCount(&count));
  if (ordinal < 0 || ordinal >= count) {
    throw Error(ErrorKind::invalid_argument,
                "cuda backend: expected a device from 0 to " + std::to_string(count - 1) + " (the driver counts " +
                    std::to_string(count) + "; CUDA_VISIBLE_DEVICES applies), got " + std::to_string(ordinal) +
                    ". Nothing was opened.",
                {{"device", std::int64_t{ordinal}}, {"devices", std::int64_t{count}}});
  }
  Device device = 0;
  check(driver, "open", "cuDeviceGet", driver.cuDeviceGet(&device, ordinal));
  return device;
}

AllocationProperties allocation_properties(Device device, ShareableHandle shareable, bool gpu_direct_rdma) noexcept {
  AllocationProperties properties;
  properties.type = kAllocationPinned;
  properties.requested_handle_types = shareable == ShareableHandle::posix_fd ? kHandlePosixFd
                                      : shareable == ShareableHandle::fabric ? kHandleFabric
                                                                             : kHandleNone;
  properties.location = {kLocationDevice, device};
  properties.flags.gpu_direct_rdma_capable = gpu_direct_rdma ? 1 : 0;
  return properties;
}

std::size_t granularity(const Driver& driver, const AllocationProperties& properties, int option) {
  std::size_t bytes = 0;
  check(driver, "open", "cuMemGetAllocationGranularity",
        driver.cuMemGetAllocationGranularity(&bytes, &properties, option));
  return bytes;
}

std::string uuid_of(const Driver& driver, Device device) {
  Uuid uuid;
  check(driver, "open", "cuDeviceGetUuid", driver.cuDeviceGetUuid(&uuid, device));
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char each : uuid.bytes) {
    const auto byte = static_cast<unsigned char>(each);
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

CudaDevice describe(const Driver& driver, int ordinal) {
  const Device device = device_of(driver, ordinal);
  const auto value = [&](int attribute) {
    int found = 0;
    check(driver, "open", "cuDeviceGetAttribute", driver.cuDeviceGetAttribute(&found, attribute, device));
    return found;
  };
  CudaDevice found;
  found.index = ordinal;
  char name[256] = {};
  check(driver, "open", "cuDeviceGetName", driver.cuDeviceGetName(name, sizeof(name) - 1, device));
  found.name = name;
  check(driver, "open", "cuDeviceTotalMem", driver.cuDeviceTotalMem(&found.total_bytes, device));
  found.uuid = uuid_of(driver, device);
  found.vmm = value(attribute::kVirtualMemoryManagement) != 0;
  found.posix_fd = value(attribute::kPosixFileDescriptor) != 0;
  found.fabric = value(attribute::kFabric) != 0;
  found.gpu_direct_rdma = value(attribute::kGpuDirectRdmaWithVmm) != 0;
  found.read_only_host_register = value(attribute::kReadOnlyHostRegister) != 0;
  found.coherent = value(attribute::kPageableThroughHostPageTables) != 0;
  found.integrated = value(attribute::kIntegrated) != 0;
  found.compute_major = value(attribute::kComputeMajor);
  found.compute_minor = value(attribute::kComputeMinor);
  found.pcie_domain = value(attribute::kPciDomain);
  found.pcie_bus = value(attribute::kPciBus);
  found.pcie_device = value(attribute::kPciDevice);
  if (found.vmm) {
    const AllocationProperties plain = allocation_properties(device, ShareableHandle::none, false);
    found.granularity = granularity(driver, plain, kGranularityMinimum);
    found.recommended_granularity = granularity(driver, plain, kGranularityRecommended);
  }
  return found;
}

}  // namespace remap::cuda
