// SPDX-License-Identifier: Apache-2.0
#include "backend/mapping_table.h"

#include <algorithm>
#include <string>
#include <utility>

namespace remap::mapping {

std::string hex(Address value) {
  static const char* digits = "0123456789abcdef";
  std::string text;
  do {
    text.insert(text.begin(), digits[value & 15]);
    value >>= 4;
  } while (value != 0);
  return "0x" + text;
}

namespace {

[[noreturn]] void refuse(ErrorKind kind, const char* call, Address at, std::size_t bytes, const std::string& why) {
  throw Error(kind,
              std::string(call) + " of " + std::to_string(bytes) + " bytes at " + hex(at) + ": " + why + ". Nothing changed.",
              {{"call", std::string(call)},
               {"address", static_cast<std::int64_t>(at)},
               {"bytes", static_cast<std::int64_t>(bytes)}});
}

}  // namespace

void MappingTable::require_aligned(Address at, std::size_t bytes, const char* call) const {
  if (bytes == 0) refuse(ErrorKind::invalid_argument, call, at, bytes, "expected a size above 0");
  if (at % granularity_ != 0 || bytes % granularity_ != 0) {
    refuse(ErrorKind::invalid_argument, call, at, bytes,
           "expected multiples of the granularity, " + std::to_string(granularity_) + " bytes");
  }
  if (at + bytes < at) refuse(ErrorKind::invalid_argument, call, at, bytes, "the range passes the end of the address space");
}

void MappingTable::require_reservable(std::size_t bytes, std::size_t alignment) const {
  require_aligned(0, bytes, "reserve");
  if (alignment >= granularity_ && (alignment & (alignment - 1)) == 0) return;
  throw Error(ErrorKind::invalid_argument,
              "reserve: expected an alignment that is a power of two and at least " + std::to_string(granularity_) +
                  ", got " + std::to_string(alignment) + ". Nothing changed.",
              {{"alignment", number(alignment)}, {"granularity", number(granularity_)}});
}

std::map<Address, Reservation>::const_iterator MappingTable::containing(Address at, std::size_t bytes,
                                                                        const char* call) const {
  require_aligned(at, bytes, call);
  auto region = regions_.upper_bound(at);
  if (region == regions_.begin()) {
    refuse(ErrorKind::invalid_argument, call, at, bytes, "expected addresses inside one reservation");
  }
  --region;
  if (at - region->first >= region->second.bytes || bytes > region->second.bytes - (at - region->first)) {
    refuse(ErrorKind::invalid_argument, call, at, bytes, "expected addresses inside one reservation");
  }
  return region;
}

void MappingTable::require_region(Address at, std::size_t bytes, const char* call) const {
  const auto region = regions_.find(at);
  if (region == regions_.end() || region->second.bytes != bytes) {
    refuse(ErrorKind::invalid_argument, call, at, bytes, "expected the whole of an earlier reservation");
  }
  const auto cell = cells_.lower_bound(at);
  if (cell != cells_.end() && cell->first < at + bytes) {
    refuse(ErrorKind::invalid_state, call, at, bytes,
           "a page is still mapped at " + hex(cell->first) + "; unmap everything in it first");
  }
}

void MappingTable::require_unmapped(Address at, std::size_t bytes, const char* call) const {
  const auto region = containing(at, bytes, call);
  for (const auto& [begin, end] : region->second.retired) {
    if (begin < at + bytes && at < end) refuse(ErrorKind::invalid_state, call, at, bytes, "it is retired, or a part of it");
  }
  require_no_page(region->first, at, bytes, call);
}

bool MappingTable::require_retirable(Address at, std::size_t bytes, const char* call) {
  const auto region = containing(at, bytes, call);
  require_no_page(region->first, at, bytes, call);
  std::vector<std::pair<Address, Address>>& retired = regions_.find(region->first)->second.retired;
  const auto all = [&](const std::pair<Address, Address>& part) { return part.first <= at && at + bytes <= part.second; };
  if (std::any_of(retired.begin(), retired.end(), all)) return true;
  retired.reserve(retired.size() + 1);
  return false;
}

void MappingTable::require_no_page(Address region, Address at, std::size_t bytes, const char* call) const {
  auto cell = cells_.lower_bound(at);
  // The page before may reach into the range.
  if (cell != cells_.begin()) {
    const auto before = std::prev(cell);
    if (before->first >= region && before->first + before->second.bytes > at) cell = before;
  }
  if (cell != cells_.end() && cell->first < at + bytes) {
    refuse(ErrorKind::invalid_state, call, at, bytes, "a page is already mapped at " + hex(cell->first) + "; unmap it first");
  }
}

void MappingTable::require_pages(Address at, std::size_t bytes, const char* call) const {
  containing(at, bytes, call);
  const Address end = at + bytes;
  Address next = at;
  std::size_t last = 0;
  for (auto cell = cells_.lower_bound(at); next < end; ++cell, next += last) {
    if (cell == cells_.end() || cell->first != next) {
      refuse(ErrorKind::invalid_state, call, at, bytes, "expected whole mapped pages, but no page starts at " + hex(next));
    }
    last = cell->second.bytes;
  }
  if (next != end) {
    refuse(ErrorKind::invalid_state, call, at, bytes,
           "expected whole mapped pages, but the range ends inside one of " + std::to_string(last) + " bytes");
  }
}

void MappingTable::require_accessible(Address at, std::size_t bytes, const char* call) const {
  containing(at, bytes, call);
  require_cells(at, bytes, Access::read, call);
}

bool MappingTable::require_access(Address at, std::size_t bytes, Access least, const char* call) const {
  if (bytes == 0) return false;
  if (at + bytes < at) refuse(ErrorKind::invalid_argument, call, at, bytes, "the range passes the end of the address space");
  const auto after = regions_.lower_bound(at + bytes);  // the first that begins behind the range
  if (after == regions_.begin()) return false;
  const auto region = std::prev(after);
  if (region->first + region->second.bytes <= at) return false;
  if (region->first > at || at + bytes > region->first + region->second.bytes) {
    refuse(ErrorKind::invalid_argument, call, at, bytes, "a part of it is in a region and a part is not");
  }
  require_cells(at, bytes, least, call);
  return true;
}

void MappingTable::require_cells(Address at, std::size_t bytes, Access least, const char* call) const {
  auto cell = cells_.upper_bound(at);
  if (cell != cells_.begin()) --cell;
  for (Address next = at; next < at + bytes; ++cell) {
    if (cell == cells_.end() || cell->first > next || cell->first + cell->second.bytes <= next) {
      refuse(ErrorKind::invalid_state, call, at, bytes, "expected mapped pages, but none is at " + hex(next));
    }
    if (cell->second.access < least) {
      refuse(ErrorKind::invalid_state, call, at, bytes,
             "the page at " + hex(cell->first) + " has access " + (cell->second.access == Access::none ? "none" : "read") +
                 "; set it first");
    }
    next = cell->first + cell->second.bytes;
  }
}

std::size_t MappingTable::boundaries(Address low, Address high) const noexcept {
  const auto region = std::prev(regions_.upper_bound(low));
  const Address begin = region->first;
  const Address end = begin + region->second.bytes;
  std::size_t count = 0;
  auto cell = cells_.lower_bound(low);
  if (cell != cells_.begin()) --cell;  // may end in the window
  for (; cell != cells_.end() && cell->first <= high && cell->first < end; ++cell) {
    if (cell->first < begin) continue;
    const Address start = cell->first;
    const Address stop = start + cell->second.bytes;
    if (start >= low && start != begin) {
      bool merges = false;
      if (cell != cells_.begin()) {
        const auto before = std::prev(cell);
        merges = before->first + before->second.bytes == start && before->second.slot + 1 == cell->second.slot &&
                 before->second.access == cell->second.access;
      }
      if (!merges) ++count;
    }
    if (stop >= low && stop <= high && stop != end) {
      const auto after = std::next(cell);
      if (after == cells_.end() || after->first != stop) ++count;  // else counted at the start of `after`
    }
  }
  return count;
}

void MappingTable::add_region(Address at, std::size_t bytes) {
  regions_.emplace(at, Reservation{bytes, {}});
  reserved_bytes_ += bytes;
}

void MappingTable::remove_region(Address at) noexcept {
  const auto region = regions_.find(at);
  reserved_bytes_ -= region->second.bytes;
  regions_.erase(region);
}

void MappingTable::retire(Address at, std::size_t bytes) noexcept {
  std::prev(regions_.upper_bound(at))->second.retired.emplace_back(at, at + bytes);
}

void MappingTable::add(Cells& cells) noexcept {
  if (cells.empty()) return;
  const Address low = cells.begin()->first;
  const Address high = std::prev(cells.end())->first + std::prev(cells.end())->second.bytes;
  boundaries_ -= boundaries(low, high);
  for (const auto& cell : cells) mapped_bytes_ += cell.second.bytes;
  cells_.merge(cells);
  boundaries_ += boundaries(low, high);
}

void MappingTable::remove(Address at, std::size_t bytes) noexcept {
  boundaries_ -= boundaries(at, at + bytes);
  cells_.erase(cells_.lower_bound(at), cells_.lower_bound(at + bytes));
  mapped_bytes_ -= bytes;
  boundaries_ += boundaries(at, at + bytes);
}

void MappingTable::set_access(Address at, std::size_t bytes, Access access) noexcept {
  boundaries_ -= boundaries(at, at + bytes);
  for (auto cell = cells_.lower_bound(at); cell != cells_.end() && cell->first < at + bytes; ++cell) {
    cell->second.access = access;
  }
  boundaries_ += boundaries(at, at + bytes);
}

void MappingTable::exchange(Address a, Address b, std::size_t bytes) noexcept {
  // The two windows may touch (b = a + bytes), where one place would be counted twice; so they are changed one by one.
  auto one = cells_.lower_bound(a);
  auto other = cells_.lower_bound(b);
  for (std::size_t done = 0; done < bytes; done += one->second.bytes, ++one, ++other) {
    const Cell first = one->second;
    const Cell second = other->second;
    boundaries_ -= boundaries(one->first, one->first + first.bytes);
    one->second = second;
    boundaries_ += boundaries(one->first, one->first + first.bytes);
    boundaries_ -= boundaries(other->first, other->first + first.bytes);
    other->second = first;
    boundaries_ += boundaries(other->first, other->first + first.bytes);
  }
}

std::vector<Run> MappingTable::runs(Address at, std::size_t bytes) const {
  std::vector<Run> result;
  for (auto cell = cells_.lower_bound(at); cell != cells_.end() && cell->first < at + bytes; ++cell) {
    if (!result.empty()) {
      Run& last = result.back();
      if (last.address + last.bytes == cell->first && last.first.access == cell->second.access &&
          last.first.bytes == cell->second.bytes && last.first.slot + last.bytes / last.first.bytes == cell->second.slot) {
        last.bytes += cell->second.bytes;
        continue;
      }
    }
    result.push_back({cell->first, cell->second.bytes, cell->second});
  }
  return result;
}

}  // namespace remap::mapping
