// Entry points: what is enqueued on streams. Copies are looked at twice: here, as the driver does for arguments, and when
// they run (worker.cpp).
#include "emulator.h"
#include "entry_points.h"
#include "text.h"

namespace remap::emulated::entry {
namespace {

enum class Side { host, device, any };

// What the bytes at `at` are. An error leaves `place` alone.
CUresult classify(Emulator& e, const char* entry, Side side, CUdeviceptr at, std::size_t bytes, bool written, Place* place) {
  const std::string name = entry;
  Place found;
  found.at = at;
  if (e.memory.reserved(at)) {
    if (side == Side::host) return e.violate(kInvalidValue, name + ": " + hex(at) + " is a device address");
    if (!e.memory.mapped(at, bytes)) {
      return e.violate(kInvalidValue, name + ": nothing is mapped somewhere in " + range_text(at, bytes));
    }
    found.kind = Place::Kind::device;
  } else {
    if (side == Side::device) return e.violate(kInvalidValue, name + ": " + hex(at) + " is not a device address");
    if (at == 0) return e.violate(kInvalidValue, name + ": a null address");
    const HostMemory::Registration* registration = e.host.covering(at, bytes);
    if (registration == nullptr && e.host.touches(at, bytes)) {
      return e.violate(kInvalidValue, name + ": " + range_text(at, bytes) + " is page-locked in part, or in two pieces");
    }
    if (registration != nullptr && registration->read_only && written) {
      return e.violate(kInvalidValue, name + ": " + hex(at) + " is registered as read-only");
    }
    found.kind = registration != nullptr ? Place::Kind::locked : Place::Kind::pageable;
    found.registration = registration != nullptr ? registration->id : 0;
  }
  *place = found;
  return kSuccess;
}

CUresult copy(const char* entry, Side to_side, CUdeviceptr to, Side from_side, CUdeviceptr from, std::size_t bytes,
              CUstream stream) {
  return serve(entry, kEnqueuesWithContext, [&](Emulator& e, Lock& lock) {
    Operation operation;
    operation.kind = Operation::Kind::copy;
    operation.entry = entry;
    operation.bytes = bytes;
    if (bytes > 0) {
      CUresult refused = classify(e, entry, to_side, to, bytes, true, &operation.to);
      if (refused == kSuccess) refused = classify(e, entry, from_side, from, bytes, false, &operation.from);
      if (refused != kSuccess) return refused;
      if (from != to && from < to + bytes && to < from + bytes) {
        return e.violate(kInvalidValue, std::string(entry) + ": source and destination overlap, the result is undefined");
      }
      const bool to_device = operation.to.kind == Place::Kind::device;
      const bool from_device = operation.from.kind == Place::Kind::device;
      if (to_device && !from_device) {
        operation.way = Operation::Way::to_device;
        operation.bytes_per_s = e.settings.h2d_bytes_per_s;
      } else if (!to_device && from_device) {
        operation.way = Operation::Way::to_host;
        operation.bytes_per_s = e.settings.d2h_bytes_per_s;
      } else if (to_device) {
        operation.way = Operation::Way::inside_device;
      }
      const bool pageable = operation.to.kind == Place::Kind::pageable || operation.from.kind == Place::Kind::pageable;
      if (pageable) e.journal.pageable_copy();
    }
    return e.streams.enqueue(lock, stream, std::move(operation));
  });
}

CUdeviceptr address(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }

}  // namespace

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, std::size_t bytes, CUstream stream) {
  return copy("cuMemcpyHtoDAsync", Side::device, to, Side::host, address(from), bytes, stream);
}
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  return copy("cuMemcpyDtoHAsync", Side::host, address(to), Side::device, from, bytes, stream);
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  return copy("cuMemcpyDtoDAsync", Side::device, to, Side::device, from, bytes, stream);
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  return copy("cuMemcpyAsync", Side::any, to, Side::any, from, bytes, stream);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t bytes, CUstream stream) {
  return serve("cuMemsetD8Async", kEnqueuesWithContext, [&](Emulator& e, Lock& lock) {
    Operation operation;
    operation.kind = Operation::Kind::fill;
    operation.entry = "cuMemsetD8Async";
    operation.value = value;
    operation.bytes = bytes;
    if (bytes > 0) {
      const CUresult refused = classify(e, operation.entry, Side::any, to, bytes, true, &operation.to);
      if (refused != kSuccess) return refused;
      if (operation.to.kind == Place::Kind::pageable) {
        return e.violate(kInvalidValue, "cuMemsetD8Async: " + hex(to) + " is ordinary memory, which a device cannot write");
      }
    }
    return e.streams.enqueue(lock, stream, std::move(operation));
  });
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  return serve("cuLaunchHostFunc", kEnqueuesWithContext, [&](Emulator& e, Lock& lock) {
    if (function == nullptr) return e.violate(kInvalidValue, "cuLaunchHostFunc: no function");
    Operation operation;
    operation.entry = "cuLaunchHostFunc";
    operation.function = function;
    operation.data = data;
    return e.streams.enqueue(lock, stream, std::move(operation));
  });
}

}  // namespace remap::emulated::entry
