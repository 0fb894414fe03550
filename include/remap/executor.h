// SPDX-License-Identifier: Apache-2.0
// The Executor: the only place where a page changes hands.
//
//   apply(draft) carries out all plans of a draft (draft.h), of one tenant or several, as one change. First all that can fail: what
//                has to be mapped or pointed now is. An error undoes that, in reverse, and is thrown on: nothing has changed. If
//                undoing fails as well the pages concerned are quarantined and the arena is broken (ArenaBroken): only close() is
//                allowed then. Then the tables say what the draft said, without a failure possible. From there nothing goes back:
//                what is left to do is due.
//   zero_free()  zeroes pages that were free: live blocks may move there next.
//   zero_due()   zeroes the others, which went from one tenant to another: the moves of live blocks out of them come first.
//   commit()     lets go of what strict mode still shows, moves the epoch and starts the deferred re-pointing on the worker.
//
// Until a change is committed no other can begin. All of what is due can be called again after an error. No lock is held while a
// thread waits for zeroes: others look at the tables meanwhile.
//
// Beside a Prefetcher the order is: apply(); Prefetcher::configure(), with the layers of deferred steps as `held` (all of them
// if Applied::points_deferred is not 0, none in strict mode); then commit(), since the worker may release a layer at once.
//
// Where computation runs on streams, Ordering and `after` (events recorded on them) say what a change comes behind; see each
// call. The device orders work that touches memory behind them; the host waits only before it unmaps what a stream may
// still use: in strict mode, for a ring whose buffers change pages, and for re-pointing that is not deferred. In aliased mode
// growing, and re-pointing left to the worker, wait for nothing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <thread>
#include <vector>

#include "remap/arena.h"
#include "remap/draft.h"
#include "remap/plan.h"

namespace remap {

// Told by the worker when a layer's region shows its target (Prefetcher is behind it in this library): once for the last plan that
// deferred a step of the region, and not for those whose steps it took over. No lock of the arena's or the executor's is held
// then: the observer's next work, enqueueing copies say, may take its time.
//
// Meanwhile a plan may have been applied that points the layer to other pages, and that holds the layer. So the observer asks
// `current`, under the lock that orders its own holds. False: the news is of the past, and the observer changes nothing.
// True: a later plan finds the observer's lock taken, and its hold comes behind. `current` takes the lock of
// the arena's tables for a moment and throws nothing.
class PointObserver {
 public:
  virtual ~PointObserver() = default;
  // Both return what `current` said.
  virtual bool released(std::uint32_t layer, const std::function<bool()>& current) noexcept = 0;
  virtual bool failed(std::uint32_t layer, std::exception_ptr error, const std::function<bool()>& current) noexcept = 0;
};

class Executor {
 public:
  // Starts the worker's thread, which sleeps until there is work. Throws InvalidArgument for no arena, and LimitExceeded (field
  // errno) if the system gives no thread.
  explicit Executor(std::shared_ptr<Arena> arena);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // The ordering of each tenant's part in a change; both 0 for tenants that are not named.
  using Orderings = std::vector<std::pair<TenantId, Ordering>>;
  // StalePlan if the arena has changed since the draft's first plan; InvalidState if the last change is not committed. The draft is empty
  // afterwards; on an error it is as before.
  Applied apply(Draft& draft, const Orderings& orderings = {});
  // A draft of one plan. Throws what Draft::add() throws, before any backend call.
  Applied apply(const Plan& plan, const Ordering& ordering = {});
  // Zeroes pages that were free, or all that are due still: these behind these events too, of the last reads of pages that other tenants
  // have now. Returns the bytes. Throws the backend's error; pages that it has not come to are still due. Nothing to do is no error.
  std::size_t zero_free();
  std::size_t zero_due(const std::vector<EventHandle>& behind = {});
  // A tenant's share in a commit: see there.
  struct Share {
    TenantId tenant = kNobody;
    std::shared_ptr<PointObserver> observer;
    EventHandle after = 0;
    bool asleep = false;
  };
  // For a change of several tenants: each one's deferred steps go with its share. InvalidArgument if one has steps and no share, or
  // two.
  void commit(const std::vector<Share>& shares);
  // For a change of one tenant, or where the same holds for all. observer: told of each deferred step, by the worker's thread, unless a later plan takes the step over; kept until the last of
  // them is done. It tells the holder of the layers. nullptr: none is told, so what a Prefetcher holds for the plan
  // stays held.
  // `after`: the worker waits for this event before it touches a mapping (the last kernel that reads the old view, the last
  // copy into it), once for all steps of the plan. Tenants take turns, a step each, and one whose event has not come keeps no
  // other waiting. It comes behind those of earlier plans with steps of the same regions, which this one takes over. It lives
  // until drain() has returned and no step of the plan has failed; recorded anew before, it makes the worker wait for longer than
  // needed.
  // asleep: no pass uses the plan's layers before wake(), so steps that point them away from home wait for that, and none is made
  // for a layer that comes home before: a tenant that lends its layers while it is idle costs no driver call. Until then such a
  // region shows pages that may be another tenant's, as every region does whose step is deferred.
  // Throws InvalidState if no change is applied, if pages are due, or if it has deferred steps and the worker was stopped; the
  // backend's error if strict mode cannot unmap. After any error the change is applied as before: commit() again.
  void commit(const std::shared_ptr<PointObserver>& observer, EventHandle after = 0, bool asleep = false);
  // The worker begins with the steps of this tenant's regions that sleep, behind `after` (as in commit(); an event that comes
  // behind those of their commits). Nothing to do is no error.
  void wake(TenantId tenant, EventHandle after = 0);
  // Whether a change is applied and not committed. False when the arena is closed.
  bool undecided() const;

  // Blocks until the worker has nothing to do, so for the events that its steps come behind; not for steps that sleep, or wait for
  // a change that is applied to be committed. Then no thread of this library makes a driver call by itself until the next commit()
  // or wake() (a stream can be captured undisturbed). Does not throw the worker's errors: they are kept with their layer.
  void drain();
  // Deferred steps that failed; wait(layer) throws for each of them meanwhile.
  std::size_t failed_points() const;
  std::size_t failed_points(TenantId tenant) const;
  // Tries the failed ones again, here and now: all, or those of one tenant's regions. Throws the first error; those stay failed
  // and nothing else changes.
  void retry_failed();
  void retry_failed(TenantId tenant);
  // Forgets the failed and waiting steps of the tenant's regions (detach, close), and zeroes that are due for it: its pages count as of
  // unknown bytes.
  void forget(TenantId tenant);
  // Stops the worker, when the step that it is at is done. Called by the destructor too.
  void stop();

 private:
  // The work that the steps of one commit come behind. Only the thread that has one of its jobs in hand uses it: the worker, or
  // retry().
  struct Fence {
    EventHandle after = 0;     // 0 once it was seen complete: it may be recorded anew then, and is another's
    std::exception_ptr error;  // its stream's
  };
  struct Job {
    RegionId region = 0;
    std::uint64_t targets = 0;  // Region::targets when it was committed
    std::uint32_t layer = 0;
    TenantId tenant = kNobody;  // the region's
    std::shared_ptr<PointObserver> observer;
    std::shared_ptr<Fence> behind;
    std::exception_ptr error;
  };
  // The state of a job's plan, as far as the region is concerned.
  enum class Standing : std::uint8_t {
    present,    // no other has set the region's target since
    undecided,  // another is applied that does, and not committed
    past,       // another has, and brought a job of its own; or the region is gone
  };
  // The needs of applying a draft.
  struct Needs {
    bool points = false;  // apply() itself maps or unmaps
    bool unmaps = false;  // and a stream may still use what it unmaps, or changes at once
    bool leaves = false;  // pages go to other processes
  };
  struct Due {
    PageId page = 0;
    TenantId tenant = kNobody;
    StreamHandle zero_on = 0;  // 0: it is waited for
    bool was_free = false;  // it was no tenant's in this change before, and is KV
  };
  template <typename Visit>
  static void for_owners(const Draft& draft, Visit&& visit);
  Needs admit(const Draft& draft) const;
  void point(const Draft& draft, Applied& applied);
  void map_kv(const Draft& draft);
  void list_due(const Draft& draft, const Orderings& orderings, Applied& applied);
  void store(Draft& draft) noexcept;
  std::size_t zero(bool free_alone, const std::vector<EventHandle>& behind);
  void let_go(const std::vector<EventHandle>& behind);
  bool find_mapped(DirtyPage& page) const;
  void make_room_to_undo();
  using Back = std::function<void(const std::vector<PageId>& pages)>;
  template <typename Change>
  void change(Back back, std::vector<PageId> pages, Change&& forth);
  void undo();
  void commit_to(const std::function<const Share&(TenantId)>& share_of);
  void end() noexcept;
  void work() noexcept;
  bool await(Fence& fence, std::chrono::nanoseconds timeout) noexcept;
  void give_turn(TenantId tenant) noexcept;
  Standing standing(const Job& job) const noexcept;
  Standing run(Job& job, std::exception_ptr error) noexcept;
  Standing repoint(const Job& job);
  void park(std::list<Job>& jobs) noexcept;
  void decided() noexcept;
  void retry(std::list<Job>& jobs);

  std::shared_ptr<Arena> arena_;
  // Guarded by arena_->mutex_, the lock of the tables: the change between apply() and commit() (Arena::undecided_).
  struct Deferred {
    RegionId region = 0;
    std::uint32_t layer = 0;
  };
  std::vector<Due> due_;  // stale where Page::due says otherwise
  std::vector<Deferred> deferred_;
  std::vector<RegionId> left_to_later_;  // theirs, and those of layers that show nothing from now on
  std::vector<std::pair<RegionId, std::size_t>> shown_still_;  // strict: slots of KV regions whose pages are no longer its tenant's KV
  struct Undo {
    Back action;
    std::vector<PageId> pages;  // handed to the action; quarantined if it throws
  };
  std::vector<Undo> undo_;  // what apply() has asked of the backend so far

  // Guarded by queue_mutex_: jobs for the worker. It takes a job out, lets go of this lock, and re-points under the arena's
  // pointing lock. A job points its region for the plan that it came with, and for no other: a stream that used the region before
  // it was held is behind the event of that plan, but the layer may have been let go of and used since, when a later plan comes.
  // So a plan that is committed takes the jobs of its regions away (the one in hand sees it by Region::targets), and while one is
  // applied and not decided, the jobs of its regions are parked.
  mutable std::mutex queue_mutex_;
  std::unique_ptr<std::condition_variable> queue_changed_ = std::make_unique<std::condition_variable>();
  // Lists: a job changes its list without being allocated anew, so none is lost when memory runs out.
  std::list<Job> queue_;
  std::list<Job> failed_;
  std::list<Job> asleep_;
  std::list<Job> parked_;
  bool busy_ = false;
  bool stopping_ = false;
  std::thread worker_;
};

}  // namespace remap
