// SPDX-License-Identifier: Apache-2.0
// The pages of a backend by handle: which there are, how large, and behind how many ranges each stands.
//
// A handle is (generation << 32 | slot + 1): 0 is none, and that of a destroyed page is refused even when its slot has another
// page. The lowest free slot is taken first: host pages made together are then neighbours in the memfd and merge when mapped.
//
// Bookkeeping only, as mapping_table.h, and not synchronised: the lock of the backend that guards its MappingTable guards this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/mapping_table.h"
#include "remap/backend.h"

namespace remap::mapping {

class PageTable {
 public:
  struct Page {
    std::size_t bytes = 0;
    std::uint64_t driver_handle = 0;  // the driver's name for it, where there is a driver
    std::uint32_t generation = 0;     // counts the pages that had this slot, so that a stale handle is recognised
    std::uint32_t mapped = 0;         // ranges that show it
    bool used = false;
  };

  // ---- preconditions; each throws Error and changes nothing ---------------------------------------------------------
  // map's arguments, before `count * page_bytes` is formed: InvalidArgument
  static void require_some(std::size_t count, std::size_t page_bytes);
  std::uint32_t slot_of(PageHandle page, const char* call) const;  // InvalidArgument: unknown, or destroyed
  std::uint32_t require_unmapped(PageHandle page) const;           // destroy_page: that, or InvalidState while a range shows it
  // The pages that map() puts at `begin` and up, access none: that, or InvalidArgument for a page of another size.
  MappingTable::Cells cells(Address begin, const PageHandle* pages, std::size_t count, std::size_t page_bytes) const;

  // ---- changes; none of them throws but make_room ----------------------------------------------------------------------
  void make_room();  // for one page more, so that nothing can fail after the kernel or the driver has made it
  PageHandle add(std::size_t bytes, std::uint64_t driver_handle = 0) noexcept;  // pre: make_room()
  void remove(std::uint32_t slot) noexcept;                                     // pre: require_unmapped()
  void count_mapped(const MappingTable::Cells& cells) noexcept;
  void count_unmapped(const MappingTable& table, Address at, std::size_t bytes) noexcept;  // before the table forgets them

  // ---- looking -----------------------------------------------------------------------------------------------------
  const std::vector<Page>& slots() const noexcept { return slots_; }
  std::uint32_t next_slot() const noexcept { return free_.front(); }  // that add() will take. Pre: make_room()
  std::size_t bytes() const noexcept { return bytes_; }  // of all pages that there are

 private:
  std::vector<Page> slots_;
  std::vector<std::uint32_t> free_;  // a heap, lowest first, with room for every slot
  std::size_t bytes_ = 0;
};

}  // namespace remap::mapping
