// SPDX-License-Identifier: Apache-2.0
// The device's primary context: the one that torch and the CUDA runtime use, retained once a backend.
//
// Calls come from any thread, with any context current or none. Each call into the driver stands inside a Use: it makes this
// context current and leaves the thread as it was. Where the context is current already, which is the rule beside torch,
// that is one look.
//
// A Use also puts the thread into relaxed capture mode. A graph capture begun in global mode (torch's default) forbids "unsafe"
// calls, cuEventQuery and cuMemCreate among them, to every thread of the process, and such a call from a worker of ours would
// invalidate the capture of a stream that we have nothing to do with. None of our calls is part of a capture:
// captured streams are refused (stream.cpp).
#pragma once

#include "backend/cuda/driver.h"

namespace remap::cuda {

class Context {
 public:
  Context(const Driver& driver, Device device);
  ~Context();  // gives the context back; must not run in a forked child
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const Driver& driver() const noexcept { return driver_; }
  Device device() const noexcept { return device_; }
  ContextPointer get() const noexcept { return context_; }

  class Use {
   public:
    // Throws driver and leaves the thread as it was; also when the process is ending, where the driver may be gone.
    Use(const Context& context, const char* operation);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    void leave() noexcept;

    const Driver& driver_;
    ContextPointer before_ = nullptr;
    int mode_ = kCaptureModeRelaxed;
    bool pushed_ = false;
  };

 private:
  const Driver& driver_;
  const Device device_;
  ContextPointer context_ = nullptr;
};

}  // namespace remap::cuda
