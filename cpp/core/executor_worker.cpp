// The Executor's worker: re-points layers' regions behind an event, off the critical path. The only thread of this library
// that makes driver calls on its own account (released() also makes it enqueue copies): drain() brings it to rest.
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <utility>

#include "pointing.h"
#include "remap/executor.h"
#include "remap/fork.h"

namespace remap {

void Executor::commit(const std::shared_ptr<PointObserver>& observer, EventHandle after) {
  std::vector<Point> jobs;
  {
    std::lock_guard<std::mutex> lock(arena_->mutex_);
    if (!arena_->undecided_) throw Error(ErrorKind::invalid_state, "No applied plan waits for a decision. Nothing changed.");
    arena_->undecided_ = false;
    undo_.clear();
    jobs.swap(deferred_);
    ++arena_->epoch_;
  }
  if (jobs.empty()) return;
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    ++commits_;
    for (Point& point : jobs) queue_.push_back(Job{std::move(point), observer, after, commits_, nullptr});
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

// Without any lock: the device may need a long time to come to this event, and a thread that waits for a lock of ours may
// hold what it needs for that.
std::exception_ptr Executor::await(EventHandle after) noexcept {
  try {
    if (after != 0) arena_->backend_->synchronize(after, std::chrono::nanoseconds::max());
    return nullptr;
  } catch (const std::exception&) {
    return std::current_exception();
  }
}

void Executor::run(Job& job, std::exception_ptr error) {
  // Whatever is thrown: an exception must not leave the thread (that would end the process); wait(layer) throws it instead.
  job.error = std::move(error);
  if (!job.error) job.after = 0;  // seen complete: a second try has nothing to wait for, and the event may be another's by then
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
  // What the present commit's event came to. Its steps wait once: the event may be recorded anew as soon as it is complete, and
  // the second step would wait for that.
  std::uint64_t commit = 0;
  std::exception_ptr awaited;
  std::unique_lock<std::mutex> lock(queue_mutex_);
  while (true) {
    queue_changed_->wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    Job job = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    if (job.commit != commit) {
      commit = job.commit;
      awaited = await(job.after);
    }
    run(job, awaited);
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
    run(job, await(job.after));
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
