// SPDX-License-Identifier: Apache-2.0
#include "remap/executor.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "backend/thread.h"
#include "pointing.h"
#include "remap/fork.h"

namespace remap {
namespace {

Error::Value number(std::uint64_t value) { return static_cast<std::int64_t>(value); }

template <typename Pages>
bool shows_any(const Pages& pages) {
  return std::any_of(pages.begin(), pages.end(), [](PageId id) { return id != kNoPage; });
}

// Calls body(first, stop) for each run of slots at which the two differ.
template <typename Body>
void for_changes(const std::vector<PageId>& shown, const std::vector<PageId>& target, Body&& body) {
  for (std::size_t first = 0; first < target.size(); ++first) {
    std::size_t stop = first;
    while (stop < target.size() && shown[stop] != target[stop]) ++stop;
    if (stop == first) continue;
    body(first, stop);
    first = stop;
  }
}

std::vector<PageId> part(const std::vector<PageId>& pages, std::size_t first, std::size_t stop) {
  return {pages.begin() + static_cast<std::ptrdiff_t>(first), pages.begin() + static_cast<std::ptrdiff_t>(stop)};
}

}  // namespace

template <typename Visit>
void Executor::for_owners(const Draft& draft, Visit&& visit) {
  for (const Draft::Added& each : draft.added_) {
    for (const Step& step : each.change.plan.steps) {
      if (step.kind == Step::Kind::set_owner && !step.set_owner.pages.empty()) visit(step.set_owner);
    }
  }
}

Executor::Executor(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {
  if (!arena_) throw Error(ErrorKind::invalid_argument, "An executor needs an arena. Nothing was created.");
  refuse_fork(arena_->fork_generation_);
  // Now: a commit that could not start it would have to be taken back, and at exit no code should start threads.
  worker_ = start_thread("remap-point", [this] { work(); });
}

Executor::~Executor() { end(); }

// ---- a draft, whole or not at all ---------------------------------------------------------------------------------

// Pre: the lock of the arena's tables is held. Throws if the draft cannot be applied now. Its plans were checked one by one: what they
// were checked against is as it was while the epoch is.
Executor::Needs Executor::admit(const Draft& draft) const {
  const Arena& arena = *arena_;
  arena.guard();
  if (arena.undecided_) {
    throw Error(ErrorKind::invalid_state, "A change is applied and not yet committed. Nothing changed; commit it first.");
  }
  if (!draft.added_.empty() && draft.epoch_ != arena.epoch_) {
    throw Error(ErrorKind::stale_plan,
                "The plans were made for epoch " + std::to_string(draft.epoch_) + ", the arena is at " +
                    std::to_string(arena.epoch_.load()) + ". No call was made; make them again from a fresh snapshot.",
                {{"plan_epoch", number(draft.epoch_)}, {"arena_epoch", number(arena.epoch_)}});
  }
  Needs needs;
  const bool strict = arena.options_.mode == Mode::strict;
  for_owners(draft, [&](const SetOwner& move) {
    needs.leaves = needs.leaves || move.to == Owner::outside;
    needs.points = needs.points || (strict && move.from != Owner::outside && move.to != Owner::outside);
  });
  for (const auto& [id, target] : draft.targets_) {
    const Region& region = arena.region(id);
    const std::vector<PageId>& shown = region.kind == RegionKind::layer ? region.target : region.view.shown;
    if (target.deferred || shown == target.pages) continue;
    needs.points = true;
    for_changes(shown, target.pages, [&](std::size_t first, std::size_t stop) {
      needs.unmaps = needs.unmaps || shows_any(part(shown, first, stop));
    });
  }
  return needs;
}

Applied Executor::apply(const Plan& plan, const Ordering& ordering) {
  Draft draft(arena_);
  draft.add(plan);
  Orderings orderings{{kNobody, ordering}};
  for (const Step& step : plan.steps) {
    if (step.kind == Step::Kind::set_owner) orderings.emplace_back(step.set_owner.tenant, ordering);
  }
  return apply(draft, orderings);
}

Applied Executor::apply(Draft& draft, const Orderings& orderings) {
  Arena& arena = *arena_;
  refuse_fork(arena.fork_generation_);
  std::unique_lock<std::mutex> pointing(arena.pointing_mutex_, std::defer_lock);
  std::unique_lock<std::mutex> tables(arena.mutex_);
  const Needs needs = admit(draft);
  const auto await_all = [&](EventHandle more) {
    if (more != 0) arena.backend_->synchronize(more, std::chrono::nanoseconds::max());
    for (const auto& [tenant, ordering] : orderings) {
      if (ordering.after != 0) arena.backend_->synchronize(ordering.after, std::chrono::nanoseconds::max());
    }
  };
  if (needs.leaves) {
    // Another process knows nothing of this one's streams: before it may have a page, whatever was enqueued for it has been done. The
    // arena's own stream is behind all who ever freed a page.
    const EventHandle freed = arena.gathered_ ? arena.fill_event_ : 0;
    tables.unlock();
    await_all(freed);
    tables.lock();
    admit(draft);  // things may have changed meanwhile
  }
  if (needs.points) {
    // Unmapping does not wait, so this thread does, before it begins. Not with the tables: others look at them, maybe holding
    // what the device needs to come to this event. Nor is the worker waited for with them.
    tables.unlock();
    if (needs.unmaps) await_all(0);
    pointing.lock();
    tables.lock();
    admit(draft);  // another change may have been faster
  }
  Applied applied;
  undo_.clear();
  due_.clear();
  deferred_.clear();
  left_to_later_.clear();
  shown_still_.clear();
  arena.undecided_of_.clear();
  for_owners(draft, [&](const SetOwner& move) {
    arena.undecided_of_.push_back(move.tenant);
    applied.pages_moved += move.pages.size();
  });
  for (const auto& [id, target] : draft.targets_) {
    arena.undecided_of_.push_back(arena.region(id).tenant);
    if (!target.deferred) continue;
    left_to_later_.push_back(id);
    if (!elsewhere(target.pages)) deferred_.push_back({id, target.layer});
  }
  for (const auto& [id, home] : draft.homes_) arena.undecided_of_.push_back(arena.region(id).tenant);
  applied.points_deferred = deferred_.size();
  try {
    point(draft, applied);
    map_kv(draft);
    list_due(draft, orderings, applied);
  } catch (...) {
    undo();
    throw;
  }
  applied.epoch = arena.epoch_ + 1;
  store(draft);
  return applied;
}

// In each of the steps below everything that allocates comes first. Then the change, which is whole or throws, and then its undo
// step, which only takes its place: so the changed steps and those that can be undone are always the same.
void Executor::make_room_to_undo() {
  if (undo_.size() == undo_.capacity()) undo_.reserve(2 * undo_.size() + 8);
}

template <typename Change>
void Executor::change(Back back, std::vector<PageId> pages, Change&& forth) {
  make_room_to_undo();
  forth();
  undo_.push_back({std::move(back), std::move(pages)});
}

// Regions that are pointed now: rings, and layers that are not left to the worker.
void Executor::point(const Draft& draft, Applied& applied) {
  Arena& arena = *arena_;
  for (const auto& [id, target] : draft.targets_) {
    Region& region = arena.region(id);
    if (region.kind != RegionKind::ring || region.view.shown == target.pages) continue;
    View& view = region.view;
    const std::vector<PageId> shown = view.shown;
    for_changes(shown, target.pages, [&](std::size_t first, std::size_t stop) {
      const std::vector<PageId> fresh = part(target.pages, first, stop), before = part(shown, first, stop);
      std::vector<PageId> both = fresh;
      both.insert(both.end(), before.begin(), before.end());
      change([&arena, &view, first, before](const auto&) { Pointer(arena).slots(view, first, before); }, std::move(both),
             [&] { Pointer(arena).slots(view, first, fresh); });
    });
    ++applied.points_done;
  }
  for (const auto& [id, target] : draft.targets_) {
    Region& region = arena.region(id);
    if (region.kind != RegionKind::layer || target.deferred) continue;
    // Whether a step is pending stays as it is: the step of an earlier change still comes, and has nothing to point.
    change([&arena, &region, before = region.target](const auto&) { Pointer(arena).layer(region, before); },
           elsewhere(target.pages) ? region.home : target.pages, [&, &pages = target.pages] { Pointer(arena).layer(region, pages); });
    ++applied.points_done;
  }
}

// strict: a tenant's KV region shows all that is its KV now, and what was so at any time within the change: live blocks move from there,
// and commit() lets go of it.
void Executor::map_kv(const Draft& draft) {
  Arena& arena = *arena_;
  if (arena.options_.mode == Mode::aliased) return;
  std::map<RegionId, std::set<std::size_t>> gained, all;
  for_owners(draft, [&](const SetOwner& move) {
    if (move.from != Owner::kv && move.to != Owner::kv) return;
    for (const auto& [id, region] : arena.regions_) {
      if (region.kind != RegionKind::kv || region.tenant != move.tenant) continue;
      for (const PageId page : move.pages) {
        const std::size_t slot = region.slot_of[page];
        all[id].insert(slot);
        if (region.view.shown[slot] == kNoPage) gained[id].insert(slot);
      }
    }
  });
  for (const auto& [id, slots] : gained) {
    View& view = arena.region(id).view;
    const std::vector<PageId>& designated = arena.region(id).designated;
    for (auto slot = slots.begin(); slot != slots.end();) {  // contiguous slots are mapped as one run: one set_access for all of them
      const std::size_t first = *slot;
      std::size_t stop = first;
      while (slot != slots.end() && *slot == stop) ++slot, ++stop;
      const std::vector<PageId> run = part(designated, first, stop);
      change([&arena, &view, first](const auto& pages) { Pointer(arena).unmap(view, first, pages.size()); }, run,
             [&] { Pointer(arena).map(view, first, run); });
    }
  }
  for (const auto& [id, slots] : all) {
    const Region& region = arena.region(id);
    for (const std::size_t slot : slots) {
      const Draft::Next& next = draft.next_[region.designated[slot]];
      if (next.owner != Owner::kv || next.tenant != region.tenant) shown_still_.emplace_back(id, slot);
    }
  }
}

// Which pages are to be zeroed behind the change, and what that comes behind: who had freed pages, and the event that their new tenant
// names, are taken in now, since events may be recorded anew.
void Executor::list_due(const Draft& draft, const Orderings& orderings, Applied& applied) {
  Arena& arena = *arena_;
  const auto ordering_of = [&](TenantId tenant) {
    const auto found = std::find_if(orderings.begin(), orderings.end(), [&](const auto& each) { return each.first == tenant; });
    return found != orderings.end() ? found->second : Ordering{};
  };
  std::set<EventHandle> freed;
  for_owners(draft, [&](const SetOwner& move) {
    if (move.to == Owner::free) freed.insert(ordering_of(move.tenant).after);
  });
  for (const EventHandle after : freed) {
    if (after != 0) arena.gather(after);
  }
  std::set<TenantId> taken_in;
  for (const PageId id : draft.touched_) {
    const Draft::Next& next = draft.next_[id];
    const bool from_others = next.from_others(next.tenant);
    if (next.tenant == kNobody || !(from_others || arena.is_dirty(id, next.tenant))) continue;
    const auto [after, zero_on] = ordering_of(next.tenant);
    const bool waits = zero_on == 0 || arena.options_.mode == Mode::strict;
    if (taken_in.insert(next.tenant).second && after != 0) {
      if (waits) {
        arena.gather(after);
      } else {
        arena.backend_->stream_wait(zero_on, after);
      }
    }
    // Those that become no KV have no live blocks, and strict mode maps them only when their regions have been pointed.
    const bool was_free = !from_others && next.owner == Owner::kv;
    due_.push_back({id, next.tenant, waits ? 0 : zero_on, was_free});
    if (!was_free) applied.due.push_back(id);
  }
}

// From here nothing goes back. All of it is what the draft says; the vectors have room.
void Executor::store(Draft& draft) noexcept {
  Arena& arena = *arena_;
  for (const PageId id : draft.touched_) {
    const Draft::Next& next = draft.next_[id];
    Page& page = arena.pages_[id];
    // A page that comes in may hold any process's bytes, and one that goes out will.
    if (page.owner == Owner::outside || next.owner == Owner::outside) page.dirty = kUnknownBytes;
    arena.own(id, next.owner);
    page.tenant = next.tenant;
    const TenantId wrote = next.tenant != kNobody ? next.tenant : next.passed;  // or may, from now on
    if (page.dirty == kNobody) page.dirty = wrote;
    if (next.tenant == kNobody && wrote != kNobody && page.dirty != wrote) page.dirty = kUnknownBytes;
  }
  for (const Due& each : due_) {
    arena.pages_[each.page].due = each.tenant;
    arena.pages_[each.page].dirty = kUnknownBytes;
  }
  for (auto& [id, home] : draft.homes_) {
    for (const PageId page : arena.regions_.find(id)->second.home) {
      if (page != kNoPage && arena.pages_[page].home == id) arena.pages_[page].home = kNoRegion;
    }
  }
  for (auto& [id, home] : draft.homes_) {
    for (const PageId page : home) {
      if (page != kNoPage) arena.pages_[page].home = id;
    }
    arena.regions_.find(id)->second.home.swap(home);
  }
  for (auto& [id, target] : draft.targets_) {
    Region& region = arena.regions_.find(id)->second;
    if (region.kind != RegionKind::layer) continue;
    region.target.swap(target.pages);
    if (!target.deferred) continue;
    region.undecided = true;  // until the change is committed the worker leaves the region alone
    if (elsewhere(region.target)) continue;  // the step of an earlier change still comes, lets go of the layer, and has nothing to point
    ++region.targets;
    region.pending = true;
  }
  undo_.clear();
  arena.undecided_ = true;
  draft.added_.clear();
  draft.rests_.clear();
  draft.savepoints_.clear();
  draft.forget();
}

// What apply() has asked of the backend, in reverse.
void Executor::undo() {
  Arena& arena = *arena_;
  // All of it is tried, even behind a failure: every page that can be saved is. The first failure makes the arena broken.
  std::exception_ptr failure;
  if (arena.broken_) undo_.clear();  // a step could not even undo itself: the core does not know what it would be undone onto
  for (auto undo = undo_.rbegin(); undo != undo_.rend(); ++undo) {
    try {
      undo->action(undo->pages);
      undo->pages.clear();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) {
    arena.broken_ = true;
    for (const Undo& each : undo_) {
      for (const PageId id : each.pages) {
        if (id != kNoPage) arena.own(id, Owner::quarantine);
      }
    }
  }
  undo_.clear();
  due_.clear();
  deferred_.clear();
  left_to_later_.clear();
  shown_still_.clear();
  if (failure) arena.fail_broken("Undoing a change failed: ", failure, {});
}

// ---- what is due ----------------------------------------------------------------------------------------------------

// strict: an address at which its tenant has the page mapped, which is no KV.
bool Executor::find_mapped(DirtyPage& page) const {
  for (const auto& [id, region] : arena_->regions_) {
    if (region.tenant != page.tenant) continue;
    const auto slot = std::find(region.view.shown.begin(), region.view.shown.end(), page.page);
    if (slot == region.view.shown.end()) continue;
    page.region = id;
    page.at = arena_->slot_address(region.view, static_cast<std::size_t>(slot - region.view.shown.begin()));
    return true;
  }
  return false;
}

std::size_t Executor::zero_free() { return zero(true, {}); }

std::size_t Executor::zero_due(const std::vector<EventHandle>& behind) { return zero(false, behind); }

std::size_t Executor::zero(bool free_alone, const std::vector<EventHandle>& behind) {
  Arena& arena = *arena_;
  refuse_fork(arena.fork_generation_);
  std::unique_lock<std::mutex> tables(arena.mutex_);
  arena.guard();
  if (!arena.undecided_) return 0;
  for (const EventHandle event : behind) {
    if (event != 0) arena.gather(event);
  }
  if (due_.empty()) return 0;
  std::map<StreamHandle, std::vector<DirtyPage>> pages;  // as they are zeroed: together, ascending
  std::map<TenantId, std::pair<RegionId, const Region*>> kv;
  for (const auto& [id, region] : arena.regions_) {
    if (region.kind == RegionKind::kv) kv[region.tenant] = {id, &region};
  }
  for (const Due& each : due_) {
    if (arena.pages_[each.page].due != each.tenant || (free_alone && !each.was_free)) continue;
    const auto [id, region] = kv.at(each.tenant);
    DirtyPage page{id, arena.slot_address(region->view, region->slot_of[each.page]), each.page, each.tenant};
    if (region->view.shown[region->slot_of[each.page]] != each.page && !find_mapped(page)) {
      throw Error(ErrorKind::invalid_state,
                  "Page " + std::to_string(page.page) + " is to be zeroed, and no region of its tenant shows it. Its tenant must not use it; "
                  "remove the tenant.",
                  {{"page", number(page.page)}, {"tenant", number(page.tenant)}});
    }
    pages[each.zero_on].push_back(page);
  }
  std::size_t bytes = 0;
  for (auto& [stream, some] : pages) {
    std::sort(some.begin(), some.end(), [](const DirtyPage& a, const DirtyPage& b) { return a.at < b.at; });
    std::vector<PageId> zeroed;
    const auto done = [&] {
      for (const PageId id : zeroed) arena.pages_[id].due = kNobody;
      bytes += zeroed.size() * arena.options_.page_bytes;
    };
    try {
      stream == 0 ? arena.zero_pages(some, zeroed, &tables) : arena.enqueue_zeroing(some, stream, zeroed);
    } catch (...) {
      done();
      throw;
    }
    done();
  }
  return bytes;
}

// strict: pages that were KV, and from which live blocks have moved by now, are unmapped behind these events.
void Executor::let_go(const std::vector<EventHandle>& behind) {
  Arena& arena = *arena_;
  refuse_fork(arena.fork_generation_);
  {
    const std::lock_guard<std::mutex> tables(arena.mutex_);
    if (!arena.undecided_) throw Error(ErrorKind::invalid_state, "No change is applied. Nothing changed.");
    if (std::any_of(due_.begin(), due_.end(), [&](const Due& each) { return arena.pages_[each.page].due == each.tenant; })) {
      throw Error(ErrorKind::invalid_state, "Pages that changed tenant are to be zeroed first. The change is applied as before; call zero_due().");
    }
    if (shown_still_.empty()) return;
  }
  for (const EventHandle event : behind) {  // without a lock: as in apply()
    if (event != 0) arena.backend_->synchronize(event, std::chrono::nanoseconds::max());
  }
  const Arena::Both locks(arena);
  arena.guard();
  while (!shown_still_.empty()) {
    const auto [id, last] = shown_still_.back();
    std::size_t count = 1;
    while (count < shown_still_.size() && shown_still_[shown_still_.size() - 1 - count] == std::pair(id, last - count)) ++count;
    Pointer(arena).unmap(arena.region(id).view, last + 1 - count, count);
    shown_still_.resize(shown_still_.size() - count);
  }
}

bool Executor::undecided() const {
  refuse_fork(arena_->fork_generation_);
  return arena_->undecided_;
}

}  // namespace remap
