// SPDX-License-Identifier: Apache-2.0
// Which pages a view shows: the only code that changes a mapping. Used by Arena (set-up) and Executor (plans, and its worker).
// Every function: pre: the arena's pointing lock is held. Whole, or nothing and a typed error; ArenaBroken if undoing fails.
//
// The driver is called with or without the lock of the tables: set-up calls and plans hold both; the worker holds the pointing
// lock alone, so that no thread that only looks waits for a driver, and this class takes the tables for as long as it takes to
// write down what a call has done. Views are read here without that lock: a thread that writes them holds the pointing lock as
// well (arena.h).
#pragma once

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <vector>

#include "remap/arena.h"

namespace remap {

// Pages that are unmapped and mapped between two moments at which the driver is free: 16 pages of 2 MiB, 1 ms of an A100's driver by
// what kvcached measured (63 us a page), and no more bytes of larger pages, whose page tables are longer. Not measured by us.
constexpr std::size_t piece_pages(std::size_t page_bytes) noexcept {
  return std::clamp<std::size_t>((std::size_t{32} << 20) / page_bytes, 1, 16);
}

class Pointer {
 public:
  // Whether the caller holds the lock of the tables.
  enum class Tables { held, free };
  explicit Pointer(Arena& arena, Tables tables = Tables::held) : arena_(arena), tables_(tables) {}

  // A layer's region, as a whole. With can_exchange(): one exchange with a spare view that shows `pages` already; the view
  // is made first if there is none. Otherwise slots().
  void layer(Region& region, const std::vector<PageId>& pages);
  // Slots of a region; kNoPage leaves a slot empty. Those that change are unmapped and mapped in pieces of a few pages, each with
  // one set_access: a driver holds locks of its own meanwhile, for which kernel launches may have to wait.
  void slots(View& view, std::size_t first_slot, const std::vector<PageId>& pages);
  // The spare view that shows `pages`, made if there is none.
  View& spare_view(Region& region, const std::vector<PageId>& pages);
  // Slots with nothing behind them show `pages`; kNoPage leaves one as it is.
  void map(View& view, std::size_t first_slot, const std::vector<PageId>& pages);
  // Nothing is behind these slots any more.
  void unmap(View& view, std::size_t first_slot, std::size_t count);

 private:
  void piece(View& view, std::size_t first_slot, const std::vector<PageId>& pages);
  // Makes a change of the tables under their lock.
  template <typename Change>
  void write(Change&& change) {
    std::unique_lock<std::mutex> lock(arena_.mutex_, std::defer_lock);
    if (tables_ == Tables::free) lock.lock();
    change();
  }
  [[noreturn]] void fail_broken(const char* what, const std::exception_ptr& why, const std::vector<PageId>& pages);

  Arena& arena_;
  const Tables tables_;
};

}  // namespace remap
