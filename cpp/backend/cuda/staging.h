// SPDX-License-Identifier: Apache-2.0
// Copies to the device from host memory that is not page-locked (HostUse::staged), without holding up the thread that enqueues
// them: given such memory itself, the driver copies before it returns, at the speed of whatever stands behind it, a disk perhaps.
//
// A lane belongs to one stream. It has a stream of its own, on which host functions copy the source into page-locked slots, a
// part after another, and each slot's copy to the device is enqueued on the lane's owner behind that:
//
//   lane:   wait emptied[s]   host function: source -> slot s   record filled[s]
//   owner:                                                      wait filled[s]   slot s -> device   record emptied[s]
//
// So all is in the owner's order, events behind the copy cover it, and reading a part goes on while the one before is on its way to
// the device. Everything waits only for work enqueued earlier, hence no circle of waits. Lanes share no slot: a tenant whose ring is
// full keeps only its own lane's. They share the threads that fill slots beside the driver's: one alone does 8 GB/s on an H200's host,
// of the link's 55, and four do 20 (memcpy of 4 MiB at a time). The driver runs host functions of all streams on few threads, so one
// lane's slow disk can delay another lane's parts, by about the time of a part; never copies from page-locked memory.
//
// The slots are beyond the budget of page-locked memory: a copy that is due cannot be refused for 16 MiB.
//
// Concurrency: copies on one stream come one after another (backend.h), and so do a lane's calls. A Job is the driver's thread's from
// `running` to `done`, and may go when it is done. Once a context is lost its streams count as synchronized whatever that thread does.
// So a lane that gives up takes each job that has not begun (one exchange decides who was first) and waits for the one that has, for the
// time of a part: nobody reads the source behind that. A job that was taken is never freed, as the driver may still call it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "backend/copy_bytes.h"
#include "backend/cuda/context.h"
#include "backend/cuda/locked_memory.h"

namespace remap::cuda {

class StagingLane {
 public:
  // filling: outlives it. call: for errors. Throws those of LockedMemory::allocate, and the driver's; nothing is held then.
  StagingLane(const Context& context, LockedMemory& locked, host::CopyPool& filling, const char* call);
  ~StagingLane();
  StagingLane(const StagingLane&) = delete;
  StagingLane& operator=(const StagingLane&) = delete;

  // Enqueues the copy on `owner`. Not success: a part may be under way on `owner`; nothing reads the source any more. entry: the
  // driver's call that failed.
  Result copy(StreamPointer owner, std::byte* to, const std::byte* from, std::size_t bytes, const char** entry);

  // Gives all back. Pre: the owner's work has ended. Throws the driver's error, and can be called again then.
  void close();

 private:
  // Four, so that reading goes on although a copy, a wait and the host function's start lie between; large beside what the six calls
  // of a part take, 0.1 ms on an H200 (bench/gpu/measures/staged_copies.py, 256 MiB, n = 20).
  static constexpr std::size_t kSlots = 4;
  static constexpr std::size_t kSlotBytes = std::size_t{4} << 20;

  struct Slot {
    EventPointer filled = nullptr;
    EventPointer emptied = nullptr;
  };
  struct Job {
    enum class State : std::uint8_t { waiting, running, done, taken };
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
    host::CopyPool* filling;
    std::atomic<State> state{State::waiting};
    static void run(void* job);  // the host function
  };

  // Post: no host function of this lane's reads its source, now or later.
  void settle();

  std::byte* slot() const noexcept { return memory_ + next_ % kSlots * kSlotBytes; }
  Result enqueue(StreamPointer owner, std::byte* to, const std::byte* from, std::size_t bytes, const char** entry);

  const Context& context_;
  const Driver& driver_;
  LockedMemory& locked_;
  host::CopyPool& filling_;
  StreamPointer stream_ = nullptr;
  std::byte* memory_ = nullptr;
  std::array<Slot, kSlots> slots_;
  std::size_t next_ = 0;
  std::deque<std::unique_ptr<Job>> jobs_;  // not all done yet, the oldest first
};

}  // namespace remap::cuda
