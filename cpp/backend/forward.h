// SPDX-License-Identifier: Apache-2.0
// The base of every decorator: each call goes to the inner backend. A decorator overrides the calls that it changes.
//
// Base is Backend, or the public interface of a decorator that has one (FaultBackend, TraceBackend).
#pragma once

#include <memory>
#include <utility>

#include "remap/backend.h"

namespace remap {

template <typename Base>
class Forward : public Base {
 public:
  explicit Forward(std::shared_ptr<Backend> inner) : inner_(std::move(inner)) {
    if (!inner_) throw Error(ErrorKind::invalid_argument, "a decorator needs a backend to wrap, got none");
  }

  const char* name() const noexcept override { return inner_->name(); }
  std::size_t granularity() const noexcept override { return inner_->granularity(); }
  bool new_pages_are_zero() const noexcept override { return inner_->new_pages_are_zero(); }
  bool can_exchange() const noexcept override { return inner_->can_exchange(); }
  Usage usage() const override { return inner_->usage(); }
  DeviceInfo device() const override { return inner_->device(); }
  std::shared_ptr<SimBackend> simulator() override { return inner_->simulator(); }

  std::byte* reserve(std::size_t bytes, std::size_t alignment) override { return inner_->reserve(bytes, alignment); }
  void release(std::byte* address, std::size_t bytes) override { inner_->release(address, bytes); }
  void retire(std::byte* address, std::size_t bytes) override { inner_->retire(address, bytes); }
  PageHandle create_page(std::size_t bytes) override { return inner_->create_page(bytes); }
  void destroy_page(PageHandle page) override { inner_->destroy_page(page); }
  void map(std::byte* at, const PageHandle* pages, std::size_t count, std::size_t page_bytes) override {
    inner_->map(at, pages, count, page_bytes);
  }
  void unmap(std::byte* at, std::size_t bytes) override { inner_->unmap(at, bytes); }
  void set_access(std::byte* at, std::size_t bytes, Access access) override { inner_->set_access(at, bytes, access); }
  void exchange(std::byte* a, std::byte* b, std::size_t bytes) override { inner_->exchange(a, b, bytes); }
  void populate(std::byte* at, std::size_t bytes) override { inner_->populate(at, bytes); }

  std::byte* allocate_host(std::size_t bytes) override { return inner_->allocate_host(bytes); }
  void free_host(std::byte* address, std::size_t bytes) override { inner_->free_host(address, bytes); }
  void register_host(const std::byte* address, std::size_t bytes, HostUse use) override {
    inner_->register_host(address, bytes, use);
  }
  void unregister_host(const std::byte* address, std::size_t bytes) override { inner_->unregister_host(address, bytes); }
  void use_host(const std::byte* address, std::size_t bytes, HostUse use) override { inner_->use_host(address, bytes, use); }

  StreamHandle create_stream() override { return inner_->create_stream(); }
  void destroy_stream(StreamHandle stream) override { inner_->destroy_stream(stream); }
  StreamHandle adopt_stream(std::uint64_t native) override { return inner_->adopt_stream(native); }
  void forget_stream(StreamHandle stream) override { inner_->forget_stream(stream); }
  void copy(StreamHandle stream, std::byte* to, const std::byte* from, std::size_t bytes) override {
    inner_->copy(stream, to, from, bytes);
  }
  void copy_batch(StreamHandle stream, const CopyRange* ranges, std::size_t count) override {
    inner_->copy_batch(stream, ranges, count);
  }
  void fill(StreamHandle stream, std::byte* to, std::uint8_t value, std::size_t bytes) override {
    inner_->fill(stream, to, value, bytes);
  }
  EventHandle create_event(bool timed) override { return inner_->create_event(timed); }
  void destroy_event(EventHandle event) override { inner_->destroy_event(event); }
  void record(EventHandle event, StreamHandle stream) override { inner_->record(event, stream); }
  void stream_wait(StreamHandle stream, EventHandle event) override { inner_->stream_wait(stream, event); }
  bool query(EventHandle event) override { return inner_->query(event); }
  bool synchronize(EventHandle event, std::chrono::nanoseconds timeout) override { return inner_->synchronize(event, timeout); }
  double elapsed(EventHandle from, EventHandle to) override { return inner_->elapsed(from, to); }

 protected:
  std::shared_ptr<Backend> inner_;
};

}  // namespace remap
