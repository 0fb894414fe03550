// SPDX-License-Identifier: Apache-2.0
// The pages behind each address: reservations, mapped pages, and how many kernel mappings they need.
//
// Bookkeeping only, no system call: a backend (host, cuda) asks it whether a call's preconditions hold before it touches the
// kernel or the driver, and tells it the truth afterwards. Not synchronised; the backend's lock covers it.
//
// Pages may differ in size. Mappings are counted as the kernel keeps those of the host backend (VMAs): inside a region two
// neighbours are one VMA if both are unmapped, or if both show adjacent slots of the memfd with the same access. So
//   mappings = regions + number of places inside a region where two neighbours do not merge
// is an upper bound: the kernel may in addition merge across regions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "remap/backend.h"

namespace remap::mapping {

using Address = std::uintptr_t;

inline Address address_of(const std::byte* at) noexcept { return reinterpret_cast<Address>(at); }
std::string hex(Address value);
inline std::int64_t number(std::size_t value) noexcept { return static_cast<std::int64_t>(value); }  // a field of an Error

// One mapped page: its size, the slot (of the memfd, of the table of pages) behind it, and what may be done with it.
struct Cell {
  std::size_t bytes = 0;
  std::uint32_t slot = 0;
  Access access = Access::none;
};

// Adjacent pages with adjacent slots and the same access: one kernel mapping can show them.
struct Run {
  Address address = 0;
  std::size_t bytes = 0;
  Cell first;
};

struct Reservation {
  std::size_t bytes = 0;
  std::vector<std::pair<Address, Address>> retired;  // [begin, end) each: no page is mapped there any more
};

class MappingTable {
 public:
  using Cells = std::map<Address, Cell>;

  explicit MappingTable(std::size_t granularity) : granularity_(granularity) {}

  // ---- preconditions; each throws Error and changes nothing ---------------------------------------------------------
  void require_aligned(Address at, std::size_t bytes, const char* call) const;   // InvalidArgument
  void require_reservable(std::size_t bytes, std::size_t alignment) const;       // reserve's arguments: InvalidArgument
  void require_region(Address at, std::size_t bytes, const char* call) const;    // one whole, empty reservation
  void require_unmapped(Address at, std::size_t bytes, const char* call) const;  // inside one live reservation, nothing mapped
  // The same, but it may be retired already: true if all of it is.
  bool require_retirable(Address at, std::size_t bytes, const char* call);
  void require_pages(Address at, std::size_t bytes, const char* call) const;     // whole mapped pages
  void require_accessible(Address at, std::size_t bytes, const char* call) const;  // any part of mapped pages, access not none
  // For copies, which need no alignment: false where no byte is in a region; else all must be in one, with this access.
  bool require_access(Address at, std::size_t bytes, Access least, const char* call) const;

  // ---- changes; none of them throws but add_region -------------------------------------------------------------------
  void add_region(Address at, std::size_t bytes);
  void remove_region(Address at) noexcept;
  void retire(Address at, std::size_t bytes) noexcept;  // pre: require_retirable, which has made the room for it
  void add(Cells& cells) noexcept;  // takes the nodes over, so that nothing is allocated after the kernel was changed
  void remove(Address at, std::size_t bytes) noexcept;
  void set_access(Address at, std::size_t bytes, Access access) noexcept;
  void exchange(Address a, Address b, std::size_t bytes) noexcept;  // pre: pages of one size

  // ---- looking ---------------------------------------------------------------------------------------------------
  std::vector<Run> runs(Address at, std::size_t bytes) const;
  const std::map<Address, Reservation>& regions() const noexcept { return regions_; }
  const Cells& cells() const noexcept { return cells_; }
  std::size_t reserved_bytes() const noexcept { return reserved_bytes_; }
  std::size_t mapped_bytes() const noexcept { return mapped_bytes_; }
  std::size_t mappings() const noexcept { return regions_.size() + boundaries_; }

 private:
  std::map<Address, Reservation>::const_iterator containing(Address at, std::size_t bytes, const char* call) const;
  void require_no_page(Address region, Address at, std::size_t bytes, const char* call) const;
  void require_cells(Address at, std::size_t bytes, Access least, const char* call) const;
  std::size_t boundaries(Address low, Address high) const noexcept;  // in [low, high], both inside one region

  std::size_t granularity_;
  std::map<Address, Reservation> regions_;  // by start; they never overlap
  Cells cells_;                             // start of a mapped page -> the page; they never overlap
  std::size_t reserved_bytes_ = 0;
  std::size_t mapped_bytes_ = 0;
  std::size_t boundaries_ = 0;
};

}  // namespace remap::mapping
