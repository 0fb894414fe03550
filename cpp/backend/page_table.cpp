// SPDX-License-Identifier: Apache-2.0
#include "backend/page_table.h"

#include <algorithm>
#include <functional>
#include <string>

namespace remap::mapping {

void PageTable::require_some(std::size_t count, std::size_t page_bytes) {
  if (page_bytes != 0 && count != 0 && count <= ~std::size_t{0} / page_bytes) return;
  throw Error(ErrorKind::invalid_argument,
              "map: expected at least one page with a size above 0, got " + std::to_string(count) + " of " +
                  std::to_string(page_bytes) + " bytes. Nothing changed.",
              {{"count", number(count)}, {"page_bytes", number(page_bytes)}});
}

std::uint32_t PageTable::slot_of(PageHandle page, const char* call) const {
  const std::uint64_t index = (page & 0xffffffffu) - 1;  // wraps for 0, which is then out of range
  if (index >= slots_.size() || !slots_[index].used || slots_[index].generation != page >> 32) {
    throw Error(ErrorKind::invalid_argument,
                std::string(call) + ": page " + std::to_string(page) + " is not a page of this backend (or is destroyed). " +
                    "Nothing changed.",
                {{"call", std::string(call)}, {"page", static_cast<std::int64_t>(page)}});
  }
  return static_cast<std::uint32_t>(index);
}

std::uint32_t PageTable::require_unmapped(PageHandle page) const {
  const std::uint32_t slot = slot_of(page, "destroy_page");
  const std::uint32_t mapped = slots_[slot].mapped;
  if (mapped != 0) {
    throw Error(ErrorKind::invalid_state,
                "destroy_page: page " + std::to_string(page) + " still stands behind " + std::to_string(mapped) +
                    " ranges. Nothing changed. Unmap it everywhere first.",
                {{"page", static_cast<std::int64_t>(page)}, {"mapped", std::int64_t{mapped}}});
  }
  return slot;
}

MappingTable::Cells PageTable::cells(Address begin, const PageHandle* pages, std::size_t count,
                                     std::size_t page_bytes) const {
  MappingTable::Cells cells;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t slot = slot_of(pages[i], "map");
    if (slots_[slot].bytes != page_bytes) {
      throw Error(ErrorKind::invalid_argument,
                  "map: expected pages of " + std::to_string(page_bytes) + " bytes, but page " + std::to_string(pages[i]) +
                      " has " + std::to_string(slots_[slot].bytes) + ". Nothing changed.",
                  {{"page", static_cast<std::int64_t>(pages[i])},
                   {"page_bytes", number(page_bytes)},
                   {"bytes", number(slots_[slot].bytes)}});
    }
    cells.emplace_hint(cells.end(), begin + i * page_bytes, Cell{page_bytes, slot, Access::none});
  }
  return cells;
}

void PageTable::make_room() {
  if (!free_.empty()) return;
  if (slots_.size() == slots_.capacity()) {
    slots_.reserve(2 * slots_.size() + 64);
    free_.reserve(slots_.capacity());
  }
  slots_.emplace_back();
  free_.push_back(static_cast<std::uint32_t>(slots_.size() - 1));
}

PageHandle PageTable::add(std::size_t bytes, std::uint64_t driver_handle) noexcept {
  std::pop_heap(free_.begin(), free_.end(), std::greater<>());
  const std::uint32_t slot = free_.back();
  free_.pop_back();
  Page& page = slots_[slot];
  page.bytes = bytes;
  page.driver_handle = driver_handle;
  page.used = true;
  bytes_ += bytes;
  return (PageHandle{page.generation} << 32) | (PageHandle{slot} + 1);
}

void PageTable::remove(std::uint32_t slot) noexcept {
  Page& page = slots_[slot];
  page.used = false;
  ++page.generation;
  bytes_ -= page.bytes;
  free_.push_back(slot);  // never allocates: there is room for every slot
  std::push_heap(free_.begin(), free_.end(), std::greater<>());
}

void PageTable::count_mapped(const MappingTable::Cells& cells) noexcept {
  for (const auto& cell : cells) ++slots_[cell.second.slot].mapped;
}

void PageTable::count_unmapped(const MappingTable& table, Address at, std::size_t bytes) noexcept {
  for (auto cell = table.cells().lower_bound(at); cell != table.cells().end() && cell->first < at + bytes; ++cell) {
    --slots_[cell->second.slot].mapped;
  }
}

}  // namespace remap::mapping
