// SPDX-License-Identifier: Apache-2.0
// The pages behind each address: map, unmap, access, exchange, populate, and how each is undone when it fails half-way.
#include <sys/mman.h>

#include <cerrno>
#include <string>
#include <utility>

#include "backend/host_memory.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace remap::host {
namespace {

constexpr std::size_t kBallast = 16;  // see make_ballast()

int protection_of(Access access) noexcept {
  switch (access) {
    case Access::read: return PROT_READ;
    case Access::read_write: return PROT_READ | PROT_WRITE;
    case Access::none: break;
  }
  return PROT_NONE;
}

}  // namespace

bool HostMemory::blank(Address at, std::size_t bytes) noexcept {
  const auto attempt = [&] {
    return system_->map(pointer(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) !=
           MAP_FAILED;
  };
  if (attempt()) return true;
  if (errno != ENOMEM) return false;
  drop_ballast();
  const bool done = attempt();
  const int code = errno;
  make_ballast();
  errno = code;
  return done;
}

// A process that has all the mappings it may have cannot even replace one by another: mmap refuses before it looks at what
// would go away. Giving memory back and undoing must work then too, so a few mappings are kept to be given up at once.
void HostMemory::make_ballast() noexcept {
  if (ballast_ != nullptr) return;
  void* place = ::mmap(nullptr, kBallast * granularity_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return;
  ballast_ = static_cast<std::byte*>(place);
  for (std::size_t i = 1; i < kBallast; i += 2) (void)::mprotect(ballast_ + i * granularity_, granularity_, PROT_READ);
}

void HostMemory::drop_ballast() noexcept {
  if (ballast_ != nullptr) ::munmap(ballast_, kBallast * granularity_);
  ballast_ = nullptr;
}

// ---- mappings --------------------------------------------------------------------------------------------------------
void HostMemory::map(std::byte* at, const PageHandle* pages, std::size_t count, std::size_t page_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (page_bytes != page_bytes_ || count == 0 || count > ~std::size_t{0} / page_bytes) {
    throw Error(ErrorKind::invalid_argument,
                "map: expected at least one page of " + std::to_string(page_bytes_) + " bytes, got " + std::to_string(count) +
                    " of " + std::to_string(page_bytes) + ". Nothing changed.",
                {{"count", number(count)}, {"page_bytes", number(page_bytes)}});
  }
  const Address begin = address_of(at);
  const std::size_t bytes = count * page_bytes;
  table_.require_unmapped(begin, bytes, "map");

  MappingTable::Cells cells = pages_.cells(begin, pages, count, page_bytes);
  std::vector<Run> runs;
  for (const auto& [place, cell] : cells) {
    if (!runs.empty() && runs.back().first.slot + runs.back().bytes / page_bytes_ == cell.slot) {
      runs.back().bytes += page_bytes_;
    } else {
      runs.push_back({place, page_bytes_, cell});
    }
  }
  require_mappings(runs.size() + 1, "map");  // the runs, and the rest of the reservation on one side
  show_runs(begin, runs, bytes);
  pages_.count_mapped(cells);
  table_.add(cells);
}

void HostMemory::show_runs(Address at, const std::vector<Run>& runs, std::size_t bytes) {
  int code = 0;
  std::size_t done = 0;
  for (const Run& run : runs) {
    const off_t offset = static_cast<off_t>(run.first.slot * page_bytes_);
    if (system_->map(pointer(run.address), run.bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file_, offset) == MAP_FAILED) {
      code = errno;
      break;
    }
    done += run.bytes;
  }
  // Before any code may access the range: a child forked in between has it with access none, and no way to change that.
  if (code == 0 && system_->advise(pointer(at), bytes, MADV_DONTFORK) != 0) code = errno;
  if (code == 0) {
    if (huge_pages_) (void)system_->advise(pointer(at), bytes, MADV_HUGEPAGE);  // a hint; works without
    return;
  }
  if (done != 0 && !blank(at, done)) fail_broken("map", errno);
  fail("map", code, {0, 0, runs.size() + 1});
}

void HostMemory::unmap(std::byte* at, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Address begin = address_of(at);
  table_.require_pages(begin, bytes, "unmap");
  require_mappings(2, "unmap");  // the middle of a run leaves both its ends
  if (!blank(begin, bytes)) fail("unmap", errno, {0, 0, 2});
  pages_.count_unmapped(table_, begin, bytes);
  table_.remove(begin, bytes);
}

void HostMemory::set_access(std::byte* at, std::size_t bytes, Access access) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Address begin = address_of(at);
  table_.require_pages(begin, bytes, "set_access");
  const std::vector<Run> before = table_.runs(begin, bytes);
  require_mappings(2, "set_access");
  if (system_->protect(at, bytes, protection_of(access)) != 0) {
    // The kernel goes mapping by mapping and stops at the one that fails.
    const int code = errno;
    drop_ballast();
    for (const Run& run : before) {
      if (system_->protect(pointer(run.address), run.bytes, protection_of(run.first.access)) != 0) {
        fail_broken("set_access", errno);
      }
    }
    make_ballast();
    fail("set_access", code, {0, 0, 2});
  }
  table_.set_access(begin, bytes, access);
}

// ---- exchange --------------------------------------------------------------------------------------------------------
void HostMemory::prepare_scratch(std::size_t bytes) {
  // Room for the range at the same distance from a page table's edge: only then does the kernel move whole tables.
  const std::size_t needed = bytes + kHugeBytes;
  if (scratch_bytes_ >= needed) return;
  const Address larger = address_of(reserve_addresses(needed, kHugeBytes, "exchange"));
  if (scratch_ != 0) ::munmap(pointer(scratch_), scratch_bytes_);
  scratch_ = larger;
  scratch_bytes_ = needed;
}

void HostMemory::move_runs(const std::vector<Run>& runs, Address from, Address to, std::vector<Move>& moves) {
  const os::Asked asked{0, 0, runs.size() + 6};
  for (const Run& run : runs) {
    const Move whole{run.address, run.address - from + to, run.bytes};
    if (system_->move(pointer(whole.from), whole.bytes, pointer(whole.to)) != MAP_FAILED) {
      moves.push_back(whole);
      continue;
    }
    // Before Linux 6.17 mremap refuses a range that the kernel keeps as two mappings, and it need not merge all that it
    // could. A single page is always one mapping.
    if (errno != EFAULT || run.bytes == page_bytes_) fail("exchange", errno, asked);
    for (std::size_t done = 0; done < run.bytes; done += page_bytes_) {
      const Move page{whole.from + done, whole.to + done, page_bytes_};
      if (system_->move(pointer(page.from), page.bytes, pointer(page.to)) == MAP_FAILED) fail("exchange", errno, asked);
      moves.push_back(page);
    }
  }
}

void HostMemory::exchange(std::byte* a, std::byte* b, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!can_exchange_) {
    throw Error(ErrorKind::invalid_state, "exchange: this kernel cannot (it needs Linux 5.13). Nothing changed. Unmap and map.",
                {{"call", std::string("exchange")}});
  }
  const Address one = address_of(a);
  const Address other = address_of(b);
  table_.require_pages(one, bytes, "exchange");
  table_.require_pages(other, bytes, "exchange");
  if (one < other + bytes && other < one + bytes) {
    throw Error(ErrorKind::invalid_argument,
                "exchange: expected two ranges that do not overlap, got two of " + std::to_string(bytes) + " bytes that are " +
                    std::to_string(one < other ? other - one : one - other) + " bytes apart. Nothing changed.",
                {{"bytes", number(bytes)}});
  }
  const std::vector<Run> one_runs = table_.runs(one, bytes);
  const std::vector<Run> other_runs = table_.runs(other, bytes);
  // The scratch side, and both ends of each range, which are cut off their neighbours.
  require_mappings(one_runs.size() + 6, "exchange");
  prepare_scratch(bytes);
  const Address scratch = scratch_ + one % kHugeBytes;

  std::vector<Move> moves;
  moves.reserve(3 * (bytes / page_bytes_));  // so that noting a move cannot fail after it was made
  std::vector<Run> scratch_runs = one_runs;
  for (Run& run : scratch_runs) run.address = run.address - one + scratch;
  try {
    move_runs(one_runs, one, scratch, moves);
    move_runs(other_runs, other, one, moves);
    move_runs(scratch_runs, scratch, other, moves);
  } catch (...) {  // an Error that could not be made, for want of memory, as well
    // Each place that a move left still shows what it showed, without page tables; moving back puts those in again.
    drop_ballast();
    for (auto move = moves.rbegin(); move != moves.rend(); ++move) {
      if (system_->move(pointer(move->to), move->bytes, pointer(move->from)) == MAP_FAILED) fail_broken("exchange", errno);
    }
    (void)blank(scratch, bytes);
    make_ballast();
    throw;
  }
  // If this fails, a view is left at an address that no table has; the next exchange replaces it.
  (void)blank(scratch, bytes);
  table_.exchange(one, other, bytes);
}

void HostMemory::populate(std::byte* at, std::size_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    table_.require_accessible(address_of(at), bytes, "populate");
  }
  // POPULATE_READ also for memory that will be written: shared pages become writable without another fault, and it costs
  // less than half of POPULATE_WRITE.
  if (system_->advise(at, bytes, MADV_POPULATE_READ) == 0) return;
  if (errno != EINVAL) return;  // a hint
  for (std::size_t offset = 0; offset < bytes; offset += granularity_) {  // Linux before 5.14
    (void)*reinterpret_cast<const volatile std::byte*>(at + offset);
  }
}

}  // namespace remap::host
