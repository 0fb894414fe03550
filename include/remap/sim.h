// SPDX-License-Identifier: Apache-2.0
// The sim backend: the backend contract in virtual time. The session, the executor and the prefetcher run on it unchanged, and
// every time that they learn is computed, not measured: the same calls in the same order give the same bits.
//
// Time. Each stream has an end, the virtual time at which all that is enqueued on it will be done. Enqueuing computes start and
// end of the work at once: it starts when the stream is free, the calling thread has come to the call (its `now`), and what it
// needs (a copy engine) is free. A recorded event is complete at the stream's end, or now if the stream is idle. Nothing is ever
// changed afterwards, so later work never slows work enqueued before.
//
// The link has two copy engines, one a direction. An engine does one copy at a time, in the order in which they were
// enqueued, but a copy takes an earlier gap that is long enough: one that waits for a late event does not keep another tenant's
// back. A copy takes copy_setup_s and then bytes / bandwidth, at `duplex` times the bandwidth while the other engine is
// moving bytes. Copies inside the device read and write its memory, at hbm / 2; fills write, at hbm. Neither uses the link, or
// is seen by kernels.
//
// Kernels (compute) run at 1 - b / hbm of their speed while copies over the link take b bytes/s of the device memory's bandwidth.
// All that can run beside a kernel was enqueued before it in this library: a copy is triggered by an event that was recorded
// in front of the kernel. The exception are copies of other tenants that compute at the same time: of two that overlap, the
// one enqueued later is slowed, and the earlier one is not.
//
// Threads. The host is the thread that made the backend, and every thread that has called advance(), advance_to(), finish() or
// join(); they share one `now`. Every other thread (the executor's re-pointing worker) has a now of its own, never earlier than the
// host's: driver calls and waits of such a thread move only that. The host's query() is true when the event's time has come for the
// host; another thread's is too, so that what only that thread has waited for is not taken for done by all others: it sees
// earlier than the host only the recording that it has waited for last. A copy starts no earlier than the now of the thread that
// enqueues it, and no earlier than the mapping that it goes through was made.
//
// Memory. Unbacked (the default), a region is address space that no code may touch, pages are numbers and copies move no bytes,
// so an arena costs no memory whatever its size. All refusals of the contract hold. Backed, pages are those of the host backend
// and copies move their bytes when they are enqueued, which is a valid order: events are waited for after they were recorded.
#pragma once

#include <cstdint>
#include <string>

#include "remap/backend.h"
#include "remap/backends.h"

namespace remap {

// The bytes that went over the link, or inside the device, since the backend was made.
struct SimTraffic {
  std::uint64_t copies = 0;
  std::uint64_t bytes = 0;
  double busy_s = 0;  // of the copy engine, setup included; of copies inside the device, the sum of their times
};

enum class SimRoute : std::uint8_t { to_device, to_host, inside_device };

class SimBackend : public Backend {
 public:
  virtual const SimOptions& options() const noexcept = 0;

  // Virtual seconds of the host (of the calling thread, if that is another one); 0 at first.
  virtual double now() const = 0;
  // The host's time passes. Throws invalid_argument for a negative or infinite time; advance_to never goes back.
  virtual void advance(double seconds) = 0;
  virtual void advance_to(double time) = 0;
  // Enqueues a kernel that takes `seconds` when no copy runs beside it. Returns when it will be done.
  virtual double compute(StreamHandle stream, double seconds) = 0;
  // When all that is enqueued on the stream now will be done.
  virtual double stream_end(StreamHandle stream) const = 0;
  // Work enqueued on the stream from now on starts no earlier than at `time`.
  virtual void hold(StreamHandle stream, double time) = 0;
  // The host waits for the stream.
  virtual void finish(StreamHandle stream) = 0;
  // The host waits for all that work beside it: its now becomes the latest of all threads'.
  virtual void join() = 0;
  virtual SimTraffic traffic(SimRoute route) const = 0;
};

}  // namespace remap
