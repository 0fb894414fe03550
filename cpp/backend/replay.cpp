// Replays a trace on another backend: the same calls in the same order, with handles and addresses translated.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>

#include "remap/decorators.h"

namespace remap {
namespace {

// How long a wait that succeeded when logged may take now, on a slower machine.
constexpr std::chrono::seconds kPatience{60};

struct Divergence {
  std::string message;
};

class Replay {
 public:
  explicit Replay(Backend& backend) : backend_(backend) {}

  // Copies may still read the memory that stood in for the caller's, so they end before it goes.
  ~Replay() {
    try {
      if (streams_.empty()) return;
      const EventHandle event = backend_.create_event();
      for (const auto& stream : streams_) {
        backend_.record(event, stream.second);
        try {
          (void)backend_.synchronize(event, std::chrono::nanoseconds::max());
        } catch (const Error&) {  // a failed stream is idle too
        }
      }
      backend_.destroy_event(event);
    } catch (const Error&) {
      // Not known to be idle: rather keep the memory for ever than let a copy read what is gone.
      (void)own_.release();
    }
  }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  void run(const TraceRecord& record);

 private:
  struct Range {
    std::size_t bytes;
    std::byte* now;
  };

  static std::uint64_t number(const std::byte* address) { return reinterpret_cast<std::uintptr_t>(address); }

  static std::uint64_t translate(const std::map<std::uint64_t, std::uint64_t>& table, std::uint64_t logged, const char* what) {
    const auto found = table.find(logged);
    if (found == table.end()) throw Divergence{std::string("unknown ") + what + " " + std::to_string(logged)};
    return found->second;
  }
  const Range* known(std::uint64_t logged, std::uint64_t& offset) const {
    auto range = ranges_.upper_bound(logged);
    if (range == ranges_.begin()) return nullptr;
    --range;
    offset = logged - range->first;
    return offset < range->second.bytes ? &range->second : nullptr;
  }
  std::byte* address(std::uint64_t logged) const {
    std::uint64_t offset = 0;
    const Range* range = known(logged, offset);
    if (range == nullptr) throw Divergence{"unknown address " + std::to_string(logged)};
    return range->now + offset;
  }
  // The caller's own memory: not known, and not there any more. Any bytes will do in its place.
  std::byte* address_or_own(std::uint64_t logged, std::size_t bytes) {
    std::uint64_t offset = 0;
    const Range* range = known(logged, offset);
    return range != nullptr ? range->now + offset : own(bytes);
  }
  std::byte* own(std::size_t bytes) {
    own_->emplace_back(std::max<std::size_t>(bytes, 1));
    return own_->back().data();
  }
  StreamHandle stream(std::uint64_t logged) const { return translate(streams_, logged, "stream"); }
  EventHandle event(std::uint64_t logged) const { return translate(events_, logged, "event"); }

  void wait(EventHandle event, const TraceRecord& record) {
    // What was logged as not complete says nothing about this run.
    if (!record.failed && record.result == 0) return;
    if (!backend_.synchronize(event, kPatience)) throw Divergence{"an event that was complete when logged is not now"};
  }

  Backend& backend_;
  std::map<std::uint64_t, Range> ranges_;  // logged start -> what stands for it
  std::map<std::uint64_t, std::uint64_t> pages_, streams_, events_;
  std::unique_ptr<std::deque<std::vector<std::byte>>> own_ = std::make_unique<std::deque<std::vector<std::byte>>>();
};

void Replay::run(const TraceRecord& record) {
  const auto& a = record.args;
  switch (record.call) {
    case Call::reserve:
      ranges_[record.result] = {a[0], backend_.reserve(a[0], a[1])};
      break;
    case Call::release:
      backend_.release(address(a[0]), a[1]);
      ranges_.erase(a[0]);
      break;
    case Call::retire:
      backend_.retire(address(a[0]), a[1]);
      break;
    case Call::create_page:
      pages_[record.result] = backend_.create_page(a[0]);
      break;
    case Call::destroy_page:
      backend_.destroy_page(translate(pages_, a[0], "page"));
      pages_.erase(a[0]);
      break;
    case Call::map: {
      std::vector<PageHandle> pages;
      for (const std::uint64_t page : record.pages) pages.push_back(translate(pages_, page, "page"));
      backend_.map(address(a[0]), pages.data(), pages.size(), a[2]);
      break;
    }
    case Call::unmap:
      backend_.unmap(address(a[0]), a[1]);
      break;
    case Call::set_access:
      backend_.set_access(address(a[0]), a[1], static_cast<Access>(a[2]));
      break;
    case Call::exchange:
      backend_.exchange(address(a[0]), address(a[1]), a[2]);
      break;
    case Call::populate:
      backend_.populate(address(a[0]), a[1]);
      break;
    case Call::allocate_host:
      ranges_[record.result] = {a[0], backend_.allocate_host(a[0])};
      break;
    case Call::free_host:
      backend_.free_host(address(a[0]), a[1]);
      ranges_.erase(a[0]);
      break;
    case Call::register_host: {
      std::byte* memory = own(a[1]);
      backend_.register_host(memory, a[1]);
      ranges_[a[0]] = {a[1], memory};
      break;
    }
    case Call::unregister_host:
      backend_.unregister_host(address(a[0]), a[1]);
      ranges_.erase(a[0]);
      break;
    case Call::create_stream:
      streams_[record.result] = backend_.create_stream();
      break;
    case Call::destroy_stream:
      backend_.destroy_stream(stream(a[0]));
      streams_.erase(a[0]);
      break;
    case Call::adopt_stream:
      // The caller's stream is not here: one of our own stands in for it.
      if (streams_.count(record.result) == 0) streams_[record.result] = backend_.create_stream();
      break;
    case Call::forget_stream:
      backend_.destroy_stream(stream(a[0]));
      streams_.erase(a[0]);
      break;
    case Call::copy:
      backend_.copy(stream(a[0]), address_or_own(a[1], a[3]), address_or_own(a[2], a[3]), a[3]);
      break;
    case Call::fill:
      backend_.fill(stream(a[0]), address_or_own(a[1], a[3]), static_cast<std::uint8_t>(a[2]), a[3]);
      break;
    case Call::create_event:
      events_[record.result] = backend_.create_event();
      break;
    case Call::destroy_event:
      backend_.destroy_event(event(a[0]));
      events_.erase(a[0]);
      break;
    case Call::record:
      backend_.record(event(a[0]), stream(a[1]));
      break;
    case Call::stream_wait:
      backend_.stream_wait(stream(a[0]), event(a[1]));
      break;
    case Call::query:
    case Call::synchronize:
      wait(event(a[0]), record);
      break;
    case Call::elapsed:
      (void)backend_.elapsed(event(a[0]), event(a[1]));
      break;
  }
}

}  // namespace

ReplayResult replay(const std::vector<TraceRecord>& log, Backend& backend, const ReplayOptions& options) {
  ReplayResult result;
  Replay replay(backend);
  for (std::size_t i = 0; i < log.size(); ++i) {
    const TraceRecord& record = log[i];
    if (record.failed && options.failed == ReplayOptions::Failed::skip) continue;
    bool failed = false;
    std::string message;
    try {
      replay.run(record);
    } catch (const Error& error) {
      failed = true;
      message = error.what();
    } catch (const Divergence& divergence) {
      // Something that the log never made. A call that failed for that very reason has failed again.
      failed = true;
      message = divergence.message;
    }
    if (failed != record.failed) {
      result.ok = false;
      result.divergence = i;
      result.message = std::string(call_name(record.call)) +
                       (failed ? " failed, logged as ok: " + message : " went well, logged as failed");
      return result;
    }
    ++result.replayed;
  }
  return result;
}

}  // namespace remap
