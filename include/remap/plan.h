// SPDX-License-Identifier: Apache-2.0
// Plans, which the planner makes and the executor carries out. Values only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace remap {

using PageId = std::uint32_t;
using RegionId = std::uint32_t;
using TenantId = std::uint32_t;

inline constexpr PageId kNoPage = ~PageId{0};
inline constexpr RegionId kNoRegion = ~RegionId{0};
inline constexpr TenantId kNobody = ~TenantId{0};

// Who a page belongs to now. Exactly one, always. outside: another process that shares the pages has it.
enum class Owner : std::uint8_t { free, params, kv, ring, outside, quarantine };
inline constexpr std::size_t kOwners = 6;
const char* owner_name(Owner owner) noexcept;

// Step 1: pages change hands. In aliased mode this is bookkeeping, without any backend call (unless a page comes from
// another tenant and is zeroed behind the change, by Executor::zero_free or zero_due, where it stands in its tenant's KV region). In strict
// mode the tenant's KV region maps what it gains and unmaps what it loses.
struct SetOwner {
  std::vector<PageId> pages;
  Owner from = Owner::free;
  Owner to = Owner::free;
  // The pages' tenant before (unless from is free) and after (unless to is free). kNobody where pages go between free and outside:
  // nowhere else do they go from there, nor there from anywhere else, and only in plans without other steps. apply() waits until all
  // that was enqueued for pages that go outside has been done.
  TenantId tenant = kNobody;
};

// Step 2: slots [first_slot, first_slot + pages.size()) of a layer's or ring's region show these pages from now on.
// `deferred`: may happen after apply() returned, by the re-pointing worker, since no pass reads the region before
// Prefetcher::wait(layer) has seen it done. A layer's region is always pointed as a whole: where only its tail streams, the
// pages of its head are named as well (and not touched, if the region shows them already). kNoPage in all of its slots: another
// instance computes the layer, or its tenant is inactive and has given it up; no pass here reads the region until a plan points
// it home. Then aliased mode leaves the region as it is, without a backend call and without a deferred step, and strict mode
// unmaps it.
struct Point {
  RegionId region = 0;
  std::size_t first_slot = 0;
  std::vector<PageId> pages;
  bool deferred = false;
  std::uint32_t layer = 0;  // told to the observer when a deferred step is done
};

// Whether a layer's region shows nothing: another instance computes the layer, or its tenant has given it up.
inline bool elsewhere(const std::vector<PageId>& pages) noexcept {
  return !pages.empty() && std::all_of(pages.begin(), pages.end(), [](PageId id) { return id == kNoPage; });
}

// Step 3: from now on these pages are the home of a layer's region, slot by slot; none: it has no home, so that its pages may
// go to any tenant for good. Only of a region that shows nothing (`elsewhere`), before the plan where it gets a home, and after
// it where it loses its own. No page is the home of two regions. Owners and mappings stay as they are: other steps change them.
struct SetHome {
  RegionId region = 0;
  std::vector<PageId> pages;
};

struct Step {
  enum class Kind : std::uint8_t { set_owner, point, set_home } kind = Kind::set_owner;
  SetOwner set_owner;
  Point point;
  SetHome set_home;
};

// Made for one epoch of the arena; refused (StalePlan) at any other, before any backend call.
struct Plan {
  std::uint64_t epoch = 0;
  std::vector<Step> steps;
};

struct Applied {
  std::uint64_t epoch = 0;           // the arena's epoch after the plan
  std::size_t pages_moved = 0;       // pages that changed owner
  std::vector<PageId> due;           // pages to be zeroed behind the change (Executor::zero_due), but for those that were free
  std::size_t points_done = 0;       // regions re-pointed inside apply()
  std::size_t points_deferred = 0;   // regions left to the worker; started by commit()
};

}  // namespace remap
