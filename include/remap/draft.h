// SPDX-License-Identifier: Apache-2.0
// What a change would be: plans, of one tenant or several, each checked against what those before it leave. To add one, or to drop
// it again, changes nothing but the draft: the arena stays as it is until Executor::apply() carries all of them out at once.
//
// A page may pass through several tenants' hands within a draft. Whoever has it in the end gets it zeroed behind the change, where
// another tenant had it before: `passed` says who.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "remap/arena.h"
#include "remap/plan.h"

namespace remap {

// One thread at a time. Each call takes the lock of the arena's tables for as long as it looks at them.
class Draft {
 public:
  explicit Draft(std::shared_ptr<Arena> arena);

  // Adds a plan. Returns the pages of it that become a tenant's KV and that another tenant had when the draft began, or within it:
  // no block may use them before Executor::zero_due(). Throws StalePlan (also if the arena has changed since the draft's first
  // plan), InvalidArgument, InvalidState (a region in a declared range), and the draft is as before then.
  std::vector<PageId> add(Plan plan);
  // How many there are.
  std::size_t plans() const noexcept { return plans_.size(); }
  // Drops all but the first ones, which are taken in anew.
  void cut(std::size_t plans);

  // ---- looking: as it will be ----------------------------------------------------------------------------------
  Arena& arena() const noexcept { return *arena_; }
  std::vector<PageId> free_pages() const;  // ascending
  // Of these pages: how many are free, and the first `most` of those. Not for each step's list of all, which takes milliseconds to
  // make of tens of thousands. InvalidArgument for a page that does not exist, as of the next.
  std::size_t count_free(const std::vector<PageId>& order) const;
  std::vector<PageId> first_free(const std::vector<PageId>& order, std::size_t most) const;
  // Which tenants have which of these pages; kNobody: other processes. Free ones are in no list.
  using Holders = std::vector<std::pair<TenantId, std::vector<PageId>>>;
  Holders holders(const std::vector<PageId>& pages) const;
  // Whether the region of a ring shows pages now that it will not show then.
  bool unmaps(RegionId ring) const;

 private:
  friend class Executor;
  struct Next {
    std::uint64_t draft = 0;  // number_, or the plans do not touch the page
    std::size_t plan = 0;     // the number of the last that does, from 1 on
    Owner owner = Owner::free;
    TenantId tenant = kNobody;
    TenantId before = kNobody;  // its tenant before that plan
    TenantId passed = kNobody;  // the tenant that had it within the draft and gave it up; kUnknownBytes: several
    bool from_others(TenantId taker) const noexcept { return passed != kNobody && passed != taker; }
  };
  struct Target {
    std::vector<PageId> pages;  // of a ring: all of its region's slots
    std::uint32_t layer = 0;
    bool deferred = false;
  };
  void drop_behind(std::size_t plans);
  void check(const Plan& plan) const;
  void take(const Plan& plan, std::size_t number);
  void take_owners(const SetOwner& move, std::size_t plan);
  void take_point(const Point& step);
  void take_home(const SetHome& step);
  void require_homes(const Plan& plan) const;
  void require_backed(const Plan& plan) const;
  void refuse_mixing(PageId id, TenantId after) const;
  void refuse_registered(const SetOwner& move) const;
  Next next(PageId id) const;
  const std::vector<PageId>& target_of(RegionId id, const Region& region) const;
  const std::vector<PageId>& home_of(RegionId id, const Region& region) const;
  RegionId region_of_home(PageId page) const;
  bool owned(PageId id, Owner owner, TenantId tenant) const;
  void forget() noexcept;

  std::shared_ptr<Arena> arena_;
  std::uint64_t epoch_ = 0;  // of the first plan
  std::uint64_t number_ = 1;
  std::vector<Plan> plans_;
  std::vector<Next> next_;  // by page
  std::vector<PageId> touched_;
  std::map<RegionId, Target> targets_;
  std::map<RegionId, std::vector<PageId>> homes_;
  std::map<PageId, RegionId> home_regions_;
};

}  // namespace remap
