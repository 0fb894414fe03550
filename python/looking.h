// SPDX-License-Identifier: Apache-2.0
// How Python looks at the tables of an arena.
#pragma once

#include "common.h"
#include "remap/arena.h"
#include "remap/draft.h"

namespace remap::python {

inline const Arena& arena_of(const Arena& arena) { return arena; }
inline const Arena& arena_of(const Draft& draft) { return draft.arena(); }

// Looking takes the lock of the arena's tables, which set-up calls and plans hold while they call the driver.
template <typename Class, typename Result, typename... Arguments>
auto looking(Result (Class::*look)(Arguments...) const) {
  return [look](const Class& at, Arguments... arguments) {
    // Also where somebody has that lock and zeroes pages: other threads of Python need not wait for that.
    const bool waits = arena_of(at).backend().device().kind == DeviceInfo::Kind::cuda || arena_of(at).busy();
    return beside_streams(waits, [&] { return (at.*look)(arguments...); });
  };
}

}  // namespace remap::python
