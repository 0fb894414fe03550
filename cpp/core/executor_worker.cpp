// The Executor's worker: re-points layers' regions behind an event, off the critical path. The only thread of this library
// that makes driver calls on its own account (released() also makes it enqueue copies): drain() brings it to rest.
#include <algorithm>
#include <utility>

#include "pointing.h"
#include "remap/executor.h"
#include "remap/fork.h"

namespace remap {
namespace {

// How long the worker waits for one tenant's event before it looks at another's.
constexpr std::chrono::milliseconds kTurn{1};

}  // namespace

void Executor::commit(const std::shared_ptr<PointObserver>& observer, EventHandle after, bool asleep) {
  refuse_fork(arena_->fork_generation_);
  std::list<Job> gone;  // dropped behind the locks, with what their observers hold
  {
    std::lock_guard<std::mutex> lock(arena_->mutex_);
    Arena& arena = *arena_;
    if (!arena.undecided_) throw Error(ErrorKind::invalid_state, "No applied plan waits for a decision. Nothing changed.");
    // All that can fail comes before the first change.
    std::list<Job> jobs, sleeping;
    const auto fence = std::make_shared<Fence>(Fence{after, nullptr});
    for (const Point& point : deferred_) {
      const Region& region = arena.region(point.region);
      (asleep && region.target != region.home ? sleeping : jobs)
          .push_back(Job{point.region, point.layer, region.tenant, observer, fence, nullptr});
    }
    std::lock_guard<std::mutex> queue_lock(queue_mutex_);
    if (stopping_ && !deferred_.empty()) {
      throw Error(ErrorKind::invalid_state,
                  "The executor is stopped, nobody would re-point what the plan deferred. The plan is applied as before; roll it back.");
    }
    // A job points its region to the present target, so the new one does what a sleeping one of the same region would.
    for (const Point& point : deferred_) {
      const auto found = std::find_if(asleep_.begin(), asleep_.end(), [&](const Job& job) { return job.region == point.region; });
      if (found != asleep_.end()) gone.splice(gone.end(), asleep_, found);
    }
    asleep_.splice(asleep_.end(), sleeping);
    queue_.splice(queue_.end(), jobs);
    arena.undecided_ = false;
    undo_.clear();
    deferred_.clear();
    ++arena.epoch_;
  }
  queue_changed_->notify_all();
}

void Executor::wake(TenantId tenant, EventHandle after) {
  refuse_fork(arena_->fork_generation_);
  const auto fence = std::make_shared<Fence>(Fence{after, nullptr});
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    for (auto job = asleep_.begin(); job != asleep_.end();) {
      const auto next = std::next(job);
      if (job->tenant == tenant) {
        job->behind = fence;
        queue_.splice(queue_.end(), asleep_, job);
      }
      job = next;
    }
  }
  queue_changed_->notify_all();
}

// ---- the re-pointing worker -------------------------------------------------------------------------------------

// Whether it is known what the event came to. Without any lock: the device may need a long time to come to it, and a thread that
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
  std::list<Job> others;
  for (auto job = queue_.begin(); job != queue_.end();) {
    const auto next = std::next(job);
    if (job->tenant != tenant) others.splice(others.end(), queue_, job);
    job = next;
  }
  queue_.splice(queue_.begin(), others);
}

// The region shows its present target. `targets`: which one that is, known whatever fails later.
void Executor::repoint(RegionId id, std::uint64_t& targets) {
  const std::lock_guard<std::mutex> pointing(arena_->pointing_mutex_);
  std::vector<PageId> target;
  {
    const std::lock_guard<std::mutex> tables(arena_->mutex_);
    const Region& region = arena_->region(id);
    targets = region.targets;
    arena_->guard();
    target = region.target;
  }
  if (elsewhere(target)) return;  // a plan that came later: nobody looks at it any more
  Pointer(*arena_, Pointer::Tables::free).layer(arena_->region(id), target);
}

void Executor::run(Job& job, std::exception_ptr error) noexcept {
  // Whatever is thrown: an exception must not leave the thread (that would end the process); wait(layer) throws it instead.
  job.error = std::move(error);
  std::uint64_t targets = 0;
  // Under the lock of the tables: whether the region's target is still the one that this job was about. The region is settled then,
  // if nothing failed. One that has gone is nobody's: whatever is said of it is as good as any.
  const auto current = [&] {
    const std::lock_guard<std::mutex> tables(arena_->mutex_);
    const auto found = arena_->regions_.find(job.region);
    if (found == arena_->regions_.end()) return true;
    if (found->second.targets != targets) return false;
    if (!job.error) found->second.pending = false;
    return true;
  };
  const std::function<bool()> asked(std::ref(current));  // allocates nothing
  if (job.error) {
    const std::lock_guard<std::mutex> tables(arena_->mutex_);
    const auto found = arena_->regions_.find(job.region);
    if (found != arena_->regions_.end()) targets = found->second.targets;
  }
  while (!job.error) {
    try {
      repoint(job.region, targets);
      if (job.observer ? job.observer->released(job.layer, asked) : asked()) return;
    } catch (...) {
      job.error = std::current_exception();
    }
  }
  // Where it is told in vain, a plan has set another target since, and its own step comes later.
  if (job.observer) job.observer->failed(job.layer, job.error, asked);
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
      run(job, job.behind->error);
      if (!job.error) taken.clear();  // without the lock: the observer may end here, and what it holds
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
    for (auto job = failed_.begin(); job != failed_.end();) {
      const auto next = std::next(job);
      if (job->tenant == tenant) jobs.splice(jobs.end(), failed_, job);
      job = next;
    }
  }
  retry(jobs);
}

void Executor::retry(std::list<Job>& jobs) {
  for (Job& job : jobs) job.behind->error = nullptr;
  for (Job& job : jobs) {
    await(*job.behind, std::chrono::nanoseconds::max());
    run(job, job.behind->error);
  }
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
  std::list<Job> gone;  // dropped behind the lock, with what their observers hold
  std::lock_guard<std::mutex> lock(queue_mutex_);
  for (std::list<Job>* jobs : {&failed_, &asleep_}) {
    for (auto job = jobs->begin(); job != jobs->end();) {
      const auto next = std::next(job);
      if (job->tenant == tenant) gone.splice(gone.end(), *jobs, job);
      job = next;
    }
  }
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
