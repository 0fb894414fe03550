// SPDX-License-Identifier: Apache-2.0
// The virtual time of the sim backend: whose clock shows what, when streams are free, and what events stand for. The rules are
// in remap/sim.h. One mutex guards all of it; every call is short.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "backend/mapping_table.h"
#include "backend/sim/links.h"
#include "remap/backend.h"
#include "remap/sim.h"

namespace remap::sim {

using mapping::Address;

// A range of addresses that work touches; bytes is 0 for none.
struct Touched {
  Address at = 0;
  std::size_t bytes = 0;
};

class Clock {
 public:
  explicit Clock(const SimOptions& options);  // the calling thread is the host
  void add_usage(Usage& usage) const;

  // ---- threads ----
  double now() const;
  void advance(double seconds);
  void advance_to(double time);
  void join();
  // The calling thread was busy with a driver call.
  void spend(double seconds);
  // The same, and what is mapped in the range now was not before the call's end.
  void spend_mapping(double seconds, Touched range);

  // ---- streams ----
  StreamHandle create_stream();
  void destroy_stream(StreamHandle stream);
  StreamHandle adopt_stream(std::uint64_t native);
  void forget_stream(StreamHandle stream);
  void require_stream(StreamHandle stream, const char* call) const;
  void copy(StreamHandle stream, SimRoute route, std::size_t bytes, Touched to, Touched from);
  void fill(StreamHandle stream, Touched to);
  double compute(StreamHandle stream, double seconds);
  double stream_end(StreamHandle stream) const;
  void hold(StreamHandle stream, double time);
  void finish(StreamHandle stream);
  SimTraffic traffic(SimRoute route) const;

  // ---- events ----
  EventHandle create_event(bool timed);
  void destroy_event(EventHandle event);
  void record(EventHandle event, StreamHandle stream);
  void stream_wait(StreamHandle stream, EventHandle event);
  bool query(EventHandle event) const;
  bool synchronize(EventHandle event, std::chrono::nanoseconds timeout);
  double elapsed(EventHandle from, EventHandle to) const;

 private:
  struct Stream {
    double end = 0;
    std::size_t adopted = 0;  // how many have
  };
  struct Event {
    double time = 0;  // of the last recording
    std::uint64_t recording = 0;  // 0: never recorded
    bool timed = false;
  };
  // A thread that is not the host.
  struct Beside {
    double now = 0;
    std::uint64_t awaited = 0;  // the recording that it has waited for last
  };
  // Mapped by a thread whose clock shows more than the host's.
  struct Fresh {
    Address first = 0;
    Address end = 0;
    double time = 0;
  };

  // All of these: with the lock held.
  bool is_host() const;
  double mine() const;             // the calling thread's now
  void raise_mine(double time, std::uint64_t awaited = 0);
  void become_host();
  void raise_host(double time) noexcept;
  double mapped_by(Touched range) const noexcept;
  Stream& stream(StreamHandle handle, const char* call);
  const Stream& stream(StreamHandle handle, const char* call) const;
  const Event& event(EventHandle handle, const char* call) const;

  const SimOptions& options_;
  mutable std::mutex mutex_;
  double host_now_ = 0;
  std::unordered_set<std::uint64_t> hosts_;
  std::unordered_map<std::uint64_t, Beside> beside_;
  std::vector<Fresh> fresh_;
  Links links_;
  std::unordered_map<StreamHandle, Stream> streams_;
  std::unordered_map<EventHandle, Event> events_;
  StreamHandle last_stream_;
  EventHandle last_event_ = 0;
  std::uint64_t last_recording_ = 0;
};

}  // namespace remap::sim
