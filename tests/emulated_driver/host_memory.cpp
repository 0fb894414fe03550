#include "host_memory.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#include "text.h"

namespace remap::emulated {
namespace {

enum class Protection { missing, read_only, writable };

// What the process may do with all of the range, as the kernel lists it.
Protection protection(std::uintptr_t begin, std::size_t bytes) {
  std::ifstream maps("/proc/self/maps");
  const std::uintptr_t end = begin + bytes;
  std::uintptr_t covered = begin;
  Protection found = Protection::writable;
  for (std::string line; covered < end && std::getline(maps, line);) {
    std::istringstream words(line);
    std::uintptr_t from = 0;
    std::uintptr_t to = 0;
    char dash = 0;
    std::string rights;
    words >> std::hex >> from >> dash >> to >> rights;
    if (to <= covered) continue;
    if (from > covered || rights.empty() || rights[0] != 'r') return Protection::missing;
    if (rights[1] != 'w') found = Protection::read_only;
    covered = to;
  }
  return covered < end ? Protection::missing : found;
}

}  // namespace

CUresult HostMemory::add(void* at, std::size_t bytes, unsigned flags, CUcontext context) {
  const auto begin = reinterpret_cast<std::uintptr_t>(at);
  if (at == nullptr || bytes == 0) return journal_.violate(kInvalidValue, "cuMemHostRegister: empty range");
  if ((flags & ~(kHostPortable | kHostDeviceMap | kHostReadOnly)) != 0) {
    return journal_.violate(kInvalidValue, "cuMemHostRegister: flags " + std::to_string(flags) + " are not among 1, 2, 8");
  }
  const auto os_page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t first = begin / os_page * os_page;
  const std::uintptr_t last = (begin + bytes + os_page - 1) / os_page * os_page;
  for (const auto& [other, range] : ranges_) {
    const std::uintptr_t other_first = other / os_page * os_page;
    const std::uintptr_t other_last = (other + range.bytes + os_page - 1) / os_page * os_page;
    if (first < other_last && other_first < last) return kHostAlreadyRegistered;
  }
  const bool read_only = (flags & kHostReadOnly) != 0;
  switch (protection(begin, bytes)) {
    case Protection::missing:
      return journal_.violate(kInvalidValue, "cuMemHostRegister: " + hex(begin) + " is not all readable memory");
    case Protection::read_only:
      if (!read_only) {
        return journal_.violate(kInvalidValue, "cuMemHostRegister: " + hex(begin) + " cannot be written; the flag is missing");
      }
      break;
    case Protection::writable: break;
  }
  ranges_.emplace(begin, Registration{next_id_++, bytes, read_only, context});
  return kSuccess;
}

CUresult HostMemory::remove(void* at) {
  if (ranges_.erase(reinterpret_cast<std::uintptr_t>(at)) == 0) {
    return journal_.violate(kHostNotRegistered, "cuMemHostUnregister: not the start of a registered range");
  }
  return kSuccess;
}

const HostMemory::Registration* HostMemory::covering(std::uintptr_t at, std::size_t bytes) const {
  auto found = ranges_.upper_bound(at);
  if (found == ranges_.begin()) return nullptr;
  --found;
  return at + bytes <= found->first + found->second.bytes ? &found->second : nullptr;
}

bool HostMemory::touches(std::uintptr_t at, std::size_t bytes) const {
  const auto next = ranges_.lower_bound(at + bytes);
  if (next == ranges_.begin()) return false;
  const auto last = std::prev(next);
  return last->first + last->second.bytes > at;
}

bool HostMemory::alive(std::uint64_t id) const {
  return std::any_of(ranges_.begin(), ranges_.end(), [id](const auto& range) { return range.second.id == id; });
}

std::size_t HostMemory::bytes_at(void* at) const {
  const auto found = ranges_.find(reinterpret_cast<std::uintptr_t>(at));
  return found == ranges_.end() ? 0 : found->second.bytes;
}

std::size_t HostMemory::count_of(CUcontext context) const {
  return static_cast<std::size_t>(std::count_if(ranges_.begin(), ranges_.end(),
                                                [context](const auto& range) { return range.second.context == context; }));
}

}  // namespace remap::emulated
