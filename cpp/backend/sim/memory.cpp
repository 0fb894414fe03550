// SPDX-License-Identifier: Apache-2.0
#include "backend/sim/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

namespace remap::sim {
namespace {

using mapping::Cell;
using mapping::MappingTable;
using mapping::number;
using Lock = std::lock_guard<std::mutex>;

constexpr std::size_t kSeenRanges = 4096;  // more are forgotten, all at once

std::size_t round_up(std::size_t bytes, std::size_t unit) noexcept { return (bytes + unit - 1) / unit * unit; }

}  // namespace

Memory::Memory(std::size_t capacity_bytes, std::size_t granularity, bool backed)
    : capacity_bytes_(capacity_bytes - capacity_bytes % granularity),
      os_page_(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))),
      bytes_(backed ? std::make_unique<host::HostMemory>(capacity_bytes_, granularity) : nullptr),
      granularity_(backed ? bytes_->granularity() : granularity),
      table_(granularity_) {}

Memory::~Memory() {
  if (bytes_) return;
  for (const auto& region : table_.regions()) give_addresses(region.first, region.second.bytes);
  for (const auto& range : host_ranges_) {
    if (range.second.owned) give_addresses(range.first, round_up(range.second.bytes, os_page_));
  }
}

void Memory::abandon() noexcept {
  if (!bytes_) return;  // the child has address space of its own to give back
  bytes_->abandon();
  (void)bytes_.release();
}

void Memory::add_usage(Usage& usage) const {
  if (bytes_) return bytes_->add_usage(usage);
  const Lock lock(mutex_);
  usage.reserved_bytes = table_.reserved_bytes();
  usage.page_bytes = pages_.bytes();
  usage.mapped_bytes = table_.mapped_bytes();
  usage.host_bytes = host_bytes_;
  usage.mappings = table_.regions().size() + table_.cells().size();  // as the cuda backend counts them
}

// ---- regions -----------------------------------------------------------------------------------------------------------
std::byte* Memory::take_addresses(std::size_t bytes, std::size_t alignment, const char* call) const {
  const std::size_t extra = alignment > os_page_ ? alignment : 0;
  void* place = MAP_FAILED;
  errno = ENOMEM;
  if (bytes + extra >= bytes) {
    place = ::mmap(nullptr, bytes + extra, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  if (place == MAP_FAILED) {
    throw os::refusal(call, errno, {std::max(bytes, bytes + extra), 0, 2}, {{"call", std::string(call)}});
  }
  const auto begin = reinterpret_cast<Address>(place);
  const Address at = extra == 0 ? begin : round_up(begin, alignment);
  if (at > begin) give_addresses(begin, at - begin);
  if (begin + extra > at) give_addresses(at + bytes, begin + extra - at);
  return reinterpret_cast<std::byte*>(at);
}

void Memory::give_addresses(Address at, std::size_t bytes) const noexcept { ::munmap(reinterpret_cast<void*>(at), bytes); }

std::byte* Memory::reserve(std::size_t bytes, std::size_t alignment) {
  const Lock lock(mutex_);
  table_.require_reservable(bytes, alignment);
  std::byte* at = bytes_ ? bytes_->reserve(bytes, alignment) : take_addresses(bytes, alignment, "reserve");
  try {
    table_.add_region(address_of(at), bytes);
  } catch (...) {
    if (bytes_) {
      bytes_->release(at, bytes);
    } else {
      give_addresses(address_of(at), bytes);
    }
    throw;
  }
  return at;
}

void Memory::release(std::byte* address, std::size_t bytes) {
  const Lock lock(mutex_);
  const Address at = address_of(address);
  table_.require_region(at, bytes, "release");
  if (bytes_) {
    bytes_->release(address, bytes);
  } else {
    give_addresses(at, bytes);
  }
  table_.remove_region(at);
}

void Memory::retire(std::byte* address, std::size_t bytes) {
  const Lock lock(mutex_);
  const Address at = address_of(address);
  if (table_.require_retirable(at, bytes, "retire")) return;
  if (bytes_) bytes_->retire(address, bytes);
  table_.retire(at, bytes);
}

// ---- pages -------------------------------------------------------------------------------------------------------------
PageHandle Memory::create_page(std::size_t bytes) {
  if (bytes_) return bytes_->create_page(bytes);
  const Lock lock(mutex_);
  table_.require_aligned(0, bytes, "create_page");
  const std::size_t free = capacity_bytes_ - pages_.bytes();
  if (bytes > free) {
    throw Error(ErrorKind::out_of_memory,
                "create_page of " + std::to_string(bytes) + " bytes: " + std::to_string(free) + " of " +
                    std::to_string(capacity_bytes_) +
                    " bytes are free. Nothing changed. Destroy a page, or simulate a device with more memory.",
                {{"requested", number(bytes)}, {"free", number(free)}, {"capacity", number(capacity_bytes_)}});
  }
  pages_.make_room();
  return pages_.add(bytes);
}

void Memory::destroy_page(PageHandle page) {
  if (bytes_) return bytes_->destroy_page(page);
  const Lock lock(mutex_);
  pages_.remove(pages_.require_unmapped(page));
}

// ---- mappings ----------------------------------------------------------------------------------------------------------
void Memory::map(std::byte* at, const PageHandle* pages, std::size_t count, std::size_t page_bytes) {
  const Lock lock(mutex_);
  mapping::PageTable::require_some(count, page_bytes);
  const Address begin = address_of(at);
  table_.require_unmapped(begin, count * page_bytes, "map");
  MappingTable::Cells cells;
  if (bytes_) {
    for (std::size_t i = 0; i < count; ++i) {
      cells.emplace_hint(cells.end(), begin + i * page_bytes, Cell{page_bytes, 0, Access::none});
    }
    bytes_->map(at, pages, count, page_bytes);
  } else {
    cells = pages_.cells(begin, pages, count, page_bytes);
    pages_.count_mapped(cells);
  }
  table_.add(cells);
}

std::size_t Memory::unmap(std::byte* at, std::size_t bytes) {
  const Lock lock(mutex_);
  const Address begin = address_of(at);
  table_.require_pages(begin, bytes, "unmap");
  if (bytes_) {
    bytes_->unmap(at, bytes);
  } else {
    pages_.count_unmapped(table_, begin, bytes);
  }
  const std::size_t before = table_.cells().size();
  table_.remove(begin, bytes);
  seen_.clear();
  return before - table_.cells().size();
}

void Memory::set_access(std::byte* at, std::size_t bytes, Access access) {
  const Lock lock(mutex_);
  const Address begin = address_of(at);
  table_.require_pages(begin, bytes, "set_access");
  if (bytes_) bytes_->set_access(at, bytes, access);
  table_.set_access(begin, bytes, access);
  seen_.clear();
}

void Memory::populate(std::byte* at, std::size_t bytes) {
  if (bytes_) return bytes_->populate(at, bytes);
  const Lock lock(mutex_);
  table_.require_accessible(address_of(at), bytes, "populate");
}

bool Memory::holds(const std::byte* at, std::size_t bytes, Access least, const char* call) {
  const Lock lock(mutex_);
  const Address begin = address_of(at);
  const auto found = seen_.find(begin);
  if (found != seen_.end() && bytes != 0 && bytes <= found->second.bytes && least <= found->second.access) return true;
  if (!table_.require_access(begin, bytes, least, call)) return false;
  if (seen_.size() >= kSeenRanges) seen_.clear();
  seen_[begin] = {bytes, least};
  return true;
}

// ---- host memory -------------------------------------------------------------------------------------------------------
std::byte* Memory::allocate_host(std::size_t bytes) {
  if (bytes_) return bytes_->allocate_host(bytes);
  const Lock lock(mutex_);
  const std::size_t rounded = round_up(bytes, os_page_);
  if (bytes == 0 || rounded < bytes) {
    throw Error(ErrorKind::invalid_argument,
                "allocate_host: expected a size above 0 that addresses have room for, got " + std::to_string(bytes) +
                    ". Nothing changed.",
                {{"bytes", number(bytes)}});
  }
  std::byte* at = take_addresses(rounded, os_page_, "allocate_host");
  try {
    host_ranges_.emplace(address_of(at), HostRange{bytes, true});
  } catch (...) {
    give_addresses(address_of(at), rounded);
    throw;
  }
  host_bytes_ += bytes;
  return at;
}

void Memory::register_host(const std::byte* address, std::size_t bytes) {
  if (bytes_) return bytes_->register_host(address, bytes);
  const Lock lock(mutex_);
  const Address at = address_of(address);
  if (at == 0 || bytes == 0 || at + bytes < at) {
    throw Error(ErrorKind::invalid_argument, "register_host: expected an address and a size above 0. Nothing changed.",
                {{"bytes", number(bytes)}});
  }
  const auto after = host_ranges_.lower_bound(at);
  if ((after != host_ranges_.end() && after->first < at + bytes) ||
      (after != host_ranges_.begin() && std::prev(after)->first + std::prev(after)->second.bytes > at)) {
    throw Error(ErrorKind::invalid_state,
                "register_host: a part of these " + std::to_string(bytes) +
                    " bytes is allocated here or registered already. Nothing changed.",
                {{"address", static_cast<std::int64_t>(at)}, {"bytes", number(bytes)}});
  }
  host_ranges_.emplace(at, HostRange{bytes, false});
  host_bytes_ += bytes;
}

void Memory::drop_host(const std::byte* address, std::size_t bytes, bool owned, const char* call) {
  const Lock lock(mutex_);
  const auto range = host_ranges_.find(address_of(address));
  if (range == host_ranges_.end() || range->second.bytes != bytes || range->second.owned != owned) {
    throw Error(ErrorKind::invalid_argument,
                std::string(call) + ": expected the address and size of memory that was " +
                    (owned ? "allocated" : "registered") + " here, got " + std::to_string(bytes) + " bytes. Nothing changed.",
                {{"call", std::string(call)},
                 {"address", static_cast<std::int64_t>(address_of(address))},
                 {"bytes", number(bytes)}});
  }
  if (owned) give_addresses(range->first, round_up(bytes, os_page_));
  host_bytes_ -= bytes;
  host_ranges_.erase(range);
}

void Memory::use_host(const std::byte* address, std::size_t bytes) const {
  if (bytes_) return bytes_->use_host(address, bytes);
  const Lock lock(mutex_);
  const auto range = host_ranges_.find(address_of(address));
  if (range != host_ranges_.end() && range->second.bytes == bytes) return;
  throw Error(ErrorKind::invalid_argument,
              "use_host: expected the address and size of memory that was allocated or registered here, got " + std::to_string(bytes) +
                  " bytes. Nothing changed.",
              {{"call", std::string("use_host")},
               {"address", static_cast<std::int64_t>(address_of(address))},
               {"bytes", number(bytes)}});
}

void Memory::free_host(std::byte* address, std::size_t bytes) {
  if (bytes_) return bytes_->free_host(address, bytes);
  drop_host(address, bytes, true, "free_host");
}

void Memory::unregister_host(const std::byte* address, std::size_t bytes) {
  if (bytes_) return bytes_->unregister_host(address, bytes);
  drop_host(address, bytes, false, "unregister_host");
}

}  // namespace remap::sim
