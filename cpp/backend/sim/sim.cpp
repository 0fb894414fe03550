// SPDX-License-Identifier: Apache-2.0
// The sim backend: Memory (what lies where) and Clock (when what happens) behind the Backend contract.
#include "remap/sim.h"

#include <unistd.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>
#include <utility>

#include "backend/sim/clock.h"
#include "backend/sim/memory.h"
#include "remap/fork.h"

namespace remap {
namespace {

using sim::Touched;

[[noreturn]] void refuse(const char* field, const std::string& expected, double got) {
  throw Error(ErrorKind::invalid_argument,
              std::string("sim backend: expected ") + field + " " + expected + ", got " + std::to_string(got) +
                  ". Nothing was created.",
              {{"field", std::string(field)}, {"value", std::to_string(got)}});
}

const SimOptions& checked(const SimOptions& options) {
  const auto os_page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t unit = options.granularity;
  if (unit < os_page || (unit & (unit - 1)) != 0) {
    refuse("granularity", "to be a power of two and at least " + std::to_string(os_page), static_cast<double>(unit));
  }
  if (options.capacity_bytes < unit) {
    refuse("capacity_bytes", "to be at least one page of " + std::to_string(unit), static_cast<double>(options.capacity_bytes));
  }
  for (const auto& [field, rate] : {std::pair("h2d_bytes_per_s", options.h2d_bytes_per_s),
                                    std::pair("d2h_bytes_per_s", options.d2h_bytes_per_s),
                                    std::pair("hbm_bytes_per_s", options.hbm_bytes_per_s)}) {
    if (!std::isfinite(rate) || rate <= 0) refuse(field, "to be finite and above 0", rate);
  }
  if (!(options.duplex > 0 && options.duplex <= 1)) refuse("duplex", "above 0 and at most 1", options.duplex);
  for (const auto& [field, time] :
       {std::pair("copy_setup_s", options.copy_setup_s), std::pair("create_page_s", options.create_page_s),
        std::pair("map_s", options.map_s), std::pair("unmap_s", options.unmap_s),
        std::pair("set_access_s", options.set_access_s)}) {
    if (!std::isfinite(time) || time < 0) refuse(field, "to be finite and at least 0", time);
  }
  if (options.contention && options.h2d_bytes_per_s + options.d2h_bytes_per_s >= options.hbm_bytes_per_s) {
    refuse("hbm_bytes_per_s", "above what the link moves in both directions, or contention=False: kernels are left the rest",
           options.hbm_bytes_per_s);
  }
  return options;
}

class SimDevice final : public SimBackend, public std::enable_shared_from_this<SimDevice> {
 public:
  explicit SimDevice(const SimOptions& options)
      : generation_(fork_generation()),
        options_(checked(options)),
        memory_(options.capacity_bytes, options.granularity, options.backed),
        clock_(options_) {}

  ~SimDevice() override {
    if (fork_generation() != generation_) memory_.abandon();
  }

  const char* name() const noexcept override { return "sim"; }
  std::size_t granularity() const noexcept override { return memory_.granularity(); }
  bool can_exchange() const noexcept override { return false; }
  DeviceInfo device() const override { return {DeviceInfo::Kind::sim, 0, options_.backed}; }
  std::shared_ptr<SimBackend> simulator() override { return shared_from_this(); }
  Usage usage() const override {
    guard();
    Usage usage;
    memory_.add_usage(usage);
    clock_.add_usage(usage);
    return usage;
  }

  // ---- memory ----
  std::byte* reserve(std::size_t bytes, std::size_t alignment) override { return memory().reserve(bytes, alignment); }
  void release(std::byte* address, std::size_t bytes) override { memory().release(address, bytes); }
  void retire(std::byte* address, std::size_t bytes) override { memory().retire(address, bytes); }
  PageHandle create_page(std::size_t bytes) override {
    const PageHandle page = memory().create_page(bytes);
    clock_.spend(options_.create_page_s);
    return page;
  }
  void destroy_page(PageHandle page) override { memory().destroy_page(page); }
  void map(std::byte* at, const PageHandle* pages, std::size_t count, std::size_t page_bytes) override {
    memory().map(at, pages, count, page_bytes);
    clock_.spend(static_cast<double>(count) * options_.map_s);
  }
  void unmap(std::byte* at, std::size_t bytes) override {
    const std::size_t count = memory().unmap(at, bytes);
    clock_.spend(static_cast<double>(count) * options_.unmap_s);
  }
  void set_access(std::byte* at, std::size_t bytes, Access access) override {
    memory().set_access(at, bytes, access);
    clock_.spend_mapping(options_.set_access_s, touched(at, bytes));
  }
  void exchange(std::byte*, std::byte*, std::size_t bytes) override {
    guard();
    throw Error(ErrorKind::invalid_state, "exchange: a driver cannot move mappings. Nothing changed. Unmap and map.",
                {{"operation", std::string("exchange")}, {"bytes", static_cast<std::int64_t>(bytes)}});
  }
  void populate(std::byte* at, std::size_t bytes) override { memory().populate(at, bytes); }

  std::byte* allocate_host(std::size_t bytes) override { return memory().allocate_host(bytes); }
  void free_host(std::byte* address, std::size_t bytes) override { memory().free_host(address, bytes); }
  void register_host(const std::byte* address, std::size_t bytes, HostUse) override { memory().register_host(address, bytes); }
  void unregister_host(const std::byte* address, std::size_t bytes) override { memory().unregister_host(address, bytes); }
  void use_host(const std::byte* address, std::size_t bytes, HostUse) override { memory().use_host(address, bytes); }

  // ---- streams and events ----
  StreamHandle create_stream() override { return clock().create_stream(); }
  void destroy_stream(StreamHandle stream) override { clock().destroy_stream(stream); }
  StreamHandle adopt_stream(std::uint64_t native) override { return clock().adopt_stream(native); }
  void forget_stream(StreamHandle stream) override { clock().forget_stream(stream); }

  void copy(StreamHandle stream, std::byte* to, const std::byte* from, std::size_t bytes) override {
    clock().require_stream(stream, "copy");
    const CopyRange range{to, from, bytes};
    make(stream, range, sides("copy", range));
  }
  // Each of them by itself: a call's cost is not modelled.
  void copy_batch(StreamHandle stream, const CopyRange* ranges, std::size_t count) override {
    clock().require_stream(stream, "copy_batch");
    std::vector<Sides> all;
    all.reserve(count);
    for (std::size_t i = 0; i < count; ++i) all.push_back(sides("copy_batch", ranges[i]));
    for (std::size_t i = 0; i < count; ++i) make(stream, ranges[i], all[i]);
  }
  void fill(StreamHandle stream, std::byte* to, std::uint8_t value, std::size_t bytes) override {
    clock().require_stream(stream, "fill");
    if (to == nullptr) null("fill", bytes);
    (void)memory_.holds(to, bytes, Access::read_write, "fill");
    clock_.fill(stream, touched(to, bytes));
    if (options_.backed && bytes != 0) std::memset(to, value, bytes);
  }

  EventHandle create_event(bool timed) override { return clock().create_event(timed); }
  void destroy_event(EventHandle event) override { clock().destroy_event(event); }
  void record(EventHandle event, StreamHandle stream) override { clock().record(event, stream); }
  void stream_wait(StreamHandle stream, EventHandle event) override { clock().stream_wait(stream, event); }
  bool query(EventHandle event) override { return clock().query(event); }
  bool synchronize(EventHandle event, std::chrono::nanoseconds timeout) override { return clock().synchronize(event, timeout); }
  double elapsed(EventHandle from, EventHandle to) override { return clock().elapsed(from, to); }

  // ---- the clock ----
  const SimOptions& options() const noexcept override { return options_; }
  double now() const override { return clock_.now(); }
  void advance(double seconds) override { clock_.advance(seconds); }
  void advance_to(double time) override { clock_.advance_to(time); }
  double compute(StreamHandle stream, double seconds) override { return clock().compute(stream, seconds); }
  double stream_end(StreamHandle stream) const override { return clock_.stream_end(stream); }
  void hold(StreamHandle stream, double time) override { clock().hold(stream, time); }
  void finish(StreamHandle stream) override { clock().finish(stream); }
  void join() override { clock().join(); }
  SimTraffic traffic(SimRoute route) const override { return clock_.traffic(route); }

 private:
  static Touched touched(const std::byte* at, std::size_t bytes) noexcept { return {sim::address_of(at), bytes}; }
  [[noreturn]] static void null(const char* call, std::size_t bytes) {
    throw Error(ErrorKind::invalid_argument, std::string(call) + ": expected addresses, got null. Nothing changed.",
                {{"bytes", static_cast<std::int64_t>(bytes)}});
  }
  // Which ends of a copy lie in regions.
  struct Sides {
    bool to = false;
    bool from = false;
  };
  Sides sides(const char* call, const CopyRange& range) {
    if (range.to == nullptr || range.from == nullptr) null(call, range.bytes);
    return {memory_.holds(range.to, range.bytes, Access::read_write, call),
            memory_.holds(range.from, range.bytes, Access::read, call)};
  }
  void make(StreamHandle stream, const CopyRange& range, Sides ours) {
    // From host memory to host memory as well: it goes by the device's copy engine.
    const SimRoute route = !ours.from ? SimRoute::to_device : ours.to ? SimRoute::inside_device : SimRoute::to_host;
    clock_.copy(stream, route, range.bytes, ours.to ? touched(range.to, range.bytes) : Touched{},
                ours.from ? touched(range.from, range.bytes) : Touched{});
    if (options_.backed && range.bytes != 0) std::memmove(range.to, range.from, range.bytes);
  }
  void guard() const { refuse_fork(generation_); }
  sim::Memory& memory() {
    guard();
    return memory_;
  }
  sim::Clock& clock() {
    guard();
    return clock_;
  }

  const unsigned generation_;
  const SimOptions options_;
  sim::Memory memory_;
  sim::Clock clock_;
};

}  // namespace

std::shared_ptr<SimBackend> make_sim_backend(const SimOptions& options) { return std::make_shared<SimDevice>(options); }

}  // namespace remap
