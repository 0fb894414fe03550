// Which pages a view shows: the only code that changes a mapping. Used by Arena (set-up) and Executor (plans).
// Every function: pre: the arena's lock is held. Whole, or nothing and a typed error; ArenaBroken if undoing fails.
#pragma once

#include <vector>

#include "remap/arena.h"

namespace remap {

class Pointer {
 public:
  explicit Pointer(Arena& arena) : arena_(arena) {}

  // A layer's region, as a whole. With can_exchange(): one exchange with a parked view that shows `pages` already; the view
  // is made first if there is none. Otherwise unmap, map, one set_access.
  void layer(Region& region, const std::vector<PageId>& pages);
  // Slots of a ring region; kNoPage leaves a slot empty.
  void slots(View& view, std::size_t first_slot, const std::vector<PageId>& pages);
  // The parked view that shows `pages`, made if there is none.
  View& parked(Region& region, const std::vector<PageId>& pages);

 private:
  Arena& arena_;
};

}  // namespace remap
