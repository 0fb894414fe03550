#include "remap/executor.h"

#include <algorithm>
#include <utility>

#include "core/thread.h"
#include "pointing.h"
#include "remap/fork.h"

namespace remap {
namespace {

Error::Value number(std::uint64_t value) { return static_cast<std::int64_t>(value); }

[[noreturn]] void refuse(const std::string& what, Error::Fields fields) {
  throw Error(ErrorKind::invalid_argument, what + ". Nothing changed; make the plan from a fresh snapshot.", std::move(fields));
}

}  // namespace

Executor::Executor(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {
  if (!arena_) throw Error(ErrorKind::invalid_argument, "An executor needs an arena. Nothing was created.");
  refuse_fork(arena_->fork_generation_);
  // Now: a commit that could not start it would have to be taken back, and at exit nobody should start threads.
  worker_ = start_thread("remap-point", [this] { work(); });
}

Executor::~Executor() { end(); }

// ---- a plan, whole or not at all --------------------------------------------------------------------------------

// Everything that can be known without the backend is refused here, so that apply() can fail later only by the backend.
// Steps may build on each other (a page may move twice), hence the overlay of owners.
// Says whether a step may unmap something, or change at once what an address shows.
bool Executor::validate(const Plan& plan) {
  const Arena& arena = *arena_;
  const bool strict = arena.options_.mode == Mode::strict;
  bool unmaps = false;
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
      if (move.from == Owner::quarantine || move.to == Owner::quarantine) {
        refuse("Quarantined pages take part in no plan", {});
      }
      const TenantId before = move.from == Owner::free ? kNobody : move.tenant;
      const TenantId after = move.to == Owner::free ? kNobody : move.tenant;
      for (PageId id : move.pages) {
        if (id >= arena.pages_.size()) refuse("Unknown page " + std::to_string(id), {{"page", number(id)}});
        const auto [owner, tenant] = owner_of(id);
        if (owner != move.from || tenant != before) {
          refuse("Page " + std::to_string(id) + " belongs to " + owner_name(owner) + ", the plan expects " +
                     owner_name(move.from),
                 {{"page", number(id)}, {"tenant", number(tenant)}});
        }
        refuse_mixing(id, after, move.to);
        moved_[id] = {validation_, after, move.to};
      }
      if (strict && !move.pages.empty()) {
        unmaps = unmaps || move.from == Owner::kv || move.from == Owner::ring;
        refuse_registered(move);
      }
      continue;
    }
    const Point& point = step.point;
    const Region& region = arena.region(point.region);
    if (region.kind == RegionKind::kv || point.first_slot > region.view.shown.size() ||
        point.pages.size() > region.view.shown.size() - point.first_slot ||
        (region.kind == RegionKind::layer && point.pages.size() != region.view.shown.size())) {
      refuse("Region " + std::to_string(point.region) + " cannot be pointed like that", {{"region", number(point.region)}});
    }
    for (PageId id : point.pages) {
      if (id != kNoPage && id >= arena.pages_.size()) refuse("Unknown page " + std::to_string(id), {{"page", number(id)}});
      if (id == kNoPage && region.kind == RegionKind::layer) refuse("A layer's region never has holes", {});
    }
    const std::vector<PageId>& shows = region.kind == RegionKind::layer ? region.target : region.view.shown;
    const auto first = shows.begin() + static_cast<std::ptrdiff_t>(point.first_slot);
    const auto last = first + static_cast<std::ptrdiff_t>(point.pages.size());
    if (std::equal(first, last, point.pages.begin())) continue;
    arena.refuse_registered(point.region);
    const bool later = point.deferred && !strict && region.kind == RegionKind::layer;
    unmaps = unmaps || (!later && std::any_of(first, last, [](PageId id) { return id != kNoPage; }));
  }
  return unmaps;
}

// Promise 6. A page comes to a tenant as KV, where it is zeroed; and by way of `free`, in a plan that was committed: what a
// plan zeroes must be nobody's any more when it begins, so that undoing it takes no bytes from anybody.
void Executor::refuse_mixing(PageId id, TenantId after, Owner to) const {
  if (after == kNobody) return;
  const Page& page = arena_->pages_[id];
  if (page.tenant != kNobody && page.tenant != after) {
    refuse("Page " + std::to_string(id) + " cannot go from tenant " + std::to_string(page.tenant) + " to tenant " +
               std::to_string(after) + " in one plan, which could not be undone; free it in a plan of its own",
           {{"page", number(id)}, {"tenant", number(page.tenant)}});
  }
  if (to != Owner::kv && arena_->is_unclean(id, after)) {
    refuse("Page " + std::to_string(id) + " may hold another tenant's bytes: it can become KV of tenant " +
               std::to_string(after) + ", which zeroes it, but not " + owner_name(to),
           {{"page", number(id)}, {"tenant", number(after)}});
  }
}

// strict: owners decide what the tenant's KV region shows, and its ring's view lets go of what is no longer ring.
void Executor::refuse_registered(const SetOwner& move) const {
  const Arena& arena = *arena_;
  if (arena.registered_.empty()) return;
  const bool kv = (move.from == Owner::kv) != (move.to == Owner::kv);
  for (RegionId id = 0; id < arena.regions_.size(); ++id) {
    const Region& region = arena.regions_[id];
    if (!region.live || region.tenant != move.tenant) continue;
    const bool changes = (region.kind == RegionKind::kv && kv) || (region.kind == RegionKind::ring && move.from == Owner::ring);
    if (changes) arena.refuse_registered(id);
  }
}

// Pre: the arena's lock is held. What validate() says; throws if the plan cannot be applied now.
bool Executor::admit(const Plan& plan) {
  Arena& arena = *arena_;
  arena.guard();
  if (arena.undecided_) {
    throw Error(ErrorKind::invalid_state, "A plan is applied and not yet committed or rolled back. Nothing changed.");
  }
  if (plan.epoch != arena.epoch_) {
    throw Error(ErrorKind::stale_plan,
                "The plan was made for epoch " + std::to_string(plan.epoch) + ", the arena is at " +
                    std::to_string(arena.epoch_) + ". No call was made; make the plan again from a fresh snapshot.",
                {{"plan_epoch", number(plan.epoch)}, {"arena_epoch", number(arena.epoch_)}});
  }
  return validate(plan);
}

Applied Executor::apply(const Plan& plan, const Ordering& ordering) {
  Arena& arena = *arena_;
  refuse_fork(arena.fork_generation_);
  std::unique_lock<std::mutex> lock(arena.mutex_);
  if (admit(plan) && ordering.after != 0) {
    // Unmapping waits for nobody, so this thread does, before it begins. Not with the lock: others look at the tables, maybe
    // holding what the device needs to come to this event.
    lock.unlock();
    arena.backend_->synchronize(ordering.after, std::chrono::nanoseconds::max());
    lock.lock();
    admit(plan);
  }
  Applied applied;
  undo_.clear();
  deferred_.clear();
  unclean_.clear();
  undo_.reserve(plan.steps.size() * 2);
  deferred_.reserve(plan.steps.size());
  try {
    for (const Step& step : plan.steps) {
      if (step.kind == Step::Kind::set_owner) {
        set_owner(step.set_owner, applied);
      } else {
        point(step.point, applied);
      }
    }
    zero(plan, ordering, applied);
  } catch (...) {
    undo_all();
    throw;
  }
  arena.undecided_ = true;
  applied.epoch = arena.epoch_ + 1;
  return applied;
}

void Executor::set_owner(const SetOwner& step, Applied& applied) {
  Arena& arena = *arena_;
  const TenantId after = step.to == Owner::free ? kNobody : step.tenant;
  const bool strict = arena.options_.mode == Mode::strict;
  const bool gains = step.to == Owner::kv && step.from != Owner::kv;
  const bool loses = step.from == Owner::kv && step.to != Owner::kv;
  Region* kv = nullptr;
  RegionId kv_id = 0;
  if (gains || loses) {
    for (RegionId id = 0; id < arena.regions_.size(); ++id) {
      Region& region = arena.regions_[id];
      if (!region.live || region.kind != RegionKind::kv || region.tenant != step.tenant) continue;
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
      arena.unmap_slots(kv->view, slot, 1);
      undo_.push_back({[&arena, kv, slot, id] { arena.map_slots(kv->view, slot, {id}); }, {id}});
    }
  }
  if (gains) {
    // Contiguous slots are mapped as one run: one set_access for all of them.
    std::size_t i = 0;
    while (i < step.pages.size()) {
      std::size_t end = i + 1;
      const std::size_t first = kv->slot_of[step.pages[i]];
      while (end < step.pages.size() && kv->slot_of[step.pages[end]] == first + (end - i)) ++end;
      if (strict) {
        const std::vector<PageId> run(step.pages.begin() + static_cast<std::ptrdiff_t>(i),
                                      step.pages.begin() + static_cast<std::ptrdiff_t>(end));
        arena.map_slots(kv->view, first, run);
        undo_.push_back({[&arena, kv, first, run] { arena.unmap_slots(kv->view, first, run.size()); }, run});
      }
      i = end;
    }
  }
  if (strict && step.from == Owner::ring) {
    // The ring's own view lets go of them; a later Point of this plan shows what replaces them.
    for (Region& ring : arena.regions_) {
      if (!ring.live || ring.kind != RegionKind::ring || ring.tenant != step.tenant) continue;
      for (std::size_t slot = 0; slot < ring.view.shown.size(); ++slot) {
        const PageId id = ring.view.shown[slot];
        if (id == kNoPage || std::find(step.pages.begin(), step.pages.end(), id) == step.pages.end()) continue;
        arena.unmap_slots(ring.view, slot, 1);
        undo_.push_back({[&arena, &ring, slot, id] { arena.map_slots(ring.view, slot, {id}); }, {id}});
      }
    }
  }
  std::vector<std::pair<PageId, std::pair<Owner, TenantId>>> before;
  before.reserve(step.pages.size());
  for (PageId id : step.pages) {
    Page& page = arena.pages_[id];
    before.emplace_back(id, std::make_pair(page.owner, page.tenant));
    page.owner = step.to;
    page.tenant = after;
    if (after == kNobody) continue;
    if (page.dirty == kNobody) page.dirty = after;  // from now on it may write there; marked for nothing if undone
    if (gains && page.dirty != after) unclean_.push_back({kv_id, arena.slot_address(kv->view, kv->slot_of[id]), id, after});
  }
  applied.pages_moved += step.pages.size();
  undo_.push_back({[&arena, before = std::move(before)] {
                     for (const auto& [id, was] : before) {
                       arena.pages_[id].owner = was.first;
                       arena.pages_[id].tenant = was.second;
                     }
                   },
                   step.pages});
}

// The last thing of a plan: nothing can fail behind it but itself. The pages were nobody's when the plan began (validate), so
// what it zeroes before it fails, or before a rollback, is missed by nobody; they go back to `free` marked as before or as
// unknown (cleansing.cpp) and are zeroed again for whoever comes next.
void Executor::zero(const Plan& plan, const Ordering& ordering, Applied& applied) {
  Arena& arena = *arena_;
  const bool frees = std::any_of(plan.steps.begin(), plan.steps.end(), [](const Step& step) {
    return step.kind == Step::Kind::set_owner && step.set_owner.to == Owner::free && !step.set_owner.pages.empty();
  });
  if (frees && ordering.after != 0) arena.gather(ordering.after);
  // A page may have moved on by a later step, or have been gained twice.
  const auto moved_on = [&](const Unclean& each) {
    return arena.pages_[each.page].owner != Owner::kv || arena.pages_[each.page].tenant != each.tenant;
  };
  unclean_.erase(std::remove_if(unclean_.begin(), unclean_.end(), moved_on), unclean_.end());
  std::sort(unclean_.begin(), unclean_.end(), [](const Unclean& a, const Unclean& b) { return a.at < b.at; });
  const auto same = [](const Unclean& a, const Unclean& b) { return a.at == b.at; };
  unclean_.erase(std::unique(unclean_.begin(), unclean_.end(), same), unclean_.end());
  if (ordering.zero_on == 0 || arena.options_.mode == Mode::strict) {
    applied.zeroed_bytes = arena.cleanse(unclean_, ordering.after);
    return;
  }
  std::vector<PageId> ids;
  for (const Unclean& each : unclean_) ids.push_back(each.page);
  const auto enqueued = std::make_shared<std::vector<PageId>>();
  undo_.push_back({[&arena, enqueued, stream = ordering.zero_on] { arena.undo_fills(stream, *enqueued); }, std::move(ids)});
  applied.zeroed_bytes = arena.cleanse_on(unclean_, ordering, *enqueued);
}

void Executor::point(const Point& step, Applied& applied) {
  Arena& arena = *arena_;
  Region& region = arena.regions_[step.region];
  if (region.kind == RegionKind::ring) {
    const auto begin = region.view.shown.begin() + static_cast<std::ptrdiff_t>(step.first_slot);
    const std::vector<PageId> before(begin, begin + static_cast<std::ptrdiff_t>(step.pages.size()));
    if (before == step.pages) return;
    Pointer(arena).slots(region.view, step.first_slot, step.pages);
    ++applied.points_done;
    undo_.push_back({[&arena, &region, first = step.first_slot, before] { Pointer(arena).slots(region.view, first, before); },
                     step.pages});
    return;
  }
  const std::vector<PageId> before = region.target;
  const bool was_pending = region.pending;
  if (step.deferred && arena.options_.mode == Mode::aliased) {
    deferred_.push_back(step);
    region.target = step.pages;
    region.pending = true;
    ++applied.points_deferred;
    undo_.push_back({[&arena, &region, before, was_pending] {
                       // The worker may have come to an earlier plan's step since, and done it with this plan's target: it
                       // will not come again.
                       const bool done = was_pending && !region.pending;
                       if (done) Pointer(arena).layer(region, before);
                       region.target = before;
                       region.pending = was_pending && !done;
                     },
                     step.pages});
    return;
  }
  Pointer(arena).layer(region, step.pages);
  region.target = step.pages;
  region.pending = false;
  ++applied.points_done;
  undo_.push_back({[&arena, &region, before, was_pending] {
                     Pointer(arena).layer(region, before);
                     region.target = before;
                     region.pending = was_pending;
                   },
                   step.pages});
}

void Executor::undo_all() {
  Arena& arena = *arena_;
  // All of it is tried, even behind a failure: every page that can be saved is. The first failure makes the arena broken.
  std::string failure;
  std::vector<PageId> stuck;
  if (arena.broken_) undo_.clear();  // a step could not even undo itself: nobody knows what it would be undone onto
  for (auto entry = undo_.rbegin(); entry != undo_.rend(); ++entry) {
    try {
      entry->action();
    } catch (const Error& error) {
      if (failure.empty()) failure = error.what();
      stuck.insert(stuck.end(), entry->pages.begin(), entry->pages.end());
    }
  }
  undo_.clear();
  deferred_.clear();
  if (!failure.empty()) arena.fail_broken("Undoing a plan failed: " + failure, stuck);
}

void Executor::rollback() {
  refuse_fork(arena_->fork_generation_);
  std::lock_guard<std::mutex> lock(arena_->mutex_);
  if (!arena_->undecided_) throw Error(ErrorKind::invalid_state, "No applied plan waits for a decision. Nothing changed.");
  arena_->undecided_ = false;
  undo_all();
}

bool Executor::undecided() const {
  refuse_fork(arena_->fork_generation_);
  std::lock_guard<std::mutex> lock(arena_->mutex_);
  return arena_->undecided_;
}

}  // namespace remap
