// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/memory.h"

#include <string>

namespace remap::cuda {
namespace {

using mapping::Cell;
using mapping::MappingTable;
using mapping::number;
using mapping::PageTable;

DevicePointer device_pointer(Address address) noexcept { return static_cast<DevicePointer>(address); }

int access_flags(Access access) noexcept {
  switch (access) {
    case Access::read: return kAccessRead;
    case Access::read_write: return kAccessReadWrite;
    case Access::none: break;
  }
  return kAccessNone;
}

// Contiguous pages of one access: one cuMemSetAccess can put them back. The slot in the cell means nothing then.
std::vector<std::pair<Address, Cell>> runs_by_access(const MappingTable& table, Address at, std::size_t bytes) {
  std::vector<std::pair<Address, Cell>> runs;
  for (auto cell = table.cells().lower_bound(at); cell != table.cells().end() && cell->first < at + bytes; ++cell) {
    if (!runs.empty() && runs.back().second.access == cell->second.access) {
      runs.back().second.bytes += cell->second.bytes;
    } else {
      runs.emplace_back(cell->first, cell->second);
    }
  }
  return runs;
}

}  // namespace

Memory::Memory(const Context& context, const AllocationProperties& properties, std::size_t granularity,
               std::shared_ptr<SharedPages> shared)
    : context_(context),
      driver_(context.driver()),
      properties_(properties),
      granularity_(granularity),
      shared_(std::move(shared)),
      table_(granularity) {}

// Mappings, then addresses, then pages. A refusal leaves that one to the end of the process and does not stop the rest.
Memory::~Memory() {
  try {
    const Context::Use use(context_, "close");
    for (const auto& range : stranded_) (void)driver_.cuMemUnmap(device_pointer(range.first), range.second);
    for (const auto& cell : table_.cells()) (void)driver_.cuMemUnmap(device_pointer(cell.first), cell.second.bytes);
    for (const auto& region : table_.regions()) (void)driver_.cuMemAddressFree(device_pointer(region.first), region.second.bytes);
    for (std::size_t slot = 0; slot < pages_.slots().size(); ++slot) {
      const PageTable::Page& page = pages_.slots()[slot];
      if (page.used && shared_ == nullptr) (void)driver_.cuMemRelease(page.driver_handle);
      if (page.used && shared_ != nullptr) shared_->put(slot);
    }
  } catch (const Error&) {
    // No context to work in: the process is ending, and its end gives everything back.
  }
}

void Memory::add_usage(Usage& usage) const {
  const std::shared_lock<std::shared_mutex> lock(books_);
  usage.reserved_bytes = table_.reserved_bytes();
  usage.page_bytes = pages_.bytes();
  usage.mapped_bytes = table_.mapped_bytes();
  // The driver's need is not documented; a reservation and each page mapped in it, if each were one, bound it from above.
  usage.mappings = table_.regions().size() + table_.cells().size();
}

// ---- regions ---------------------------------------------------------------------------------------------------------
std::byte* Memory::reserve(std::size_t bytes, std::size_t alignment) {
  const std::lock_guard<std::mutex> lock(changing_);
  table_.require_reservable(bytes, alignment);
  const Context::Use use(context_, "reserve");
  DevicePointer at = 0;
  if (const Result code = driver_.cuMemAddressReserve(&at, bytes, alignment, 0, 0); code != result::kSuccess) {
    fail(driver_, "reserve", "cuMemAddressReserve", code, {{"requested", number(bytes)}});
  }
  try {
    const std::lock_guard<std::shared_mutex> books(books_);
    table_.add_region(static_cast<Address>(at), bytes);
  } catch (...) {
    (void)driver_.cuMemAddressFree(at, bytes);
    throw;
  }
  return reinterpret_cast<std::byte*>(static_cast<Address>(at));
}

void Memory::release(std::byte* address, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(changing_);
  const Address at = address_of(address);
  table_.require_region(at, bytes, "release");
  const Context::Use use(context_, "release");
  check(driver_, "release", "cuMemAddressFree", driver_.cuMemAddressFree(device_pointer(at), bytes));
  const std::lock_guard<std::shared_mutex> books(books_);
  table_.remove_region(at);
}

// The driver keeps the addresses until they are freed, and that is all.
void Memory::retire(std::byte* address, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(changing_);
  const Address at = address_of(address);
  const std::lock_guard<std::shared_mutex> books(books_);
  if (!table_.require_retirable(at, bytes, "retire")) table_.retire(at, bytes);
}

// ---- pages -----------------------------------------------------------------------------------------------------------
PageHandle Memory::create_page(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(changing_);
  table_.require_aligned(0, bytes, "create_page");
  const Context::Use use(context_, "create_page");
  {
    const std::lock_guard<std::shared_mutex> books(books_);
    pages_.make_room();
  }
  const AllocationHandle handle = shared_ ? shared_->take(pages_.next_slot(), bytes) : make_allocation(driver_, properties_, bytes);
  const std::lock_guard<std::shared_mutex> books(books_);
  return pages_.add(bytes, handle);
}

void Memory::destroy_page(PageHandle page) {
  const std::lock_guard<std::mutex> lock(changing_);
  const std::uint32_t slot = pages_.require_unmapped(page);
  const Context::Use use(context_, "destroy_page");
  if (shared_ != nullptr) {
    shared_->put(slot);
  } else {
    check(driver_, "destroy_page", "cuMemRelease", driver_.cuMemRelease(pages_.slots()[slot].driver_handle));
  }
  const std::lock_guard<std::shared_mutex> books(books_);
  pages_.remove(slot);
}

// ---- mappings --------------------------------------------------------------------------------------------------------
void Memory::map(std::byte* at, const PageHandle* pages, std::size_t count, std::size_t page_bytes) {
  const std::lock_guard<std::mutex> lock(changing_);
  PageTable::require_some(count, page_bytes);
  const Address begin = address_of(at);
  table_.require_unmapped(begin, count * page_bytes, "map");
  MappingTable::Cells cells = pages_.cells(begin, pages, count, page_bytes);
  const Context::Use use(context_, "map");
  for (const auto& cell : cells) {
    const AllocationHandle handle = pages_.slots()[cell.second.slot].driver_handle;
    const Result code = driver_.cuMemMap(device_pointer(cell.first), page_bytes, 0, handle, 0);
    if (code == result::kSuccess) continue;
    if (cell.first != begin) {
      const Result undoing = driver_.cuMemUnmap(device_pointer(begin), cell.first - begin);
      if (undoing != result::kSuccess) {
        const std::lock_guard<std::shared_mutex> books(books_);
        stranded_.emplace_back(begin, cell.first - begin);
        fail_broken("map", "cuMemUnmap", code, undoing);
      }
    }
    fail(driver_, "map", "cuMemMap", code, {{"pages", number(count)}});
  }
  const std::lock_guard<std::shared_mutex> books(books_);
  pages_.count_mapped(cells);
  table_.add(cells);
}

// One call for the whole range: it is made of whole handles, which is what the driver asks for.
void Memory::unmap(std::byte* at, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(changing_);
  const Address begin = address_of(at);
  table_.require_pages(begin, bytes, "unmap");
  const Context::Use use(context_, "unmap");
  check(driver_, "unmap", "cuMemUnmap", driver_.cuMemUnmap(device_pointer(begin), bytes));
  const std::lock_guard<std::shared_mutex> books(books_);
  pages_.count_unmapped(table_, begin, bytes);
  table_.remove(begin, bytes);
}

Result Memory::set_driver_access(Address at, std::size_t bytes, Access access) const noexcept {
  AccessDescriptor descriptor;
  descriptor.location = properties_.location;
  descriptor.flags = access_flags(access);
  return driver_.cuMemSetAccess(device_pointer(at), bytes, &descriptor, 1);
}

void Memory::set_access(std::byte* at, std::size_t bytes, Access access) {
  const std::lock_guard<std::mutex> lock(changing_);
  const Address begin = address_of(at);
  table_.require_pages(begin, bytes, "set_access");
  const auto before = runs_by_access(table_, begin, bytes);
  const Context::Use use(context_, "set_access");
  if (const Result code = set_driver_access(begin, bytes, access); code != result::kSuccess) {
    restore_access(before, code);
    fail(driver_, "set_access", "cuMemSetAccess", code, {{"bytes", number(bytes)}});
  }
  const std::lock_guard<std::shared_mutex> books(books_);
  table_.set_access(begin, bytes, access);
}

// The driver does not say how far a call that failed has come, so the former access is set again. A page that no caller may touch
// yet does no harm if it stays more accessible than the books say; one that is in use must have its access back.
void Memory::restore_access(const std::vector<std::pair<Address, Cell>>& before, Result code) {
  for (const auto& run : before) {
    const Result undoing = set_driver_access(run.first, run.second.bytes, run.second.access);
    if (undoing != result::kSuccess && run.second.access != Access::none) {
      fail_broken("set_access", "cuMemSetAccess", code, undoing);
    }
  }
}

void Memory::fail_broken(const char* operation, const char* entry, Result first, Result undoing) const {
  throw Error(ErrorKind::arena_broken,
              std::string(operation) + " failed half-way (code " + std::to_string(first) + ") and could not be undone: " + entry +
                  " gave code " + std::to_string(undoing) + ". The contents of its range are unknown. Close the arena.",
              {{"operation", std::string(operation)},
               {"call", std::string(entry)},
               {"code", std::int64_t{undoing}},
               {"first_code", std::int64_t{first}}});
}

// Page tables of a device are filled when access is set; there is nothing to do beforehand.
void Memory::populate(std::byte* at, std::size_t bytes) const {
  const std::shared_lock<std::shared_mutex> books(books_);
  table_.require_accessible(address_of(at), bytes, "populate");
}

// Without this check a copy that touches an address with nothing behind it would be no error of one call: the device stops,
// and the context is lost for the whole process.
bool Memory::holds(const std::byte* at, std::size_t bytes, Access least, const char* call) const {
  const std::shared_lock<std::shared_mutex> books(books_);
  return table_.require_access(address_of(at), bytes, least, call);
}

}  // namespace remap::cuda
