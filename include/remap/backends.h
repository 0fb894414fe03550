// SPDX-License-Identifier: Apache-2.0
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
  // A memfd that other processes share, of exactly capacity_bytes and sealed against other sizes (F_SEAL_SHRINK, F_SEAL_GROW): the n-th
  // page that is made is the n-th of the file, in each process. It may hold any process's bytes, and none are given back when
  // pages are destroyed. Duplicated: it stays the caller's. -1: a new one of this process's own.
  int file = -1;
};

// Pages are ranges of one memfd (MAP_SHARED | MAP_FIXED); streams are worker threads; "host memory" is ordinary memory.
// Serves CPU inference inside a fixed amount of RAM.
std::shared_ptr<Backend> make_host_backend(const HostOptions& options);

enum class ShareableHandle : std::uint8_t { none, posix_fd, fabric };

// Pages of a device that several processes share. The process that makes them exports each by its number, as a file descriptor;
// the others import these, in the order of the numbers. Descriptors are closed again at once: a device has tens of thousands of pages.
// All calls may be made from any thread. The memory lives until the last process that has it lets go of it.
class CudaPages {
 public:
  virtual ~CudaPages() = default;
  virtual std::size_t page_bytes() const noexcept = 0;
  virtual std::size_t count() const = 0;
  virtual int device() const noexcept = 0;  // as this process counts it
  virtual const std::string& uuid() const noexcept = 0;
  // A new descriptor, the caller's to close. Throws invalid_argument for an unknown number.
  virtual int export_page(std::size_t number) const = 0;
  // The next page, of page_bytes(). The descriptor stays the caller's. Throws driver for one that is no page.
  virtual void import_page(int descriptor) = 0;
  // Let go of all pages: of those that a backend has, when it destroys them. They can be used for nothing new.
  virtual void close() = 0;
};
struct CudaPagesOptions {
  int device = 0;
  std::string uuid;            // if there is one: the device that has it (CudaDevice::uuid), whatever its number is here
  std::string library;         // as of CudaOptions
  std::size_t page_bytes = 0;  // a multiple of the device's granularity
  std::size_t count = 0;       // to make now; 0: all will be imported
};
// Throws as make_cuda_backend does, out_of_memory (requested, free, capacity), and invalid_state (uuid, devices) if this process does
// not see the device with that uuid. No other device is opened.
std::shared_ptr<CudaPages> make_cuda_pages(const CudaPagesOptions& options);

struct CudaOptions {
  int device = 0;             // as the driver counts them (CUDA_VISIBLE_DEVICES applies)
  std::string library;        // path of the driver library; empty: REMAP_LIBCUDA, else libcuda.so.1
  ShareableHandle shareable = ShareableHandle::none;  // what pages can be exported as; chosen when they are created
  bool gpu_direct_rdma = false;                       // NICs may register ranges that these pages stand behind
  // Page-locked host memory at most. 0: the environment variable REMAP_HOST_BUDGET ("24GiB", or a number of bytes); without that,
  // what the cgroup and the machine have to spare. LimitExceeded tells which it was (field limited_by).
  std::size_t host_budget_bytes = 0;
  // Host memory is page-locked in pieces of this many bytes (a multiple of 2 MiB), so that other threads' launches, which wait
  // for the driver's locks meanwhile, get in between. Copies of this backend's are cut where pieces end; others' (torch's) fail
  // across one. So: larger than a layer, smaller than what holds launches up for a second.
  std::size_t host_piece_bytes = std::size_t{1} << 30;
  // Of this device, made or imported: the n-th page that is made is the n-th of these, in each process. It may hold any process's
  // bytes, and none are given back when pages are destroyed. None: pages of this process's own.
  std::shared_ptr<CudaPages> pages;
};

// Pages are driver allocations (cuMemCreate), mapped by the driver's virtual memory calls into the device's primary context.
// Works beside torch and other users of that context. No CUDA toolkit or driver is needed to build or to import; drivers from
// CUDA 12.0 on serve. Pages may have any aligned size; map() takes pages of one size.
// Throws driver (with field `library` or `code`) where there is no driver, or one too old; invalid_argument for an unknown device,
// or a REMAP_HOST_BUDGET that is no size.
std::shared_ptr<Backend> make_cuda_backend(const CudaOptions& options);

struct CudaDevice {
  int index = 0;
  std::string name;
  std::string uuid;  // 32 hexadecimal digits: the same in each process, whatever CUDA_VISIBLE_DEVICES says
  std::size_t total_bytes = 0;
  std::size_t free_bytes = 0;
  bool vmm = false;                        // virtual memory management: needed
  std::size_t granularity = 0;             // of pages: the least
  std::size_t recommended_granularity = 0;
  bool posix_fd = false;
  bool fabric = false;
  bool gpu_direct_rdma = false;
  bool read_only_host_register = false;
  bool coherent = false;                   // the device reads pageable host memory through the host's page tables (GH200)
  bool integrated = false;
  int compute_major = 0, compute_minor = 0;
  int pcie_bus = 0, pcie_device = 0, pcie_domain = 0;
};
struct CudaProbe {
  std::string library;   // the library that was loaded
  int driver_version = 0;  // 13000 = CUDA 13.0
  bool emulated = false;   // the project's own emulated driver: proves order and bookkeeping, no speed
  std::size_t host_budget_bytes = 0;  // page-locked memory that an arena may take here now, if it is opened without a budget
  std::string host_limited_by;        // by what: "REMAP_HOST_BUDGET", "cgroup" or "machine"
  std::vector<CudaDevice> devices;
};
// The devices that are there, without opening an arena (`remap doctor`). Throws as make_cuda_backend does if no driver can be
// loaded.
CudaProbe probe_cuda(const std::string& library = {});

// Host memory that may be taken now, and what bounds it: `budget_bytes` ("host_budget") if that is not 0, else REMAP_HOST_BUDGET,
// whatever is in use of them; else what the process's cgroups ("cgroup") and the machine ("machine") can spare.
// Throws invalid_argument for a REMAP_HOST_BUDGET that is no size.
struct HostRoom {
  std::size_t bytes = 0;
  std::string limited_by;
};
HostRoom host_room(std::size_t budget_bytes = 0);
// The same of memory that is not page-locked: no budget bounds it.
HostRoom machine_room();

// A device in virtual time (sim.h). Seconds, bytes and bytes per second.
struct SimOptions {
  std::string machine = "custom";          // the name that a session shows
  std::size_t capacity_bytes = 0;          // create_page beyond it is out_of_memory
  std::size_t granularity = std::size_t{2} << 20;  // a power of two, at least an OS page
  double h2d_bytes_per_s = 0;              // of the link, host to device
  double d2h_bytes_per_s = 0;
  double hbm_bytes_per_s = 0;              // of the device's memory
  double duplex = 1;                       // the part of a direction's bandwidth that is left while the other one is busy
  double copy_setup_s = 0;                 // of each copy over the link, before its first byte
  double create_page_s = 0;                // driver calls, of the calling thread's time: per page,
  double map_s = 0;
  double unmap_s = 0;
  double set_access_s = 0;                 // and per call, which is one contiguous range
  bool contention = true;                  // copies over the link slow the kernels beside them
  bool backed = false;                     // pages hold bytes, and all have `granularity` bytes
};
// Throws invalid_argument (field `field`) for a capacity below one page, a bandwidth that is not above 0, a time below 0, a duplex
// outside of (0, 1], and, with contention, for links that together are not slower than the device's memory.
std::shared_ptr<SimBackend> make_sim_backend(const SimOptions& options);

// One logged call. Addresses, handles and sizes are those of the traced backend; `replay` (decorators.h) translates them.
struct TraceRecord {
  Call call = Call::reserve;
  bool failed = false;
  std::uint64_t result = 0;               // address or handle returned, or the boolean; 0 for elapsed
  std::array<std::uint64_t, 5> args{};    // in the order of the call's parameters, without what is in `list`; timeouts in ns
  std::vector<std::uint64_t> list;        // of map: its pages; of copy_batch: to, from and bytes of each range
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
// Refuses calls that would pass a limit with LimitExceeded; the count is reserved before the inner call is made and given back
// if that throws, and dropped only after a release succeeded, so that the limit holds under concurrency.
std::shared_ptr<Backend> make_limit_backend(std::shared_ptr<Backend> inner, const Limits& limits);

}  // namespace remap
