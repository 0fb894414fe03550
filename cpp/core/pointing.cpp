// SPDX-License-Identifier: Apache-2.0
#include "pointing.h"

#include <algorithm>
#include <utility>

namespace remap {
namespace {

// Enough for home and two ring buffers: single and double buffering never rebuild a view.
constexpr std::size_t kMaxSpareViews = 3;

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

std::vector<PageId> part(const std::vector<PageId>& pages, std::size_t first, std::size_t count) {
  const auto begin = pages.begin() + static_cast<std::ptrdiff_t>(first);
  return {begin, begin + static_cast<std::ptrdiff_t>(count)};
}

}  // namespace

void Pointer::fail_broken(const char* what, const std::exception_ptr& why, const std::vector<PageId>& pages) {
  write([&] { arena_.fail_broken(what, why, pages); });
  std::rethrow_exception(why);  // not reached
}

void Pointer::map(View& view, std::size_t first_slot, const std::vector<PageId>& pages) {
  Backend& backend = *arena_.backend_;
  const std::size_t page_bytes = arena_.options_.page_bytes;
  std::vector<std::pair<std::size_t, std::size_t>> mapped;
  try {
    for_runs(pages, [&](std::size_t first, std::size_t count) {
      std::vector<PageHandle> handles(count);
      for (std::size_t i = 0; i < count; ++i) handles[i] = arena_.pages_[pages[first + i]].handle;
      std::byte* at = arena_.slot_address(view, first_slot + first);
      mapped.reserve(mapped.size() + 1);
      backend.map(at, handles.data(), count, page_bytes);
      mapped.emplace_back(first, count);
      backend.set_access(at, count * page_bytes, Access::read_write);
      backend.populate(at, count * page_bytes);
    });
  } catch (...) {
    std::exception_ptr failure;
    for (auto run = mapped.rbegin(); run != mapped.rend(); ++run) {
      try {
        backend.unmap(arena_.slot_address(view, first_slot + run->first), run->second * page_bytes);
      } catch (...) {
        // Pages that stay mapped stay in the table, so that close() unmaps it.
        failure = std::current_exception();
        write([&] {
          arena_.broken_ = true;
          for (std::size_t i = run->first; i < run->first + run->second; ++i) {
            view.shown[first_slot + i] = pages[i];
            arena_.own(pages[i], Owner::quarantine);
          }
        });
      }
    }
    if (failure) fail_broken("mapping failed and so did undoing it: ", failure, {});
    throw;
  }
  write([&] { std::copy(pages.begin(), pages.end(), view.shown.begin() + static_cast<std::ptrdiff_t>(first_slot)); });
}

void Pointer::unmap(View& view, std::size_t first_slot, std::size_t count) {
  const auto begin = view.shown.begin() + static_cast<std::ptrdiff_t>(first_slot);
  std::vector<PageId> before = part(view.shown, first_slot, count);
  std::size_t undone_until = 0;
  try {
    for_runs(before, [&](std::size_t first, std::size_t run) {
      arena_.backend_->unmap(arena_.slot_address(view, first_slot + first), run * arena_.options_.page_bytes);
      write([&] {
        std::fill(begin + static_cast<std::ptrdiff_t>(first), begin + static_cast<std::ptrdiff_t>(first + run), kNoPage);
      });
      undone_until = first + run;
    });
  } catch (...) {
    // Whole or nothing: the unmapped part is mapped again.
    before.resize(undone_until);
    try {
      map(view, first_slot, before);
    } catch (...) {
      fail_broken("unmapping failed and so did undoing it: ", std::current_exception(), before);
    }
    throw;
  }
}

View& Pointer::spare_view(Region& region, const std::vector<PageId>& pages) {
  for (View& view : region.spare_views) {
    if (view.shown == pages) return view;
  }
  Backend& backend = *arena_.backend_;
  if (region.spare_views.size() < kMaxSpareViews) {
    View fresh;
    fresh.shown.assign(region.view.shown.size(), kNoPage);
    write([&] {
      region.spare_views.reserve(kMaxSpareViews);
      arena_.make_room_to_discard(1);
    });
    // From here on only the backend can fail.
    fresh.address = backend.reserve(region.reserved_bytes, arena_.options_.page_bytes);
    try {
      map(fresh, 0, pages);
    } catch (...) {
      write([&] {
        // A broken arena may show pages there that nothing could unmap: then the view is kept, so that close() sees it.
        if (arena_.broken_) {
          region.spare_views.push_back(std::move(fresh));
        } else {
          arena_.discard({fresh.address, region.reserved_bytes, {}});
        }
      });
      throw;
    }
    write([&] { region.spare_views.push_back(std::move(fresh)); });
    return region.spare_views.back();
  }
  // No place is left: rebuild the oldest spare view that does not show home. Home is kept, so that reverting stays cheap.
  auto victim = region.spare_views.begin();
  write([&] {  // a plan may set the home meanwhile
    victim = std::find_if(region.spare_views.begin(), region.spare_views.end(),
                          [&](const View& view) { return view.shown != region.home; });
  });
  if (victim == region.spare_views.end()) victim = region.spare_views.begin();
  slots(*victim, 0, pages);
  return *victim;
}

void Pointer::layer(Region& region, const std::vector<PageId>& pages) {
  if (region.view.shown == pages) return;
  // A region that shows nothing has no page tables to swap.
  if (!arena_.backend_->can_exchange() || elsewhere(pages) || elsewhere(region.view.shown)) {
    slots(region.view, 0, pages);
    return;
  }
  View& other = spare_view(region, pages);
  arena_.backend_->exchange(region.view.address, other.address, region.reserved_bytes);
  write([&] { std::swap(region.view.shown, other.shown); });
}

void Pointer::piece(View& view, std::size_t first_slot, const std::vector<PageId>& pages) {
  const std::vector<PageId> before = part(view.shown, first_slot, pages.size());
  // Unmapping comes first (a driver refuses to map over a mapping), so a failing map has to put the old view back.
  unmap(view, first_slot, pages.size());
  try {
    map(view, first_slot, pages);
  } catch (...) {
    if (arena_.broken_) throw;
    try {
      map(view, first_slot, before);
    } catch (...) {
      fail_broken("re-pointing failed and so did undoing it: ", std::current_exception(), before);
    }
    throw;
  }
}

void Pointer::slots(View& view, std::size_t first_slot, const std::vector<PageId>& pages) {
  // Only from the first to the last slot that changes: a slice's region keeps its head, which may be nearly all of it.
  const auto begin = view.shown.begin() + static_cast<std::ptrdiff_t>(first_slot);
  std::size_t skip = 0;
  while (skip < pages.size() && begin[static_cast<std::ptrdiff_t>(skip)] == pages[skip]) ++skip;
  if (skip == pages.size()) return;
  std::size_t stop = pages.size();
  while (begin[static_cast<std::ptrdiff_t>(stop) - 1] == pages[stop - 1]) --stop;
  const std::vector<PageId> before = part(view.shown, first_slot, pages.size());
  const std::size_t most = piece_pages(arena_.options_.page_bytes);
  std::size_t at = skip;
  try {
    while (at < stop) {
      const std::size_t count = std::min(most, stop - at);
      piece(view, first_slot + at, part(pages, at, count));
      at += count;
    }
  } catch (...) {
    if (arena_.broken_) throw;
    // The piece that failed is as it was; those before it are put back.
    while (at > skip) {
      const std::size_t count = std::min(most, at - skip);
      at -= count;
      try {
        piece(view, first_slot + at, part(before, at, count));
      } catch (...) {
        fail_broken("re-pointing failed and so did undoing it: ", std::current_exception(), before);
      }
    }
    throw;
  }
}

}  // namespace remap
