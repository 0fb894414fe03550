// SPDX-License-Identifier: Apache-2.0
// Opening and closing, regions, pages and host memory; host_mapping.cpp has the pages behind each address.
#include "backend/host_memory.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

namespace remap::host {
namespace {

// Kernel mappings left for all else in the process: libraries, stacks, malloc.
constexpr std::size_t kOtherMappings = 1024;

std::size_t read_max_map_count() {
  std::ifstream file("/proc/sys/vm/max_map_count");
  std::size_t count = 0;
  return file >> count ? count : 65530;  // the kernel's default
}

bool shared_huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  std::string text;
  std::getline(file, text);
  return text.find("[advise]") != std::string::npos || text.find("[always]") != std::string::npos ||
         text.find("[within_size]") != std::string::npos;
}

}  // namespace

// ---- the system calls ------------------------------------------------------------------------------------------------
void* System::map(void* at, std::size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
  return ::mmap(at, bytes, protection, flags, file, offset);
}
void* System::move(void* from, std::size_t bytes, void* to) noexcept {
  return ::mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to);
}
int System::protect(void* at, std::size_t bytes, int protection) noexcept { return ::mprotect(at, bytes, protection); }
int System::advise(void* at, std::size_t bytes, int advice) noexcept { return ::madvise(at, bytes, advice); }
int System::punch(int file, off_t offset, std::size_t bytes) noexcept {
  return ::fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(bytes));
}

// ---- making and unmaking ---------------------------------------------------------------------------------------------
HostMemory::HostMemory(std::size_t capacity_bytes, std::size_t page_bytes, std::shared_ptr<System> system, int file)
    : system_(system ? std::move(system) : std::make_shared<System>()),
      page_bytes_(page_bytes),
      granularity_(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))),
      capacity_bytes_(capacity_bytes),
      shared_(file >= 0),
      table_(granularity_) {
  if (page_bytes == 0 || page_bytes % granularity_ != 0) {
    throw Error(ErrorKind::invalid_argument,
                "host backend: expected page_bytes to be a multiple of " + std::to_string(granularity_) + ", got " +
                    std::to_string(page_bytes),
                {{"page_bytes", number(page_bytes)}, {"granularity", number(granularity_)}});
  }
  if (capacity_bytes == 0 || capacity_bytes % page_bytes != 0 || capacity_bytes / page_bytes >= 0xffffffffu) {
    throw Error(ErrorKind::invalid_argument,
                "host backend: expected capacity_bytes to be a multiple of page_bytes, " + std::to_string(page_bytes) +
                    ", with 1 to 4294967294 pages; got " + std::to_string(capacity_bytes),
                {{"capacity_bytes", number(capacity_bytes)}, {"page_bytes", number(page_bytes)}});
  }
  max_map_count_ = read_max_map_count();
  mapping_limit_ = max_map_count_ > 2 * kOtherMappings ? max_map_count_ - kOtherMappings : max_map_count_ / 2;
  huge_pages_ = shared_huge_pages();

  if (shared_) {
    join_file(file);
  } else {
    make_file();
  }
  can_exchange_ = probe_exchange();
  make_ballast();
}

void HostMemory::make_file() {
  // By number: the C library's wrapper came with glibc 2.27, the call itself with Linux 3.17.
  file_ = static_cast<int>(::syscall(SYS_memfd_create, "remap", MFD_CLOEXEC));
  if (file_ < 0) fail("memfd_create", errno, {});
  try {
    os::require_file_size("ftruncate", capacity_bytes_, {{"call", std::string("ftruncate")}});
    if (::ftruncate(file_, static_cast<off_t>(capacity_bytes_)) != 0) fail("ftruncate", errno, {});
  } catch (...) {
    ::close(file_);
    throw;
  }
}

// A file that another process could make smaller would end this process wherever it touches a page that has gone.
void HostMemory::join_file(int file) {
  constexpr int kSealed = F_SEAL_SHRINK | F_SEAL_GROW;
  constexpr int kReadOnly = F_SEAL_WRITE | 0x10;  // F_SEAL_FUTURE_WRITE, which old headers lack
  struct stat found = {};
  const int seals = ::fcntl(file, F_GET_SEALS);
  const int flags = ::fcntl(file, F_GETFL);
  const bool keeps_size = seals >= 0 && (seals & kSealed) == kSealed;
  const bool writable = flags >= 0 && (flags & O_ACCMODE) == O_RDWR && (seals & kReadOnly) == 0;
  const bool fits = ::fstat(file, &found) == 0 && static_cast<std::size_t>(found.st_size) == capacity_bytes_;
  if (!keeps_size || !writable || !fits) {
    throw Error(ErrorKind::invalid_argument,
                "host backend: file " + std::to_string(file) + " is not a memfd of exactly " + std::to_string(capacity_bytes_) +
                    " bytes, to be read and written, sealed against shrinking and growing (its seals are " +
                    std::to_string(seals) + ", its bytes " + std::to_string(found.st_size) + ")",
                {{"file", std::int64_t{file}}, {"capacity_bytes", number(capacity_bytes_)},
                 {"bytes", static_cast<std::int64_t>(found.st_size)}});
  }
  file_ = ::fcntl(file, F_DUPFD_CLOEXEC, 0);
  if (file_ < 0) fail("fcntl", errno, {});
}

HostMemory::~HostMemory() {
  for (const auto& region : table_.regions()) ::munmap(pointer(region.first), region.second.bytes);
  for (const auto& range : host_ranges_) {
    if (range.second.owned) ::munmap(pointer(range.first), range.second.bytes);
  }
  if (scratch_ != 0) ::munmap(pointer(scratch_), scratch_bytes_);
  drop_ballast();
  if (file_ >= 0) ::close(file_);
}

void HostMemory::abandon() noexcept {
  ::close(file_);
  file_ = -1;
}

// exchange() needs mremap to leave the old place mapped (Linux 5.13 for shared memory): with a hole there, for however
// short a time, another thread's mmap could land in it and be overwritten by the next step.
bool HostMemory::probe_exchange() noexcept {
  void* place = ::mmap(nullptr, 2 * granularity_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return false;
  void* other = static_cast<std::byte*>(place) + granularity_;
  const bool works = ::mmap(place, granularity_, PROT_NONE, MAP_SHARED | MAP_FIXED, file_, 0) != MAP_FAILED &&
                     ::mremap(place, granularity_, granularity_, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, other) ==
                         other;
  ::munmap(place, 2 * granularity_);
  return works;
}

void HostMemory::add_usage(Usage& usage) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  usage.reserved_bytes = table_.reserved_bytes();
  usage.page_bytes = pages_.bytes();
  usage.mapped_bytes = table_.mapped_bytes();
  usage.host_bytes = host_bytes_;
  usage.mappings = table_.mappings();
}

// ---- errors ----------------------------------------------------------------------------------------------------------
void HostMemory::fail(const char* call, int code, const os::Asked& asked) const {
  throw os::refusal(call, code, asked, {{"call", std::string(call)}});
}

void HostMemory::fail_broken(const char* call, int code) const {
  throw Error(ErrorKind::arena_broken,
              std::string(call) + " failed half-way and could not be undone (" + std::strerror(code) +
                  "): the contents of its range are unknown. Close the arena.",
              {{"call", std::string(call)}, {"errno", std::int64_t{code}}});
}

void HostMemory::require_mappings(std::size_t more, const char* call) const {
  if (table_.mappings() + more <= mapping_limit_) return;
  throw Error(ErrorKind::limit_exceeded,
              std::string(call) + ": needs up to " + std::to_string(more) + " kernel mappings more than the " +
                  std::to_string(table_.mappings()) + " in use; vm.max_map_count = " + std::to_string(max_map_count_) +
                  " leaves " + std::to_string(mapping_limit_) +
                  " for the arena. Nothing changed. Raise it (sysctl vm.max_map_count) or use larger pages.",
              {{"call", std::string(call)},
               {"limited_by", std::string("vm.max_map_count")},
               {"requested", number(more)},
               {"in_use", number(table_.mappings())},
               {"limit", number(mapping_limit_)}});
}

// ---- regions ---------------------------------------------------------------------------------------------------------
std::byte* HostMemory::reserve_addresses(std::size_t bytes, std::size_t alignment, const char* call) {
  const std::size_t extra = alignment > granularity_ ? alignment : 0;
  const os::Asked asked{std::max(bytes, bytes + extra), 0, 2};
  if (bytes + extra < bytes) fail(call, ENOMEM, asked);
  void* place = system_->map(nullptr, bytes + extra, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) fail(call, errno, asked);
  const Address begin = reinterpret_cast<Address>(place);
  const Address at = extra == 0 ? begin : (begin + alignment - 1) / alignment * alignment;
  if (at > begin) ::munmap(place, at - begin);
  if (begin + extra > at) ::munmap(pointer(at + bytes), begin + extra - at);
  return reinterpret_cast<std::byte*>(at);
}

std::byte* HostMemory::reserve(std::size_t bytes, std::size_t alignment) {
  const std::lock_guard<std::mutex> lock(mutex_);
  table_.require_reservable(bytes, alignment);
  require_mappings(1, "reserve");
  std::byte* at = reserve_addresses(bytes, bytes >= kHugeBytes ? std::max(alignment, kHugeBytes) : alignment, "reserve");
  try {
    table_.add_region(address_of(at), bytes);
  } catch (...) {
    ::munmap(at, bytes);
    throw;
  }
  return at;
}

void HostMemory::release(std::byte* address, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  table_.require_region(address_of(address), bytes, "release");
  if (::munmap(address, bytes) != 0) {  // the kernel may keep two reservations as one mapping, which is then cut
    drop_ballast();
    const int code = ::munmap(address, bytes) == 0 ? 0 : errno;
    make_ballast();
    if (code != 0) fail("release", code, {0, 0, 2});
  }
  table_.remove_region(address_of(address));
}

void HostMemory::retire(std::byte* address, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Address at = address_of(address);
  if (table_.require_retirable(at, bytes, "retire")) return;  // a caller may have written there: it stays
  require_mappings(2, "retire");                              // a part of a reservation leaves both its ends
  // Private, so that no other process shares this, and not reserved, so that unwritten pages cost nothing.
  const auto show_zeros = [&] {
    return system_->map(address, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
                        0) != MAP_FAILED;
  };
  int code = show_zeros() ? 0 : errno;
  if (code == ENOMEM) {  // see make_ballast()
    drop_ballast();
    code = show_zeros() ? 0 : errno;
    make_ballast();
  }
  if (code != 0) fail("retire", code, {0, bytes, 2});
  table_.retire(at, bytes);
}

// ---- pages -----------------------------------------------------------------------------------------------------------
PageHandle HostMemory::create_page(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bytes != page_bytes_) {
    throw Error(ErrorKind::invalid_argument,
                "create_page: every page of this backend has " + std::to_string(page_bytes_) + " bytes, got " +
                    std::to_string(bytes) + ". Nothing changed.",
                {{"bytes", number(bytes)}, {"page_bytes", number(page_bytes_)}});
  }
  if (pages_.bytes() == capacity_bytes_) {
    throw Error(ErrorKind::out_of_memory,
                "create_page: all " + std::to_string(capacity_bytes_ / page_bytes_) + " pages of " +
                    std::to_string(page_bytes_) + " bytes exist already (capacity " + std::to_string(capacity_bytes_) +
                    " bytes). Nothing changed. Destroy a page or open the arena with a larger capacity.",
                {{"requested", number(bytes)}, {"free", std::int64_t{0}}, {"capacity", number(capacity_bytes_)}});
  }
  pages_.make_room();
  return pages_.add(bytes);
}

void HostMemory::destroy_page(PageHandle page) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::uint32_t slot = pages_.require_unmapped(page);
  // A hole gives the memory back and makes the slot read as zero, which is what new_pages_are_zero() promises. A file that others
  // share has their bytes.
  if (!shared_ && system_->punch(file_, static_cast<off_t>(slot * page_bytes_), page_bytes_) != 0) fail("destroy_page", errno, {});
  pages_.remove(slot);
}

// ---- host memory -----------------------------------------------------------------------------------------------------
std::byte* HostMemory::allocate_host(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bytes == 0) {
    throw Error(ErrorKind::invalid_argument, "allocate_host: expected a size above 0. Nothing changed.",
                {{"bytes", std::int64_t{0}}});
  }
  const std::size_t rounded = (bytes + granularity_ - 1) / granularity_ * granularity_;
  if (rounded < bytes) fail("allocate_host", ENOMEM, {bytes});
  std::byte* place = reserve_addresses(rounded, rounded >= kHugeBytes ? kHugeBytes : granularity_, "allocate_host");
  if (rounded >= kHugeBytes) (void)system_->advise(place, rounded, MADV_HUGEPAGE);
  try {
    if (system_->protect(place, rounded, PROT_READ | PROT_WRITE) != 0) fail("allocate_host", errno, {0, rounded, 2});
    host_ranges_.emplace(address_of(place), HostRange{bytes, true});
  } catch (...) {
    ::munmap(place, rounded);
    throw;
  }
  host_bytes_ += bytes;
  return place;
}

void HostMemory::register_host(const std::byte* address, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Address at = address_of(address);
  if (at == 0 || bytes == 0 || at + bytes < at) {
    throw Error(ErrorKind::invalid_argument, "register_host: expected an address and a size above 0. Nothing changed.",
                {{"bytes", number(bytes)}});
  }
  const auto after = host_ranges_.lower_bound(at);
  const bool overlaps =
      (after != host_ranges_.end() && after->first < at + bytes) ||
      (after != host_ranges_.begin() && std::prev(after)->first + std::prev(after)->second.bytes > at);
  if (overlaps) {
    throw Error(ErrorKind::invalid_state,
                "register_host: a part of these " + std::to_string(bytes) +
                    " bytes is allocated here or registered already. Nothing changed.",
                {{"address", static_cast<std::int64_t>(at)}, {"bytes", number(bytes)}});
  }
  host_ranges_.emplace(at, HostRange{bytes, false});
  host_bytes_ += bytes;
}

void HostMemory::drop_host(const std::byte* address, std::size_t bytes, bool owned, const char* call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto range = host_ranges_.find(address_of(address));
  if (range == host_ranges_.end() || range->second.bytes != bytes || range->second.owned != owned) {
    throw Error(ErrorKind::invalid_argument,
                std::string(call) + ": expected the address and size of memory that was " +
                    (owned ? "allocated" : "registered") + " here, got " + std::to_string(bytes) + " bytes. Nothing changed.",
                {{"call", std::string(call)},
                 {"address", static_cast<std::int64_t>(address_of(address))},
                 {"bytes", number(bytes)}});
  }
  if (owned && ::munmap(pointer(range->first), (bytes + granularity_ - 1) / granularity_ * granularity_) != 0) {
    fail(call, errno, {0, 0, 2});
  }
  host_bytes_ -= bytes;
  host_ranges_.erase(range);
}

void HostMemory::use_host(const std::byte* address, std::size_t bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto range = host_ranges_.find(address_of(address));
  if (range != host_ranges_.end() && range->second.bytes == bytes) return;
  throw Error(ErrorKind::invalid_argument,
              "use_host: expected the address and size of memory that was allocated or registered here, got " + std::to_string(bytes) +
                  " bytes. Nothing changed.",
              {{"call", std::string("use_host")},
               {"address", static_cast<std::int64_t>(address_of(address))},
               {"bytes", number(bytes)}});
}

void HostMemory::free_host(std::byte* address, std::size_t bytes) { drop_host(address, bytes, true, "free_host"); }

void HostMemory::unregister_host(const std::byte* address, std::size_t bytes) {
  drop_host(address, bytes, false, "unregister_host");
}

}  // namespace remap::host
