// SPDX-License-Identifier: Apache-2.0
// What a change would be: plans, of one tenant or several, each checked against what those before it leave. To add one, or to drop
// it again, changes nothing but the draft and the books of the pools in it: the arena stays as it is until Executor::apply() carries
// all of the plans out at once.
//
// A pool in the draft has the pages that the plans say: add() moves live blocks out of what goes. Savepoints are places in a change to
// which it can go back: begin(), then join() or cut(), one within another.
//
// A page may pass through several tenants' hands within a draft. Whoever has it in the end gets it zeroed behind the change, where
// another tenant had it before: `passed` says who. Its pool gets it then (hand_over()), and not before.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "remap/arena.h"
#include "remap/block_pool.h"
#include "remap/plan.h"
#include "remap/tenant_pages.h"

namespace remap {

// Pages in an order, which a tenant has once and looks through again and again.
struct PageOrder {
  explicit PageOrder(std::vector<PageId> order) : pages(std::move(order)), set(pages) {}
  const std::vector<PageId> pages;
  const PageSet set;
};

// What a change leaves to be done for one tenant, once it is made.
struct Rest {
  TenantId tenant = kNobody;
  Transition plan;                      // all of its plans, as one; of the steps those of the last
  std::vector<BlockPool::Moves> moves;  // of its live blocks: those of one entry at once, each entry behind the one before
  BlockPool::Slots late;                // of its KV region: its pool gets their pages when these have been zeroed
};

// One thread at a time, which no other disturbs in the pools concerned. Each call takes the lock of the arena's tables for as long as it
// looks at them.
class Draft {
 public:
  explicit Draft(std::shared_ptr<Arena> arena);

  // From now on plans give to this pool, and take from it, what becomes the tenant's KV or stops being it. A tenant has one, or none.
  void enlist(TenantId tenant, std::shared_ptr<BlockPool> pool);
  void dismiss(TenantId tenant) noexcept;

  struct Outcome {
    bool added = true;        // false: live blocks have no room elsewhere, and nothing has changed
    BlockPool::Moves moves;   // of live blocks, out of pages that go
    BlockPool::Ids pending;   // the live blocks there were
    std::size_t room = 0;     // for how many of them there is room; of a tenant of which pages go
    std::vector<PageId> late; // become KV, and another tenant had them when the draft began, or within it: no block may use them yet
  };
  // Adds a plan. Throws StalePlan (also if the arena has changed since the draft's first plan), InvalidArgument, InvalidState (a region
  // in a declared range), and the draft is as before then.
  Outcome add(Transition change);
  Outcome add(Plan plan);
  std::size_t plans() const noexcept { return added_.size(); }  // how many there are
  // Hands out no block of these slots any more, or (reopen) of all slots that were withdrawn: they are again as others.
  void withdraw(TenantId tenant, const BlockPool::Slots& slots);
  void reopen(TenantId tenant);

  // A savepoint. Returns its number, which is how many there were.
  std::size_t begin();
  std::size_t depth() const noexcept { return savepoints_.size(); }
  // This one and those behind it are a part of the one before.
  void join(std::size_t depth);
  // Back to where it was, and behind that is none. Plans before it are taken in anew. Nothing if there are not as many.
  void cut(std::size_t depth);
  // The change is over, without plans.
  void end() noexcept { savepoints_.clear(); }

  using Rests = std::vector<std::shared_ptr<Rest>>;
  const Rests& rests();  // a tenant each, of those with plans
  // Whether it unmaps pages behind the ring's addresses. before: the tenant's pages as they are.
  bool moves_ring(const Rest& rest, const TenantPages& before) const;
  // The change is committed: the pool gets what it was to get late. Can be called again.
  void hand_over(const Rest& rest) const;

  // ---- looking: as it will be ----------------------------------------------------------------------------------
  Arena& arena() const noexcept { return *arena_; }
  std::vector<PageId> free_pages() const;  // ascending
  // Of these pages: how many are free, and the first `most` of those. Not for each step's list of all, which takes milliseconds to
  // make of tens of thousands. A page that does not exist is not free.
  std::size_t count_free(const PageOrder& order) const;
  std::vector<PageId> first_free(const PageOrder& order, std::size_t most) const;
  // Which tenants have which of these pages; kNobody: other processes. Free ones are in no list.
  using Holders = std::vector<std::pair<TenantId, std::vector<PageId>>>;
  Holders holders(const std::vector<PageId>& pages) const;
  // How many usable blocks each tenant would lose, exactly, if exactly `target` streamed: those in lent pages that would come home, and
  // in what is the tenant's own. InvalidArgument as TenantPages::with_streaming.
  using Losses = std::vector<std::pair<TenantId, std::size_t>>;
  Losses losses(const TenantPages& pages, const Streaming& target) const;
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
  struct Added {
    Transition change;
    BlockPool::Moves moves;
    std::vector<std::pair<PageId, SlotId>> late;
  };
  struct Savepoint {
    std::size_t plans = 0;
    std::vector<std::pair<BlockPool*, BlockPool::Saved>> pools;  // as they were, of those that have changed since
  };
  struct Share {  // what a plan gives to a pool and takes from it
    BlockPool* pool = nullptr;
    BlockPool::Slots gained, lost;
  };
  void settle_pools(const Plan& plan, Added& added, Outcome& outcome);
  void keep(BlockPool& pool, BlockPool::Saved saved);
  BlockPool& pool_of(TenantId tenant) const;
  const Plan& plan(std::size_t at) const { return added_[at].change.plan; }
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
  PageSet free_set() const;
  const std::vector<PageId>& target_of(RegionId id, const Region& region) const;
  const std::vector<PageId>& home_of(RegionId id, const Region& region) const;
  RegionId region_of_home(PageId page) const;
  bool owned(PageId id, Owner owner, TenantId tenant) const;
  void forget() noexcept;

  std::shared_ptr<Arena> arena_;
  std::uint64_t epoch_ = 0;  // of the first plan
  std::uint64_t number_ = 1;
  std::vector<Added> added_;
  std::vector<Savepoint> savepoints_;
  std::map<TenantId, std::shared_ptr<BlockPool>> pools_;
  Rests rests_;  // of all plans, once it was asked for
  std::vector<Next> next_;  // by page
  std::vector<PageId> touched_;
  std::map<RegionId, Target> targets_;
  std::map<RegionId, std::vector<PageId>> homes_;
  std::map<PageId, RegionId> home_regions_;
};

}  // namespace remap
