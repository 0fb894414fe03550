// A backend without threads or time: streams are queues, and the test decides which of them makes a step. So every
// interleaving of copies and computation can be played, and what a real machine would do once in a million runs is found.
//
// Copies take two steps (first the target is poisoned, then it gets its bytes); computations take two steps, look at their
// bytes at both, and no copy may touch those bytes in between. Events have CUDA's meaning: stream_wait and synchronize
// are about the recording that was the last one when they were called.
//
// A violation is thrown where it is seen, and again by finish(): the library may have been in the way.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "remap/backend.h"

namespace remap::testing {

class FakeBackend : public Backend {
 public:
  explicit FakeBackend(std::uint64_t seed = 0) : random_(seed) {}

  const char* name() const noexcept override { return "fake"; }
  std::size_t granularity() const noexcept override { return 1; }
  Usage usage() const override {
    const Lock lock(mutex_);
    Usage usage;
    usage.streams = streams_.size();
    usage.events = events_.size();
    return usage;
  }

  StreamHandle create_stream() override {
    const Lock lock(mutex_);
    fault(Call::create_stream);
    streams_[++handles_];
    return handles_;
  }
  void destroy_stream(StreamHandle stream) override {
    const Lock lock(mutex_);
    fault(Call::destroy_stream);
    while (!at(stream).work.empty()) {
      ++waited;
      if (step_any()) continue;
      violated("deadlock: destroy_stream would wait for ever");
      break;
    }
    streams_.erase(stream);
  }
  void copy(StreamHandle stream, std::byte* to, const std::byte* from, std::size_t bytes) override {
    const Lock lock(mutex_);
    fault(Call::copy);
    push_copy(stream, to, from, bytes);
  }
  void copy_batch(StreamHandle stream, const CopyRange* ranges, std::size_t count) override {
    const Lock lock(mutex_);
    fault(Call::copy_batch);
    ++batches;
    for (const CopyRange* each = ranges; each != ranges + count; ++each) push_copy(stream, each->to, each->from, each->bytes);
  }
  void fill(StreamHandle stream, std::byte* to, std::uint8_t value, std::size_t bytes) override {
    const Lock lock(mutex_);
    fault(Call::fill);
    ++fills;
    compute_write(stream, to, bytes, static_cast<std::byte>(value));
  }

  EventHandle create_event(bool) override {
    const Lock lock(mutex_);
    fault(Call::create_event);
    events_[++handles_];
    return handles_;
  }
  void destroy_event(EventHandle event) override {
    const Lock lock(mutex_);
    fault(Call::destroy_event);
    events_.erase(find(event));
  }
  void record(EventHandle event, StreamHandle stream) override {
    const Lock lock(mutex_);
    fault(Call::record);
    refuse_captured(stream);
    Work work{Kind::record};
    work.event = event;
    work.recording = ++find(event)->second.recorded;
    at(stream).work.push_back(work);
  }
  void stream_wait(StreamHandle stream, EventHandle event) override {
    const Lock lock(mutex_);
    fault(Call::stream_wait);
    refuse_captured(stream);
    Work work{Kind::wait};
    work.event = event;
    work.recording = find(event)->second.recorded;
    at(stream).work.push_back(work);
  }
  bool query(EventHandle event) override {
    const Lock lock(mutex_);
    fault(Call::query);
    const Event& e = find(event)->second;
    return complete(e, e.recorded);
  }
  // The caller's waiting is the others' time: at most a random number of steps, as if the timeout then passed. With no
  // timeout, as many as it takes.
  bool synchronize(EventHandle event, std::chrono::nanoseconds timeout) override {
    const Lock lock(mutex_);
    fault(Call::synchronize);
    ++waited;
    const std::uint64_t recording = find(event)->second.recorded;
    const bool for_ever = timeout == std::chrono::nanoseconds::max();
    for (std::uint64_t left = random_() % 16 + 1; for_ever || left > 0; --left) {
      if (complete(find(event)->second, recording)) return true;
      if (!step_any()) violated("deadlock: synchronize would wait for ever");
    }
    return complete(find(event)->second, recording);
  }
  double elapsed(EventHandle from, EventHandle to) override {
    const Lock lock(mutex_);
    fault(Call::elapsed);
    for (const EventHandle event : {from, to}) {
      const Event& e = find(event)->second;
      if (e.recorded == 0 || !complete(e, e.recorded)) throw Error(ErrorKind::invalid_state, "elapsed of an event not complete");
    }
    const auto time = [&](EventHandle event) { return find(event)->second.ends.rbegin()->second.time; };
    return static_cast<double>(time(to)) - static_cast<double>(time(from));
  }

  // ---- the test's side -------------------------------------------------------------------------------------------
  // Reads `bytes` at `data` in two steps; all must be `tag` at both, and nothing may be written to them in between.
  void compute(StreamHandle stream, const std::byte* data, std::size_t bytes, std::byte tag) {
    const Lock lock(mutex_);
    Work work{Kind::compute};
    work.from = data;
    work.bytes = bytes;
    work.tag = tag;
    at(stream).work.push_back(work);
  }
  // Writes `tag` to `bytes` at `data`, in one step; nobody may be reading them.
  void compute_write(StreamHandle stream, std::byte* data, std::size_t bytes, std::byte tag) {
    const Lock lock(mutex_);
    Work work{Kind::write};
    work.to = data;
    work.bytes = bytes;
    work.tag = tag;
    at(stream).work.push_back(work);
  }
  // Reads by the test's own thread: between the two steps, copies may run.
  void compute_now(const std::byte* data, std::size_t bytes, std::byte tag) {
    const Lock lock(mutex_);
    begin_reading(data, bytes, tag);
    random_steps(8);
    end_reading(data, bytes, tag);
  }
  bool step(StreamHandle stream) {
    const Lock lock(mutex_);
    Stream& s = at(stream);
    if (s.work.empty()) return false;
    Work& work = s.work.front();
    ++time_;
    switch (work.kind) {
      case Kind::copy:
        if (!s.failed && !work.started) {
          check_unread(work.to, work.bytes);
          for (std::size_t i = 0; i < work.bytes; ++i) *physical(work.to + i) = std::byte{0xDF};
          begin_running(work.to, work.bytes);
          work.started = true;
          return true;
        }
        if (work.started) end_running(work.to);
        if (!s.failed) {
          check_unread(work.to, work.bytes);
          if (work.fails) {
            s.failed = true;
          } else {
            for (std::size_t i = 0; i < work.bytes; ++i) *physical(work.to + i) = work.from[i];
          }
        }
        break;
      case Kind::write:
        if (s.failed) break;
        check_unread(work.to, work.bytes);
        for (std::size_t i = 0; i < work.bytes; ++i) *physical(work.to + i) = work.tag;
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
        if (event != events_.end()) event->second.ends[work.recording] = {time_, s.failed};
        break;
      }
      case Kind::wait: {
        const auto event = events_.find(work.event);
        if (event == events_.end() || work.recording == 0) break;
        const auto end = event->second.ends.find(work.recording);
        if (end == event->second.ends.end()) return false;
        s.failed = s.failed || end->second.failed;
        break;
      }
    }
    s.work.pop_front();
    return true;
  }
  bool step_any() {
    const Lock lock(mutex_);
    std::vector<StreamHandle> handles;
    for (const auto& [handle, stream] : streams_) handles.push_back(handle);
    std::shuffle(handles.begin(), handles.end(), random_);
    for (const StreamHandle handle : handles) {
      if (step(handle)) return true;
    }
    return false;
  }
  void random_steps(std::uint64_t most) {
    const Lock lock(mutex_);
    for (std::uint64_t left = random_() % (most + 1); left > 0 && step_any(); --left) {
    }
  }
  // Runs everything; what remains then waits for ever.
  void finish() {
    const Lock lock(mutex_);
    while (step_any()) {
    }
    for (const auto& [handle, stream] : streams_) {
      if (!stream.work.empty()) violated("deadlock: work remains on a stream");
    }
    if (!violation_.empty()) throw std::logic_error(violation_);
  }
  // The caller captures a graph on this stream: recording and waiting there are refused.
  void capture(StreamHandle stream, bool captured) {
    const Lock lock(mutex_);
    at(stream).captured = captured;
  }
  std::size_t queued(StreamHandle stream) {
    const Lock lock(mutex_);
    return at(stream).work.size();
  }
  // The n-th copy enqueued from now on fails when it runs, and its stream with it.
  void fail_copy(unsigned nth) { fail_copies_ = nth; }
  // The n-th call of any kind that can fail.
  void fail_any(unsigned nth, bool always = false) { fault_any_ = {nth, always}; }
  // The n-th call of this kind from now on throws (all from then on if `always`).
  void fail_call(Call call, unsigned nth, bool always = false) { faults_[call] = {nth, always}; }
  void heal() {
    faults_.clear();
    fault_any_ = {0, false};
  }

  std::vector<std::pair<const std::byte*, const std::byte*>> copies;  // (to, from) in the order issued
  std::uint64_t fills = 0;
  std::uint64_t batches = 0;
  std::atomic<std::uint64_t> waited{0};  // how often a caller was blocked

 protected:
  using Lock = std::lock_guard<std::recursive_mutex>;

  // What the device finds at an address when it gets there.
  virtual std::byte* physical(const std::byte* address) { return const_cast<std::byte*>(address); }
  // Whether work that has begun and not ended uses any of these addresses.
  bool running(const std::byte* address, std::size_t bytes) const {
    for (const auto& [data, size] : running_) {
      if (data < address + bytes && address < data + size) return true;
    }
    return false;
  }
  // Said once: what still runs while the test is unwound must not throw again out of a destructor.
  void violated(const char* what) {
    if (!violation_.empty()) return;
    violation_ = what;
    throw std::logic_error(what);
  }
  void fault(Call call) {
    const auto found = faults_.find(call);
    if (found != faults_.end()) strike(found->second);
    strike(fault_any_);
  }
  mutable std::recursive_mutex mutex_;
  std::uint64_t handles_ = 0;

 private:
  void push_copy(StreamHandle stream, std::byte* to, const std::byte* from, std::size_t bytes) {
    Work work{Kind::copy};
    work.to = to;
    work.from = from;
    work.bytes = bytes;
    work.fails = fail_copies_ > 0 && --fail_copies_ == 0;
    at(stream).work.push_back(work);
    copies.emplace_back(to, from);
  }
  enum class Kind { copy, record, wait, compute, write };
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
    bool captured = false;
  };
  struct End {
    std::uint64_t time;
    bool failed;
  };
  struct Event {
    std::uint64_t recorded = 0;
    std::map<std::uint64_t, End> ends;  // by recording: one made later, on another stream, may end earlier
  };
  struct Fault {
    unsigned nth;  // 0: none
    bool always;
  };

  static void unused() { throw std::logic_error("not part of this fake"); }
  Stream& at(StreamHandle stream) {
    const auto found = streams_.find(stream);
    if (found == streams_.end()) throw Error(ErrorKind::invalid_argument, "no such stream");
    return found->second;
  }
  std::map<EventHandle, Event>::iterator find(EventHandle event) {
    const auto found = events_.find(event);
    if (found == events_.end()) throw Error(ErrorKind::invalid_argument, "no such event");
    return found;
  }
  static bool complete(const Event& event, std::uint64_t recording) {
    if (recording == 0) return true;
    const auto end = event.ends.find(recording);
    if (end == event.ends.end()) return false;
    if (end->second.failed) throw Error(ErrorKind::driver, "a copy of this stream failed");
    return true;
  }
  static void strike(Fault& fault) {
    if (fault.nth == 0 || --fault.nth > 0) return;
    if (fault.always) fault.nth = 1;
    throw Error(ErrorKind::driver, "injected fault");
  }
  void refuse_captured(StreamHandle stream) {
    if (at(stream).captured) throw Error(ErrorKind::invalid_state, "this stream is being captured");
  }
  void check_bytes(const std::byte* data, std::size_t bytes, std::byte tag) {
    for (std::size_t i = 0; i < bytes; ++i) {
      if (*physical(data + i) != tag) violated("stale read: a layer computes with other bytes than its own");
    }
  }
  void begin_reading(const std::byte* data, std::size_t bytes, std::byte tag) {
    check_bytes(data, bytes, tag);
    for (std::size_t i = 0; i < bytes; ++i) reading_.insert(physical(data + i));
    begin_running(data, bytes);
  }
  void end_reading(const std::byte* data, std::size_t bytes, std::byte tag) {
    end_running(data);
    for (std::size_t i = 0; i < bytes; ++i) {
      const auto reading = reading_.find(physical(data + i));
      if (reading != reading_.end()) reading_.erase(reading);
    }
    check_bytes(data, bytes, tag);
  }
  void check_unread(const std::byte* to, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) {
      if (reading_.count(physical(to + i)) != 0) violated("something writes to bytes that are being computed with");
    }
  }
  void begin_running(const std::byte* data, std::size_t bytes) { running_.emplace(data, bytes); }
  void end_running(const std::byte* data) {
    const auto found = running_.find(data);
    if (found != running_.end()) running_.erase(found);
  }

  std::byte* reserve(std::size_t, std::size_t) override { return unused(), nullptr; }
  void release(std::byte*, std::size_t) override { unused(); }
  void retire(std::byte*, std::size_t) override { unused(); }
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
  void register_host(const std::byte*, std::size_t, HostUse) override { unused(); }
  void unregister_host(const std::byte*, std::size_t) override { unused(); }
  void use_host(const std::byte*, std::size_t, HostUse) override { unused(); }

  std::mt19937_64 random_;
  std::uint64_t time_ = 0;
  unsigned fail_copies_ = 0;
  std::map<Call, Fault> faults_;
  Fault fault_any_{0, false};
  std::map<StreamHandle, Stream> streams_;
  std::map<EventHandle, Event> events_;
  std::multiset<const std::byte*> reading_;                 // physical
  std::multimap<const std::byte*, std::size_t> running_;    // addresses
  std::string violation_;
};

}  // namespace remap::testing
