// SPDX-License-Identifier: Apache-2.0
// The block pool of one KV region: which pages of it are owned, and which blocks are usable, in use, or on their way out.
//
// A region is `ranges` equal ranges of `range_pages` slots. A column is the slots at one place of each range; a block takes
// unit_bytes of every range, and is usable while every slot of its columns is owned. Slots go absent -> open -> closed (withdrawn)
// -> absent, and a block follows its worst slot:
//
//   a slot absent           unusable
//   else one closed         empty, or draining while it is in use
//   else (all open)         free, or live
//
// Blocks that an engine with its own allocator holds (`external`) become live when it hears of them (`news`), and not before.
// What listeners have heard is no part of the state that save() copies: they hear the difference, whatever lies between.
//
// Books only: no page is mapped here and no byte copied. Every call is whole or changes nothing. One thread at a time may change a
// pool; the counters may be read beside it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace remap {

using BlockId = std::uint32_t;
using SlotId = std::uint32_t;

struct PoolShape {
  std::size_t ranges = 1;
  std::size_t range_pages = 0;
  std::size_t page_bytes = 0;
  std::size_t unit_bytes = 0;
  std::size_t max_blocks = 0;
};

class BlockPool {
 public:
  enum class Slot : std::uint8_t { absent, closed, open };
  enum class Block : std::uint8_t { unusable, free, live, empty, draining };
  using Ids = std::vector<BlockId>;
  using Slots = std::vector<SlotId>;
  using Moves = std::vector<std::pair<BlockId, BlockId>>;
  struct News {
    Ids added, withdrawn;
  };
  // Everything but what listeners have heard.
  struct Saved {
    std::vector<Slot> slots;
    std::vector<Block> blocks;
    std::vector<std::uint32_t> absent, closed;  // of each column, slots in that state
    std::array<std::size_t, 5> count{};         // of blocks in each state
    std::size_t withdrawn = 0;                  // slots that are closed
    BlockId hint = 0;                           // no block below it is free
    bool external = false;
  };

  explicit BlockPool(const PoolShape& shape);

  std::size_t usable_blocks() const noexcept { return now_.blocks.size() - count(Block::unusable); }
  std::size_t free_blocks() const noexcept { return now_.external ? 0 : count(Block::free); }
  std::size_t live_blocks() const noexcept;
  std::size_t withdrawn_blocks() const noexcept { return count(Block::empty) + count(Block::draining); }
  bool external() const noexcept { return now_.external; }
  std::uint64_t changes() const noexcept { return changes_; }  // grows whenever an answer may differ
  Ids live_ids() const;
  Ids open_ids() const;
  Slots owned_slots() const;
  bool withdrawn() const noexcept { return now_.withdrawn != 0; }  // whether slots are closed
  Slots closed_slots() const;
  std::size_t slots() const noexcept { return now_.slots.size(); }
  Slot slot(SlotId slot) const noexcept { return now_.slots[slot]; }
  bool is_live(std::int64_t block) const noexcept;
  bool is_draining(std::int64_t block) const noexcept { return known(block) && at(block) == Block::draining; }

  // The lowest free blocks, ascending. Pre: as many are free.
  Ids allocate(std::size_t count);
  // Pre: each is live, or draining, and named once.
  void release(const Ids& ids) noexcept;

  // Changes these slots from one state to another. Returns the blocks that are open now and were not, or the other way round,
  // ascending. InvalidArgument (field slot) for a slot that is outside, named twice, or not in `from`; InvalidState (field live) if a
  // block in use would lose a page.
  Ids mark(const Slots& slots, Slot from, Slot to, const char* otherwise);
  // The blocks in use that touch these slots, ascending.
  Ids pending(const Slots& slots) const;
  // Those of these slots that no block in use touches.
  Slots vacant(const Slots& slots) const;
  // usable_blocks() if `lost` were absent and all others of `gained` owned.
  std::size_t usable_with(const Slots& lost, const Slots& gained) const;

  // (old, new) for blocks in use that touch these closed slots: the lowest to the lowest free one, as far as these reach.
  Moves plan_moves(const Slots& slots) const;
  // InvalidArgument (field block) unless each old one is in use, each new one free, and none is named twice.
  void commit_moves(const Moves& moves);

  // Listeners hold the blocks from now on: free ones are live, and those that become free with the next news().
  void make_external() noexcept;
  // The difference between what is open and what was heard. added blocks of an external engine are its own from here on.
  News news();
  // Listeners have heard this.
  void told(const News& news);
  // What was heard to be open and is not: noted as heard at once.
  Ids withdrawn_news();
  bool has_news() const noexcept;

  Saved save() const { return now_; }
  void restore(const Saved& saved);

  void check() const;  // throws std::logic_error

 private:
  bool known(std::int64_t block) const noexcept { return block >= 0 && static_cast<std::size_t>(block) < now_.blocks.size(); }
  Block at(std::int64_t block) const noexcept { return now_.blocks[static_cast<std::size_t>(block)]; }
  std::size_t count(Block state) const noexcept { return now_.count[static_cast<std::size_t>(state)]; }
  static bool is_open(Block state) noexcept { return state == Block::free || state == Block::live; }
  bool is_used(Block state) const noexcept;
  void set(BlockId block, Block state) noexcept;
  std::pair<BlockId, BlockId> blocks_of(std::size_t column) const noexcept;
  template <typename Absent, typename Closed>
  Slot worst(BlockId block, Absent&& absent, Closed&& closed) const;
  Slot worst(BlockId block) const;
  std::vector<std::size_t> columns_of(const Slots& slots) const;
  void require_inside(const Slots& slots) const;
  void require_slots(const Slots& slots) const;
  void require_slots(const Slots& slots, Slot state, const char* otherwise) const;
  template <typename Visit>
  void visit_blocks(const std::vector<std::size_t>& columns, Visit&& visit) const;

  PoolShape shape_;
  Saved now_;
  std::vector<bool> heard_;                // blocks that listeners know to be open
  BlockId first_news_ = 0, end_news_ = 0;  // the blocks between may differ from heard_
  std::uint64_t changes_ = 0;
};

}  // namespace remap
