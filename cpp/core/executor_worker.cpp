// SPDX-License-Identifier: Apache-2.0
// The Executor's worker: re-points layers' regions behind an event, off the critical path. The only thread of this library
// that makes driver calls on its own account (released() also makes it enqueue copies): drain() brings it to rest.
#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "pointing.h"
#include "remap/executor.h"
#include "remap/fork.h"

namespace remap {
namespace {

// How long the worker waits for one tenant's event before it looks at another's.
constexpr std::chrono::milliseconds kTurn{1};

// Those that are wanted go from one list behind the other's, in their order.
template <typename List, typename Wanted>
void take(List& from, Wanted&& wanted, List& to) noexcept {
  for (auto job = from.begin(); job != from.end();) {
    const auto next = std::next(job);
    if (wanted(*job)) to.splice(to.end(), from, job);
    job = next;
  }
}

auto of(TenantId tenant) {
  return [tenant](const auto& job) { return job.tenant == tenant; };
}

}  // namespace

void Executor::commit(const std::shared_ptr<PointObserver>& observer, EventHandle after, bool asleep) {
  let_go({after});
  const Share all{kNobody, observer, after, asleep};
  commit_to([&all](TenantId) -> const Share& { return all; });
}

void Executor::commit(const std::vector<Share>& shares) {
  for (auto share = shares.begin(); share != shares.end(); ++share) {
    if (std::any_of(std::next(share), shares.end(), [&](const Share& each) { return each.tenant == share->tenant; })) {
      throw Error(ErrorKind::invalid_argument, "Tenant " + std::to_string(share->tenant) + " has two shares in a commit. Nothing changed.",
                  {{"tenant", static_cast<std::int64_t>(share->tenant)}});
    }
  }
  std::vector<EventHandle> behind;
  for (const Share& each : shares) behind.push_back(each.after);
  let_go(behind);
  commit_to([&shares](TenantId tenant) -> const Share& {
    const auto found = std::find_if(shares.begin(), shares.end(), [&](const Share& each) { return each.tenant == tenant; });
    if (found != shares.end()) return *found;
    throw Error(ErrorKind::invalid_argument,
                "Tenant " + std::to_string(tenant) + " has deferred steps and no share in the commit. The change is applied as before.",
                {{"tenant", static_cast<std::int64_t>(tenant)}});
  });
}

void Executor::commit_to(const std::function<const Share&(TenantId)>& share_of) {
  std::list<Job> gone;  // dropped behind the locks, with what their observers hold
  {
    std::lock_guard<std::mutex> lock(arena_->mutex_);
    Arena& arena = *arena_;
    if (!arena.undecided_) throw Error(ErrorKind::invalid_state, "No change is applied. Nothing changed.");
    // All that can fail comes before the first change.
    std::list<Job> jobs, sleeping;
    std::map<TenantId, std::shared_ptr<Fence>> fences;
    for (const Deferred& point : deferred_) {
      const Region& region = arena.region(point.region);
      const Share& share = share_of(region.tenant);
      std::shared_ptr<Fence>& fence = fences[region.tenant];
      if (!fence) fence = std::make_shared<Fence>(Fence{share.after, nullptr});
      (share.asleep && region.target != region.home ? sleeping : jobs)
          .push_back(Job{point.region, region.targets, point.layer, region.tenant, share.observer, fence, nullptr});
    }
    std::lock_guard<std::mutex> queue_lock(queue_mutex_);
    if (stopping_ && !deferred_.empty()) {
      throw Error(ErrorKind::invalid_state,
                  "The executor is stopped: no worker would re-point what the change deferred. The change is applied as before; close the "
                  "arena.");
    }
    decided();
    if (!deferred_.empty()) {
      const auto past = [&](const Job& job) { return standing(job) == Standing::past; };
      for (std::list<Job>* list : {&queue_, &asleep_, &failed_}) take(*list, past, gone);
    }
    asleep_.splice(asleep_.end(), sleeping);
    queue_.splice(queue_.end(), jobs);
    arena.undecided_ = false;
    deferred_.clear();
    due_.clear();
    ++arena.epoch_;
  }
  queue_changed_->notify_all();
}

// The change is committed. Pre: the lock of the tables and queue_mutex_ are held; the caller tells queue_changed_.
void Executor::decided() noexcept {
  for (const RegionId id : left_to_later_) {
    const auto found = arena_->regions_.find(id);
    if (found != arena_->regions_.end()) found->second.undecided = false;
  }
  left_to_later_.clear();
  queue_.splice(queue_.begin(), parked_);
}

void Executor::wake(TenantId tenant, EventHandle after) {
  refuse_fork(arena_->fork_generation_);
  const auto fence = std::make_shared<Fence>(Fence{after, nullptr});
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    std::list<Job> woken;
    take(asleep_, of(tenant), woken);
    for (Job& job : woken) job.behind = fence;
    queue_.splice(queue_.end(), woken);
  }
  queue_changed_->notify_all();
}

// ---- the re-pointing worker -------------------------------------------------------------------------------------

// Whether the event's result is known. Without any lock: the device may need a long time to come to it, and a thread that
// waits for a lock of ours may hold what it needs for that.
bool Executor::await(Fence& fence, std::chrono::nanoseconds timeout) noexcept {
  if (fence.after == 0 || fence.error) return true;
  try {
    if (!arena_->backend_->synchronize(fence.after, timeout)) return false;
    fence.after = 0;
  } catch (const std::exception&) {
    fence.error = std::current_exception();
  }
  return true;
}

// The tenant's jobs go behind all others', in their order. Pre: queue_mutex_ is held.
void Executor::give_turn(TenantId tenant) noexcept {
  std::list<Job> its;
  take(queue_, of(tenant), its);
  queue_.splice(queue_.end(), its);
}

// Pre: the lock of the tables is held. Where there is no region any more, or no arena that works, the job is for repoint() to fail.
Executor::Standing Executor::standing(const Job& job) const noexcept {
  const Arena& arena = *arena_;
  const auto found = arena.regions_.find(job.region);
  if (found == arena.regions_.end() || arena.broken_) return Standing::present;
  if (found->second.undecided) return Standing::undecided;
  return found->second.targets == job.targets ? Standing::present : Standing::past;
}

// The region shows its target, if that is still its plan's. A plan that is applied meanwhile and sets another leaves the region to
// the worker, so to what comes behind this; one that points the region itself waits for the lock of pointing.
Executor::Standing Executor::repoint(const Job& job) {
  const std::lock_guard<std::mutex> pointing(arena_->pointing_mutex_);
  std::vector<PageId> target;
  {
    const std::lock_guard<std::mutex> tables(arena_->mutex_);
    arena_->guard();
    target = arena_->region(job.region).target;
    const Standing now = standing(job);
    if (now != Standing::present) return now;
  }
  if (elsewhere(target)) return Standing::present;  // a plan that came later: no pass looks at it any more
  Pointer(*arena_, Pointer::Tables::free).layer(arena_->region(job.region), target);
  return Standing::present;
}

// Says how the job stood in the end: one that is present is done, or has failed and keeps its error; of one that is not, no
// waiter was told.
Executor::Standing Executor::run(Job& job, std::exception_ptr error) noexcept {
  // Whatever is thrown: an exception must not leave the thread (that would end the process); wait(layer) throws it instead.
  job.error = std::move(error);
  Standing now = Standing::present;
  const auto current = [&] {
    const std::lock_guard<std::mutex> tables(arena_->mutex_);
    now = standing(job);
    if (now != Standing::present) return false;
    const auto found = arena_->regions_.find(job.region);
    if (!job.error && found != arena_->regions_.end()) found->second.pending = false;
    return true;
  };
  const std::function<bool()> asked(std::ref(current));  // allocates nothing
  if (!job.error) {
    try {
      now = repoint(job);
      if (now != Standing::present) return now;
      job.observer ? job.observer->released(job.layer, asked) : asked();
      return now;
    } catch (...) {
      job.error = std::current_exception();
    }
  }
  job.observer ? job.observer->failed(job.layer, job.error, asked) : asked();
  if (now != Standing::present) job.error = nullptr;
  return now;
}

// Until the change that keeps them waiting is committed, which may be now: hence both locks.
void Executor::park(std::list<Job>& jobs) noexcept {
  const std::lock_guard<std::mutex> tables(arena_->mutex_);
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  for (auto job = jobs.begin(); job != jobs.end();) {
    const auto next = std::next(job);
    std::list<Job>& to = standing(*job) == Standing::undecided ? parked_ : queue_;
    to.splice(to.end(), jobs, job);
    job = next;
  }
}

void Executor::work() noexcept {
  std::unique_lock<std::mutex> lock(queue_mutex_);
  while (true) {
    queue_changed_->wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    std::list<Job> taken;
    taken.splice(taken.end(), queue_, queue_.begin());
    Job& job = taken.front();
    busy_ = true;
    lock.unlock();
    const TenantId tenant = job.tenant;
    const bool arrived = await(*job.behind, kTurn);
    if (arrived) {
      if (run(job, job.behind->error) == Standing::undecided) {
        park(taken);
      } else if (!job.error) {
        taken.clear();  // without the lock: the observer may end here, and what it holds
      }
    }
    lock.lock();
    busy_ = false;
    (arrived ? failed_ : queue_).splice(arrived ? failed_.end() : queue_.begin(), taken);
    give_turn(tenant);
    queue_changed_->notify_all();
  }
}

void Executor::drain() {
  refuse_fork(arena_->fork_generation_);
  std::unique_lock<std::mutex> lock(queue_mutex_);
  queue_changed_->wait(lock, [&] { return stopping_ || (queue_.empty() && !busy_); });
}

std::size_t Executor::failed_points() const {
  refuse_fork(arena_->fork_generation_);
  std::lock_guard<std::mutex> lock(queue_mutex_);
  return failed_.size();
}

std::size_t Executor::failed_points(TenantId tenant) const {
  refuse_fork(arena_->fork_generation_);
  std::lock_guard<std::mutex> lock(queue_mutex_);
  return static_cast<std::size_t>(
      std::count_if(failed_.begin(), failed_.end(), [&](const Job& job) { return job.tenant == tenant; }));
}

void Executor::retry_failed() {
  drain();
  std::list<Job> jobs;
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    jobs.swap(failed_);
  }
  retry(jobs);
}

void Executor::retry_failed(TenantId tenant) {
  drain();
  std::list<Job> jobs;
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    take(failed_, of(tenant), jobs);
  }
  retry(jobs);
}

void Executor::retry(std::list<Job>& jobs) {
  for (Job& job : jobs) job.behind->error = nullptr;
  std::list<Job> undecided;
  for (auto job = jobs.begin(); job != jobs.end();) {
    const auto next = std::next(job);
    await(*job->behind, std::chrono::nanoseconds::max());
    if (run(*job, job->behind->error) == Standing::undecided) undecided.splice(undecided.end(), jobs, job);
    job = next;
  }
  park(undecided);
  queue_changed_->notify_all();
  jobs.remove_if([](const Job& job) { return !job.error; });
  if (jobs.empty()) return;
  const std::exception_ptr first = jobs.front().error;
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    failed_.splice(failed_.end(), jobs);
  }
  std::rethrow_exception(first);
}

void Executor::forget(TenantId tenant) {
  drain();
  {
    const std::lock_guard<std::mutex> tables(arena_->mutex_);
    for (const Due& each : due_) {
      Page& page = arena_->pages_[each.page];
      if (page.due != tenant) continue;
      page.due = kNobody;
      page.dirty = kUnknownBytes;
    }
  }
  std::list<Job> gone;  // dropped behind the lock, with what their observers hold
  std::lock_guard<std::mutex> lock(queue_mutex_);
  for (std::list<Job>* jobs : {&failed_, &asleep_, &parked_}) take(*jobs, of(tenant), gone);
}

void Executor::stop() {
  refuse_fork(arena_->fork_generation_);
  end();
}

void Executor::end() noexcept {
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
