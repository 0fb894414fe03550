// SPDX-License-Identifier: Apache-2.0
// Declared ranges: memory that outside code looked up page by page and will go on using at its address. An NCCL or NIC
// registration keeps the pages that it found; re-pointing the region would leave it with other pages than the region shows,
// and its writes would then land in another owner's memory. So such a region stands still.
#include <algorithm>
#include <cstdint>

#include "remap/arena.h"
#include "remap/fork.h"

namespace remap {
namespace {

std::uintptr_t number_of(const std::byte* address) { return reinterpret_cast<std::uintptr_t>(address); }

Error::Value number(std::size_t value) { return static_cast<std::int64_t>(value); }

}  // namespace

void Arena::declare_registered(const std::byte* address, std::size_t bytes) {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  guard();
  const Error::Fields where = {{"address", number(number_of(address))}, {"bytes", number(bytes)}};
  const std::uintptr_t begin = number_of(address);
  if (bytes == 0 || begin + bytes < begin) {
    throw Error(ErrorKind::invalid_argument,
                "A declared range has at least one byte and ends within the address space. Nothing changed.", where);
  }
  if (undecided_) {
    throw Error(ErrorKind::invalid_state,
                "A change is applied and not committed: what regions show may still change. Nothing changed; commit() first.",
                where);
  }
  Registration made{address, bytes, {}};
  for (const auto& [id, region] : regions_) {
    const std::uintptr_t at = number_of(region.view.address);
    if (at >= begin + bytes || begin >= at + region.reserved_bytes) continue;
    if (region.pending) {
      throw Error(ErrorKind::invalid_state,
                  "Region " + std::to_string(id) + " is still to be re-pointed: code that looked its pages up before will have "
                  "the wrong ones. Nothing changed; drain the executor, then register the range and declare it.",
                  {{"region", number(id)}, {"address", number(number_of(address))}});
    }
    made.shown.emplace_back(id, region.view.shown);
  }
  if (made.shown.empty()) {
    throw Error(ErrorKind::invalid_argument, "No region of this arena lies in the declared range. Nothing changed.", where);
  }
  registered_.push_back(std::move(made));
}

void Arena::withdraw_registered(const std::byte* address, std::size_t bytes) {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = std::find_if(registered_.begin(), registered_.end(),
                               [&](const Registration& each) { return each.address == address && each.bytes == bytes; });
  if (at == registered_.end()) {
    throw Error(ErrorKind::invalid_argument,
                "This range was not declared, or was withdrawn already. Nothing changed; give the address and size that "
                "declare_registered was given.",
                {{"address", number(number_of(address))}, {"bytes", number(bytes)}});
  }
  registered_.erase(at);
}

std::vector<std::pair<const std::byte*, std::size_t>> Arena::registered() const {
  refuse_fork(fork_generation_);
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::pair<const std::byte*, std::size_t>> ranges;
  for (const Registration& each : registered_) ranges.emplace_back(each.address, each.bytes);
  return ranges;
}

void Arena::refuse_registered(RegionId id) const {
  for (const Registration& each : registered_) {
    for (const auto& [region, shown] : each.shown) {
      if (region != id) continue;
      throw Error(ErrorKind::invalid_state,
                  "Region " + std::to_string(id) + " lies in a declared range (a network or NCCL registration): the pages that it "
                  "shows must not change. No call was made; deregister the range and call withdraw_registered() first.",
                  {{"region", number(id)}, {"address", number(number_of(each.address))}, {"bytes", number(each.bytes)}});
    }
  }
}

}  // namespace remap
