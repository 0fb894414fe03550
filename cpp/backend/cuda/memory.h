// SPDX-License-Identifier: Apache-2.0
// Regions, pages and mappings of the cuda backend: the driver's virtual memory management, with books of our own.
//
// The driver checks little and says less (an unknown handle is undefined behaviour), so every precondition of the contract is
// checked against the books before the driver is called, and the books change after it has answered.
//
// Concurrency: `changing_` is held over the driver's calls, so that the books and the driver never disagree for a thread that
// makes changes. Those calls are slow (tens of microseconds a page), and copies must not wait for them: a copy only looks at
// the books, which `books_` guards; the thread that changes them holds it for the moment of the change, after the driver's call.
// Order: changing_, then books_. A holder of changing_ alone may read the books: no other thread can write them.
//
// Nothing here waits for the device: that a range is not in use any more is the caller's business.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "backend/cuda/context.h"
#include "backend/cuda/shared_pages.h"
#include "backend/mapping_table.h"
#include "backend/page_table.h"
#include "remap/backend.h"

namespace remap::cuda {

using mapping::Address;
using mapping::address_of;

class Memory {
 public:
  // shared: where pages come from, and what they go back to; null: each is made, and released.
  Memory(const Context& context, const AllocationProperties& properties, std::size_t granularity,
         std::shared_ptr<SharedPages> shared);
  ~Memory();  // gives everything back; nothing may be using it
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::size_t granularity() const noexcept { return granularity_; }
  void add_usage(Usage& usage) const;

  std::byte* reserve(std::size_t bytes, std::size_t alignment);
  void release(std::byte* address, std::size_t bytes);
  void retire(std::byte* address, std::size_t bytes);
  PageHandle create_page(std::size_t bytes);
  void destroy_page(PageHandle page);
  void map(std::byte* at, const PageHandle* pages, std::size_t count, std::size_t page_bytes);
  void unmap(std::byte* at, std::size_t bytes);
  void set_access(std::byte* at, std::size_t bytes, Access access);
  void populate(std::byte* at, std::size_t bytes) const;

  // Whether a copy's range is in our regions; throws invalid_state if it is but is not mapped with that access.
  bool holds(const std::byte* at, std::size_t bytes, Access least, const char* call) const;

 private:
  Result set_driver_access(Address at, std::size_t bytes, Access access) const noexcept;
  void restore_access(const std::vector<std::pair<Address, mapping::Cell>>& before, Result code);
  [[noreturn]] void fail_broken(const char* operation, const char* entry, Result first, Result undoing) const;

  const Context& context_;
  const Driver& driver_;
  const AllocationProperties properties_;
  const std::size_t granularity_;
  const std::shared_ptr<SharedPages> shared_;

  mutable std::mutex changing_;
  mutable std::shared_mutex books_;  // guards all below
  mapping::MappingTable table_;
  mapping::PageTable pages_;
  // Ranges whose unmapping failed while a failed map was undone: the arena is broken, the destructor tries once more.
  std::vector<std::pair<Address, std::size_t>> stranded_;
};

}  // namespace remap::cuda
