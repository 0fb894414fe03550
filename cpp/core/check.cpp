// SPDX-License-Identifier: Apache-2.0
// Arena::check(): the invariants of arena.h, as code.
#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>

#include "remap/arena.h"
#include "remap/fork.h"

namespace remap {
namespace {

void require(bool holds, const char* invariant, const std::string& detail) {
  if (!holds) throw std::logic_error(std::string("Arena invariant ") + invariant + " violated: " + detail);
}

}  // namespace

void Arena::check() const {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return;

  std::size_t sum = 0;
  for (std::size_t owner = 0; owner < kOwners; ++owner) {
    sum += static_cast<std::size_t>(std::count_if(pages_.begin(), pages_.end(), [&](const Page& page) {
      return static_cast<std::size_t>(page.owner) == owner;
    }));
  }
  require(sum == pages_.size(), "A1", std::to_string(sum) + " owned of " + std::to_string(pages_.size()));
  const std::size_t bytes = backend_->usage().page_bytes;
  require(bytes == pages_.size() * options_.page_bytes, "A2", std::to_string(bytes) + " bytes of pages in the backend");
  for (std::size_t id = 0; id < pages_.size(); ++id) {
    const bool is_free = pages_[id].owner == Owner::free;
    require(free_.count(static_cast<PageId>(id)) == is_free, "A1", "page " + std::to_string(id) + " in the set of free pages");
    if (pages_[id].owner == Owner::quarantine) continue;
    const bool of_nobody = pages_[id].owner == Owner::free || pages_[id].owner == Owner::outside;
    require(of_nobody == (pages_[id].tenant == kNobody), "A3", "page " + std::to_string(id));
    require(pages_[id].owner != Owner::outside || pages_[id].dirty == kUnknownBytes, "A11", "page " + std::to_string(id));
  }

  for (std::size_t id = 0; id < pages_.size(); ++id) {
    require(pages_[id].tenant == kNobody || pages_[id].dirty != kNobody, "A10", "page " + std::to_string(id));
  }
  for (const Registration& each : registered_) {
    for (const auto& [id, shown] : each.shown) {
      const auto region = regions_.find(id);
      const bool same = region != regions_.end() && !region->second.pending && region->second.view.shown == shown;
      require(broken_ || same, "A9", "region " + std::to_string(id) + " lies in a declared range and has changed");
    }
  }

  std::vector<RegionId> homes(pages_.size(), kNoRegion);
  for (const auto& [id, region] : regions_) {
    if (region.kind != RegionKind::layer || elsewhere(region.home)) continue;
    for (PageId page : region.home) {
      require(page < homes.size() && homes[page] == kNoRegion, "A13", "page " + std::to_string(page) + " in the home of region " + std::to_string(id));
      homes[page] = id;
    }
  }
  for (std::size_t page = 0; page < pages_.size(); ++page) {
    require(pages_[page].home == homes[page], "A13", "page " + std::to_string(page) + " does not know whose home it is");
  }

  for (const auto& [id, region] : regions_) {
    const std::string name = "region " + std::to_string(id);
    if (!broken_) {
      for (PageId page : region.view.shown) {
        require(page == kNoPage || pages_[page].owner != Owner::quarantine, "A8", name);
      }
    }
    if (region.kind == RegionKind::kv) {
      std::set<PageId> seen;
      for (std::size_t slot = 0; slot < region.designated.size(); ++slot) {
        const PageId page = region.designated[slot];
        if (const PageId fixed = region.fixed[slot]; fixed != kNoPage) {
          const Page& its = pages_[fixed];
          require(page == kNoPage && its.fixed && region.slot_of[fixed] == kNoSlot, "A5", name + " slot " + std::to_string(slot));
          const bool kept = its.owner == Owner::ring && its.tenant == region.tenant && region.view.shown[slot] == fixed;
          require(broken_ || kept, "A4", name + " fixed slot " + std::to_string(slot));
          continue;
        }
        if (page == kNoPage) {
          require(broken_ || region.view.shown[slot] == kNoPage, "A4", name + " shows a page that no call designated");
          continue;
        }
        require(region.slot_of[page] == slot && seen.insert(page).second, "A5", name + " page " + std::to_string(page));
        const bool owned = pages_[page].owner == Owner::kv && pages_[page].tenant == region.tenant;
        const PageId expected = options_.mode == Mode::aliased || owned ? page : kNoPage;
        const bool still = undecided_ && region.view.shown[slot] == page;  // strict: until commit()
        require(broken_ || still || region.view.shown[slot] == expected, "A4", name + " slot " + std::to_string(slot));
      }
    }
    if (region.kind == RegionKind::layer && !broken_ && elsewhere(region.target)) {
      const bool shows_none = region.view.shown == region.target;
      require(options_.mode == Mode::aliased || shows_none, "A6", name + " is computed elsewhere and shows a page");
    } else if (region.kind == RegionKind::layer && !broken_) {
      bool tail = false;
      for (std::size_t slot = 0; slot < region.target.size(); ++slot) {
        const PageId page = region.target[slot];
        tail = tail || pages_[page].owner == Owner::ring;
        const bool fits = tail ? pages_[page].owner == Owner::ring
                               : pages_[page].owner == Owner::params && page == region.home[slot];
        require(fits && pages_[page].tenant == region.tenant, "A6",
                name + " target page " + std::to_string(page) + " at slot " + std::to_string(slot) + " is " +
                    owner_name(pages_[page].owner));
      }
      require(region.pending || region.view.shown == region.target, "A6", name + " is settled and does not show its target");
      for (PageId page : region.view.shown) {
        const bool read = !region.pending && page != kNoPage;  // a pass waits for a layer that is still to be re-pointed
        require(!read || pages_[page].owner != Owner::outside, "A12", name + " shows page " + std::to_string(page) + ", which is outside");
      }
    }
    if (region.kind == RegionKind::ring && !broken_ && options_.mode == Mode::strict) {
      for (PageId page : region.view.shown) {
        require(page == kNoPage || (pages_[page].owner == Owner::ring && pages_[page].tenant == region.tenant), "A7", name);
      }
    }
  }
}

}  // namespace remap
