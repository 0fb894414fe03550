// The emulated driver itself, memory and contexts: each rule broken once, each effect looked at through memory.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "child.h"
#include "emulated_driver.h"
#include "touch.h"

using namespace remap::testing;

namespace {

// First of all.
TEST(nothing_before_init) {
  int count = 0;
  BREAKS(kNotInitialized, CU(cuDeviceGetCount)(&count));
}

TEST(looking_up) {
  const auto look = exported<GetProcAddress>("cuGetProcAddress_v2");
  void* found = nullptr;
  int status = -1;
  CHECK(look("cuEventElapsedTime", &found, 12080, 0, &status) == kSuccess && found != nullptr && status == 0);
  CHECK(look("cuMemCreate", &found, 10010, 1, &status) == kSuccess && found == nullptr && status == 2);
  CHECK(look("cuNoSuchThing", &found, 12000, 1, &status) == kSuccess && found == nullptr && status == 1);
  CHECK(look("cuMemCreate", &found, 99000, 1, &status) == kInvalidValue);  // newer than the driver
  CHECK(look("cuMemCreate", &found, 12000, 2, &status) == kInvalidValue);
  configure("driver_version", 12000);
  CHECK(look("cuMemCreate", &found, 12080, 1, &status) == kInvalidValue);
  int version = 0;
  FINE(CU(cuDriverGetVersion)(&version));
  CHECK(version == 12000);
  CONTROL(remapEmulatedReset)();
  CHECK(CONTROL(remapEmulatedVersion)() > 0);
  std::uint64_t names = 0;
  while (const char* name = CONTROL(remapEmulatedEntryPoint)(names)) {
    CHECK(entry_point(name) != nullptr);
    ++names;
  }
  CHECK(names > 50);
}

TEST(errors_have_names) {
  const char* text = nullptr;
  CHECK(CU(cuGetErrorName)(kOutOfMemory, &text) == kSuccess && std::strcmp(text, "CUDA_ERROR_OUT_OF_MEMORY") == 0);
  CHECK(CU(cuGetErrorString)(kNotReady, &text) == kSuccess && text != nullptr);
  CHECK(CU(cuGetErrorName)(123456, &text) == kInvalidValue && text == nullptr);
}

TEST(devices_and_settings) {
  CONTROL(remapEmulatedReset)();
  configure("devices", 2);
  configure("attribute.102", 0);
  CHECK(CONTROL(remapEmulatedConfigure)("granularity", 5000) == -1);
  CHECK(CONTROL(remapEmulatedConfigure)("colour", 1) == -1);
  FINE(CU(cuInit)(0));
  BREAKS(kInvalidValue, CU(cuInit)(1));
  int value = 0;
  FINE(CU(cuDeviceGetCount)(&value));
  CHECK(value == 2);
  GIVES(kInvalidDevice, 0u, CU(cuDeviceGet)(&value, 2));
  FINE(CU(cuDeviceGetAttribute)(&value, 102, 1));
  CHECK(value == 0);
  BREAKS(kInvalidDevice, CU(cuDeviceGetAttribute)(&value, 102, 2));
  configure("devices", 0);
  GIVES(100, 0u, CU(cuInit)(0));
  CONTROL(remapEmulatedReset)();
}

TEST(contexts_are_per_thread_and_counted) {
  Device device;
  CUcontext current = nullptr;
  FINE(CU(cuCtxGetCurrent)(&current));
  CHECK(current == device.context);
  std::thread([&] {
    CUcontext other = device.context;
    FINE(CU(cuCtxGetCurrent)(&other));
    CHECK(other == nullptr);
    CUdeviceptr at = 0;
    BREAKS(kInvalidContext, CU(cuMemAddressReserve)(&at, kPage, 0, 0, 0));
    CUstream stream = nullptr;
    BREAKS(kInvalidContext, CU(cuStreamCreate)(&stream, 0));
    CUevent event = nullptr;
    BREAKS(kInvalidContext, CU(cuEventCreate)(&event, 0));
    BREAKS(kInvalidContext, CU(cuMemHostRegister)(&at, sizeof at, 0));
    BREAKS(kInvalidContext, CU(cuMemcpyAsync)(0, 0, 0, nullptr));
    BREAKS(kInvalidContext, CU(cuCtxPopCurrent)(nullptr));
    BREAKS(kInvalidContext, CU(cuCtxPushCurrent)(reinterpret_cast<CUcontext>(&at)));
    FINE(CU(cuCtxSetCurrent)(device.context));
    FINE(CU(cuMemAddressReserve)(&at, kPage, 0, 0, 0));
    FINE(CU(cuMemAddressFree)(at, kPage));
  }).join();
  FINE(CU(cuDevicePrimaryCtxRelease)(0));
  BREAKS(kInvalidContext, CU(cuDevicePrimaryCtxRelease)(0));
  CUevent event = nullptr;
  BREAKS(kContextIsDestroyed, CU(cuEventCreate)(&event, 0));
  CUcontext again = nullptr;
  FINE(CU(cuDevicePrimaryCtxRetain)(&again, 0));
  CHECK(again == device.context);
  FINE(CU(cuEventCreate)(&event, 0));
  GIVES(kSuccess, 1u, CU(cuDevicePrimaryCtxRelease)(0));  // with an event left in it
  FINE(CU(cuDevicePrimaryCtxRetain)(&again, 0));
  FINE(CU(cuEventDestroy)(event));
  device.close();
}

TEST(reservations) {
  Device device;
  CUdeviceptr at = 0;
  FINE(CU(cuMemAddressReserve)(&at, 3 * kPage, 8 << 20, 0, 0));
  CHECK(at % (8 << 20) == 0);
  BREAKS(kInvalidValue, CU(cuMemAddressReserve)(&at, kPage + 1, 0, 0, 0));
  BREAKS(kInvalidValue, CU(cuMemAddressReserve)(&at, 0, 0, 0, 0));
  BREAKS(kInvalidValue, CU(cuMemAddressReserve)(&at, kPage, 3 * kPage, 0, 0));
  BREAKS(kInvalidValue, CU(cuMemAddressFree)(at, 2 * kPage));
  BREAKS(kInvalidValue, CU(cuMemAddressFree)(at + kPage, 2 * kPage));
  FINE(CU(cuMemAddressFree)(at, 3 * kPage));
  BREAKS(kInvalidValue, CU(cuMemAddressFree)(at, 3 * kPage));
  device.close();
}

TEST(pages_run_out_exactly_and_are_dirty) {
  Device device;
  CUmemAllocationProp properties = pinned();
  CUmemGenericAllocationHandle page = 0;
  BREAKS(kInvalidValue, CU(cuMemCreate)(&page, kPage / 2, &properties, 0));
  BREAKS(kInvalidValue, CU(cuMemCreate)(&page, kPage, nullptr, 0));
  BREAKS(kInvalidValue, CU(cuMemCreate)(&page, kPage, &properties, 1));
  CUmemAllocationProp elsewhere = pinned(5);
  BREAKS(kInvalidDevice, CU(cuMemCreate)(&page, kPage, &elsewhere, 0));
  CUmemAllocationProp fabric = pinned();
  fabric.requestedHandleTypes = kFabricHandle;
  BREAKS(kNotSupported, CU(cuMemCreate)(&page, kPage, &fabric, 0));
  CUmemAllocationProp rdma = pinned();
  rdma.allocFlags.gpuDirectRDMACapable = 1;
  BREAKS(kNotSupported, CU(cuMemCreate)(&page, kPage, &rdma, 0));
  std::size_t granularity = 0;
  FINE(CU(cuMemGetAllocationGranularity)(&granularity, &properties, 0));
  CHECK(granularity == kPage);
  BREAKS(kInvalidValue, CU(cuMemGetAllocationGranularity)(&granularity, &properties, 2));

  Region region(kPages, kPages);
  GIVES(kOutOfMemory, 0u, CU(cuMemCreate)(&page, kPage, &properties, 0));
  std::size_t free_bytes = 1;
  std::size_t total = 0;
  FINE(CU(cuMemGetInfo)(&free_bytes, &total));
  CHECK(free_bytes == 0 && total == kPages * kPage);
  CHECK(region.bytes_of(0)[0] != 0);
  std::memset(region.bytes_of(0), 0x17, kPages * kPage);
  CHECK(CONTROL(remapEmulatedConfigure)("granularity", 2 * kPage) == -2);
  region.close();
  Region again(1, 1);
  CHECK(again.bytes_of(0)[kPage - 1] == 0x17);  // what the page before it held
  again.close();
  device.close();
}

TEST(mappings) {
  Device device;
  Region region(4, 2);
  const auto handle = region.handles[0];
  CHECK(CONTROL(remapEmulatedLive)("mappings") == 2);
  BREAKS(kInvalidValue, CU(cuMemMap)(region.slot(1), kPage, 0, handle, 0));          // over a mapping
  BREAKS(kInvalidValue, CU(cuMemMap)(region.slot(2) + 4096, kPage, 0, handle, 0));   // not aligned
  BREAKS(kInvalidValue, CU(cuMemMap)(region.slot(2), kPage, kPage, handle, 0));      // an offset
  BREAKS(kInvalidValue, CU(cuMemMap)(region.slot(2), 2 * kPage, 0, handle, 0));      // more than the handle
  BREAKS(kInvalidValue, CU(cuMemMap)(region.slot(4), kPage, 0, handle, 0));          // behind the reservation
  BREAKS(kInvalidValue, CU(cuMemMap)(region.slot(2), kPage, 0, 424242, 0));
  BREAKS(kInvalidValue, CU(cuMemUnmap)(region.slot(0), 3 * kPage));                  // a hole
  BREAKS(kInvalidValue, CU(cuMemUnmap)(region.slot(0), kPage / 2));                  // cuts a handle
  BREAKS(kInvalidValue, CU(cuMemUnmap)(region.slot(2), kPage));
  BREAKS(kInvalidValue, CU(cuMemUnmap)(region.slot(0), 0));
  BREAKS(kInvalidValue, CU(cuMemAddressFree)(region.at, region.bytes));              // something is mapped
  const CUmemAccessDesc all{{kDeviceLocation, 0}, kAccessReadWrite};
  BREAKS(kInvalidValue, CU(cuMemSetAccess)(region.slot(0), 3 * kPage, &all, 1));     // a hole
  BREAKS(kInvalidValue, CU(cuMemSetAccess)(region.slot(0), kPage / 2, &all, 1));     // cuts a handle
  BREAKS(kInvalidValue, CU(cuMemSetAccess)(region.slot(0), kPage, nullptr, 0));
  const CUmemAccessDesc odd{{kDeviceLocation, 0}, 2};
  BREAKS(kInvalidValue, CU(cuMemSetAccess)(region.slot(0), kPage, &odd, 1));
  const CUmemAccessDesc elsewhere{{kDeviceLocation, 3}, kAccessReadWrite};
  BREAKS(kInvalidDevice, CU(cuMemSetAccess)(region.slot(0), kPage, &elsewhere, 1));
  CHECK(CONTROL(remapEmulatedLive)("mappings") == 2);

  FINE(CU(cuMemMap)(region.slot(3), kPage, 0, handle, 0));  // an alias: the same bytes
  region.allow(3, 1, kAccessReadWrite);
  std::memset(region.bytes_of(0), 0x21, kPage);
  CHECK(region.bytes_of(3)[kPage - 1] == 0x21);
  region.bytes_of(3)[7] = 0x22;
  CHECK(region.bytes_of(0)[7] == 0x22);
  FINE(CU(cuMemUnmap)(region.slot(3), kPage));
  region.close();
  device.close();
}

TEST(pages_live_as_long_as_handle_or_mapping) {
  Device device;
  Region region(1, 1);
  region.bytes_of(0)[0] = 0x33;
  FINE(CU(cuMemRelease)(region.handles[0]));
  BREAKS(kInvalidValue, CU(cuMemRelease)(region.handles[0]));
  CHECK(CONTROL(remapEmulatedLive)("pages") == 1 && region.bytes_of(0)[0] == 0x33);
  FINE(CU(cuMemUnmap)(region.slot(0), kPage));
  CHECK(CONTROL(remapEmulatedLive)("pages") == 0);
  BREAKS(kInvalidValue, CU(cuMemMap)(region.slot(0), kPage, 0, region.handles[0], 0));
  FINE(CU(cuMemAddressFree)(region.at, region.bytes));
  device.close();
}

TEST(touching_what_is_not_accessible_faults) {
  Device device;
  Region region(2, 1);
  CHECK(writable(region.bytes_of(0)));
  CHECK(!readable(region.bytes_of(1)));  // reserved only
  region.allow(0, 1, kAccessRead);
  CHECK(readable(region.bytes_of(0)) && !writable(region.bytes_of(0)));
  region.allow(0, 1, kAccessNone);
  CHECK(!readable(region.bytes_of(0)));
  FINE(CU(cuMemUnmap)(region.slot(0), kPage));
  CHECK(!readable(region.bytes_of(0)));
  FINE(CU(cuMemMap)(region.slot(0), kPage, 0, region.handles[0], 0));
  CHECK(!readable(region.bytes_of(0)));  // mapped, no access yet
  region.close();
  device.close();
}

TEST(host_memory) {
  Device device;
  const std::size_t os_page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* mapped = mmap(nullptr, 4 * os_page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(mapped != MAP_FAILED);
  auto* at = static_cast<unsigned char*>(mapped);
  BREAKS(kInvalidValue, CU(cuMemHostRegister)(nullptr, 10, 0));
  BREAKS(kInvalidValue, CU(cuMemHostRegister)(at, 0, 0));
  BREAKS(kInvalidValue, CU(cuMemHostRegister)(at, os_page, 64));
  FINE(CU(cuMemHostRegister)(at, os_page + 10, kHostPortable));
  GIVES(kHostAlreadyRegistered, 0u, CU(cuMemHostRegister)(at, 1, 0));
  GIVES(kHostAlreadyRegistered, 0u, CU(cuMemHostRegister)(at + os_page + 100, 10, 0));  // the same OS page
  BREAKS(kHostNotRegistered, CU(cuMemHostUnregister)(at + 1));
  unsigned type = 0;
  FINE(CU(cuPointerGetAttribute)(&type, kPointerMemoryType, reinterpret_cast<std::uintptr_t>(at)));
  CHECK(type == kMemoryTypeHost);
  const auto ordinary = reinterpret_cast<std::uintptr_t>(at + 3 * os_page);
  GIVES(kInvalidValue, 0u, CU(cuPointerGetAttribute)(&type, kPointerMemoryType, ordinary));
  CHECK(CONTROL(remapEmulatedLive)("registrations") == 1);
  FINE(CU(cuMemHostUnregister)(at));
  BREAKS(kHostNotRegistered, CU(cuMemHostUnregister)(at));

  CHECK(mprotect(at, os_page, PROT_READ) == 0);
  BREAKS(kInvalidValue, CU(cuMemHostRegister)(at, os_page, 0));
  FINE(CU(cuMemHostRegister)(at, os_page, kHostReadOnly));
  FINE(CU(cuMemHostUnregister)(at));
  configure("attribute.113", 0);
  BREAKS(kNotSupported, CU(cuMemHostRegister)(at, os_page, kHostReadOnly));
  munmap(at + os_page, os_page);
  BREAKS(kInvalidValue, CU(cuMemHostRegister)(at, 3 * os_page, kHostPortable));  // a hole
  munmap(at, 4 * os_page);
  device.close();
}

TEST(exported_pages_are_imported) {
  Device device;
  CUmemAllocationProp properties = pinned();
  properties.requestedHandleTypes = kPosixFd;
  CUmemGenericAllocationHandle page = 0;
  FINE(CU(cuMemCreate)(&page, kPage, &properties, 0));
  int file = -1;
  FINE(CU(cuMemExportToShareableHandle)(&file, page, kPosixFd, 0));
  CUmemGenericAllocationHandle same = 0;
  void* shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(file));
  FINE(CU(cuMemImportFromShareableHandle)(&same, shareable, kPosixFd));
  close(file);
  CHECK(CONTROL(remapEmulatedLive)("pages") == 1);
  BREAKS(kInvalidValue, CU(cuMemImportFromShareableHandle)(&same, shareable, kPosixFd));  // closed
  FINE(CU(cuMemRelease)(page));
  FINE(CU(cuMemRelease)(same));
  Region region(1, 1);
  BREAKS(kInvalidValue, CU(cuMemExportToShareableHandle)(&file, region.handles[0], kPosixFd, 0));  // not made for it
  region.close();
  device.close();
}

TEST(injected_errors_and_counts) {
  Device device;
  CUdeviceptr at = 0;
  CONTROL(remapEmulatedArm)("cuMemAddressReserve", 2, kOutOfMemory, 0);
  const auto before = CONTROL(remapEmulatedCalls)("cuMemAddressReserve");
  FINE(CU(cuMemAddressReserve)(&at, kPage, 0, 0, 0));
  FINE(CU(cuMemAddressFree)(at, kPage));
  GIVES(kOutOfMemory, 0u, CU(cuMemAddressReserve)(&at, kPage, 0, 0, 0));
  FINE(CU(cuMemAddressReserve)(&at, kPage, 0, 0, 0));
  CHECK(CONTROL(remapEmulatedCalls)("cuMemAddressReserve") == before + 3 && CONTROL(remapEmulatedCalls)(nullptr) > before + 3);
  CONTROL(remapEmulatedArm)("cuMemAddressFree", 1, kNotPermitted, 1);
  GIVES(kNotPermitted, 0u, CU(cuMemAddressFree)(at, kPage));
  GIVES(kNotPermitted, 0u, CU(cuMemAddressFree)(at, kPage));
  CONTROL(remapEmulatedDisarm)();
  FINE(CU(cuMemAddressFree)(at, kPage));
  CHECK(CONTROL(remapEmulatedLive)("nonsense") == ~std::uint64_t{0});
  CHECK(CONTROL(remapEmulatedViolation)(CONTROL(remapEmulatedViolations)()) == nullptr);
  device.close();
}

TEST(a_forked_child_has_no_driver) {
  Device device;
  Region region(1, 1);
  CHECK(ended_well(in_child([&] {
    CUdeviceptr at = 0;
    CHECK(CU(cuMemAddressReserve)(&at, kPage, 0, 0, 0) == kNotInitialized && !readable(region.bytes_of(0)));
  })));
  region.close();
  device.close();
}

TEST(two_devices) {
  CONTROL(remapEmulatedReset)();
  CHECK(CONTROL(remapEmulatedConfigure)("devices", 2) == 0 && CONTROL(remapEmulatedConfigure)("granularity", kPage) == 0);
  configure("memory", 2 * kPage);
  FINE(CU(cuInit)(0));
  CUcontext first = nullptr;
  CUcontext second = nullptr;
  FINE(CU(cuDevicePrimaryCtxRetain)(&first, 0));
  FINE(CU(cuDevicePrimaryCtxRetain)(&second, 1));
  CHECK(first != second);
  FINE(CU(cuCtxPushCurrent)(second));
  CUdevice device = 0;
  FINE(CU(cuCtxGetDevice)(&device));
  CHECK(device == 1);
  const CUmemAllocationProp properties = pinned(1);
  CUmemGenericAllocationHandle page = 0;
  FINE(CU(cuMemCreate)(&page, 2 * kPage, &properties, 0));
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  FINE(CU(cuMemGetInfo)(&free_bytes, &total));
  CHECK(free_bytes == 0);
  CUevent event = nullptr;
  FINE(CU(cuEventCreate)(&event, 0));
  FINE(CU(cuCtxSetCurrent)(first));
  FINE(CU(cuMemGetInfo)(&free_bytes, &total));
  CHECK(free_bytes == 2 * kPage);
  CUstream stream = nullptr;
  FINE(CU(cuStreamCreate)(&stream, kStreamNonBlocking));
  BREAKS(kInvalidHandle, CU(cuEventRecord)(event, stream));  // of two contexts
  FINE(CU(cuStreamDestroy)(stream));
  FINE(CU(cuEventDestroy)(event));
  FINE(CU(cuMemRelease)(page));
  FINE(CU(cuCtxPopCurrent)(nullptr));
  FINE(CU(cuDevicePrimaryCtxRelease)(0));
  FINE(CU(cuDevicePrimaryCtxRelease)(1));
  CONTROL(remapEmulatedReset)();
}

}  // namespace
