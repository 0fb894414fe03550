// SPDX-License-Identifier: Apache-2.0
#include "remap/arena.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <string>
#include <utility>

#include "pointing.h"
#include "remap/fork.h"

namespace remap {
namespace {

Error::Value number(std::size_t value) { return static_cast<std::int64_t>(value); }

std::uintptr_t number_of(const std::byte* address) { return reinterpret_cast<std::uintptr_t>(address); }

}  // namespace

const char* owner_name(Owner owner) noexcept {
  switch (owner) {
    case Owner::free: return "free";
    case Owner::params: return "params";
    case Owner::kv: return "kv";
    case Owner::ring: return "ring";
    case Owner::outside: return "outside";
    case Owner::quarantine: return "quarantine";
  }
  return "unknown";
}

Lease::Lease(std::shared_ptr<Backend> backend, std::shared_ptr<const Arena> arena, std::byte* address, std::size_t bytes)
    : backend_(std::move(backend)),
      arena_(std::move(arena)),
      address_(address),
      bytes_(bytes),
      fork_generation_(fork_generation()) {}

Lease::~Lease() {
  if (fork_generation() != fork_generation_) {
    new std::shared_ptr<Backend>(std::move(backend_));  // leaked on purpose: its threads and mappings are the parent's
    return;
  }
  if (!retired_) return;  // the region's: the arena gives it back
  try {
    backend_->release(address_, bytes_);
  } catch (...) {
    return;  // no caller is left to tell; the backend's own end takes the addresses back
  }
}

Arena::Arena(std::shared_ptr<Backend> backend, const ArenaOptions& options)
    : backend_(std::move(backend)), options_(options), fork_generation_(fork_generation()) {
  if (!backend_) throw Error(ErrorKind::invalid_argument, "An arena needs a backend. Nothing was created.");
  if (options.mode != Mode::aliased && options.mode != Mode::strict) {
    throw Error(ErrorKind::invalid_argument, "An arena's mode is aliased or strict. Nothing was created.");
  }
  const std::size_t grain = backend_->granularity();
  // A power of two, because regions are aligned to pages and drivers align to powers of two only.
  if (options.page_bytes == 0 || options.page_bytes % grain != 0 || (options.page_bytes & (options.page_bytes - 1)) != 0) {
    throw Error(ErrorKind::invalid_argument,
                "page_bytes must be a power of two and a multiple of the backend's granularity of " +
                    std::to_string(grain) + " bytes, not " + std::to_string(options.page_bytes) + ". Nothing was created.",
                {{"page_bytes", number(options.page_bytes)}, {"granularity", number(grain)}});
  }
  const std::size_t count = options.capacity_bytes / options.page_bytes;
  if (count == 0 || count >= kNoPage) {
    throw Error(ErrorKind::invalid_argument,
                "capacity of " + std::to_string(options.capacity_bytes) + " bytes must hold at least one page of " +
                    std::to_string(options.page_bytes) + " bytes, and fewer than " + std::to_string(kNoPage) +
                    ". Nothing was created; give another capacity or another size of pages.",
                {{"capacity", number(options.capacity_bytes)}, {"page_bytes", number(options.page_bytes)}});
  }
  try {
    for (std::size_t i = 0; i < count; ++i) {
      free_.insert(static_cast<PageId>(i));
      pages_.emplace_back();  // before the page is made: nothing can fail behind that
      try {
        pages_.back().handle = backend_->create_page(options.page_bytes);
      } catch (...) {
        pages_.pop_back();
        throw;
      }
      // A page of unknown contents counts as another tenant's: it is zeroed before its first KV use.
      pages_.back().dirty = backend_->new_pages_are_zero() && !options.outside ? kNobody : kUnknownBytes;
      if (options.outside) own(static_cast<PageId>(i), Owner::outside);
    }
  } catch (...) {
    // Reverse order, like every undo here. A page that cannot be destroyed stays the backend's until the backend closes.
    for (auto page = pages_.rbegin(); page != pages_.rend(); ++page) {
      try {
        backend_->destroy_page(page->handle);
      } catch (...) {
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
  } catch (...) {
    return;  // the backend's own destructor takes back the rest
  }
}

void Arena::fail_broken(const char* what, const std::exception_ptr& why, const std::vector<PageId>& pages) {
  broken_ = true;  // before anything is allocated: whatever fails here, the arena is
  for (PageId id : pages) {
    if (id != kNoPage) own(id, Owner::quarantine);
  }
  std::size_t quarantined = 0;
  for (const Page& page : pages_) quarantined += page.owner == Owner::quarantine ? 1 : 0;
  std::string text(what);
  try {
    std::rethrow_exception(why);
  } catch (const std::exception& error) {
    text += error.what();
  } catch (...) {
    text += "unknown";
  }
  throw Error(ErrorKind::arena_broken,
              text + ". The arena is broken, " + std::to_string(quarantined) + " pages are quarantined; only close() is allowed.",
              {{"quarantined_pages", static_cast<std::int64_t>(quarantined)}});
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
  const auto found = regions_.find(id);
  if (found == regions_.end()) {
    throw Error(ErrorKind::invalid_argument, "Unknown region " + std::to_string(id) + ". Nothing changed.",
                {{"region", number(id)}});
  }
  return found->second;
}

void Arena::require_tenant(TenantId tenant) {
  if (tenant < kUnknownBytes) return;
  throw Error(ErrorKind::invalid_argument,
              "Tenants are numbered from 0 to " + std::to_string(kUnknownBytes - 1) + ", not " + std::to_string(tenant) +
                  ". Nothing changed.",
              {{"tenant", number(tenant)}});
}

void Arena::require_pages(const std::vector<PageId>& pages) const {
  for (PageId id : pages) {
    if (id < pages_.size()) continue;
    throw Error(ErrorKind::invalid_argument, "Unknown page " + std::to_string(id) + ". Nothing changed.",
                {{"page", number(id)}, {"total", number(pages_.size())}});
  }
}

// ---- set-up -----------------------------------------------------------------------------------------------------

std::vector<PageId> Arena::take(std::size_t count, Owner owner, TenantId tenant, const std::vector<PageId>& excluded) {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  guard();
  require_tenant(tenant);
  if (owner != Owner::params && owner != Owner::ring && owner != Owner::kv) {
    throw Error(ErrorKind::invalid_argument,
                std::string("Pages are taken as params, ring or kv, not as ") + owner_name(owner) + ". Nothing changed.",
                {{"owner", std::string(owner_name(owner))}});
  }
  require_pages(excluded);
  std::vector<bool> barred(excluded.empty() ? 0 : pages_.size(), false);
  for (PageId id : excluded) barred[id] = true;
  const Region* kv = owner == Owner::kv ? kv_region_of(tenant) : nullptr;
  std::vector<PageId> taken;
  taken.reserve(std::min(count, pages_.size()));
  for (PageId id = 0; id < pages_.size() && taken.size() < count; ++id) {
    if (pages_[id].owner != Owner::free || (!barred.empty() && barred[id])) continue;
    if (kv == nullptr || kv->slot_of[id] == kNoSlot) taken.push_back(id);
  }
  if (taken.size() < count) {
    throw Error(ErrorKind::out_of_memory,
                std::to_string(count) + " pages of " + std::to_string(options_.page_bytes) + " bytes wanted for " +
                    owner_name(owner) + ", " + std::to_string(taken.size()) + " of " + std::to_string(pages_.size()) +
                    (excluded.empty() ? " are free" : " are free and not excluded") +
                    ". Nothing changed; raise capacity by at least " + std::to_string(count - taken.size()) +
                    " pages or detach a tenant.",
                {{"requested", number(count)}, {"free", number(taken.size())}, {"total", number(pages_.size())},
                 {"page_bytes", number(options_.page_bytes)}});
  }
  for (PageId id : taken) {
    own(id, owner);
    pages_[id].tenant = tenant;
    if (pages_[id].dirty == kNobody) pages_[id].dirty = tenant;
  }
  ++epoch_;
  return taken;
}

const Region* Arena::kv_region_of(TenantId tenant) const {
  for (const auto& [id, region] : regions_) {
    if (region.kind == RegionKind::kv && region.tenant == tenant) return &region;
  }
  return nullptr;
}

RegionId Arena::add_region(RegionKind kind, TenantId tenant, const std::string& name, std::size_t slots) {
  require_tenant(tenant);
  if (slots == 0) {
    throw Error(ErrorKind::invalid_argument, "A region needs at least one page. Nothing changed.", {{"slots", number(slots)}});
  }
  if (slots > kMaxSlots || slots > SIZE_MAX / options_.page_bytes || next_region_ == kNoRegion) {
    throw Error(ErrorKind::limit_exceeded,
                "A region has at most " + std::to_string(kMaxSlots) + " pages, not " + std::to_string(slots) +
                    ". Nothing changed; use larger pages.",
                {{"slots", number(slots)}, {"most", number(kMaxSlots)}});
  }
  Region fresh;
  fresh.kind = kind;
  fresh.tenant = tenant;
  fresh.name = name;
  fresh.reserved_bytes = slots * options_.page_bytes;
  fresh.view.shown.assign(slots, kNoPage);
  if (kind == RegionKind::kv) {
    fresh.designated.assign(slots, kNoPage);
    fresh.fixed.assign(slots, kNoPage);
    fresh.slot_of.assign(pages_.size(), kNoSlot);
  }
  make_room_to_discard(1);
  const auto placed = regions_.emplace(next_region_, std::move(fresh)).first;  // before the reservation: nothing fails behind it
  try {
    placed->second.view.address = backend_->reserve(slots * options_.page_bytes, options_.page_bytes);
  } catch (...) {
    regions_.erase(placed);
    throw;
  }
  return next_region_++;
}

RegionId Arena::add_layer_region(TenantId tenant, const std::string& name, const std::vector<PageId>& pages) {
  refuse_fork(fork_generation_);
  const Both locks(*this);
  guard();
  std::vector<PageId> sorted(pages);
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    throw Error(ErrorKind::invalid_argument, "Page " + std::to_string(*twice) + " is named twice. Nothing changed.",
                {{"page", number(*twice)}});
  }
  // A layer has a home, or it streams for good: then it shows its tenant's ring.
  const bool streams = !pages.empty() && pages[0] < pages_.size() && pages_[pages[0]].owner == Owner::ring;
  for (PageId id : pages) {
    const bool its_own = id < pages_.size() && pages_[id].owner == (streams ? Owner::ring : Owner::params) &&
                         pages_[id].tenant == tenant;
    if (!its_own) {
      throw Error(ErrorKind::invalid_argument,
                  "Page " + std::to_string(id) + " is not a " + (streams ? "ring" : "params") + " page of tenant " +
                      std::to_string(tenant) + ". Nothing changed.",
                  {{"page", number(id)}, {"tenant", number(tenant)}});
    }
    if (!streams && pages_[id].home != kNoRegion) {
      throw Error(ErrorKind::invalid_argument,
                  "Page " + std::to_string(id) + " is region " + std::to_string(pages_[id].home) + "'s home. Nothing changed.",
                  {{"page", number(id)}, {"region", number(pages_[id].home)}});
    }
  }
  const RegionId id = add_region(RegionKind::layer, tenant, name, pages.size());
  Region& fresh = regions_.at(id);
  try {
    std::vector<PageId> home = streams ? std::vector<PageId>(pages.size(), kNoPage) : pages;
    fresh.target = pages;
    fresh.home = std::move(home);
    for (PageId page : pages) {
      if (!streams) pages_[page].home = id;
    }
    std::vector<DirtyPage> dirty;
    for (std::size_t slot = 0; slot < pages.size(); ++slot) {
      if (is_dirty(pages[slot], tenant)) dirty.push_back({id, slot_address(fresh.view, slot), pages[slot], tenant});
    }
    Pointer(*this).map(fresh.view, 0, pages);
    std::vector<PageId> zeroed;
    zero_pages(dirty, zeroed);
  } catch (...) {
    if (broken_) throw;
    try {
      Pointer(*this).unmap(fresh.view, 0, pages.size());
    } catch (...) {
      fail_broken("mapping a layer failed and so did undoing it: ", std::current_exception(), pages);
    }
    discard({fresh.view.address, fresh.reserved_bytes, {}});
    regions_.erase(id);
    for (PageId page : pages) {
      if (!streams) pages_[page].home = kNoRegion;
    }
    throw;
  }
  for (PageId page : pages) {
    if (streams) pages_[page].fixed = true;
  }
  ++epoch_;
  return id;
}

RegionId Arena::add_empty_layer_region(TenantId tenant, const std::string& name, std::size_t slots, PageId stand_in) {
  refuse_fork(fork_generation_);
  const Both locks(*this);
  guard();
  if (stand_in != kNoPage) {
    require_pages({stand_in});
    const Page& page = pages_[stand_in];
    if (page.tenant != tenant || (page.owner != Owner::params && page.owner != Owner::ring)) {
      throw Error(ErrorKind::invalid_argument,
                  "Page " + std::to_string(stand_in) + " is not a params or ring page of tenant " + std::to_string(tenant) +
                      ". Nothing changed.",
                  {{"page", number(stand_in)}, {"tenant", number(tenant)}});
    }
  }
  const RegionId id = add_region(RegionKind::layer, tenant, name, slots);
  Region& fresh = regions_.at(id);
  try {
    fresh.home.assign(slots, kNoPage);
    fresh.target.assign(slots, kNoPage);
    if (options_.mode == Mode::aliased && stand_in != kNoPage) {
      Pointer(*this).map(fresh.view, 0, std::vector<PageId>(slots, stand_in));
    }
  } catch (...) {
    if (broken_) throw;
    discard({fresh.view.address, fresh.reserved_bytes, {}});
    regions_.erase(id);
    throw;
  }
  ++epoch_;
  return id;
}

RegionId Arena::add_ring_region(TenantId tenant, std::size_t slots) {
  refuse_fork(fork_generation_);
  const Both locks(*this);
  guard();
  return add_region(RegionKind::ring, tenant, "ring", slots);
}

RegionId Arena::add_kv_region(TenantId tenant, std::size_t slots) {
  refuse_fork(fork_generation_);
  const Both locks(*this);
  guard();
  if (kv_region_of(tenant) != nullptr) {
    throw Error(ErrorKind::invalid_state,
                "Tenant " + std::to_string(tenant) + " has a KV region already, and a page has one place as KV. Nothing changed.",
                {{"tenant", number(tenant)}});
  }
  return add_region(RegionKind::kv, tenant, "kv", slots);
}

Region& Arena::kv_slots(RegionId kv_region, std::size_t first_slot, std::size_t count) {
  Region& kv = region(kv_region);
  if (kv.kind != RegionKind::kv || first_slot > kv.designated.size() || count > kv.designated.size() - first_slot) {
    throw Error(ErrorKind::invalid_argument,
                std::to_string(count) + " slots from " + std::to_string(first_slot) + " on do not lie in KV region " +
                    std::to_string(kv_region) + ". Nothing changed.",
                {{"region", number(kv_region)}, {"first_slot", number(first_slot)}, {"pages", number(count)}});
  }
  return kv;
}

void Arena::designate(RegionId kv_region, std::size_t first_slot, const std::vector<PageId>& pages) {
  refuse_fork(fork_generation_);
  const Both locks(*this);
  guard();
  Region& kv = kv_slots(kv_region, first_slot, pages.size());
  require_pages(pages);
  std::vector<bool> named(pages_.size(), false);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const std::size_t slot = first_slot + i;
    const bool taken = kv.designated[slot] != kNoPage || kv.fixed[slot] != kNoPage;
    if (named[pages[i]] || taken || kv.slot_of[pages[i]] != kNoSlot || pages_[pages[i]].fixed) {
      throw Error(ErrorKind::invalid_argument,
                  "Page " + std::to_string(pages[i]) + " is named twice, has a place in the KV region already, or its slot " +
                      std::to_string(slot) + " is taken. Nothing changed.",
                  {{"page", number(pages[i])}, {"slot", number(slot)}});
    }
    named[pages[i]] = true;
  }
  if (options_.mode == Mode::aliased && !pages.empty()) refuse_registered(kv_region);
  // strict: plans map what they give. A page is never KV before it is designated, so there is nothing to map here.
  for (PageId id : pages) {
    if (pages_[id].owner == Owner::kv && pages_[id].tenant == kv.tenant) {
      throw Error(ErrorKind::invalid_state, "Page " + std::to_string(id) + " is KV before it has a place. Nothing changed.",
                  {{"page", number(id)}});
    }
  }
  if (options_.mode == Mode::aliased) Pointer(*this).map(kv.view, first_slot, pages);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    kv.designated[first_slot + i] = pages[i];
    kv.slot_of[pages[i]] = first_slot + i;
  }
  ++epoch_;
}

void Arena::fix(RegionId kv_region, std::size_t first_slot, const std::vector<PageId>& pages) {
  refuse_fork(fork_generation_);
  const Both locks(*this);
  guard();
  Region& kv = kv_slots(kv_region, first_slot, pages.size());
  require_pages(pages);
  std::vector<DirtyPage> dirty;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const std::size_t slot = first_slot + i;
    const Page& page = pages_[pages[i]];
    const bool its_ring = page.owner == Owner::ring && page.tenant == kv.tenant && kv.slot_of[pages[i]] == kNoSlot;
    if (!its_ring || kv.designated[slot] != kNoPage || kv.view.shown[slot] != kNoPage) {
      throw Error(ErrorKind::invalid_argument,
                  "Page " + std::to_string(pages[i]) + " is not ring of tenant " + std::to_string(kv.tenant) +
                      ", or has a place of its own, or slot " + std::to_string(slot) + " is taken. Nothing changed.",
                  {{"page", number(pages[i])}, {"slot", number(slot)}, {"tenant", number(kv.tenant)}});
    }
    if (is_dirty(pages[i], kv.tenant)) dirty.push_back({kv_region, slot_address(kv.view, slot), pages[i], kv.tenant});
  }
  refuse_registered(kv_region);
  Pointer(*this).map(kv.view, first_slot, pages);
  try {
    std::vector<PageId> zeroed;
    zero_pages(dirty, zeroed);
  } catch (...) {
    if (!broken_) Pointer(*this).unmap(kv.view, first_slot, pages.size());
    throw;
  }
  for (std::size_t i = 0; i < pages.size(); ++i) {
    kv.fixed[first_slot + i] = pages[i];
    pages_[pages[i]].fixed = true;
  }
  ++epoch_;
}

void Arena::seal(RegionId kv_region) {
  refuse_fork(fork_generation_);
  const Both locks(*this);
  guard();
  const Region& kv = region(kv_region);
  if (kv.kind != RegionKind::kv) {
    throw Error(ErrorKind::invalid_argument, "Region " + std::to_string(kv_region) + " is no KV region. Nothing changed.",
                {{"region", number(kv_region)}});
  }
  if (options_.mode == Mode::strict) return;
  const auto empty = [&](std::size_t slot) { return kv.designated[slot] == kNoPage && kv.fixed[slot] == kNoPage; };
  for (std::size_t first = 0; first < kv.designated.size();) {
    std::size_t stop = first;
    while (stop < kv.designated.size() && empty(stop)) ++stop;
    if (stop > first) backend_->retire(slot_address(kv.view, first), (stop - first) * options_.page_bytes);
    first = stop + 1;
  }
}

void Arena::designate_ring(RegionId ring_region, std::size_t first_slot, const std::vector<PageId>& pages) {
  refuse_fork(fork_generation_);
  const Both locks(*this);
  guard();
  Region& ring = region(ring_region);
  if (ring.kind != RegionKind::ring || first_slot > ring.view.shown.size() ||
      pages.size() > ring.view.shown.size() - first_slot) {
    throw Error(ErrorKind::invalid_argument, "The pages do not fit the ring region. Nothing changed.",
                {{"region", number(ring_region)}, {"first_slot", number(first_slot)}, {"pages", number(pages.size())}});
  }
  require_pages(pages);
  const bool its_ring = std::all_of(pages.begin(), pages.end(), [&](PageId id) {
    return pages_[id].owner == Owner::ring && pages_[id].tenant == ring.tenant;
  });
  if (options_.mode == Mode::strict && !its_ring) return;
  refuse_registered(ring_region);
  Pointer(*this).slots(ring.view, first_slot, pages);
}

void Arena::prepare_view(RegionId layer_region, const std::vector<PageId>& pages) {
  refuse_fork(fork_generation_);
  const Both locks(*this);
  guard();
  Region& layer = region(layer_region);
  if (layer.kind != RegionKind::layer || pages.size() != layer.view.shown.size()) {
    throw Error(ErrorKind::invalid_argument, "A view of a layer's region shows as many pages as the region has. Nothing changed.",
                {{"region", number(layer_region)}, {"pages", number(pages.size())}});
  }
  require_pages(pages);
  if (!backend_->can_exchange() || layer.view.shown == pages) return;
  Pointer(*this).spare_view(layer, pages);
}

std::shared_ptr<Lease> Arena::hold(const std::byte* address, std::size_t bytes) {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) throw Error(ErrorKind::invalid_state, "The arena is closed. Nothing changed; open a new session.");
  for (auto& [id, region] : regions_) {
    const std::uintptr_t begin = number_of(region.view.address);
    const std::uintptr_t at = number_of(address);
    if (at < begin || at - begin >= region.reserved_bytes || bytes > region.reserved_bytes - (at - begin)) continue;
    std::shared_ptr<Lease> lease = region.lease.lock();
    if (!lease) {
      lease.reset(new Lease(backend_, weak_from_this().lock(), region.view.address, region.reserved_bytes));
      region.lease = lease;
    }
    return lease;
  }
  throw Error(ErrorKind::invalid_argument,
              "The range of " + std::to_string(bytes) + " bytes is not part of one region of this arena. Nothing changed.",
              {{"address", number(number_of(address))}, {"bytes", number(bytes)}});
}

void Arena::give_back(const Leftover& range) {
  const std::shared_ptr<Lease> lease = range.lease.lock();
  if (!lease) {
    backend_->release(range.address, range.bytes);
    return;
  }
  backend_->retire(range.address, range.bytes);
  // Only now, and with a lease of our own: it cannot end meanwhile, and its end finds both.
  lease->retired_ = true;
  lease->arena_.reset();  // the caller keeps the arena
}

void Arena::make_room_to_discard(std::size_t ranges) {
  if (leftovers_.capacity() - leftovers_.size() < ranges) leftovers_.reserve(2 * (leftovers_.size() + ranges));
}

void Arena::discard(Leftover&& range) noexcept {
  try {
    give_back(range);
  } catch (...) {
    leftovers_.push_back(std::move(range));
  }
}

void Arena::release_leftovers() {
  while (!leftovers_.empty()) {
    give_back(leftovers_.back());
    leftovers_.pop_back();
  }
}

void Arena::release_region(Region& gone) {
  // Accounts after each release: if the backend throws, a region that is still mapped is still in the table and the call can be
  // repeated.
  while (!gone.spare_views.empty()) {
    View& view = gone.spare_views.back();
    Pointer(*this).unmap(view, 0, view.shown.size());
    backend_->release(view.address, gone.reserved_bytes);
    gone.spare_views.pop_back();
  }
  Pointer(*this).unmap(gone.view, 0, gone.view.shown.size());
  give_back({gone.view.address, gone.reserved_bytes, gone.lease});
}

void Arena::remove_tenant(TenantId tenant, bool undoing) {
  refuse_fork(fork_generation_);
  const Both locks(*this);
  guard();
  require_tenant(tenant);
  if (undecided_ && std::find(undecided_of_.begin(), undecided_of_.end(), tenant) != undecided_of_.end()) {
    throw Error(ErrorKind::invalid_state,
                "A change that concerns tenant " + std::to_string(tenant) + " is applied and not committed. Nothing changed; commit it first.",
                {{"tenant", number(tenant)}});
  }
  std::vector<std::pair<View*, std::vector<PageId>>> views;
  for (auto& [id, gone] : regions_) {
    if (gone.tenant != tenant) continue;
    refuse_registered(id);
    views.emplace_back(&gone.view, gone.view.shown);
    for (View& view : gone.spare_views) views.emplace_back(&view, view.shown);
  }
  std::vector<PageId> pages;
  for (PageId id = 0; id < pages_.size(); ++id) {
    if (pages_[id].tenant == tenant) pages.push_back(id);
  }
  make_room_to_discard(views.size());
  std::size_t unmapped = 0;
  try {
    for (; unmapped < views.size(); ++unmapped) Pointer(*this).unmap(*views[unmapped].first, 0, views[unmapped].second.size());
  } catch (...) {
    if (undoing) fail_broken("undoing an attachment failed: ", std::current_exception(), pages);
    if (broken_) throw;
    // Each is whole or nothing: the one that failed is as it was.
    while (unmapped-- > 0) {
      try {
        Pointer(*this).map(*views[unmapped].first, 0, views[unmapped].second);
      } catch (...) {
        fail_broken("removing a tenant failed and so did undoing it: ", std::current_exception(), pages);
      }
    }
    throw;
  }
  for (auto at = regions_.begin(); at != regions_.end();) {
    Region& gone = at->second;
    if (gone.tenant != tenant) {
      ++at;
      continue;
    }
    for (const View& view : gone.spare_views) discard({view.address, gone.reserved_bytes, {}});
    discard({gone.view.address, gone.reserved_bytes, gone.lease});
    at = regions_.erase(at);
  }
  for (Page& page : pages_) {  // a layer's own page may be free, lent or outside
    if (page.home != kNoRegion && regions_.count(page.home) == 0) page.home = kNoRegion;
  }
  for (PageId id : pages) {
    Page& page = pages_[id];
    page.fixed = false;
    if (page.owner == Owner::quarantine) continue;
    own(id, Owner::free);
    page.tenant = kNobody;
  }
  ++epoch_;
}

void Arena::close() {
  refuse_fork(fork_generation_);
  const Both locks(*this);
  if (closed_) return;
  undecided_ = false;  // nothing that is due will be done
  registered_.clear();
  if (fill_stream_ != 0) {  // first: waits for a fill whose end no caller saw
    backend_->destroy_stream(fill_stream_);
    fill_stream_ = 0;
  }
  while (!regions_.empty()) {
    release_region(regions_.begin()->second);
    for (Page& page : pages_) {
      if (page.home == regions_.begin()->first) page.home = kNoRegion;
    }
    regions_.erase(regions_.begin());
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
  free_ = {};
  closed_ = true;
}

}  // namespace remap
