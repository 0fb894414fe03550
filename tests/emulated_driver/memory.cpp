// Addresses and mappings. Pages are in pages.cpp.
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <iterator>

#include "text.h"

namespace remap::emulated {
namespace {

void* pointer(CUdeviceptr at) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(at)); }

bool overlap(CUdeviceptr a, std::size_t a_bytes, CUdeviceptr b, std::size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

int protection(int access) {
  if (access == kAccessReadWrite) return PROT_READ | PROT_WRITE;
  return access == kAccessRead ? PROT_READ : PROT_NONE;
}

// A child has no part in the parent's device memory.
void keep_from_children(CUdeviceptr at, std::size_t bytes) { (void)madvise(pointer(at), bytes, MADV_DONTFORK); }

}  // namespace

// ---- addresses -------------------------------------------------------------------------------------------------------

CUresult Memory::reserve(CUdeviceptr* at, std::size_t bytes, std::size_t alignment, unsigned long long flags) {
  const std::size_t grain = settings_.granularity;
  if (at == nullptr || flags != 0 || bytes == 0 || bytes % grain != 0 || (alignment & (alignment - 1)) != 0) {
    return journal_.violate(kInvalidValue, "cuMemAddressReserve: size " + std::to_string(bytes) + ", alignment " +
                                               std::to_string(alignment) + " or flags not allowed");
  }
  const std::size_t align = std::max(alignment, grain);
  const std::size_t whole = bytes + align;
  if (whole < bytes) return kOutOfMemory;
  void* found = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return kOutOfMemory;
  const auto begin = reinterpret_cast<std::uintptr_t>(found);
  const std::uintptr_t aligned = (begin + align - 1) / align * align;
  if (aligned > begin) munmap(found, aligned - begin);
  const std::size_t rest = begin + whole - (aligned + bytes);
  if (rest > 0) munmap(pointer(aligned + bytes), rest);
  keep_from_children(aligned, bytes);
  reservations_.emplace(aligned, bytes);
  *at = aligned;
  return kSuccess;
}

CUresult Memory::free_range(CUdeviceptr at, std::size_t bytes) {
  const auto found = reservations_.find(at);
  if (found == reservations_.end() || found->second != bytes) {
    return journal_.violate(kInvalidValue, "cuMemAddressFree: " + range_text(at, bytes) + " is not the whole of a reservation");
  }
  const auto mapping = mappings_.lower_bound(at);
  if (mapping != mappings_.end() && mapping->first < at + bytes) {
    return journal_.violate(kInvalidValue, "cuMemAddressFree: something is still mapped at " + hex(mapping->first));
  }
  munmap(pointer(at), bytes);
  reservations_.erase(found);
  return kSuccess;
}

bool Memory::reserved(CUdeviceptr at) const {
  auto found = reservations_.upper_bound(at);
  if (found == reservations_.begin()) return false;
  --found;
  return at < found->first + found->second;
}

// ---- mappings --------------------------------------------------------------------------------------------------------

CUresult Memory::map(CUdeviceptr at, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle handle,
                     unsigned long long flags) {
  const auto found = handles_.find(handle);
  if (found == handles_.end()) return journal_.violate(kInvalidValue, "cuMemMap: unknown or released handle");
  const std::shared_ptr<Physical>& page = found->second;
  if (offset != 0 || flags != 0 || bytes != page->bytes || at % settings_.granularity != 0) {
    return journal_.violate(kInvalidValue, "cuMemMap: a handle is mapped whole, from offset 0, at an aligned address; got " +
                                               range_text(at, bytes) + " for " + std::to_string(page->bytes) + " bytes");
  }
  auto room = reservations_.upper_bound(at);
  if (room == reservations_.begin() || std::prev(room)->first + std::prev(room)->second < at + bytes) {
    return journal_.violate(kInvalidValue, "cuMemMap: " + range_text(at, bytes) + " is not inside one reservation");
  }
  const auto next = mappings_.lower_bound(at);
  const bool hits_next = next != mappings_.end() && overlap(at, bytes, next->first, next->second.bytes);
  const bool hits_last =
      next != mappings_.begin() && overlap(at, bytes, std::prev(next)->first, std::prev(next)->second.bytes);
  if (hits_next || hits_last) {
    return journal_.violate(kInvalidValue, "cuMemMap: something is mapped in " + range_text(at, bytes) + " already");
  }
  void* shown = mmap(pointer(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, page->file, static_cast<off_t>(page->offset));
  if (shown == MAP_FAILED) return kOutOfMemory;
  keep_from_children(at, bytes);
  mappings_.emplace(at, Mapping{bytes, page, {}});
  return kSuccess;
}

CUresult Memory::whole_mappings(const char* entry, CUdeviceptr at, std::size_t bytes) {
  if (bytes == 0) return journal_.violate(kInvalidValue, std::string(entry) + ": empty range");
  for (CUdeviceptr next = at; next < at + bytes;) {
    const auto mapping = mappings_.find(next);
    if (mapping == mappings_.end() || next + mapping->second.bytes > at + bytes) {
      return journal_.violate(
          kInvalidValue, std::string(entry) + ": " + range_text(at, bytes) + " has a hole or cuts a handle at " + hex(next));
    }
    next += mapping->second.bytes;
  }
  return kSuccess;
}

CUresult Memory::unmap(CUdeviceptr at, std::size_t bytes) {
  if (const CUresult refused = whole_mappings("cuMemUnmap", at, bytes); refused != kSuccess) return refused;
  // The bare reservation again: touching it faults.
  void* bare = mmap(pointer(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (bare == MAP_FAILED) return kOutOfMemory;
  keep_from_children(at, bytes);
  mappings_.erase(mappings_.lower_bound(at), mappings_.lower_bound(at + bytes));
  return kSuccess;
}

CUresult Memory::set_access(CUdeviceptr at, std::size_t bytes, const CUmemAccessDesc* descriptors, std::size_t count) {
  if (descriptors == nullptr || count == 0) return journal_.violate(kInvalidValue, "cuMemSetAccess: no descriptor");
  for (std::size_t i = 0; i < count; ++i) {
    const CUmemAccessDesc& each = descriptors[i];
    if (each.location.type != kDeviceLocation ||
        (each.flags != kAccessNone && each.flags != kAccessRead && each.flags != kAccessReadWrite)) {
      return journal_.violate(kInvalidValue, "cuMemSetAccess: access 0, 1 or 3 for a device expected");
    }
    if (each.location.id < 0 || each.location.id >= static_cast<int>(settings_.devices)) {
      return journal_.violate(kInvalidDevice, "cuMemSetAccess: no device " + std::to_string(each.location.id));
    }
  }
  if (const CUresult refused = whole_mappings("cuMemSetAccess", at, bytes); refused != kSuccess) return refused;
  for (auto mapping = mappings_.lower_bound(at); mapping != mappings_.end() && mapping->first < at + bytes; ++mapping) {
    std::map<CUdevice, int> access = mapping->second.access;
    for (std::size_t i = 0; i < count; ++i) access[descriptors[i].location.id] = descriptors[i].flags;
    int most = kAccessNone;  // what the processor may do: as much as any device
    for (const auto& [device, flags] : access) most = std::max(most, flags);
    if (mprotect(pointer(mapping->first), mapping->second.bytes, protection(most)) != 0) return kOutOfMemory;
    mapping->second.access = std::move(access);
  }
  return kSuccess;
}

const Memory::Mapping* Memory::mapping_at(CUdeviceptr at, CUdeviceptr* begin) const {
  auto found = mappings_.upper_bound(at);
  if (found == mappings_.begin()) return nullptr;
  --found;
  if (at >= found->first + found->second.bytes) return nullptr;
  *begin = found->first;
  return &found->second;
}

std::size_t Memory::mappings_in(CUdeviceptr at, std::size_t bytes) const {
  return static_cast<std::size_t>(std::distance(mappings_.lower_bound(at), mappings_.lower_bound(at + bytes)));
}

bool Memory::mapped(CUdeviceptr at, std::size_t bytes) const {
  for (CUdeviceptr next = at; next < at + bytes;) {
    CUdeviceptr begin = 0;
    const Mapping* mapping = mapping_at(next, &begin);
    if (mapping == nullptr) return false;
    next = begin + mapping->bytes;
  }
  return true;
}

bool Memory::accessible(CUdeviceptr at, std::size_t bytes, CUdevice device, int access) const {
  for (CUdeviceptr next = at; next < at + bytes;) {
    CUdeviceptr begin = 0;
    const Mapping* mapping = mapping_at(next, &begin);
    if (mapping == nullptr) return false;
    const auto allowed = mapping->access.find(device);
    if (allowed == mapping->access.end() || (allowed->second & access) != access) return false;
    next = begin + mapping->bytes;
  }
  return true;
}

}  // namespace remap::emulated
