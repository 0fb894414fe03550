// SPDX-License-Identifier: Apache-2.0
// Looking at the arena: each call is a copy of the tables at one moment. The calls of steps and passes take no lock.
#include "remap/arena.h"
#include "remap/fork.h"

namespace remap {

std::byte* Arena::address(RegionId id) const {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  return region(id).view.address;
}

std::size_t Arena::region_bytes(RegionId id) const {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  return region(id).reserved_bytes;
}

std::uint64_t Arena::epoch() const {
  refuse_fork(fork_generation_);
  return epoch_;
}

PageCounts Arena::counts() const {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  PageCounts counts;
  for (const Page& page : pages_) ++counts.by_owner[static_cast<std::size_t>(page.owner)];
  counts.total = pages_.size();
  return counts;
}

PageCounts Arena::counts(TenantId tenant) const {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  PageCounts counts;
  for (const Page& page : pages_) {
    if (page.tenant != tenant) continue;
    ++counts.by_owner[static_cast<std::size_t>(page.owner)];
    ++counts.total;
  }
  return counts;
}

std::vector<Owner> Arena::owners() const {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Owner> owners;
  owners.reserve(pages_.size());
  for (const Page& page : pages_) owners.push_back(page.owner);
  return owners;
}

std::vector<TenantId> Arena::tenants() const {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<TenantId> tenants;
  tenants.reserve(pages_.size());
  for (const Page& page : pages_) tenants.push_back(page.tenant);
  return tenants;
}

bool Arena::knows(TenantId tenant) const {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto region = [&](const auto& each) { return each.second.tenant == tenant; };
  const auto page = [&](const Page& each) { return each.tenant == tenant; };
  return std::any_of(regions_.begin(), regions_.end(), region) || std::any_of(pages_.begin(), pages_.end(), page);
}

std::vector<PageId> Arena::free_pages() const {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<PageId> free;
  for (PageId id = 0; id < pages_.size(); ++id) {
    if (pages_[id].owner == Owner::free) free.push_back(id);
  }
  return free;
}

std::vector<PageId> Arena::shown(RegionId id) const {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  return region(id).view.shown;
}

std::size_t Arena::regions() const {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  return regions_.size();
}

bool Arena::busy() const {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  return !lock.owns_lock();
}

bool Arena::broken() const {
  refuse_fork(fork_generation_);
  return broken_;
}

bool Arena::closed() const {
  refuse_fork(fork_generation_);
  return closed_;
}

}  // namespace remap
