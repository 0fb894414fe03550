// SPDX-License-Identifier: Apache-2.0
#include "schedule/pass_timer.h"

#include <algorithm>
#include <new>
#include <utility>

namespace remap {
namespace {

// Whether it went well. Why the caller is not told of failures: see the comment on top of pass_timer.h.
template <typename Body>
bool attempted(Body&& body) noexcept {
  try {
    body();
    return true;
  } catch (const Error&) {
    return false;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

}  // namespace

PassTimer::~PassTimer() {
  forget(open_);
  for (Pass& pass : pending_) forget(pass);
  for (const EventHandle event : free_) {
    const auto give_back = [&] { backend_.destroy_event(event); };
    (void)(attempted(give_back) || attempted(give_back));  // as the prefetcher's own
  }
}

EventHandle PassTimer::acquire() {
  if (free_.empty()) {
    if (made_ == kEvents) return 0;
    if (free_.capacity() <= made_) free_.reserve(2 * made_ + 16);  // give_back() never allocates
    const EventHandle event = backend_.create_event(true);
    ++made_;
    return event;
  }
  const EventHandle event = free_.back();
  free_.pop_back();
  return event;
}

void PassTimer::give_back(EventHandle event) noexcept {
  if (event != 0) free_.push_back(event);  // reserved in acquire()
}

EventHandle PassTimer::record(StreamHandle stream) {
  const EventHandle event = acquire();
  if (event == 0) return 0;
  try {
    backend_.record(event, stream);
  } catch (...) {
    give_back(event);
    throw;
  }
  return event;
}

EventHandle PassTimer::start(StreamHandle stream) {
  if (stream == 0) return 0;
  collect();
  try {
    return record(stream);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::invalid_argument) throw;
    return 0;
  }
}

void PassTimer::forget(Pass& pass) noexcept {
  give_back(std::exchange(pass.begin, 0));
  give_back(std::exchange(pass.end, 0));
  for (const Stall& stall : pass.stalls) {
    give_back(stall.reached);
    give_back(stall.resumed);
  }
  pass.stalls.clear();
}

void PassTimer::begin(StreamHandle stream, EventHandle start) noexcept {
  forget(open_);
  open_.stream = stream;
  open_.begin = start;
  begun_ = std::chrono::steady_clock::now();
  blocked_s_ = 0;
}

void PassTimer::blocked(double seconds) noexcept {
  blocked_s_ += seconds;
  stats_.stall_s += seconds;
}

EventHandle PassTimer::reached() noexcept {
  if (open_.begin == 0) return 0;
  EventHandle event = 0;
  attempted([&] { event = record(open_.stream); });
  if (event == 0) forget(open_);  // a stall that is not seen would make the sum wrong
  return event;
}

void PassTimer::resumed(EventHandle reached) noexcept {
  if (reached == 0) return;
  EventHandle event = 0;
  const bool kept = attempted([&] {
    if (open_.begin != 0) event = record(open_.stream);
    if (event != 0) open_.stalls.push_back({reached, event});
  });
  if (kept && event != 0) return;
  give_back(reached);
  give_back(event);
  forget(open_);
}

void PassTimer::end(std::uint64_t pass) noexcept {
  if (open_.stream == 0) {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun_;
    attempted([&] { known({pass, seconds.count(), blocked_s_}); });
    return;
  }
  collect();
  if (open_.begin == 0) return;
  attempted([&] {
    open_.end = record(open_.stream);
    if (open_.end == 0) return;
    open_.number = pass;
    pending_.push_back(std::move(open_));
    open_ = Pass{};
  });
  forget(open_);
  if (pending_.size() > kPasses) {
    forget(pending_.front());
    pending_.pop_front();
  }
}

void PassTimer::collect() noexcept {
  while (!pending_.empty()) {
    Pass& pass = pending_.front();
    bool complete = true;
    attempted([&] {
      complete = backend_.query(pass.end);
      if (!complete) return;
      // Everything else was recorded on the same stream before it.
      PassTiming timing{pass.number, backend_.elapsed(pass.begin, pass.end), 0};
      for (const Stall& stall : pass.stalls) timing.stall_s += backend_.elapsed(stall.reached, stall.resumed);
      known(timing);
      stats_.stall_s += timing.stall_s;
    });
    if (!complete) return;
    forget(pass);
    pending_.pop_front();
  }
}

void PassTimer::known(const PassTiming& timing) {
  // Passes of the calling thread are known at once, those of a stream later: so not always in order.
  const auto at = std::upper_bound(known_.begin(), known_.end(), timing,
                                   [](const PassTiming& a, const PassTiming& b) { return a.pass < b.pass; });
  known_.insert(at, timing);
  if (known_.size() > kPasses) known_.pop_front();
  if (timing.pass < newest_) return;
  newest_ = timing.pass;
  stats_.last_pass_s = timing.seconds;
  stats_.last_pass_stall_s = timing.stall_s;
}

std::vector<PassTiming> PassTimer::take() {
  collect();
  std::vector<PassTiming> taken(known_.begin(), known_.end());
  known_.clear();
  return taken;
}

}  // namespace remap
