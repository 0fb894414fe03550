// Every entry point of the driver is made to fail, at each place where a way through the whole contract calls it: a typed error,
// nothing changed, the same call works afterwards, and no rule of the driver is broken by what is undone.
#include <algorithm>
#include <functional>
#include <initializer_list>
#include <set>

#include "backend/cuda/abi.h"
#include "cuda_world.h"

namespace {

using namespace remap;
using namespace remap::testing;
using remap::EventHandle;  // and not the driver's
using remap::StreamHandle;

constexpr int kUnknown = 999;
constexpr int kDeinitialized = 4;

std::vector<std::string> entry_points() {
#define REMAP_NAME(name, version, parameters) #name,
  return {REMAP_CUDA_ENTRY_POINTS(REMAP_NAME) REMAP_CUDA_NEWER_ENTRY_POINTS(REMAP_NAME)};
#undef REMAP_NAME
}

// Makes calls; one that fails must have changed nothing and must work when it is made again.
class Trial {
 public:
  Trial(Backend& backend, int code, bool forever) : backend_(backend), code_(code), forever_(forever) {}

  template <typename Call>
  auto operator()(Call&& call) {
    const Usage before = backend_.usage();
    try {
      return call();
    } catch (const Error& error) {
      const ErrorKind expected = code_ == 2 ? ErrorKind::out_of_memory : ErrorKind::driver;
      // Only an access that was in use and could not be given back breaks the arena.
      const bool broken = forever_ && error.kind() == ErrorKind::arena_broken;
      CHECK(error.kind() == expected || broken);
      CHECK(*field(error, "code") == Error::Value{std::int64_t{code_}} && field(error, "call") != nullptr);
      CHECK(same(backend_.usage(), before));
      ++surfaced;
    }
    if (forever_) CONTROL(remapEmulatedDisarm)();
    return call();
  }

  int surfaced = 0;

 private:
  Backend& backend_;
  const int code_;
  const bool forever_;
};

// A way through all of the contract. `lent`: a stream that `backend` has not made.
int go_through(Backend& backend, StreamHandle lent, int code = kUnknown, bool forever = false) {
  Trial attempt(backend, code, forever);
  constexpr std::size_t kCount = 3;
  std::byte* at = attempt([&] { return backend.reserve(kCount * kPage, kPage); });
  std::vector<PageHandle> pages;
  for (std::size_t i = 0; i < kCount; ++i) pages.push_back(attempt([&] { return backend.create_page(kPage); }));
  attempt([&] { backend.map(at, pages.data(), kCount, kPage); });
  attempt([&] { backend.set_access(at, kCount * kPage, Access::read_write); });
  attempt([&] { backend.set_access(at, kPage, Access::read); });
  attempt([&] { backend.set_access(at, kCount * kPage, Access::read_write); });
  std::byte* host = attempt([&] { return backend.allocate_host(kPage); });
  std::vector<std::byte> own(kPage, std::byte{7});
  std::vector<std::byte> pageable(kPage);
  attempt([&] { backend.register_host(own.data(), own.size(), HostUse::locked); });
  for (const HostUse use : {HostUse::staged, HostUse::locked}) {
    attempt([&] { backend.use_host(own.data(), own.size(), use); });
    attempt([&] { backend.use_host(host, kPage, use); });
  }
  const StreamHandle stream = attempt([&] { return backend.create_stream(); });
  CHECK(attempt([&] { return backend.adopt_stream(lent); }) == lent);
  const EventHandle first = attempt([&] { return backend.create_event(true); });
  const EventHandle second = attempt([&] { return backend.create_event(true); });
  attempt([&] { backend.copy(stream, at, own.data(), kPage); });
  attempt([&] { backend.record(first, stream); });
  attempt([&] { backend.stream_wait(lent, first); });
  attempt([&] { backend.copy(lent, at + kPage, at, kPage); });
  attempt([&] { backend.fill(lent, at + 2 * kPage, 9, kPage); });
  attempt([&] { backend.copy(lent, host, at + kPage, kPage); });
  attempt([&] { backend.copy(lent, pageable.data(), at + 2 * kPage, kPage); });
  const CopyRange ranges[] = {{at + 2 * kPage, own.data(), 100}, {at + 2 * kPage + 100, at, 100}};
  attempt([&] { backend.copy_batch(lent, ranges, 2); });
  attempt([&] { backend.record(second, lent); });
  CHECK(attempt([&] { return backend.synchronize(second, kWait); }));
  CHECK(attempt([&] { return backend.query(first); }));
  CHECK(attempt([&] { return backend.elapsed(first, second); }) >= 0);
  CHECK(all_are(host, 7, kPage) && all_are(pageable.data(), 9, kPage));
  attempt([&] { backend.fill(lent, at, 1, kPage); });
  attempt([&] { backend.record(second, lent); });
  // The driver's own wait is used only if the event is pending: the fill may have been quick.
  CHECK(attempt([&] { return backend.synchronize(second, std::chrono::nanoseconds::max()); }));
  attempt([&] { backend.forget_stream(lent); });
  attempt([&] { backend.destroy_event(first); });
  attempt([&] { backend.destroy_event(second); });
  attempt([&] { backend.destroy_stream(stream); });
  attempt([&] { backend.unregister_host(own.data(), own.size()); });
  attempt([&] { backend.free_host(host, kPage); });
  attempt([&] { backend.unmap(at, kCount * kPage); });
  attempt([&] { backend.release(at, kCount * kPage); });
  for (const PageHandle page : pages) attempt([&] { backend.destroy_page(page); });
  CONTROL(remapEmulatedDisarm)();
  CHECK(same(backend.usage(), Usage{}));
  CUcontext current = nullptr;
  FINE(CU(cuCtxGetCurrent)(&current));
  CHECK(current == nullptr);
  return attempt.surfaced;
}

// Called while a backend is opened, only when something else fails or is late, or by staged copies (cuda_staging_test.cpp).
const std::set<std::string> kElsewhere{
    "cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName",
    "cuDeviceGetAttribute", "cuDeviceTotalMem", "cuDeviceGetUuid", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle",
    "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease", "cuCtxSetCurrent",
    "cuMemGetInfo", "cuMemGetAllocationGranularity", "cuStreamQuery", "cuEventSynchronize", "cuLaunchHostFunc"};
// Their failure takes nothing back: what the call did is done, or the work that was to be waited for had ended.
const std::set<std::string> kHarmless{"cuCtxPopCurrent", "cuStreamSynchronize"};

CLEAN_TEST(every_entry_point_may_fail_at_every_call) {
  emulate();
  const auto backend = open_cuda();
  const auto other = open_cuda();
  const StreamHandle lent = other->create_stream();
  for (const std::string& name : entry_points()) {
    if (kElsewhere.count(name) != 0) continue;
    const std::uint64_t before = calls(name.c_str());
    CHECK(go_through(*backend, lent) == 0);
    const std::uint64_t times = calls(name.c_str()) - before;
    if (times == 0) throw std::logic_error(name + " is never called: the way through is not whole");
    int surfaced = 0;
    for (std::uint64_t nth = 1; nth <= times; ++nth) {
      for (const int code : {kUnknown, 2}) {
        int mode = 0;
        FINE(CU(cuThreadExchangeStreamCaptureMode)(&mode));
        arm(name.c_str(), nth, code);
        surfaced += go_through(*backend, lent, code);
      }
      int mode = 0;
      FINE(CU(cuThreadExchangeStreamCaptureMode)(&mode));
      arm(name.c_str(), nth, kUnknown, true);
      surfaced += go_through(*backend, lent, kUnknown, true);
    }
    if (surfaced == 0 && kHarmless.count(name) == 0) throw std::logic_error("no failure of " + name + " was reported");
  }
}

// A driver without batches takes them one by one. The caller hears of an error, and that nothing is under way any more.
CLEAN_TEST(a_batch_that_fails_in_the_middle_has_ended) {
  emulate();
  const auto backend = open_cuda_of(12040);
  Shown shown(*backend, 3);
  std::byte* host = backend->allocate_host(3 * kPage);
  std::fill(host, host + 3 * kPage, std::byte{5});
  std::fill(shown.at, shown.at + 3 * kPage, std::byte{1});
  const StreamHandle stream = backend->create_stream();
  std::vector<CopyRange> ranges;
  for (std::size_t i = 0; i < 3; ++i) ranges.push_back({shown.at + i * kPage, host + i * kPage, kPage});
  for (std::uint64_t nth = 1; nth <= 3; ++nth) {
    const Counted waited("cuStreamSynchronize");
    arm("cuMemcpyHtoDAsync", nth, kUnknown);
    const Error error = error_of([&] { backend->copy_batch(stream, ranges.data(), ranges.size()); });
    CHECK(error.kind() == ErrorKind::driver && *field(error, "operation") == Error::Value{std::string("copy_batch")});
    CHECK(waited == (nth == 1 ? 0 : 1) && live("work") == 0);
    CHECK((std::string(error.what()).find("undefined") != std::string::npos) == (nth != 1));
    CHECK(all_are(shown.at + (nth - 1) * kPage, 1, kPage));
  }
  const Counted batches("cuMemcpyBatchAsync");
  backend->copy_batch(stream, ranges.data(), ranges.size());
  const EventHandle event = backend->create_event(false);
  backend->record(event, stream);
  CHECK(backend->synchronize(event, kWait) && batches == 0 && all_are(shown.at, 5, 3 * kPage));
  backend->destroy_event(event);
  backend->destroy_stream(stream);
  backend->free_host(host, 3 * kPage);
  shown.release();
}

// Host memory is page-locked in pieces. One that fails gives the others back, and what could not be given back is gone on with.
CLEAN_TEST(page_locking_fails_at_any_piece) {
  emulate();
  const auto backend = open_cuda(small_pieces());
  constexpr std::size_t kBytes = 5 * kSmallPiece / 2 + 5;  // three pieces
  std::vector<std::byte> own(kBytes);  // begins in the middle of an OS page
  for (const bool allocates : {true, false}) {
    std::byte* at = own.data();
    const auto lock = [&] {
      if (allocates) at = backend->allocate_host(kBytes);
      if (!allocates) backend->register_host(at, kBytes, HostUse::locked);
    };
    const auto unlock = [&] { allocates ? backend->free_host(at, kBytes) : backend->unregister_host(at, kBytes); };
    for (const char* name : {"cuMemHostRegister", "cuCtxGetCurrent", "cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode"}) {
      for (std::uint64_t nth = 1; nth <= 3; ++nth) {
        arm(name, nth, 2);
        bool failed = false;
        try {
          lock();
        } catch (const Error&) {
          failed = true;
        }
        CONTROL(remapEmulatedDisarm)();
        CHECK(failed || std::string(name) != "cuMemHostRegister");
        if (!failed) unlock();  // it is not called so often
        CHECK(live("registrations") == 0 && same(backend->usage(), Usage{}));
      }
    }
    lock();
    CHECK(live("registrations") == 3 && backend->usage().host_bytes == kBytes);
    for (std::uint64_t left = 3; left >= 1; --left) {
      arm("cuMemHostUnregister", 4 - left == 1 ? 1 : 2, kUnknown);
      const Error error = error_of(unlock);
      CHECK(error.kind() == ErrorKind::driver);
      CHECK((std::string(error.what()).find("Nothing changed") != std::string::npos) == (left == 3));
      CHECK(backend->usage().host_bytes == kBytes && live("registrations") == (left == 3 ? 3 : left));
    }
    unlock();
    CHECK(live("registrations") == 0 && same(backend->usage(), Usage{}));
  }
}

// map fails at page k, the pages before it are unmapped again, and if that fails too the arena is broken.
CLEAN_TEST(what_cannot_be_undone_breaks_the_arena) {
  emulate();
  auto backend = open_cuda();
  std::byte* at = backend->reserve(4 * kPage, kPage);
  std::vector<PageHandle> pages;
  for (int i = 0; i < 4; ++i) pages.push_back(backend->create_page(kPage));
  for (std::uint64_t k = 1; k <= 4; ++k) {
    const Usage before = backend->usage();
    const Counted undone("cuMemUnmap");
    arm("cuMemMap", k, 2);
    CHECK_ERROR(ErrorKind::out_of_memory, backend->map(at, pages.data(), 4, kPage));
    CHECK(undone == (k == 1 ? 0 : 1) && live("mappings") == 0 && same(backend->usage(), before));
  }
  arm("cuMemMap", 3, 2);
  arm("cuMemUnmap", 1, kUnknown);
  const Error error = error_of([&] { backend->map(at, pages.data(), 4, kPage); });
  CHECK(error.kind() == ErrorKind::arena_broken);
  CHECK(*field(error, "code") == Error::Value{std::int64_t{kUnknown}});
  CHECK(*field(error, "first_code") == Error::Value{std::int64_t{2}});
  CHECK(live("mappings") == 2);
  backend.reset();  // and closing gives back what was stranded
  CHECK(live("mappings") == 0 && live("reservations") == 0);
}

CLEAN_TEST(access_in_use_is_given_back_or_the_arena_is_broken) {
  emulate();
  const auto backend = open_cuda();
  Shown shown(*backend, 3);
  std::byte* middle = shown.at + kPage;
  backend->set_access(middle, kPage, Access::read);
  const StreamHandle stream = backend->create_stream();
  {
    const Counted set("cuMemSetAccess");
    arm("cuMemSetAccess", 1, kUnknown);
    CHECK_ERROR(ErrorKind::driver, backend->set_access(shown.at, 3 * kPage, Access::none));
    CHECK(set == 4);  // the one that failed, and three runs of one access each
  }
  shown.at[0] = shown.at[2 * kPage] = std::byte{1};
  CHECK_ERROR(ErrorKind::invalid_state, backend->fill(stream, middle, 1, 8));
  arm("cuMemSetAccess", 1, kUnknown, true);
  CHECK_ERROR(ErrorKind::arena_broken, backend->set_access(shown.at, kPage, Access::read));
  CONTROL(remapEmulatedDisarm)();
  // Pages that nobody may touch yet cannot be broken by that.
  backend->set_access(shown.at, 3 * kPage, Access::none);
  arm("cuMemSetAccess", 1, kUnknown, true);
  CHECK_ERROR(ErrorKind::driver, backend->set_access(shown.at, 3 * kPage, Access::read_write));
  CONTROL(remapEmulatedDisarm)();
  backend->destroy_stream(stream);
  shown.release();
}

// Last: what the driver refuses to take back stays with it.
TEST(closing_never_throws) {
  emulate();
  for (const char* name :
       {"cuCtxGetCurrent", "cuCtxPushCurrent", "cuStreamSynchronize", "cuStreamDestroy", "cuEventDestroy", "cuMemHostUnregister",
        "cuMemUnmap", "cuMemAddressFree", "cuMemRelease", "cuDevicePrimaryCtxRelease"}) {
    auto backend = open_cuda();
    const Shown shown(*backend, 1);
    (void)backend->create_event(true);
    (void)backend->allocate_host(10);
    const StreamHandle stream = backend->create_stream();
    backend->fill(stream, shown.at, 1, kPage);
    arm(name, 1, kDeinitialized, true);
    backend.reset();
    CONTROL(remapEmulatedDisarm)();
  }
  configure("lose_context", 1);  // nothing can be given back, and nothing hangs
  auto backend = open_cuda();
  const Shown shown(*backend, 1);
  (void)backend->allocate_host(10);
  const StreamHandle stream = backend->create_stream();
  arm("run:cuMemsetD8Async", 1, 700);
  backend->fill(stream, shown.at, 1, kPage);
  backend.reset();
}

}  // namespace
