// The emulated driver, called directly: entry points through cuGetProcAddress_v2, and what a rule's breach must do.
#pragma once

#include <dlfcn.h>

#include <string>
#include <vector>

#include "check.h"
#include "emulated_driver/control.h"
#include "emulated_driver/entry_points.h"

namespace remap::testing {

using namespace remap::emulated;  // NOLINT: the driver's names, in tests of the driver

inline void* emulated_library() {
  static void* library = dlopen(REMAP_EMULATED_DRIVER_PATH, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  return library;
}

template <typename Function>
Function exported(const char* name) {
  void* found = dlsym(emulated_library(), name);
  if (found == nullptr) throw std::runtime_error(std::string("not exported: ") + name);
  return reinterpret_cast<Function>(found);
}
#define CONTROL(name) (remap::testing::exported<decltype(&::name)>(#name))

using GetProcAddress = CUresult (*)(const char*, void**, int, std::uint64_t, int*);

inline void* entry_point(const char* name) {
  constexpr int kVersion = 12000;
  void* found = nullptr;
  int status = 0;
  const CUresult result = exported<GetProcAddress>("cuGetProcAddress_v2")(name, &found, kVersion, 1, &status);
  if (result != kSuccess || found == nullptr) throw std::runtime_error(std::string("no entry point ") + name);
  return found;
}
#define CU(name) (reinterpret_cast<decltype(&remap::emulated::entry::name)>(remap::testing::entry_point(#name)))

inline std::string last_violation() {
  const std::uint64_t count = CONTROL(remapEmulatedViolations)();
  return count == 0 ? std::string() : CONTROL(remapEmulatedViolation)(count - 1);
}

// The call succeeds and breaks no rule.
#define FINE(call)                                                                                       \
  do {                                                                                                   \
    const auto before_ = CONTROL(remapEmulatedViolations)();                                             \
    const int result_ = (call);                                                                          \
    if (result_ != kSuccess || CONTROL(remapEmulatedViolations)() != before_) {                          \
      throw std::logic_error(std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " #call " gave " + \
                             std::to_string(result_) + "; " + last_violation());                         \
    }                                                                                                    \
  } while (false)

// The call gives `code` and `rules` violations more are recorded.
#define GIVES(code, rules, call)                                                                         \
  do {                                                                                                   \
    const auto before_ = CONTROL(remapEmulatedViolations)();                                             \
    const int result_ = (call);                                                                          \
    const auto broken_ = CONTROL(remapEmulatedViolations)() - before_;                                   \
    if (result_ != (code) || broken_ != (rules)) {                                                       \
      throw std::logic_error(std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " #call " gave " + \
                             std::to_string(result_) + " and broke " + std::to_string(broken_) + " rules; " + last_violation()); \
    }                                                                                                    \
  } while (false)

// The call breaks one rule and is refused for it.
#define BREAKS(code, call) GIVES(code, 1u, call)

// The call uses a handle that is none any more: undefined. The rule's breach is told, and nobody can go on as if the call had
// been refused: the context is lost. Healed here, for the test to go on; settings are the environment's again.
#define POISONS(call)                                                      \
  do {                                                                     \
    GIVES(kIllegalAddress, 1u, call);                                      \
    GIVES(kIllegalAddress, 0u, CU(cuStreamQuery)(nullptr));                \
    CONTROL(remapEmulatedReset)();                                         \
  } while (false)

inline void configure(const char* name, std::uint64_t value) {
  CHECK(CONTROL(remapEmulatedConfigure)(name, value) == 0);
}

constexpr std::size_t kPage = 64 << 10;
constexpr std::size_t kPages = 16;

// A device of 16 pages of 64 KiB, its context current on this thread. When it ends nothing may be live.
class Device {
 public:
  Device() {
    CONTROL(remapEmulatedReset)();
    configure("granularity", kPage);
    configure("memory", kPages * kPage);
    FINE(CU(cuInit)(0));
    FINE(CU(cuDevicePrimaryCtxRetain)(&context, 0));
    FINE(CU(cuCtxPushCurrent)(context));
  }
  // Not in a destructor: it may throw.
  void close() {
    FINE(CU(cuCtxPopCurrent)(nullptr));
    FINE(CU(cuDevicePrimaryCtxRelease)(0));
    for (const char* kind : {"reservations", "mappings", "pages", "streams", "events", "registrations", "contexts"}) {
      if (CONTROL(remapEmulatedLive)(kind) != 0) throw std::logic_error(std::string("left: ") + kind);
    }
  }
  CUcontext context = nullptr;
};

inline CUmemAllocationProp pinned(int device = 0) {
  CUmemAllocationProp properties{};
  properties.type = kPinnedAllocation;
  properties.location = {kDeviceLocation, device};
  return properties;
}

// `pages` pages behind a reservation with `slots` slots, from the first on, readable and writable.
class Region {
 public:
  explicit Region(std::size_t slots, std::size_t pages) : bytes(slots * kPage) {
    FINE(CU(cuMemAddressReserve)(&at, bytes, 0, 0, 0));
    for (std::size_t i = 0; i < pages; ++i) {
      handles.push_back(0);
      const CUmemAllocationProp properties = pinned();
      FINE(CU(cuMemCreate)(&handles.back(), kPage, &properties, 0));
      FINE(CU(cuMemMap)(slot(i), kPage, 0, handles.back(), 0));
    }
    if (pages > 0) allow(0, pages, kAccessReadWrite);
  }
  CUdeviceptr slot(std::size_t i) const { return at + i * kPage; }
  unsigned char* bytes_of(std::size_t i) const { return reinterpret_cast<unsigned char*>(static_cast<std::uintptr_t>(slot(i))); }
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

}  // namespace remap::testing
