// Finding the driver: what is refused and how that reads, and what the probe says. And the ends: fork and exit.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "child.h"
#include "cuda_world.h"

namespace {

using namespace remap;
using namespace remap::testing;
using remap::EventHandle;  // and not the driver's
using remap::StreamHandle;

Error refusal(const std::string& library) {
  const Error probed = error_of([&] { (void)probe_cuda(library); });
  CudaOptions options;
  options.library = library;
  const Error opened = error_of([&] { (void)make_cuda_backend(options); });
  CHECK(probed.kind() == ErrorKind::driver && opened.kind() == ErrorKind::driver);
  CHECK(std::string(probed.what()) == opened.what());
  return opened;
}

bool mentions(const Error& error, const std::string& text) { return std::string(error.what()).find(text) != std::string::npos; }

CLEAN_TEST(a_missing_library_is_named_with_the_loaders_reason) {
  const Error error = refusal("/nowhere/libcuda.so.1");
  CHECK(*field(error, "library") == Error::Value{std::string("/nowhere/libcuda.so.1")});
  CHECK(mentions(error, "No such file") && mentions(error, "REMAP_LIBCUDA") && mentions(error, "Install"));
}

CLEAN_TEST(the_environment_names_the_library_unless_the_caller_does) {
  setenv("REMAP_LIBCUDA", "/nowhere/other.so", 1);
  CHECK(*field(refusal(""), "library") == Error::Value{std::string("/nowhere/other.so")});
  emulate();
  CHECK(probe_cuda(REMAP_EMULATED_DRIVER_PATH).emulated);
  setenv("REMAP_LIBCUDA", REMAP_EMULATED_DRIVER_PATH, 1);
  CHECK(probe_cuda().emulated);
  unsetenv("REMAP_LIBCUDA");
}

CLEAN_TEST(what_is_no_driver_is_refused) {
  const Error error = refusal("libc.so.6");
  CHECK(*field(error, "library") == Error::Value{std::string("libc.so.6")} && mentions(error, "not a CUDA driver"));
}

CLEAN_TEST(old_drivers_are_refused_with_both_versions) {
  const struct {
    const char* library;
    std::int64_t found;
    const char* text;
  } cases[] = {{REMAP_STUB_DRIVER_1, 11040, "11.4"}, {REMAP_STUB_DRIVER_2, 11080, "11.8"}};
  for (const auto& each : cases) {
    const Error error = refusal(each.library);
    CHECK(*field(error, "found") == Error::Value{each.found} && *field(error, "needed") == Error::Value{std::int64_t{12000}});
    CHECK(mentions(error, each.text) && mentions(error, "12.0"));
  }
}

CLEAN_TEST(missing_entry_points_are_named) {
  const Error error = refusal(REMAP_STUB_DRIVER_3);
  CHECK(mentions(error, "cuMemMap (10.2)") && mentions(error, "cuStreamGetCtx (9.2)") && !mentions(error, "cuDriverGetVersion"));
}

CLEAN_TEST(a_driver_without_devices_can_be_probed_and_not_opened) {
  emulate();
  arm("cuInit", 1, 100);
  CHECK(probe_cuda(REMAP_EMULATED_DRIVER_PATH).devices.empty());
  arm("cuInit", 1, 100);
  const Error error = error_of([] { (void)open_cuda(); });
  CHECK(error.kind() == ErrorKind::driver && *field(error, "code") == Error::Value{std::int64_t{100}});
  arm("cuInit", 1, 999);
  CHECK_ERROR(ErrorKind::driver, probe_cuda(REMAP_EMULATED_DRIVER_PATH));
  // A device that gives no context is listed all the same.
  arm("cuDevicePrimaryCtxRetain", 1, 46);
  CHECK(probe_cuda(REMAP_EMULATED_DRIVER_PATH).devices.at(0).free_bytes == 0);
}

CLEAN_TEST(a_forked_child_is_refused_and_calls_no_driver) {
  emulate();
  auto backend = open_cuda();
  const Shown shown(*backend, 1);
  const StreamHandle stream = backend->create_stream();
  const EventHandle event = backend->create_event(true);
  std::byte* host = backend->allocate_host(kPage);
  const int status = in_child([&] {
    CHECK_ERROR(ErrorKind::forked_process, backend->reserve(kPage, kPage));
    CHECK_ERROR(ErrorKind::forked_process, backend->create_page(kPage));
    CHECK_ERROR(ErrorKind::forked_process, backend->exchange(shown.at, shown.at, kPage));
    CHECK_ERROR(ErrorKind::forked_process, backend->free_host(host, kPage));
    CHECK_ERROR(ErrorKind::forked_process, backend->copy(stream, shown.at, host, 8));
    CHECK_ERROR(ErrorKind::forked_process, backend->fill(stream, shown.at, 0, 8));
    CHECK_ERROR(ErrorKind::forked_process, backend->record(event, stream));
    CHECK_ERROR(ErrorKind::forked_process, backend->query(event));
    CHECK_ERROR(ErrorKind::forked_process, backend->usage());
    const std::uint64_t before = calls();
    backend.reset();
    CHECK(calls() == before);
  });
  CHECK(ended_well(status));
  backend->copy(stream, shown.at, host, kPage);  // the parent goes on
  backend.reset();
}

// A process of its own, so that static objects and exit handlers run: the environment says so.
constexpr const char* kLeave = "REMAP_TEST_LEAVE";
std::uint64_t calls_at_exit = 0;
void judge() {
  if (calls() != calls_at_exit) _exit(3);
}
struct Keeper {
  std::shared_ptr<Backend> backend;
  ~Keeper() { calls_at_exit = calls(); }  // before the backend is destroyed
};

// Made before the driver was initialised, so destroyed after the driver's exit handlers: it must leave the driver alone.
[[noreturn]] void leave_a_backend_to_exit() {
  emulate();
  std::atexit(judge);  // runs last
  static Keeper keeper;
  keeper.backend = open_cuda();
  const Shown shown(*keeper.backend, 1);
  (void)keeper.backend->create_stream();
  (void)keeper.backend->allocate_host(100);
  std::exit(0);
}

CLEAN_TEST(a_backend_that_outlives_main_calls_no_driver) {
  if (std::getenv(kLeave) != nullptr) leave_a_backend_to_exit();
  CHECK(ended_well(in_child([] {
    ::setenv(kLeave, "1", 1);
    ::execl("/proc/self/exe", "cuda_driver_test", "a_backend_that_outlives_main_calls_no_driver",
            static_cast<char*>(nullptr));
    throw std::runtime_error("execl");
  })));
}

}  // namespace
