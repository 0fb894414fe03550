// The cuda backend on the emulated driver: opening, regions, pages, mappings and host memory, beyond what the conformance suite
// shows (tests/python/test_backend_contract*.py).
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "cuda_world.h"

namespace {

using namespace remap;
using namespace remap::testing;
using remap::EventHandle;  // and not the driver's
using remap::StreamHandle;

const auto kOsPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

CLEAN_TEST(options_that_the_device_cannot_do_are_refused_before_anything_is_opened) {
  emulate();
  for (const int device : {-1, 1, 100}) {
    CudaOptions options;
    options.device = device;
    const Error error = error_of([&] { (void)open_cuda(options); });
    CHECK(error.kind() == ErrorKind::invalid_argument);
    CHECK(*field(error, "devices") == Error::Value{std::int64_t{1}});
  }
  CudaOptions fabric;
  fabric.shareable = ShareableHandle::fabric;
  CHECK_ERROR(ErrorKind::invalid_argument, open_cuda(fabric));
  CudaOptions rdma;
  rdma.gpu_direct_rdma = true;
  CHECK_ERROR(ErrorKind::invalid_argument, open_cuda(rdma));
  for (const std::size_t piece : {std::size_t{0}, std::size_t{1} << 20, kSmallPiece + 1}) {
    CudaOptions pieces;
    pieces.host_piece_bytes = piece;
    CHECK_ERROR(ErrorKind::invalid_argument, open_cuda(pieces));
  }
  configure("attribute.102", 0);  // no virtual memory management
  CHECK_ERROR(ErrorKind::driver, open_cuda());
  CHECK(calls("cuDevicePrimaryCtxRetain") == 0);
}

CLEAN_TEST(pages_are_made_as_the_options_say) {
  emulate();
  configure("attribute.110", 1);
  CudaOptions options;
  options.shareable = ShareableHandle::posix_fd;
  options.gpu_direct_rdma = true;
  const auto backend = open_cuda(options);
  backend->destroy_page(backend->create_page(kPage));
}

CLEAN_TEST(two_backends_share_the_primary_context) {
  emulate();
  auto one = open_cuda();
  auto other = open_cuda();
  CHECK(live("contexts") == 2);
  Shown shown(*other, 1);
  one.reset();
  CHECK(live("contexts") == 1);
  shown.at[0] = std::byte{1};  // the other's memory is untouched
  shown.release();
}

CLEAN_TEST(what_is_mapped_stays_and_work_stays_in_its_region) {
  emulate();
  const auto backend = open_cuda();
  Shown shown(*backend, 2);
  const StreamHandle stream = backend->create_stream();
  CHECK_ERROR(ErrorKind::invalid_state, backend->release(shown.at, shown.bytes()));
  CHECK_ERROR(ErrorKind::invalid_argument, backend->copy(stream, shown.at + kPage, shown.at, kPage + 1));
  CHECK_ERROR(ErrorKind::invalid_argument, backend->fill(stream, shown.at - 1, 0, 2));
  CHECK(calls("cuMemcpyDtoDAsync") + calls("cuMemsetD8Async") == 0);
  backend->destroy_stream(stream);
  shown.release();
}

CLEAN_TEST(registering_needs_memory_that_is_there) {
  emulate();
  const auto backend = open_cuda();
  void* place = mmap(nullptr, 4 * kOsPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(place != MAP_FAILED);
  auto* at = static_cast<std::byte*>(place);
  CHECK(munmap(at + 3 * kOsPage, kOsPage) == 0);
  CHECK_ERROR(ErrorKind::invalid_argument, backend->register_host(at + 2 * kOsPage, 2 * kOsPage, HostUse::locked));
  CHECK_ERROR(ErrorKind::invalid_argument, backend->register_host(at, 0, HostUse::locked));
  CHECK_ERROR(ErrorKind::invalid_argument, backend->register_host(nullptr, 8, HostUse::locked));
  CHECK(mprotect(at, kOsPage, PROT_READ) == 0);
  backend->register_host(at, 3 * kOsPage, HostUse::locked);  // may not be written in whole: registered as read-only
  CHECK(backend->usage().host_bytes == 3 * kOsPage);
  backend->unregister_host(at, 3 * kOsPage);
  // Registered by somebody else: the driver says so.
  const auto other = open_cuda();
  other->register_host(at, kOsPage, HostUse::locked);
  CHECK_ERROR(ErrorKind::invalid_state, backend->register_host(at, 2 * kOsPage, HostUse::locked));
  other->unregister_host(at, kOsPage);
  configure("attribute.113", 0);
  const auto older = open_cuda();  // a device that must be able to write
  const Error error = error_of([&] { older->register_host(at, kOsPage, HostUse::locked); });
  CHECK(error.kind() == ErrorKind::driver && *field(error, "code") == Error::Value{std::int64_t{801}});
  older->register_host(at + kOsPage, kOsPage, HostUse::locked);
  older->unregister_host(at + kOsPage, kOsPage);
  munmap(at, 3 * kOsPage);
}

CLEAN_TEST(the_host_budget_is_exact) {
  emulate();
  CudaOptions options;
  options.host_budget_bytes = 4 * kOsPage;
  const auto backend = open_cuda(options);
  std::byte* first = backend->allocate_host(2 * kOsPage + 1);  // three OS pages
  const Error error = error_of([&] { (void)backend->allocate_host(kOsPage + 1); });
  CHECK(error.kind() == ErrorKind::limit_exceeded);
  CHECK(*field(error, "limit") == Error::Value{static_cast<std::int64_t>(4 * kOsPage)});
  CHECK(*field(error, "in_use") == Error::Value{static_cast<std::int64_t>(3 * kOsPage)});
  CHECK(*field(error, "requested") == Error::Value{static_cast<std::int64_t>(2 * kOsPage)});
  CHECK(*field(error, "limited_by") == Error::Value{std::string("host_budget")});
  std::vector<std::byte> own(3 * kOsPage);
  std::byte* aligned = own.data() + (kOsPage - reinterpret_cast<std::uintptr_t>(own.data()) % kOsPage) % kOsPage;
  CHECK_ERROR(ErrorKind::limit_exceeded, backend->register_host(aligned + kOsPage - 1, 2, HostUse::locked));  // two bytes, two OS pages
  backend->register_host(aligned, kOsPage, HostUse::locked);
  CHECK_ERROR(ErrorKind::limit_exceeded, backend->allocate_host(1));
  CHECK(backend->usage().host_bytes == 3 * kOsPage + 1);
  backend->unregister_host(aligned, kOsPage);
  std::byte* last = backend->allocate_host(kOsPage);
  backend->free_host(last, kOsPage);
  backend->free_host(first, 2 * kOsPage + 1);
}

CLEAN_TEST(what_is_staged_gives_the_budget_back) {
  emulate();
  CudaOptions options;
  options.host_budget_bytes = 3 * kOsPage;
  const auto backend = open_cuda(options);
  std::byte* first = backend->allocate_host(3 * kOsPage);
  std::vector<std::byte> own(2 * kOsPage);
  backend->register_host(own.data(), own.size(), HostUse::staged);
  CHECK_ERROR(ErrorKind::limit_exceeded, backend->use_host(own.data(), own.size(), HostUse::locked));
  CHECK_ERROR(ErrorKind::invalid_argument, backend->use_host(own.data(), 5, HostUse::locked));
  std::memset(first, 5, 3 * kOsPage);
  for (int twice = 0; twice < 2; ++twice) backend->use_host(first, 3 * kOsPage, HostUse::staged);
  CHECK(all_are(first, 5, 3 * kOsPage) && backend->usage().host_bytes == 3 * kOsPage + own.size());
  const auto unlocked = calls("cuMemHostUnregister");
  backend->use_host(first, 3 * kOsPage, HostUse::locked);
  backend->use_host(first, 3 * kOsPage, HostUse::staged);
  CHECK(calls("cuMemHostUnregister") == unlocked);  // nobody wanted its place
  backend->use_host(own.data(), own.size(), HostUse::locked);  // which lies in three OS pages, most likely
  CHECK(calls("cuMemHostUnregister") == unlocked + 1);
  CHECK_ERROR(ErrorKind::limit_exceeded, backend->use_host(first, 3 * kOsPage, HostUse::locked));
  backend->unregister_host(own.data(), own.size());
  backend->use_host(first, 3 * kOsPage, HostUse::locked);
  CHECK_ERROR(ErrorKind::limit_exceeded, backend->allocate_host(1));
  backend->use_host(first, 3 * kOsPage, HostUse::staged);
  backend->free_host(backend->allocate_host(3 * kOsPage), 3 * kOsPage);
  backend->free_host(first, 3 * kOsPage);  // staged, and its memory goes as any
}

CLEAN_TEST(page_locks_that_stay_are_counted_in_os_pages) {
  emulate();
  CudaOptions options;
  options.host_budget_bytes = 7 * kOsPage;
  const auto backend = open_cuda(options);
  std::vector<std::byte> own(14 * kOsPage);
  std::byte* const begin = own.data() + (kOsPage - reinterpret_cast<std::uintptr_t>(own.data()) % kOsPage);
  std::byte* const ranges[] = {begin + 1, begin + 4 * kOsPage + 1, begin + 8 * kOsPage + 1};  // two OS pages' bytes in three each
  backend->register_host(ranges[0], 2 * kOsPage, HostUse::locked);
  backend->register_host(ranges[1], 2 * kOsPage, HostUse::locked);
  backend->use_host(ranges[0], 2 * kOsPage, HostUse::staged);
  const auto unlocked = calls("cuMemHostUnregister");
  backend->register_host(ranges[2], 2 * kOsPage, HostUse::locked);
  CHECK(calls("cuMemHostUnregister") == unlocked + 1);  // nine pages would pass the budget
  for (std::byte* at : ranges) backend->unregister_host(at, 2 * kOsPage);

  std::byte* const odd = backend->allocate_host(2 * kOsPage + 1);
  const auto before = calls("cuMemHostUnregister");
  backend->use_host(odd, 2 * kOsPage + 1, HostUse::staged);
  backend->use_host(odd, 2 * kOsPage + 1, HostUse::locked);
  CHECK(calls("cuMemHostUnregister") == before);  // all of it was page-locked still
  backend->free_host(odd, 2 * kOsPage + 1);
}

CLEAN_TEST(without_a_budget_the_machine_is_one) {
  emulate();
  const auto backend = open_cuda();
  const std::size_t absurd = std::size_t{1} << 45;
  const Error error = error_of([&] { (void)backend->allocate_host(absurd); });
  CHECK(error.kind() == ErrorKind::limit_exceeded);
  CHECK(*field(error, "requested") == Error::Value{static_cast<std::int64_t>(absurd)});
  CHECK(std::get<std::int64_t>(*field(error, "limit")) > 0);
  const auto by = std::get<std::string>(*field(error, "limited_by"));
  CHECK(by == "machine" || by == "cgroup");
  CHECK_ERROR(ErrorKind::invalid_argument, backend->allocate_host(~std::size_t{0}));
  CHECK(calls("cuMemHostRegister") == 0 && same(backend->usage(), Usage{}));
}

}  // namespace
