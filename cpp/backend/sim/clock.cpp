// SPDX-License-Identifier: Apache-2.0
#include "backend/sim/clock.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <string>

namespace remap::sim {
namespace {

// Handles begin above the numbers that stand for a driver's default streams, which do not exist here.
constexpr StreamHandle kFirstStream = 0x100;

// Not std::thread::id, which the next thread may get when this one has ended.
std::uint64_t this_thread() noexcept {
  static std::atomic<std::uint64_t> count{0};
  thread_local const std::uint64_t number = count.fetch_add(1, std::memory_order_relaxed);
  return number;
}

[[noreturn]] void unknown(const char* call, const char* what, std::uint64_t handle) {
  throw Error(ErrorKind::invalid_argument,
              std::string(call) + ": " + what + " " + std::to_string(handle) +
                  " is not one of this backend (or is destroyed). Nothing changed.",
              {{"operation", std::string(call)}, {"handle", static_cast<std::int64_t>(handle)}});
}

void require_time(double seconds, const char* call) {
  if (std::isfinite(seconds) && seconds >= 0) return;
  throw Error(ErrorKind::invalid_argument,
              std::string(call) + ": expected a finite time of at least 0 s, got " + std::to_string(seconds) +
                  ". Nothing changed.",
              {{"operation", std::string(call)}, {"seconds", std::to_string(seconds)}});
}

}  // namespace

using Lock = std::lock_guard<std::mutex>;

Clock::Clock(const SimOptions& options)
    : options_(options), hosts_{this_thread()}, links_(options), last_stream_(kFirstStream - 1) {}

void Clock::add_usage(Usage& usage) const {
  const Lock lock(mutex_);
  usage.streams = streams_.size();
  usage.events = events_.size();
}

// ---- threads -----------------------------------------------------------------------------------------------------------
bool Clock::is_host() const { return hosts_.count(this_thread()) != 0; }

// A thread makes each call while the host's clock shows host_now_: no thread is in the host's past.
double Clock::mine() const {
  if (is_host()) return host_now_;
  const auto found = beside_.find(this_thread());
  return found == beside_.end() ? host_now_ : std::max(host_now_, found->second.now);
}

void Clock::raise_host(double time) noexcept {
  if (time <= host_now_) return;
  host_now_ = time;
  links_.forget_before(time);
}

void Clock::raise_mine(double time, std::uint64_t awaited) {
  if (is_host()) return raise_host(time);
  Beside& thread = beside_[this_thread()];
  thread.now = std::max({thread.now, host_now_, time});
  if (awaited != 0) thread.awaited = awaited;
}

void Clock::become_host() {
  if (!hosts_.insert(this_thread()).second) return;
  const auto found = beside_.find(this_thread());
  if (found == beside_.end()) return;
  raise_host(found->second.now);
  beside_.erase(found);
}

double Clock::now() const {
  const Lock lock(mutex_);
  return mine();
}

void Clock::advance(double seconds) {
  require_time(seconds, "advance");
  const Lock lock(mutex_);
  become_host();
  raise_host(host_now_ + seconds);
}

void Clock::advance_to(double time) {
  require_time(time, "advance_to");
  const Lock lock(mutex_);
  become_host();
  raise_host(time);
}

void Clock::join() {
  const Lock lock(mutex_);
  become_host();
  double latest = host_now_;
  for (const auto& thread : beside_) latest = std::max(latest, thread.second.now);
  raise_host(latest);
}

void Clock::spend(double seconds) {
  if (seconds == 0) return;
  const Lock lock(mutex_);
  raise_mine(mine() + seconds);
}

void Clock::spend_mapping(double seconds, Touched range) {
  const Lock lock(mutex_);
  raise_mine(mine() + seconds);
  const double time = mine();
  if (time <= host_now_) return;
  fresh_.erase(std::remove_if(fresh_.begin(), fresh_.end(), [&](const Fresh& each) { return each.time <= host_now_; }),
               fresh_.end());
  fresh_.push_back({range.at, range.at + range.bytes, time});
}

double Clock::mapped_by(Touched range) const noexcept {
  double time = 0;
  for (const Fresh& each : fresh_) {
    if (range.at < each.end && each.first < range.at + range.bytes) time = std::max(time, each.time);
  }
  return time;
}

// ---- streams -----------------------------------------------------------------------------------------------------------
Clock::Stream& Clock::stream(StreamHandle handle, const char* call) {
  const auto found = streams_.find(handle);
  if (found == streams_.end()) unknown(call, "stream", handle);
  return found->second;
}

const Clock::Stream& Clock::stream(StreamHandle handle, const char* call) const {
  const auto found = streams_.find(handle);
  if (found == streams_.end()) unknown(call, "stream", handle);
  return found->second;
}

void Clock::require_stream(StreamHandle handle, const char* call) const {
  const Lock lock(mutex_);
  (void)stream(handle, call);
}

StreamHandle Clock::create_stream() {
  const Lock lock(mutex_);
  streams_.try_emplace(last_stream_ + 1);
  return ++last_stream_;
}

void Clock::destroy_stream(StreamHandle handle) {
  const Lock lock(mutex_);
  const Stream& found = stream(handle, "destroy_stream");
  if (found.adopted != 0) {
    throw Error(ErrorKind::invalid_state,
                "destroy_stream: stream " + std::to_string(handle) +
                    " was adopted and may still be used. Nothing changed. Forget it first: detach the tenant, or close the "
                    "session.",
                {{"operation", std::string("destroy_stream")}, {"handle", static_cast<std::int64_t>(handle)}});
  }
  raise_mine(found.end);
  streams_.erase(handle);
}

StreamHandle Clock::adopt_stream(std::uint64_t native) {
  const Lock lock(mutex_);
  ++stream(native, "adopt_stream").adopted;
  return native;
}

void Clock::forget_stream(StreamHandle handle) {
  const Lock lock(mutex_);
  Stream& found = stream(handle, "forget_stream");
  if (found.adopted == 0) unknown("forget_stream", "adopted stream", handle);
  --found.adopted;
}

void Clock::copy(StreamHandle handle, SimRoute route, std::size_t bytes, Touched to, Touched from) {
  const Lock lock(mutex_);
  Stream& on = stream(handle, "copy");
  if (bytes == 0) return;
  double earliest = std::max(on.end, mine());
  if (!fresh_.empty()) earliest = std::max({earliest, mapped_by(to), mapped_by(from)});
  on.end = links_.copy(route, earliest, bytes);
}

void Clock::fill(StreamHandle handle, Touched to) {
  const Lock lock(mutex_);
  Stream& on = stream(handle, "fill");
  if (to.bytes == 0) return;
  const double earliest = std::max({on.end, mine(), mapped_by(to)});
  on.end = earliest + static_cast<double>(to.bytes) / options_.hbm_bytes_per_s;
}

double Clock::compute(StreamHandle handle, double seconds) {
  require_time(seconds, "compute");
  const Lock lock(mutex_);
  Stream& on = stream(handle, "compute");
  on.end = links_.compute(std::max(on.end, mine()), seconds);
  return on.end;
}

double Clock::stream_end(StreamHandle handle) const {
  const Lock lock(mutex_);
  return stream(handle, "stream_end").end;
}

void Clock::hold(StreamHandle handle, double time) {
  require_time(time, "hold");
  const Lock lock(mutex_);
  Stream& held = stream(handle, "hold");
  held.end = std::max(held.end, time);
}

void Clock::finish(StreamHandle handle) {
  const Lock lock(mutex_);
  const double end = stream(handle, "finish").end;
  become_host();
  raise_host(end);
}

SimTraffic Clock::traffic(SimRoute route) const {
  const Lock lock(mutex_);
  return links_.traffic(route);
}

// ---- events ------------------------------------------------------------------------------------------------------------
const Clock::Event& Clock::event(EventHandle handle, const char* call) const {
  const auto found = events_.find(handle);
  if (found == events_.end()) unknown(call, "event", handle);
  return found->second;
}

EventHandle Clock::create_event(bool timed) {
  const Lock lock(mutex_);
  events_.try_emplace(last_event_ + 1, Event{0, 0, timed});
  return ++last_event_;
}

void Clock::destroy_event(EventHandle handle) {
  const Lock lock(mutex_);
  if (events_.erase(handle) == 0) unknown("destroy_event", "event", handle);
}

void Clock::record(EventHandle handle, StreamHandle on) {
  const Lock lock(mutex_);
  const auto found = events_.find(handle);
  if (found == events_.end()) unknown("record", "event", handle);
  const double time = std::max(stream(on, "record").end, mine());
  found->second.time = time;
  found->second.recording = ++last_recording_;
}

void Clock::stream_wait(StreamHandle on, EventHandle handle) {
  const Lock lock(mutex_);
  Stream& waiting = stream(on, "stream_wait");
  waiting.end = std::max(waiting.end, event(handle, "stream_wait").time);  // 0 if it was never recorded
}

bool Clock::query(EventHandle handle) const {
  const Lock lock(mutex_);
  const Event& asked = event(handle, "query");
  if (asked.time <= host_now_) return true;
  const auto found = beside_.find(this_thread());
  return found != beside_.end() && found->second.awaited == asked.recording;
}

bool Clock::synchronize(EventHandle handle, std::chrono::nanoseconds timeout) {
  const Lock lock(mutex_);
  const Event& asked = event(handle, "synchronize");
  // In floating point the longest timeout is 292 years, and the sum cannot overflow.
  const double deadline = mine() + std::max(0.0, std::chrono::duration<double>(timeout).count());
  const bool complete = asked.time <= deadline;
  raise_mine(complete ? asked.time : deadline, complete ? asked.recording : 0);
  return complete;
}

double Clock::elapsed(EventHandle from, EventHandle to) const {
  const Lock lock(mutex_);
  const Event& first = event(from, "elapsed");
  const Event& second = event(to, "elapsed");
  const double seen = mine();
  for (const auto& [asked, handle] : {std::pair(&first, from), std::pair(&second, to)}) {
    if (!asked->timed) {
      throw Error(ErrorKind::invalid_state, "elapsed: the event only orders. Nothing changed; create it with timed = true.",
                  {{"event", static_cast<std::int64_t>(handle)}});
    }
    if (asked->recording != 0 && asked->time <= seen) continue;
    throw Error(ErrorKind::invalid_state, "elapsed: expected two recorded and completed events. Synchronize first.",
                {{"event", static_cast<std::int64_t>(handle)}});
  }
  return second.time - first.time;
}

}  // namespace remap::sim
