// SPDX-License-Identifier: Apache-2.0
// A decorator that is told before and after each call; fault and trace are made of it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "backend/forward.h"

namespace remap {

using CallArguments = std::array<std::uint64_t, 5>;  // as in TraceRecord

template <typename Base>
class Intercept : public Forward<Base> {
 public:
  using Forward<Base>::Forward;

  std::byte* reserve(std::size_t bytes, std::size_t alignment) override {
    return around(Call::reserve, {bytes, alignment}, [&] { return this->inner_->reserve(bytes, alignment); });
  }
  void release(std::byte* address, std::size_t bytes) override {
    around(Call::release, {number(address), bytes}, [&] { this->inner_->release(address, bytes); });
  }
  void retire(std::byte* address, std::size_t bytes) override {
    around(Call::retire, {number(address), bytes}, [&] { this->inner_->retire(address, bytes); });
  }
  PageHandle create_page(std::size_t bytes) override {
    return around(Call::create_page, {bytes}, [&] { return this->inner_->create_page(bytes); });
  }
  void destroy_page(PageHandle page) override {
    around(Call::destroy_page, {page}, [&] { this->inner_->destroy_page(page); });
  }
  void map(std::byte* at, const PageHandle* pages, std::size_t count, std::size_t page_bytes) override {
    around(Call::map, {number(at), count, page_bytes}, [&] { this->inner_->map(at, pages, count, page_bytes); }, pages, count);
  }
  void unmap(std::byte* at, std::size_t bytes) override {
    around(Call::unmap, {number(at), bytes}, [&] { this->inner_->unmap(at, bytes); });
  }
  void set_access(std::byte* at, std::size_t bytes, Access access) override {
    around(Call::set_access, {number(at), bytes, static_cast<std::uint64_t>(access)},
           [&] { this->inner_->set_access(at, bytes, access); });
  }
  void exchange(std::byte* a, std::byte* b, std::size_t bytes) override {
    around(Call::exchange, {number(a), number(b), bytes}, [&] { this->inner_->exchange(a, b, bytes); });
  }
  void populate(std::byte* at, std::size_t bytes) override {
    around(Call::populate, {number(at), bytes}, [&] { this->inner_->populate(at, bytes); });
  }

  std::byte* allocate_host(std::size_t bytes) override {
    return around(Call::allocate_host, {bytes}, [&] { return this->inner_->allocate_host(bytes); });
  }
  void free_host(std::byte* address, std::size_t bytes) override {
    around(Call::free_host, {number(address), bytes}, [&] { this->inner_->free_host(address, bytes); });
  }
  void register_host(const std::byte* address, std::size_t bytes, HostUse use) override {
    around(Call::register_host, {number(address), bytes, static_cast<std::uint64_t>(use)},
           [&] { this->inner_->register_host(address, bytes, use); });
  }
  void unregister_host(const std::byte* address, std::size_t bytes) override {
    around(Call::unregister_host, {number(address), bytes}, [&] { this->inner_->unregister_host(address, bytes); });
  }
  void use_host(const std::byte* address, std::size_t bytes, HostUse use) override {
    around(Call::use_host, {number(address), bytes, static_cast<std::uint64_t>(use)},
           [&] { this->inner_->use_host(address, bytes, use); });
  }

  StreamHandle create_stream() override {
    return around(Call::create_stream, {}, [&] { return this->inner_->create_stream(); });
  }
  void destroy_stream(StreamHandle stream) override {
    around(Call::destroy_stream, {stream}, [&] { this->inner_->destroy_stream(stream); });
  }
  StreamHandle adopt_stream(std::uint64_t native) override {
    return around(Call::adopt_stream, {native}, [&] { return this->inner_->adopt_stream(native); });
  }
  void forget_stream(StreamHandle stream) override {
    around(Call::forget_stream, {stream}, [&] { this->inner_->forget_stream(stream); });
  }
  void copy(StreamHandle stream, std::byte* to, const std::byte* from, std::size_t bytes) override {
    around(Call::copy, {stream, number(to), number(from), bytes}, [&] { this->inner_->copy(stream, to, from, bytes); });
  }
  void copy_batch(StreamHandle stream, const CopyRange* ranges, std::size_t count) override {
    std::vector<std::uint64_t> numbers;
    numbers.reserve(3 * count);
    for (const CopyRange* each = ranges; each != ranges + count; ++each) {
      numbers.insert(numbers.end(), {number(each->to), number(each->from), each->bytes});
    }
    around(Call::copy_batch, {stream, count}, [&] { this->inner_->copy_batch(stream, ranges, count); }, numbers.data(),
           numbers.size());
  }
  void fill(StreamHandle stream, std::byte* to, std::uint8_t value, std::size_t bytes) override {
    around(Call::fill, {stream, number(to), value, bytes}, [&] { this->inner_->fill(stream, to, value, bytes); });
  }

  EventHandle create_event(bool timed) override {
    return around(Call::create_event, {number(timed)}, [&] { return this->inner_->create_event(timed); });
  }
  void destroy_event(EventHandle event) override {
    around(Call::destroy_event, {event}, [&] { this->inner_->destroy_event(event); });
  }
  void record(EventHandle event, StreamHandle stream) override {
    around(Call::record, {event, stream}, [&] { this->inner_->record(event, stream); });
  }
  void stream_wait(StreamHandle stream, EventHandle event) override {
    around(Call::stream_wait, {stream, event}, [&] { this->inner_->stream_wait(stream, event); });
  }
  bool query(EventHandle event) override {
    return around(Call::query, {event}, [&] { return this->inner_->query(event); });
  }
  bool synchronize(EventHandle event, std::chrono::nanoseconds timeout) override {
    return around(Call::synchronize, {event, static_cast<std::uint64_t>(timeout.count())},
                  [&] { return this->inner_->synchronize(event, timeout); });
  }
  double elapsed(EventHandle from, EventHandle to) override {
    return around(Call::elapsed, {from, to}, [&] { return this->inner_->elapsed(from, to); });
  }

 protected:
  // May throw instead of the call. Its result is given to after().
  virtual std::uint64_t before(Call, const CallArguments&) { return 0; }
  // `failed`: the inner call threw. list: as in TraceRecord. Not called if before() threw.
  virtual void after(std::uint64_t /*token*/, Call, bool /*failed*/, std::uint64_t /*result*/, const CallArguments&,
                     const std::uint64_t* /*list*/, std::size_t /*count*/) noexcept {}

 private:
  static std::uint64_t number(const std::byte* address) noexcept { return reinterpret_cast<std::uintptr_t>(address); }
  static std::uint64_t number(std::uint64_t value) noexcept { return value; }
  static std::uint64_t number(bool value) noexcept { return value ? 1 : 0; }
  static std::uint64_t number(double) noexcept { return 0; }

  template <typename Body>
  auto around(Call call, const CallArguments& arguments, Body&& body, const std::uint64_t* list = nullptr,
              std::size_t count = 0) -> decltype(body()) {
    const std::uint64_t token = before(call, arguments);
    // Tells after() of a failure on the way out, whatever was thrown.
    struct Failure {
      Intercept* self;
      std::uint64_t token;
      Call call;
      const CallArguments& arguments;
      const std::uint64_t* list;
      std::size_t count;
      bool armed;
      ~Failure() {
        if (armed) self->after(token, call, true, 0, arguments, list, count);
      }
    } failure{this, token, call, arguments, list, count, true};
    if constexpr (std::is_void_v<decltype(body())>) {
      body();
      failure.armed = false;
      after(token, call, false, 0, arguments, list, count);
    } else {
      const auto result = body();
      failure.armed = false;
      after(token, call, false, number(result), arguments, list, count);
      return result;
    }
  }
};

}  // namespace remap
