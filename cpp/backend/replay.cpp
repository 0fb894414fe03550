// SPDX-License-Identifier: Apache-2.0
// Replays a trace on another backend: the same calls in the same order, with handles and addresses translated.
//
// A trace is untrusted: it may have been edited, cut or made up. The backend refuses what breaks its preconditions, but not what
// is done to memory behind its back: a copy that passes the end of its range, or one that still runs when the range goes. So
// every address, size and handle is looked up in what the trace has made so far before a call is carried out, and nothing that
// copies may be using is taken away before they have ended.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>

#include "backend/mapping_table.h"
#include "remap/decorators.h"

namespace remap {
namespace {

// How long a wait that succeeded when logged may take now, on a slower machine.
constexpr std::chrono::seconds kPatience{60};

struct Divergence {
  std::string message;
};

// Memory that stands in for the caller's. Untouched memory costs nothing, so a trace cannot ask for too much of it.
class OwnMemory {
 public:
  explicit OwnMemory(std::size_t bytes)
      : bytes_(std::max<std::size_t>(bytes, 1)),
        place_(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    if (place_ == MAP_FAILED) throw Divergence{"no address space for " + std::to_string(bytes) + " bytes of the caller's"};
  }
  ~OwnMemory() { ::munmap(place_, bytes_); }
  OwnMemory(const OwnMemory&) = delete;
  OwnMemory& operator=(const OwnMemory&) = delete;
  std::byte* data() const noexcept { return static_cast<std::byte*>(place_); }

 private:
  std::size_t bytes_;
  void* place_;
};

class Replay {
 public:
  explicit Replay(Backend& backend) : backend_(backend), table_(backend.granularity()) {}

  // Copies may still read the memory that stood in for the caller's, so they end before it goes.
  ~Replay() {
    try {
      finish();
      if (event_ != 0) backend_.destroy_event(event_);
    } catch (...) {
      // Not known to be idle: rather keep the memory for ever than let a copy read freed memory.
      (void)own_.release();
    }
  }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  void run(const TraceRecord& record);

 private:
  using Handles = std::map<std::uint64_t, std::uint64_t>;
  struct Range {
    std::size_t bytes;
    std::byte* now;
    bool region;  // a reservation; else host memory
  };

  static std::uint64_t translate(const Handles& table, std::uint64_t logged, const char* what) {
    const auto found = table.find(logged);
    if (found == table.end()) throw Divergence{std::string("unknown ") + what + " " + std::to_string(logged)};
    return found->second;
  }
  static void require_new(const Handles& table, std::uint64_t logged, const char* what) {
    if (logged == 0 || table.count(logged) != 0) {
      throw Divergence{std::string(what) + " " + std::to_string(logged) + " is none, or exists already"};
    }
  }
  // The range that the logged address lies in; null: none.
  const Range* known(std::uint64_t logged, std::uint64_t& offset) const {
    auto range = ranges_.upper_bound(logged);
    if (range == ranges_.begin()) return nullptr;
    --range;
    offset = logged - range->first;
    return offset < range->second.bytes ? &range->second : nullptr;
  }
  std::byte* address(std::uint64_t logged, std::uint64_t bytes) const {
    std::uint64_t offset = 0;
    const Range* range = known(logged, offset);
    if (range == nullptr) throw Divergence{"unknown address " + std::to_string(logged)};
    if (bytes > range->bytes - offset) {
      throw Divergence{std::to_string(bytes) + " bytes at address " + std::to_string(logged) + " pass the end of their range"};
    }
    return range->now + offset;
  }
  // Where a copy reads or writes. The caller's own memory is not known, and not there any more: any bytes will do in its place.
  std::byte* copied(std::uint64_t logged, std::uint64_t bytes, Access least, const char* call) {
    std::uint64_t offset = 0;
    const Range* range = known(logged, offset);
    if (range == nullptr) return own(bytes);
    std::byte* at = address(logged, bytes);
    if (range->region) (void)table_.require_access(mapping::address_of(at), bytes, least, call);
    return at;
  }
  CopyRange copied(std::uint64_t to, std::uint64_t from, std::uint64_t bytes, const char* call) {
    std::uint64_t offset = 0;
    if (known(to, offset) == nullptr && known(from, offset) == nullptr) {
      throw Divergence{"a copy between two ranges that the trace never made"};
    }
    return {copied(to, bytes, Access::read_write, call), copied(from, bytes, Access::read, call), bytes};
  }
  std::byte* own(std::uint64_t bytes) {
    own_->emplace_back(bytes);
    return own_->back().data();
  }
  void require_free(std::uint64_t logged, std::uint64_t bytes) const {
    const auto after = ranges_.upper_bound(logged);
    const bool meets = (after != ranges_.end() && after->first - logged < bytes) ||
                       (after != ranges_.begin() && logged - std::prev(after)->first < std::prev(after)->second.bytes);
    if (logged == 0 || bytes == 0 || logged + (bytes - 1) < logged || meets) {
      throw Divergence{std::to_string(bytes) + " bytes at address " + std::to_string(logged) +
                       " are no range, or meet another one"};
    }
  }
  // The logged range that begins here, of this size and kind.
  std::byte* whole(std::uint64_t logged, std::uint64_t bytes, bool region) const {
    const auto found = ranges_.find(logged);
    if (found == ranges_.end() || found->second.bytes != bytes || found->second.region != region) {
      throw Divergence{"address " + std::to_string(logged) + " is not the beginning of such a range of " + std::to_string(bytes) +
                       " bytes"};
    }
    return found->second.now;
  }
  StreamHandle stream(std::uint64_t logged) const { return translate(streams_, logged, "stream"); }
  EventHandle event(std::uint64_t logged) const { return translate(events_, logged, "event"); }

  // Waits for all copies.
  void finish() {
    if (!copying_) return;
    if (event_ == 0) event_ = backend_.create_event(false);
    for (const auto& stream : streams_) {
      backend_.record(event_, stream.second);
      try {
        (void)backend_.synchronize(event_, std::chrono::nanoseconds::max());
      } catch (const Error&) {  // a failed stream is idle too
      }
    }
    copying_ = false;
  }
  void wait(EventHandle event, const TraceRecord& record) {
    // A query logged as not complete says nothing about this run.
    if (!record.failed && record.result == 0) return;
    if (!backend_.synchronize(event, kPatience)) throw Divergence{"an event that was complete when logged is not now"};
  }

  Backend& backend_;
  std::map<std::uint64_t, Range> ranges_;  // by logged start; they never overlap
  mapping::MappingTable table_;            // the mappings now
  Handles pages_, streams_, events_;
  std::unique_ptr<std::deque<OwnMemory>> own_ = std::make_unique<std::deque<OwnMemory>>();
  EventHandle event_ = 0;  // finish()'s own
  bool copying_ = false;   // copies were enqueued since finish()
};

void Replay::run(const TraceRecord& record) {
  const auto& a = record.args;
  switch (record.call) {
    case Call::reserve: {
      if (!record.failed) require_free(record.result, a[0]);
      std::byte* now = backend_.reserve(a[0], a[1]);
      ranges_[record.result] = {a[0], now, true};
      table_.add_region(mapping::address_of(now), a[0]);
      break;
    }
    case Call::release: {
      std::byte* now = whole(a[0], a[1], true);
      finish();
      backend_.release(now, a[1]);
      table_.remove_region(mapping::address_of(now));
      ranges_.erase(a[0]);
      break;
    }
    case Call::retire: {
      std::byte* now = address(a[0], a[1]);
      const bool again = table_.require_retirable(mapping::address_of(now), a[1], "retire");
      backend_.retire(now, a[1]);
      if (!again) table_.retire(mapping::address_of(now), a[1]);
      break;
    }
    case Call::create_page:
      if (!record.failed) require_new(pages_, record.result, "page");
      pages_[record.result] = backend_.create_page(a[0]);
      break;
    case Call::destroy_page:
      backend_.destroy_page(translate(pages_, a[0], "page"));
      pages_.erase(a[0]);
      break;
    case Call::map: {
      std::vector<PageHandle> pages;
      for (const std::uint64_t page : record.list) pages.push_back(translate(pages_, page, "page"));
      if (pages.size() != a[1] || pages.empty() || a[2] == 0 || a[1] > ~std::uint64_t{0} / a[2]) {
        throw Divergence{"expected " + std::to_string(a[1]) + " pages, got " + std::to_string(pages.size())};
      }
      std::byte* at = address(a[0], a[1] * a[2]);
      mapping::MappingTable::Cells cells;
      for (std::size_t i = 0; i < pages.size(); ++i) {
        cells.emplace_hint(cells.end(), mapping::address_of(at) + i * a[2], mapping::Cell{a[2], 0, Access::none});
      }
      backend_.map(at, pages.data(), pages.size(), a[2]);
      table_.add(cells);
      break;
    }
    case Call::unmap:
      finish();
      backend_.unmap(address(a[0], a[1]), a[1]);
      table_.remove(mapping::address_of(address(a[0], a[1])), a[1]);
      break;
    case Call::set_access:
      if (a[2] > static_cast<std::uint64_t>(Access::read_write)) throw Divergence{"unknown access " + std::to_string(a[2])};
      finish();
      backend_.set_access(address(a[0], a[1]), a[1], static_cast<Access>(a[2]));
      table_.set_access(mapping::address_of(address(a[0], a[1])), a[1], static_cast<Access>(a[2]));
      break;
    case Call::exchange:
      finish();
      backend_.exchange(address(a[0], a[2]), address(a[1], a[2]), a[2]);
      table_.exchange(mapping::address_of(address(a[0], a[2])), mapping::address_of(address(a[1], a[2])), a[2]);
      break;
    case Call::populate:
      backend_.populate(address(a[0], a[1]), a[1]);
      break;
    case Call::allocate_host:
      if (!record.failed) require_free(record.result, a[0]);
      ranges_[record.result] = {a[0], backend_.allocate_host(a[0]), false};
      break;
    case Call::free_host:
      (void)whole(a[0], a[1], false);
      finish();
      backend_.free_host(address(a[0], a[1]), a[1]);
      ranges_.erase(a[0]);
      break;
    case Call::register_host: {
      require_free(a[0], a[1]);
      if (a[2] > static_cast<std::uint64_t>(HostUse::staged)) throw Divergence{"unknown use of host memory " + std::to_string(a[2])};
      std::byte* memory = own(a[1]);
      backend_.register_host(memory, a[1], static_cast<HostUse>(a[2]));
      ranges_[a[0]] = {a[1], memory, false};
      break;
    }
    case Call::unregister_host:
      (void)whole(a[0], a[1], false);
      finish();
      backend_.unregister_host(address(a[0], a[1]), a[1]);
      ranges_.erase(a[0]);
      break;
    case Call::use_host:
      (void)whole(a[0], a[1], false);
      if (a[2] > static_cast<std::uint64_t>(HostUse::staged)) throw Divergence{"unknown use of host memory " + std::to_string(a[2])};
      finish();
      backend_.use_host(address(a[0], a[1]), a[1], static_cast<HostUse>(a[2]));
      break;
    case Call::create_stream:
      if (!record.failed) require_new(streams_, record.result, "stream");
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
    case Call::copy: {
      const StreamHandle on = stream(a[0]);
      const CopyRange range = copied(a[1], a[2], a[3], "copy");
      copying_ = true;
      backend_.copy(on, range.to, range.from, range.bytes);
      break;
    }
    case Call::copy_batch: {
      const StreamHandle on = stream(a[0]);
      if (record.list.size() % 3 != 0 || record.list.size() / 3 != a[1]) {
        throw Divergence{"expected " + std::to_string(a[1]) + " ranges of three numbers, got " + std::to_string(record.list.size()) +
                         " numbers"};
      }
      std::vector<CopyRange> ranges;
      for (std::size_t i = 0; i < record.list.size(); i += 3) {
        ranges.push_back(copied(record.list[i], record.list[i + 1], record.list[i + 2], "copy_batch"));
      }
      copying_ = true;
      backend_.copy_batch(on, ranges.data(), ranges.size());
      break;
    }
    case Call::fill: {
      const StreamHandle on = stream(a[0]);
      if (a[2] > 255) throw Divergence{"a byte of value " + std::to_string(a[2])};
      (void)address(a[1], a[3]);
      std::byte* to = copied(a[1], a[3], Access::read_write, "fill");
      copying_ = true;
      backend_.fill(on, to, static_cast<std::uint8_t>(a[2]), a[3]);
      break;
    }
    case Call::create_event:
      if (!record.failed) require_new(events_, record.result, "event");
      events_[record.result] = backend_.create_event(a[0] != 0);
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
    default: throw Divergence{"no such call"};
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
