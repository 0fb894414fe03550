// Streams and events: a worker thread a stream, recordings with the driver's rules for what a wait binds to.
//
// What differs from a device. Work that fails stops its own stream: the rest of it is skipped and what is recorded behind it
// has the error. A device loses the whole context; the setting lose_context does that. Streams run in parallel without
// limit, but for their copies: one engine a direction. A capture keeps no graph: work on a stream that is being captured is refused, and is a violation, since nothing
// under test may ever enqueue any there.
//
// Concurrency. Emulator::mutex guards everything here. A worker takes an operation out under it and lets it go while bytes are
// moved, a chunk at a time: `touching` says so. Whoever takes memory away (unmapping, changing access, ending a registration)
// first waits, for one chunk at most, until no worker touches that range (`quiesce`); the next chunk looks at the mappings anew.
// So work that is overtaken by an unmapping fails as on a device and never crashes the process.
//
// Copies wait for their turn on an engine in their stream's worker. That cannot go round in a circle: a copy gets a ticket only
// when all before it on its stream is done, or has a ticket of the same engine (so: an earlier one), or is an event that makes
// nobody wait.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "driver_abi.h"

namespace remap::emulated {

class Emulator;
using Lock = std::unique_lock<std::mutex>;

// One recording of an event: what a later wait binds to.
struct Recording {
  bool complete = false;
  CUresult error = kSuccess;
  double at_s = 0;
};

// One side of a copy, or what is filled.
struct Place {
  enum class Kind { none, device, locked, pageable } kind = Kind::none;
  CUdeviceptr at = 0;
  std::uint64_t registration = 0;  // of locked memory
};

// What copies of one direction of a device go through, one at a time, in the order in which they became ready. Streams and their
// priorities mean nothing to it.
struct CopyEngine {
  std::deque<std::uint64_t> line;  // tickets; who has the first one is at work or comes next
  std::condition_variable moved;
};

struct Operation {
  enum class Kind { copy, fill, record, wait, call } kind = Kind::call;
  // Where a copy goes: each way has an engine. Between host and host there is none.
  enum class Way { none, to_device, to_host, inside_device } way = Way::none;
  const char* entry = "";
  Place to;
  Place from;
  std::size_t bytes = 0;
  unsigned char value = 0;
  std::uint64_t bytes_per_s = 0;         // 0: as fast as it goes
  std::shared_ptr<Recording> recording;  // of a wait: null counts as complete
  bool for_order_alone = false;          // a wait that does not take over an error
  CUhostFn function = nullptr;
  void* data = nullptr;
  CopyEngine* engine = nullptr;  // in whose line it stands, or among whose copies (Streams::line_up)
  std::uint64_t ticket = 0;      // of a copy in line

  bool uses(CUdeviceptr at, std::size_t size) const;
};

struct Stream {
  CUcontext context = nullptr;
  CUdevice device = 0;
  bool own = false;       // has a handle; else a default stream
  bool legacy = false;    // ordered with all blocking streams of its context
  bool blocking = false;
  int priority = 0;       // lower is greater
  bool destroyed = false;
  std::deque<Operation> queue;
  std::optional<Operation> running;
  bool touching = false;  // the worker moves bytes of `running` right now
  std::uint64_t enqueued = 0;
  std::uint64_t finished = 0;
  CUresult error = kSuccess;
  int capture = kCaptureNone;
  int capture_mode = 0;
  std::thread::id capture_thread;
  std::condition_variable changed;

  bool idle() const { return finished == enqueued; }
};

struct Event {
  CUcontext context = nullptr;
  bool timing = true;
  std::shared_ptr<Recording> last;  // null: never recorded
};

// All with Emulator::mutex held; what takes the lock waits in it.
class Streams {
 public:
  explicit Streams(Emulator& emulator) : emulator_(emulator) {}

  // ---- streams (streams.cpp) -----------------------------------------------------------------------------------------
  CUresult create(CUstream* handle, unsigned flags, int priority);
  // Returns at once, as the driver does: the stream goes when its work is done.
  CUresult destroy(CUstream handle);
  CUresult synchronize(Lock& lock, CUstream handle);
  CUresult query(CUstream handle);
  CUresult context_of(CUstream handle, CUcontext* context);
  CUresult priority_of(CUstream handle, int* priority);
  // Waits while the stream's channel is full.
  CUresult enqueue(Lock& lock, CUstream handle, Operation operation);
  // The entry point of some work that is not done and uses a byte of the range; null if there is none.
  const char* in_flight(CUdeviceptr at, std::size_t bytes) const;
  void quiesce(Lock& lock, CUdeviceptr at, std::size_t bytes);
  std::size_t streams() const { return handles_.size(); }
  std::size_t events() const { return events_.size(); }
  std::size_t owned_by(CUcontext context) const;
  std::size_t unfinished() const;  // operations
  std::size_t blocked() const { return blocked_; }  // callers that wait for room in a channel
  // The context is gone: its default streams end when their work is done.
  void forget_context(CUcontext context);
  // Errors of streams, for tests that caused them on purpose.
  void heal();

  // ---- events (events.cpp) -------------------------------------------------------------------------------------------
  CUresult create_event(CUevent* handle, unsigned flags);
  CUresult destroy_event(CUevent handle);
  CUresult record(Lock& lock, CUevent handle, CUstream stream);
  CUresult wait(Lock& lock, CUstream stream, CUevent handle, unsigned flags);
  CUresult query_event(CUevent handle);
  CUresult synchronize_event(Lock& lock, CUevent handle);
  CUresult elapsed(float* milliseconds, CUevent from, CUevent to);

  // ---- captures (capture.cpp) ----------------------------------------------------------------------------------------
  CUresult begin_capture(CUstream handle, int mode);
  CUresult end_capture(CUstream handle, CUgraph* graph);
  CUresult is_capturing(CUstream handle, int* status);
  static CUresult exchange_capture_mode(int* mode);
  // kSuccess, or what a call that is unsafe during captures gets; those in its way are invalidated then.
  CUresult unsafe(const char* entry);

  static bool in_host_function();

 private:
  using Shared = std::shared_ptr<Stream>;

  Shared find(CUstream handle);  // null: unknown or destroyed
  bool given_out(CUstream handle) const;  // whether it is a stream's, or was
  Shared known(CUstream handle, const char* entry, CUresult* refused);
  Event* known_event(CUevent handle, const char* entry, CUresult* refused);
  Shared start(CUcontext context, bool blocking);
  Shared default_stream(std::uintptr_t kind);
  void append(Stream& stream, Operation operation);
  // `next` stands behind `before` on the stream (null: it is the first). If it is a copy whose turn has come there, it joins its
  // engine's line. It has come behind copies of the same way as well, since those are handed to the engine back to back:
  // others cannot come between. Events that are recorded, or waited for and complete, do not change that; anything else
  // in between does.
  void line_up(const Stream& stream, const Operation* before, Operation& next);
  void order_with_legacy(Stream& stream);
  std::shared_ptr<Recording> mark(Stream& stream);
  CUresult refused_by_capture(Stream& stream, const char* entry);
  CUresult error_of(const Stream& stream) const;

  // ---- workers (worker.cpp) ------------------------------------------------------------------------------------------
  void work(const Shared& stream);
  void run(Lock& lock, Stream& stream);
  void await_turn(Lock& lock, const Operation& copy);
  void leave_line(const Operation& copy);
  void move_bytes(Lock& lock, Stream& stream);
  CUresult check_access(const Stream& stream, const Operation& operation, std::size_t done, std::size_t bytes);
  void fail(Stream& stream, CUresult error);

  Emulator& emulator_;
  std::map<CUstream, Shared> handles_;
  std::map<std::pair<CUcontext, std::thread::id>, Shared> default_;  // the legacy one under no thread's id
  std::set<Shared> all_;                                             // until the worker ends
  std::map<CUevent, Event> events_;
  std::map<std::pair<CUdevice, Operation::Way>, CopyEngine> engines_;
  std::uint64_t last_ticket_ = 0;
  std::size_t blocked_ = 0;
  std::condition_variable recorded_;  // some recording was completed
  std::condition_variable touched_;   // some worker no longer touches memory
  static constexpr std::uintptr_t kFirstStream = 0x0500'0000'0000;
  std::uintptr_t next_stream_ = kFirstStream;
  std::uintptr_t next_event_ = 0x0e00'0000'0000;
  std::uint64_t random_ = 88172645463325252;
};

}  // namespace remap::emulated
