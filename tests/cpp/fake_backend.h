// A backend without threads or time: streams are queues, and the test decides which of them makes a step. So every
// interleaving of copies and computation can be played, and what a real machine would do once in a million runs is found.
//
// Copies take two steps (first the target is poisoned, then it gets its bytes); computations take two steps, look at their
// bytes at both, and no copy may touch those bytes in between. Events have CUDA's meaning: stream_wait and synchronize
// are about the recording that was the last one when they were called.
#pragma once

#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "remap/backend.h"

namespace remap::testing {

class FakeBackend final : public Backend {
 public:
  explicit FakeBackend(std::uint64_t seed = 0) : random_(seed) {}

  const char* name() const noexcept override { return "fake"; }
  std::size_t granularity() const noexcept override { return 1; }
  Usage usage() const override {
    Usage usage;
    usage.streams = streams_.size();
    usage.events = events_.size();
    return usage;
  }

  StreamHandle create_stream() override {
    fault(Call::create_stream);
    streams_[++handles_];
    return handles_;
  }
  void destroy_stream(StreamHandle stream) override {
    fault(Call::destroy_stream);
    while (!at(stream).work.empty()) {
      if (step_any()) continue;
      violated("deadlock: destroy_stream would wait for ever");
      break;
    }
    streams_.erase(stream);
  }
  void copy(StreamHandle stream, std::byte* to, const std::byte* from, std::size_t bytes) override {
    fault(Call::copy);
    Work work{Kind::copy};
    work.to = to;
    work.from = from;
    work.bytes = bytes;
    work.fails = fail_copies_ > 0 && --fail_copies_ == 0;
    at(stream).work.push_back(work);
    copies.emplace_back(to, from);
  }
  void fill(StreamHandle, std::byte*, std::uint8_t, std::size_t) override { unused(); }

  EventHandle create_event() override {
    fault(Call::create_event);
    events_[++handles_];
    return handles_;
  }
  void destroy_event(EventHandle event) override { events_.erase(find(event)); }
  void record(EventHandle event, StreamHandle stream) override {
    fault(Call::record);
    Work work{Kind::record};
    work.event = event;
    work.recording = ++find(event)->second.recorded;
    at(stream).work.push_back(work);
  }
  void stream_wait(StreamHandle stream, EventHandle event) override {
    fault(Call::stream_wait);
    Work work{Kind::wait};
    work.event = event;
    work.recording = find(event)->second.recorded;
    at(stream).work.push_back(work);
  }
  bool query(EventHandle event) override {
    const Event& e = find(event)->second;
    return complete(e, e.recorded);
  }
  // The caller's waiting is the others' time: at most a random number of steps, as if the timeout then passed.
  bool synchronize(EventHandle event, std::chrono::nanoseconds) override {
    const std::uint64_t recording = find(event)->second.recorded;
    for (std::uint64_t left = random_() % 16 + 1; left > 0; --left) {
      if (complete(find(event)->second, recording)) return true;
      if (!step_any()) violated("deadlock: synchronize would wait for ever");
    }
    return complete(find(event)->second, recording);
  }
  double elapsed(EventHandle from, EventHandle to) override {
    return static_cast<double>(find(to)->second.time) - static_cast<double>(find(from)->second.time);
  }

  // ---- the test's side -------------------------------------------------------------------------------------------
  // Reads `bytes` at `data` in two steps; all must be `tag` at both, and nothing may be written to them in between.
  void compute(StreamHandle stream, const std::byte* data, std::size_t bytes, std::byte tag) {
    Work work{Kind::compute};
    work.from = data;
    work.bytes = bytes;
    work.tag = tag;
    at(stream).work.push_back(work);
  }
  // The same by the test's own thread: between the two, copies may run.
  void compute_now(const std::byte* data, std::size_t bytes, std::byte tag) {
    begin_reading(data, bytes, tag);
    random_steps(8);
    end_reading(data, bytes, tag);
  }
  bool step(StreamHandle stream) {
    Stream& s = at(stream);
    if (s.work.empty()) return false;
    Work& work = s.work.front();
    ++time_;
    switch (work.kind) {
      case Kind::copy:
        if (!s.failed && !work.started) {
          check_unread(work.to, work.bytes);
          std::memset(work.to, 0xDF, work.bytes);
          work.started = true;
          return true;
        }
        if (!s.failed) {
          check_unread(work.to, work.bytes);
          if (work.fails) {
            s.failed = true;
          } else {
            std::memcpy(work.to, work.from, work.bytes);
          }
        }
        break;
      case Kind::compute:
        if (!s.failed && !work.started) {
          begin_reading(work.from, work.bytes, work.tag);
          work.started = true;
          return true;
        }
        if (!s.failed) end_reading(work.from, work.bytes, work.tag);
        break;
      case Kind::record: {
        const auto event = events_.find(work.event);
        if (event != events_.end()) {
          event->second.completed = std::max(event->second.completed, work.recording);
          event->second.failed = s.failed;
          event->second.time = time_;
        }
        break;
      }
      case Kind::wait: {
        const auto event = events_.find(work.event);
        if (event != events_.end() && event->second.completed < work.recording) return false;
        s.failed = s.failed || (event != events_.end() && event->second.failed);
        break;
      }
    }
    s.work.pop_front();
    return true;
  }
  bool step_any() {
    std::vector<StreamHandle> handles;
    for (const auto& [handle, stream] : streams_) handles.push_back(handle);
    std::shuffle(handles.begin(), handles.end(), random_);
    for (const StreamHandle handle : handles) {
      if (step(handle)) return true;
    }
    return false;
  }
  void random_steps(std::uint64_t most) {
    for (std::uint64_t left = random_() % (most + 1); left > 0 && step_any(); --left) {
    }
  }
  // Runs everything; what remains then waits for ever.
  void finish() {
    while (step_any()) {
    }
    for (const auto& [handle, stream] : streams_) {
      if (!stream.work.empty()) violated("deadlock: work remains on a stream");
    }
  }
  // The n-th copy enqueued from now on fails when it runs, and its stream with it.
  void fail_copy(unsigned nth) { fail_copies_ = nth; }
  // The n-th call of this kind from now on throws (all from then on if `always`).
  void fail_call(Call call, unsigned nth, bool always = false) { faults_[call] = {nth, always}; }
  void heal() { faults_.clear(); }

  std::vector<std::pair<const std::byte*, const std::byte*>> copies;  // (to, from) in the order issued

 private:
  enum class Kind { copy, record, wait, compute };
  struct Work {
    explicit Work(Kind k) : kind(k) {}
    Kind kind;
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    std::size_t bytes = 0;
    std::byte tag{};
    EventHandle event = 0;
    std::uint64_t recording = 0;
    bool started = false;
    bool fails = false;
  };
  struct Stream {
    std::deque<Work> work;
    bool failed = false;
  };
  struct Event {
    std::uint64_t recorded = 0;
    std::uint64_t completed = 0;
    std::uint64_t time = 0;
    bool failed = false;
  };
  struct Fault {
    unsigned nth;
    bool always;
  };

  // Said once: what still runs while the test is unwound must not throw again out of a destructor.
  void violated(const char* what) const {
    if (std::exchange(violated_, true)) return;
    throw std::logic_error(what);
  }
  static void unused() { throw std::logic_error("not part of this fake"); }
  Stream& at(StreamHandle stream) {
    const auto found = streams_.find(stream);
    if (found == streams_.end()) throw std::logic_error("no such stream");
    return found->second;
  }
  std::map<EventHandle, Event>::iterator find(EventHandle event) {
    const auto found = events_.find(event);
    if (found == events_.end()) throw std::logic_error("no such event");
    return found;
  }
  static bool complete(const Event& event, std::uint64_t recording) {
    if (event.completed < recording) return false;
    if (event.failed) throw Error(ErrorKind::driver, "a copy of this stream failed");
    return true;
  }
  void fault(Call call) {
    const auto found = faults_.find(call);
    if (found == faults_.end() || found->second.nth == 0) return;
    if (--found->second.nth > 0) return;
    if (found->second.always) found->second.nth = 1;
    throw Error(ErrorKind::driver, "injected fault");
  }
  void check_bytes(const std::byte* data, std::size_t bytes, std::byte tag) const {
    for (std::size_t i = 0; i < bytes; ++i) {
      if (data[i] != tag) violated("stale read: a layer computes with other bytes than its own");
    }
  }
  void begin_reading(const std::byte* data, std::size_t bytes, std::byte tag) {
    check_bytes(data, bytes, tag);
    reading_.insert(data);
  }
  void end_reading(const std::byte* data, std::size_t bytes, std::byte tag) {
    const auto reading = reading_.find(data);
    if (reading != reading_.end()) reading_.erase(reading);
    check_bytes(data, bytes, tag);
  }
  void check_unread(const std::byte* to, std::size_t bytes) const {
    for (const std::byte* data : reading_) {
      if (data >= to && data < to + bytes) violated("a copy writes to a layer that is being computed");
    }
  }

  std::byte* reserve(std::size_t, std::size_t) override { return unused(), nullptr; }
  void release(std::byte*, std::size_t) override { unused(); }
  PageHandle create_page(std::size_t) override { return unused(), 0; }
  void destroy_page(PageHandle) override { unused(); }
  void map(std::byte*, const PageHandle*, std::size_t, std::size_t) override { unused(); }
  void unmap(std::byte*, std::size_t) override { unused(); }
  void set_access(std::byte*, std::size_t, Access) override { unused(); }
  bool can_exchange() const noexcept override { return false; }
  void exchange(std::byte*, std::byte*, std::size_t) override { unused(); }
  void populate(std::byte*, std::size_t) override { unused(); }
  std::byte* allocate_host(std::size_t) override { return unused(), nullptr; }
  void free_host(std::byte*, std::size_t) override { unused(); }
  void register_host(const std::byte*, std::size_t) override { unused(); }
  void unregister_host(const std::byte*, std::size_t) override { unused(); }

  std::mt19937_64 random_;
  std::uint64_t handles_ = 0;
  std::uint64_t time_ = 0;
  unsigned fail_copies_ = 0;
  std::map<Call, Fault> faults_;
  std::map<StreamHandle, Stream> streams_;
  std::map<EventHandle, Event> events_;
  std::multiset<const std::byte*> reading_;
  mutable bool violated_ = false;
};

}  // namespace remap::testing
