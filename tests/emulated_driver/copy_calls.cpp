// Entry points: what is enqueued on streams. Copies are looked at twice: here, as the driver does for arguments, and when
// they run (worker.cpp).
#include <iterator>
#include <map>
#include <string>
#include <vector>

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

// The copy as work of a stream, if it breaks no rule.
CUresult prepare(Emulator& e, const char* entry, Side to_side, CUdeviceptr to, Side from_side, CUdeviceptr from, std::size_t bytes,
                 Operation* made) {
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
  *made = std::move(operation);
  return kSuccess;
}

CUresult copy(const char* entry, Side to_side, CUdeviceptr to, Side from_side, CUdeviceptr from, std::size_t bytes,
              CUstream stream) {
  return serve(entry, kEnqueuesWithContext, [&](Emulator& e, Lock& lock) {
    Operation operation;
    const CUresult refused = prepare(e, entry, to_side, to, from_side, from, bytes, &operation);
    return refused != kSuccess ? refused : e.streams.enqueue(lock, stream, std::move(operation));
  });
}

// Copies of a batch run in any order: none may write what another one touches.
bool meet(CUdeviceptr a, std::size_t a_bytes, CUdeviceptr b, std::size_t b_bytes) { return a < b + b_bytes && b < a + a_bytes; }
CUresult require_apart(Emulator& e, const CUdeviceptr* to, const CUdeviceptr* from, const std::size_t* bytes, std::size_t count) {
  std::map<CUdeviceptr, std::size_t> written;
  for (std::size_t i = 0; i < count; ++i) written.emplace(to[i], bytes[i]);
  const auto meets = [&](CUdeviceptr at, std::size_t size, bool own) {
    auto next = written.lower_bound(at);
    if (next != written.begin() && meet(std::prev(next)->first, std::prev(next)->second, at, size)) return true;
    if (next != written.end() && own && next->first == at) ++next;
    return next != written.end() && meet(next->first, next->second, at, size);
  };
  for (std::size_t i = 0; i < count; ++i) {
    if (written.size() == count && !meets(to[i], bytes[i], true) && !meets(from[i], bytes[i], false)) continue;
    return e.violate(kInvalidValue, "cuMemcpyBatchAsync: a copy of the batch writes what another one reads or writes");
  }
  return kSuccess;
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

CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, std::size_t* bytes, std::size_t count, CUmemcpyAttributes* attributes,
                            std::size_t* first_of_attributes, std::size_t attribute_count, std::size_t* failed, CUstream stream) {
  const char* entry = "cuMemcpyBatchAsync";
  return serve(entry, kEnqueuesWithContext, [&](Emulator& e, Lock& lock) -> CUresult {
    const auto refuse = [&](const char* why) { return e.violate(kInvalidValue, std::string(entry) + ": " + why); };
    if (to == nullptr || from == nullptr || bytes == nullptr || count == 0) return refuse("no copies");
    if (attributes == nullptr || first_of_attributes == nullptr || attribute_count == 0 || attribute_count > count) {
      return refuse("each copy needs attributes");
    }
    for (std::size_t i = 0; i < attribute_count; ++i) {
      const bool ascending = i == 0 ? first_of_attributes[0] == 0 : first_of_attributes[i] > first_of_attributes[i - 1];
      if (!ascending || first_of_attributes[i] >= count) return refuse("the attributes' first copies must begin at 0 and ascend");
      const int order = attributes[i].srcAccessOrder;
      if (order < kSourceInStreamOrder || order > kSourceInAnyOrder) return refuse("no such order of access to a source");
      if (attributes[i].flags > kPreferOverlap) return refuse("no such flags");
    }
    const auto handle = reinterpret_cast<std::uintptr_t>(stream);
    if (handle == 0 || handle == kLegacyStream) return refuse("not on the legacy default stream");
    std::vector<Operation> operations(count);
    for (std::size_t i = 0; i < count; ++i) {
      if (bytes[i] == 0) return refuse("an empty copy");
      const CUresult refused = prepare(e, entry, Side::any, to[i], Side::any, from[i], bytes[i], &operations[i]);
      if (refused == kSuccess) continue;
      if (failed != nullptr) *failed = i;
      return refused;
    }
    if (const CUresult refused = require_apart(e, to, from, bytes, count); refused != kSuccess) return refused;
    // In any order: backwards, so that who relies on one is found out.
    for (auto operation = operations.rbegin(); operation != operations.rend(); ++operation) {
      const CUresult refused = e.streams.enqueue(lock, stream, std::move(*operation));
      if (refused != kSuccess) return refused;
    }
    return kSuccess;
  });
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
