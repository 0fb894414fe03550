// SPDX-License-Identifier: Apache-2.0
// Regions, pages, mappings and host memory of the sim backend: the books of a device, with or without bytes behind them.
//
// Unbacked: a region, and allocated host memory, is address space with no access (it costs nothing and touching it faults);
// a page is a number. Backed: the host backend's memory, with the books beside it, which copies ask what lies in a region.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "backend/host_memory.h"
#include "backend/mapping_table.h"
#include "backend/page_table.h"
#include "remap/backend.h"

namespace remap::sim {

using mapping::Address;
using mapping::address_of;

class Memory {
 public:
  Memory(std::size_t capacity_bytes, std::size_t granularity, bool backed);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  // In a forked child: leaves every address alone.
  void abandon() noexcept;

  std::size_t granularity() const noexcept { return granularity_; }
  void add_usage(Usage& usage) const;

  std::byte* reserve(std::size_t bytes, std::size_t alignment);
  void release(std::byte* address, std::size_t bytes);
  void retire(std::byte* address, std::size_t bytes);
  PageHandle create_page(std::size_t bytes);
  void destroy_page(PageHandle page);
  void map(std::byte* at, const PageHandle* pages, std::size_t count, std::size_t page_bytes);
  std::size_t unmap(std::byte* at, std::size_t bytes);  // how many pages that was
  void set_access(std::byte* at, std::size_t bytes, Access access);
  void populate(std::byte* at, std::size_t bytes);

  std::byte* allocate_host(std::size_t bytes);
  void free_host(std::byte* address, std::size_t bytes);
  void register_host(const std::byte* address, std::size_t bytes);
  void unregister_host(const std::byte* address, std::size_t bytes);
  // Nothing to do but to find it: all copies read all memory alike.
  void use_host(const std::byte* address, std::size_t bytes) const;

  // Whether a copy's range is in our regions; throws invalid_state if it is but is not mapped with that access.
  bool holds(const std::byte* at, std::size_t bytes, Access least, const char* call);

 private:
  struct HostRange {
    std::size_t bytes = 0;
    bool owned = false;  // allocated here; else registered
  };
  struct Seen {
    std::size_t bytes = 0;
    Access access = Access::none;
  };

  std::byte* take_addresses(std::size_t bytes, std::size_t alignment, const char* call) const;
  void give_addresses(Address at, std::size_t bytes) const noexcept;
  void drop_host(const std::byte* address, std::size_t bytes, bool owned, const char* call);

  const std::size_t capacity_bytes_;
  const std::size_t os_page_;
  std::unique_ptr<host::HostMemory> bytes_;  // null where nothing is backed
  const std::size_t granularity_;

  mutable std::mutex mutex_;  // guards all below
  mapping::MappingTable table_;
  mapping::PageTable pages_;  // none where pages are backed: bytes_ has them
  std::map<Address, HostRange> host_ranges_;
  std::size_t host_bytes_ = 0;
  // Ranges found accessible since a mapping was changed last: the same ones are copied to again and again.
  std::unordered_map<Address, Seen> seen_;
};

}  // namespace remap::sim
