// How to make the backends and the decorators. The classes behind make_* are private.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "remap/backend.h"

namespace remap {

struct HostOptions {
  std::size_t capacity_bytes = 0;  // the memfd's size: create_page beyond it is OutOfMemory; a multiple of page_bytes
  std::size_t page_bytes = 0;      // every page has this size
  std::size_t copy_threads = 1;    // threads that share one copy
};

// Pages are ranges of one memfd (MAP_SHARED | MAP_FIXED); streams are worker threads; "host memory" is ordinary memory.
// Serves CPU inference inside a fixed amount of RAM.
std::shared_ptr<Backend> make_host_backend(const HostOptions& options);

// One logged call. Addresses, handles and sizes are those of the traced backend; `replay` (decorators.h) translates them.
struct TraceRecord {
  Call call = Call::reserve;
  bool failed = false;
  std::uint64_t result = 0;               // address or handle returned, or the boolean; 0 for elapsed
  std::array<std::uint64_t, 5> args{};    // in the order of the call's parameters, without map's `pages`; timeouts in ns
  std::vector<std::uint64_t> pages;       // of map
};

// Logs every call. count(call) is cheap and exact; the log can be switched off, the counters stay.
class TraceBackend;
std::shared_ptr<TraceBackend> make_trace_backend(std::shared_ptr<Backend> inner);

// Fails the n-th call of a kind (1 = the next), once or for ever from then on. See decorators.h.
class FaultBackend;
std::shared_ptr<FaultBackend> make_fault_backend(std::shared_ptr<Backend> inner);

struct Limits {
  static constexpr std::size_t kNone = ~std::size_t{0};
  std::size_t page_bytes = kNone;
  std::size_t reserved_bytes = kNone;
  std::size_t mappings = kNone;  // pages mapped, each alias counted: how many kernel mappings these need differs by backend
  std::size_t host_bytes = kNone;
  std::size_t streams = kNone;
  std::size_t events = kNone;
};
// Refuses what would pass a limit with LimitExceeded; the count is reserved before the inner call is made and given back
// if that throws, and dropped only after a release succeeded, so that the limit holds under concurrency.
std::shared_ptr<Backend> make_limit_backend(std::shared_ptr<Backend> inner, const Limits& limits);

}  // namespace remap
