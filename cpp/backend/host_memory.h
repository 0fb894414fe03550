// SPDX-License-Identifier: Apache-2.0
// Pages, regions and mappings of the host backend: one memfd, and ranges of it shown at reserved addresses.
//
// Concurrency: one mutex guards the tables and is held over the system calls that change mappings, so that the tables and
// the kernel never disagree for any thread (the kernel serialises such calls by its own lock anyway). It is not held while
// page tables are filled (populate), which can take long. Streams never take it: copies go on while mappings change.
//
// Fork: every mapping that shows a page is MADV_DONTFORK, so that a child has a hole there. Reservations alone are left
// as they are: touching one faults in the child as it does in the parent.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/mapping_table.h"
#include "backend/os_limits.h"
#include "backend/page_table.h"
#include "remap/backend.h"
#include "remap/backends.h"

namespace remap::host {

constexpr std::size_t kHugeBytes = std::size_t{2} << 20;  // what one page-table page covers: mremap moves such whole

using mapping::address_of;
using mapping::Address;
using mapping::Cell;
using mapping::MappingTable;
using mapping::number;
using mapping::Run;

inline void* pointer(Address address) noexcept { return reinterpret_cast<void*>(address); }

// The system calls that can fail half-way through a change; a test replaces them to make them fail.
// All return what the kernel returns and set errno.
struct System {
  virtual ~System() = default;
  virtual void* map(void* at, std::size_t bytes, int protection, int flags, int file, off_t offset) noexcept;
  virtual void* move(void* from, std::size_t bytes, void* to) noexcept;  // leaves `from` mapped, without its page tables
  virtual int protect(void* at, std::size_t bytes, int protection) noexcept;
  virtual int advise(void* at, std::size_t bytes, int advice) noexcept;
  virtual int punch(int file, off_t offset, std::size_t bytes) noexcept;
};

class HostMemory {
 public:
  HostMemory(std::size_t capacity_bytes, std::size_t page_bytes, std::shared_ptr<System> system = nullptr, int file = -1);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  // In a forked child: drops the file and leaves every address alone, as other things may stand there by now.
  void abandon() noexcept;

  std::size_t granularity() const noexcept { return granularity_; }
  bool can_exchange() const noexcept { return can_exchange_; }
  bool shared() const noexcept { return shared_; }
  void add_usage(Usage& usage) const;

  std::byte* reserve(std::size_t bytes, std::size_t alignment);
  void release(std::byte* address, std::size_t bytes);
  void retire(std::byte* address, std::size_t bytes);
  PageHandle create_page(std::size_t bytes);
  void destroy_page(PageHandle page);
  void map(std::byte* at, const PageHandle* pages, std::size_t count, std::size_t page_bytes);
  void unmap(std::byte* at, std::size_t bytes);
  void set_access(std::byte* at, std::size_t bytes, Access access);
  void exchange(std::byte* a, std::byte* b, std::size_t bytes);
  void populate(std::byte* at, std::size_t bytes);

  std::byte* allocate_host(std::size_t bytes);
  void free_host(std::byte* address, std::size_t bytes);
  void register_host(const std::byte* address, std::size_t bytes);
  void unregister_host(const std::byte* address, std::size_t bytes);
  // Nothing to do but to find it: all copies read all memory alike.
  void use_host(const std::byte* address, std::size_t bytes) const;

 private:
  struct HostRange {
    std::size_t bytes = 0;
    bool owned = false;  // allocated here; else registered
  };
  struct Move {
    Address from = 0;
    Address to = 0;
    std::size_t bytes = 0;
  };

  std::byte* reserve_addresses(std::size_t bytes, std::size_t alignment, const char* call);
  bool blank(Address at, std::size_t bytes) noexcept;  // a bare reservation stands there again
  void make_file();
  void join_file(int file);
  void make_ballast() noexcept;
  void drop_ballast() noexcept;
  void require_mappings(std::size_t more, const char* call) const;
  void show_runs(Address at, const std::vector<Run>& runs, std::size_t bytes);
  void move_runs(const std::vector<Run>& runs, Address from, Address to, std::vector<Move>& moves);
  void prepare_scratch(std::size_t bytes);
  bool probe_exchange() noexcept;
  void drop_host(const std::byte* address, std::size_t bytes, bool owned, const char* call);
  [[noreturn]] void fail(const char* call, int code, const os::Asked& asked) const;
  [[noreturn]] void fail_broken(const char* call, int code) const;

  std::shared_ptr<System> system_;
  std::size_t page_bytes_;
  std::size_t granularity_;
  std::size_t capacity_bytes_;
  std::size_t max_map_count_ = 0;
  std::size_t mapping_limit_ = 0;  // the arena's share of max_map_count
  bool huge_pages_ = false;
  bool can_exchange_ = false;
  int file_ = -1;
  const bool shared_;  // other processes use the file as well

  mutable std::mutex mutex_;  // guards all below
  MappingTable table_;
  mapping::PageTable pages_;
  std::map<Address, HostRange> host_ranges_;
  std::size_t host_bytes_ = 0;
  Address scratch_ = 0;  // where exchange keeps one side meanwhile; reserved once, grown when a larger exchange comes
  std::size_t scratch_bytes_ = 0;
  std::byte* ballast_ = nullptr;  // see make_ballast()
};

}  // namespace remap::host
