// Pages of a device that several processes share: here two backends of one process, which the driver tells apart as little.
#include <unistd.h>

#include <cstring>

#include "cuda_world.h"

using namespace remap;
using namespace remap::testing;

namespace {

std::shared_ptr<CudaPages> made(std::size_t count) {
  return make_cuda_pages({0, {}, REMAP_EMULATED_DRIVER_PATH, kPage, count});
}

std::shared_ptr<CudaPages> imported(const CudaPages& from) {
  auto pages = made(0);
  for (std::size_t number = 0; number < from.count(); ++number) {
    const int descriptor = from.export_page(number);
    pages->import_page(descriptor);
    ::close(descriptor);
  }
  return pages;
}

std::shared_ptr<Backend> over(std::shared_ptr<CudaPages> pages) {
  CudaOptions options;
  options.pages = std::move(pages);
  return open_cuda(options);
}

// All pages of a backend behind one range.
struct Range {
  Range(Backend& backend, std::size_t count) : backend(backend), at(backend.reserve(count * kPage, kPage)) {
    for (std::size_t i = 0; i < count; ++i) pages.push_back(backend.create_page(kPage));
    backend.map(at, pages.data(), count, kPage);
    backend.set_access(at, count * kPage, Access::read_write);
  }
  void release() {
    backend.unmap(at, pages.size() * kPage);
    for (const PageHandle page : pages) backend.destroy_page(page);
    backend.release(at, pages.size() * kPage);
  }
  Backend& backend;
  std::byte* at;
  std::vector<PageHandle> pages;
};

CLEAN_TEST(the_nth_page_is_the_nth_in_each_process) {
  emulate();
  constexpr std::size_t kCount = 5;
  auto pages = made(kCount);
  auto copies = imported(*pages);
  CHECK(copies->count() == kCount && copies->page_bytes() == kPage);
  const auto one = over(pages);
  const auto other = over(copies);
  Range mine(*one, kCount);
  Range theirs(*other, kCount);
  for (std::size_t i = 0; i < kCount; ++i) mine.at[i * kPage + 7] = std::byte{static_cast<unsigned char>(i + 1)};
  for (std::size_t i = 0; i < kCount; ++i) CHECK(theirs.at[i * kPage + 7] == std::byte{static_cast<unsigned char>(i + 1)});
  CHECK_ERROR(ErrorKind::out_of_memory, one->create_page(kPage));
  mine.release();
  CHECK(theirs.at[7] == std::byte{1});  // nothing was given back
  Range again(*one, kCount);
  CHECK(again.at[2 * kPage + 7] == std::byte{3});
  again.release();
  theirs.release();
}

CLEAN_TEST(memory_lives_until_the_last_process_lets_go) {
  emulate();
  auto pages = made(2);
  auto copies = imported(*pages);
  const auto other = over(copies);
  Range theirs(*other, 2);
  theirs.at[3] = std::byte{9};
  pages.reset();
  copies.reset();  // the backend has them
  CHECK(theirs.at[3] == std::byte{9});
  theirs.release();
}

CLEAN_TEST(who_closes_them_lets_go_of_each_when_its_backend_does) {
  emulate();
  const auto pages = made(3);
  const auto backend = over(pages);
  Range range(*backend, 2);
  range.at[1] = std::byte{5};
  pages->close();
  CHECK(live("pages") == 2);
  CHECK(range.at[1] == std::byte{5});
  CHECK_ERROR(ErrorKind::out_of_memory, backend->create_page(kPage));
  CHECK_ERROR(ErrorKind::invalid_argument, pages->export_page(0));
  range.release();
  CHECK(live("pages") == 0);
  pages->close();
}

CLEAN_TEST(what_is_refused_changes_nothing) {
  emulate();
  CHECK_ERROR(ErrorKind::invalid_argument, make_cuda_pages({0, {}, REMAP_EMULATED_DRIVER_PATH, kPage + 1, 1}));
  CHECK_ERROR(ErrorKind::invalid_argument, make_cuda_pages({0, {}, REMAP_EMULATED_DRIVER_PATH, 0, 1}));
  CHECK_ERROR(ErrorKind::invalid_argument, make_cuda_pages({1, {}, REMAP_EMULATED_DRIVER_PATH, kPage, 1}));
  arm("cuMemCreate", 3, 2);
  const Error error = error_of([&] { (void)made(4); });
  CHECK(error.kind() == ErrorKind::out_of_memory && field(error, "capacity") != nullptr);
  CHECK(live("pages") == 0);  // the two that were there
  const auto pages = made(2);
  CHECK_ERROR(ErrorKind::invalid_argument, pages->export_page(2));
  arm("cuMemExportToShareableHandle", 1, 999);
  CHECK_ERROR(ErrorKind::driver, pages->export_page(0));
  const int descriptor = pages->export_page(0);
  arm("cuMemImportFromShareableHandle", 1, 999);
  CHECK_ERROR(ErrorKind::driver, pages->import_page(descriptor));
  ::close(descriptor);
  CHECK(pages->count() == 2);
  const auto backend = over(pages);
  CHECK_ERROR(ErrorKind::invalid_argument, backend->create_page(2 * kPage));
  backend->destroy_page(backend->create_page(kPage));
  configure("attribute.103", 0);
  CHECK_ERROR(ErrorKind::driver, made(1));
}

CLEAN_TEST(pages_of_another_device_are_refused) {
  emulate(64 << 20, 2);
  CudaOptions options;
  options.pages = make_cuda_pages({1, {}, REMAP_EMULATED_DRIVER_PATH, kPage, 1});
  CHECK_ERROR(ErrorKind::invalid_argument, open_cuda(options));
  options.device = 1;
  const auto backend = open_cuda(options);
  Range range(*backend, 1);
  range.release();
  // Others name it by its UUID, and open no other device.
  const Counted contexts("cuDevicePrimaryCtxRetain");
  const auto copies = make_cuda_pages({0, options.pages->uuid(), REMAP_EMULATED_DRIVER_PATH, kPage, 0});
  CHECK(copies->device() == 1 && contexts == 1);
  const Error error = error_of([&] { (void)make_cuda_pages({0, std::string(32, 'a'), REMAP_EMULATED_DRIVER_PATH, kPage, 0}); });
  CHECK(error.kind() == ErrorKind::invalid_state && field(error, "devices") != nullptr);
}

}  // namespace
