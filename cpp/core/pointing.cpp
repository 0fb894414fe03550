#include "pointing.h"

#include <algorithm>
#include <utility>

namespace remap {
namespace {

// Home and up to two ring buffers, less the one that is live: single and double buffering never rebuild a view.
constexpr std::size_t kMaxParked = 3;

}  // namespace

View& Pointer::parked(Region& region, const std::vector<PageId>& pages) {
  for (View& view : region.parked) {
    if (view.shown == pages) return view;
  }
  Backend& backend = *arena_.backend_;
  if (region.parked.size() < kMaxParked) {
    View fresh;
    fresh.shown.assign(region.view.shown.size(), kNoPage);
    region.parked.reserve(kMaxParked);
    arena_.make_room_to_discard(1);
    fresh.address = backend.reserve(region.reserved_bytes, arena_.options_.page_bytes);  // nothing but the backend fails from here
    try {
      arena_.map_slots(fresh, 0, pages);
    } catch (...) {
      // A broken arena may show pages there that nothing could unmap: then the view is kept, so that close() sees it.
      if (arena_.broken_) {
        region.parked.push_back(std::move(fresh));
      } else {
        arena_.discard({fresh.address, region.reserved_bytes, {}});
      }
      throw;
    }
    region.parked.push_back(std::move(fresh));
    return region.parked.back();
  }
  // All places are taken: the oldest one that does not show home is made over. Home is kept, reverting must stay cheap.
  auto victim = std::find_if(region.parked.begin(), region.parked.end(),
                             [&](const View& view) { return view.shown != region.home; });
  if (victim == region.parked.end()) victim = region.parked.begin();
  slots(*victim, 0, pages);
  return *victim;
}

void Pointer::layer(Region& region, const std::vector<PageId>& pages) {
  if (region.view.shown == pages) return;
  if (!arena_.backend_->can_exchange()) {
    slots(region.view, 0, pages);
    return;
  }
  View& other = parked(region, pages);
  arena_.backend_->exchange(region.view.address, other.address, region.reserved_bytes);
  std::swap(region.view.shown, other.shown);
}

void Pointer::slots(View& view, std::size_t first_slot, const std::vector<PageId>& pages) {
  // Only from the first to the last slot that changes: a slice's region keeps its head, which may be nearly all of it.
  const auto begin = view.shown.begin() + static_cast<std::ptrdiff_t>(first_slot);
  std::size_t skip = 0;
  while (skip < pages.size() && begin[static_cast<std::ptrdiff_t>(skip)] == pages[skip]) ++skip;
  if (skip == pages.size()) return;
  std::size_t stop = pages.size();
  while (begin[static_cast<std::ptrdiff_t>(stop) - 1] == pages[stop - 1]) --stop;
  first_slot += skip;
  const std::vector<PageId> before(begin + static_cast<std::ptrdiff_t>(skip), begin + static_cast<std::ptrdiff_t>(stop));
  const std::vector<PageId> after(pages.begin() + static_cast<std::ptrdiff_t>(skip),
                                  pages.begin() + static_cast<std::ptrdiff_t>(stop));
  // Unmapping comes first (a driver refuses to map over a mapping), so a failing map has to put the old view back.
  arena_.unmap_slots(view, first_slot, after.size());
  try {
    arena_.map_slots(view, first_slot, after);
  } catch (...) {
    if (arena_.broken_) throw;
    try {
      arena_.map_slots(view, first_slot, before);
    } catch (...) {
      arena_.fail_broken("re-pointing failed and so did undoing it: ", std::current_exception(), before);
    }
    throw;
  }
}

}  // namespace remap
