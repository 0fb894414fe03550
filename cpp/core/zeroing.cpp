// SPDX-License-Identifier: Apache-2.0
// Zeroes pages that change tenant (promise 6: a page that changes tenant reads zero), and orders the zeroes.
//
// Only a page's tenant touches its bytes, on streams that the arena does not know. A page that goes from tenant A by way of
// `free` to tenant B therefore has two orders to keep, and neither may make the host wait:
//   A's last writes before the zeroes.   A plan that frees pages names an event behind A's work (Ordering::after). The arena
//      makes its own stream wait for each of these events (gather), so this stream is behind every tenant that ever gave a page
//      up, and its last event stands for all of them. Otherwise kernels that A enqueued long ago would write into B's pages.
//   The zeroes before B's first use.     Either the host waits for them, or the arena enqueues them on the stream behind which
//      B does everything (Ordering::zero_on).
//
// Page::dirty says whose bytes a page may hold. With zero_on it becomes B's when the fill is *enqueued*, which is as good as
// done: until B gives the page up only B touches it, behind the fill; and if B frees it before the fill has run, the event of
// that plan, recorded on B's stream, is behind the fill as well, and so is the next tenant.
//
// The arena cannot repair one failure: if B's stream fails after the fill was enqueued and before it ran, the page is not
// zeroed, and a host that goes on with B on another stream finds A's bytes. On a GPU such a failure ends the context.
//
// strict mode always waits for the zeroes.
#include <mutex>

#include "remap/arena.h"

namespace remap {
namespace {

// Calls body(first, last) for each run of pages that lie side by side in one region.
template <typename Body>
void for_runs(const std::vector<DirtyPage>& pages, std::size_t page_bytes, Body&& body) {
  for (std::size_t first = 0; first < pages.size();) {
    std::size_t last = first;
    while (last + 1 < pages.size() && pages[last + 1].region == pages[first].region &&
           pages[last + 1].at == pages[last].at + page_bytes) {
      ++last;
    }
    body(first, last);
    first = last + 1;
  }
}

}  // namespace

bool Arena::is_dirty(PageId id, TenantId tenant) const {
  const TenantId dirty = pages_[id].dirty;
  return dirty != kNobody && dirty != tenant;
}

void Arena::open_fills() {
  if (fill_event_ == 0) fill_event_ = backend_->create_event(false);
  if (fill_stream_ == 0) fill_stream_ = backend_->create_stream();
}

// Waits for the stream's work and destroys it: a stream that has failed would fail for ever.
void Arena::drop_fill_stream() {
  backend_->destroy_stream(fill_stream_);
  fill_stream_ = 0;
  gathered_ = false;
}

void Arena::gather(EventHandle after) {
  open_fills();
  backend_->stream_wait(fill_stream_, after);
  backend_->record(fill_event_, fill_stream_);
  gathered_ = true;
}

void Arena::zero_pages(const std::vector<DirtyPage>& pages, std::vector<PageId>& zeroed, std::unique_lock<std::mutex>* tables) {
  if (pages.empty()) return;
  zeroed.reserve(zeroed.size() + pages.size());
  bool filling = false;
  try {
    open_fills();
    for_runs(pages, options_.page_bytes, [&](std::size_t first, std::size_t last) {
      backend_->fill(fill_stream_, pages[first].at, 0, (last - first + 1) * options_.page_bytes);
      filling = true;
    });
    const EventHandle event = fill_event_;
    backend_->record(event, fill_stream_);
    if (tables != nullptr) tables->unlock();
    backend_->synchronize(event, std::chrono::nanoseconds::max());
    if (tables != nullptr) tables->lock();
    guard();
  } catch (...) {
    if (tables != nullptr && !tables->owns_lock()) tables->lock();
    if (!filling || closed_) throw;
    try {
      drop_fill_stream();  // it would fail for ever; and the caller may unmap next: nothing may still be writing there
    } catch (...) {
      broken_ = true;
      for (const DirtyPage& each : pages) own(each.page, Owner::quarantine);
      fail_broken("zeroing failed and cannot be waited for: ", std::current_exception(), {});
    }
    throw;
  }
  if (tables == nullptr) gathered_ = false;  // else somebody may have gathered more
  // Only now: a page counts as this tenant's when the zeroes have arrived.
  for (const DirtyPage& each : pages) {
    pages_[each.page].dirty = each.tenant;
    zeroed.push_back(each.page);
  }
}

void Arena::enqueue_zeroing(const std::vector<DirtyPage>& pages, StreamHandle stream, std::vector<PageId>& enqueued) {
  enqueued.reserve(enqueued.size() + pages.size());
  if (gathered_) {
    try {
      gathered_ = !backend_->query(fill_event_);
    } catch (...) {
      // A giver's stream that has failed must not take the taker's with it.
      drop_fill_stream();
      throw;
    }
    if (gathered_) backend_->stream_wait(stream, fill_event_);
  }
  for_runs(pages, options_.page_bytes, [&](std::size_t first, std::size_t last) {
    backend_->fill(stream, pages[first].at, 0, (last - first + 1) * options_.page_bytes);
    for (std::size_t i = first; i <= last; ++i) {
      enqueued.push_back(pages[i].page);
      pages_[pages[i].page].dirty = pages[i].tenant;
    }
  });
}

}  // namespace remap
