// SPDX-License-Identifier: Apache-2.0
// Pools in a draft: they have what its plans say, live blocks move out of what goes, and both go back together.
#include <random>

#include "plan_world.h"
#include "remap/block_pool.h"

using namespace remap;
using namespace remap::testing;
using World = remap::testing::PlanWorld;

namespace {

using Slot = BlockPool::Slot;

// Two blocks a page, of as many pages as have a place in each KV region.
std::shared_ptr<BlockPool> pool_of(const World& world, RegionId kv) {
  const std::size_t pages = world.arena->region_bytes(kv) / kPage;
  return std::make_shared<BlockPool>(PoolShape{1, pages, kPage, kPage / 2, 2 * pages});
}

std::size_t slot_of(const World& world, RegionId kv, PageId page) {
  const std::vector<PageId> shown = world.arena->shown(kv);
  return static_cast<std::size_t>(std::find(shown.begin(), shown.end(), page) - shown.begin());
}

std::vector<std::size_t> books(const BlockPool& pool) {
  pool.check();
  std::vector<std::size_t> all{pool.usable_blocks(), pool.free_blocks(), pool.live_blocks(), pool.withdrawn_blocks()};
  for (const BlockId id : pool.live_ids()) all.push_back(id);
  for (const SlotId slot : pool.owned_slots()) all.push_back(1000 + slot);
  return all;
}

}  // namespace

TEST(blocks_move_to_what_is_gained_and_all_goes_back_together) {
  World world(Mode::aliased);
  const auto pool = pool_of(world, world.kv_a);
  Draft draft(world.arena);
  draft.enlist(kA, pool);
  const auto plan = [&](std::vector<Step> steps) { return Plan{world.arena->epoch(), std::move(steps)}; };
  draft.begin();
  draft.add(plan({owner({6, 7}, Owner::free, Owner::kv, kA)}));
  const auto live = pool->allocate(4);
  const auto before = books(*pool);
  const std::size_t inner = draft.begin();
  CHECK(inner == 1 && draft.depth() == 2);
  // Two of four live blocks go, and there is room for none.
  const Draft::Outcome none = draft.add(plan({owner({7}, Owner::kv, Owner::free, kA)}));
  CHECK(!none.added && none.pending.size() == 2 && none.room == 0 && draft.plans() == 1 && books(*pool) == before);
  // With another page that the same plan brings there is.
  const Draft::Outcome both = draft.add(plan({owner({8}, Owner::free, Owner::kv, kA), owner({7}, Owner::kv, Owner::free, kA)}));
  CHECK(both.added && both.moves.size() == 2 && both.pending.size() == 2 && pool->live_blocks() == 4 && draft.plans() == 2);
  draft.withdraw(kA, {static_cast<SlotId>(slot_of(world, world.kv_a, 8))});
  CHECK(pool->withdrawn() && pool->closed_slots().size() == 1);
  draft.cut(inner);
  CHECK(books(*pool) == before && !pool->withdrawn() && draft.plans() == 1 && draft.depth() == 1);
  draft.begin();
  draft.withdraw(kA, {static_cast<SlotId>(slot_of(world, world.kv_a, 6))});
  draft.reopen(kA);
  draft.join(1);
  CHECK(books(*pool) == before && draft.depth() == 1);
  draft.begin();
  draft.withdraw(kA, {static_cast<SlotId>(slot_of(world, world.kv_a, 6))});
  draft.join(1);
  draft.cut(0);
  CHECK(pool->usable_blocks() == 0 && pool->owned_slots().empty() && draft.plans() == 0 && draft.depth() == 0);
  draft.begin();  // what a part did that has ended well goes back with the whole
  draft.begin();
  draft.add(plan({owner({6}, Owner::free, Owner::kv, kA)}));
  draft.join(1);
  CHECK(pool->usable_blocks() == 2);
  draft.cut(0);
  CHECK(pool->usable_blocks() == 0);
  CHECK_ERROR(ErrorKind::invalid_argument, draft.withdraw(kB, {0}));
}

TEST(a_page_of_another_tenant_comes_to_the_pool_behind_the_change) {
  for (const bool taken_again : {false, true}) {
    World world(Mode::aliased);
    const auto pool = pool_of(world, world.kv_b);
    world.change({owner({9}, Owner::free, Owner::kv, kA)});
    Draft draft(world.arena);
    draft.enlist(kB, pool);
    const auto change = [&](std::vector<Step> steps) {
      Transition made;
      made.plan = Plan{world.arena->epoch(), std::move(steps)};
      made.there.tenant = made.plan.steps[0].set_owner.tenant;
      return draft.add(std::move(made));
    };
    draft.begin();
    change({owner({9}, Owner::kv, Owner::free, kA)});
    CHECK(change({owner({9}, Owner::free, Owner::kv, kB)}).late == std::vector<PageId>{9} && pool->owned_slots().empty());
    if (taken_again) CHECK(change({owner({9}, Owner::kv, Owner::free, kB)}).added);
    const Draft::Rests rests = draft.rests();
    world.executor->apply(draft);
    world.executor->zero_due();
    world.executor->commit(nullptr);
    CHECK(rests.size() == 2 && draft.depth() == 0 && draft.rests().empty());
    for (const auto& rest : rests) {
      for (int times = 0; times < 2; ++times) draft.hand_over(*rest);
    }
    CHECK(pool->owned_slots().size() == (taken_again ? 0u : 1u));
    pool->check();
  }
}

// A pool in a draft is as one to which the obvious steps were done one by one.
TEST(a_pool_in_a_draft_is_as_its_plans_say) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    World world(Mode::aliased, seed);
    std::mt19937_64 random(seed);
    const auto below = [&](std::size_t end) { return static_cast<std::size_t>(random() % end); };
    const auto pool = pool_of(world, world.kv_a), other = pool_of(world, world.kv_a);
    Draft draft(world.arena);
    draft.enlist(kA, pool);
    draft.begin();
    std::vector<PageId> its;
    for (int times = 0; times < 20; ++times) {
      std::vector<PageId> free, gains, loses;
      for (const PageId page : draft.free_pages()) {
        if (page >= 6 && slot_of(world, world.kv_a, page) < pool->slots()) free.push_back(page);
      }
      for (const PageId page : free) {
        if (below(3) == 0) gains.push_back(page);
      }
      for (const PageId page : its) {
        if (below(3) == 0) loses.push_back(page);
      }
      std::vector<Step> steps;
      if (!gains.empty()) steps.push_back(owner(gains, Owner::free, Owner::kv, kA));
      if (!loses.empty()) steps.push_back(owner(loses, Owner::kv, Owner::free, kA));
      if (steps.empty()) continue;
      const std::size_t place = draft.begin();
      const auto before = books(*pool);
      const Draft::Outcome outcome = draft.add(Plan{world.arena->epoch(), steps});
      if (!outcome.added || below(4) == 0) {
        draft.cut(place);
        CHECK(books(*pool) == before);
        continue;
      }
      draft.join(place);
      const auto slots = [&](const std::vector<PageId>& pages) {
        BlockPool::Slots found;
        for (const PageId page : pages) found.push_back(static_cast<SlotId>(slot_of(world, world.kv_a, page)));
        return found;
      };
      other->mark(slots(gains), Slot::absent, Slot::open, "");
      other->mark(slots(loses), Slot::open, Slot::closed, "");
      const BlockPool::Moves moves = other->plan_moves(slots(loses));
      other->commit_moves(moves);
      other->mark(slots(loses), Slot::closed, Slot::absent, "");
      CHECK(outcome.moves == moves && books(*pool) == books(*other));
      its.insert(its.end(), gains.begin(), gains.end());
      its.erase(std::remove_if(its.begin(), its.end(), [&](PageId page) { return std::count(loses.begin(), loses.end(), page); }), its.end());
      const std::size_t count = below(pool->free_blocks() + 1);
      CHECK(pool->allocate(count) == other->allocate(count));
      BlockPool::Ids gone;
      for (const BlockId id : pool->live_ids()) {
        if (below(3) == 0) gone.push_back(id);
      }
      pool->release(gone);
      other->release(gone);
    }
    draft.cut(0);
    CHECK(draft.plans() == 0 && pool->owned_slots().empty());
  }
}
