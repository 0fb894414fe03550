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

inline void* entry_point(const char* name, int version = 12000) {
  void* found = nullptr;
  int status = 0;
  const CUresult result = exported<GetProcAddress>("cuGetProcAddress_v2")(name, &found, version, 1, &status);
  if (result != kSuccess || found == nullptr) throw std::runtime_error(std::string("no entry point ") + name);
  return found;
}
#define CU(name) (reinterpret_cast<decltype(&remap::emulated::entry::name)>(remap::testing::entry_point(#name)))

inline std::string last_violation() {
  const std::uint64_t count = CONTROL(remapEmulatedViolations)();
  return count == 0 ? std::string() : CONTROL(remapEmulatedViolation)(count - 1);
}

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

// The call succeeds and breaks no rule.
#define FINE(call) GIVES(kSuccess, 0u, call)
// The call breaks one rule and is refused for it.
#define BREAKS(code, call) GIVES(code, 1u, call)

inline std::uint64_t live(const char* kind) { return CONTROL(remapEmulatedLive)(kind); }
inline std::uint64_t calls(const char* name = nullptr) { return CONTROL(remapEmulatedCalls)(name); }

inline void configure(const char* name, std::uint64_t value) {
  CHECK(CONTROL(remapEmulatedConfigure)(name, value) == 0);
}

constexpr std::size_t kPage = 64 << 10;

}  // namespace remap::testing
