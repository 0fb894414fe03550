// The fake backend with pages: addresses that stand for pages, as on a GPU. What work finds at an address is decided when it
// runs, not when it is enqueued; touching an address without a page, or unmapping one that running work uses, is a
// violation. Nothing here can be touched by the processor: contents are looked at with peek().
//
// May be used by several threads: a synchronize() without a timeout lets the others go on while it waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "fake_backend.h"

namespace remap::testing {

class FakeDevice final : public FakeBackend {
 public:
  static constexpr std::size_t kPage = 4;

  explicit FakeDevice(std::uint64_t seed = 0, bool exchange = false) : FakeBackend(seed), exchange_(exchange) {}

  const char* name() const noexcept override { return "fake device"; }
  std::size_t granularity() const noexcept override { return kPage; }
  DeviceInfo device() const override { return {DeviceInfo::Kind::cuda, 0, false}; }
  bool can_exchange() const noexcept override { return exchange_; }
  Usage usage() const override {
    const Lock lock(mutex_);
    Usage usage = FakeBackend::usage();
    for (const auto& [address, bytes] : reserved_) usage.reserved_bytes += bytes;
    usage.page_bytes = pages_.size() * kPage;
    usage.mapped_bytes = mapped_.size() * kPage;
    return usage;
  }

  std::byte* reserve(std::size_t bytes, std::size_t) override {
    const Lock lock(mutex_);
    fault(Call::reserve);
    const std::uintptr_t at = next_;
    next_ += bytes + kPage;  // with a hole behind it
    reserved_[at] = bytes;
    return reinterpret_cast<std::byte*>(at);
  }
  void release(std::byte* address, std::size_t bytes) override {
    const Lock lock(mutex_);
    fault(Call::release);
    const auto found = reserved_.find(number(address));
    if (found == reserved_.end() || found->second != bytes) refuse("not a reservation");
    reserved_.erase(found);
  }
  void retire(std::byte* address, std::size_t bytes) override {
    const Lock lock(mutex_);
    fault(Call::retire);
    const auto found = reserved_.find(number(address));
    if (found == reserved_.end() || found->second != bytes) refuse("not a reservation");
  }
  PageHandle create_page(std::size_t bytes) override {
    const Lock lock(mutex_);
    fault(Call::create_page);
    if (bytes != kPage) refuse("one size of pages");
    pages_[++handles_].assign(kPage, std::byte{0xC5});  // whatever was there
    return handles_;
  }
  void destroy_page(PageHandle page) override {
    const Lock lock(mutex_);
    fault(Call::destroy_page);
    pages_.erase(page);
  }
  void map(std::byte* at, const PageHandle* pages, std::size_t count, std::size_t) override {
    const Lock lock(mutex_);
    fault(Call::map);
    for (std::size_t i = 0; i < count; ++i) {
      if (!in_reservation(number(at) + i * kPage) || mapped_.count(number(at) + i * kPage) != 0) refuse("mapped already");
    }
    for (std::size_t i = 0; i < count; ++i) mapped_[number(at) + i * kPage] = {pages[i], Access::none};
    calls.emplace_back(Call::map, count);
  }
  void unmap(std::byte* at, std::size_t bytes) override {
    const Lock lock(mutex_);
    fault(Call::unmap);
    for (std::uintptr_t page = number(at); page < number(at) + bytes; page += kPage) {
      if (mapped_.count(page) == 0) refuse("not mapped");
    }
    if (running(at, bytes)) violated("unmapped under running work");
    for (std::uintptr_t page = number(at); page < number(at) + bytes; page += kPage) mapped_.erase(page);
    calls.emplace_back(Call::unmap, bytes / kPage);
  }
  void set_access(std::byte* at, std::size_t bytes, Access access) override {
    const Lock lock(mutex_);
    fault(Call::set_access);
    for (std::uintptr_t page = number(at); page < number(at) + bytes; page += kPage) mapped_.at(page).access = access;
    calls.emplace_back(Call::set_access, bytes / kPage);
  }
  void exchange(std::byte* a, std::byte* b, std::size_t bytes) override {
    const Lock lock(mutex_);
    fault(Call::exchange);
    if (running(a, bytes) || running(b, bytes)) violated("exchanged under running work");
    for (std::size_t i = 0; i < bytes; i += kPage) std::swap(mapped_.at(number(a) + i), mapped_.at(number(b) + i));
    calls.emplace_back(Call::exchange, bytes / kPage);
  }
  void populate(std::byte*, std::size_t) override {}

  void fill(StreamHandle stream, std::byte* to, std::uint8_t value, std::size_t bytes) override {
    const Lock lock(mutex_);
    FakeBackend::fill(stream, to, value, bytes);
    calls.emplace_back(Call::fill, bytes / kPage);
  }
  bool synchronize(EventHandle event, std::chrono::nanoseconds timeout) override {
    {
      const Lock lock(mutex_);
      calls.emplace_back(Call::synchronize, event);
      ++waiting;
    }
    struct Waited {
      std::atomic<int>& count;
      ~Waited() { --count; }
    } waited_here{waiting};
    if (timeout == std::chrono::nanoseconds(0)) return FakeBackend::synchronize(event, timeout);
    for (;;) {
      {
        const Lock lock(mutex_);
        if (!frozen && FakeBackend::synchronize(event, std::chrono::nanoseconds(0))) return true;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      if (frozen && timeout != std::chrono::nanoseconds::max()) return false;  // time passes only while nothing else does
    }
  }

  std::byte peek(const std::byte* address) {
    const Lock lock(mutex_);
    return *physical(address);
  }
  std::size_t count(Call call) const {
    const Lock lock(mutex_);
    std::size_t count = 0;
    for (const auto& [each, what] : calls) count += each == call ? 1 : 0;
    return count;
  }

  std::vector<std::pair<Call, std::uint64_t>> calls;  // what was done, with pages or the event
  std::atomic<bool> frozen{false};                    // nobody comes back from synchronize() without a timeout
  std::atomic<int> waiting{0};                        // threads in synchronize()

 protected:
  std::byte* physical(const std::byte* address) override {
    const std::uintptr_t at = number(address);
    if (at < kFirst || at >= next_) return FakeBackend::physical(address);
    const auto found = mapped_.find(at - at % kPage);
    if (found == mapped_.end() || found->second.access == Access::none) {
      violated("the device touches an address that no page stands behind");
      return &nowhere_;
    }
    return pages_.at(found->second.page).data() + at % kPage;
  }

 private:
  struct Mapping {
    PageHandle page;
    Access access;
  };
  static constexpr std::uintptr_t kFirst = std::uintptr_t{1} << 40;

  static std::uintptr_t number(const std::byte* address) { return reinterpret_cast<std::uintptr_t>(address); }
  [[noreturn]] static void refuse(const char* what) { throw Error(ErrorKind::invalid_state, what); }
  bool in_reservation(std::uintptr_t at) const {
    auto after = reserved_.upper_bound(at);
    if (after == reserved_.begin()) return false;
    --after;
    return at < after->first + after->second;
  }

  bool exchange_;
  std::uintptr_t next_ = kFirst;
  std::map<std::uintptr_t, std::size_t> reserved_;
  std::map<std::uintptr_t, Mapping> mapped_;
  std::map<PageHandle, std::vector<std::byte>> pages_;
  std::byte nowhere_{};
};

}  // namespace remap::testing
