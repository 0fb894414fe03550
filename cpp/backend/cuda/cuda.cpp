// SPDX-License-Identifier: Apache-2.0
// The cuda backend: Memory (pages, regions, mappings), LockedMemory (host memory) and Streams (copies, events) in the device's
// primary context, behind the Backend contract.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "backend/cuda/device.h"
#include "backend/cuda/locked_memory.h"
#include "backend/cuda/memory.h"
#include "backend/cuda/stream.h"
#include "remap/backends.h"
#include "remap/fork.h"

namespace remap {
namespace {

using namespace cuda;

// Batches of copies were seen to crash and to hang on devices of this generation (driver 580; vllm-project/vllm#49276,
// InternLM/lmdeploy#4838). There each copy is a call. Not tried by us.
constexpr int kBlackwell = 10;

void refuse_option(bool wanted, bool offered, const char* option, const CudaDevice& device) {
  if (!wanted || offered) return;
  throw Error(ErrorKind::invalid_argument,
              std::string("cuda backend: device ") + std::to_string(device.index) + " (" + device.name + ") cannot do " + option +
                  ". Nothing was opened. Leave the option out; `remap doctor` lists what the device can do.",
              {{"device", std::int64_t{device.index}}, {"option", std::string(option)}});
}

// Compares the options with the device's abilities, before anything is opened on it.
CudaDevice checked_device(const Driver& driver, const CudaOptions& options) {
  constexpr std::size_t kPieceUnit = std::size_t{2} << 20;  // a huge page
  if (options.host_piece_bytes == 0 || options.host_piece_bytes % kPieceUnit != 0) {
    throw Error(ErrorKind::invalid_argument,
                "cuda backend: host_piece_bytes must be a multiple of 2 MiB above 0, got " + std::to_string(options.host_piece_bytes) +
                    ". Nothing was opened.",
                {{"host_piece_bytes", static_cast<std::int64_t>(options.host_piece_bytes)}});
  }
  CudaDevice device = describe(driver, options.device);
  if (!device.vmm) {
    throw Error(ErrorKind::driver,
                "cuda backend: device " + std::to_string(device.index) + " (" + device.name +
                    ") has no virtual memory management. Nothing was opened. Use another device, or \"cpu\".",
                {{"device", std::int64_t{device.index}}, {"code", std::int64_t{result::kNotSupported}}});
  }
  refuse_option(options.shareable == ShareableHandle::posix_fd, device.posix_fd, "shareable handles of kind posix_fd", device);
  refuse_option(options.shareable == ShareableHandle::fabric, device.fabric, "shareable handles of kind fabric", device);
  refuse_option(options.gpu_direct_rdma, device.gpu_direct_rdma, "gpu_direct_rdma", device);
  return device;
}

std::shared_ptr<SharedPages> shared_of(const CudaOptions& options) {
  if (options.pages == nullptr) return nullptr;
  const auto shared = std::dynamic_pointer_cast<SharedPages>(options.pages);
  if (shared != nullptr && shared->device() == options.device) return shared;
  throw Error(ErrorKind::invalid_argument,
              "cuda backend: the shared pages are not of device " + std::to_string(options.device) + ". Nothing was opened.",
              {{"device", std::int64_t{options.device}}});
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(const Driver& driver, const CudaOptions& options)
      : generation_(fork_generation()),
        emulated_(driver.emulated),
        device_(checked_device(driver, options)),
        context_(std::make_unique<Context>(driver, device_of(driver, options.device))),
        locked_(std::make_unique<LockedMemory>(
            *context_, LockedMemory::Options{cuda::user_budget(options.host_budget_bytes), options.host_piece_bytes, device_.read_only_host_register,
                                             device_.coherent})),
        streams_(std::make_unique<Streams>(*context_, *locked_, device_.compute_major < kBlackwell)) {
    const AllocationProperties properties =
        allocation_properties(context_->device(), options.shareable, options.gpu_direct_rdma);
    memory_ = std::make_unique<Memory>(*context_, properties, cuda::granularity(driver, properties, kGranularityMinimum),
                                       shared_of(options));
  }

  // Streams first: memory that they still copy must stay mapped and locked. A forked child has neither the context nor the right
  // to touch it, and locks may be held there for ever: everything is left as it is.
  ~CudaBackend() override {
    if (fork_generation() == generation_) {
      streams_.reset();
      locked_.reset();
      memory_.reset();
      context_.reset();
      return;
    }
    (void)streams_.release();
    (void)locked_.release();
    (void)memory_.release();
    (void)context_.release();
  }

  const char* name() const noexcept override { return "cuda"; }
  std::size_t granularity() const noexcept override { return memory_->granularity(); }
  bool can_exchange() const noexcept override { return false; }
  DeviceInfo device() const override { return {DeviceInfo::Kind::cuda, device_.index, emulated_}; }
  Usage usage() const override {
    guard();
    Usage usage;
    memory_->add_usage(usage);
    locked_->add_usage(usage);
    streams_->add_usage(usage);
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
  void exchange(std::byte*, std::byte*, std::size_t bytes) override {
    guard();
    throw Error(ErrorKind::invalid_state, "exchange: the driver cannot move mappings. Nothing changed. Unmap and map.",
                {{"operation", std::string("exchange")}, {"bytes", static_cast<std::int64_t>(bytes)}});
  }
  void populate(std::byte* at, std::size_t bytes) override { memory().populate(at, bytes); }

  std::byte* allocate_host(std::size_t bytes) override { return locked().allocate(bytes); }
  void free_host(std::byte* address, std::size_t bytes) override { locked().free(address, bytes); }
  void register_host(const std::byte* address, std::size_t bytes, HostUse use) override {
    locked().register_range(address, bytes, use);
  }
  void unregister_host(const std::byte* address, std::size_t bytes) override { locked().unregister_range(address, bytes); }
  void use_host(const std::byte* address, std::size_t bytes, HostUse use) override { locked().use_range(address, bytes, use); }

  StreamHandle create_stream() override { return streams().create_stream(); }
  void destroy_stream(StreamHandle stream) override { streams().destroy_stream(stream); }
  StreamHandle adopt_stream(std::uint64_t native) override { return streams().adopt_stream(native); }
  void forget_stream(StreamHandle stream) override { streams().forget_stream(stream); }

  void copy(StreamHandle stream, std::byte* to, const std::byte* from, std::size_t bytes) override {
    guard();
    std::vector<CopyPart> parts;
    add_parts({to, from, bytes}, "copy", parts);
    streams_->copy(stream, parts, "copy");
  }
  void copy_batch(StreamHandle stream, const CopyRange* ranges, std::size_t count) override {
    guard();
    std::vector<CopyPart> parts;
    parts.reserve(count);
    for (const CopyRange* each = ranges; each != ranges + count; ++each) add_parts(*each, "copy_batch", parts);
    streams_->copy(stream, parts, "copy_batch");
  }
  void fill(StreamHandle stream, std::byte* to, std::uint8_t value, std::size_t bytes) override {
    guard();
    if (to == nullptr) {
      throw Error(ErrorKind::invalid_argument, "fill: expected an address, got null. Nothing changed.",
                  {{"bytes", static_cast<std::int64_t>(bytes)}});
    }
    const bool ours = memory_->holds(to, bytes, Access::read_write, "fill");
    const bool locked = !ours && locked_->holds(to, bytes);
    std::vector<std::size_t> parts;
    for (std::size_t at = 0; at < bytes; at += parts.back()) {
      parts.push_back(locked ? std::min(bytes - at, locked_->piece_at(to + at)) : bytes - at);
    }
    streams_->fill(stream, to, value, parts);
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
  void guard() const { refuse_fork(generation_); }
  // The part of the copy that the driver takes at once, behind `parts`.
  void add_parts(const CopyRange& copy, const char* call, std::vector<CopyPart>& parts) const {
    if (copy.to == nullptr || copy.from == nullptr) {
      throw Error(ErrorKind::invalid_argument, std::string(call) + ": expected two addresses, got null. Nothing changed.",
                  {{"bytes", static_cast<std::int64_t>(copy.bytes)}});
    }
    const bool to_ours = memory_->holds(copy.to, copy.bytes, Access::read_write, call);
    const bool from_ours = memory_->holds(copy.from, copy.bytes, Access::read, call);
    const bool to_locked = !to_ours && locked_->holds(copy.to, copy.bytes);
    const auto from_host = from_ours ? std::nullopt : locked_->use_of(copy.from, copy.bytes);
    const bool from_locked = from_host == HostUse::locked;
    Direction direction = to_ours && from_ours ? Direction::inside_device : Direction::unknown;
    if (to_ours && from_locked) direction = Direction::to_device;
    if (to_ours && from_host == HostUse::staged) direction = Direction::staged;
    if (to_locked && from_ours) direction = Direction::to_host;
    for (std::size_t at = 0; at < copy.bytes;) {
      std::size_t some = copy.bytes - at;
      if (to_locked) some = std::min(some, locked_->piece_at(copy.to + at));
      if (from_locked) some = std::min(some, locked_->piece_at(copy.from + at));
      parts.push_back({copy.to + at, copy.from + at, some, direction});
      at += some;
    }
  }
  Memory& memory() const {
    guard();
    return *memory_;
  }
  LockedMemory& locked() const {
    guard();
    return *locked_;
  }
  Streams& streams() const {
    guard();
    return *streams_;
  }

  const unsigned generation_;
  const bool emulated_;
  const CudaDevice device_;
  std::unique_ptr<Context> context_;
  std::unique_ptr<LockedMemory> locked_;
  std::unique_ptr<Streams> streams_;
  std::unique_ptr<Memory> memory_;
};

}  // namespace

std::shared_ptr<Backend> make_cuda_backend(const CudaOptions& options) {
  const Driver& driver = load_driver(options.library);
  initialize(driver);
  return std::make_shared<CudaBackend>(driver, options);
}

}  // namespace remap
