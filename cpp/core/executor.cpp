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

bool of_nobody(Owner owner) noexcept { return owner == Owner::free || owner == Owner::outside; }

[[noreturn]] void refuse(const std::string& what, Error::Fields fields) {
  throw Error(ErrorKind::invalid_argument, what + ". Nothing changed; make the plan from a fresh snapshot.", std::move(fields));
}

}  // namespace

Executor::Executor(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {
  if (!arena_) throw Error(ErrorKind::invalid_argument, "An executor needs an arena. Nothing was created.");
  refuse_fork(arena_->fork_generation_);
  // Now: a commit that could not start it would have to be taken back, and at exit no code should start threads.
  worker_ = start_thread("remap-point", [this] { work(); });
}

Executor::~Executor() { end(); }

// ---- a plan, whole or not at all --------------------------------------------------------------------------------

// Everything that can be known without the backend is refused here, so that apply() can fail later only by the backend.
// Steps may build on each other (a page may move twice), hence the overlay of owners.
Executor::Needs Executor::validate(const Plan& plan) {
  const Arena& arena = *arena_;
  const bool strict = arena.options_.mode == Mode::strict;
  Needs needs;
  bool passes = false;
  // Not a hash table: growth is on the engine's critical path, and a layer may have 10^4 pages.
  moved_.resize(arena.pages_.size());
  ++validation_;
  const auto owner_of = [&](PageId id) {
    const Moved& moved = moved_[id];
    return moved.validation == validation_ ? std::make_pair(moved.owner, moved.tenant)
                                           : std::make_pair(arena.pages_[id].owner, arena.pages_[id].tenant);
  };
  for (const Step& step : plan.steps) {
    if (step.kind == Step::Kind::set_owner) {
      const SetOwner& move = step.set_owner;
      const bool outside = move.from == Owner::outside || move.to == Owner::outside;
      if (!outside) Arena::require_tenant(move.tenant);
      if (move.from >= Owner::quarantine || move.to >= Owner::quarantine) {
        refuse("Pages go between free, params, kv, ring and outside", {});
      }
      if (outside && (move.tenant != kNobody || (move.from != Owner::free && move.to != Owner::free))) {
        refuse("Pages go outside from free, of no tenant, and come in as free", {{"tenant", number(move.tenant)}});
      }
      needs.leaves = needs.leaves || move.to == Owner::outside;
      passes = passes || outside;
      const TenantId before = of_nobody(move.from) ? kNobody : move.tenant;
      const TenantId after = of_nobody(move.to) ? kNobody : move.tenant;
      for (PageId id : move.pages) {
        if (id >= arena.pages_.size()) refuse("Unknown page " + std::to_string(id), {{"page", number(id)}});
        const auto [owner, tenant] = owner_of(id);
        if (owner != move.from || tenant != before) {
          refuse("Page " + std::to_string(id) + " belongs to " + owner_name(owner) + ", the plan expects " +
                     owner_name(move.from),
                 {{"page", number(id)}, {"tenant", number(tenant)}});
        }
        const Page& page = arena.pages_[id];
        if (page.fixed) refuse("Page " + std::to_string(id) + " stands in fixed slots", {{"page", number(id)}});
        const bool dirty = page.dirty != kNobody && page.dirty != after && page.due != after && move.to != Owner::kv;
        // A page that is no KV of its new tenant's is zeroed behind the change, where it stands in that tenant's KV region.
        const bool zeroed_later = dirty && of_nobody(move.from) && has_place(id, after);
        if (after != kNobody && ((dirty && !zeroed_later) || (page.tenant != kNobody && page.tenant != after))) refuse_mixing(id, after);
        moved_[id] = {validation_, after, move.to};
      }
      if (strict && !outside && !move.pages.empty()) {
        needs.points = true;
        needs.unmaps = needs.unmaps || move.from == Owner::kv || move.from == Owner::ring;
        refuse_registered(move);
      }
      continue;
    }
    if (step.kind == Step::Kind::set_home) continue;  // require_homes()
    const Point& point = step.point;
    const Region& region = arena.region(point.region);
    if (region.kind == RegionKind::kv || point.first_slot > region.view.shown.size() ||
        point.pages.size() > region.view.shown.size() - point.first_slot ||
        (region.kind == RegionKind::layer && point.pages.size() != region.view.shown.size())) {
      refuse("Region " + std::to_string(point.region) + " cannot be pointed like that", {{"region", number(point.region)}});
    }
    for (PageId id : point.pages) {
      if (id != kNoPage && id >= arena.pages_.size()) refuse("Unknown page " + std::to_string(id), {{"page", number(id)}});
      if (id == kNoPage && region.kind == RegionKind::layer && !elsewhere(point.pages)) {
        refuse("A layer's region has no holes, unless it is empty", {});
      }
    }
    const std::vector<PageId>& shows = region.kind == RegionKind::layer ? region.target : region.view.shown;
    const auto first = shows.begin() + static_cast<std::ptrdiff_t>(point.first_slot);
    const auto last = first + static_cast<std::ptrdiff_t>(point.pages.size());
    if (std::equal(first, last, point.pages.begin())) continue;
    arena.refuse_registered(point.region);
    const bool later = point.deferred && !strict && region.kind == RegionKind::layer;
    if (later) continue;
    needs.points = true;
    needs.unmaps = needs.unmaps || std::any_of(first, last, [](PageId id) { return id != kNoPage; });
  }
  // Else undoing it, or its zeroes, could leave work in flight on pages that another process has by then.
  const auto passing = [](const Step& step) {
    return step.kind == Step::Kind::set_owner && (step.set_owner.from == Owner::outside || step.set_owner.to == Owner::outside);
  };
  if (passes && !std::all_of(plan.steps.begin(), plan.steps.end(), passing)) {
    refuse("Pages go outside and come in by plans of their own, with no other step", {});
  }
  require_homes(plan);
  require_backed(plan);
  return needs;
}

// A13 of arena.h, and that a region is empty while its home changes. Part of validate().
void Executor::require_homes(const Plan& plan) const {
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
    if (!pages.empty() && !elsewhere(region.target)) refuse_home("it is not empty");
    for (PageId page : pages) {
      if (page >= arena.pages_.size()) refuse("Unknown page " + std::to_string(page), {{"page", number(page)}});
      if (arena.pages_[page].fixed) refuse_home("a page of it stands in fixed slots");
      if (!claimed.emplace(page, id).second) refuse_home("a page is named twice");
    }
  }
  if (homes.empty()) return;
  for (const auto& [page, id] : claimed) {
    const RegionId before = arena.pages_[page].home;
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
    const std::vector<PageId>& shows = found == pointed.end() ? arena.region(id).target : *found->second;
    if (!pages->empty() || elsewhere(shows)) continue;
    refuse("Region " + std::to_string(id) + " would lose its home, and is not empty", {{"region", number(id)}});
  }
}

// The pages that layers and (strict) rings show after the plan have the right owner then: A6 and A7 of arena.h. Part of
// validate().
void Executor::require_backed(const Plan& plan) const {
  const Arena& arena = *arena_;
  const bool strict = arena.options_.mode == Mode::strict;
  std::map<RegionId, const std::vector<PageId>*> pointed;  // layers, which are pointed as a whole: at what, in the end
  // All other layers show what they showed, of the same owners: growth costs nothing for them.
  std::set<RegionId> concerned;  // those, layers whose home loses pages, and all of a tenant whose ring does
  std::map<RegionId, const std::vector<PageId>*> homes;  // those that the plan sets
  for (const Step& step : plan.steps) {
    const SetOwner& move = step.set_owner;
    if (step.kind == Step::Kind::set_home) {
      homes[step.set_home.region] = &step.set_home.pages;
    } else if (step.kind == Step::Kind::point) {
      if (arena.region(step.point.region).kind != RegionKind::layer) continue;
      pointed[step.point.region] = &step.point.pages;
      concerned.insert(step.point.region);
    } else if (move.from == Owner::params) {
      RegionId last = kNoRegion;
      for (PageId page : move.pages) {
        const RegionId home = arena.pages_[page].home;
        if (home != last && home != kNoRegion) concerned.insert(home);
        last = home;
      }
    } else if (move.from == Owner::ring) {
      for (const auto& [id, region] : arena.regions_) {
        if (region.kind == RegionKind::layer && region.tenant == move.tenant) concerned.insert(id);
      }
    }
  }
  const auto refuse_region = [&](RegionId id, const Region& region) {
    refuse("Region " + std::to_string(id) + " would show pages that are not its own home nor its tenant's ring",
           {{"region", number(id)}, {"tenant", number(region.tenant)}});
  };
  const auto owned = [&](PageId id, Owner owner, TenantId tenant) {
    const Moved& moved = moved_[id];
    const Page& page = arena.pages_[id];
    return moved.validation == validation_ ? moved.owner == owner && moved.tenant == tenant
                                           : page.owner == owner && page.tenant == tenant;
  };
  for (const RegionId id : concerned) {
    const Region& region = arena.region(id);
    const auto found = pointed.find(id);
    const std::vector<PageId>& pages = found == pointed.end() ? region.target : *found->second;
    if (elsewhere(pages)) continue;
    const auto set = homes.find(id);
    auto page = pages.begin();
    for (auto home = (set == homes.end() ? region.home : *set->second).begin(); page != pages.end(); ++page, ++home) {
      if (*page != *home || !owned(*page, Owner::params, region.tenant)) break;
    }
    if (!std::all_of(page, pages.end(), [&](PageId each) { return owned(each, Owner::ring, region.tenant); })) {
      refuse_region(id, region);
    }
  }
  if (!strict) return;
  for (const Step& step : plan.steps) {
    if (step.kind != Step::Kind::point) continue;
    const Region& region = arena.region(step.point.region);
    if (region.kind != RegionKind::ring) continue;
    for (PageId page : step.point.pages) {
      if (page != kNoPage && !owned(page, Owner::ring, region.tenant)) refuse_region(step.point.region, region);
    }
  }
}

bool Executor::has_place(PageId id, TenantId tenant) const {
  const Region* kv = arena_->kv_region_of(tenant);
  return kv != nullptr && kv->slot_of[id] != kNoSlot;
}

// Promise 6. A page comes to a tenant by way of `free`, and zeroed, or it is to be: at once if it was no tenant's when the change
// began, since undoing that takes no bytes from a tenant; otherwise behind the decision.
void Executor::refuse_mixing(PageId id, TenantId after) const {
  const Page& page = arena_->pages_[id];
  if (page.tenant != kNobody && page.tenant != after) {
    refuse("Page " + std::to_string(id) + " cannot go from tenant " + std::to_string(page.tenant) + " to tenant " +
               std::to_string(after) + " in one plan; free it in a plan of its own",
           {{"page", number(id)}, {"tenant", number(page.tenant)}});
  }
  refuse("Page " + std::to_string(id) + " may hold another tenant's bytes, and has no place in the KV region of tenant " +
             std::to_string(after) + ", where it would be zeroed",
         {{"page", number(id)}, {"tenant", number(after)}});
}

// strict: owners decide what the tenant's KV region shows, and its ring's view lets go of what is no longer ring.
void Executor::refuse_registered(const SetOwner& move) const {
  const Arena& arena = *arena_;
  if (arena.registered_.empty()) return;
  const bool kv = (move.from == Owner::kv) != (move.to == Owner::kv);
  for (const auto& [id, region] : arena.regions_) {
    if (region.tenant != move.tenant) continue;
    const bool changes = (region.kind == RegionKind::kv && kv) || (region.kind == RegionKind::ring && move.from == Owner::ring);
    if (changes) arena.refuse_registered(id);
  }
}

// Pre: the lock of the arena's tables is held. Does the checks of validate(); throws if the plan cannot be applied now.
Executor::Needs Executor::admit(const Plan& plan, Part part) {
  Arena& arena = *arena_;
  arena.guard();
  if (arena.undecided_ && part == Part::first) {
    throw Error(ErrorKind::invalid_state, "A plan is applied and not yet committed or rolled back. Nothing changed.");
  }
  if (part == Part::further && (!arena.undecided_ || zeroing_)) {
    throw Error(ErrorKind::invalid_state, zeroing_ && arena.undecided_ ? "The change's pages are being zeroed: it takes no more plans. "
                                                                         "Nothing changed; commit it."
                                                                       : "No change has begun that could go on. Nothing changed.");
  }
  if (plan.epoch != arena.epoch_) {
    throw Error(ErrorKind::stale_plan,
                "The plan was made for epoch " + std::to_string(plan.epoch) + ", the arena is at " +
                    std::to_string(arena.epoch_.load()) + ". No call was made; make the plan again from a fresh snapshot.",
                {{"plan_epoch", number(plan.epoch)}, {"arena_epoch", number(arena.epoch_)}});
  }
  return validate(plan);
}

Applied Executor::apply(const Plan& plan, const Ordering& ordering) { return apply(plan, ordering, Part::first); }

Applied Executor::extend(const Plan& plan, const Ordering& ordering) { return apply(plan, ordering, Part::further); }

Applied Executor::apply(const Plan& plan, const Ordering& ordering, Part part) {
  Arena& arena = *arena_;
  refuse_fork(arena.fork_generation_);
  std::unique_lock<std::mutex> pointing(arena.pointing_mutex_, std::defer_lock);
  std::unique_lock<std::mutex> tables(arena.mutex_);
  const Needs needs = admit(plan, part);
  if (needs.leaves) {
    // Another process knows nothing of this one's streams: before it may have a page, whatever was enqueued for it has been done. The
    // arena's own stream is behind all who ever freed a page, and behind the zeroes that an undone plan has left.
    const EventHandle freed = arena.gathered_ ? arena.fill_event_ : 0;
    tables.unlock();
    for (const EventHandle event : {freed, ordering.after}) {
      if (event != 0) arena.backend_->synchronize(event, std::chrono::nanoseconds::max());
    }
    tables.lock();
    admit(plan, part);  // things may have changed meanwhile
  }
  if (needs.points) {
    // Unmapping does not wait, so this thread does, before it begins. Not with the tables: others look at them, maybe holding
    // what the device needs to come to this event. Nor is the worker waited for with them.
    tables.unlock();
    if (needs.unmaps && ordering.after != 0) {
      arena.backend_->synchronize(ordering.after, std::chrono::nanoseconds::max());
    }
    pointing.lock();
    tables.lock();
    admit(plan, part);  // another plan may have been faster
  }
  Applied applied;
  dirty_.clear();
  to_put_off_.clear();
  if (part == Part::first) {
    undo_.clear();
    deferred_.clear();
    left_to_later_.clear();
    due_.clear();
    arena.undecided_of_.clear();
    zeroing_ = false;
    ++change_;
  }
  const std::size_t before = undo_.size();
  undo_.reserve(before + plan.steps.size() * 2);
  deferred_.reserve(deferred_.size() + plan.steps.size());
  left_to_later_.reserve(left_to_later_.size() + plan.steps.size());
  for (const Step& step : plan.steps) {
    const bool moves = step.kind == Step::Kind::set_owner;
    const RegionId concerned = step.kind == Step::Kind::point ? step.point.region : step.set_home.region;
    arena.undecided_of_.push_back(moves ? step.set_owner.tenant : arena.region(concerned).tenant);
  }
  try {
    for (const Step& step : plan.steps) {
      if (step.kind == Step::Kind::set_owner) {
        set_owner(step.set_owner, applied);
      } else if (step.kind == Step::Kind::set_home) {
        set_home(step.set_home);
      } else {
        point(step.point, applied);
      }
    }
    zero(plan, ordering, applied);
  } catch (...) {
    undo_to(before);
    throw;
  }
  arena.undecided_ = true;
  applied.epoch = arena.epoch_ + 1;
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

void Executor::set_owner(const SetOwner& step, Applied& applied) {
  Arena& arena = *arena_;
  const TenantId after = of_nobody(step.to) ? kNobody : step.tenant;
  if (of_nobody(step.from) && of_nobody(step.to)) {
    pass_on(step, applied);
    return;
  }
  const bool strict = arena.options_.mode == Mode::strict;
  const bool gains = step.to == Owner::kv && step.from != Owner::kv;
  const bool loses = step.from == Owner::kv && step.to != Owner::kv;
  Region* kv = nullptr;
  RegionId kv_id = 0;
  if (gains || loses) {
    for (auto& [id, region] : arena.regions_) {
      if (region.kind != RegionKind::kv || region.tenant != step.tenant) continue;
      kv = &region;
      kv_id = id;
    }
    if (kv == nullptr) refuse("Tenant " + std::to_string(step.tenant) + " has no KV region", {{"tenant", number(step.tenant)}});
    for (PageId id : step.pages) {
      if (kv->slot_of[id] == kNoSlot) {
        refuse("Page " + std::to_string(id) + " has no place in the KV region", {{"page", number(id)}});
      }
    }
  }
  if (strict && loses) {
    for (PageId id : step.pages) {
      const std::size_t slot = kv->slot_of[id];
      change([&arena, kv, slot](const auto& page) { Pointer(arena).map(kv->view, slot, page); }, {id},
             [&] { Pointer(arena).unmap(kv->view, slot, 1); });
    }
  }
  if (strict && gains) {
    // Contiguous slots are mapped as one run: one set_access for all of them.
    std::size_t i = 0;
    while (i < step.pages.size()) {
      std::size_t end = i + 1;
      const std::size_t first = kv->slot_of[step.pages[i]];
      while (end < step.pages.size() && kv->slot_of[step.pages[end]] == first + (end - i)) ++end;
      const std::vector<PageId> run(step.pages.begin() + static_cast<std::ptrdiff_t>(i),
                                    step.pages.begin() + static_cast<std::ptrdiff_t>(end));
      change([&arena, kv, first](const auto& pages) { Pointer(arena).unmap(kv->view, first, pages.size()); }, run,
             [&] { Pointer(arena).map(kv->view, first, run); });
      i = end;
    }
  }
  if (strict && step.from == Owner::ring) {
    // The ring's own view lets go of them; a later Point of this plan shows what replaces them.
    for (auto& [ring_id, ring] : arena.regions_) {
      if (ring.kind != RegionKind::ring || ring.tenant != step.tenant) continue;
      for (std::size_t slot = 0; slot < ring.view.shown.size(); ++slot) {
        const PageId id = ring.view.shown[slot];
        if (id == kNoPage || std::find(step.pages.begin(), step.pages.end(), id) == step.pages.end()) continue;
        View& view = ring.view;
        change([&arena, &view, slot](const auto& page) { Pointer(arena).map(view, slot, page); }, {id},
               [&] { Pointer(arena).unmap(view, slot, 1); });
      }
    }
  }
  const bool comes_home = after != kNobody && !gains && of_nobody(step.from);
  if (comes_home) {
    const Region* its = arena.kv_region_of(after);
    for (PageId id : step.pages) {
      if (arena.is_dirty(id, after)) to_put_off_.push_back({0, arena.slot_address(its->view, its->slot_of[id]), id, after});
    }
  }
  if (gains) dirty_.reserve(dirty_.size() + step.pages.size());
  // What is due comes first, so that it is undone last: only where a page that is due is given up again.
  if (after == kNobody && !due_.empty()) forget_due(step.pages);
  // validate() has seen that all of them belong to `from`, and to its tenant.
  const auto back = [&arena, owner = step.from, before = step.from == Owner::free ? kNobody : step.tenant](const auto& pages) {
    for (PageId id : pages) {
      arena.pages_[id].owner = owner;
      arena.pages_[id].tenant = before;
    }
  };
  change(back, step.pages, [&] {
    for (PageId id : step.pages) {
      Page& page = arena.pages_[id];
      if (page.change != change_) {
        page.change = change_;
        page.was_owned = page.tenant != kNobody;
      }
      page.owner = step.to;
      page.tenant = after;
      if (after == kNobody) continue;
      if (page.dirty == kNobody) page.dirty = after;  // from now on it may write there; marked for nothing if undone
      if (gains && page.dirty != after) dirty_.push_back({kv_id, arena.slot_address(kv->view, kv->slot_of[id]), id, after});
    }
  });
  applied.pages_moved += step.pages.size();
}

// Pages that are due are given up before they were zeroed: then they are not.
void Executor::forget_due(const std::vector<PageId>& pages) {
  Arena& arena = *arena_;
  std::vector<PageId> due;
  for (PageId id : pages) {
    if (arena.pages_[id].due != kNobody) due.push_back(id);
  }
  if (due.empty()) return;
  const TenantId tenant = arena.pages_[due.front()].due;  // theirs, who gives them up: one step, one tenant
  change([&arena, tenant, due](const auto&) { for (PageId id : due) arena.pages_[id].due = tenant; }, {},
         [&] { for (PageId id : due) arena.pages_[id].due = kNobody; });
}

// Between this process's free pages and the others'. A page that comes in may hold any process's bytes, and one that goes out
// will.
void Executor::pass_on(const SetOwner& step, Applied& applied) {
  Arena& arena = *arena_;
  std::vector<TenantId> dirty;
  dirty.reserve(step.pages.size());
  for (PageId id : step.pages) dirty.push_back(arena.pages_[id].dirty);
  const auto back = [&arena, owner = step.from, dirty = std::move(dirty)](const auto& pages) {
    for (std::size_t i = 0; i < pages.size(); ++i) {
      arena.pages_[pages[i]].owner = owner;
      arena.pages_[pages[i]].dirty = dirty[i];
    }
  };
  change(back, step.pages, [&] {
    for (PageId id : step.pages) {
      arena.pages_[id].owner = step.to;
      arena.pages_[id].dirty = kUnknownBytes;
    }
  });
  applied.pages_moved += step.pages.size();
}

// The last thing of a plan: nothing else of the plan can fail after it. The pages were no tenant's when the change began (validate,
// and those that were are put off), so no tenant misses the bytes that it zeroes before it fails, or before a rollback. Such pages go
// back to `free`, marked as before or as unknown (zeroing.cpp), and are zeroed again for the next tenant.
void Executor::zero(const Plan& plan, const Ordering& ordering, Applied& applied) {
  Arena& arena = *arena_;
  const bool frees = std::any_of(plan.steps.begin(), plan.steps.end(), [](const Step& step) {
    return step.kind == Step::Kind::set_owner && step.set_owner.to == Owner::free && !step.set_owner.pages.empty();
  });
  if (frees && ordering.after != 0) arena.gather(ordering.after);
  // A page may have moved on by a later step, or have been gained twice.
  const auto moved_on = [&](const DirtyPage& each) {
    return arena.pages_[each.page].owner != Owner::kv || arena.pages_[each.page].tenant != each.tenant;
  };
  dirty_.erase(std::remove_if(dirty_.begin(), dirty_.end(), moved_on), dirty_.end());
  std::sort(dirty_.begin(), dirty_.end(), [](const DirtyPage& a, const DirtyPage& b) { return a.at < b.at; });
  const auto same = [](const DirtyPage& a, const DirtyPage& b) { return a.at == b.at; };
  dirty_.erase(std::unique(dirty_.begin(), dirty_.end(), same), dirty_.end());
  put_off(ordering, applied);
  if (ordering.zero_on == 0 || arena.options_.mode == Mode::strict) {
    applied.zeroed_bytes = arena.zero_pages(dirty_, ordering.after);
    return;
  }
  std::vector<PageId> ids;
  for (const DirtyPage& each : dirty_) ids.push_back(each.page);
  const auto enqueued = std::make_shared<std::vector<PageId>>();
  // In front of the fills: some of them may be on their way when one fails.
  const auto back = [&arena, enqueued, stream = ordering.zero_on](const auto&) { arena.undo_fills(stream, *enqueued); };
  change(back, std::move(ids), [] {});
  applied.zeroed_bytes = arena.enqueue_zeroing(dirty_, ordering, *enqueued);
}

// Of the pages to be zeroed, those that were a tenant's before this change, which has them back if the change is undone, and those
// that become no KV, which strict mode maps only when their regions have been pointed.
void Executor::put_off(const Ordering& ordering, Applied& applied) {
  Arena& arena = *arena_;
  const auto later = std::stable_partition(dirty_.begin(), dirty_.end(),
                                           [&](const DirtyPage& each) { return !arena.pages_[each.page].was_owned; });
  to_put_off_.insert(to_put_off_.end(), later, dirty_.end());
  dirty_.erase(later, dirty_.end());
  if (to_put_off_.empty()) return;
  const bool waits = ordering.zero_on == 0 || arena.options_.mode == Mode::strict;
  if (ordering.after != 0) {  // taken in now: by the time of zero_due() it may be recorded anew
    if (waits) {
      arena.gather(ordering.after);
    } else {
      arena.backend_->stream_wait(ordering.zero_on, ordering.after);
    }
  }
  const std::vector<DirtyPage> put = std::move(to_put_off_);
  to_put_off_.clear();
  due_.reserve(due_.size() + put.size());
  const auto back = [this, &arena, put, known = due_.size()](const auto&) {
    due_.resize(known);
    for (const DirtyPage& each : put) arena.pages_[each.page].due = kNobody;
  };
  change(back, {}, [&] {
    for (const DirtyPage& each : put) {
      due_.push_back({each, waits ? 0 : ordering.zero_on});
      arena.pages_[each.page].due = each.tenant;
    }
  });
  for (const DirtyPage& each : put) applied.due.push_back(each.page);
}

// An address at which its tenant has the page mapped. Aliased mode maps it where it stands as KV, whatever it is now; strict mode where
// it is used.
std::byte* Executor::mapped_at(const DirtyPage& page) const {
  const Arena& arena = *arena_;
  if (arena.options_.mode == Mode::aliased) return page.at;
  for (const auto& [id, region] : arena.regions_) {
    if (region.tenant != page.tenant) continue;
    const auto slot = std::find(region.view.shown.begin(), region.view.shown.end(), page.page);
    if (slot != region.view.shown.end()) {
      return arena.slot_address(region.view, static_cast<std::size_t>(slot - region.view.shown.begin()));
    }
  }
  return nullptr;
}

std::size_t Executor::zero_due() {
  refuse_fork(arena_->fork_generation_);
  const std::lock_guard<std::mutex> tables(arena_->mutex_);
  Arena& arena = *arena_;
  arena.guard();
  if (!arena.undecided_ || due_.empty()) return 0;
  std::map<StreamHandle, std::vector<DirtyPage>> pages;  // as they are zeroed: together, ascending
  for (const Due& each : due_) {
    if (arena.pages_[each.page.page].due != each.page.tenant) continue;
    DirtyPage page = each.page;
    page.at = mapped_at(page);
    if (page.at == nullptr) {
      throw Error(ErrorKind::invalid_state,
                  "Page " + std::to_string(page.page) + " is to be zeroed, and no region of its tenant shows it. Nothing changed; extend the "
                  "change by a plan that points one there, or roll it back.",
                  {{"page", number(page.page)}, {"tenant", number(page.tenant)}});
    }
    pages[each.zero_on].push_back(page);
  }
  zeroing_ = true;
  std::size_t bytes = 0;
  for (auto& [stream, some] : pages) {
    std::sort(some.begin(), some.end(), [](const DirtyPage& a, const DirtyPage& b) { return a.at < b.at; });
    std::vector<PageId> enqueued;
    const auto done = [&] {
      for (PageId id : enqueued) arena.pages_[id].due = kNobody;
    };
    try {
      if (stream == 0) {
        bytes += arena.zero_pages(some);
        for (const DirtyPage& each : some) enqueued.push_back(each.page);
      } else {
        bytes += arena.enqueue_zeroing(some, Ordering{0, stream}, enqueued);
      }
    } catch (...) {
      done();
      throw;
    }
    done();
  }
  due_.clear();
  return bytes;
}

void Executor::point(const Point& step, Applied& applied) {
  Arena& arena = *arena_;
  Region& region = arena.region(step.region);
  if (region.kind == RegionKind::ring) {
    const auto begin = region.view.shown.begin() + static_cast<std::ptrdiff_t>(step.first_slot);
    const std::vector<PageId> before(begin, begin + static_cast<std::ptrdiff_t>(step.pages.size()));
    if (before == step.pages) return;
    change([&arena, &region, first = step.first_slot, before](const auto&) { Pointer(arena).slots(region.view, first, before); }, step.pages,
           [&] { Pointer(arena).slots(region.view, step.first_slot, step.pages); });
    ++applied.points_done;
    return;
  }
  const std::vector<PageId>& concerned = elsewhere(step.pages) ? region.home : step.pages;
  std::vector<PageId> target = step.pages;
  if (step.deferred && arena.options_.mode == Mode::aliased) {
    // From here until the plan is decided the worker leaves the region alone.
    const bool looked_at = !elsewhere(step.pages);
    const bool first = std::none_of(deferred_.begin(), deferred_.end(), [&](const Point& each) { return each.region == step.region; });
    const auto back = [this, &region, before = region.target, targets = region.targets, undecided = region.undecided,
                       pending = region.pending, deferred = deferred_.size(), left = left_to_later_.size()](const auto&) {
      deferred_.resize(deferred);
      left_to_later_.resize(left);
      region.target = before;
      region.targets = targets;
      region.undecided = undecided;
      region.pending = pending;
    };
    change(back, concerned, [&] {
      if (looked_at && first) deferred_.push_back(step);  // apply() has made room, here and below
      left_to_later_.push_back(step.region);
      region.target.swap(target);
      region.undecided = true;
      if (!looked_at) return;  // the step of an earlier plan still comes, lets go of the layer, and has nothing to point
      ++region.targets;
      region.pending = true;
    });
    if (looked_at && first) ++applied.points_deferred;
    return;
  }
  // Whether a step is pending stays as it is: the step of an earlier plan still comes, and has nothing to point.
  const auto back = [&arena, &region, before = region.target](const auto&) {
    Pointer(arena).layer(region, before);
    region.target = before;
  };
  change(back, concerned, [&] {
    Pointer(arena).layer(region, step.pages);
    region.target.swap(target);
  });
  ++applied.points_done;
}

// Two regions of one plan may pass a page on in either order of their steps: a page forgets a region only while it is that region's.
void Executor::set_home(const SetHome& step) {
  Arena& arena = *arena_;
  Region& region = arena.region(step.region);
  const std::vector<PageId> next = step.pages.empty() ? std::vector<PageId>(region.home.size(), kNoPage) : step.pages;
  std::vector<RegionId> claims;  // of the pages named, before it
  claims.reserve(step.pages.size());
  for (PageId page : step.pages) claims.push_back(arena.pages_[page].home);
  // Homes of a region have one size: assigning allocates nothing.
  const auto become = [&arena, &region, id = step.region](const std::vector<PageId>& home) {
    for (PageId page : region.home) {
      if (page != kNoPage && arena.pages_[page].home == id) arena.pages_[page].home = kNoRegion;
    }
    region.home = home;
    for (PageId page : home) {
      if (page != kNoPage) arena.pages_[page].home = id;
    }
  };
  const auto back = [&arena, become, before = region.home, pages = step.pages, claims = std::move(claims)](const auto&) {
    become(before);
    for (std::size_t i = 0; i < pages.size(); ++i) arena.pages_[pages[i]].home = claims[i];
  };
  change(back, {}, [&] { become(next); });
}

// Undoes what comes behind the mark, in reverse. Back at the beginning of the change, no plan of it keeps the worker's jobs waiting.
void Executor::undo_to(std::size_t mark) {
  Arena& arena = *arena_;
  // All of it is tried, even behind a failure: every page that can be saved is. The first failure makes the arena broken.
  std::exception_ptr failure;
  if (arena.broken_) undo_.clear();  // a step could not even undo itself: the core does not know what it would be undone onto
  for (std::size_t entry = undo_.size(); entry > mark; --entry) {
    Undo& undo = undo_[entry - 1];
    try {
      undo.action(undo.pages);
      undo.pages.clear();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) {
    arena.broken_ = true;
    for (std::size_t entry = mark; entry < undo_.size(); ++entry) {
      for (PageId id : undo_[entry].pages) {
        if (id != kNoPage) arena.pages_[id].owner = Owner::quarantine;
      }
    }
  }
  undo_.erase(undo_.begin() + static_cast<std::ptrdiff_t>(std::min(mark, undo_.size())), undo_.end());
  if (undo_.empty()) {
    {
      const std::lock_guard<std::mutex> lock(queue_mutex_);
      decided();
    }
    queue_changed_->notify_all();
  }
  if (failure) arena.fail_broken("Undoing a plan failed: ", failure, {});
}

void Executor::refuse_rollback() const {
  if (!arena_->undecided_) throw Error(ErrorKind::invalid_state, "No applied plan waits for a decision. Nothing changed.");
  if (zeroing_) {
    throw Error(ErrorKind::invalid_state,
                "Pages that changed tenant were zeroed: the change cannot be undone any more. Nothing changed; commit it.");
  }
}

void Executor::rollback() {
  refuse_fork(arena_->fork_generation_);
  const Arena::Both locks(*arena_);
  refuse_rollback();
  arena_->undecided_ = false;
  undo_to(0);
}

void Executor::rollback(std::size_t mark) {
  refuse_fork(arena_->fork_generation_);
  const Arena::Both locks(*arena_);
  refuse_rollback();
  if (mark > undo_.size()) {
    throw Error(ErrorKind::invalid_argument,
                "The change has made " + std::to_string(undo_.size()) + " steps, so it cannot go back to " + std::to_string(mark) +
                    ". Nothing changed.",
                {{"mark", number(mark)}, {"steps", number(undo_.size())}});
  }
  undo_to(mark);
}

std::size_t Executor::mark() const {
  refuse_fork(arena_->fork_generation_);
  const std::lock_guard<std::mutex> tables(arena_->mutex_);
  return arena_->undecided_ ? undo_.size() : 0;
}

bool Executor::undecided() const {
  refuse_fork(arena_->fork_generation_);
  return arena_->undecided_;
}

}  // namespace remap
