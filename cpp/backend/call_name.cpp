// SPDX-License-Identifier: Apache-2.0
// The names of the calls, as they stand in traces, error fields and test output.
#include <array>

#include "remap/backend.h"

namespace remap {

const char* call_name(Call call) noexcept {
  static constexpr std::array<const char*, kCallKinds> names = {
      "reserve",       "release",         "retire",        "create_page",   "destroy_page",   "map",   "unmap",        "set_access",
      "exchange",      "populate",        "allocate_host", "free_host",      "register_host",         "unregister_host",  "use_host",
      "create_stream", "destroy_stream",  "adopt_stream",  "forget_stream",  "copy",          "copy_batch",     "fill",
      "create_event",  "destroy_event",
      "record",        "stream_wait",     "query",         "synchronize",    "elapsed",
  };
  const auto index = static_cast<std::size_t>(call);
  return index < names.size() ? names[index] : "unknown";
}

}  // namespace remap
