// The emulated driver itself: each rule broken once, each effect and each order looked at through memory.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "child.h"
#include "emulated_driver.h"
#include "touch.h"

using namespace remap::testing;

namespace {

constexpr std::size_t kPages = 16;

// The call uses a handle that is none any more: undefined. The breach is told, and nobody can go on as if the call had
// been refused: the context is lost. Healed here, for the test to go on; settings are the environment's again.
#define POISONS(call)                                       \
  do {                                                      \
    GIVES(kIllegalAddress, 1u, call);                       \
    GIVES(kIllegalAddress, 0u, CU(cuStreamQuery)(nullptr)); \
    CONTROL(remapEmulatedReset)();                          \
  } while (false)

std::uintptr_t address(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }

unsigned char* anonymous(std::size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(at != MAP_FAILED);
  return static_cast<unsigned char*>(at);
}

CUmemAllocationProp pinned(int device = 0) {
  CUmemAllocationProp properties{};
  properties.type = kPinnedAllocation;
  properties.location = {kDeviceLocation, device};
  return properties;
}
CUstream new_stream(unsigned flags = kStreamNonBlocking) {
  CUstream stream = nullptr;
  FINE(CU(cuStreamCreateWithPriority)(&stream, flags, 0));
  return stream;
}
CUevent new_event(unsigned flags = 0) {
  CUevent event = nullptr;
  FINE(CU(cuEventCreate)(&event, flags));
  return event;
}

// Work behind it on a stream waits until it is opened.
class Gate {
 public:
  explicit Gate(CUstream stream) { FINE(CU(cuLaunchHostFunc)(stream, &Gate::pass, this)); }
  void await() {  // until the stream stands before it
    while (!reached_) std::this_thread::yield();
  }
  void open() { open_ = true; }

 private:
  static void pass(void* self) {
    auto* gate = static_cast<Gate*>(self);
    gate->reached_ = true;
    while (!gate->open_) std::this_thread::yield();
  }
  std::atomic<bool> reached_{false}, open_{false};
};

// `pages` pages behind a reservation with `slots` slots, from the first on, readable and writable.
struct Region {
  explicit Region(std::size_t slots, std::size_t pages) : bytes(slots * kPage) {
    FINE(CU(cuMemAddressReserve)(&at, bytes, 0, 0, 0));
    const CUmemAllocationProp properties = pinned();
    for (std::size_t i = 0; i < pages; ++i) {
      handles.push_back(0);
      FINE(CU(cuMemCreate)(&handles.back(), kPage, &properties, 0));
      FINE(CU(cuMemMap)(slot(i), kPage, 0, handles.back(), 0));
    }
    if (pages > 0) allow(0, pages, kAccessReadWrite);
  }
  CUdeviceptr slot(std::size_t i) const { return at + i * kPage; }
  unsigned char* bytes_of(std::size_t i) const { return reinterpret_cast<unsigned char*>(std::uintptr_t{slot(i)}); }
  void allow(std::size_t first, std::size_t count, int access) const {
    const CUmemAccessDesc descriptor{{kDeviceLocation, 0}, access};
    FINE(CU(cuMemSetAccess)(slot(first), count * kPage, &descriptor, 1));
  }
  void close() {
    if (!handles.empty()) FINE(CU(cuMemUnmap)(at, handles.size() * kPage));
    for (const CUmemGenericAllocationHandle handle : handles) FINE(CU(cuMemRelease)(handle));
    FINE(CU(cuMemAddressFree)(at, bytes));
  }
  CUdeviceptr at = 0;
  std::size_t bytes = 0;
  std::vector<CUmemGenericAllocationHandle> handles;
};

// A device of 16 pages whose context is current on this thread. close() is no destructor: it may throw.
struct Device {
  Device() {
    CONTROL(remapEmulatedReset)();
    configure("granularity", kPage);
    configure("memory", kPages * kPage);
    FINE(CU(cuInit)(0));
    FINE(CU(cuDevicePrimaryCtxRetain)(&context, 0));
    FINE(CU(cuCtxPushCurrent)(context));
  }
  void close() {
    FINE(CU(cuCtxPopCurrent)(nullptr));
    FINE(CU(cuDevicePrimaryCtxRelease)(0));
    for (const char* kind : {"reservations", "mappings", "pages", "streams", "events", "registrations", "contexts"}) {
      if (live(kind) != 0) throw std::logic_error(std::string("left: ") + kind);
    }
  }
  // On a thread of its own, in the same context.
  template <typename Body>
  void elsewhere(Body&& body) {
    std::thread([&] {
      FINE(CU(cuCtxPushCurrent)(context));
      body();
      FINE(CU(cuCtxPopCurrent)(nullptr));
    }).join();
  }
  CUcontext context = nullptr;
};

// With two mapped pages of four, page-locked memory, two streams and an event of each.
struct World : Device {
  World() {
    locked = anonymous(4 * kPage);
    FINE(CU(cuMemHostRegister)(locked, 4 * kPage, kHostPortable));
  }
  void close() {
    for (const CUstream each : {stream, other}) FINE(CU(cuStreamSynchronize)(each));
    for (const CUstream each : {stream, other}) FINE(CU(cuStreamDestroy)(each));
    for (const CUevent each : {event, other_event}) FINE(CU(cuEventDestroy)(each));
    FINE(CU(cuMemHostUnregister)(locked));
    munmap(locked, 4 * kPage);
    region.close();
    Device::close();
  }
  void fill(CUstream on, std::size_t slot, unsigned char value) {
    FINE(CU(cuMemsetD8Async)(region.slot(slot), value, kPage, on));
  }
  void large() { FINE(CU(cuMemcpyHtoDAsync)(region.slot(0), locked, kPage, stream)); }
  void large_end() { FINE(CU(cuEventRecord)(event, stream)); }
  void small() {
    FINE(CU(cuMemcpyHtoDAsync)(region.slot(1), locked + kPage, 64, other));
    FINE(CU(cuEventRecord)(other_event, other));
    FINE(CU(cuEventSynchronize)(other_event));
  }
  bool large_is_over() const { return CU(cuEventQuery)(event) == kSuccess; }
  Region region{4, 2};
  unsigned char* locked = nullptr;
  CUstream stream = new_stream(), other = new_stream();
  CUevent event = new_event(), other_event = new_event();
};

TEST(nothing_before_init) {  // first of all
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
  CONTROL(remapEmulatedReset)();
  for (std::uint64_t i = 0; const char* name = CONTROL(remapEmulatedEntryPoint)(i); ++i) {
    CHECK(entry_point(name, 13000) != nullptr);
  }
  const char* text = nullptr;
  CHECK(CU(cuGetErrorName)(kOutOfMemory, &text) == kSuccess && std::strcmp(text, "CUDA_ERROR_OUT_OF_MEMORY") == 0);
  CHECK(CU(cuGetErrorName)(123456, &text) == kInvalidValue && text == nullptr);
}

TEST(settings_and_injected_errors) {
  Device device;
  for (const auto& [name, value] : {std::pair{"granularity", 5000u}, {"colour", 1u}, {"channel_ops", 0u}}) {
    CHECK(CONTROL(remapEmulatedConfigure)(name, value) == -1);
  }
  BREAKS(kInvalidValue, CU(cuInit)(1));
  int value = 0;
  GIVES(kInvalidDevice, 0u, CU(cuDeviceGet)(&value, 2));
  BREAKS(kInvalidDevice, CU(cuDeviceGetAttribute)(&value, 102, 2));
  CUdeviceptr at = 0;
  CONTROL(remapEmulatedArm)("cuMemAddressReserve", 2, kOutOfMemory, 0);
  FINE(CU(cuMemAddressReserve)(&at, kPage, 0, 0, 0));
  CHECK(CONTROL(remapEmulatedConfigure)("granularity", 2 * kPage) == -2);  // not while anything is live
  FINE(CU(cuMemAddressFree)(at, kPage));
  GIVES(kOutOfMemory, 0u, CU(cuMemAddressReserve)(&at, kPage, 0, 0, 0));
  FINE(CU(cuMemAddressReserve)(&at, kPage, 0, 0, 0));
  CHECK(calls("cuMemAddressReserve") == 3 && calls(nullptr) > 3);
  CONTROL(remapEmulatedArm)("cuMemAddressFree", 1, kNotPermitted, 1);
  for (int i = 0; i < 2; ++i) GIVES(kNotPermitted, 0u, CU(cuMemAddressFree)(at, kPage));
  CONTROL(remapEmulatedDisarm)();
  FINE(CU(cuMemAddressFree)(at, kPage));
  CHECK(live("nonsense") == ~std::uint64_t{0} && CONTROL(remapEmulatedViolation)(1000) == nullptr);
  device.close();
}

TEST(contexts_are_per_thread_and_counted) {
  Device device;
  std::thread([&] {
    CUcontext other = device.context;
    FINE(CU(cuCtxGetCurrent)(&other));
    CHECK(other == nullptr);
    CUdeviceptr at = 0;
    CUstream stream = nullptr;
    BREAKS(kInvalidContext, CU(cuMemAddressReserve)(&at, kPage, 0, 0, 0));
    BREAKS(kInvalidContext, CU(cuStreamCreateWithPriority)(&stream, 0, 0));
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
  event = new_event();
  GIVES(kSuccess, 1u, CU(cuDevicePrimaryCtxRelease)(0));  // with an event left in it
  FINE(CU(cuDevicePrimaryCtxRetain)(&again, 0));
  FINE(CU(cuEventDestroy)(event));
  device.close();
}

TEST(reservations_and_pages) {
  Device device;
  CUdeviceptr at = 0;
  FINE(CU(cuMemAddressReserve)(&at, 3 * kPage, 8 << 20, 0, 0));
  CHECK(at % (8 << 20) == 0);
  BREAKS(kInvalidValue, CU(cuMemAddressReserve)(&at, kPage + 1, 0, 0, 0));
  BREAKS(kInvalidValue, CU(cuMemAddressReserve)(&at, 0, 0, 0, 0));
  BREAKS(kInvalidValue, CU(cuMemAddressReserve)(&at, kPage, 3 * kPage, 0, 0));
  BREAKS(kInvalidValue, CU(cuMemAddressFree)(at, 2 * kPage));
  FINE(CU(cuMemAddressFree)(at, 3 * kPage));
  BREAKS(kInvalidValue, CU(cuMemAddressFree)(at, 3 * kPage));

  CUmemGenericAllocationHandle page = 0;
  CUmemAllocationProp properties = pinned(), elsewhere = pinned(5), fabric = pinned(), rdma = pinned();
  fabric.requestedHandleTypes = kFabricHandle;
  rdma.allocFlags.gpuDirectRDMACapable = 1;
  BREAKS(kInvalidValue, CU(cuMemCreate)(&page, kPage / 2, &properties, 0));
  BREAKS(kInvalidValue, CU(cuMemCreate)(&page, kPage, nullptr, 0));
  BREAKS(kInvalidValue, CU(cuMemCreate)(&page, kPage, &properties, 1));
  BREAKS(kInvalidDevice, CU(cuMemCreate)(&page, kPage, &elsewhere, 0));
  BREAKS(kNotSupported, CU(cuMemCreate)(&page, kPage, &fabric, 0));
  BREAKS(kNotSupported, CU(cuMemCreate)(&page, kPage, &rdma, 0));
  std::size_t granularity = 0;
  BREAKS(kInvalidValue, CU(cuMemGetAllocationGranularity)(&granularity, &properties, 2));

  Region region(kPages, kPages);
  GIVES(kOutOfMemory, 0u, CU(cuMemCreate)(&page, kPage, &properties, 0));
  CHECK(region.bytes_of(0)[0] != 0);
  std::memset(region.bytes_of(0), 0x17, kPages * kPage);
  region.close();
  Region again(1, 1);
  CHECK(again.bytes_of(0)[kPage - 1] == 0x17);  // what the page before it held
  FINE(CU(cuMemRelease)(again.handles[0]));
  BREAKS(kInvalidValue, CU(cuMemRelease)(again.handles[0]));
  CHECK(live("pages") == 1 && again.bytes_of(0)[0] == 0x17);  // as long as handle or mapping
  FINE(CU(cuMemUnmap)(again.slot(0), kPage));
  CHECK(live("pages") == 0);
  BREAKS(kInvalidValue, CU(cuMemMap)(again.slot(0), kPage, 0, again.handles[0], 0));
  FINE(CU(cuMemAddressFree)(again.at, again.bytes));
  device.close();
}

TEST(mappings_and_access) {
  Device device;
  Region region(4, 2);
  const auto handle = region.handles[0];
  BREAKS(kInvalidValue, CU(cuMemMap)(region.slot(1), kPage, 0, handle, 0));         // over a mapping
  BREAKS(kInvalidValue, CU(cuMemMap)(region.slot(2) + 4096, kPage, 0, handle, 0));  // not aligned
  BREAKS(kInvalidValue, CU(cuMemMap)(region.slot(2), kPage, kPage, handle, 0));     // an offset
  BREAKS(kInvalidValue, CU(cuMemMap)(region.slot(2), 2 * kPage, 0, handle, 0));     // more than the handle
  BREAKS(kInvalidValue, CU(cuMemMap)(region.slot(4), kPage, 0, handle, 0));         // behind the reservation
  BREAKS(kInvalidValue, CU(cuMemMap)(region.slot(2), kPage, 0, 424242, 0));
  BREAKS(kInvalidValue, CU(cuMemUnmap)(region.slot(0), 3 * kPage));                 // a hole
  BREAKS(kInvalidValue, CU(cuMemUnmap)(region.slot(0), kPage / 2));                 // cuts a handle
  BREAKS(kInvalidValue, CU(cuMemUnmap)(region.slot(0), 0));
  BREAKS(kInvalidValue, CU(cuMemAddressFree)(region.at, region.bytes));             // something is mapped
  const CUmemLocation here{kDeviceLocation, 0};
  const CUmemAccessDesc all{here, kAccessReadWrite}, odd{here, 2}, away{{kDeviceLocation, 3}, kAccessReadWrite};
  BREAKS(kInvalidValue, CU(cuMemSetAccess)(region.slot(0), 3 * kPage, &all, 1));    // a hole
  BREAKS(kInvalidValue, CU(cuMemSetAccess)(region.slot(0), kPage / 2, &all, 1));    // cuts a handle
  BREAKS(kInvalidValue, CU(cuMemSetAccess)(region.slot(0), kPage, nullptr, 0));
  BREAKS(kInvalidValue, CU(cuMemSetAccess)(region.slot(0), kPage, &odd, 1));
  BREAKS(kInvalidDevice, CU(cuMemSetAccess)(region.slot(0), kPage, &away, 1));
  CHECK(live("mappings") == 2);

  FINE(CU(cuMemMap)(region.slot(3), kPage, 0, handle, 0));  // an alias: the same bytes
  CHECK(!readable(region.bytes_of(3)) && !readable(region.bytes_of(2)));  // mapped, no access yet; reserved only
  region.allow(3, 1, kAccessRead);
  CHECK(readable(region.bytes_of(3)) && !writable(region.bytes_of(3)));
  const volatile unsigned char* alias = region.bytes_of(3);  // the compiler may think that these are different bytes
  region.bytes_of(0)[kPage - 1] = 0x21;
  CHECK(alias[kPage - 1] == 0x21);
  FINE(CU(cuMemUnmap)(region.slot(3), kPage));
  CHECK(!readable(region.bytes_of(3)));
  CHECK(ended_well(in_child([&] {
    CUdeviceptr at = 0;
    CHECK(CU(cuMemAddressReserve)(&at, kPage, 0, 0, 0) == kNotInitialized && !readable(region.bytes_of(0)));
  })));
  region.close();
  device.close();
}

TEST(host_memory) {
  Device device;
  const std::size_t os_page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  unsigned char* at = anonymous(4 * os_page);
  BREAKS(kInvalidValue, CU(cuMemHostRegister)(nullptr, 10, 0));
  BREAKS(kInvalidValue, CU(cuMemHostRegister)(at, 0, 0));
  BREAKS(kInvalidValue, CU(cuMemHostRegister)(at, os_page, 64));
  FINE(CU(cuMemHostRegister)(at, os_page + 10, kHostPortable));
  GIVES(kHostAlreadyRegistered, 0u, CU(cuMemHostRegister)(at + os_page + 100, 10, 0));  // the same OS page
  BREAKS(kHostNotRegistered, CU(cuMemHostUnregister)(at + 1));
  FINE(CU(cuMemHostUnregister)(at));
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

TEST(copies_and_fills) {
  World world;
  const CUdeviceptr device = world.region.slot(0);
  unsigned char* locked = world.locked;
  std::memset(locked, 0x11, kPage);
  FINE(CU(cuMemcpyHtoDAsync)(device, locked, kPage, world.stream));
  FINE(CU(cuMemsetD8Async)(device, 0x22, kPage / 2, world.stream));
  FINE(CU(cuMemcpyDtoDAsync)(world.region.slot(1), device, kPage, world.stream));
  FINE(CU(cuMemcpyDtoHAsync)(locked + kPage, world.region.slot(1), kPage, world.stream));
  FINE(CU(cuMemcpyAsync)(address(locked + 2 * kPage), address(locked + kPage), kPage, world.stream));
  FINE(CU(cuMemsetD8Async)(address(locked), 0x33, 1, world.stream));  // a device can write page-locked memory
  FINE(CU(cuStreamSynchronize)(world.stream));
  CHECK(locked[2 * kPage] == 0x22 && locked[3 * kPage - 1] == 0x11 && locked[0] == 0x33);
  unsigned char own[64] = {};
  CHECK(CONTROL(remapEmulatedPageable)() == 0);
  FINE(CU(cuMemcpyHtoDAsync)(device, own, sizeof own, world.stream));
  CHECK(CONTROL(remapEmulatedPageable)() == 1);  // allowed, and counted
  BREAKS(kInvalidValue, CU(cuMemcpyHtoDAsync)(address(locked), own, 64, world.stream));
  BREAKS(kInvalidValue, CU(cuMemcpyHtoDAsync)(device, reinterpret_cast<void*>(device + 64), 64, world.stream));
  BREAKS(kInvalidValue, CU(cuMemcpyDtoHAsync)(nullptr, device, 64, world.stream));
  BREAKS(kInvalidValue, CU(cuMemcpyAsync)(device, device + 32, 64, world.stream));                       // overlap
  BREAKS(kInvalidValue, CU(cuMemcpyAsync)(world.region.slot(1), device, 2 * kPage, world.stream));       // into a hole
  BREAKS(kInvalidValue, CU(cuMemcpyAsync)(address(locked + 4 * kPage - 8), device, 64, world.stream));   // half locked
  BREAKS(kInvalidValue, CU(cuMemsetD8Async)(address(own), 0, 8, world.stream));
  BREAKS(kInvalidValue, CU(cuLaunchHostFunc)(world.stream, nullptr, nullptr));
  CUresult result = kSuccess;
  Gate gate(world.stream);
  FINE(CU(cuLaunchHostFunc)(world.stream, [](void* out) {
    CUevent event = nullptr;
    *static_cast<CUresult*>(out) = CU(cuEventCreate)(&event, 0);
  }, &result));
  GIVES(kSuccess, 1u, (gate.open(), CU(cuStreamSynchronize)(world.stream)));
  CHECK(result == kNotPermitted);  // inside a host function
  POISONS(CU(cuMemcpyAsync)(device, address(locked), 64, reinterpret_cast<CUstream>(&world)));
  FINE(CU(cuMemHostUnregister)(locked));
  FINE(CU(cuMemHostRegister)(locked, 4 * kPage, kHostReadOnly));
  BREAKS(kInvalidValue, CU(cuMemcpyDtoHAsync)(locked, device, kPage, world.stream));
  world.close();
}

TEST(batches_of_copies) {
  World world;
  const CUdeviceptr device = world.region.slot(0);
  unsigned char* locked = world.locked;
  std::memset(locked, 0x11, kPage);
  const auto batch = reinterpret_cast<decltype(&entry::cuMemcpyBatchAsync)>(entry_point("cuMemcpyBatchAsync", 12080));
  CUmemcpyAttributes attributes[2] = {};
  attributes[0].srcAccessOrder = kSourceInStreamOrder;
  std::size_t first[2] = {};
  std::size_t failed = 99;
  CUdeviceptr to[3] = {device, device + 64, address(locked + kPage)};
  CUdeviceptr from[3] = {address(locked), address(locked) + 8, device + 128};
  std::size_t bytes[3] = {64, 8, 8};
  const auto make = [&](std::size_t count, std::size_t kinds = 1) {
    return batch(to, from, bytes, count, attributes, first, kinds, &failed, world.stream);
  };
  FINE(CU(cuMemsetD8Async)(device, 0x22, kPage, world.stream));
  FINE(make(3));
  FINE(CU(cuStreamSynchronize)(world.stream));
  CHECK(locked[kPage] == 0x22 && failed == 99);
  BREAKS(kInvalidValue, make(0));
  BREAKS(kInvalidValue, make(2, 0));
  BREAKS(kInvalidValue, make(2, 2));  // the second one begins at the first copy as well
  BREAKS(kInvalidValue, make(1, 2));
  BREAKS(kInvalidValue, batch(to, from, bytes, 3, nullptr, first, 1, &failed, world.stream));
  BREAKS(kInvalidValue, batch(to, from, bytes, 3, attributes, first, 1, &failed, nullptr));
  BREAKS(kInvalidValue, batch(to, from, bytes, 3, attributes, first, 1, &failed, reinterpret_cast<CUstream>(kLegacyStream)));
  attributes[0].srcAccessOrder = 0;
  BREAKS(kInvalidValue, make(3));
  attributes[0].srcAccessOrder = kSourceInStreamOrder;
  bytes[1] = 0;
  BREAKS(kInvalidValue, make(3));
  bytes[1] = 8;
  for (const CUdeviceptr where : {device, device + 56, device + 63}) {  // two write the same bytes
    to[1] = where;
    BREAKS(kInvalidValue, make(2));
  }
  to[1] = device + 64;
  from[2] = device + 60;  // reads what another one writes
  BREAKS(kInvalidValue, make(3));
  from[2] = world.region.slot(1) + kPage;  // a hole
  BREAKS(kInvalidValue, make(3));
  CHECK(failed == 2);
  world.close();
}

// The driver does not look; the work faults when it runs, and what stands behind it is skipped.
TEST(what_work_in_flight_uses_is_taken_away) {
  for (const char* taken : {"mapping", "access", "registration"}) {
    World world;
    Gate gate(world.stream);
    FINE(CU(cuMemcpyHtoDAsync)(world.region.slot(1), world.locked, kPage, world.stream));
    world.large();
    world.large_end();
    if (taken[0] == 'm') {
      GIVES(kSuccess, 1u, CU(cuMemUnmap)(world.region.slot(1), kPage));
      CHECK(last_violation().find("cuMemcpyHtoDAsync in flight") != std::string::npos);
    } else if (taken[0] == 'a') {
      world.region.allow(1, 1, kAccessRead);
    } else {
      GIVES(kSuccess, 1u, CU(cuMemHostUnregister)(world.locked));
      FINE(CU(cuMemHostRegister)(world.locked, 4 * kPage, kHostPortable));  // another registration
    }
    const unsigned char before = world.region.bytes_of(0)[0];
    GIVES(kIllegalAddress, 1u, (gate.open(), CU(cuStreamSynchronize)(world.stream)));
    GIVES(kIllegalAddress, 0u, CU(cuEventQuery)(world.event));
    CHECK(world.region.bytes_of(0)[0] == before);
    world.fill(world.other, 0, 0x44);  // another stream goes on, until it waits for the failed one
    FINE(CU(cuStreamSynchronize)(world.other));
    FINE(CU(cuStreamWaitEvent)(world.other, world.event, 0));
    GIVES(kIllegalAddress, 0u, CU(cuStreamSynchronize)(world.other));
    if (taken[0] == 'm') FINE(CU(cuMemMap)(world.region.slot(1), kPage, 0, world.region.handles[1], 0));
    CONTROL(remapEmulatedReset)();  // heals the streams
    world.close();
  }
}

TEST(a_lost_context_is_lost_to_all) {
  World world;
  configure("lose_context", 1);
  CONTROL(remapEmulatedArm)("run:cuMemsetD8Async", 1, kLaunchFailed, 0);
  std::memset(world.region.bytes_of(0), 1, kPage);
  world.fill(world.stream, 0, 2);
  GIVES(kLaunchFailed, 0u, CU(cuStreamSynchronize)(world.stream));
  CHECK(world.region.bytes_of(0)[0] == 2 && world.region.bytes_of(0)[kPage - 1] == 1);  // half done
  GIVES(kLaunchFailed, 0u, CU(cuMemUnmap)(world.region.slot(0), kPage));
  CONTROL(remapEmulatedReset)();
  world.close();
}

TEST(events) {
  World world;
  CUevent second = new_event(kEventBlockingSync);
  float milliseconds = -1;
  FINE(CU(cuEventQuery)(world.event));  // never recorded: complete
  FINE(CU(cuEventSynchronize)(world.event));
  GIVES(kInvalidHandle, 0u, CU(cuEventElapsedTime)(&milliseconds, world.event, second));
  FINE(CU(cuEventRecord)(world.event, world.stream));
  Gate gate(world.stream);
  FINE(CU(cuEventRecord)(second, world.stream));
  GIVES(kNotReady, 0u, CU(cuEventQuery)(second));
  GIVES(kNotReady, 0u, CU(cuStreamQuery)(world.stream));
  GIVES(kNotReady, 0u, CU(cuEventElapsedTime)(&milliseconds, world.event, second));
  gate.open();
  FINE(CU(cuEventSynchronize)(second));
  FINE(CU(cuEventElapsedTime)(&milliseconds, world.event, second));
  CHECK(milliseconds >= 0);
  FINE(CU(cuEventDestroy)(second));
  POISONS(CU(cuEventRecord)(second, world.stream));
  POISONS(CU(cuEventQuery)(second));
  POISONS(CU(cuStreamWaitEvent)(world.stream, second, 0));
  POISONS(CU(cuEventDestroy)(second));
  BREAKS(kInvalidHandle, CU(cuEventQuery)(nullptr));  // seen by a driver as well, and refused
  BREAKS(kInvalidValue, CU(cuEventCreate)(&second, 64));
  BREAKS(kInvalidValue, CU(cuStreamWaitEvent)(world.stream, world.event, 4));
  second = new_event(kEventDisableTiming);
  FINE(CU(cuEventRecord)(second, world.stream));
  FINE(CU(cuEventSynchronize)(second));
  GIVES(kInvalidHandle, 0u, CU(cuEventElapsedTime)(&milliseconds, world.event, second));
  FINE(CU(cuEventDestroy)(second));
  world.close();
}

TEST(a_wait_binds_to_the_recording_at_its_call) {
  World world;
  Gate first(world.stream);
  FINE(CU(cuEventRecord)(world.event, world.stream));
  FINE(CU(cuStreamWaitEvent)(world.other, world.event, 0));
  Gate second(world.stream);
  FINE(CU(cuEventRecord)(world.event, world.stream));  // anew, while the wait is pending
  GIVES(kNotReady, 0u, CU(cuStreamQuery)(world.other));
  first.open();
  FINE(CU(cuStreamSynchronize)(world.other));  // does not wait for the second recording
  GIVES(kNotReady, 0u, CU(cuEventQuery)(world.event));
  FINE(CU(cuEventDestroy)(world.event));  // pending: forgotten, the work goes on
  second.open();
  world.event = new_event();
  world.close();
}

TEST(destroying_a_stream_does_not_wait_and_does_not_drop_work) {
  World world;
  const CUstream stream = new_stream();
  Gate gate(stream);
  world.fill(stream, 0, 0x55);
  FINE(CU(cuEventRecord)(world.event, stream));
  FINE(CU(cuStreamDestroy)(stream));
  gate.await();  // else a context that is lost below would have it skipped
  CUcontext context = nullptr;
  POISONS(CU(cuStreamSynchronize)(stream));
  POISONS(CU(cuEventRecord)(world.event, stream));
  POISONS(CU(cuMemsetD8Async)(world.region.slot(0), 0, 1, stream));
  POISONS(CU(cuStreamDestroy)(stream));
  POISONS(CU(cuStreamGetCtx)(stream, &context));
  GIVES(kInvalidHandle, 0u, CU(cuStreamGetCtx)(reinterpret_cast<CUstream>(&world), &context));  // lenient
  GIVES(kSuccess, 1u, CU(cuMemUnmap)(world.region.slot(0), kPage));  // its work is still in flight
  FINE(CU(cuMemMap)(world.region.slot(0), kPage, 0, world.region.handles[0], 0));
  world.region.allow(0, 1, kAccessReadWrite);
  gate.open();
  FINE(CU(cuEventSynchronize)(world.event));
  CHECK(world.region.bytes_of(0)[kPage - 1] == 0x55);
  FINE(CU(cuStreamGetCtx)(world.stream, &context));
  CHECK(context == world.context);
  CUstream none = nullptr;
  BREAKS(kInvalidValue, CU(cuStreamCreateWithPriority)(&none, 8, 0));
  world.close();
}

// The legacy stream waits for blocking ones and they for it; a non-blocking one takes no part.
TEST(default_streams) {
  World world;
  const auto legacy = reinterpret_cast<CUstream>(kLegacyStream);
  const auto per_thread = reinterpret_cast<CUstream>(kPerThreadStream);
  const CUstream blocking = new_stream(0);
  Gate gate(blocking);
  world.fill(blocking, 0, 1);
  world.fill(nullptr, 0, 2);  // 0 is the legacy stream as well
  world.fill(per_thread, 0, 3);
  GIVES(kNotReady, 0u, CU(cuStreamQuery)(legacy));
  GIVES(kNotReady, 0u, CU(cuStreamQuery)(per_thread));
  world.fill(world.stream, 1, 9);
  FINE(CU(cuStreamSynchronize)(world.stream));
  gate.open();
  FINE(CU(cuStreamSynchronize)(per_thread));
  CHECK(world.region.bytes_of(0)[0] == 3 && world.region.bytes_of(0)[kPage - 1] == 3);
  FINE(CU(cuStreamSynchronize)(legacy));
  Gate own(per_thread);
  world.elsewhere([&] { FINE(CU(cuStreamSynchronize)(per_thread)); });  // another thread's is another stream
  own.open();
  FINE(CU(cuStreamSynchronize)(per_thread));
  BREAKS(kInvalidHandle, CU(cuStreamDestroy)(legacy));
  CHECK(live("streams") == 3);  // default ones do not count
  FINE(CU(cuStreamDestroy)(blocking));
  world.close();
}

TEST(what_a_captured_stream_refuses_ends_the_capture) {
  World world;
  const CUstream stream = world.stream;
  int status = -1;
  CUgraph graph = nullptr;
  BREAKS(kInvalidValue, CU(cuStreamEndCapture)(stream, &graph));
  BREAKS(kCaptureUnsupported, CU(cuStreamBeginCapture)(reinterpret_cast<CUstream>(kLegacyStream), kCaptureRelaxed));
  BREAKS(kInvalidValue, CU(cuStreamBeginCapture)(stream, 7));
  FINE(CU(cuStreamBeginCapture)(stream, kCaptureRelaxed));
  FINE(CU(cuStreamIsCapturing)(stream, &status));
  CHECK(status == kCaptureActive);
  FINE(CU(cuEventQuery)(world.event));  // in relaxed mode nothing is unsafe
  FINE(CU(cuStreamEndCapture)(stream, &graph));
  for (int call = 0; call < 4; ++call) {
    FINE(CU(cuStreamBeginCapture)(stream, kCaptureRelaxed));
    BREAKS(kCaptureUnsupported, call == 0   ? CU(cuMemsetD8Async)(world.region.slot(0), 0, 8, stream)
                                : call == 1 ? CU(cuEventRecord)(world.event, stream)
                                : call == 2 ? CU(cuStreamQuery)(stream)
                                            : CU(cuStreamSynchronize)(stream));
    FINE(CU(cuStreamIsCapturing)(stream, &status));
    CHECK(status == kCaptureGone);
    GIVES(kCaptureInvalidated, 0u, CU(cuStreamEndCapture)(stream, &graph));
  }
  // A blocking stream that is captured would have to be waited for by the legacy one.
  const CUstream blocking = new_stream(0);
  FINE(CU(cuStreamBeginCapture)(blocking, kCaptureRelaxed));
  GIVES(kCaptureImplicit, 0u, CU(cuStreamIsCapturing)(nullptr, &status));
  BREAKS(kCaptureImplicit, CU(cuMemsetD8Async)(world.region.slot(0), 0, 8, nullptr));
  GIVES(kCaptureInvalidated, 0u, CU(cuStreamEndCapture)(blocking, &graph));
  FINE(CU(cuStreamDestroy)(blocking));
  world.close();
}

TEST(unsafe_calls_end_captures_of_their_mode) {
  World world;
  CUgraph graph = nullptr;
  const auto query_elsewhere = [&](int mode) {
    CUresult result = kSuccess;
    world.elsewhere([&] {
      FINE(CU(cuThreadExchangeStreamCaptureMode)(&mode));
      CHECK(mode == kCaptureGlobal);  // what a thread begins with
      result = CU(cuEventQuery)(world.event);
    });
    return result;
  };
  FINE(CU(cuStreamBeginCapture)(world.stream, kCaptureGlobal));
  GIVES(kSuccess, 0u, query_elsewhere(kCaptureRelaxed));
  GIVES(kSuccess, 0u, query_elsewhere(kCaptureThreadLocal));
  BREAKS(kCaptureUnsupported, query_elsewhere(kCaptureGlobal));
  GIVES(kCaptureInvalidated, 0u, CU(cuStreamEndCapture)(world.stream, &graph));

  FINE(CU(cuStreamBeginCapture)(world.stream, kCaptureThreadLocal));
  GIVES(kSuccess, 0u, query_elsewhere(kCaptureGlobal));
  world.elsewhere([&] { BREAKS(kCaptureWrongThread, CU(cuStreamEndCapture)(world.stream, &graph)); });
  BREAKS(kCaptureUnsupported, CU(cuEventQuery)(world.event));
  GIVES(kCaptureInvalidated, 0u, CU(cuStreamEndCapture)(world.stream, &graph));
  world.close();
}

// Copies of one direction share one engine, first come first served; all is shown by what is over before what. With a
// rate, a large copy takes 33 ms and the small one, which comes to another stream behind it, would take none.
TEST(copies_back_to_back_let_nobody_between) {
  World world;
  configure("copy_bytes_per_s", 2'000'000);
  world.large();
  world.large();
  world.large_end();  // an event lets nobody in, nor does a wait for what is over (never recorded: it is)
  FINE(CU(cuStreamWaitEvent)(world.stream, world.other_event, 0));
  world.large();
  world.large_end();
  world.small();
  CHECK(world.large_is_over());
  world.close();
}

TEST(others_come_between_where_something_lies_between) {
  World world;
  {
    Gate gate(world.stream);  // stands for a kernel
    world.large();
    world.large_end();
    world.small();
    CHECK(!world.large_is_over());
    gate.open();
    FINE(CU(cuStreamSynchronize)(world.stream));
  }
  const CUstream third = new_stream();
  const CUevent passed = new_event();
  Gate gate(third);
  FINE(CU(cuEventRecord)(passed, third));
  world.large();
  FINE(CU(cuStreamWaitEvent)(world.stream, passed, 0));  // not over: the copy behind it is in nobody's line until then
  world.large();
  world.large_end();
  world.small();
  CHECK(!world.large_is_over());
  gate.open();
  FINE(CU(cuEventDestroy)(passed));
  FINE(CU(cuStreamDestroy)(third));
  world.close();
}

TEST(enqueueing_blocks_while_the_channel_is_full) {
  World world;
  configure("channel_ops", 4);
  Gate gate(world.stream);  // counts: it is not done
  for (int i = 0; i < 3; ++i) world.fill(world.stream, 0, 1);
  std::atomic<bool> enqueued{false};
  std::thread engine([&] {
    FINE(CU(cuCtxSetCurrent)(world.context));
    FINE(CU(cuEventRecord)(world.event, world.stream));
    enqueued = true;
  });
  while (live("blocked") == 0 && !enqueued) std::this_thread::yield();
  CHECK(live("work") == 4 && !enqueued);
  world.fill(world.other, 1, 1);  // each has its own
  FINE(CU(cuStreamSynchronize)(world.other));
  CHECK(!enqueued);
  gate.open();
  engine.join();
  world.close();
}

// A mapping call on another thread, which has begun.
template <typename Call>
std::thread begun(World& world, const char* name, Call&& call) {
  const std::uint64_t before = calls(name);
  std::thread mapper([&world, call] {
    FINE(CU(cuCtxSetCurrent)(world.context));
    call();
  });
  while (calls(name) == before) std::this_thread::yield();
  return mapper;
}

TEST(a_mapping_call_takes_its_time) {
  constexpr std::uint64_t kMs = 1'000'000;
  World world;
  configure("driver_lock", 1);  // without it the fill would run before there is access, and break a rule
  configure("set_access_ns", 0);
  world.region.allow(0, 1, kAccessNone);
  configure("set_access_ns", 50 * kMs);
  std::thread mapper = begun(world, "cuMemSetAccess", [&] { world.region.allow(0, 1, kAccessReadWrite); });
  world.fill(world.stream, 0, 0x5A);
  FINE(CU(cuStreamSynchronize)(world.stream));
  mapper.join();
  configure("driver_lock", 0);
  configure("set_access_ns", 0);

  configure("unmap_ns", 50 * kMs);  // what is unmapped is gone while the call lasts
  mapper = begun(world, "cuMemUnmap", [&] { CHECK(CU(cuMemUnmap)(world.region.slot(1), kPage) == kSuccess); });
  CHECK(live("mappings") == 1);
  CHECK(CU(cuMemsetD8Async)(world.region.slot(1), 1, kPage, world.stream) == kInvalidValue);
  mapper.join();
  FINE(CU(cuMemMap)(world.region.slot(1), kPage, 0, world.region.handles[1], 0));
  configure("unmap_ns", 0);
  world.close();
}

}  // namespace
