// SPDX-License-Identifier: Apache-2.0
// FaultBackend: makes chosen calls fail before they reach the inner backend, and chosen copies while they run.
//
// An asynchronous failure is kept here, not in the inner backend, so that it works over any of them: the stream is marked
// as failed, work enqueued on it from then on does not reach the inner backend (but recordings do, so that waiters wait
// for the work before), and an event recorded on it throws once the inner event is complete.
//
// Concurrency: one mutex guards the counters and marks. It is not held over inner calls. Calls on one stream or event are
// ordered by the caller (contract), so a mark cannot change between looking at it and acting on it.
#include <array>
#include <mutex>
#include <set>
#include <string>

#include "backend/intercept.h"
#include "remap/decorators.h"

namespace remap {
namespace {

struct Trigger {
  std::uint64_t countdown = 0;  // 0: not armed
  bool forever = false;
  ErrorKind kind = ErrorKind::driver;

  bool fires() noexcept {
    if (countdown == 0 || --countdown != 0) return false;
    if (forever) countdown = 1;
    return true;
  }
};

class Fault final : public Intercept<FaultBackend> {
 public:
  using Intercept<FaultBackend>::Intercept;

  void arm(Call call, std::uint64_t nth, bool forever, ErrorKind kind) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    triggers_[known(call)] = checked(nth, forever, kind);
  }
  void arm_any(std::uint64_t nth, bool forever, ErrorKind kind) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    any_ = checked(nth, forever, kind);
  }
  void fail_async_copy(std::uint64_t nth, bool forever) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    copies_ = checked(nth, forever, ErrorKind::driver);
  }
  void disarm() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    triggers_ = {};
    any_ = copies_ = Trigger{};
  }
  std::uint64_t calls(Call call) const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counts_[known(call)];
  }
  std::uint64_t calls() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return total_;
  }

  void copy(StreamHandle stream, std::byte* to, const std::byte* from, std::size_t bytes) override {
    copying(Call::copy, stream, [&](bool fails) { Intercept::copy(stream, to, from, fails ? bytes / 2 : bytes); });
  }
  void copy_batch(StreamHandle stream, const CopyRange* ranges, std::size_t count) override {
    copying(Call::copy_batch, stream, [&](bool fails) {
      std::vector<CopyRange> halves(ranges, ranges + (fails ? count : 0));
      for (CopyRange& each : halves) each.bytes /= 2;
      Intercept::copy_batch(stream, fails ? halves.data() : ranges, count);
    });
  }
  void fill(StreamHandle stream, std::byte* to, std::uint8_t value, std::size_t bytes) override {
    if (failed_stream(stream)) {
      before(Call::fill, {});
      return;
    }
    Intercept::fill(stream, to, value, bytes);
  }
  void record(EventHandle event, StreamHandle stream) override {
    Intercept::record(event, stream);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_streams_.count(stream) != 0) {
      failed_events_.insert(event);
    } else {
      failed_events_.erase(event);
    }
  }
  void stream_wait(StreamHandle stream, EventHandle event) override {
    Intercept::stream_wait(stream, event);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_events_.count(event) != 0) failed_streams_.insert(stream);
  }
  bool query(EventHandle event) override { return passed(Intercept::query(event), event); }
  bool synchronize(EventHandle event, std::chrono::nanoseconds timeout) override {
    return passed(Intercept::synchronize(event, timeout), event);
  }
  double elapsed(EventHandle from, EventHandle to) override {
    const double seconds = Intercept::elapsed(from, to);
    (void)passed(true, from);
    (void)passed(true, to);
    return seconds;
  }
  void destroy_stream(StreamHandle stream) override {
    Intercept::destroy_stream(stream);
    const std::lock_guard<std::mutex> lock(mutex_);
    failed_streams_.erase(stream);
  }
  void forget_stream(StreamHandle stream) override {
    Intercept::forget_stream(stream);
    const std::lock_guard<std::mutex> lock(mutex_);
    failed_streams_.erase(stream);
  }
  void destroy_event(EventHandle event) override {
    Intercept::destroy_event(event);
    const std::lock_guard<std::mutex> lock(mutex_);
    failed_events_.erase(event);
  }

 protected:
  std::uint64_t before(Call call, const CallArguments&) override {
    Trigger fired;
    std::uint64_t nth = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++counts_[index(call)];
      ++total_;
      // Both count this call, whichever fires.
      Trigger& one = triggers_[index(call)];
      const bool one_fires = one.fires();
      const bool any_fires = any_.fires();
      if (!one_fires && !any_fires) return 0;
      fired = one_fires ? one : any_;
      nth = one_fires ? counts_[index(call)] : total_;
    }
    throw Error(fired.kind,
                std::string("injected fault: ") + call_name(call) + ", call " + std::to_string(nth) + ". Nothing changed.",
                {{"call", std::string(call_name(call))}, {"nth", static_cast<std::int64_t>(nth)}});
  }

 private:
  static std::size_t index(Call call) noexcept { return static_cast<std::size_t>(call); }
  // make(fails) is the call; fails: half of the bytes arrive.
  template <typename Make>
  void copying(Call call, StreamHandle stream, Make&& make) {
    bool fails = false;
    bool skipped = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      skipped = failed_streams_.count(stream) != 0;
      fails = !skipped && copies_.fires();
      if (fails) failed_streams_.insert(stream);
    }
    if (skipped) {
      before(call, {});
      return;
    }
    try {
      make(fails);
    } catch (...) {
      // The call itself failed and had no effect, so nothing failed while running.
      if (fails) {
        const std::lock_guard<std::mutex> lock(mutex_);
        failed_streams_.erase(stream);
      }
      throw;
    }
  }
  static std::size_t known(Call call) {
    if (index(call) < kCallKinds) return index(call);
    throw Error(ErrorKind::invalid_argument, "Unknown kind of call " + std::to_string(index(call)) + ". Nothing changed.",
                {{"call", static_cast<std::int64_t>(index(call))}});
  }
  static Trigger checked(std::uint64_t nth, bool forever, ErrorKind kind) {
    if (nth == 0) {
      throw Error(ErrorKind::invalid_argument, "arm: expected nth from 1 (the next call), got 0", {{"nth", std::int64_t{0}}});
    }
    return {nth, forever, kind};
  }
  bool failed_stream(StreamHandle stream) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return failed_streams_.count(stream) != 0;
  }
  bool passed(bool complete, EventHandle event) const {
    if (!complete) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_events_.count(event) == 0) return true;
    throw Error(ErrorKind::driver,
                "injected fault: a copy that event " + std::to_string(event) + " stands behind failed while it ran; its bytes "
                "are undefined. Destroy the stream and copy again on a new one.",
                {{"call", std::string(call_name(Call::copy))}, {"event", static_cast<std::int64_t>(event)}});
  }

  mutable std::mutex mutex_;  // guards all below
  std::array<std::uint64_t, kCallKinds> counts_{};
  std::uint64_t total_ = 0;
  std::array<Trigger, kCallKinds> triggers_{};
  Trigger any_;
  Trigger copies_;
  std::set<StreamHandle> failed_streams_;
  std::set<EventHandle> failed_events_;  // whose last recording is behind a failed copy
};

}  // namespace

std::shared_ptr<FaultBackend> make_fault_backend(std::shared_ptr<Backend> inner) {
  return std::make_shared<Fault>(std::move(inner));
}

}  // namespace remap
