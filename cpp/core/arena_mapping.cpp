// The arena's mappings: what a view shows, slot by slot. Called by arena.cpp (set-up), pointing.cpp and executor.cpp, with the
// lock held. Each function is whole or changes nothing, or breaks the arena.
#include <algorithm>
#include <string>
#include <utility>

#include "remap/arena.h"

namespace remap {

namespace {

// Calls body(first, count) for each run of slots that hold a page.
template <typename Body>
void for_runs(const std::vector<PageId>& pages, Body&& body) {
  std::size_t i = 0;
  while (i < pages.size()) {
    if (pages[i] == kNoPage) {
      ++i;
      continue;
    }
    std::size_t end = i;
    while (end < pages.size() && pages[end] != kNoPage) ++end;
    body(i, end - i);
    i = end;
  }
}

}  // namespace

void Arena::map_slots(View& view, std::size_t first_slot, const std::vector<PageId>& pages) {
  std::vector<std::pair<std::size_t, std::size_t>> mapped;
  try {
    for_runs(pages, [&](std::size_t first, std::size_t count) {
      std::vector<PageHandle> handles(count);
      for (std::size_t i = 0; i < count; ++i) handles[i] = pages_[pages[first + i]].handle;
      std::byte* at = slot_address(view, first_slot + first);
      mapped.reserve(mapped.size() + 1);
      backend_->map(at, handles.data(), count, options_.page_bytes);
      mapped.emplace_back(first, count);
      backend_->set_access(at, count * options_.page_bytes, Access::read_write);
      backend_->populate(at, count * options_.page_bytes);
    });
  } catch (...) {
    std::exception_ptr failure;
    for (auto run = mapped.rbegin(); run != mapped.rend(); ++run) {
      try {
        backend_->unmap(slot_address(view, first_slot + run->first), run->second * options_.page_bytes);
      } catch (...) {
        // What stays mapped stays in the table, so that close() unmaps it.
        failure = std::current_exception();
        broken_ = true;
        for (std::size_t i = run->first; i < run->first + run->second; ++i) {
          view.shown[first_slot + i] = pages[i];
          pages_[pages[i]].owner = Owner::quarantine;
        }
      }
    }
    if (failure) fail_broken("mapping failed and so did undoing it: ", failure, {});
    throw;
  }
  std::copy(pages.begin(), pages.end(), view.shown.begin() + static_cast<std::ptrdiff_t>(first_slot));
}

void Arena::unmap_slots(View& view, std::size_t first_slot, std::size_t count) {
  const auto begin = view.shown.begin() + static_cast<std::ptrdiff_t>(first_slot);
  std::vector<PageId> before(begin, begin + static_cast<std::ptrdiff_t>(count));
  std::size_t undone_until = 0;
  try {
    for_runs(before, [&](std::size_t first, std::size_t run) {
      backend_->unmap(slot_address(view, first_slot + first), run * options_.page_bytes);
      std::fill(begin + static_cast<std::ptrdiff_t>(first), begin + static_cast<std::ptrdiff_t>(first + run), kNoPage);
      undone_until = first + run;
    });
  } catch (...) {
    // Whole or nothing: what was unmapped is mapped again.
    before.resize(undone_until);
    try {
      map_slots(view, first_slot, before);
    } catch (...) {
      fail_broken("unmapping failed and so did undoing it: ", std::current_exception(), before);
    }
    throw;
  }
}

void Arena::fail_broken(const char* what, const std::exception_ptr& why, const std::vector<PageId>& pages) {
  broken_ = true;  // before anything is allocated: whatever fails here, the arena is
  for (PageId id : pages) {
    if (id != kNoPage) pages_[id].owner = Owner::quarantine;
  }
  std::size_t quarantined = 0;
  for (const Page& page : pages_) quarantined += page.owner == Owner::quarantine ? 1 : 0;
  std::string text(what);
  try {
    std::rethrow_exception(why);
  } catch (const std::exception& error) {
    text += error.what();
  } catch (...) {
    text += "unknown";
  }
  throw Error(ErrorKind::arena_broken,
              text + ". The arena is broken, " + std::to_string(quarantined) + " pages are quarantined; only close() is allowed.",
              {{"quarantined_pages", static_cast<std::int64_t>(quarantined)}});
}

}  // namespace remap
