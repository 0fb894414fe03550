// SPDX-License-Identifier: Apache-2.0
// Page-locked host memory, which copies can read at full speed, within a budget.
//
// Buffers are mappings of our own, of the size asked for (rounded to OS pages and no further; allocators for page-locked memory
// round to powers of two, which a machine full of weights cannot afford), of huge pages where the kernel gives them. They
// are filled in by this processor, on several threads (first_touch.h), and then registered with the driver.
//
// On machines where the GPU reads pageable memory through the processor's page tables (attribute 100; GH200, say) the same is
// done, for other reasons: the driver's registration fills in pages there but does not lock them, and copies are at full speed
// from any host memory. There the GPU's memory is a NUMA node of the system as well, and pages that no processor has touched
// could be placed in it when the GPU touches them first. So they are touched here before, which places them on a node with
// processors, and the budget counts the memory of such nodes only (host_budget.h). Not yet run on such a machine.
//
// A range is registered in pieces: the driver holds locks of its own for as long as a registration takes, some tenths of a second a
// GiB, and other threads' launches wait for it. The pieces end at multiples of `piece` behind the OS page in which the range
// begins, and no copy may lie in two of them.
//
// Concurrency: `changing_` makes allocations and registrations one at a time, from the look at the budget to the books, so that
// two cannot both take what is left; they are set-up work, and slow. `books_` guards the table for copies, which only look.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>

#include "backend/cuda/context.h"
#include "backend/cuda/host_budget.h"
#include "backend/mapping_table.h"
#include "remap/backend.h"

namespace remap::cuda {

class LockedMemory {
 public:
  struct Options {
    HostBudget budget;                // not set: the rest that the cgroups and the machine have, at each call
    std::size_t piece = 0;           // bytes of a registration at most: `CudaOptions::host_piece_bytes`
    bool read_only_register = false;  // the device can register memory that may not be written
    bool coherent = false;            // it reads pageable memory through the host's page tables
  };
  LockedMemory(const Context& context, const Options& options);
  ~LockedMemory();  // gives everything back; nothing may be using it
  LockedMemory(const LockedMemory&) = delete;
  LockedMemory& operator=(const LockedMemory&) = delete;

  void add_usage(Usage& usage) const;

  std::byte* allocate(std::size_t bytes) { return allocate(bytes, Kind::allocated); }
  // Beyond the budget: for small amounts of the backend's own.
  std::byte* allocate_slots(std::size_t bytes) { return allocate(bytes, Kind::slots); }
  void free(std::byte* address, std::size_t bytes);
  void register_range(const std::byte* address, std::size_t bytes, HostUse use);
  void unregister_range(const std::byte* address, std::size_t bytes);
  // In place (`Backend::use_host`). Whoever asks for the use of a range meanwhile is told `staged`.
  void use_range(const std::byte* address, std::size_t bytes, HostUse use);

  // How copies use the range of these that this one lies in; none if it lies in none.
  std::optional<HostUse> use_of(const std::byte* at, std::size_t bytes) const;
  // Whether it lies in one that is page-locked.
  bool holds(const std::byte* at, std::size_t bytes) const { return use_of(at, bytes) == HostUse::locked; }
  // How many bytes from here on the driver knows as one piece. Pre: it is held.
  std::size_t piece_at(const std::byte* at) const;

 private:
  enum class Kind : std::uint8_t {
    allocated,   // here, within the budget
    slots,       // here, beyond it
    registered,  // the caller's
  };
  struct Range {
    std::size_t bytes = 0;       // as asked for
    std::size_t span = 0;        // in whole OS pages
    std::size_t file_bytes = 0;  // of `span`, behind which a file stands: while it is page-locked the system counts it as available
    Kind kind = Kind::registered;
    std::size_t registered = 0;  // bytes from its begin on that the driver knows, in whole pieces; all, but where it failed
    HostUse use = HostUse::locked;

    bool owned() const noexcept { return kind == Kind::allocated || kind == Kind::slots; }
    // Bytes of the budget that it takes, and of those the ones with a file behind them. What is staged takes none, though it may be
    // page-locked still: `make_room` ends that.
    std::size_t in_budget() const noexcept { return kind == Kind::slots || use == HostUse::staged ? 0 : span; }
    std::size_t files_in_budget() const noexcept { return std::min(file_bytes, in_budget()); }
  };
  using Ranges = std::map<mapping::Address, Range>;

  std::byte* allocate(std::size_t bytes, Kind kind);
  std::size_t locked_span(mapping::Address at, std::size_t bytes) const noexcept;
  void require_budget(std::size_t locked, std::size_t to_find, const char* call) const;
  // Ends the page locks of staged memory that are in the way of so many bytes more within the budget. Throws as `unlock` does.
  void make_room(std::size_t locked, const char* call);
  std::size_t piece_end(mapping::Address begin, std::size_t offset, std::size_t bytes) const noexcept;
  // registered: 0 before, `bytes` behind; on an error what could not be given back either.
  void lock_pages(std::byte* at, std::size_t bytes, unsigned flags, const char* call, std::size_t& registered) const;
  // Page-locks the caller's memory; throws if it may not be, or has no room in the budget. `registered` as above.
  void lock_readable(std::byte* at, std::size_t bytes, const RangeFacts& facts, const char* call, std::size_t& registered);
  // Gives back the pieces of [at, at + registered), the last first; `registered` counts the rest, also on an error.
  Result unlock_pages(std::byte* at, std::size_t& registered) const;
  void add(Ranges& range);
  // In the books.
  void set(Range& range, HostUse use, std::size_t registered);
  // Gives back what of the range is page-locked, out of the books piece by piece. Throws the driver's error; it can be called again.
  void unlock(Ranges::iterator range, const char* call);
  Ranges::iterator find(const std::byte* address, std::size_t bytes, std::optional<bool> owned, const char* call);
  void drop(const std::byte* address, std::size_t bytes, bool owned, const char* call);

  const Context& context_;
  const Driver& driver_;
  const Options options_;
  const std::size_t os_page_;

  mutable std::mutex changing_;
  mutable std::shared_mutex books_;  // guards all below; written with changing_ held as well
  Ranges ranges_;
  std::size_t bytes_ = 0;
  std::size_t locked_ = 0;
  std::size_t file_bytes_ = 0;
};

}  // namespace remap::cuda
