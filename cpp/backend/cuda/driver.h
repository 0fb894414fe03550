// SPDX-License-Identifier: Apache-2.0
// The driver library: loaded with dlopen when a backend is opened, its entry points asked for by name and version.
//
// Drivers from CUDA 12.0 on (branch 525) serve: cuGetProcAddress_v2 came with it, which says why it has no answer, and all that
// is asked for is older, but for a few that the backend can do without. An older one is refused with both versions named.
//
// Concurrency: a library is loaded once a process and path and never unloaded: unloading a driver that made contexts is not
// supported by it, and threads may be inside. A Driver is constant once load_driver() has returned it.
#pragma once

#include <string>

#include "backend/cuda/abi.h"
#include "remap/error.h"

namespace remap::cuda {

constexpr int kOldestDriver = 12000;

struct Driver {
  std::string library;    // the path that the loader found
  int version = 0;        // 13000: CUDA 13.0
  bool emulated = false;  // the project's own stand-in, whose memory the processor can touch
#define REMAP_CUDA_DECLARE(name, version, parameters) Result(*name) parameters = nullptr;
  REMAP_CUDA_ENTRY_POINTS(REMAP_CUDA_DECLARE)
  REMAP_CUDA_NEWER_ENTRY_POINTS(REMAP_CUDA_DECLARE)
#undef REMAP_CUDA_DECLARE
};

// `library`: a path or a name for the loader; empty: REMAP_LIBCUDA, else libcuda.so.1. Throws driver with field `library` if
// there is none, if it lacks an entry point (named), or if it is too old (`found`, `needed`). Nothing else is changed.
const Driver& load_driver(const std::string& library);

// cuInit; may be called again. Throws driver with field `code`: 100 where there is no device.
void initialize(const Driver& driver);

// From the moment at which exit handlers run the driver may be gone: it is not called any more.
bool process_is_exiting() noexcept;

// Whether the code says that the context is lost, with everything in it, until the process ends.
bool context_is_lost(Result code) noexcept;

// Throws the error that `code` of `entry` means: out_of_memory, invalid_state (graph capture) or driver, with fields `operation`
// (the contract's call), `call` (the entry point), `code` and `name`. `consequence`: the things left unchanged.
[[noreturn]] void fail(const Driver& driver, const char* operation, const char* entry, Result code,
                       Error::Fields fields = {}, const char* consequence = "Nothing changed.");

inline void check(const Driver& driver, const char* operation, const char* entry, Result code) {
  if (code != result::kSuccess) fail(driver, operation, entry, code);
}

}  // namespace remap::cuda
