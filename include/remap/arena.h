// The Arena: all pages of one device, all regions over them, and who owns each page.
//
// It holds the tables and the set-up calls (attach, detach, close). After set-up only the Executor (executor.h) changes
// mappings or owners, and only by whole plans.
//
// Invariants, checked by check() after every step of every test:
//   A1  free + params + kv + ring + quarantine = total                            (conservation; each page has one owner)
//   A2  backend.usage().page_bytes = total * page_bytes                           (memory is bounded by capacity)
//   A3  owner free  <=>  tenant nobody (quarantined pages keep theirs)
//   A4  KV region, every slot s with a designated page p:
//         aliased: shown(s) = p.    strict: shown(s) = p if owner(p) = kv and tenant(p) = region's tenant, else nothing
//   A5  KV region: a page is designated to at most one slot of it
//   A6  layer region: shown = target unless a deferred re-pointing is pending; the target's pages are all params of its tenant
//       (and then they are its home), or all the ring of its tenant (a ring buffer may be made of the layer's own home)
//   A7  ring region: every page shown in use is owned by the ring of its tenant   (aliased: or designated ahead of use)
//   A8  no slot shows a quarantined page, unless the arena is broken
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "remap/backend.h"
#include "remap/plan.h"

namespace remap {

// aliased: a KV region maps every page that it could ever be given, from the start; a page's owner says which view is live.
// strict:  only what is owned is mapped, so that a stray access faults. Same results otherwise.
enum class Mode : std::uint8_t { aliased, strict };

enum class RegionKind : std::uint8_t { layer, ring, kv };

struct ArenaOptions {
  std::size_t capacity_bytes = 0;
  std::size_t page_bytes = std::size_t{2} << 20;
  Mode mode = Mode::aliased;
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
};

inline constexpr std::size_t kNoSlot = ~std::size_t{0};

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
  std::vector<PageId> home;         // layer: its own pages
  std::vector<PageId> target;       // layer: what view shows, or will once the deferred step is done
  std::vector<View> parked;         // layer, where the backend can exchange: ready-made views to swap with
  bool pending = false;             // layer: a deferred step will make view show target
  std::vector<PageId> designated;   // kv: the page that stands at each slot whenever the slot is mapped
  std::vector<std::size_t> slot_of; // kv: its inverse, indexed by page; kNoSlot where there is none
  bool live = true;
};

class Arena {
 public:
  // Creates every page at once; no page goes back to the backend before close(). Throws OutOfMemory or LimitExceeded
  // and holds nothing then.
  Arena(std::shared_ptr<Backend> backend, const ArenaOptions& options);
  ~Arena();  // close(), errors swallowed: a destructor must not throw
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // ---- set-up: each call is whole or changes nothing -----------------------------------------------------------
  // Free pages, lowest ids first (so that they are contiguous in the device where possible).
  std::vector<PageId> take(std::size_t count, Owner owner, TenantId tenant);
  // A region that shows `home` for now, populated and writable. Also used for what is never streamed.
  RegionId add_layer_region(TenantId tenant, const std::string& name, const std::vector<PageId>& home);
  // A region of `slots` with nothing behind it; the ring's own view of its buffers, or the KV cache.
  RegionId add_ring_region(TenantId tenant, std::size_t slots);
  RegionId add_kv_region(TenantId tenant, std::size_t slots);
  // Says which pages stand at [first_slot, ...) of a KV region whenever they are KV (aliased: maps them now).
  void designate(RegionId kv_region, std::size_t first_slot, const std::vector<PageId>& pages);
  // Maps ring slots ahead of use (aliased only; strict waits for the plan).
  void designate_ring(RegionId ring_region, std::size_t first_slot, const std::vector<PageId>& pages);
  // Makes a ready view of a layer's region so that pointing there later is one exchange. No-op without can_exchange().
  void prepare_view(RegionId layer_region, const std::vector<PageId>& pages);
  // Releases all regions of the tenant; all its pages become free (and dirty). Pre: nobody uses them any more. Addresses that
  // the backend does not take back are kept until close(): they cost no memory.
  // undoing: an attachment that failed is taken back; if that fails too the arena is broken (ArenaBroken).
  void remove_tenant(TenantId tenant, bool undoing = false);
  // Waits for nothing: the caller has stopped using every region. Idempotent. Everything goes back to the backend.
  void close();

  // ---- looking -------------------------------------------------------------------------------------------------
  std::byte* address(RegionId region) const;
  std::size_t region_bytes(RegionId region) const;
  std::size_t page_bytes() const noexcept { return options_.page_bytes; }
  std::size_t total_pages() const noexcept { return pages_.size(); }
  Mode mode() const noexcept { return options_.mode; }
  std::uint64_t epoch() const;
  PageCounts counts() const;
  PageCounts counts(TenantId tenant) const;
  std::vector<Owner> owners() const;
  std::vector<PageId> free_pages() const;  // ascending
  std::vector<PageId> shown(RegionId region) const;
  bool broken() const;
  bool closed() const;
  Backend& backend() const noexcept { return *backend_; }
  // Throws std::logic_error naming the violated invariant.
  void check() const;

 private:
  friend class Executor;
  friend class Pointer;

  void guard() const;                    // pre: lock held; ForkedProcess, closed, ArenaBroken
  Region& region(RegionId id);           // pre: lock held; InvalidArgument
  const Region& region(RegionId id) const;
  RegionId add_region(RegionKind kind, TenantId tenant, const std::string& name, std::size_t slots);
  void map_slots(View& view, std::size_t first_slot, const std::vector<PageId>& pages);    // whole or nothing
  void unmap_slots(View& view, std::size_t first_slot, std::size_t count);
  std::byte* slot_address(const View& view, std::size_t slot) const { return view.address + slot * options_.page_bytes; }
  void release_region(Region& region);
  void discard(std::byte* address, std::size_t bytes);  // an empty reservation; if it fails, close() tries again
  void release_leftovers();
  // Zeroes what other tenants may have left in the pages that `view` shows there, and waits for it (promise 6: a page that
  // changes tenant reads zero). Returns the bytes written; usually none.
  std::size_t cleanse(const View& view, std::size_t first_slot, std::size_t count, TenantId tenant);
  [[noreturn]] void fail_broken(const std::string& what, const std::vector<PageId>& pages);

  std::shared_ptr<Backend> backend_;
  ArenaOptions options_;
  // One lock for all tables: they change a few times a second at most, and never per layer. The engine's hot path
  // (Prefetcher::wait and done) does not take it.
  mutable std::mutex mutex_;
  std::vector<Page> pages_;
  std::deque<Region> regions_;  // index = RegionId, addresses stable; removed ones stay with live = false, ids are not reused
  std::vector<std::pair<std::byte*, std::size_t>> leftovers_;  // empty reservations that the backend did not take back yet
  StreamHandle fill_stream_ = 0;  // made when a page first changes tenant
  EventHandle fill_event_ = 0;
  std::uint64_t epoch_ = 1;
  bool broken_ = false;
  bool closed_ = false;
  unsigned fork_generation_ = 0;
};

}  // namespace remap
