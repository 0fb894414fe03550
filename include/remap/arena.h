// SPDX-License-Identifier: Apache-2.0
// The Arena: all pages of one device, all regions over them, and who owns each page.
//
// It holds the tables and the set-up calls (attach, detach, close). After set-up only the Executor (executor.h) changes
// mappings or owners, and only by whole plans.
//
// Invariants, checked by check() after every step of every test:
//   A1  free + params + kv + ring + outside + quarantine = total                  (conservation; each page has one owner)
//   A2  backend.usage().page_bytes = total * page_bytes                           (memory is bounded by capacity)
//   A3  owner free or outside  <=>  tenant kNobody (quarantined pages keep theirs)
//   A4  KV region, every slot s with a designated page p:
//         aliased: shown(s) = p.    strict: shown(s) = p if owner(p) = kv and tenant(p) = region's tenant, else nothing,
//         or p still while a change is not committed
//       A slot that is fixed shows its page in both modes: it is the tenant's ring, and may stand in several such slots
//   A5  KV region: a page is designated to at most one slot of it, and none that is fixed
//   A6  layer region: shown = target unless a deferred re-pointing is pending; the target is a head, then a tail, of which one
//       may be empty: the head's pages are params of its tenant and stand where they stand in its home, the tail's are the
//       ring of its tenant (a ring buffer may be made of the layer's own home)
//       Or it is empty, since another instance computes the layer, or its tenant has given it up: then strict mode shows nothing, and
//       aliased mode whatever was there
//   A7  ring region: every page shown in use is owned by the ring of its tenant   (aliased: or designated ahead of use)
//   A8  no slot shows a quarantined page, unless the arena is broken
//   A9  a region in a declared range shows what it showed when it was declared, and nothing is to change that
//   A10 a page that a tenant owns and that any other could have written is marked so (dirty is not kNobody)
//   A11 a page that is outside, or was, is marked as of unknown bytes until a tenant of this arena has had it zeroed
//   A12 a layer's region shows a page that is outside only while a deferred re-pointing is pending, for which passes wait
//   A13 a page is the home of at most one layer's region, once, and knows which; a region without a home shows its tenant's ring for
//       good, or is empty
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "remap/backend.h"
#include "remap/page_set.h"
#include "remap/plan.h"

namespace remap {

class Arena;
class Lease;

// aliased: a KV region maps every page that it could ever be given, from the start; a page's owner says which view is live.
// strict:  only what is owned is mapped, so that a stray access faults. Same results otherwise.
enum class Mode : std::uint8_t { aliased, strict };

enum class RegionKind : std::uint8_t { layer, ring, kv };

struct ArenaOptions {
  std::size_t capacity_bytes = 0;
  std::size_t page_bytes = std::size_t{2} << 20;  // a power of two and a multiple of the backend's granularity
  Mode mode = Mode::aliased;
  bool outside = false;  // other processes have all of the pages at first: plans bring those in that this one is given
};

// The events that a plan's effects on memory are ordered behind, where computation runs on streams. Both 0: nothing is in flight.
struct Ordering {
  // Behind the last reader and writer of what the plan moves, copies of the prefetcher's included. Taken in by apply(): it may
  // be recorded anew or destroyed once that has returned.
  EventHandle after = 0;
  // Pages that change tenant are zeroed by fills enqueued here, and the host does not wait. The caller promises that the tenant
  // touches them only behind it. 0: zeroed on a stream of the arena's, and waited for. (strict: always waited for.)
  StreamHandle zero_on = 0;
};

struct PageCounts {
  std::array<std::size_t, kOwners> by_owner{};
  std::size_t total = 0;
  std::size_t operator[](Owner owner) const { return by_owner[static_cast<std::size_t>(owner)]; }
};

struct Page {
  PageHandle handle = 0;
  Owner owner = Owner::free;
  TenantId tenant = kNobody;
  TenantId dirty = kNobody;  // whose bytes it may hold; kNobody: reads as zero
  TenantId due = kNobody;    // its tenant, for which it is zeroed behind the change (Executor::zero_due)
  RegionId home = kNoRegion;  // the layer's region whose home it belongs to
  bool fixed = false;         // it stands in fixed slots, and stays its tenant's ring until that is removed
};

// As Page::dirty: its contents are unknown, so that any tenant has it zeroed. No tenant has this number, or kNobody.
inline constexpr TenantId kUnknownBytes = kNobody - 1;

// More slots than this are refused for a region: the arena's notes of each take memory at once.
inline constexpr std::size_t kMaxSlots = std::size_t{1} << 24;

// A page to be zeroed before `tenant` may see it, at an address where it is mapped.
struct DirtyPage {
  RegionId region = 0;
  std::byte* at = nullptr;
  PageId page = 0;
  TenantId tenant = kNobody;
};

inline constexpr std::size_t kNoSlot = ~std::size_t{0};

// Keeps the addresses of one region from being used for anything else while a tensor over them lives. As long as the region is
// there, the lease keeps its arena. When the region goes first, the backend puts zeros behind the addresses (Backend::retire),
// and the last tensor's end gives them back. A lease may end on any thread and at any time; in a forked child its end does nothing.
class Lease {
 public:
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  std::byte* address() const noexcept { return address_; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  friend class Arena;
  Lease(std::shared_ptr<Backend> backend, std::shared_ptr<const Arena> arena, std::byte* address, std::size_t bytes);

  std::shared_ptr<Backend> backend_;
  std::shared_ptr<const Arena> arena_;  // null once the region is gone
  std::byte* const address_;
  const std::size_t bytes_;
  bool retired_ = false;
  const unsigned fork_generation_;
};

// One view: a range of addresses and what stands behind each of its slots.
struct View {
  std::byte* address = nullptr;
  std::vector<PageId> shown;  // kNoPage: nothing mapped
};

struct Region {
  RegionKind kind = RegionKind::layer;
  TenantId tenant = kNobody;
  std::string name;
  std::size_t reserved_bytes = 0;
  View view;                        // the address that tensors live at: never changes
  std::vector<PageId> home;         // layer: its own pages; kNoPage in all slots: it has none
  std::vector<PageId> target;       // layer: what view shows, or will once the deferred step is done
  std::uint64_t targets = 0;        // layer: how many plans have set it, or left it to the worker anew
  bool undecided = false;           // layer: the last of them is applied and not committed
  std::vector<View> spare_views;    // layer, where the backend can exchange: ready-made views to swap with
  bool pending = false;             // layer: a deferred step will make view show target
  std::vector<PageId> designated;   // kv: the page that stands at each slot whenever the slot is mapped
  std::vector<std::size_t> slot_of; // kv: its inverse, indexed by page; kNoSlot where there is none
  std::vector<PageId> fixed;        // kv: the page that its slot shows for good; kNoPage where there is none
  std::weak_ptr<Lease> lease;       // of the tensors over view
};

// A range of addresses whose pages code outside of the core has looked up, and what the regions in it showed then.
struct Registration {
  const std::byte* address = nullptr;
  std::size_t bytes = 0;
  std::vector<std::pair<RegionId, std::vector<PageId>>> shown;
};

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  // Creates every page at once; no page goes back to the backend before close(). Throws OutOfMemory or LimitExceeded
  // and holds nothing then.
  Arena(std::shared_ptr<Backend> backend, const ArenaOptions& options);
  ~Arena();  // close(), errors swallowed: a destructor must not throw
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // ---- set-up: each call is whole or changes nothing -----------------------------------------------------------
  // Tenants are 0 .. kUnknownBytes - 1; any other number is InvalidArgument. A region has 1 .. kMaxSlots slots: more are
  // LimitExceeded (fields: slots, most), none are InvalidArgument.
  //
  // Free pages, lowest ids first (so that they are contiguous in the device where possible), never one of `excluded`.
  // owner: params, ring or kv (no page that has a place in a KV region of the tenant's: those are a plan's to give).
  // OutOfMemory (fields: requested, free = what could have been taken) if there are fewer; InvalidArgument for a page in
  // `excluded` that does not exist.
  std::vector<PageId> take(std::size_t count, Owner owner, TenantId tenant, const std::vector<PageId>& excluded = {});
  // A region that shows `pages`, populated and writable. params pages are its home, which it shows for now; also used for what is
  // never streamed. ring pages stay the tenant's ring: a layer without a home shows them for good, and may share them with others.
  RegionId add_layer_region(TenantId tenant, const std::string& name, const std::vector<PageId>& pages);
  // A region of `slots` without a home, which is empty until a plan gives it one and points it there (SetHome). stand_in: the
  // page that all of its slots show meanwhile in aliased mode, so that looking there never ends the process: a params or ring
  // page of the tenant's own, or kNoPage for nothing. No caller may write there.
  RegionId add_empty_layer_region(TenantId tenant, const std::string& name, std::size_t slots, PageId stand_in = kNoPage);
  // A region of `slots` with nothing behind it; the ring's own view of its buffers, or the KV cache (one a tenant).
  RegionId add_ring_region(TenantId tenant, std::size_t slots);
  RegionId add_kv_region(TenantId tenant, std::size_t slots);
  // Says which pages, each once, stand at [first_slot, ...) of a KV region whenever they are KV (aliased: maps them now).
  void designate(RegionId kv_region, std::size_t first_slot, const std::vector<PageId>& pages);
  // These slots of a KV region show these pages for good, whatever plans do. The pages are the tenant's ring and stay so: a page
  // may stand in many slots, for the parts of blocks that are copied in one after another. Zeroed here, if another tenant wrote
  // into them. InvalidArgument if they do not fit, a slot is taken, or a page is not the tenant's ring or has a place of its own.
  void fix(RegionId kv_region, std::size_t first_slot, const std::vector<PageId>& pages);
  // No more pages get a place in the KV region. aliased: slots without one are retired, so that looking at all of the region never
  // ends the process. strict: they stay as all that is not owned.
  void seal(RegionId kv_region);
  // Maps ring slots ahead of use. strict: only pages that are the tenant's ring already; others wait for the plan.
  void designate_ring(RegionId ring_region, std::size_t first_slot, const std::vector<PageId>& pages);
  // Makes a ready view of a layer's region so that pointing there later is one exchange. No-op without can_exchange().
  void prepare_view(RegionId layer_region, const std::vector<PageId>& pages);
  // Releases all regions of the tenant; all its pages become free (and dirty). Pre: no thread uses them any more, no stream
  // either: unmapping does not wait. InvalidState if one lies in a declared range, or if a change that concerns the tenant is
  // applied and not committed: what is due needs them. Tensors over the regions read zeros from then on (Lease). Addresses
  // that the backend does not take back are kept until close(): they cost no memory.
  // undoing: an attachment that failed is taken back; if that fails too the arena is broken (ArenaBroken).
  void remove_tenant(TenantId tenant, bool undoing = false);
  // Says that outside code has looked up the pages behind [address, address + bytes) and will go on using them (an NCCL or
  // NIC registration). The pages that intersecting regions show must not change any more: plans that would change them,
  // designate(), designate_ring() and remove_tenant() are refused with InvalidState (fields: region, address, bytes).
  // Owners may change: in aliased mode a KV region shows the same pages whichever tenant owns them. Ranges may overlap; each is
  // withdrawn by the same address and size. Throws InvalidArgument if no region lies in the range, InvalidState if one of
  // them is still to be re-pointed, or a change is applied and not committed; nothing has changed then.
  void declare_registered(const std::byte* address, std::size_t bytes);
  // Takes one declaration back. InvalidArgument if there is none.
  void withdraw_registered(const std::byte* address, std::size_t bytes);
  // Waits for nothing: the caller has stopped using every region. Idempotent. Everything goes back to the backend.
  void close();

  // The lease that a tensor over [address, address + bytes) of a region has to keep. InvalidArgument if that is not part of one
  // region.
  std::shared_ptr<Lease> hold(const std::byte* address, std::size_t bytes);

  // ---- looking -------------------------------------------------------------------------------------------------
  // Declared ranges, one entry a declaration.
  std::vector<std::pair<const std::byte*, std::size_t>> registered() const;
  std::byte* address(RegionId region) const;
  std::size_t region_bytes(RegionId region) const;
  std::size_t page_bytes() const noexcept { return options_.page_bytes; }
  std::size_t total_pages() const noexcept { return pages_.size(); }
  Mode mode() const noexcept { return options_.mode; }
  std::uint64_t epoch() const;
  PageCounts counts() const;
  PageCounts counts(TenantId tenant) const;
  std::vector<Owner> owners() const;
  std::vector<TenantId> tenants() const;   // of each page; kNobody: it is free (or was quarantined while free)
  std::vector<PageId> free_pages() const;  // ascending
  bool knows(TenantId tenant) const;       // whether a region or a page is the tenant's
  std::vector<PageId> shown(RegionId region) const;
  std::size_t regions() const;  // how many there are
  bool broken() const;
  bool closed() const;
  bool busy() const;  // whether a look would wait now
  Backend& backend() const noexcept { return *backend_; }
  // Throws std::logic_error naming the violated invariant.
  void check() const;

 private:
  friend class Draft;
  friend class Executor;
  friend class Pointer;

  // Two locks, always taken in this order, and who may do what:
  //   pointing_mutex_  for changing what an address shows: it is held through the driver's calls, which may take milliseconds.
  //   mutex_           the tables. The re-pointing worker holds it only to read the targets and to write down its results.
  // Holders of both write the views and the pages that they show (regions_, View::shown, spare_views, designated, slot_of,
  // leftovers_), so a holder of either may read them. All other tables are mutex_'s alone. epoch_, broken_, closed_ and
  // undecided_ are written under mutex_ and read without a lock: a step or a pass that only looks does not wait.
  // Set-up calls and plans that map or unmap in apply() hold both until they return: a check, the change and the bookkeeping are
  // one step, and the time is their caller's own. Plans that call no driver (growing, in aliased mode) take mutex_ alone.
  struct Both {
    explicit Both(Arena& arena) : pointing(arena.pointing_mutex_), tables(arena.mutex_) {}
    std::lock_guard<std::mutex> pointing;
    std::lock_guard<std::mutex> tables;
  };

  // Pre of all below: mutex_ is held. Where a mapping changes: both are.
  void guard() const;                    // ForkedProcess, closed, ArenaBroken
  Region& region(RegionId id);           // InvalidArgument. (Either lock will do.)
  const Region& region(RegionId id) const;
  Region& kv_slots(RegionId kv_region, std::size_t first_slot, std::size_t count);  // InvalidArgument if it has not those slots
  RegionId add_region(RegionKind kind, TenantId tenant, const std::string& name, std::size_t slots);
  std::byte* slot_address(const View& view, std::size_t slot) const { return view.address + slot * options_.page_bytes; }
  const Region* kv_region_of(TenantId tenant) const;
  void release_region(Region& region);
  // An empty reservation of a region or of a spare view. give_back throws; discard leaves what fails to close(), and needs
  // room for that, made before.
  struct Leftover {
    std::byte* address = nullptr;
    std::size_t bytes = 0;
    std::weak_ptr<Lease> lease;
  };
  void give_back(const Leftover& range);
  void discard(Leftover&& range) noexcept;
  void make_room_to_discard(std::size_t ranges);
  void release_leftovers();
  static void require_tenant(TenantId tenant);
  void own(PageId id, Owner owner) noexcept {  // all owners are written here
    pages_[id].owner = owner;
    owner == Owner::free ? free_.insert(id) : free_.erase(id);  // there is room for it
  }
  void require_pages(const std::vector<PageId>& pages) const;
  void refuse_registered(RegionId id) const;  // InvalidState if the region lies in a declared range
  [[noreturn]] void fail_broken(const char* what, const std::exception_ptr& why, const std::vector<PageId>& pages);

  // ---- zeroing: zeroing.cpp; all pre: lock held --------------------------------------------------------------
  // Whether the page may hold bytes that are not `tenant`'s: it is zeroed before `tenant` sees it.
  bool is_dirty(PageId id, TenantId tenant) const;
  void open_fills();
  void drop_fill_stream();
  // Pages became free under this event: they are zeroed behind it before another tenant sees them.
  void gather(EventHandle after);
  // Zeroes pages (ascending by address) and waits for it. tables: this lock, if it is to be let go of meanwhile: nothing else may change
  // these pages then. `zeroed`: the pages that read zero now.
  void zero_pages(const std::vector<DirtyPage>& pages, std::vector<PageId>& zeroed, std::unique_lock<std::mutex>* tables = nullptr);
  // The same by fills on this stream, without waiting. `enqueued`: the pages whose fill is on its way, also on an error.
  void enqueue_zeroing(const std::vector<DirtyPage>& pages, StreamHandle stream, std::vector<PageId>& enqueued);

  std::shared_ptr<Backend> backend_;
  ArenaOptions options_;
  std::mutex pointing_mutex_;
  // One lock for all tables: they change a few times a second at most, and never per layer. The engine's hot path
  // (Prefetcher::wait and done) does not take it.
  mutable std::mutex mutex_;
  std::vector<Page> pages_;
  PageSet free_;                        // those that are free
  std::map<RegionId, Region> regions_;  // addresses stable
  RegionId next_region_ = 0;            // ids are never used again
  std::vector<Registration> registered_;
  std::vector<Leftover> leftovers_;  // empty reservations that the backend did not take back yet
  StreamHandle fill_stream_ = 0;  // made when a page first changes tenant, or becomes free behind an event
  EventHandle fill_event_ = 0;
  bool gathered_ = false;         // fill_stream_ may still wait for a stream; fill_event_ is behind them all
  std::atomic<std::uint64_t> epoch_{1};
  std::atomic<bool> undecided_{false};  // a change is applied and not committed
  std::vector<TenantId> undecided_of_;  // the tenants whose pages or regions it concerns
  std::atomic<bool> broken_{false};
  std::atomic<bool> closed_{false};
  unsigned fork_generation_ = 0;
};

}  // namespace remap
