// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/driver.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

namespace remap::cuda {
namespace {

constexpr const char* kDefaultLibrary = "libcuda.so.1";

std::string version_text(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

std::string library_to_load(const std::string& library) {
  if (!library.empty()) return library;
  const char* named = std::getenv("REMAP_LIBCUDA");
  return named != nullptr && *named != '\0' ? named : kDefaultLibrary;
}

template <typename Function>
Function symbol(void* handle, const char* name) noexcept {
  return reinterpret_cast<Function>(::dlsym(handle, name));
}

[[noreturn]] void refuse_library(const std::string& library, const std::string& why, Error::Fields fields = {}) {
  fields.emplace_back("library", library);
  throw Error(ErrorKind::driver, "cuda backend: the driver library '" + library + "' " + why, std::move(fields));
}

[[noreturn]] void refuse_version(const std::string& library, int found) {
  refuse_library(library,
                 "is of CUDA " + version_text(found) + "; CUDA " + version_text(kOldestDriver) +
                     " or newer is needed. Nothing was opened. Install NVIDIA driver 525 or later, or use device \"cpu\".",
                 {{"found", std::int64_t{found}}, {"needed", std::int64_t{kOldestDriver}}});
}

// The function of that name with the binary interface of that version; null if the driver has none.
void* ask(GetProcAddress get_address, const char* name, int version) noexcept {
  void* function = nullptr;
  int status = 0;
  const Result code = get_address(name, &function, version, kProcAddressLegacy, &status);
  return code == result::kSuccess && status == 0 ? function : nullptr;
}

// A library that is refused stays loaded: it may have begun something of its own, and another user's handle may be the same.
std::unique_ptr<Driver> open(const std::string& library) {
  void* handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = ::dlerror();
    refuse_library(library, std::string("could not be loaded (") + (reason != nullptr ? reason : "no reason given") +
                                "). Nothing was opened. Install the NVIDIA driver, run the container with GPU access "
                                "(--gpus all), or name the library's path in REMAP_LIBCUDA.");
  }
  auto driver = std::make_unique<Driver>();
  using GetVersion = Result (*)(int*);
  const auto get_address = symbol<GetProcAddress>(handle, "cuGetProcAddress_v2");
  GetVersion get_version = nullptr;
  if (get_address != nullptr) {
    get_version = reinterpret_cast<GetVersion>(ask(get_address, "cuDriverGetVersion", 2020));
  } else {
    get_version = symbol<GetVersion>(handle, "cuDriverGetVersion");  // an old driver, which can say how old
  }
  if (get_version == nullptr || get_version(&driver->version) != result::kSuccess) {
    refuse_library(library, "does not tell its version: it is not a CUDA driver, or a broken one. Nothing was opened. Look at "
                            "REMAP_LIBCUDA, or reinstall the NVIDIA driver.");
  }
  if (driver->version < kOldestDriver || get_address == nullptr) refuse_version(library, driver->version);

  std::string missing;
#define REMAP_CUDA_RESOLVE(name, version, parameters)                                                      \
  driver->name = reinterpret_cast<decltype(driver->name)>(ask(get_address, #name, version));               \
  if (driver->name == nullptr) {                                                                           \
    missing += std::string(missing.empty() ? "" : ", ") + #name + " (" + version_text(version) + ")";      \
  }
  REMAP_CUDA_ENTRY_POINTS(REMAP_CUDA_RESOLVE)
#undef REMAP_CUDA_RESOLVE
#define REMAP_CUDA_RESOLVE(name, version, parameters) \
  driver->name = reinterpret_cast<decltype(driver->name)>(ask(get_address, #name, version));
  REMAP_CUDA_NEWER_ENTRY_POINTS(REMAP_CUDA_RESOLVE)
#undef REMAP_CUDA_RESOLVE
  if (!missing.empty()) {
    refuse_library(library,
                   "of CUDA " + version_text(driver->version) + " lacks " + missing +
                       ". Nothing was opened. Install a driver that has them, or use device \"cpu\".",
                   {{"found", std::int64_t{driver->version}}, {"missing", missing}});
  }

  link_map* map = nullptr;
  const bool named = ::dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr && map->l_name != nullptr;
  driver->library = named && *map->l_name != '\0' ? map->l_name : library;
  driver->emulated = ::dlsym(handle, "remapEmulatedVersion") != nullptr;
  return driver;
}

// Never destroyed: backends that outlive main() still refer to their driver.
struct Drivers {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<Driver>> loaded;
};
Drivers& drivers() {
  static auto* all = new Drivers;
  return *all;
}

std::atomic<bool> exiting{false};

}  // namespace

const Driver& load_driver(const std::string& library) {
  const std::string wanted = library_to_load(library);
  Drivers& all = drivers();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::unique_ptr<Driver>& found = all.loaded[wanted];
  if (!found) found = open(wanted);  // a refusal is not remembered: the library may be installed meanwhile
  return *found;
}

void initialize(const Driver& driver) {
  check(driver, "open", "cuInit", driver.cuInit(0));
  // Exit handlers run in the reverse order: after cuInit has set up the driver's own, ours comes before them.
  static const int registered = std::atexit([] { exiting.store(true, std::memory_order_relaxed); });
  (void)registered;
}

bool process_is_exiting() noexcept { return exiting.load(std::memory_order_relaxed); }

bool context_is_lost(Result code) noexcept {
  switch (code) {
    case 214:                      // uncorrectable ECC error
    case 220:                      // uncorrectable NVLink error
    case result::kIllegalAddress:  // 700
    case 702:                      // launch timeout
    case 710:                      // device-side assert
    case 714:                      // hardware stack
    case 715:                      // illegal instruction
    case 716:                      // misaligned address
    case 717:                      // invalid address space
    case 718:                      // invalid program counter
    case result::kLaunchFailed:    // 719
    case 721:                      // tensor memory leak
      return true;
    default:
      return false;
  }
}

namespace {

bool is_about_capture(Result code) noexcept {
  return code >= result::kStreamCaptureUnsupported && code <= result::kLastCaptureError;
}

const char* advice(Result code) noexcept {
  if (code == result::kOutOfMemory) {
    return "Give memory back (other processes and allocators share the device), or ask for less.";
  }
  if (code == result::kDeinitialized) return "The process is ending; close sessions before that.";
  if (code == result::kNoDevice) return "Give the process a GPU (CUDA_VISIBLE_DEVICES, --gpus), or use device \"cpu\".";
  if (code == result::kNotPermitted || code == result::kNotSupported) {
    return "The device, or the permissions of this process, do not allow it: `remap doctor` lists what they allow.";
  }
  if (code == result::kHostMemoryAlreadyRegistered) {
    return "A part of these OS pages is page-locked already, here or by other code in the process: give that up first.";
  }
  if (is_about_capture(code)) return "A graph capture is in the way: end it, and make this call outside of captures.";
  if (context_is_lost(code)) {
    return "The device's context is lost for this process with all that uses it: close the session and restart the process.";
  }
  return "Look the code up under CUresult in the driver API's reference.";
}

}  // namespace

void fail(const Driver& driver, const char* operation, const char* entry, Result code, Error::Fields fields,
          const char* consequence) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.cuGetErrorName(code, &name) != result::kSuccess || name == nullptr) name = "unknown to this driver";
  if (driver.cuGetErrorString(code, &text) != result::kSuccess || text == nullptr) text = "no description";
  const ErrorKind kind = code == result::kOutOfMemory ? ErrorKind::out_of_memory
                         : is_about_capture(code) || code == result::kHostMemoryAlreadyRegistered ? ErrorKind::invalid_state
                                                                                                  : ErrorKind::driver;
  fields.emplace_back("operation", std::string(operation));
  fields.emplace_back("call", std::string(entry));
  fields.emplace_back("code", std::int64_t{code});
  fields.emplace_back("name", std::string(name));
  throw Error(kind,
              std::string(operation) + ": " + entry + " failed with " + name + " (" + std::to_string(code) + ": " + text + "). " +
                  consequence + " " + advice(code),
              std::move(fields));
}

}  // namespace remap::cuda
