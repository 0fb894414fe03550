// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/locked_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <string>

#include "backend/cuda/first_touch.h"
#include "backend/os_limits.h"

namespace remap::cuda {
namespace {

using mapping::Address;
using mapping::address_of;
using mapping::number;

constexpr std::size_t kHugeBytes = std::size_t{2} << 20;

[[noreturn]] void fail_system(const char* call, const char* what, std::size_t bytes, int code, const os::Asked& asked) {
  throw os::refusal(std::string(call) + ": " + what + " of " + std::to_string(bytes) + " bytes", code, asked,
                    {{"operation", std::string(call)}});
}

// Memory of our own while it is being prepared.
class Buffer {
 public:
  Buffer(std::size_t bytes, const char* call) : bytes_(bytes) {
    const std::size_t extra = bytes >= kHugeBytes ? kHugeBytes : 0;  // room to begin where a huge page can
    const os::Asked asked{std::max(bytes, bytes + extra), bytes, 2};
    if (bytes + extra < bytes) fail_system(call, "mmap", bytes, ENOMEM, asked);
    void* place = ::mmap(nullptr, bytes + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) fail_system(call, "mmap", bytes, errno, asked);
    at_ = static_cast<std::byte*>(place);
    if (extra == 0) return;
    const std::size_t skip = (kHugeBytes - address_of(at_) % kHugeBytes) % kHugeBytes;
    if (skip != 0) ::munmap(at_, skip);
    if (extra != skip) ::munmap(at_ + skip + bytes, extra - skip);
    at_ += skip;
    (void)::madvise(at_, bytes, MADV_HUGEPAGE);  // a hint; works without
  }
  ~Buffer() {
    if (at_ != nullptr) ::munmap(at_, bytes_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* get() const noexcept { return at_; }
  void keep() noexcept { at_ = nullptr; }

  void fill_in(const char* call) {
    const int failure = first_touch(at_, bytes_, first_touch_threads(bytes_));
    if (failure != 0) fail_system(call, "filling in", bytes_, failure, {});
  }

 private:
  std::byte* at_ = nullptr;
  const std::size_t bytes_;
};

}  // namespace

LockedMemory::LockedMemory(const Context& context, const Options& options)
    : context_(context),
      driver_(context.driver()),
      options_(options),
      os_page_(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))) {}

// Memory that the driver still has locked must not be unmapped under it: it stays then, to the end of the process.
LockedMemory::~LockedMemory() {
  try {
    const Context::Use use(context_, "close");
    for (auto& range : ranges_) {
      auto* at = reinterpret_cast<std::byte*>(range.first);
      const bool unlocked = unlock_pages(at, range.second.registered) == result::kSuccess;
      if (unlocked && range.second.owned()) ::munmap(at, range.second.span);
    }
  } catch (const Error&) {
    // No context to work in: the process is ending, and its end gives everything back.
  }
}

void LockedMemory::add_usage(Usage& usage) const {
  const std::shared_lock<std::shared_mutex> lock(books_);
  usage.host_bytes = bytes_;
}

std::size_t LockedMemory::locked_span(Address at, std::size_t bytes) const noexcept {
  const Address begin = at / os_page_ * os_page_;
  return (at + bytes - begin + os_page_ - 1) / os_page_ * os_page_;
}

// `locked`: how much more would be page-locked. `to_find`: how much of that is not in memory yet.
void LockedMemory::require_budget(std::size_t locked, std::size_t to_find, const char* call) const {
  const char* by = to_string(options_.budget.limited_by);
  if (options_.budget.set()) {
    if (locked <= options_.budget.bytes - std::min(options_.budget.bytes, locked_)) return;
    throw Error(ErrorKind::limit_exceeded,
                std::string(call) + ": " + std::to_string(locked) + " bytes more of locked memory would pass the budget of " +
                    std::to_string(options_.budget.bytes) + " that " + by + " sets, of which " + std::to_string(locked_) +
                    " are in use. Nothing changed. Raise " + by + ", or keep less in host memory.",
                {{"operation", std::string(call)},
                 {"requested", number(locked)},
                 {"in_use", number(locked_)},
                 {"limit", number(options_.budget.bytes)},
                 {"limited_by", std::string(by)}});
  }
  const HostBudget left = host_budget(read_host_limits());
  const std::size_t available = left.bytes - std::min(left.bytes, file_bytes_);
  if (to_find <= available) return;
  by = to_string(left.limited_by);
  const bool cgroup = left.limited_by == LimitedBy::cgroup;
  throw Error(ErrorKind::limit_exceeded,
              std::string(call) + ": " + std::to_string(to_find) + " bytes would have to be found and page-locked, but the " + by +
                  " can spare " + std::to_string(available) + ". Nothing changed. " +
                  (cgroup ? "Raise the cgroup's limit" : "Free host memory") +
                  ", or set host_budget or REMAP_HOST_BUDGET if you know better.",
              {{"operation", std::string(call)},
               {"requested", number(to_find)},
               {"in_use", number(locked_)},
               {"limit", number(available)},
               {"limited_by", std::string(by)}});
}

// Where the piece ends that has this byte of the range: an offset as well.
std::size_t LockedMemory::piece_end(Address begin, std::size_t offset, std::size_t bytes) const noexcept {
  const std::size_t lead = begin % os_page_;
  return std::min(bytes, ((lead + offset) / options_.piece + 1) * options_.piece - lead);
}

void LockedMemory::lock_pages(std::byte* at, std::size_t bytes, unsigned flags, const char* call, std::size_t& registered) const {
  const Context::Use use(context_, call);  // for all pieces: it throws before the first one, or not at all
  while (registered < bytes) {
    const std::size_t end = piece_end(address_of(at), registered, bytes);
    const Result code = driver_.cuMemHostRegister(at + registered, end - registered, flags);
    if (code != result::kSuccess) {
      const bool undone = unlock_pages(at, registered) == result::kSuccess;
      fail(driver_, call, "cuMemHostRegister", code, {{"requested", number(bytes)}},
           undone ? "Nothing changed." : "A part stays page-locked until the process ends.");
    }
    registered = end;
  }
}

Result LockedMemory::unlock_pages(std::byte* at, std::size_t& registered) const {
  const std::size_t lead = address_of(at) % os_page_;
  while (registered != 0) {
    const std::size_t last = (lead + registered - 1) / options_.piece * options_.piece;  // where the last piece begins, behind the OS page
    const std::size_t begin = last - std::min(last, lead);
    const Result code = driver_.cuMemHostUnregister(at + begin);
    if (code != result::kSuccess) return code;
    registered = begin;
  }
  return result::kSuccess;
}

// Takes the node over: nothing is allocated after the driver was called.
void LockedMemory::add(Ranges& range) {
  const std::lock_guard<std::shared_mutex> books(books_);
  const Range& added = range.begin()->second;
  bytes_ += added.bytes;
  locked_ += added.in_budget();
  file_bytes_ += added.files_in_budget();
  ranges_.merge(range);
}

std::byte* LockedMemory::allocate(std::size_t bytes, Kind kind) {
  const std::lock_guard<std::mutex> lock(changing_);
  const std::size_t rounded = (bytes + os_page_ - 1) / os_page_ * os_page_;
  if (bytes == 0 || rounded < bytes) {
    throw Error(ErrorKind::invalid_argument,
                "allocate_host: expected a size above 0 that can be rounded to OS pages, got " + std::to_string(bytes) +
                    ". Nothing changed.",
                {{"bytes", number(bytes)}});
  }
  if (kind == Kind::allocated) {
    require_budget(rounded, rounded, "allocate_host");
    make_room(rounded, "allocate_host");
  }
  Buffer buffer(rounded, "allocate_host");
  // A child made by fork has no use for it, and the kernel would copy locked pages for the child at once. Said before anything is
  // touched: a fork meanwhile, on another thread, finds nothing here to copy, and none of the threads that touch.
  if (::madvise(buffer.get(), rounded, MADV_DONTFORK) != 0) fail_system("allocate_host", "madvise", rounded, errno, {0, 0, 2});
  buffer.fill_in("allocate_host");
  std::byte* at = buffer.get();
  Ranges range;
  Range& made = range.emplace(address_of(at), Range{bytes, rounded, 0, kind, 0}).first->second;
  try {
    lock_pages(at, rounded, kHostRegisterPortable, "allocate_host", made.registered);
  } catch (const Error&) {
    if (made.registered != 0) buffer.keep();  // memory that the driver has locked must not be unmapped
    throw;
  }
  add(range);
  buffer.keep();
  return at;
}

void LockedMemory::register_range(const std::byte* address, std::size_t bytes, HostUse use) {
  const std::lock_guard<std::mutex> lock(changing_);
  const Address at = address_of(address);
  if (at == 0 || bytes == 0 || at + bytes < at) {
    throw Error(ErrorKind::invalid_argument, "register_host: expected an address and a size above 0. Nothing changed.",
                {{"bytes", number(bytes)}});
  }
  const auto after = ranges_.lower_bound(at);
  const bool overlaps = (after != ranges_.end() && after->first < at + bytes) ||
                        (after != ranges_.begin() && std::prev(after)->first + std::prev(after)->second.bytes > at);
  if (overlaps) {
    throw Error(ErrorKind::invalid_state,
                "register_host: a part of these " + std::to_string(bytes) +
                    " bytes is allocated here or registered already. Nothing changed.",
                {{"address", static_cast<std::int64_t>(at)}, {"bytes", number(bytes)}});
  }
  const RangeFacts facts = range_facts(read_text("/proc/self/maps"), at, bytes);
  if (!facts.readable) {
    throw Error(ErrorKind::invalid_argument,
                "register_host: expected " + std::to_string(bytes) + " bytes of mapped, readable memory. Nothing changed.",
                {{"address", static_cast<std::int64_t>(at)}, {"bytes", number(bytes)}});
  }
  Ranges range;
  Range& made = range.emplace(at, Range{bytes, locked_span(at, bytes), facts.file_bytes, Kind::registered, 0, use}).first->second;
  if (use == HostUse::locked) {
    lock_readable(const_cast<std::byte*>(address), bytes, facts, "register_host", made.registered);
  }
  add(range);
}

void LockedMemory::lock_readable(std::byte* at, std::size_t bytes, const RangeFacts& facts, const char* call,
                                 std::size_t& registered) {
  unsigned flags = kHostRegisterPortable;
  if (!facts.writable && options_.read_only_register) flags |= kHostRegisterReadOnly;
  if (!facts.writable && !options_.read_only_register && !options_.coherent) {
    throw Error(ErrorKind::driver,
                std::string(call) + ": this device cannot page-lock memory that may not be written. Nothing changed. Copy it into "
                "memory from allocate_host.",
                {{"address", static_cast<std::int64_t>(address_of(at))},
                 {"bytes", number(bytes)},
                 {"code", std::int64_t{result::kNotSupported}},
                 {"name", std::string("CUDA_ERROR_NOT_SUPPORTED")}});
  }
  // Anonymous memory that is there already takes nothing more. Behind file pages stands what the system counts as available,
  // in memory or not.
  const std::size_t span = locked_span(address_of(at), bytes);
  const std::size_t resident = facts.file_bytes == 0 ? resident_bytes(address_of(at), bytes) : 0;
  require_budget(span, span - std::min(span, resident), call);
  make_room(span, call);
  lock_pages(at, bytes, flags, call, registered);
}

// Concurrency: a thread that copies looks a range's use up once (`use_of`), under books_, and does not hold the lock when it then
// enqueues. To `locked`: until the last line it finds `staged`, and a staged copy only reads the memory, which page-locking neither
// moves nor changes. To `staged`: it finds that from now on, and what it enqueued before is over (`Backend::use_host`), so that
// `make_room` may end the page locks at any time behind that.
void LockedMemory::use_range(const std::byte* address, std::size_t bytes, HostUse use) {
  const std::lock_guard<std::mutex> lock(changing_);
  const auto found = find(address, bytes, std::nullopt, "use_host");
  Range& range = found->second;
  auto* const at = const_cast<std::byte*>(address);
  if (use == HostUse::staged || range.use == use || range.registered >= bytes) return set(range, use, range.registered);
  if (range.registered != 0) unlock(found, "use_host");  // a part, where that has failed before
  std::size_t registered = 0;
  const RangeFacts facts = range_facts(read_text("/proc/self/maps"), address_of(address), bytes);
  try {
    lock_readable(at, bytes, facts, "use_host", registered);
  } catch (const Error&) {
    set(range, HostUse::staged, registered);
    throw;
  }
  set(range, use, registered);
}

void LockedMemory::set(Range& range, HostUse use, std::size_t registered) {
  const std::lock_guard<std::shared_mutex> books(books_);
  locked_ -= range.in_budget();
  file_bytes_ -= range.files_in_budget();
  range.use = use;
  range.registered = registered;
  locked_ += range.in_budget();
  file_bytes_ += range.files_in_budget();
}

LockedMemory::Ranges::iterator LockedMemory::find(const std::byte* address, std::size_t bytes, std::optional<bool> owned,
                                                  const char* call) {
  const auto range = ranges_.find(address_of(address));
  if (range == ranges_.end() || range->second.bytes != bytes || range->second.owned() != owned.value_or(range->second.owned())) {
    throw Error(ErrorKind::invalid_argument,
                std::string(call) + ": expected the address and size of memory that was " +
                    (!owned ? "allocated or registered" : *owned ? "allocated" : "registered") + " here, got " +
                    std::to_string(bytes) + " bytes. Nothing changed.",
                {{"operation", std::string(call)},
                 {"address", static_cast<std::int64_t>(address_of(address))},
                 {"bytes", number(bytes)}});
  }
  return range;
}

void LockedMemory::make_room(std::size_t locked, const char* call) {
  if (!options_.budget.set()) return;  // memory that is there and page-locked takes no more of the machine than memory that is there
  std::size_t all = locked;
  const auto in_pages = [this](const auto& range) {
    return range.second.registered == 0 ? 0 : locked_span(range.first, range.second.registered);
  };
  for (const auto& each : ranges_) all += each.second.kind == Kind::slots ? 0 : in_pages(each);
  for (auto range = ranges_.begin(); range != ranges_.end() && all > options_.budget.bytes; ++range) {
    if (range->second.use != HostUse::staged || range->second.registered == 0) continue;
    all -= in_pages(*range);
    unlock(range, call);
  }
}

void LockedMemory::unlock(Ranges::iterator range, const char* call) {
  const Context::Use use(context_, call);
  // Out of the books piece by piece: no copy of the caller's uses this memory any more, and the next try goes on here.
  const std::size_t locked = range->second.registered;
  std::size_t registered = locked;
  const Result code = unlock_pages(reinterpret_cast<std::byte*>(range->first), registered);
  set(range->second, range->second.use, registered);
  if (code != result::kSuccess) {
    fail(driver_, call, "cuMemHostUnregister", code, {{"page_locked", number(registered)}},
         registered == locked ? "Nothing changed." : "A part is no longer page-locked; call it again for the rest.");
  }
}

void LockedMemory::drop(const std::byte* address, std::size_t bytes, bool owned, const char* call) {
  const std::lock_guard<std::mutex> lock(changing_);
  const auto range = find(address, bytes, owned, call);
  auto* at = reinterpret_cast<std::byte*>(range->first);
  if (range->second.registered != 0) unlock(range, call);
  if (owned && ::munmap(at, range->second.span) != 0) {
    const int code = errno;  // neighbours that the kernel keeps as one mapping may need another when they are cut
    throw Error(ErrorKind::limit_exceeded,
                std::string(call) + ": munmap of " + std::to_string(bytes) + " bytes failed (" + std::strerror(code) +
                    "). The memory is there still, but no longer page-locked. Raise vm.max_map_count and free it again.",
                {{"operation", std::string(call)},
                 {"limited_by", std::string("vm.max_map_count")},
                 {"bytes", number(bytes)},
                 {"errno", std::int64_t{code}}});
  }
  const std::lock_guard<std::shared_mutex> books(books_);
  bytes_ -= range->second.bytes;
  locked_ -= range->second.in_budget();
  file_bytes_ -= range->second.files_in_budget();
  ranges_.erase(range);
}

void LockedMemory::free(std::byte* address, std::size_t bytes) { drop(address, bytes, true, "free_host"); }

void LockedMemory::unregister_range(const std::byte* address, std::size_t bytes) {
  drop(address, bytes, false, "unregister_host");
}

std::optional<HostUse> LockedMemory::use_of(const std::byte* at, std::size_t bytes) const {
  const std::shared_lock<std::shared_mutex> lock(books_);
  const auto after = ranges_.upper_bound(address_of(at));
  if (after == ranges_.begin()) return std::nullopt;
  const auto& [begin, range] = *std::prev(after);
  const std::size_t most = range.use == HostUse::locked ? std::min(range.bytes, range.registered) : range.bytes;
  if (address_of(at) + bytes > begin + most) return std::nullopt;
  return range.use;
}

std::size_t LockedMemory::piece_at(const std::byte* at) const {
  const std::shared_lock<std::shared_mutex> lock(books_);
  const auto range = std::prev(ranges_.upper_bound(address_of(at)));
  const std::size_t offset = address_of(at) - range->first;
  return piece_end(range->first, offset, range->second.span) - offset;
}

}  // namespace remap::cuda
