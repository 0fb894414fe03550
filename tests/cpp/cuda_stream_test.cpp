// The cuda backend on the emulated driver: streams, events, adopted streams, contexts and captures, beyond what the conformance
// suite shows (tests/python/test_backend_contract*.py).
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

#include "cuda_world.h"
#include "remap/decorators.h"

namespace {

using namespace remap;
using namespace remap::testing;
using remap::EventHandle;  // and not the driver's
using remap::StreamHandle;

// What a user of the device does with the driver by himself; its context is current on this thread meanwhile.
struct User {
  CUcontext context = nullptr;

  explicit User(int device = 0) : device_(device) {
    FINE(CU(cuInit)(0));
    FINE(CU(cuDevicePrimaryCtxRetain)(&context, device));
    FINE(CU(cuCtxPushCurrent)(context));
  }
  ~User() {
    (void)CU(cuCtxPopCurrent)(nullptr);
    (void)CU(cuDevicePrimaryCtxRelease)(device_);
  }
  static CUcontext current() {
    CUcontext found = nullptr;
    FINE(CU(cuCtxGetCurrent)(&found));
    return found;
  }
  static StreamHandle make_stream() {
    CUstream stream = nullptr;
    FINE(CU(cuStreamCreateWithPriority)(&stream, 1, 0));
    return reinterpret_cast<StreamHandle>(stream);
  }
  static void destroy_stream(StreamHandle stream) { FINE(CU(cuStreamDestroy)(native(stream))); }
  static void begin_capture(StreamHandle stream, int mode) { FINE(CU(cuStreamBeginCapture)(native(stream), mode)); }
  static void end_capture(StreamHandle stream) {
    CUgraph graph = nullptr;
    FINE(CU(cuStreamEndCapture)(native(stream), &graph));
  }
  static int exchange_capture_mode(int mode) {
    FINE(CU(cuThreadExchangeStreamCaptureMode)(&mode));
    return mode;
  }
  static CUstream native(StreamHandle stream) { return reinterpret_cast<CUstream>(stream); }

 private:
  int device_;
};

// Keeps a stream busy until it is opened.
class Gate {
 public:
  explicit Gate(StreamHandle stream) {
    FINE(CU(cuLaunchHostFunc)(User::native(stream), [](void* self) {
      while (!static_cast<Gate*>(self)->open_.load()) std::this_thread::yield();
    }, this));
  }
  ~Gate() { open(); }
  void open() { open_.store(true); }

 private:
  std::atomic<bool> open_{false};
};

CLEAN_TEST(copies_have_the_usual_priority) {
  emulate();
  const auto backend = open_cuda();
  const User user;
  const StreamHandle ours = backend->create_stream(), theirs = User::make_stream();
  int priority = 1;
  FINE(CU(cuStreamGetPriority)(User::native(ours), &priority));
  CHECK(priority == 0);
  FINE(CU(cuStreamGetPriority)(User::native(theirs), &priority));
  CHECK(priority == 0);
  User::destroy_stream(theirs);
  backend->destroy_stream(ours);
}

CLEAN_TEST(streams_of_another_device_are_refused) {
  emulate(64 << 20, 2);
  const auto backend = open_cuda();
  const User other(1);
  const StreamHandle theirs = User::make_stream();
  const Error error = error_of([&] { (void)backend->adopt_stream(theirs); });
  CHECK(error.kind() == ErrorKind::invalid_argument && *field(error, "device") == Error::Value{std::int64_t{0}});
  User::destroy_stream(theirs);
}

CLEAN_TEST(the_callers_context_is_as_before) {
  emulate(64 << 20, 2);
  const auto backend = open_cuda();
  CHECK(User::current() == nullptr);
  Shown shown(*backend, 1);
  CHECK(User::current() == nullptr);
  {
    const User other(1);
    const StreamHandle stream = backend->create_stream();
    CHECK_ERROR(ErrorKind::invalid_argument, backend->adopt_stream(4711));  // an error leaves it, too
    backend->fill(stream, shown.at, 1, kPage);
    backend->destroy_stream(stream);
    CHECK(User::current() == other.context);
  }
  {
    const User same;
    const Counted pushed("cuCtxPushCurrent");
    const EventHandle event = backend->create_event(true);
    CHECK(backend->query(event));
    backend->destroy_event(event);
    CHECK(pushed == 0);  // beside torch it is current already
    CHECK(User::current() == same.context);
  }
  std::thread([&] {
    const StreamHandle stream = backend->create_stream();
    backend->fill(stream, shown.at, 2, kPage);
    backend->destroy_stream(stream);
    CHECK(User::current() == nullptr);
  }).join();
  CHECK(all_are(shown.at, 2, kPage));
  shown.release();
}

CLEAN_TEST(streams_under_capture_are_refused) {
  emulate();
  const auto backend = open_cuda();
  const User user;
  const StreamHandle theirs = User::make_stream();
  (void)backend->adopt_stream(theirs);
  Shown shown(*backend, 1);
  std::byte* host = backend->allocate_host(kPage);
  const EventHandle event = backend->create_event(true);
  User::begin_capture(theirs, 2);
  for (const std::function<void()>& call : std::initializer_list<std::function<void()>>{
           [&] { backend->record(event, theirs); }, [&] { backend->stream_wait(theirs, event); },
           [&] { backend->copy(theirs, shown.at, host, 8); }, [&] { backend->fill(theirs, shown.at, 0, 8); }}) {
    const Error error = error_of(call);
    CHECK(error.kind() == ErrorKind::invalid_state);
    CHECK(*field(error, "stream") == Error::Value{static_cast<std::int64_t>(theirs)});
  }
  CHECK(calls("cuEventRecord") == 0 && calls("cuMemcpyHtoDAsync") == 0);
  User::end_capture(theirs);
  backend->record(event, theirs);
  CHECK(backend->synchronize(event, kWait));
  // The default stream cannot be used while another is captured: the driver says so with a code of its own.
  (void)backend->adopt_stream(1);
  arm("cuStreamIsCapturing", 1, 906);
  CHECK_ERROR(ErrorKind::invalid_state, backend->record(event, 1));
  backend->destroy_event(event);
  backend->free_host(host, kPage);
  shown.release();
  User::destroy_stream(theirs);
}

// The emulated driver calls it a violation if an unsafe call is made while anybody captures in global mode.
CLEAN_TEST(calls_from_other_threads_do_not_disturb_a_capture) {
  emulate();
  const auto backend = open_cuda();
  const User user;
  const StreamHandle theirs = User::make_stream();
  User::begin_capture(theirs, 0);
  std::thread([&] {
    const StreamHandle stream = backend->create_stream();
    const EventHandle event = backend->create_event(true);
    backend->record(event, stream);
    CHECK(backend->synchronize(event, kWait));
    backend->destroy_page(backend->create_page(kPage));
    backend->destroy_event(event);
    backend->destroy_stream(stream);
    CHECK(User::exchange_capture_mode(0) == 0);  // the thread's mode is as it was
    CHECK(User::exchange_capture_mode(1) == 0);
    CHECK(backend->usage().streams == 0);
    backend->destroy_event(backend->create_event(true));
    CHECK(User::exchange_capture_mode(0) == 1);
  }).join();
  User::end_capture(theirs);
  User::destroy_stream(theirs);
}

CLEAN_TEST(adopted_streams_pass_the_decorators) {
  emulate();
  const auto traced = make_trace_backend(open_cuda());
  Limits limits;
  limits.streams = 1;
  const auto fault = make_fault_backend(make_limit_backend(traced, limits));
  const StreamHandle own = fault->create_stream();
  for (int kind = 0; kind < 2; ++kind) {
    fault->arm(kind == 0 ? Call::adopt_stream : Call::forget_stream, 1);
    if (kind == 0) CHECK_ERROR(ErrorKind::driver, fault->adopt_stream(1));
    if (kind == 0) CHECK(fault->adopt_stream(1) == 1);  // and does not count towards the limit
    if (kind == 1) CHECK_ERROR(ErrorKind::driver, fault->forget_stream(1));
  }
  const EventHandle event = fault->create_event(true);
  fault->record(event, 1);
  CHECK(fault->synchronize(event, kWait));
  fault->forget_stream(1);
  CHECK_ERROR(ErrorKind::invalid_argument, fault->record(event, 1));
  fault->destroy_event(event);
  fault->destroy_stream(own);
  CHECK(traced->count(Call::adopt_stream) == 1 && traced->count(Call::forget_stream) == 1);
  const auto log = parse_trace(serialize(traced->log()));
  CHECK(log.at(1).call == Call::adopt_stream && log[1].args[0] == 1 && log[1].result == 1);
  const auto replayed = replay(log, *open_cuda());  // where a stream of its own stands in for the caller's
  if (!replayed.ok) throw std::logic_error(replayed.message);
  CHECK(replayed.replayed == log.size() - 1);  // the record that was refused is not made again
}

CLEAN_TEST(a_stream_with_pending_work_is_not_destroyed_unwaited) {
  emulate();
  const auto backend = open_cuda();
  const User user;
  const StreamHandle stream = backend->create_stream();
  {
    Gate gate(stream);
    arm("cuStreamSynchronize", 1, 999);
    CHECK_ERROR(ErrorKind::driver, backend->destroy_stream(stream));
    CHECK(backend->usage().streams == 1);
    gate.open();
    backend->destroy_stream(stream);
  }
}

// One tenant's engine is far ahead of the device and waits in a call that enqueues. Others make events and streams meanwhile, use
// them, and begin passes on streams of their own.
CLEAN_TEST(a_full_queue_holds_up_its_own_stream_alone) {
  emulate();
  configure("channel_ops", 4);
  const auto backend = open_cuda();
  const User user;
  const StreamHandle theirs = User::make_stream();
  const StreamHandle full = backend->create_stream();
  const EventHandle recorded = backend->create_event(true);
  const EventHandle waited = backend->create_event(true);
  for (const bool waits : {false, true}) {
    Gate gate(full);
    for (int i = 0; i < 3; ++i) backend->record(recorded, full);
    std::atomic<bool> enqueued{false};
    std::thread engine([&] {
      waits ? backend->stream_wait(full, waited) : backend->record(recorded, full);
      enqueued = true;
    });
    while (CONTROL(remapEmulatedLive)("blocked") == 0) std::this_thread::yield();

    CHECK(backend->adopt_stream(theirs) == theirs);
    const EventHandle event = backend->create_event(true);
    backend->record(event, theirs);
    CHECK(backend->synchronize(event, kWait) && !backend->query(recorded));
    const StreamHandle own = backend->create_stream();
    backend->stream_wait(own, event);
    backend->destroy_stream(own);
    backend->destroy_event(event);
    backend->forget_stream(theirs);
    CHECK(!enqueued);
    gate.open();
    engine.join();
    CHECK(backend->synchronize(recorded, kWait));
  }
  // An event in such a call is destroyed when the call is over, and is unknown to everybody from the moment that was asked for.
  Gate gate(full);
  for (int i = 0; i < 3; ++i) backend->record(recorded, full);
  std::thread engine([&] { backend->record(waited, full); });
  while (CONTROL(remapEmulatedLive)("blocked") == 0) std::this_thread::yield();
  std::thread destroyer([&] { backend->destroy_event(waited); });
  const auto unknown = [&] {
    try {
      (void)backend->query(waited);
    } catch (const Error& error) {
      return error.kind() == ErrorKind::invalid_argument;
    }
    return false;
  };
  while (!unknown()) std::this_thread::yield();
  CHECK(calls("cuEventDestroy") == 2);  // of the two above; not of this one yet
  gate.open();
  engine.join();
  destroyer.join();
  CHECK(calls("cuEventDestroy") == 3);
  backend->destroy_event(recorded);
  backend->destroy_stream(full);
  User::destroy_stream(theirs);
}

// A destruction that the driver refuses leaves the event as it was.
CLEAN_TEST(an_event_that_cannot_be_destroyed_is_there_still) {
  emulate();
  const auto backend = open_cuda();
  const EventHandle event = backend->create_event(true);
  arm("cuEventDestroy", 1, 999);
  CHECK_ERROR(ErrorKind::driver, backend->destroy_event(event));
  CHECK(backend->usage().events == 1 && backend->query(event));
  CHECK_ERROR(ErrorKind::invalid_state, (void)backend->elapsed(event, event));  // never recorded
  backend->destroy_event(event);
  CHECK_ERROR(ErrorKind::invalid_argument, backend->destroy_event(event));
}

// However many copies there are, the driver is called a few times; where it has no batches, or they are not to be trusted, once for each.
CLEAN_TEST(a_batch_is_few_calls) {
  struct Machine {
    std::uint64_t driver, compute_major, batches, singles;
  };
  for (const Machine machine : {Machine{13000, 9, 2, 0}, {12080, 8, 2, 0}, {12060, 9, 0, 600}, {13000, 10, 0, 600}, {13000, 12, 0, 600}}) {
    emulate();
    configure("attribute.75", machine.compute_major);
    const auto backend = open_cuda_of(machine.driver);
    Shown shown(*backend, 2);
    std::byte* host = backend->allocate_host(600);
    const StreamHandle stream = backend->create_stream();
    const EventHandle event = backend->create_event(false);
    std::vector<CopyRange> out, in;
    for (std::size_t i = 0; i < 600; ++i) {
      host[i] = static_cast<std::byte>(i % 251);
      in.push_back({shown.at + 3 * i, host + i, 1});
      out.push_back({host + i, shown.at + 3 * i, 1});
    }
    in.push_back({shown.at, host, 0});  // nothing
    {
      const Counted batches("cuMemcpyBatchAsync");
      const Counted singles("cuMemcpyHtoDAsync");
      backend->copy_batch(stream, in.data(), in.size());
      CHECK(batches == machine.batches && singles == machine.singles);
    }
    backend->fill(stream, host, 0, 600);
    backend->copy_batch(stream, out.data(), out.size());  // behind it
    backend->copy_batch(stream, nullptr, 0);
    backend->record(event, stream);
    CHECK(backend->synchronize(event, kWait));
    for (std::size_t i = 0; i < 600; ++i) CHECK(host[i] == static_cast<std::byte>(i % 251));
    // The legacy default stream takes no batches.
    CHECK(backend->adopt_stream(1) == 1);
    {
      const Counted batches("cuMemcpyBatchAsync");
      backend->copy_batch(1, in.data(), 3);
      backend->record(event, 1);
      CHECK(backend->synchronize(event, kWait) && batches == 0);
    }
    backend->forget_stream(1);
    backend->destroy_event(event);
    backend->destroy_stream(stream);
    backend->free_host(host, 600);
    shown.release();
  }
}

// The driver knows page-locked memory in pieces, and no copy may lie in two of them.
CLEAN_TEST(copies_are_cut_where_pieces_of_host_memory_end) {
  emulate();
  const auto backend = open_cuda(small_pieces());
  constexpr std::size_t kPiece = kSmallPiece;
  constexpr std::size_t kBytes = 2 * kPiece + kPiece / 2;
  Shown shown(*backend, 2);
  std::byte* host = backend->allocate_host(kBytes);
  CHECK(live("registrations") == 3);
  const StreamHandle stream = backend->create_stream();
  const EventHandle event = backend->create_event(false);
  const auto finish = [&] {
    backend->record(event, stream);
    CHECK(backend->synchronize(event, kWait));
  };
  for (const std::size_t border : {kPiece, 2 * kPiece}) {
    std::byte* at = host + border - 1000;
    for (std::size_t i = 0; i < 2 * kPage; ++i) at[i] = static_cast<std::byte>(i % 241);
    backend->copy(stream, shown.at, at, 2 * kPage);
    finish();
    CHECK(std::equal(at, at + 2 * kPage, shown.at));
    backend->fill(stream, shown.at, 9, 2 * kPage);
    const CopyRange ranges[] = {{at, shown.at, 999}, {at + 999, shown.at + 999, 1}, {at + 1000, shown.at + 1000, 1}, {at + 1001, shown.at + 1001, kPage}};
    backend->copy_batch(stream, ranges, 4);
    finish();
    CHECK(all_are(at, 9, 1001 + kPage));
    // Between two ends in host memory, and into it.
    std::byte* other = host + 3 * kPiece / 2;
    backend->copy(stream, other, at, 2 * kPage);
    const CopyRange back[] = {{at - kPage, other, 2 * kPage}, {other - 8, at + 2 * kPage, 8}};
    backend->copy_batch(stream, back, 2);
    finish();
    CHECK(std::equal(other, other + 2 * kPage, at - kPage));
    backend->fill(stream, at, 4, 2 * kPage);
    finish();
    CHECK(all_are(at, 4, 2 * kPage));
  }
  std::vector<std::byte> own(kBytes);
  backend->register_host(own.data(), kBytes, HostUse::locked);
  std::fill(own.begin(), own.end(), std::byte{3});
  for (std::size_t at = 0; at + kPage <= kBytes; at += kPage / 2 - 7) {
    backend->copy(stream, shown.at, own.data() + at, kPage);
  }
  finish();
  CHECK(all_are(shown.at, 3, kPage));
  backend->unregister_host(own.data(), kBytes);
  backend->destroy_event(event);
  backend->destroy_stream(stream);
  backend->free_host(host, kBytes);
  shown.release();
}

}  // namespace
