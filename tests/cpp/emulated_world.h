// A device of the emulated driver with a stream, an event and memory on both sides; gates that hold a stream back.
#pragma once

#include <sys/mman.h>

#include <condition_variable>
#include <mutex>

#include "emulated_driver.h"

namespace remap::testing {

inline std::uintptr_t address(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }
inline CUstream default_stream(std::uintptr_t which) { return reinterpret_cast<CUstream>(which); }

// Work behind it on a stream waits until it is opened.
class Gate {
 public:
  void close_on(CUstream stream) {
    FINE(CU(cuLaunchHostFunc)(stream, &Gate::pass, this));
  }
  // Until the stream stands before it.
  void await() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }
  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  static void pass(void* self) {
    auto* gate = static_cast<Gate*>(self);
    std::unique_lock<std::mutex> lock(gate->mutex_);
    gate->reached_ = true;
    gate->changed_.notify_all();
    gate->changed_.wait(lock, [gate] { return gate->open_; });
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  bool open_ = false;
};

// Page-locked memory.
struct Locked {
  Locked() {
    void* mapped = mmap(nullptr, 4 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mapped != MAP_FAILED);
    at = static_cast<unsigned char*>(mapped);
    FINE(CU(cuMemHostRegister)(at, 4 * kPage, kHostPortable));
  }
  void close() {
    FINE(CU(cuMemHostUnregister)(at));
    munmap(at, 4 * kPage);
  }
  unsigned char* at = nullptr;
};

// A device with a stream, an event, two mapped pages and locked memory.
struct World {
  World() {
    FINE(CU(cuStreamCreateWithPriority)(&stream, kStreamNonBlocking, 0));
    FINE(CU(cuEventCreate)(&event, 0));
  }
  void close() {
    FINE(CU(cuStreamDestroy)(stream));
    FINE(CU(cuEventDestroy)(event));
    locked.close();
    region.close();
    device.close();
  }
  Device device;
  Region region{4, 2};
  Locked locked;
  CUstream stream = nullptr;
  CUevent event = nullptr;
};

}  // namespace remap::testing
