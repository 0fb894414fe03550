// The Executor: the only place where a page changes hands.
//
//   apply(plan)  checks the epoch and every owner, then does all steps that are not deferred; an error undoes what was
//                done, in reverse, and is thrown on. If undoing fails as well the pages concerned are quarantined and the
//                arena is broken (ArenaBroken): only close() is allowed then.
//   commit()     makes the plan final, moves the epoch and starts the deferred re-pointing on the worker.
//   rollback()   undoes the applied plan instead (its caller failed at something else, or another rank did).
//
// Between apply() and commit() or rollback() no other plan can be applied.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "remap/arena.h"
#include "remap/plan.h"

namespace remap {

// Told by the worker when a layer's region shows its target (Prefetcher is behind it in this library).
class PointObserver {
 public:
  virtual ~PointObserver() = default;
  virtual void released(std::uint32_t layer) noexcept = 0;
  virtual void failed(std::uint32_t layer, std::exception_ptr error) noexcept = 0;
};

class Executor {
 public:
  explicit Executor(std::shared_ptr<Arena> arena);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  Applied apply(const Plan& plan);
  // `after`: the worker waits for this event before it touches a mapping (the last kernel that reads the old view).
  void commit(const std::shared_ptr<PointObserver>& observer, EventHandle after = 0);
  void rollback();

  // Blocks until the worker has nothing to do. Does not throw the worker's errors: they are kept with their layer.
  void drain();
  // Deferred steps that failed; wait(layer) throws for each of them meanwhile.
  std::size_t failed_points() const;
  // Tries the failed ones again, here and now. Throws the first error; those stay failed and nothing else changes.
  void retry_failed();
  // Forgets the failed and waiting steps of the tenant's regions (detach, close).
  void forget(TenantId tenant);
  // Stops the worker. Called by the destructor too.
  void stop();

 private:
  struct Job {
    Point point;
    std::shared_ptr<PointObserver> observer;
    EventHandle after = 0;
    std::exception_ptr error;
  };
  void set_owner(const SetOwner& step, Applied& applied);
  void point(const Point& step, Applied& applied);
  void validate(const Plan& plan);
  void undo_all();
  void work();
  void run(Job& job);

  std::shared_ptr<Arena> arena_;
  // Guarded by arena_->mutex_: the plan between apply() and commit().
  bool pending_ = false;
  std::vector<Point> deferred_;
  struct Undo {
    std::function<void()> action;
    std::vector<PageId> pages;  // quarantined if the action throws
  };
  std::vector<Undo> undo_;
  // validate()'s own, kept for its memory: the owner of each page after the plan's steps so far, if `validation` is the
  // present one.
  struct Moved {
    std::uint64_t validation = 0;
    TenantId tenant = kNobody;
    Owner owner = Owner::free;
  };
  std::vector<Moved> moved_;
  std::uint64_t validation_ = 0;

  // Guarded by queue_mutex_: jobs for the worker. It takes a job out, lets go of this lock, then takes arena_->mutex_ to
  // re-point. A job always points its region to the region's *present* target, and tells its observer before it lets go of
  // arena_->mutex_: a plan applied later takes that lock first, so no stale "released" can follow its hold.
  mutable std::mutex queue_mutex_;
  std::unique_ptr<std::condition_variable> queue_changed_ = std::make_unique<std::condition_variable>();
  std::deque<Job> queue_;
  std::vector<Job> failed_;
  bool busy_ = false;
  bool stopping_ = false;
  std::thread worker_;  // started by the first commit() with deferred steps
};

}  // namespace remap
