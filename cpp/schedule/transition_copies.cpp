// SPDX-License-Identifier: Apache-2.0
#include "remap/transition_copies.h"

#include <algorithm>

namespace remap {

bool awaits_copies(const Transition& change, const TenantPages& before, Prefetcher& prefetcher) {
  const TenantPages& there = change.there;
  const auto loaded = [&](LayerId layer) { return prefetcher.ready(layer) || prefetcher.arrived(layer); };
  // A ring that only grows in front keeps its copies; another number of buffers gives layers other buffers.
  if (change.ring_moves || (!before.ring.empty() && there.ring.size() != before.ring.size())) return true;
  for (LayerId layer = 0; layer < there.layers.size(); ++layer) {
    const Layer &was = before.layers[layer], &its = there.layers[layer];
    const bool leaves = its.where != Where::home && was.where == Where::home, more = its.tail > was.tail;
    if (!leaves && !more) continue;
    // A layer that streams is never ready: pages of it that came home may still be loading.
    if (more && was.tail != 0 ? prefetcher.loading() : !loaded(layer)) return true;
  }
  return false;
}

StreamConfiguration configuration_of(const Transition& change, const std::vector<std::size_t>& layer_bytes, std::size_t page_bytes,
                                     std::byte* ring, bool holds, EventHandle after) {
  const TenantPages& there = change.there;
  StreamConfiguration found;
  found.streamed = there.streamed();
  found.ring_bytes = there.buffer_pages * page_bytes;
  for (std::size_t buffer = 0; buffer < there.ring.size(); ++buffer) found.ring.push_back(ring + buffer * found.ring_bytes);
  for (const LayerId layer : found.streamed) {
    const Layer& its = there.layers[layer];
    found.offsets.push_back((its.size() - its.tail) * page_bytes);
    found.places.push_back((there.buffer_pages - its.tail) * page_bytes);
  }
  for (LayerId layer = 0; layer < there.layers.size(); ++layer) {
    if (there.layers[layer].where != Where::home) found.elsewhere.push_back(layer);
  }
  if (holds) found.held = change.held;
  found.after = after;
  found.fresh = change.ring_changes;
  for (const Transition::Load& load : change.home) {
    const std::size_t begin = load.first * page_bytes;
    const std::size_t end = std::min((std::size_t{load.first} + load.pages) * page_bytes, layer_bytes.at(load.layer));
    if (begin < end) found.home.push_back({load.layer, begin, end - begin});
  }
  return found;
}

}  // namespace remap
