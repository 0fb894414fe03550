// SPDX-License-Identifier: Apache-2.0
// The decorators that have more to say than a Backend: FaultBackend makes calls fail, TraceBackend counts and logs them,
// and replay() does what a log says on another backend. Made by make_fault_backend and make_trace_backend (backends.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "remap/backend.h"
#include "remap/backends.h"

namespace remap {

// A fault is thrown before the inner call is made, so a failed call has no effect, as the contract says. The error carries
// the fields call (its name) and nth (how many calls of that kind, or of any kind for arm_any, it was since the decorator
// was made). All methods may be called from any thread. Calls that make something (create_page) and calls that give
// something back (unmap, destroy_page) can be armed alike; usage(), granularity() and the like are neither counted nor failed.
class FaultBackend : public Backend {
 public:
  // The nth next call of this kind fails (1 = the next); `forever`: and all after it. Replaces an earlier arm of that kind.
  virtual void arm(Call call, std::uint64_t nth, bool forever = false, ErrorKind kind = ErrorKind::driver) = 0;
  // The same, counting calls of every kind.
  virtual void arm_any(std::uint64_t nth, bool forever = false, ErrorKind kind = ErrorKind::driver) = 0;
  // The nth next copy is accepted, but fails while it runs: only half of its bytes arrive, the copies behind it on its
  // stream do not arrive at all, events recorded behind it throw DriverError from query() and synchronize(), and streams
  // that wait for such an event fail too. A failed stream stays failed until it is destroyed.
  virtual void fail_async_copy(std::uint64_t nth, bool forever = false) = 0;
  // Forgets all of the above. Streams that have failed stay failed.
  virtual void disarm() = 0;

  virtual std::uint64_t calls(Call call) const = 0;  // made so far, failed ones included
  virtual std::uint64_t calls() const = 0;
};

// Logs every call, in an order that can be replayed even if many threads made the calls. Counters are exact at all times
// and cost one atomic addition.
class TraceBackend : public Backend {
 public:
  virtual std::uint64_t count(Call call) const noexcept = 0;   // calls made, failed ones included
  virtual std::uint64_t failed(Call call) const noexcept = 0;  // of these, those that threw
  virtual std::uint64_t count() const noexcept = 0;

  virtual void set_logging(bool on) noexcept = 0;  // on at first
  virtual std::vector<TraceRecord> log() const = 0;
  virtual void clear_log() = 0;  // the counters stay
};

// One record a line:  <call> ok|failed <result> <argument>... [pages <handle>... | ranges <to> <from> <bytes>...]
// Numbers in decimal.
std::string serialize(const std::vector<TraceRecord>& log);
// Throws InvalidArgument with field line (from 1) at the first line that is no record. Empty lines and lines that begin
// with # are skipped.
std::vector<TraceRecord> parse_trace(const std::string& text);

struct ReplayOptions {
  // The treatment of a record that failed when it was logged: leave it out, or do it and expect it to fail again.
  enum class Failed : std::uint8_t { skip, expect };
  Failed failed = Failed::skip;
};

struct ReplayResult {
  bool ok = true;
  std::size_t replayed = 0;    // records done
  std::size_t divergence = 0;  // if not ok: index of the first record that went otherwise than logged
  std::string message;         // and how
};

// Does what the log says, in its order, on one thread. Handles and addresses are translated; memory that was the caller's
// own (registered, or copied from or to without being registered) is replaced by memory of replay's own. A query or
// synchronize that was logged as complete is waited for. Whatever the log leaves existing stays in `backend`, idle.
// A log is untrusted: a record that names what the log never made, or what lies outside of it, is not carried out. It is the first
// divergence. Nothing is taken away from copies that may still run, so a replay waits more often than the log did.
ReplayResult replay(const std::vector<TraceRecord>& log, Backend& backend, const ReplayOptions& options = {});

}  // namespace remap
