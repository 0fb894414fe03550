#include "remap/executor.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <utility>

#include "pointing.h"
#include "remap/fork.h"

namespace remap {
namespace {

Error::Value number(std::uint64_t value) { return static_cast<std::int64_t>(value); }

[[noreturn]] void refuse(const std::string& what, Error::Fields fields) {
  throw Error(ErrorKind::invalid_argument, what + ". Nothing changed; make the plan from a fresh snapshot.", std::move(fields));
}

}  // namespace

Executor::Executor(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

Executor::~Executor() { stop(); }

// ---- a plan, whole or not at all --------------------------------------------------------------------------------

// Everything that can be known without the backend is refused here, so that apply() can fail later only by the backend.
// Steps may build on each other (a page may move twice), hence the overlay of owners.
void Executor::validate(const Plan& plan) {
  const Arena& arena = *arena_;
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
        moved_[id] = {validation_, after, move.to};
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
  }
}

Applied Executor::apply(const Plan& plan) {
  Arena& arena = *arena_;
  if (fork_generation() != arena.fork_generation_) {
    throw Error(ErrorKind::forked_process, "A forked child must not touch the arena. Nothing changed; use 'spawn'.");
  }
  std::lock_guard<std::mutex> lock(arena.mutex_);
  arena.guard();
  if (pending_) {
    throw Error(ErrorKind::invalid_state, "A plan is applied and not yet committed or rolled back. Nothing changed.");
  }
  if (plan.epoch != arena.epoch_) {
    throw Error(ErrorKind::stale_plan,
                "The plan was made for epoch " + std::to_string(plan.epoch) + ", the arena is at " +
                    std::to_string(arena.epoch_) + ". No call was made; make the plan again from a fresh snapshot.",
                {{"plan_epoch", number(plan.epoch)}, {"arena_epoch", number(arena.epoch_)}});
  }
  validate(plan);
  Applied applied;
  undo_.clear();
  deferred_.clear();
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
  } catch (...) {
    undo_all();
    throw;
  }
  pending_ = true;
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
  if (gains || loses) {
    for (Region& region : arena.regions_) {
      if (region.live && region.kind == RegionKind::kv && region.tenant == step.tenant) kv = &region;
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
      applied.zeroed_bytes += arena.cleanse(kv->view, first, end - i, step.tenant);
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
    undo_.push_back({[&region, before, was_pending] {
                       region.target = before;
                       region.pending = was_pending;
                     },
                     {}});
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
  std::lock_guard<std::mutex> lock(arena_->mutex_);
  if (!pending_) throw Error(ErrorKind::invalid_state, "No applied plan waits for a decision. Nothing changed.");
  pending_ = false;
  undo_all();
}

void Executor::commit(const std::shared_ptr<PointObserver>& observer, EventHandle after) {
  std::vector<Point> jobs;
  {
    std::lock_guard<std::mutex> lock(arena_->mutex_);
    if (!pending_) throw Error(ErrorKind::invalid_state, "No applied plan waits for a decision. Nothing changed.");
    pending_ = false;
    undo_.clear();
    jobs.swap(deferred_);
    ++arena_->epoch_;
  }
  if (jobs.empty()) return;
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    for (Point& point : jobs) queue_.push_back(Job{std::move(point), observer, after, nullptr});
    if (!worker_.joinable()) {
      // Signals belong to the application's own threads.
      sigset_t all;
      sigset_t before;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      worker_ = std::thread([this] { work(); });
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      pthread_setname_np(worker_.native_handle(), "remap-point");
    }
  }
  queue_changed_->notify_all();
}

// ---- the re-pointing worker -------------------------------------------------------------------------------------

void Executor::run(Job& job) {
  // Whatever is thrown: an exception must not leave the thread (that would end the process); wait(layer) throws it instead.
  job.error = nullptr;
  try {
    if (job.after != 0) arena_->backend_->synchronize(job.after, std::chrono::nanoseconds::max());
  } catch (const std::exception&) {
    job.error = std::current_exception();
  }
  std::lock_guard<std::mutex> lock(arena_->mutex_);
  try {
    if (!job.error) {
      arena_->guard();
      Region& region = arena_->region(job.point.region);
      Pointer(*arena_).layer(region, region.target);
      region.pending = false;
    }
  } catch (const std::exception&) {
    job.error = std::current_exception();
  }
  if (!job.observer) return;
  if (job.error) {
    job.observer->failed(job.point.layer, job.error);
  } else {
    job.observer->released(job.point.layer);
  }
}

void Executor::work() {
  std::unique_lock<std::mutex> lock(queue_mutex_);
  while (true) {
    queue_changed_->wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    Job job = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    run(job);
    lock.lock();
    busy_ = false;
    if (job.error) failed_.push_back(std::move(job));
    queue_changed_->notify_all();
  }
}

void Executor::drain() {
  std::unique_lock<std::mutex> lock(queue_mutex_);
  queue_changed_->wait(lock, [&] { return stopping_ || (queue_.empty() && !busy_); });
}

std::size_t Executor::failed_points() const {
  std::lock_guard<std::mutex> lock(queue_mutex_);
  return failed_.size();
}

void Executor::retry_failed() {
  drain();
  std::vector<Job> jobs;
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    jobs.swap(failed_);
  }
  std::exception_ptr first;
  for (Job& job : jobs) {
    run(job);
    if (!job.error) continue;
    if (!first) first = job.error;
    std::lock_guard<std::mutex> lock(queue_mutex_);
    failed_.push_back(job);
  }
  if (first) std::rethrow_exception(first);
}

void Executor::forget(TenantId tenant) {
  drain();
  std::lock_guard<std::mutex> arena_lock(arena_->mutex_);
  std::lock_guard<std::mutex> lock(queue_mutex_);
  const auto of_tenant = [&](const Job& job) {
    return job.point.region < arena_->regions_.size() && arena_->regions_[job.point.region].tenant == tenant;
  };
  failed_.erase(std::remove_if(failed_.begin(), failed_.end(), of_tenant), failed_.end());
}

void Executor::stop() {
  if (fork_generation() != arena_->fork_generation_) {
    // The thread exists in the parent only: it can be neither joined nor detached here.
    if (worker_.joinable()) new std::thread(std::move(worker_));
    (void)queue_changed_.release();            // the worker may be waiting in it: destroying it would wait for ever
    return;
  }
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    stopping_ = true;
  }
  queue_changed_->notify_all();
  if (worker_.joinable()) worker_.join();
}

}  // namespace remap
