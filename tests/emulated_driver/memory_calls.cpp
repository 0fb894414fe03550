// Entry points: device memory and page-locked host memory.
//
// The driver's documentation names no context for its virtual memory calls, but threads without one are reported to fail in
// them; so one is asked for.
#include "emulator.h"
#include "entry_points.h"
#include "text.h"

namespace remap::emulated::entry {
namespace {

// The driver does not look: work that is overtaken faults. Here the breach is told and the call goes on.
void report_in_flight(Emulator& e, const char* entry, CUdeviceptr at, std::size_t bytes) {
  const char* work = e.streams.in_flight(at, bytes);
  if (work == nullptr) return;
  (void)e.violate(kSuccess, std::string(entry) + ": " + work + " in flight uses " + range_text(at, bytes));
}

}  // namespace

CUresult cuMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  return serve("cuMemGetInfo", kWithContext, [&](Emulator& e, Lock&) {
    if (free_bytes == nullptr || total_bytes == nullptr) return e.violate(kInvalidValue, "cuMemGetInfo: no place for the answer");
    const std::size_t used = e.memory.used_bytes(e.contexts.device_of(Contexts::current()));
    *total_bytes = e.settings.memory_bytes;
    *free_bytes = e.settings.memory_bytes - (used < e.settings.memory_bytes ? used : e.settings.memory_bytes);
    return CUresult{kSuccess};
  });
}

CUresult cuMemGetAllocationGranularity(std::size_t* bytes, const CUmemAllocationProp* properties, int option) {
  return serve("cuMemGetAllocationGranularity", kInit,
               [&](Emulator& e, Lock&) { return e.memory.granularity(bytes, properties, option); });
}

// The hint is not taken.
CUresult cuMemAddressReserve(CUdeviceptr* at, std::size_t bytes, std::size_t alignment, CUdeviceptr, unsigned long long flags) {
  return serve("cuMemAddressReserve", kUnsafeWithContext,
               [&](Emulator& e, Lock&) { return e.memory.reserve(at, bytes, alignment, flags); });
}

CUresult cuMemAddressFree(CUdeviceptr at, std::size_t bytes) {
  return serve("cuMemAddressFree", kUnsafeWithContext, [&](Emulator& e, Lock&) { return e.memory.free_range(at, bytes); });
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* page, std::size_t bytes, const CUmemAllocationProp* properties,
                     unsigned long long flags) {
  return serve("cuMemCreate", kUnsafeWithContext,
               [&](Emulator& e, Lock&) { return e.memory.create(page, bytes, properties, flags); });
}

CUresult cuMemRelease(CUmemGenericAllocationHandle page) {
  return serve("cuMemRelease", kUnsafeWithContext, [&](Emulator& e, Lock&) { return e.memory.release(page); });
}

CUresult cuMemExportToShareableHandle(void* shared, CUmemGenericAllocationHandle page, int type, unsigned long long flags) {
  return serve("cuMemExportToShareableHandle", kUnsafeWithContext,
               [&](Emulator& e, Lock&) { return e.memory.export_page(static_cast<int*>(shared), page, type, flags); });
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* page, void* shared, int type) {
  return serve("cuMemImportFromShareableHandle", kUnsafeWithContext, [&](Emulator& e, Lock&) {
    return e.memory.import_page(page, static_cast<int>(reinterpret_cast<std::intptr_t>(shared)), type);
  });
}

CUresult cuMemMap(CUdeviceptr at, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle page,
                  unsigned long long flags) {
  return serve("cuMemMap", kUnsafeWithContext, [&](Emulator& e, Lock& lock) {
    const MappingCall call(e, lock);
    spend(lock, e.settings.map_ns);
    return e.memory.map(at, bytes, offset, page, flags);
  });
}

CUresult cuMemUnmap(CUdeviceptr at, std::size_t bytes) {
  return serve("cuMemUnmap", kUnsafeWithContext, [&](Emulator& e, Lock& lock) {
    const MappingCall call(e, lock);
    if (const CUresult refused = e.memory.whole_mappings("cuMemUnmap", at, bytes); refused != kSuccess) return refused;
    report_in_flight(e, "cuMemUnmap", at, bytes);
    e.streams.quiesce(lock, at, bytes);
    const std::size_t pages = e.memory.mappings_in(at, bytes);
    const CUresult result = e.memory.unmap(at, bytes);
    // Gone from the first moment of the call, as mapped memory is there from the last: whoever counts on more is found out.
    spend(lock, pages * e.settings.unmap_ns);
    return result;
  });
}

CUresult cuMemSetAccess(CUdeviceptr at, std::size_t bytes, const CUmemAccessDesc* descriptors, std::size_t count) {
  return serve("cuMemSetAccess", kUnsafeWithContext, [&](Emulator& e, Lock& lock) {
    const MappingCall call(e, lock);
    spend(lock, e.memory.mappings_in(at, bytes) * e.settings.set_access_ns);
    e.streams.quiesce(lock, at, bytes);
    return e.memory.set_access(at, bytes, descriptors, count);
  });
}

CUresult cuMemHostRegister(void* at, std::size_t bytes, unsigned flags) {
  return serve("cuMemHostRegister", kUnsafeWithContext, [&](Emulator& e, Lock& lock) {
    const CUcontext context = Contexts::current();
    constexpr int kReadOnlyRegister = 113;
    if ((flags & kHostReadOnly) != 0 && e.settings.attribute(kReadOnlyRegister, e.contexts.device_of(context)) == 0) {
      return e.violate(kNotSupported, "cuMemHostRegister: the device has no read-only registration");
    }
    const MappingCall call(e, lock);
    constexpr double kGiB = std::size_t{1} << 30;
    spend(lock, static_cast<std::uint64_t>(static_cast<double>(bytes) / kGiB * static_cast<double>(e.settings.pin_ns_per_gib)));
    return e.host.add(at, bytes, flags, context);
  });
}

CUresult cuMemHostUnregister(void* at) {
  return serve("cuMemHostUnregister", kUnsafeWithContext, [&](Emulator& e, Lock& lock) {
    const auto begin = reinterpret_cast<std::uintptr_t>(at);
    const std::size_t bytes = e.host.bytes_at(at);
    if (bytes > 0) report_in_flight(e, "cuMemHostUnregister", begin, bytes);
    if (bytes > 0) e.streams.quiesce(lock, begin, bytes);
    return e.host.remove(at);
  });
}

}  // namespace remap::emulated::entry
