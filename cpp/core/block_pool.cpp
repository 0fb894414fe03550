// SPDX-License-Identifier: Apache-2.0
#include "remap/block_pool.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "remap/error.h"

namespace remap {
namespace {

[[noreturn]] void refuse_slot(SlotId slot, const std::string& why) {
  throw Error(ErrorKind::invalid_argument, "slot " + std::to_string(slot) + " " + why,
              {{"field", std::string("slot")}, {"slot", static_cast<std::int64_t>(slot)}});
}

[[noreturn]] void refuse_block(BlockId block, const std::string& why) {
  throw Error(ErrorKind::invalid_argument, "block " + std::to_string(block) + " " + why + "; nothing changed",
              {{"field", std::string("block")}, {"block", static_cast<std::int64_t>(block)}});
}

}  // namespace

BlockPool::BlockPool(const PoolShape& shape) : shape_(shape) {
  now_.slots.assign(shape.ranges * shape.range_pages, Slot::absent);
  now_.blocks.assign(shape.max_blocks, Block::unusable);
  now_.absent.assign(shape.range_pages, static_cast<std::uint32_t>(shape.ranges));
  now_.closed.assign(shape.range_pages, 0);
  now_.count[0] = shape.max_blocks;
  heard_.assign(shape.max_blocks, false);
}

// An external engine has not heard of a free block: nobody uses it, and yet no one else may have it.
std::size_t BlockPool::live_blocks() const noexcept {
  return count(Block::live) + count(Block::draining) + (now_.external ? count(Block::free) : 0);
}

bool BlockPool::is_used(Block state) const noexcept { return state == Block::live || state == Block::draining; }

bool BlockPool::is_live(std::int64_t block) const noexcept {
  return known(block) && (is_used(at(block)) || (now_.external && at(block) == Block::free));
}

BlockPool::Ids BlockPool::live_ids() const {
  Ids found;
  for (BlockId block = 0; block < now_.blocks.size(); ++block) {
    if (is_live(block)) found.push_back(block);
  }
  return found;
}

BlockPool::Ids BlockPool::open_ids() const {
  Ids found;
  for (BlockId block = 0; block < now_.blocks.size(); ++block) {
    if (is_open(now_.blocks[block])) found.push_back(block);
  }
  return found;
}

BlockPool::Slots BlockPool::owned_slots() const {
  Slots found;
  for (SlotId slot = 0; slot < now_.slots.size(); ++slot) {
    if (now_.slots[slot] != Slot::absent) found.push_back(slot);
  }
  return found;
}

BlockPool::Slots BlockPool::closed_slots() const {
  Slots found;
  for (SlotId slot = 0; now_.withdrawn != 0 && slot < now_.slots.size(); ++slot) {
    if (now_.slots[slot] == Slot::closed) found.push_back(slot);
  }
  return found;
}

void BlockPool::set(BlockId block, Block state) noexcept {
  Block& present = now_.blocks[block];
  if (is_open(present) != is_open(state)) {
    if (first_news_ == end_news_) first_news_ = end_news_ = block;
    first_news_ = std::min(first_news_, block);
    end_news_ = std::max(end_news_, block + 1);
  }
  --now_.count[static_cast<std::size_t>(present)];
  ++now_.count[static_cast<std::size_t>(state)];
  present = state;
  if (state == Block::free) now_.hint = std::min(now_.hint, block);
}

// ---- allocation ---------------------------------------------------------------------------------------------------

BlockPool::Ids BlockPool::allocate(std::size_t count) {
  Ids ids;
  ids.reserve(count);
  BlockId block = now_.hint;
  for (; ids.size() < count; ++block) {
    if (now_.blocks[block] == Block::free) ids.push_back(block);
  }
  for (const BlockId id : ids) set(id, Block::live);
  now_.hint = block;
  ++changes_;
  return ids;
}

void BlockPool::release(const Ids& ids) noexcept {
  for (const BlockId id : ids) set(id, now_.blocks[id] == Block::draining ? Block::empty : Block::free);
  ++changes_;
}

// ---- slots --------------------------------------------------------------------------------------------------------

void BlockPool::require_inside(const Slots& slots) const {
  for (const SlotId slot : slots) {
    if (slot < now_.slots.size()) continue;
    refuse_slot(slot, "lies outside the region of " + std::to_string(now_.slots.size()) + " pages; nothing changed");
  }
}

void BlockPool::require_slots(const Slots& slots) const {
  require_inside(slots);
  if (std::adjacent_find(slots.begin(), slots.end(), std::greater_equal<>()) == slots.end()) return;
  Slots sorted(slots);
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) refuse_slot(*twice, "is named twice; nothing changed; name each slot once");
}

void BlockPool::require_slots(const Slots& slots, Slot state, const char* otherwise) const {
  require_slots(slots);
  for (const SlotId slot : slots) {
    if (now_.slots[slot] != state) refuse_slot(slot, std::string(otherwise) + "; nothing changed; check owned_slots()");
  }
}

// Ascending, each once.
std::vector<std::size_t> BlockPool::columns_of(const Slots& slots) const {
  std::vector<std::size_t> columns;
  columns.reserve(slots.size());
  for (const SlotId slot : slots) columns.push_back(slot % shape_.range_pages);
  if (std::adjacent_find(columns.begin(), columns.end(), std::greater_equal<>()) != columns.end()) {
    std::sort(columns.begin(), columns.end());
    columns.erase(std::unique(columns.begin(), columns.end()), columns.end());
  }
  return columns;
}

// The blocks that touch the column, [first, end).
std::pair<BlockId, BlockId> BlockPool::blocks_of(std::size_t column) const noexcept {
  const std::size_t first = column * shape_.page_bytes / shape_.unit_bytes;
  const std::size_t end = std::min(((column + 1) * shape_.page_bytes + shape_.unit_bytes - 1) / shape_.unit_bytes, now_.blocks.size());
  return {static_cast<BlockId>(std::min(first, end)), static_cast<BlockId>(end)};
}

template <typename Visit>
void BlockPool::visit_blocks(const std::vector<std::size_t>& columns, Visit&& visit) const {
  BlockId next = 0;
  for (const std::size_t column : columns) {
    const auto [first, end] = blocks_of(column);
    for (BlockId block = std::max(first, next); block < end; ++block) visit(block);
    next = std::max(next, end);
  }
}

template <typename Absent, typename Closed>
BlockPool::Slot BlockPool::worst(BlockId block, Absent&& absent, Closed&& closed) const {
  const std::size_t first = block * shape_.unit_bytes / shape_.page_bytes;
  const std::size_t last = ((block + std::size_t{1}) * shape_.unit_bytes - 1) / shape_.page_bytes;
  Slot found = Slot::open;
  for (std::size_t column = first; column <= last; ++column) {
    if (absent(column)) return Slot::absent;
    if (closed(column)) found = Slot::closed;
  }
  return found;
}

BlockPool::Slot BlockPool::worst(BlockId block) const {
  return worst(block, [this](std::size_t column) { return now_.absent[column] != 0; },
               [this](std::size_t column) { return now_.closed[column] != 0; });
}

BlockPool::Ids BlockPool::mark(const Slots& slots, Slot from, Slot to, const char* otherwise) {
  require_slots(slots, from, otherwise);
  const std::vector<std::size_t> columns = columns_of(slots);
  std::size_t blocks = 0;
  visit_blocks(columns, [&](BlockId block) {
    ++blocks;
    if (to != Slot::absent || !is_used(now_.blocks[block])) return;
    const Ids live = pending(slots);
    throw Error(ErrorKind::invalid_state,
                std::to_string(live.size()) + " live blocks still touch these pages, the first is " + std::to_string(live[0]) +
                    "; no page was taken; free them or move them (plan_moves, commit_moves), then call again",
                {{"live", static_cast<std::int64_t>(live.size())}});
  });
  Ids turned;
  turned.reserve(blocks);
  for (const SlotId slot : slots) {  // nothing fails from here on
    const std::size_t column = slot % shape_.range_pages;
    now_.absent[column] += (to == Slot::absent) - (from == Slot::absent);
    now_.closed[column] += (to == Slot::closed) - (from == Slot::closed);
    now_.withdrawn += (to == Slot::closed) - (from == Slot::closed);
    now_.slots[slot] = to;
  }
  visit_blocks(columns, [&](BlockId block) {
    const Block before = now_.blocks[block];
    Block after = Block::unusable;
    switch (worst(block)) {
      case Slot::absent: break;
      case Slot::closed:
        after = is_used(before) ? Block::draining : Block::empty;
        // An external engine that an interrupt kept from hearing of it may have it, or not: it is to hear that it goes.
        if (now_.external && before == Block::live) heard_[block] = true;
        break;
      case Slot::open: after = is_used(before) || (now_.external && heard_[block]) ? Block::live : Block::free; break;
    }
    if (is_open(before) != is_open(after)) turned.push_back(block);
    set(block, after);
  });
  ++changes_;
  return turned;
}

BlockPool::Ids BlockPool::pending(const Slots& slots) const {
  require_slots(slots);
  Ids found;
  visit_blocks(columns_of(slots), [&](BlockId block) {
    if (is_live(block)) found.push_back(block);
  });
  return found;
}

BlockPool::Slots BlockPool::vacant(const Slots& slots) const {
  Slots found;
  for (const SlotId slot : slots) {
    const auto [first, end] = blocks_of(slot % shape_.range_pages);
    BlockId block = first;
    while (block < end && !is_live(block)) ++block;
    if (block == end) found.push_back(slot);
  }
  return found;
}

std::size_t BlockPool::usable_with(const Slots& lost, const Slots& gained) const {
  for (const Slots* slots : {&lost, &gained}) require_inside(*slots);
  std::vector<std::uint32_t> absent(now_.absent);
  Slots named(lost);
  std::vector<bool> goes(lost.empty() ? 0 : now_.slots.size(), false);
  for (const SlotId slot : lost) {
    if (!goes[slot] && now_.slots[slot] != Slot::absent) ++absent[slot % shape_.range_pages];
    goes[slot] = true;
  }
  for (const SlotId slot : gained) {
    if (now_.slots[slot] != Slot::absent || (!goes.empty() && goes[slot])) continue;
    --absent[slot % shape_.range_pages];
    named.push_back(slot);
  }
  std::size_t usable = usable_blocks();
  visit_blocks(columns_of(named), [&](BlockId block) {
    const Slot later = worst(block, [&](std::size_t column) { return absent[column] != 0; }, [](std::size_t) { return false; });
    usable += (later != Slot::absent) - (now_.blocks[block] != Block::unusable);
  });
  return usable;
}

// ---- moves --------------------------------------------------------------------------------------------------------

BlockPool::Moves BlockPool::plan_moves(const Slots& slots) const {
  require_slots(slots, Slot::closed, "must be withdrawn before its blocks are moved");
  Moves moves;
  BlockId to = now_.hint;
  std::size_t room = free_blocks();
  for (const BlockId block : room != 0 ? pending(slots) : Ids{}) {
    if (room-- == 0) break;
    while (now_.blocks[to] != Block::free) ++to;
    moves.emplace_back(block, to++);
  }
  return moves;
}

void BlockPool::commit_moves(const Moves& moves) {
  std::vector<bool> named(now_.blocks.size(), false);
  for (const auto& [from, to] : moves) {
    if (!known(from) || !is_used(now_.blocks[from])) refuse_block(from, "is not allocated, so it cannot move");
    if (!known(to) || now_.blocks[to] != Block::free) refuse_block(to, "is not free, so nothing can move there");
    for (const BlockId block : {from, to}) {
      if (named[block]) refuse_block(block, "is named twice");
      named[block] = true;
    }
  }
  for (const auto& [from, to] : moves) {
    set(from, now_.blocks[from] == Block::draining ? Block::empty : Block::free);
    set(to, Block::live);
  }
  ++changes_;
}

// ---- listeners ----------------------------------------------------------------------------------------------------

void BlockPool::make_external() noexcept {
  now_.external = true;
  for (BlockId block = 0; block < now_.blocks.size(); ++block) {
    if (now_.blocks[block] == Block::free) set(block, Block::live);
  }
  ++changes_;
}

bool BlockPool::has_news() const noexcept {
  for (BlockId block = first_news_; block < end_news_; ++block) {
    if (is_open(now_.blocks[block]) != heard_[block]) return true;
  }
  return false;
}

BlockPool::News BlockPool::news() {
  News found;
  for (BlockId block = first_news_; block < end_news_; ++block) {
    const bool open = is_open(now_.blocks[block]);
    if (open != heard_[block]) (open ? found.added : found.withdrawn).push_back(block);
  }
  if (now_.external) {
    for (const BlockId block : found.added) {
      if (now_.blocks[block] == Block::free) set(block, Block::live);
    }
  }
  return found;
}

void BlockPool::told(const News& news) {
  for (const BlockId block : news.added) heard_.at(block) = true;
  for (const BlockId block : news.withdrawn) heard_.at(block) = false;
  if (!has_news()) first_news_ = end_news_ = 0;
}

BlockPool::Ids BlockPool::withdrawn_news() {
  News found;
  for (BlockId block = first_news_; block < end_news_; ++block) {
    if (heard_[block] && !is_open(now_.blocks[block])) found.withdrawn.push_back(block);
  }
  told(found);
  return found.withdrawn;
}

// In place: another thread may look at the blocks meanwhile.
void BlockPool::restore(const Saved& saved) {
  now_ = saved;
  for (BlockId block = 0; now_.external && block < now_.blocks.size(); ++block) {
    if (now_.blocks[block] == Block::free && heard_[block]) set(block, Block::live);
  }
  first_news_ = 0;
  end_news_ = static_cast<BlockId>(now_.blocks.size());
  ++changes_;
}

// ---- verification -------------------------------------------------------------------------------------------------

void BlockPool::check() const {
  const auto verify = [](bool holds, const std::string& what) {
    if (!holds) throw std::logic_error("BlockPool invariant broken: " + what);
  };
  std::vector<std::uint32_t> absent(shape_.range_pages, 0), closed(shape_.range_pages, 0);
  for (std::size_t slot = 0; slot < now_.slots.size(); ++slot) {
    absent[slot % shape_.range_pages] += now_.slots[slot] == Slot::absent;
    closed[slot % shape_.range_pages] += now_.slots[slot] == Slot::closed;
  }
  verify(absent == now_.absent && closed == now_.closed, "columns count their slots");
  verify(closed_slots().size() == now_.withdrawn, "withdrawn slots are counted");
  std::array<std::size_t, 5> count{};
  for (BlockId block = 0; block < now_.blocks.size(); ++block) {
    const Block state = now_.blocks[block];
    ++count[static_cast<std::size_t>(state)];
    const Slot slot = worst(block);
    const bool fits = slot == Slot::absent   ? state == Block::unusable
                      : slot == Slot::closed ? state == Block::empty || state == Block::draining
                                             : is_open(state);
    verify(fits, "block " + std::to_string(block) + " is as its worst slot");
    verify(state != Block::free || block >= now_.hint, "free block " + std::to_string(block) + " lies below the hint");
    verify(!now_.external || state != Block::free || !heard_[block], "an external engine holds what it has heard of");
    const bool differs = is_open(state) != heard_[block];
    verify(!differs || (first_news_ <= block && block < end_news_), "block " + std::to_string(block) + " is no news");
  }
  verify(count == now_.count, "blocks are counted");
}

}  // namespace remap
