// SPDX-License-Identifier: Apache-2.0
// What a change of a tenant's pages means for its prefetcher.
#pragma once

#include <cstddef>
#include <vector>

#include "remap/prefetcher.h"
#include "remap/tenant_pages.h"

namespace remap {

// Whether copies that are under way write into pages that the change takes, so that it has to come behind them. before: the tenant's
// pages as they are.
bool awaits_copies(const Transition& change, const TenantPages& before, Prefetcher& prefetcher);

// What the prefetcher is to do behind the change. layer_bytes: of each layer. ring: where the ring's region begins. holds: whether layers
// are held until the worker has re-pointed them. after: as in StreamConfiguration.
StreamConfiguration configuration_of(const Transition& change, const std::vector<std::size_t>& layer_bytes, std::size_t page_bytes,
                                     std::byte* ring, bool holds, EventHandle after);

}  // namespace remap
