#include "backend/sim/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace remap::sim {
namespace {

using mapping::Cell;
using mapping::MappingTable;
using Lock = std::lock_guard<std::mutex>;

constexpr std::size_t kSeenRanges = 4096;  // more are forgotten, all at once

std::int64_t number(std::size_t value) noexcept { return static_cast<std::int64_t>(value); }

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
  for (const auto& region : table_.regions()) give_addresses(region.first, region.second);
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
  usage.page_bytes = page_bytes_;
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
    const int code = errno;
    throw Error(code == ENOMEM ? ErrorKind::limit_exceeded : ErrorKind::driver,
                std::string(call) + " of " + std::to_string(bytes) + " bytes of address space: " + std::strerror(code) +
                    ". Nothing changed. Raise ulimit -v, or simulate a smaller device.",
                {{"call", std::string(call)}, {"requested", number(bytes)}, {"errno", std::int64_t{code}}});
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
  table_.require_aligned(0, bytes, "reserve");
  if (alignment < granularity_ || (alignment & (alignment - 1)) != 0) {
    throw Error(ErrorKind::invalid_argument,
                "reserve: expected an alignment that is a power of two and at least " + std::to_string(granularity_) +
                    ", got " + std::to_string(alignment) + ". Nothing changed.",
                {{"alignment", number(alignment)}, {"granularity", number(granularity_)}});
  }
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

// ---- pages -------------------------------------------------------------------------------------------------------------
PageHandle Memory::create_page(std::size_t bytes) {
  if (bytes_) return bytes_->create_page(bytes);
  const Lock lock(mutex_);
  table_.require_aligned(0, bytes, "create_page");
  const std::size_t free = capacity_bytes_ - page_bytes_;
  if (bytes > free) {
    throw Error(ErrorKind::out_of_memory,
                "create_page of " + std::to_string(bytes) + " bytes: " + std::to_string(free) + " of " +
                    std::to_string(capacity_bytes_) +
                    " bytes are free. Nothing changed. Destroy a page, or simulate a device with more memory.",
                {{"requested", number(bytes)}, {"free", number(free)}, {"capacity", number(capacity_bytes_)}});
  }
  if (free_slots_.empty()) {
    if (pages_.size() == pages_.capacity()) {
      pages_.reserve(2 * pages_.size() + 64);
      free_slots_.reserve(pages_.capacity());
    }
    pages_.emplace_back();
    free_slots_.push_back(static_cast<std::uint32_t>(pages_.size() - 1));
  }
  const std::uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  Page& page = pages_[slot];
  page.bytes = bytes;
  page.used = true;
  page_bytes_ += bytes;
  return (PageHandle{page.generation} << 32) | (PageHandle{slot} + 1);
}

std::uint32_t Memory::slot_of(PageHandle page, const char* call) const {
  const std::uint64_t index = (page & 0xffffffffu) - 1;  // wraps for 0, which is then out of range
  if (index >= pages_.size() || !pages_[index].used || pages_[index].generation != page >> 32) {
    throw Error(ErrorKind::invalid_argument,
                std::string(call) + ": page " + std::to_string(page) + " is not a page of this backend (or is destroyed). " +
                    "Nothing changed.",
                {{"call", std::string(call)}, {"page", static_cast<std::int64_t>(page)}});
  }
  return static_cast<std::uint32_t>(index);
}

void Memory::destroy_page(PageHandle handle) {
  if (bytes_) return bytes_->destroy_page(handle);
  const Lock lock(mutex_);
  const std::uint32_t slot = slot_of(handle, "destroy_page");
  Page& page = pages_[slot];
  if (page.mapped != 0) {
    throw Error(ErrorKind::invalid_state,
                "destroy_page: page " + std::to_string(handle) + " still stands behind " + std::to_string(page.mapped) +
                    " ranges. Nothing changed. Unmap it everywhere first.",
                {{"page", static_cast<std::int64_t>(handle)}, {"mapped", std::int64_t{page.mapped}}});
  }
  page.used = false;
  ++page.generation;
  page_bytes_ -= page.bytes;
  free_slots_.push_back(slot);  // never allocates: there was room for every slot
}

// ---- mappings ----------------------------------------------------------------------------------------------------------
void Memory::map(std::byte* at, const PageHandle* handles, std::size_t count, std::size_t page_bytes) {
  const Lock lock(mutex_);
  if (page_bytes == 0 || count == 0 || count > ~std::size_t{0} / page_bytes) {
    throw Error(ErrorKind::invalid_argument,
                "map: expected at least one page with a size above 0, got " + std::to_string(count) + " of " +
                    std::to_string(page_bytes) + " bytes. Nothing changed.",
                {{"count", number(count)}, {"page_bytes", number(page_bytes)}});
  }
  const Address begin = address_of(at);
  table_.require_unmapped(begin, count * page_bytes, "map");
  MappingTable::Cells cells;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t slot = bytes_ ? 0 : slot_of(handles[i], "map");
    if (!bytes_ && pages_[slot].bytes != page_bytes) {
      throw Error(ErrorKind::invalid_argument,
                  "map: expected pages of " + std::to_string(page_bytes) + " bytes, but page " + std::to_string(handles[i]) +
                      " has " + std::to_string(pages_[slot].bytes) + ". Nothing changed.",
                  {{"page", static_cast<std::int64_t>(handles[i])},
                   {"page_bytes", number(page_bytes)},
                   {"bytes", number(pages_[slot].bytes)}});
    }
    cells.emplace_hint(cells.end(), begin + i * page_bytes, Cell{page_bytes, slot, Access::none});
  }
  if (bytes_) {
    bytes_->map(at, handles, count, page_bytes);
  } else {
    for (const auto& cell : cells) ++pages_[cell.second.slot].mapped;
  }
  table_.add(cells);
}

std::size_t Memory::unmap(std::byte* at, std::size_t bytes) {
  const Lock lock(mutex_);
  const Address begin = address_of(at);
  table_.require_pages(begin, bytes, "unmap");
  if (bytes_) bytes_->unmap(at, bytes);
  std::size_t count = 0;
  for (auto cell = table_.cells().lower_bound(begin); cell != table_.cells().end() && cell->first < begin + bytes; ++cell) {
    if (!bytes_) --pages_[cell->second.slot].mapped;
    ++count;
  }
  table_.remove(begin, bytes);
  seen_.clear();
  return count;
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

void Memory::free_host(std::byte* address, std::size_t bytes) {
  if (bytes_) return bytes_->free_host(address, bytes);
  drop_host(address, bytes, true, "free_host");
}

void Memory::unregister_host(const std::byte* address, std::size_t bytes) {
  if (bytes_) return bytes_->unregister_host(address, bytes);
  drop_host(address, bytes, false, "unregister_host");
}

}  // namespace remap::sim
