// SPDX-License-Identifier: Apache-2.0
// The host backend: HostMemory (pages, regions, mappings) and HostStreams (copies, events) behind the Backend contract.
#include <pthread.h>

#include <atomic>
#include <memory>
#include <string>

#include "backend/host_memory.h"
#include "backend/host_stream.h"
#include "remap/backends.h"

namespace remap {
namespace {

constexpr std::size_t kMaxCopyThreads = 256;

// How often this process is a fork away from the one that loaded the library.
std::atomic<unsigned>& forks() noexcept {
  static std::atomic<unsigned> count{0};
  return count;
}

unsigned watch_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forks().fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return forks().load(std::memory_order_relaxed);
}

class HostBackend final : public Backend {
 public:
  explicit HostBackend(const HostOptions& options)
      : forks_(watch_forks()),
        memory_(std::make_unique<host::HostMemory>(options.capacity_bytes, options.page_bytes, nullptr, options.file)),
        streams_(make_streams(options.copy_threads)) {}

  // Streams first: memory that they still copy must stay mapped. In a forked child the threads do not exist and their locks may
  // be held for ever, so everything is left as it is; joining or destroying would hang.
  ~HostBackend() override {
    if (!forked()) return;
    memory_->abandon();
    (void)streams_.release();
    (void)memory_.release();
  }

  const char* name() const noexcept override { return "host"; }
  std::size_t granularity() const noexcept override { return memory_->granularity(); }
  bool new_pages_are_zero() const noexcept override { return !memory_->shared(); }
  bool can_exchange() const noexcept override { return memory_->can_exchange(); }
  Usage usage() const override {
    Usage usage;
    memory().add_usage(usage);
    streams().add_usage(usage);
    return usage;
  }

  std::byte* reserve(std::size_t bytes, std::size_t alignment) override { return memory().reserve(bytes, alignment); }
  void release(std::byte* address, std::size_t bytes) override { memory().release(address, bytes); }
  void retire(std::byte* address, std::size_t bytes) override { memory().retire(address, bytes); }
  PageHandle create_page(std::size_t bytes) override { return memory().create_page(bytes); }
  void destroy_page(PageHandle page) override { memory().destroy_page(page); }
  void map(std::byte* at, const PageHandle* pages, std::size_t count, std::size_t page_bytes) override {
    memory().map(at, pages, count, page_bytes);
  }
  void unmap(std::byte* at, std::size_t bytes) override { memory().unmap(at, bytes); }
  void set_access(std::byte* at, std::size_t bytes, Access access) override { memory().set_access(at, bytes, access); }
  void exchange(std::byte* a, std::byte* b, std::size_t bytes) override { memory().exchange(a, b, bytes); }
  void populate(std::byte* at, std::size_t bytes) override { memory().populate(at, bytes); }

  std::byte* allocate_host(std::size_t bytes) override { return memory().allocate_host(bytes); }
  void free_host(std::byte* address, std::size_t bytes) override { memory().free_host(address, bytes); }
  void register_host(const std::byte* address, std::size_t bytes, HostUse) override { memory().register_host(address, bytes); }
  void unregister_host(const std::byte* address, std::size_t bytes) override { memory().unregister_host(address, bytes); }
  void use_host(const std::byte* address, std::size_t bytes, HostUse) override { memory().use_host(address, bytes); }

  StreamHandle create_stream() override { return streams().create_stream(); }
  void destroy_stream(StreamHandle stream) override { streams().destroy_stream(stream); }
  void copy(StreamHandle stream, std::byte* to, const std::byte* from, std::size_t bytes) override {
    streams().copy(stream, to, from, bytes);
  }
  void copy_batch(StreamHandle stream, const CopyRange* ranges, std::size_t count) override {
    streams().copy_batch(stream, ranges, count);
  }
  void fill(StreamHandle stream, std::byte* to, std::uint8_t value, std::size_t bytes) override {
    streams().fill(stream, to, value, bytes);
  }
  EventHandle create_event(bool timed) override { return streams().create_event(timed); }
  void destroy_event(EventHandle event) override { streams().destroy_event(event); }
  void record(EventHandle event, StreamHandle stream) override { streams().record(event, stream); }
  void stream_wait(StreamHandle stream, EventHandle event) override { streams().stream_wait(stream, event); }
  bool query(EventHandle event) override { return streams().query(event); }
  bool synchronize(EventHandle event, std::chrono::nanoseconds timeout) override {
    return streams().synchronize(event, timeout);
  }
  double elapsed(EventHandle from, EventHandle to) override { return streams().elapsed(from, to); }

 private:
  static std::unique_ptr<host::HostStreams> make_streams(std::size_t copy_threads) {
    if (copy_threads == 0 || copy_threads > kMaxCopyThreads) {
      throw Error(ErrorKind::invalid_argument,
                  "host backend: expected copy_threads from 1 to " + std::to_string(kMaxCopyThreads) + ", got " +
                      std::to_string(copy_threads),
                  {{"copy_threads", static_cast<std::int64_t>(copy_threads)}});
    }
    return std::make_unique<host::HostStreams>(copy_threads);
  }

  bool forked() const noexcept { return forks().load(std::memory_order_relaxed) != forks_; }
  void guard() const {
    if (!forked()) return;
    throw Error(ErrorKind::forked_process,
                "host backend: this process was forked from the one that opened it, and has neither its pages nor its threads. "
                "Start workers with the 'spawn' method and open a backend there.");
  }
  host::HostMemory& memory() const {
    guard();
    return *memory_;
  }
  host::HostStreams& streams() const {
    guard();
    return *streams_;
  }

  const unsigned forks_;
  std::unique_ptr<host::HostMemory> memory_;
  std::unique_ptr<host::HostStreams> streams_;
};

}  // namespace

std::shared_ptr<Backend> make_host_backend(const HostOptions& options) { return std::make_shared<HostBackend>(options); }

}  // namespace remap
