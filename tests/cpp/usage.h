// What a backend holds: compared as a whole.
#pragma once

#include "remap/backend.h"

namespace remap::testing {

inline bool same(const Usage& a, const Usage& b) {
  return a.reserved_bytes == b.reserved_bytes && a.page_bytes == b.page_bytes && a.mapped_bytes == b.mapped_bytes &&
         a.host_bytes == b.host_bytes && a.mappings == b.mappings && a.streams == b.streams && a.events == b.events;
}
inline bool empty(const Usage& usage) { return same(usage, Usage{}); }

}  // namespace remap::testing
