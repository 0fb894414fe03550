// SPDX-License-Identifier: Apache-2.0
// A device's properties and abilities, asked without a context.
#pragma once

#include "backend/cuda/driver.h"
#include "remap/backends.h"

namespace remap::cuda {

// Of the device that the driver counts as `ordinal`. Throws invalid_argument (`device`, `devices`) if there is none.
Device device_of(const Driver& driver, int ordinal);

// 32 hexadecimal digits.
std::string uuid_of(const Driver& driver, Device device);

// All but free_bytes, which only a context knows.
CudaDevice describe(const Driver& driver, int ordinal);

// The properties of a page: location, how it can be exported, whether NICs may register it.
AllocationProperties allocation_properties(Device device, ShareableHandle shareable, bool gpu_direct_rdma) noexcept;

std::size_t granularity(const Driver& driver, const AllocationProperties& properties, int option);

}  // namespace remap::cuda
