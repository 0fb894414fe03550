// SPDX-License-Identifier: Apache-2.0
// One tenant's pages as a value: which are its layers', what streams, and through what ring; and the plan from one such value to
// another. Pure: page numbers. Nothing here changes a page's owner or a mapping: Executor does, by the plan.
//
// Each of a tenant's layers has its own pages. `tail` says how many of its last pages come through the ring (0: the layer is
// resident; all of them: the whole layer streams). Streaming through `buffers` ring buffers of `depth` pages frees the tails,
// except for the ring's own pages:
//
//     ring pages  R  subset of  tails,   |R| = buffers * depth,   depth >= the largest tail
//     KV pages       tails - R
//
// Each page of the ring keeps its place whenever it can, since moving it costs driver calls. Tails are aligned to the end of the
// ring's buffers: slot s of a layer of p pages shows slot (buffer slots - p) + s of its buffer, whatever the tail's length. So one
// more page of each layer leaves everything that streams already at its place: the buffers grow in front.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "remap/plan.h"

namespace remap {

using LayerId = std::uint32_t;
using PageList = std::vector<PageId>;
using Ring = std::vector<PageList>;  // of each buffer the pages at the end of its slots

// Where a layer is. elsewhere: another instance computes it; its pages are KV, and its home again when it comes back. unfilled:
// they are at home again, and their bytes are still to come. cold: its tenant has given it up, and no page is its own.
enum class Where : std::uint8_t { home, elsewhere, unfilled, cold };

struct Layer {
  std::shared_ptr<const PageList> own;  // its home, or what is its home again when it comes back
  std::uint32_t pages = 0;              // of its region; of a layer without a home that streams for good more than it owns
  std::uint32_t tail = 0;
  Where where = Where::home;
  RegionId region = 0;

  bool hidden() const noexcept { return where == Where::elsewhere || where == Where::cold; }  // its region shows nothing
  std::uint32_t size() const noexcept { return where == Where::home ? pages : 0; }
  std::uint32_t absent() const noexcept { return hidden() ? static_cast<std::uint32_t>(own->size()) : tail; }
};

// How many of each layer's last pages stream, through `buffers` ring buffers of `depth` pages.
struct Streaming {
  std::vector<std::uint32_t> tails;
  std::uint32_t buffers = 0;
  std::uint32_t depth = 0;
};

struct TenantPages {
  TenantId tenant = kNobody;
  std::vector<Layer> layers;
  RegionId ring_region = 0;
  Ring ring;
  std::vector<LayerId> ring_preference;  // layers whose homes the ring's region shows from the start
  PageList lent;                         // ascending: pages of tails that are free, or another tenant's KV
  std::uint32_t buffer_pages = 0;        // slots of one buffer in the ring's region
  std::optional<std::pair<LayerId, LayerId>> computed;  // the layers that passes compute, [first, end), where that is a part

  std::uint32_t depth() const noexcept { return ring.empty() ? 0 : static_cast<std::uint32_t>(ring[0].size()); }
  Streaming streaming() const;
  std::vector<LayerId> streamed() const;  // ascending: the j-th uses ring buffer j mod buffers
  bool for_good() const noexcept;         // whether layers without a home stream, so that what streams never changes
  PageList away(LayerId layer) const;     // the pages of its home that stream: they are ring, KV or lent
  std::vector<LayerId> lending() const;   // streamed layers of which others have pages, or may take some
  std::vector<LayerId> ring_layers() const;  // streamed layers whose homes lend pages to the ring
  PageList kv_from_homes() const;         // ascending: pages of its layers, streamed or elsewhere, that are its own KV now
  PageList held() const;                  // pages of its layers that are the layers' or the ring's now
  PageList shows(LayerId layer) const;    // what the layer's region shows, or will; nothing if it is elsewhere

  // Other states of the same tenant. InvalidArgument: fewer streamed layers than buffers + 1 (fields buffers, streamed), or tails
  // too small for the ring (buffers, needed_pages, available_pages).
  TenantPages with_streaming(const Streaming& target) const;
  TenantPages holding(const std::vector<bool>& layers, const Streaming& target, const std::vector<bool>& unfilled) const;
  TenantPages given_up(const std::vector<bool>& layers) const;  // these, all that stream among them: nothing streams then
  TenantPages with_homes(const std::vector<std::pair<LayerId, PageList>>& homes) const;  // of layers that were cold
  TenantPages filled(LayerId layer) const;

  // Pages for the ring from the tails of `target`. Nothing: they are too small for it.
  std::optional<Ring> ring_of(const Streaming& target) const;
  // The lent pages that must be free before a plan for `target` can be applied: they come home, or into the ring.
  PageList to_fetch(const Streaming& target) const;
};

bool operator==(const TenantPages& left, const TenantPages& right);

// The plan from one state of a tenant's pages to another, and what follows from it.
struct Transition {
  struct Load {
    LayerId layer;
    std::uint32_t first, pages;
  };
  Plan plan;
  TenantPages there;
  std::vector<Load> home;     // pages that are at home again, to be loaded from the master copy
  std::vector<LayerId> held;  // layers whose region the worker re-points
  PageList gained, lost;      // pages that become KV, and that stop being KV; the blocks of these must be empty
  bool ring_moves = false;    // copies in flight into the old ring must have finished before the plan is applied
  bool ring_changes = false;
  bool frees = false;

  std::vector<LayerId> reload() const;  // the layers of `home`
  // What is loaded, re-pointed, streamed and waited for with both, one after the other. Its steps are the later one's.
  Transition followed_by(const Transition& later) const;
};

// Pages that layers give away, and that are no ring's, become the tenant's own KV or (to_free) free, to be lent to others; of a home
// that goes they are free. Lent pages that come home come from free (`to_fetch`). The ring's pages are taken from KV only if nothing
// else is left. Pages change hands once, and only those whose owner differs.
Transition plan_between(const TenantPages& now, const TenantPages& there, bool to_free = false);
// These free pages become the tenant's KV (give), or its KV pages become free. Touches no layer.
Transition plan_free_pages(const TenantPages& now, const PageList& pages, bool give);

}  // namespace remap
