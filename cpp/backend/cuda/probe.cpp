// SPDX-License-Identifier: Apache-2.0
// The questions of `remap doctor`: which driver, which devices, what they can do, how much is free.
#include "backend/cuda/context.h"
#include "backend/cuda/device.h"
#include "backend/cuda/host_budget.h"
#include "remap/backends.h"

namespace remap {
namespace {

using namespace cuda;

// Only a context knows. A device that gives none now (another process has it to itself, say) is listed with 0 free bytes:
// the probe is there to say what is wrong, not to fail with it.
std::size_t free_bytes(const Driver& driver, int ordinal) {
  try {
    const Context context(driver, device_of(driver, ordinal));
    const Context::Use use(context, "probe");
    std::size_t free_bytes = 0;
    std::size_t total = 0;
    return driver.cuMemGetInfo(&free_bytes, &total) == result::kSuccess ? free_bytes : 0;
  } catch (const Error&) {
    return 0;
  }
}

}  // namespace

HostRoom host_room(std::size_t budget_bytes) {
  const HostBudget budget = user_budget(budget_bytes);
  if (!budget.set()) return machine_room();
  return {budget.bytes, to_string(budget.limited_by)};
}

HostRoom machine_room() {
  const HostBudget spare = host_budget(read_host_limits());
  return {spare.bytes, to_string(spare.limited_by)};
}

CudaProbe probe_cuda(const std::string& library) {
  const Driver& driver = load_driver(library);
  CudaProbe probe;
  probe.library = driver.library;
  probe.driver_version = driver.version;
  probe.emulated = driver.emulated;
  const HostRoom room = host_room();
  probe.host_budget_bytes = room.bytes;
  probe.host_limited_by = room.limited_by;
  try {
    initialize(driver);
  } catch (const Error& error) {
    for (const auto& [name, value] : error.fields()) {
      if (name == "code" && value == Error::Value{std::int64_t{result::kNoDevice}}) return probe;  // a driver, no devices
    }
    throw;
  }
  int count = 0;
  check(driver, "probe", "cuDeviceGetCount", driver.cuDeviceGetCount(&count));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CudaDevice device = describe(driver, ordinal);
    device.free_bytes = free_bytes(driver, ordinal);
    probe.devices.push_back(std::move(device));
  }
  return probe;
}

}  // namespace remap
