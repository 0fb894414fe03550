// SPDX-License-Identifier: Apache-2.0
// The backend contract: everything that the core asks of a device, and nothing else.
//
// Implementations: host (memfd; CPU inference), cuda (driver VMM, loaded with dlopen), sim (a virtual clock, sim.h), and the
// decorators fault, limit and trace, which wrap any of them. One conformance suite (tests/python/test_backend_contract*.py)
// runs over every implementation.
//
// Rules for all calls
//   * A call either has its full effect or throws remap::Error and has none.
//   * Sizes and addresses are multiples of granularity() where a call says "aligned"; anything else is refused with
//     ErrorKind::invalid_argument before anything changes.
//   * A range outside every reservation, an unknown or destroyed handle: invalid_argument as well. A range or page that is
//     in the wrong state (mapped already, not mapped, still mapped, access none): invalid_state.
//   * Handles are never 0; 0 means "none".
//   * All calls may be made from any thread. Calls that touch the same range, page, stream or event are ordered by the
//     caller (in this library: the executor's lock for mappings, the prefetcher's lock for copies).
//   * The backend never synchronises the device on its own.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "remap/error.h"

namespace remap {

using PageHandle = std::uint64_t;
using StreamHandle = std::uint64_t;
using EventHandle = std::uint64_t;

enum class Access : std::uint8_t { none, read, read_write };

// How copies read a range of host memory.
enum class HostUse : std::uint8_t {
  locked,  // at the full speed of the device's link: the range is page-locked
  staged,  // through page-locked memory of the backend's, a part at a time: slower, for what is too large to be page-locked, a mapped
           // file say
};

// The kinds of calls, for the decorators, which fail, limit or log them.
enum class Call : std::uint8_t {
  reserve,
  release,
  retire,
  create_page,
  destroy_page,
  map,
  unmap,
  set_access,
  exchange,
  populate,
  allocate_host,
  free_host,
  register_host,
  unregister_host,
  use_host,
  create_stream,
  destroy_stream,
  adopt_stream,
  forget_stream,
  copy,
  copy_batch,
  fill,
  create_event,
  destroy_event,
  record,
  stream_wait,
  query,
  synchronize,
  elapsed,
};
inline constexpr std::size_t kCallKinds = static_cast<std::size_t>(Call::elapsed) + 1;
const char* call_name(Call call) noexcept;

// One of the copies of a batch.
struct CopyRange {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::size_t bytes = 0;
};

// The backend's holdings now. After everything was released all numbers are zero again (tested).
struct Usage {
  std::size_t reserved_bytes = 0;  // address space
  std::size_t page_bytes = 0;      // physical memory in pages, mapped or not
  std::size_t mapped_bytes = 0;    // address space with a page behind it; aliases count each time
  std::size_t host_bytes = 0;      // allocated or registered host memory
  std::size_t mappings = 0;        // separate kernel mappings (VMAs) that the arena's ranges need, an upper bound
  std::size_t streams = 0;
  std::size_t events = 0;
};

// Which device the pages are on, as a tensor library has to be told.
struct DeviceInfo {
  enum class Kind : std::uint8_t { host, cuda, sim };
  Kind kind = Kind::host;
  int index = 0;
  // Whether the processor can read and write mapped pages by itself: always on the host, on cuda with the emulated driver, on
  // sim if it is backed.
  // Tensors over such pages are CPU tensors, and computations on them are the caller's thread's, not a stream's.
  bool host_addressable = true;
};

class SimBackend;

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const char* name() const noexcept = 0;
  virtual std::size_t granularity() const noexcept = 0;
  virtual Usage usage() const = 0;
  virtual DeviceInfo device() const { return {}; }
  // The virtual clock that this backend, or the one it decorates, runs by; null where time is real.
  virtual std::shared_ptr<SimBackend> simulator() { return nullptr; }

  // ---- regions -------------------------------------------------------------------------------------------------
  // Reserves `bytes` (aligned) of addresses, aligned to `alignment` (a power of two >= granularity). No page stands
  // behind it; touching it faults.
  virtual std::byte* reserve(std::size_t bytes, std::size_t alignment) = 0;
  // Pre: the whole of an earlier reservation; nothing mapped in it.
  virtual void release(std::byte* address, std::size_t bytes) = 0;
  // The end of a region that outside code may still look at (a tensor that was kept), or of a part of one that never gets a
  // page. Pre: aligned addresses inside one reservation; nothing mapped in them. Post: they stay reserved, and count as such, until
  // release() of the whole; nothing can be mapped there any more (invalid_state). Where the processor uses the pages by
  // itself (host), the range reads as zeros and can be written, with private memory of the process behind what is written, none of
  // the arena's. On cuda nothing stands behind it: a kernel that uses it fails, as its caller's error. On an unbacked sim no code
  // may touch it, as ever. Retiring again changes nothing.
  virtual void retire(std::byte* address, std::size_t bytes) = 0;

  // ---- pages ---------------------------------------------------------------------------------------------------
  // One page of `bytes` (aligned) of physical memory. Contents are undefined (treat as dirty) unless new_pages_are_zero().
  virtual PageHandle create_page(std::size_t bytes) = 0;
  // Whether the system promises that a new page reads as zero (a memfd does; a GPU driver does not say).
  virtual bool new_pages_are_zero() const noexcept { return false; }
  // Pre: mapped nowhere.
  virtual void destroy_page(PageHandle page) = 0;

  // ---- mappings ------------------------------------------------------------------------------------------------
  // pages[i] stands behind [at + i*page_bytes, at + (i+1)*page_bytes). A page may stand behind several ranges.
  // Pre: the range is reserved and unmapped. Post: mapped, access none until set_access.
  virtual void map(std::byte* at, const PageHandle* pages, std::size_t count, std::size_t page_bytes) = 0;
  // Pre: the range is whole mapped pages. Does not wait for streams or threads that may still use them: the caller does.
  virtual void unmap(std::byte* at, std::size_t bytes) = 0;
  virtual void set_access(std::byte* at, std::size_t bytes, Access access) = 0;
  // Swaps what stands behind two mapped ranges of one size, page tables included, without touching a page.
  // Only where can_exchange(). Between the two states either range may be unmapped for a moment, so no caller may use them.
  virtual bool can_exchange() const noexcept = 0;
  virtual void exchange(std::byte* a, std::byte* b, std::size_t bytes) = 0;
  // Fills the page tables of a mapped, accessible range so that later accesses do not fault. A hint; never changes bytes.
  virtual void populate(std::byte* at, std::size_t bytes) = 0;

  // ---- host memory ---------------------------------------------------------------------------------------------
  // Memory that copies can read at full speed (page-locked on CUDA).
  virtual std::byte* allocate_host(std::size_t bytes) = 0;
  virtual void free_host(std::byte* address, std::size_t bytes) = 0;
  // Says that copies will read the caller's own memory (a memory-mapped weights file, say), so that none of them holds up the thread
  // that enqueues it. From a staged range a copy goes to a region and, on cuda, on a stream that this backend made; its bytes may be
  // read at any time from the call until the copy's end, so earlier work of the stream must not write them.
  virtual void register_host(const std::byte* address, std::size_t bytes, HostUse use) = 0;
  virtual void unregister_host(const std::byte* address, std::size_t bytes) = 0;
  // Changes how copies read a range that was allocated or registered, in place. To `staged`: at once, of every copy that is enqueued
  // from now on; pre: none that was enqueued before is under way. The memory stays page-locked, and counts in no budget, until
  // another call wants its part of that. To `locked`: takes long (7.3 GB took 0.5 s on an H200, one run), and other threads may
  // enqueue copies from the range meanwhile, which are staged.
  virtual void use_host(const std::byte* address, std::size_t bytes, HostUse use) = 0;

  // ---- streams -------------------------------------------------------------------------------------------------
  virtual StreamHandle create_stream() = 0;
  // Waits for the stream's work, then destroys it.
  virtual void destroy_stream(StreamHandle stream) = 0;
  // A stream of the caller's (on cuda: the CUstream, with 1 for the legacy default stream and 2 for the per-thread one), so that
  // copy, fill, record and stream_wait can be used on it. Adopting it again gives the same handle; the caller that adopts it
  // forgets it once, and others may go on. It stays the caller's: it is never waited for nor destroyed here, and does not count
  // in usage(). Pre: it belongs to this device.
  virtual StreamHandle adopt_stream(std::uint64_t native) {
    throw Error(ErrorKind::invalid_argument,
                std::string(name()) + " backend: it has no streams but its own. Nothing was changed; compute on the calling "
                "thread and pass no stream.",
                {{"native", static_cast<std::int64_t>(native)}});
  }
  // One who adopted the stream does not use it any more; the last one's call makes it unknown. Work that was enqueued on it goes on.
  virtual void forget_stream(StreamHandle stream) {
    throw Error(ErrorKind::invalid_argument, std::string(name()) + " backend: it adopted no stream. Nothing was changed.",
                {{"stream", static_cast<std::int64_t>(stream)}});
  }
  // Work on one stream runs in order. A copy that fails makes its stream fail: every event recorded behind it reports
  // the error from query() and synchronize(), so a waiter gets an error and never hangs.
  // A range that lies in a region must be mapped with the access that is needed (cuda refuses others with invalid_state).
  //
  // Where the driver takes a copy, or a batch, in several calls, a later one may fail. Then the copies under way are waited for
  // before the error is thrown, and the contents of the targets are undefined.
  virtual void copy(StreamHandle stream, std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  // copy() of each, as one piece of the stream's work: they may run in any order and at once, so none may write what another reads or
  // writes. One call of the driver's for many of them, where it can do that.
  virtual void copy_batch(StreamHandle stream, const CopyRange* ranges, std::size_t count) = 0;
  virtual void fill(StreamHandle stream, std::byte* to, std::uint8_t value, std::size_t bytes) = 0;

  // ---- events --------------------------------------------------------------------------------------------------
  // timed: elapsed() can ask it. An event that only orders costs the device less.
  virtual EventHandle create_event(bool timed) = 0;
  // Allowed while recorded work is pending: the event is forgotten, the work goes on.
  virtual void destroy_event(EventHandle event) = 0;
  // The event completes when all earlier work of the stream has. Recording again starts it anew.
  virtual void record(EventHandle event, StreamHandle stream) = 0;
  // Later work of the stream waits for the recording that is the event's last one now; a later record() does not change
  // that. An event never recorded counts as complete. If the recording has its stream's error, this stream fails too.
  virtual void stream_wait(StreamHandle stream, EventHandle event) = 0;
  // True when complete. Throws the stream's error.
  virtual bool query(EventHandle event) = 0;
  // Blocks until complete or `timeout` has passed; says whether it is complete. Throws the stream's error.
  virtual bool synchronize(EventHandle event, std::chrono::nanoseconds timeout) = 0;
  // Seconds between two completed events; invalid_state if one was never recorded, is not complete, or was not made for that.
  virtual double elapsed(EventHandle from, EventHandle to) = 0;
};

}  // namespace remap
