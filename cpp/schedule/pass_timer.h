// SPDX-License-Identifier: Apache-2.0
// PassTimer: how long each pass took and how long it waited for layers. Private to cpp/schedule; used under the
// Prefetcher's mutex.
//
// A pass of the calling thread is timed by the host's clock and known at once. A pass on a stream is timed by events on
// it: one at its beginning, one at its end, and a pair around each wait that the stream may really have to wait at. Between
// the two of a pair lies only the wait, so the time between them is how long the stream stood still, also when the
// host was several passes ahead; and if the host itself had to wait before it could enqueue the wait (a held layer), how
// long the stream had nothing to do meanwhile. No thread waits for these events: collect() asks for the last one of a pass.
//
// Cost of a pass on a stream: two event records, and two more for each wait whose copy was not complete when it was
// enqueued; asking for them and taking the differences afterwards. With nothing streamed: the two. (On an H200 a pass of 40
// layers takes 0.3 % longer with all of this than without: bench/gpu/measures/overhead.py.)
//
// It is a measurement and nothing depends on it. So no failure here fails a pass: the pass just stays untimed. A stream
// that has failed tells its error to wait(), done() and its owner anyway. The one exception is a stream that the backend
// does not know: begin_pass() would accept a handle that every wait() would refuse, maybe hours later when something is
// streamed for the first time; that is refused at once.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "remap/prefetcher.h"

namespace remap {

class PassTimer {
 public:
  // Passes whose events are not seen complete, at most; beyond, the oldest of them stays untimed. As many known ones are
  // kept for take().
  static constexpr std::size_t kPasses = 64;
  // Events made, at most; a pass that would need more stays untimed.
  static constexpr std::size_t kEvents = 16384;

  PassTimer(Backend& backend, PrefetchStats& stats) : backend_(backend), stats_(stats) {}
  ~PassTimer();
  PassTimer(const PassTimer&) = delete;
  PassTimer& operator=(const PassTimer&) = delete;

  // The first event of a pass, recorded; 0 if the pass will stay untimed. Give it to begin() or give_back(). Throws
  // invalid_argument if the backend does not know the stream.
  EventHandle start(StreamHandle stream);
  void give_back(EventHandle event) noexcept;
  // The pass begins; one that did not end is forgotten.
  void begin(StreamHandle stream, EventHandle start) noexcept;
  // The calling thread was blocked for so long.
  void blocked(double seconds) noexcept;
  // Whether waits on this stream are measured by reached() and resumed().
  bool measures(StreamHandle stream) const noexcept { return open_.begin != 0 && stream == open_.stream; }
  // The pass's stream may have to wait here / may go on here. 0: not measured, and resumed(0) does nothing.
  EventHandle reached() noexcept;
  void resumed(EventHandle reached) noexcept;
  // The pass ends as number `pass`.
  void end(std::uint64_t pass) noexcept;
  // Takes in what is known by now, without blocking.
  void collect() noexcept;
  std::vector<PassTiming> take();

 private:
  struct Stall {
    EventHandle reached;
    EventHandle resumed;
  };
  struct Pass {
    std::uint64_t number = 0;
    StreamHandle stream = 0;
    EventHandle begin = 0;  // 0: untimed
    EventHandle end = 0;
    std::vector<Stall> stalls;
  };

  EventHandle acquire();
  EventHandle record(StreamHandle stream);
  void forget(Pass& pass) noexcept;  // its events are free again; no thread waits for them
  void known(const PassTiming& timing);

  Backend& backend_;
  PrefetchStats& stats_;
  Pass open_;                   // the present pass, if it is one on a stream
  std::deque<Pass> pending_;    // ended, oldest first
  std::deque<PassTiming> known_;  // by number
  std::uint64_t newest_ = 0;    // the newest pass whose times are in stats_.last_pass_*
  std::chrono::steady_clock::time_point begun_{};
  double blocked_s_ = 0;        // since begin()
  std::vector<EventHandle> free_;
  std::size_t made_ = 0;
};

// Around one wait of the pass's stream: from mark() on it counts as stalled, until over() or the end of this object.
class StallMark {
 public:
  explicit StallMark(PassTimer& timer) noexcept : timer_(timer) {}
  ~StallMark() { over(); }
  StallMark(const StallMark&) = delete;
  StallMark& operator=(const StallMark&) = delete;
  void mark() noexcept {
    if (reached_ == 0) reached_ = timer_.reached();
  }
  void over() noexcept { timer_.resumed(std::exchange(reached_, 0)); }
  bool marked() const noexcept { return reached_ != 0; }

 private:
  PassTimer& timer_;
  EventHandle reached_ = 0;
};

}  // namespace remap
