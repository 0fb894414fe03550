#include "remap/arena.h"

#include <algorithm>
#include <utility>

#include "pointing.h"
#include "remap/fork.h"

namespace remap {
namespace {

Error::Value number(std::size_t value) { return static_cast<std::int64_t>(value); }

}  // namespace

const char* owner_name(Owner owner) noexcept {
  switch (owner) {
    case Owner::free: return "free";
    case Owner::params: return "params";
    case Owner::kv: return "kv";
    case Owner::ring: return "ring";
    case Owner::quarantine: return "quarantine";
  }
  return "unknown";
}

Arena::Arena(std::shared_ptr<Backend> backend, const ArenaOptions& options)
    : backend_(std::move(backend)), options_(options), fork_generation_(fork_generation()) {
  const std::size_t grain = backend_->granularity();
  if (options.page_bytes == 0 || options.page_bytes % grain != 0) {
    throw Error(ErrorKind::invalid_argument,
                "page_bytes must be a positive multiple of the backend's granularity of " + std::to_string(grain) +
                    " bytes, not " + std::to_string(options.page_bytes) + ". Nothing was created.",
                {{"page_bytes", number(options.page_bytes)}, {"granularity", number(grain)}});
  }
  const std::size_t count = options.capacity_bytes / options.page_bytes;
  if (count == 0 || count >= kNoPage) {
    throw Error(ErrorKind::invalid_argument,
                "capacity of " + std::to_string(options.capacity_bytes) + " bytes must hold at least one page of " +
                    std::to_string(options.page_bytes) + " bytes. Nothing was created; give more capacity or smaller pages.",
                {{"capacity", number(options.capacity_bytes)}, {"page_bytes", number(options.page_bytes)}});
  }
  pages_.reserve(count);
  try {
    for (std::size_t i = 0; i < count; ++i) {
      Page page;
      page.handle = backend_->create_page(options.page_bytes);
      // A page of unknown contents counts as somebody's: it is zeroed before its first KV use.
      page.dirty = backend_->new_pages_are_zero() ? kNobody : kUnknownBytes;
      pages_.push_back(page);
    }
  } catch (const Error&) {
    // Reverse order, like every undo here. A page that cannot be destroyed stays the backend's until the backend closes.
    for (auto page = pages_.rbegin(); page != pages_.rend(); ++page) {
      try {
        backend_->destroy_page(page->handle);
      } catch (const Error&) {
        continue;
      }
    }
    throw;
  }
}

Arena::~Arena() {
  if (fork_generation() != fork_generation_) {
    new std::shared_ptr<Backend>(backend_);  // leaked on purpose: its threads and mappings are the parent's
    return;
  }
  try {
    close();
  } catch (const Error&) {
    return;  // the backend's own destructor takes back what is left
  }
}

void Arena::guard() const {
  if (closed_) throw Error(ErrorKind::invalid_state, "The arena is closed. Nothing changed; open a new session.");
  if (broken_) {
    std::size_t quarantined = 0;
    for (const Page& page : pages_) quarantined += page.owner == Owner::quarantine ? 1 : 0;
    throw Error(ErrorKind::arena_broken,
                "An earlier failure could not be undone; " + std::to_string(quarantined) + " of " +
                    std::to_string(pages_.size()) + " pages are quarantined. Only close() is allowed.",
                {{"quarantined_pages", number(quarantined)}});
  }
}

Region& Arena::region(RegionId id) { return const_cast<Region&>(static_cast<const Arena*>(this)->region(id)); }

const Region& Arena::region(RegionId id) const {
  if (id >= regions_.size() || !regions_[id].live) {
    throw Error(ErrorKind::invalid_argument, "Unknown region " + std::to_string(id) + ". Nothing changed.",
                {{"region", number(id)}});
  }
  return regions_[id];
}

// ---- set-up -----------------------------------------------------------------------------------------------------

std::vector<PageId> Arena::take(std::size_t count, Owner owner, TenantId tenant, const std::vector<PageId>& excluded) {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  guard();
  std::vector<bool> barred(excluded.empty() ? 0 : pages_.size(), false);
  for (PageId id : excluded) {
    if (id >= pages_.size()) {
      throw Error(ErrorKind::invalid_argument, "Unknown page " + std::to_string(id) + " is excluded. Nothing changed.",
                  {{"page", number(id)}, {"total", number(pages_.size())}});
    }
    barred[id] = true;
  }
  std::vector<PageId> taken;
  taken.reserve(std::min(count, pages_.size()));
  for (PageId id = 0; id < pages_.size() && taken.size() < count; ++id) {
    if (pages_[id].owner == Owner::free && (barred.empty() || !barred[id])) taken.push_back(id);
  }
  if (taken.size() < count) {
    throw Error(ErrorKind::out_of_memory,
                std::to_string(count) + " pages of " + std::to_string(options_.page_bytes) + " bytes wanted for " +
                    owner_name(owner) + ", " + std::to_string(taken.size()) + " of " + std::to_string(pages_.size()) +
                    (excluded.empty() ? " are free" : " are free and not excluded") +
                    ". Nothing changed; raise capacity by at least " +
                    std::to_string((count - taken.size()) * options_.page_bytes) + " bytes or detach a tenant.",
                {{"requested", number(count)}, {"free", number(taken.size())}, {"total", number(pages_.size())},
                 {"page_bytes", number(options_.page_bytes)}});
  }
  for (PageId id : taken) {
    pages_[id].owner = owner;
    pages_[id].tenant = tenant;
    if (pages_[id].dirty == kNobody) pages_[id].dirty = tenant;
  }
  ++epoch_;
  return taken;
}

RegionId Arena::add_region(RegionKind kind, TenantId tenant, const std::string& name, std::size_t slots) {
  if (slots == 0) {
    throw Error(ErrorKind::invalid_argument, "A region needs at least one page. Nothing changed.", {{"slots", number(slots)}});
  }
  Region fresh;
  fresh.kind = kind;
  fresh.tenant = tenant;
  fresh.name = name;
  fresh.reserved_bytes = slots * options_.page_bytes;
  fresh.view.shown.assign(slots, kNoPage);
  if (kind == RegionKind::kv) {
    fresh.designated.assign(slots, kNoPage);
    fresh.slot_of.assign(pages_.size(), kNoSlot);
  }
  regions_.push_back(std::move(fresh));  // before the reservation: nothing can fail behind it
  try {
    regions_.back().view.address = backend_->reserve(slots * options_.page_bytes, options_.page_bytes);
  } catch (const Error&) {
    regions_.pop_back();
    throw;
  }
  return static_cast<RegionId>(regions_.size() - 1);
}

RegionId Arena::add_layer_region(TenantId tenant, const std::string& name, const std::vector<PageId>& home) {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  guard();
  for (PageId id : home) {
    if (id >= pages_.size() || pages_[id].owner != Owner::params || pages_[id].tenant != tenant) {
      throw Error(ErrorKind::invalid_argument,
                  "Page " + std::to_string(id) + " is not a params page of tenant " + std::to_string(tenant) +
                      ". Nothing changed.",
                  {{"page", number(id)}, {"tenant", number(tenant)}});
    }
  }
  const RegionId id = add_region(RegionKind::layer, tenant, name, home.size());
  Region& fresh = regions_[id];
  fresh.home = home;
  fresh.target = home;
  try {
    map_slots(fresh.view, 0, home);
    std::vector<Unclean> unclean;
    for (std::size_t slot = 0; slot < home.size(); ++slot) {
      if (is_unclean(home[slot], tenant)) unclean.push_back({id, slot_address(fresh.view, slot), home[slot], tenant});
    }
    cleanse(unclean);
  } catch (const Error&) {
    if (broken_) throw;
    try {
      unmap_slots(fresh.view, 0, home.size());
    } catch (const Error& second) {
      fail_broken(std::string("mapping a layer failed and so did undoing it: ") + second.what(), home);
    }
    discard(fresh.view.address, fresh.reserved_bytes);
    regions_.pop_back();
    throw;
  }
  ++epoch_;
  return id;
}

RegionId Arena::add_ring_region(TenantId tenant, std::size_t slots) {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  guard();
  return add_region(RegionKind::ring, tenant, "ring", slots);
}

RegionId Arena::add_kv_region(TenantId tenant, std::size_t slots) {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  guard();
  return add_region(RegionKind::kv, tenant, "kv", slots);
}

void Arena::designate(RegionId kv_region, std::size_t first_slot, const std::vector<PageId>& pages) {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  guard();
  Region& kv = region(kv_region);
  const bool fits = kv.kind == RegionKind::kv && first_slot <= kv.designated.size() &&
                    pages.size() <= kv.designated.size() - first_slot;
  if (!fits) {
    throw Error(ErrorKind::invalid_argument,
                "Slots " + std::to_string(first_slot) + " to " + std::to_string(first_slot + pages.size()) +
                    " do not lie in KV region " + std::to_string(kv_region) + ". Nothing changed.",
                {{"region", number(kv_region)}, {"first_slot", number(first_slot)}, {"pages", number(pages.size())}});
  }
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (pages[i] >= pages_.size() || kv.designated[first_slot + i] != kNoPage || kv.slot_of[pages[i]] != kNoSlot) {
      throw Error(ErrorKind::invalid_argument,
                  "Page " + std::to_string(pages[i]) + " is unknown, has a place in the KV region already, or its slot " +
                      std::to_string(first_slot + i) + " is taken. Nothing changed.",
                  {{"page", number(pages[i])}, {"slot", number(first_slot + i)}});
    }
  }
  if (options_.mode == Mode::aliased && !pages.empty()) refuse_registered(kv_region);
  // strict: plans map what they give. A page is never KV before it is designated, so there is nothing to map here.
  for (PageId id : pages) {
    if (pages_[id].owner == Owner::kv && pages_[id].tenant == kv.tenant) {
      throw Error(ErrorKind::invalid_state, "Page " + std::to_string(id) + " is KV before it has a place. Nothing changed.",
                  {{"page", number(id)}});
    }
  }
  if (options_.mode == Mode::aliased) map_slots(kv.view, first_slot, pages);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    kv.designated[first_slot + i] = pages[i];
    kv.slot_of[pages[i]] = first_slot + i;
  }
  ++epoch_;
}

void Arena::designate_ring(RegionId ring_region, std::size_t first_slot, const std::vector<PageId>& pages) {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  guard();
  Region& ring = region(ring_region);
  if (options_.mode == Mode::strict) return;
  if (ring.kind != RegionKind::ring || first_slot + pages.size() > ring.view.shown.size()) {
    throw Error(ErrorKind::invalid_argument, "The pages do not fit the ring region. Nothing changed.",
                {{"region", number(ring_region)}, {"pages", number(pages.size())}});
  }
  refuse_registered(ring_region);
  Pointer(*this).slots(ring.view, first_slot, pages);
}

void Arena::prepare_view(RegionId layer_region, const std::vector<PageId>& pages) {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  guard();
  Region& layer = region(layer_region);
  if (layer.kind != RegionKind::layer || pages.size() != layer.view.shown.size()) {
    throw Error(ErrorKind::invalid_argument, "A view of a layer's region shows as many pages as the region has. Nothing changed.",
                {{"region", number(layer_region)}, {"pages", number(pages.size())}});
  }
  if (!backend_->can_exchange() || layer.view.shown == pages) return;
  Pointer(*this).parked(layer, pages);
}

void Arena::release_region(Region& gone) {
  // Accounts after each release: if the backend throws, what is still mapped is still in the table and the call can be
  // repeated.
  while (!gone.parked.empty()) {
    View& view = gone.parked.back();
    unmap_slots(view, 0, view.shown.size());
    backend_->release(view.address, gone.reserved_bytes);
    gone.parked.pop_back();
  }
  unmap_slots(gone.view, 0, gone.view.shown.size());
  backend_->release(gone.view.address, gone.reserved_bytes);
  gone.live = false;
}

void Arena::discard(std::byte* address, std::size_t bytes) {
  leftovers_.reserve(leftovers_.size() + 1);
  try {
    backend_->release(address, bytes);
  } catch (const Error&) {
    leftovers_.emplace_back(address, bytes);
  }
}

void Arena::release_leftovers() {
  while (!leftovers_.empty()) {
    backend_->release(leftovers_.back().first, leftovers_.back().second);
    leftovers_.pop_back();
  }
}

void Arena::remove_tenant(TenantId tenant, bool undoing) {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  guard();
  for (RegionId id = 0; id < regions_.size(); ++id) {
    if (regions_[id].live && regions_[id].tenant == tenant) refuse_registered(id);
  }
  std::vector<std::pair<View*, std::vector<PageId>>> unmapped;
  try {
    for (Region& gone : regions_) {
      if (!gone.live || gone.tenant != tenant) continue;
      std::vector<View*> views{&gone.view};
      for (View& view : gone.parked) views.push_back(&view);
      for (View* view : views) {
        unmapped.emplace_back(view, view->shown);
        unmap_slots(*view, 0, view->shown.size());
      }
    }
  } catch (const Error& error) {
    std::vector<PageId> pages;
    for (PageId id = 0; id < pages_.size(); ++id) {
      if (pages_[id].tenant == tenant) pages.push_back(id);
    }
    if (undoing) fail_broken(std::string("undoing an attachment failed: ") + error.what(), pages);
    if (broken_) throw;
    unmapped.pop_back();  // whole or nothing: this one is as it was
    for (auto entry = unmapped.rbegin(); entry != unmapped.rend(); ++entry) {
      try {
        map_slots(*entry->first, 0, entry->second);
      } catch (const Error& second) {
        fail_broken(std::string("removing a tenant failed and so did undoing it: ") + second.what(), pages);
      }
    }
    throw;
  }
  for (Region& gone : regions_) {
    if (!gone.live || gone.tenant != tenant) continue;
    for (const View& view : gone.parked) discard(view.address, gone.reserved_bytes);
    gone.parked.clear();
    discard(gone.view.address, gone.reserved_bytes);
    gone.live = false;
  }
  for (Page& page : pages_) {
    if (page.tenant != tenant || page.owner == Owner::quarantine) continue;
    page.owner = Owner::free;
    page.tenant = kNobody;
  }
  ++epoch_;
}

void Arena::close() {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return;
  undecided_ = false;  // whatever was applied, nobody can undo it any more
  registered_.clear();
  if (fill_stream_ != 0) {  // first: waits for a fill whose end nobody saw
    backend_->destroy_stream(fill_stream_);
    fill_stream_ = 0;
  }
  for (Region& gone : regions_) {
    if (gone.live) release_region(gone);
  }
  release_leftovers();
  if (fill_event_ != 0) {
    backend_->destroy_event(fill_event_);
    fill_event_ = 0;
  }
  while (!pages_.empty()) {
    backend_->destroy_page(pages_.back().handle);
    pages_.pop_back();
  }
  closed_ = true;
}

}  // namespace remap
