// The block pool against sets, which answer every question by looking at every block: random walks over both layouts, with blocks
// that straddle pages, and an engine of its own that hears of all.
#include "remap/block_pool.h"

#include <algorithm>
#include <random>
#include <set>

#include "check.h"

namespace remap {
namespace {

using Slot = BlockPool::Slot;

struct Model {
  std::vector<std::set<SlotId>> slots_of;  // each block
  std::set<SlotId> owned, closed;
  std::set<BlockId> live, heard;

  explicit Model(const PoolShape& shape) : slots_of(shape.max_blocks) {
    for (std::size_t block = 0; block < shape.max_blocks; ++block) {
      for (std::size_t range = 0; range < shape.ranges; ++range) {
        for (std::size_t byte = block * shape.unit_bytes; byte < (block + 1) * shape.unit_bytes; ++byte) {
          slots_of[block].insert(static_cast<SlotId>(range * shape.range_pages + byte / shape.page_bytes));
        }
      }
    }
  }
  bool within(BlockId block, const std::set<SlotId>& slots) const {
    return std::includes(slots.begin(), slots.end(), slots_of[block].begin(), slots_of[block].end());
  }
  bool touches(BlockId block, const std::set<SlotId>& slots) const {
    return std::any_of(slots.begin(), slots.end(), [&](SlotId slot) { return slots_of[block].count(slot) != 0; });
  }
  template <typename Holds>
  BlockPool::Ids blocks(Holds&& holds) const {
    BlockPool::Ids found;
    for (BlockId block = 0; block < slots_of.size(); ++block) {
      if (holds(block)) found.push_back(block);
    }
    return found;
  }
  bool usable(BlockId block) const { return within(block, owned); }
  bool open(BlockId block) const { return usable(block) && !touches(block, closed); }
  BlockPool::Ids open() const { return blocks([this](BlockId block) { return open(block); }); }
  BlockPool::Ids free() const { return blocks([this](BlockId block) { return open(block) && live.count(block) == 0; }); }
  BlockPool::Ids pending(const std::set<SlotId>& slots) const {
    return blocks([&](BlockId block) { return live.count(block) != 0 && touches(block, slots); });
  }
};

struct Walk {
  std::mt19937 random;
  PoolShape shape;
  bool external;
  BlockPool pool;
  Model model;

  Walk(unsigned seed, bool layers) : random(seed), shape(draw_shape(layers)), external(draw(2) == 0), pool(shape), model(shape) {
    if (external) pool.make_external();
  }
  std::size_t draw(std::size_t below) { return std::uniform_int_distribution<std::size_t>(0, below - 1)(random); }
  PoolShape draw_shape(bool layers) {
    PoolShape drawn;
    drawn.ranges = layers ? 2 + 2 * draw(2) : 1;
    drawn.page_bytes = 1 + draw(12);
    drawn.unit_bytes = 1 + draw(12);
    drawn.max_blocks = 1 + draw(16);
    drawn.range_pages = (drawn.max_blocks * drawn.unit_bytes + drawn.page_bytes - 1) / drawn.page_bytes;
    return drawn;
  }
  // Some of these, in any order.
  template <typename Id>
  std::vector<Id> some(std::vector<Id> all) {
    std::shuffle(all.begin(), all.end(), random);
    all.resize(all.empty() ? 0 : draw(all.size() + 1));
    return all;
  }
  BlockPool::Slots in(Slot state) const {
    BlockPool::Slots found;
    for (SlotId slot = 0; slot < shape.ranges * shape.range_pages; ++slot) {
      const Slot is = model.owned.count(slot) == 0 ? Slot::absent : model.closed.count(slot) != 0 ? Slot::closed : Slot::open;
      if (is == state) found.push_back(slot);
    }
    return found;
  }

  void mark(Slot from, Slot to) {
    const BlockPool::Slots slots = some(in(from));
    const std::set<SlotId> named(slots.begin(), slots.end());
    if (to == Slot::absent && !model.pending(named).empty()) {
      CHECK_ERROR(ErrorKind::invalid_state, pool.mark(slots, from, to, ""));
      return;
    }
    const BlockPool::Ids before = model.open();
    for (const SlotId slot : slots) {
      model.owned.erase(slot);
      model.closed.erase(slot);
      if (to != Slot::absent) model.owned.insert(slot);
      if (to == Slot::closed) model.closed.insert(slot);
    }
    BlockPool::Ids turned;
    const BlockPool::Ids after = model.open();
    std::set_symmetric_difference(before.begin(), before.end(), after.begin(), after.end(), std::back_inserter(turned));
    CHECK(pool.mark(slots, from, to, "") == turned);
    for (const BlockId block : external ? turned : BlockPool::Ids{}) {
      if (model.open(block) && model.heard.count(block) != 0) model.live.insert(block);  // it has not heard that they went
      if (!model.open(block) && model.live.count(block) != 0) model.heard.insert(block);  // it is to hear that they go
    }
    if (external && draw(2) == 0) hear();
  }
  // The engine gets what is open and new to it, and holds it until it returns it.
  void hear() {
    const BlockPool::News news = pool.news();
    for (const BlockId block : news.added) CHECK(model.open(block) && model.heard.insert(block).second);
    for (const BlockId block : news.withdrawn) CHECK(!model.open(block) && model.heard.erase(block) == 1);
    if (external) model.live.insert(news.added.begin(), news.added.end());
    CHECK(model.open() == BlockPool::Ids(model.heard.begin(), model.heard.end()));
    CHECK(pool.has_news() == (!news.added.empty() || !news.withdrawn.empty()));
    pool.told(news);
    CHECK(!pool.has_news());
  }
  void release() {
    const BlockPool::Ids ids = some(model.blocks([this](BlockId block) {
      return model.live.count(block) != 0 && (!external || model.touches(block, model.closed));
    }));
    for (const BlockId block : ids) model.live.erase(block);
    pool.release(ids);
  }
  void allocate() {
    const BlockPool::Ids free = model.free();
    BlockPool::Ids first(free.begin(), free.begin() + static_cast<std::ptrdiff_t>(draw(free.size() + 1)));
    CHECK(pool.allocate(first.size()) == first);
    model.live.insert(first.begin(), first.end());
  }
  void compact() {
    const BlockPool::Slots slots = some(in(Slot::closed));
    const BlockPool::Ids from = model.pending({slots.begin(), slots.end()}), to = external ? BlockPool::Ids{} : model.free();
    const BlockPool::Moves moves = pool.plan_moves(slots);
    CHECK(moves.size() == std::min(from.size(), to.size()));
    for (std::size_t i = 0; i < moves.size(); ++i) CHECK(moves[i] == std::pair(from[i], to[i]));
    if (draw(2) == 0) return;
    pool.commit_moves(moves);
    for (const auto& [old, fresh] : moves) {
      model.live.erase(old);
      model.live.insert(fresh);
    }
  }
  void agree() {
    pool.check();
    CHECK(pool.open_ids() == model.open());
    CHECK(pool.owned_slots() == BlockPool::Slots(model.owned.begin(), model.owned.end()));
    CHECK(pool.usable_blocks() == model.blocks([this](BlockId block) { return model.usable(block); }).size());
    const BlockPool::Ids free = model.free();
    CHECK(pool.free_blocks() == (external ? 0 : free.size()));
    CHECK(pool.live_blocks() == model.live.size() + (external ? free.size() : 0));
    const BlockPool::Slots lost = some(in(draw(2) != 0 ? Slot::open : Slot::closed)), gained = some(in(Slot::absent));
    Model other = model;
    other.owned.insert(gained.begin(), gained.end());
    for (const SlotId slot : lost) other.owned.erase(slot);
    CHECK(pool.usable_with(lost, gained) == other.blocks([&](BlockId block) { return other.usable(block); }).size());
    const BlockPool::Ids used = pool.live_ids();
    for (const SlotId slot : pool.vacant(pool.owned_slots())) {
      CHECK(std::none_of(used.begin(), used.end(), [&](BlockId block) { return model.slots_of[block].count(slot) != 0; }));
    }
  }
};

TEST(is_what_sets_say) {
  for (unsigned seed = 0; seed < 600; ++seed) {
    Walk walk(seed, seed % 2 != 0);
    BlockPool::Saved saved = walk.pool.save();
    Model known = walk.model;
    for (int step = 0; step < 60; ++step) {
      switch (walk.draw(9)) {
        case 0: walk.mark(Slot::absent, Slot::open); break;
        case 1: walk.mark(Slot::open, Slot::closed); break;
        case 2: walk.mark(Slot::closed, Slot::open); break;
        case 3: walk.mark(Slot::closed, Slot::absent); break;
        case 4: walk.release(); break;
        case 5: walk.external ? walk.hear() : walk.allocate(); break;
        case 6: walk.compact(); break;
        case 7:
          saved = walk.pool.save();
          known = walk.model;
          break;
        case 8:  // what was heard stays heard, and the engine holds it
          known.heard = walk.model.heard;
          walk.pool.restore(saved);
          walk.model = known;
          for (const BlockId block : walk.external ? walk.model.open() : BlockPool::Ids{}) {
            if (walk.model.heard.count(block) != 0) walk.model.live.insert(block);
          }
          walk.hear();
          break;
      }
      walk.agree();
    }
  }
}

TEST(an_engine_hears_of_blocks_before_it_holds_them) {
  BlockPool pool({1, 4, 4, 2, 8});
  pool.make_external();
  pool.mark({0, 1}, Slot::absent, Slot::open, "");
  CHECK(pool.live_blocks() == 4 && pool.free_blocks() == 0);
  pool.mark({0}, Slot::open, Slot::closed, "");
  CHECK(!pool.is_draining(0));  // it has not heard of it: it need not return it
  pool.told(pool.news());
  pool.mark({1}, Slot::open, Slot::closed, "");
  CHECK(pool.is_draining(2) && pool.withdrawn_news() == BlockPool::Ids({2, 3}));
  CHECK(pool.withdrawn_news().empty());
  pool.mark({1}, Slot::closed, Slot::open, "");  // called off: the engine, which has heard of the withdrawal, hears of that too
  CHECK(pool.news().added == BlockPool::Ids({2, 3}));
}

TEST(an_engine_that_may_not_have_heard_of_a_block_hears_that_it_goes) {
  BlockPool pool({1, 4, 4, 2, 8});
  pool.make_external();
  pool.mark({0}, Slot::absent, Slot::open, "");
  CHECK(pool.news().added == BlockPool::Ids({0, 1}));  // and an interrupt: nobody says that it was told
  pool.mark({0}, Slot::open, Slot::closed, "");
  CHECK(pool.is_draining(0) && pool.news().withdrawn == BlockPool::Ids({0, 1}));
  pool.check();
}

TEST(wrong_calls_change_nothing) {
  BlockPool pool({1, 4, 4, 2, 8});
  pool.mark({0, 1, 2}, Slot::absent, Slot::open, "");
  pool.allocate(2);
  const std::uint64_t changes = pool.changes();
  CHECK_ERROR(ErrorKind::invalid_argument, pool.mark({4}, Slot::absent, Slot::open, ""));
  CHECK_ERROR(ErrorKind::invalid_argument, pool.mark({3, 3}, Slot::absent, Slot::open, ""));
  CHECK_ERROR(ErrorKind::invalid_argument, pool.mark({3, 2}, Slot::absent, Slot::open, ""));
  CHECK_ERROR(ErrorKind::invalid_argument, pool.usable_with({9}, {}));
  for (const BlockPool::Moves& moves : {BlockPool::Moves{{2, 3}}, {{0, 1}}, {{0, 8}}, {{0, 2}, {0, 3}}, {{0, 2}, {1, 2}}}) {
    CHECK_ERROR(ErrorKind::invalid_argument, pool.commit_moves(moves));
  }
  CHECK(pool.changes() == changes && pool.live_ids() == BlockPool::Ids({0, 1}));
  pool.check();
}

}  // namespace
}  // namespace remap
