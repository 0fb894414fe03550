// SPDX-License-Identifier: Apache-2.0
#include "remap/draft.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "remap/fork.h"

namespace remap {
namespace {

Error::Value number(std::uint64_t value) { return static_cast<std::int64_t>(value); }

bool of_nobody(Owner owner) noexcept { return owner == Owner::free || owner == Owner::outside; }

bool passes(const Step& step) noexcept {
  return step.kind == Step::Kind::set_owner && (step.set_owner.from == Owner::outside || step.set_owner.to == Owner::outside);
}

[[noreturn]] void refuse(const std::string& what, Error::Fields fields) {
  throw Error(ErrorKind::invalid_argument, what + ". Nothing changed; make the plan from a fresh snapshot.", std::move(fields));
}

}  // namespace

Draft::Draft(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {
  if (!arena_) throw Error(ErrorKind::invalid_argument, "A draft needs an arena. Nothing was created.");
}

// ---- adding a plan ----------------------------------------------------------------------------------------------

Draft::Outcome Draft::add(Plan plan) {
  Transition alone;
  alone.plan = std::move(plan);
  return add(std::move(alone));
}

Draft::Outcome Draft::add(Transition change) {
  const Arena& arena = *arena_;
  const Plan& plan = change.plan;
  refuse_fork(arena.fork_generation_);
  const std::lock_guard<std::mutex> tables(arena.mutex_);
  arena.guard();
  if (arena.undecided_) {
    throw Error(ErrorKind::invalid_state, "A change is applied and not yet committed. Nothing changed; commit it first.");
  }
  if (plan.epoch != arena.epoch_ || (!added_.empty() && epoch_ != arena.epoch_)) {
    throw Error(ErrorKind::stale_plan,
                "The plan was made for epoch " + std::to_string(plan.epoch) + ", the arena is at " +
                    std::to_string(arena.epoch_.load()) + ". No call was made; make the plan again from a fresh snapshot.",
                {{"plan_epoch", number(plan.epoch)}, {"arena_epoch", number(arena.epoch_)}});
  }
  const std::size_t before = added_.size();
  epoch_ = arena.epoch_;
  next_.resize(arena.pages_.size());
  rests_.clear();
  added_.push_back({std::move(change), {}, {}});
  Added& added = added_.back();
  Outcome outcome;
  try {
    check(added.change.plan);
    take(added.change.plan, before + 1);
    require_backed(added.change.plan);
    settle_pools(added.change.plan, added, outcome);
  } catch (...) {
    drop_behind(before);
    throw;
  }
  if (!outcome.added) drop_behind(before);
  return outcome;
}

// Pre, as of all up to `owned`: the lock of the tables is held.
void Draft::drop_behind(std::size_t plans) {
  if (plans >= added_.size()) return;
  added_.resize(plans);
  rests_.clear();
  forget();
  for (std::size_t at = 0; at < added_.size(); ++at) take(plan(at), at + 1);
}

void Draft::forget() noexcept {
  ++number_;
  touched_.clear();
  targets_.clear();
  homes_.clear();
  home_regions_.clear();
}

// What can be said before any of the plan's steps; the rest is said step by step, and at its end.
void Draft::check(const Plan& plan) const {
  const bool outside = std::any_of(plan.steps.begin(), plan.steps.end(), passes);
  const std::vector<Step>& first = added_.front().change.plan.steps;
  const bool before = added_.size() > 1 && std::any_of(first.begin(), first.end(), passes);
  if (before || (outside && (added_.size() > 1 || !std::all_of(plan.steps.begin(), plan.steps.end(), passes)))) {
    refuse("Pages go outside and come in by plans of their own, with no other step", {});
  }
  require_homes(plan);
}

void Draft::take(const Plan& plan, std::size_t number) {
  for (const Step& step : plan.steps) {
    if (step.kind == Step::Kind::set_owner) {
      take_owners(step.set_owner, number);
    } else if (step.kind == Step::Kind::point) {
      take_point(step.point);
    } else {
      take_home(step.set_home);
    }
  }
}

void Draft::take_owners(const SetOwner& move, std::size_t plan) {
  const Arena& arena = *arena_;
  const bool outside = move.from == Owner::outside || move.to == Owner::outside;
  if (!outside) Arena::require_tenant(move.tenant);
  if (move.from >= Owner::quarantine || move.to >= Owner::quarantine) refuse("Pages go between free, params, kv, ring and outside", {});
  if (outside && (move.tenant != kNobody || (move.from != Owner::free && move.to != Owner::free))) {
    refuse("Pages go outside from free, of no tenant, and come in as free", {{"tenant", number(move.tenant)}});
  }
  const TenantId before = of_nobody(move.from) ? kNobody : move.tenant;
  const TenantId after = of_nobody(move.to) ? kNobody : move.tenant;
  const Region* kv = outside ? nullptr : arena.kv_region_of(move.tenant);
  const bool of_kv = (move.from == Owner::kv) != (move.to == Owner::kv);
  if (of_kv && kv == nullptr) {
    refuse("Tenant " + std::to_string(move.tenant) + " has no KV region", {{"tenant", number(move.tenant)}});
  }
  for (const PageId id : move.pages) {
    if (id >= arena.pages_.size()) refuse("Unknown page " + std::to_string(id), {{"page", number(id)}});
    const Page& page = arena.pages_[id];
    Next now = next(id);
    if (now.owner != move.from || now.tenant != before) {
      refuse("Page " + std::to_string(id) + " belongs to " + owner_name(now.owner) + ", the plan expects " + owner_name(move.from),
             {{"page", number(id)}, {"tenant", number(now.tenant)}});
    }
    if (page.fixed) refuse("Page " + std::to_string(id) + " stands in fixed slots", {{"page", number(id)}});
    const bool placed = kv != nullptr && kv->slot_of[id] != kNoSlot;
    if (of_kv && !placed) refuse("Page " + std::to_string(id) + " has no place in the KV region", {{"page", number(id)}});
    if (now.plan != plan) now.before = now.tenant;
    if (after != kNobody) {
      if (now.before != kNobody && now.before != after) refuse_mixing(id, after);
      // A page that is no KV of its new tenant's is zeroed behind the change, where it stands in that tenant's KV region.
      const bool dirty = arena.is_dirty(id, after) || now.from_others(after);
      if (dirty && move.to != Owner::kv && !placed) refuse_mixing(id, after);
    }
    if (before != kNobody && before != after) now.passed = now.passed == kNobody || now.passed == before ? before : kUnknownBytes;
    if (now.draft != number_) touched_.push_back(id);
    next_[id] = {number_, plan, move.to, after, now.before, now.passed};
  }
  if (arena.options_.mode == Mode::aliased || outside || move.pages.empty()) return;
  refuse_registered(move);
  if (move.from != Owner::ring) return;
  for (const auto& [id, region] : arena.regions_) {  // the ring's own view lets go of them; a later step shows what replaces them
    if (region.kind != RegionKind::ring || region.tenant != move.tenant) continue;
    std::vector<PageId> shows = target_of(id, region);
    for (PageId& page : shows) {
      if (std::find(move.pages.begin(), move.pages.end(), page) != move.pages.end()) page = kNoPage;
    }
    if (shows != target_of(id, region)) targets_[id].pages = std::move(shows);
  }
}

void Draft::take_point(const Point& step) {
  const Arena& arena = *arena_;
  const Region& region = arena.region(step.region);
  if (region.kind == RegionKind::kv || step.first_slot > region.view.shown.size() ||
      step.pages.size() > region.view.shown.size() - step.first_slot ||
      (region.kind == RegionKind::layer && step.pages.size() != region.view.shown.size())) {
    refuse("Region " + std::to_string(step.region) + " cannot be pointed like that", {{"region", number(step.region)}});
  }
  for (const PageId id : step.pages) {
    if (id != kNoPage && id >= arena.pages_.size()) refuse("Unknown page " + std::to_string(id), {{"page", number(id)}});
    if (id == kNoPage && region.kind == RegionKind::layer && !elsewhere(step.pages)) {
      refuse("A layer's region has no holes, unless it is empty", {});
    }
  }
  const std::vector<PageId>& shows = target_of(step.region, region);
  const auto first = shows.begin() + static_cast<std::ptrdiff_t>(step.first_slot);
  if (!std::equal(step.pages.begin(), step.pages.end(), first)) arena.refuse_registered(step.region);
  if (region.kind == RegionKind::layer) {
    targets_[step.region] = {step.pages, step.layer, step.deferred && arena.options_.mode == Mode::aliased};
    return;
  }
  std::vector<PageId> all = shows;
  std::copy(step.pages.begin(), step.pages.end(), all.begin() + static_cast<std::ptrdiff_t>(step.first_slot));
  targets_[step.region].pages = std::move(all);
}

void Draft::take_home(const SetHome& step) {
  const Region& region = arena_->region(step.region);
  const std::vector<PageId> old = home_of(step.region, region);
  for (const PageId page : old) {  // two regions of one plan may pass a page on in either order
    if (page != kNoPage && region_of_home(page) == step.region) home_regions_[page] = kNoRegion;
  }
  for (const PageId page : step.pages) home_regions_[page] = step.region;
  homes_[step.region] = step.pages.empty() ? std::vector<PageId>(region.home.size(), kNoPage) : step.pages;
}

// A13 of arena.h, and that a region is empty while its home changes.
void Draft::require_homes(const Plan& plan) const {
  const Arena& arena = *arena_;
  std::map<RegionId, const std::vector<PageId>*> homes;  // of the regions whose home the plan sets
  std::map<PageId, RegionId> claimed;
  for (const Step& step : plan.steps) {
    if (step.kind != Step::Kind::set_home) continue;
    const RegionId id = step.set_home.region;
    const std::vector<PageId>& pages = step.set_home.pages;
    const Region& region = arena.region(id);
    const auto refuse_home = [id](const char* why) {
      refuse("The home of region " + std::to_string(id) + " cannot be set: " + why, {{"region", number(id)}});
    };
    if (region.kind != RegionKind::layer) refuse_home("it is no layer's");
    if (!pages.empty() && pages.size() != region.home.size()) refuse_home("a home has as many pages as its region");
    if (!homes.emplace(id, &pages).second) refuse_home("the plan does so twice");
    if (!pages.empty() && !elsewhere(target_of(id, region))) refuse_home("it is not empty");
    for (const PageId page : pages) {
      if (page >= arena.pages_.size()) refuse("Unknown page " + std::to_string(page), {{"page", number(page)}});
      if (arena.pages_[page].fixed) refuse_home("a page of it stands in fixed slots");
      if (!claimed.emplace(page, id).second) refuse_home("a page is named twice");
    }
  }
  if (homes.empty()) return;
  for (const auto& [page, id] : claimed) {
    const RegionId before = region_of_home(page);
    if (before == kNoRegion || homes.count(before) != 0) continue;
    refuse("Page " + std::to_string(page) + " cannot be region " + std::to_string(id) + "'s home: it is region " +
               std::to_string(before) + "'s",
           {{"page", number(page)}, {"region", number(before)}});
  }
  std::map<RegionId, const std::vector<PageId>*> pointed;
  for (const Step& step : plan.steps) {
    if (step.kind == Step::Kind::point) pointed[step.point.region] = &step.point.pages;
  }
  for (const auto& [id, pages] : homes) {
    const auto found = pointed.find(id);
    const std::vector<PageId>& shows = found == pointed.end() ? target_of(id, arena.region(id)) : *found->second;
    if (!pages->empty() || elsewhere(shows)) continue;
    refuse("Region " + std::to_string(id) + " would lose its home, and is not empty", {{"region", number(id)}});
  }
}

// The pages that layers and (strict) rings show after the plan, which is taken, have the right owner then: A6 and A7 of arena.h.
void Draft::require_backed(const Plan& plan) const {
  const Arena& arena = *arena_;
  // Layers that are pointed, or whose home loses pages, and all of a tenant whose ring does. All others show what they showed, of
  // the same owners: growth costs nothing for them.
  std::set<RegionId> concerned;
  for (const Step& step : plan.steps) {
    const SetOwner& move = step.set_owner;
    if (step.kind == Step::Kind::point) {
      if (arena.region(step.point.region).kind == RegionKind::layer) concerned.insert(step.point.region);
    } else if (step.kind == Step::Kind::set_owner && move.from == Owner::params) {
      RegionId last = kNoRegion;
      for (const PageId page : move.pages) {
        const RegionId home = region_of_home(page);
        if (home != last && home != kNoRegion) concerned.insert(home);
        last = home;
      }
    } else if (step.kind == Step::Kind::set_owner && move.from == Owner::ring) {
      for (const auto& [id, region] : arena.regions_) {
        if (region.kind == RegionKind::layer && region.tenant == move.tenant) concerned.insert(id);
      }
    }
  }
  const auto refuse_region = [](RegionId id, const Region& region) {
    refuse("Region " + std::to_string(id) + " would show pages that are not its own home nor its tenant's ring",
           {{"region", number(id)}, {"tenant", number(region.tenant)}});
  };
  for (const RegionId id : concerned) {
    const Region& region = arena.region(id);
    const std::vector<PageId>& pages = target_of(id, region);
    if (elsewhere(pages)) continue;
    auto page = pages.begin();
    for (auto home = home_of(id, region).begin(); page != pages.end(); ++page, ++home) {
      if (*page != *home || !owned(*page, Owner::params, region.tenant)) break;
    }
    if (!std::all_of(page, pages.end(), [&](PageId each) { return owned(each, Owner::ring, region.tenant); })) {
      refuse_region(id, region);
    }
  }
  if (arena.options_.mode == Mode::aliased) return;
  for (const Step& step : plan.steps) {
    if (step.kind != Step::Kind::point) continue;
    const Region& region = arena.region(step.point.region);
    if (region.kind != RegionKind::ring) continue;
    for (const PageId page : step.point.pages) {
      if (page != kNoPage && !owned(page, Owner::ring, region.tenant)) refuse_region(step.point.region, region);
    }
  }
}

// Promise 6. A page comes to a tenant by way of `free`, and is zeroed behind the change, at an address where its tenant has it mapped.
void Draft::refuse_mixing(PageId id, TenantId after) const {
  const TenantId tenant = next(id).before;
  if (tenant != kNobody && tenant != after) {
    refuse("Page " + std::to_string(id) + " cannot go from tenant " + std::to_string(tenant) + " to tenant " + std::to_string(after) +
               " in one plan; free it in a plan of its own",
           {{"page", number(id)}, {"tenant", number(tenant)}});
  }
  refuse("Page " + std::to_string(id) + " may hold another tenant's bytes, and has no place in the KV region of tenant " +
             std::to_string(after) + ", where it would be zeroed",
         {{"page", number(id)}, {"tenant", number(after)}});
}

// strict: owners decide what the tenant's KV region shows, and its ring's view lets go of what is no longer ring.
void Draft::refuse_registered(const SetOwner& move) const {
  const Arena& arena = *arena_;
  if (arena.registered_.empty()) return;
  const bool kv = (move.from == Owner::kv) != (move.to == Owner::kv);
  for (const auto& [id, region] : arena.regions_) {
    if (region.tenant != move.tenant) continue;
    const bool changes = (region.kind == RegionKind::kv && kv) || (region.kind == RegionKind::ring && move.from == Owner::ring);
    if (changes) arena.refuse_registered(id);
  }
}

// ---- the pools ----------------------------------------------------------------------------------------------------

void Draft::enlist(TenantId tenant, std::shared_ptr<BlockPool> pool) { pools_[tenant] = std::move(pool); }

void Draft::dismiss(TenantId tenant) noexcept { pools_.erase(tenant); }

BlockPool& Draft::pool_of(TenantId tenant) const {
  const auto found = pools_.find(tenant);
  if (found != pools_.end()) return *found->second;
  throw Error(ErrorKind::invalid_argument, "Tenant " + std::to_string(tenant) + " has no pool in the draft. Nothing changed; enlist it.",
              {{"tenant", number(tenant)}});
}

void Draft::keep(BlockPool& pool, BlockPool::Saved saved) {
  if (savepoints_.empty()) return;
  auto& pools = savepoints_.back().pools;
  if (std::none_of(pools.begin(), pools.end(), [&](const auto& each) { return each.first == &pool; })) {
    pools.emplace_back(&pool, std::move(saved));
  }
}

// The pools have what the plan, which is taken, says: first what is gained, since live blocks of what is lost may move there. All pools
// are asked before the first changes.
void Draft::settle_pools(const Plan& plan, Added& added, Outcome& outcome) {
  std::map<TenantId, Share> shares;
  for (const Step& step : plan.steps) {
    const SetOwner& move = step.set_owner;
    if (step.kind != Step::Kind::set_owner || (move.from == Owner::kv) == (move.to == Owner::kv)) continue;
    const bool gains = move.to == Owner::kv;
    const auto found = pools_.find(move.tenant);
    BlockPool* const pool = found == pools_.end() ? nullptr : found->second.get();
    const Region& region = *arena_->kv_region_of(move.tenant);
    Share& share = shares[move.tenant];
    share.pool = pool;
    for (const PageId page : move.pages) {
      const auto slot = static_cast<SlotId>(region.slot_of[page]);
      const bool late = gains && next_[page].from_others(move.tenant);
      if (late) {
        outcome.late.push_back(page);
        added.late.emplace_back(page, slot);
      }
      // Behind the blocks' places stand pages that are zeroed there. What is lost before it was handed over is in no pool.
      if (pool == nullptr || late || slot >= pool->slots() || (!gains && pool->slot(slot) == BlockPool::Slot::absent)) continue;
      (gains ? share.gained : share.lost).push_back(slot);
    }
  }
  for (auto& [tenant, share] : shares) {
    if (share.pool == nullptr || share.lost.empty()) continue;
    BlockPool::Ids pending = share.pool->pending(share.lost);
    if (!pending.empty()) {
      const std::size_t stay = share.pool->live_blocks() - pending.size(), usable = share.pool->usable_with(share.lost, share.gained);
      outcome.room = share.pool->external() ? 0 : usable - std::min(usable, stay);
    }
    if (pending.size() > outcome.room) outcome.added = false;
    outcome.pending.insert(outcome.pending.end(), pending.begin(), pending.end());
  }
  if (!outcome.added) return;
  std::vector<std::pair<BlockPool*, BlockPool::Saved>> before;
  if (!savepoints_.empty()) savepoints_.back().pools.reserve(savepoints_.back().pools.size() + shares.size());
  try {
    for (auto& [tenant, share] : shares) {
      if (share.pool == nullptr) continue;
      BlockPool& pool = *share.pool;
      before.emplace_back(&pool, pool.save());
      pool.mark(share.gained, BlockPool::Slot::absent, BlockPool::Slot::open, "is owned already");
      BlockPool::Slots open;
      const auto is_open = [&](SlotId slot) { return pool.slot(slot) == BlockPool::Slot::open; };
      std::copy_if(share.lost.begin(), share.lost.end(), std::back_inserter(open), is_open);
      pool.mark(open, BlockPool::Slot::open, BlockPool::Slot::closed, "is not owned");
      const BlockPool::Moves moves = pool.plan_moves(share.lost);
      pool.commit_moves(moves);
      pool.mark(share.lost, BlockPool::Slot::closed, BlockPool::Slot::absent, "is not withdrawn");
      added.moves.insert(added.moves.end(), moves.begin(), moves.end());
    }
    outcome.moves = added.moves;
  } catch (...) {
    for (const auto& [pool, saved] : before) pool->restore(saved);
    throw;
  }
  for (auto& [pool, saved] : before) keep(*pool, std::move(saved));  // there is room for them
}

void Draft::withdraw(TenantId tenant, const BlockPool::Slots& slots) {
  BlockPool& pool = pool_of(tenant);
  keep(pool, pool.save());
  pool.mark(slots, BlockPool::Slot::open, BlockPool::Slot::closed, "is not owned, or withdrawn already");
}

void Draft::reopen(TenantId tenant) {
  BlockPool& pool = pool_of(tenant);
  if (!pool.withdrawn()) return;
  keep(pool, pool.save());
  pool.mark(pool.closed_slots(), BlockPool::Slot::closed, BlockPool::Slot::open, "is not withdrawn");
}

// ---- savepoints ---------------------------------------------------------------------------------------------------

std::size_t Draft::begin() {
  savepoints_.push_back({added_.size(), {}});
  return savepoints_.size() - 1;
}

void Draft::join(std::size_t depth) {
  while (depth != 0 && savepoints_.size() > depth) {
    auto& outer = savepoints_[savepoints_.size() - 2].pools;
    outer.reserve(outer.size() + savepoints_.back().pools.size());
    Savepoint inner = std::move(savepoints_.back());
    savepoints_.pop_back();
    for (auto& [pool, saved] : inner.pools) keep(*pool, std::move(saved));
  }
}

void Draft::cut(std::size_t depth) {
  refuse_fork(arena_->fork_generation_);
  const std::lock_guard<std::mutex> tables(arena_->mutex_);
  while (savepoints_.size() > depth) {
    for (const auto& [pool, saved] : savepoints_.back().pools) pool->restore(saved);
    drop_behind(savepoints_.back().plans);
    savepoints_.pop_back();
  }
}

// ---- what is left to be done --------------------------------------------------------------------------------------

const Draft::Rests& Draft::rests() {
  if (!rests_.empty() || added_.empty()) return rests_;
  std::map<TenantId, Rest> found;
  for (const Added& each : added_) {
    const TenantId tenant = each.change.there.tenant;
    if (tenant == kNobody) continue;
    const auto [place, first] = found.try_emplace(tenant);
    Rest& rest = place->second;
    rest.tenant = tenant;
    rest.plan = first ? each.change : rest.plan.followed_by(each.change);
    if (!each.moves.empty()) rest.moves.push_back(each.moves);
    for (const auto& [page, slot] : each.late) {
      if (owned(page, Owner::kv, tenant)) rest.late.push_back(slot);
    }
  }
  for (auto& [tenant, rest] : found) {
    std::sort(rest.late.begin(), rest.late.end());  // a page may have come, gone and come again
    rest.late.erase(std::unique(rest.late.begin(), rest.late.end()), rest.late.end());
    rests_.push_back(std::make_shared<Rest>(std::move(rest)));
  }
  return rests_;
}

bool Draft::moves_ring(const Rest& rest, const TenantPages& before) const {
  return rest.plan.there.ring != before.ring && unmaps(before.ring_region);
}

void Draft::hand_over(const Rest& rest) const {
  const auto found = pools_.find(rest.tenant);
  if (found == pools_.end() || rest.late.empty()) return;
  BlockPool& pool = *found->second;
  BlockPool::Slots gained;
  const auto lacking = [&](SlotId slot) { return slot < pool.slots() && pool.slot(slot) == BlockPool::Slot::absent; };
  std::copy_if(rest.late.begin(), rest.late.end(), std::back_inserter(gained), lacking);
  pool.mark(gained, BlockPool::Slot::absent, BlockPool::Slot::open, "is owned already");
}

// ---- as it will be ------------------------------------------------------------------------------------------------

Draft::Next Draft::next(PageId id) const {
  if (id < next_.size() && next_[id].draft == number_) return next_[id];
  const Page& page = arena_->pages_[id];
  return {0, 0, page.owner, page.tenant, page.tenant, kNobody};
}

const std::vector<PageId>& Draft::target_of(RegionId id, const Region& region) const {
  const auto found = targets_.find(id);
  if (found != targets_.end()) return found->second.pages;
  return region.kind == RegionKind::layer ? region.target : region.view.shown;
}

const std::vector<PageId>& Draft::home_of(RegionId id, const Region& region) const {
  const auto found = homes_.find(id);
  return found != homes_.end() ? found->second : region.home;
}

RegionId Draft::region_of_home(PageId page) const {
  const auto found = home_regions_.find(page);
  return found != home_regions_.end() ? found->second : arena_->pages_[page].home;
}

bool Draft::owned(PageId id, Owner owner, TenantId tenant) const {
  const Next its = next(id);
  return its.owner == owner && its.tenant == tenant;
}

PageSet Draft::free_set() const {
  PageSet free = arena_->free_;
  for (const PageId id : touched_) next_[id].owner == Owner::free ? free.insert(id) : free.erase(id);
  return free;
}

std::vector<PageId> Draft::free_pages() const {
  refuse_fork(arena_->fork_generation_);
  const std::lock_guard<std::mutex> tables(arena_->mutex_);
  const PageSet free = free_set();
  std::vector<PageId> found;
  for (PageId id = 0; id < arena_->pages_.size(); ++id) {
    if (free.count(id)) found.push_back(id);
  }
  return found;
}

std::size_t Draft::count_free(const PageOrder& order) const {
  refuse_fork(arena_->fork_generation_);
  const std::lock_guard<std::mutex> tables(arena_->mutex_);
  return free_set().shared(order.set);
}

std::vector<PageId> Draft::first_free(const PageOrder& order, std::size_t most) const {
  refuse_fork(arena_->fork_generation_);
  const std::lock_guard<std::mutex> tables(arena_->mutex_);
  const PageSet free = free_set();
  most = std::min(most, free.shared(order.set));
  std::vector<PageId> found;
  for (auto id = order.pages.begin(); id != order.pages.end() && found.size() < most; ++id) {
    if (free.count(*id)) found.push_back(*id);
  }
  return found;
}

Draft::Holders Draft::holders(const std::vector<PageId>& pages) const {
  refuse_fork(arena_->fork_generation_);
  const std::lock_guard<std::mutex> tables(arena_->mutex_);
  arena_->require_pages(pages);
  Holders found;
  for (const PageId id : pages) {
    const Next its = next(id);
    if (its.owner == Owner::free) continue;
    auto holder = std::find_if(found.begin(), found.end(), [&](const auto& each) { return each.first == its.tenant; });
    if (holder == found.end()) holder = found.insert(found.end(), {its.tenant, {}});
    holder->second.push_back(id);
  }
  return found;
}

Draft::Losses Draft::losses(const TenantPages& pages, const Streaming& target) const {
  Holders held = holders(pages.to_fetch(target));
  held.emplace_back(pages.tenant, plan_between(pages, pages.with_streaming(target)).lost);
  const std::lock_guard<std::mutex> tables(arena_->mutex_);
  Losses found;
  for (const auto& [tenant, lost] : held) {
    const auto pool = pools_.find(tenant);
    if (pool == pools_.end() || lost.empty()) continue;
    BlockPool::Slots slots;
    const Region& region = *arena_->kv_region_of(tenant);
    for (const PageId page : lost) {
      if (region.slot_of[page] < pool->second->slots()) slots.push_back(static_cast<SlotId>(region.slot_of[page]));
    }
    found.emplace_back(tenant, pool->second->usable_blocks() - pool->second->usable_with(slots, {}));
  }
  return found;
}

bool Draft::unmaps(RegionId ring) const {
  refuse_fork(arena_->fork_generation_);
  const std::lock_guard<std::mutex> tables(arena_->mutex_);
  const auto found = targets_.find(ring);
  if (found == targets_.end()) return false;
  const std::vector<PageId>& shown = arena_->region(ring).view.shown;
  for (std::size_t slot = 0; slot < shown.size(); ++slot) {
    if (shown[slot] != kNoPage && shown[slot] != found->second.pages[slot]) return true;
  }
  return false;
}

}  // namespace remap
