// SPDX-License-Identifier: Apache-2.0
// The limit decorator: refuses calls that would pass a limit.
//
// Concurrency: a count is reserved before the inner call and given back if that throws; it is dropped only after a release
// has succeeded. So at every moment  count >= what the inner backend holds,  and two callers that race for the last unit
// cannot both get it. The counts stand under one mutex, which is not held over inner calls.
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "backend/forward.h"
#include "remap/backends.h"

namespace remap {
namespace {

struct Count {
  const char* name;
  std::size_t limit;
  std::size_t used = 0;
};

class Limit final : public Forward<Backend> {
 public:
  Limit(std::shared_ptr<Backend> inner, const Limits& limits)
      : Forward(std::move(inner)),
        pages_{"page_bytes", limits.page_bytes},
        reserved_{"reserved_bytes", limits.reserved_bytes},
        mappings_{"mappings", limits.mappings},
        host_{"host_bytes", limits.host_bytes},
        streams_{"streams", limits.streams},
        events_{"events", limits.events} {}

  std::byte* reserve(std::size_t bytes, std::size_t alignment) override {
    return acquire(reserved_, bytes, [&] { return inner_->reserve(bytes, alignment); });
  }
  void release(std::byte* address, std::size_t bytes) override {
    inner_->release(address, bytes);
    drop(reserved_, bytes);
  }
  PageHandle create_page(std::size_t bytes) override {
    return acquire(pages_, bytes, [&] {
      // The place for the size is made first: noting it must not fail once the page exists.
      std::map<PageHandle, std::size_t> sizes;
      auto place = sizes.extract(sizes.emplace(0, bytes).first);
      const PageHandle page = inner_->create_page(bytes);
      place.key() = page;
      const std::lock_guard<std::mutex> lock(mutex_);
      sizes_.insert(std::move(place));
      return page;
    });
  }
  void destroy_page(PageHandle page) override {
    // Taken out before the inner call: right after it the handle may come back from a create_page elsewhere.
    std::map<PageHandle, std::size_t>::node_type place;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      place = sizes_.extract(page);
    }
    try {
      inner_->destroy_page(page);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      sizes_.insert(std::move(place));
      throw;
    }
    if (place) drop(pages_, place.mapped());
  }
  void map(std::byte* at, const PageHandle* pages, std::size_t count, std::size_t page_bytes) override {
    std::map<std::byte*, std::size_t> ranges;
    for (std::size_t i = 0; i < count; ++i) ranges.emplace_hint(ranges.end(), at + i * page_bytes, page_bytes);
    acquire(mappings_, count, [&] {
      inner_->map(at, pages, count, page_bytes);
      const std::lock_guard<std::mutex> lock(mutex_);
      mapped_.merge(ranges);
    });
  }
  void unmap(std::byte* at, std::size_t bytes) override {
    inner_->unmap(at, bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    auto place = mapped_.lower_bound(at);
    while (place != mapped_.end() && place->first < at + bytes) {
      place = mapped_.erase(place);
      --mappings_.used;
    }
  }
  std::byte* allocate_host(std::size_t bytes) override {
    return acquire(host_, bytes, [&] { return inner_->allocate_host(bytes); });
  }
  void free_host(std::byte* address, std::size_t bytes) override {
    inner_->free_host(address, bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (staged_.erase(address) == 0) host_.used -= bytes;
  }
  void register_host(const std::byte* address, std::size_t bytes, HostUse use) override {
    std::set<const std::byte*> staged;
    if (use == HostUse::staged) staged.insert(address);
    acquire(host_, staged.empty() ? bytes : 0, [&] {
      inner_->register_host(address, bytes, use);
      const std::lock_guard<std::mutex> lock(mutex_);
      staged_.merge(staged);
    });
  }
  void unregister_host(const std::byte* address, std::size_t bytes) override {
    inner_->unregister_host(address, bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (staged_.erase(address) == 0) host_.used -= bytes;
  }
  void use_host(const std::byte* address, std::size_t bytes, HostUse use) override {
    bool was_staged = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      was_staged = staged_.count(address) != 0;
    }
    if (use == HostUse::staged) {
      std::set<const std::byte*> staged{address};
      inner_->use_host(address, bytes, use);
      if (was_staged) return;
      const std::lock_guard<std::mutex> lock(mutex_);
      staged_.merge(staged);
      host_.used -= bytes;
      return;
    }
    acquire(host_, was_staged ? bytes : 0, [&] {
      inner_->use_host(address, bytes, use);
      const std::lock_guard<std::mutex> lock(mutex_);
      staged_.erase(address);
    });
  }
  StreamHandle create_stream() override {
    return acquire(streams_, 1, [&] { return inner_->create_stream(); });
  }
  void destroy_stream(StreamHandle stream) override {
    inner_->destroy_stream(stream);
    drop(streams_, 1);
  }
  EventHandle create_event(bool timed) override {
    return acquire(events_, 1, [&] { return inner_->create_event(timed); });
  }
  void destroy_event(EventHandle event) override {
    inner_->destroy_event(event);
    drop(events_, 1);
  }

 private:
  template <typename Body>
  auto acquire(Count& count, std::size_t amount, Body&& body) -> decltype(body()) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      // used <= limit always, so the difference does not wrap; used + amount could.
      if (amount > count.limit - count.used) {
        throw Error(ErrorKind::limit_exceeded,
                    std::string("limit on ") + count.name + ": " + std::to_string(count.used) + " of " +
                        std::to_string(count.limit) + " in use, " + std::to_string(amount) +
                        " more asked for. Nothing changed. Give some back, or set a higher limit.",
                    {{"limit_name", std::string(count.name)},
                     {"limit", static_cast<std::int64_t>(count.limit)},
                     {"used", static_cast<std::int64_t>(count.used)},
                     {"requested", static_cast<std::int64_t>(amount)}});
      }
      count.used += amount;
    }
    try {
      return body();
    } catch (...) {
      drop(count, amount);
      throw;
    }
  }
  void drop(Count& count, std::size_t amount) {
    const std::lock_guard<std::mutex> lock(mutex_);
    count.used -= amount;
  }

  std::mutex mutex_;  // guards all below
  Count pages_;
  Count reserved_;
  Count mappings_;
  Count host_;
  Count streams_;
  Count events_;
  std::set<const std::byte*> staged_;           // registered ranges that are not page-locked
  std::map<PageHandle, std::size_t> sizes_;     // of the pages made here: destroy_page does not say how large a page is
  std::map<std::byte*, std::size_t> mapped_;    // start of each mapped page: unmap does not say how many pages it takes
};

}  // namespace

std::shared_ptr<Backend> make_limit_backend(std::shared_ptr<Backend> inner, const Limits& limits) {
  return std::make_shared<Limit>(std::move(inner), limits);
}

}  // namespace remap
