// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/shared_pages.h"

#include <string>

#include "backend/cuda/device.h"
#include "backend/mapping_table.h"
#include "remap/fork.h"

namespace remap::cuda {

using mapping::number;

AllocationHandle make_allocation(const Driver& driver, const AllocationProperties& properties, std::size_t bytes) {
  AllocationHandle handle = 0;
  const Result code = driver.cuMemCreate(&handle, bytes, &properties, 0);
  if (code == result::kSuccess) return handle;
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  Error::Fields fields{{"requested", number(bytes)}};
  if (code == result::kOutOfMemory && driver.cuMemGetInfo(&free_bytes, &total) == result::kSuccess) {
    fields.emplace_back("free", number(free_bytes));
    fields.emplace_back("capacity", number(total));
  }
  fail(driver, "create_page", "cuMemCreate", code, std::move(fields));
}

SharedPages::SharedPages(const Driver& driver, const CudaDevice& device, const CudaPagesOptions& options)
    : generation_(fork_generation()),
      index_(device.index),
      uuid_(device.uuid),
      page_bytes_(options.page_bytes),
      context_(std::make_unique<Context>(driver, device_of(driver, device.index))) {
  const AllocationProperties properties = allocation_properties(context_->device(), ShareableHandle::posix_fd, false);
  const std::size_t grain = granularity(driver, properties, kGranularityMinimum);
  if (page_bytes_ == 0 || page_bytes_ % grain != 0) {
    throw Error(ErrorKind::invalid_argument,
                "shared pages: page_bytes must be a multiple of " + std::to_string(grain) + " above 0, got " +
                    std::to_string(page_bytes_) + ". Nothing was made.",
                {{"page_bytes", number(page_bytes_)}, {"granularity", number(grain)}});
  }
  const Context::Use use(*context_, "make_pages");
  pages_.reserve(options.count);
  try {
    while (pages_.size() < options.count) pages_.push_back({make_allocation(driver, properties, page_bytes_)});
  } catch (...) {
    for (Page& page : pages_) let_go(page);
    throw;
  }
}

SharedPages::~SharedPages() {
  if (fork_generation() != generation_) {
    (void)context_.release();
    return;
  }
  try {
    const Context::Use use(*context_, "close");
    for (Page& page : pages_) let_go(page);
  } catch (const Error&) {
    // No context to work in: the process is ending, and its end gives everything back.
  }
}

void SharedPages::let_go(Page& page) noexcept {
  if (page.handle != 0) (void)context_->driver().cuMemRelease(page.handle);
  page.handle = 0;
}

void SharedPages::close() {
  refuse_fork(generation_);
  const std::lock_guard<std::mutex> lock(lock_);
  closed_ = true;
  try {
    const Context::Use use(*context_, "close");
    for (Page& page : pages_) {
      if (page.uses == 0) let_go(page);
    }
  } catch (const Error&) {
    // The context is lost, or the process is ending: the memory went with it.
  }
}

void SharedPages::put(std::size_t number_of_page) noexcept {
  const std::lock_guard<std::mutex> lock(lock_);
  Page& page = pages_[number_of_page];
  if (--page.uses == 0 && closed_) let_go(page);
}

std::size_t SharedPages::count() const {
  const std::lock_guard<std::mutex> lock(lock_);
  return pages_.size();
}

AllocationHandle SharedPages::take(std::size_t number_of_page, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(lock_);
  if (bytes != page_bytes_) {
    throw Error(ErrorKind::invalid_argument,
                "create_page: shared pages have " + std::to_string(page_bytes_) + " bytes, asked for " + std::to_string(bytes) +
                    ". Nothing changed.",
                {{"requested", number(bytes)}, {"page_bytes", number(page_bytes_)}});
  }
  if (closed_ || number_of_page >= pages_.size()) {
    throw Error(ErrorKind::out_of_memory,
                "create_page: all " + std::to_string(pages_.size()) + " shared pages are in use, or closed. Nothing changed.",
                {{"requested", number(bytes)}, {"capacity", number(pages_.size() * page_bytes_)}});
  }
  ++pages_[number_of_page].uses;
  return pages_[number_of_page].handle;
}

int SharedPages::export_page(std::size_t number_of_page) const {
  refuse_fork(generation_);
  const AllocationHandle page = [&] {
    const std::lock_guard<std::mutex> lock(lock_);
    if (!closed_ && number_of_page < pages_.size()) return pages_[number_of_page].handle;
    throw Error(ErrorKind::invalid_argument,
                "export_page: expected a page below " + std::to_string(closed_ ? 0 : pages_.size()) + ", got " +
                    std::to_string(number_of_page) + ". Nothing changed.",
                {{"page", number(number_of_page)}, {"pages", number(pages_.size())}});
  }();
  const Driver& driver = context_->driver();
  const Context::Use use(*context_, "export_page");
  int descriptor = -1;
  check(driver, "export_page", "cuMemExportToShareableHandle",
        driver.cuMemExportToShareableHandle(&descriptor, page, kHandlePosixFd, 0));
  return descriptor;
}

// The driver takes the size from the page itself, and does not tell it: one of another size is found when it is mapped.
void SharedPages::import_page(int descriptor) {
  refuse_fork(generation_);
  const Driver& driver = context_->driver();
  const Context::Use use(*context_, "import_page");
  const std::lock_guard<std::mutex> lock(lock_);
  if (closed_) {
    throw Error(ErrorKind::invalid_state, "import_page: the pages are closed. Nothing changed.", {{"descriptor", std::int64_t{descriptor}}});
  }
  if (pages_.size() == pages_.capacity()) pages_.reserve(2 * pages_.size() + 64);
  AllocationHandle page = 0;
  // By value, as the driver's documentation has it for descriptors.
  void* by_value = reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor));
  check(driver, "import_page", "cuMemImportFromShareableHandle",
        driver.cuMemImportFromShareableHandle(&page, by_value, kHandlePosixFd));
  pages_.push_back({page});
}

}  // namespace remap::cuda

namespace remap {
namespace {

int index_of(const cuda::Driver& driver, const std::string& uuid) {
  int count = 0;
  cuda::check(driver, "open", "cuDeviceGetCount", driver.cuDeviceGetCount(&count));
  std::string seen;
  for (int index = 0; index < count; ++index) {
    const std::string each = cuda::uuid_of(driver, cuda::device_of(driver, index));
    if (each == uuid) return index;
    seen += (seen.empty() ? "" : ", ") + each;
  }
  throw Error(ErrorKind::invalid_state,
              "shared pages: they are of device " + uuid + ", and this process sees " + (seen.empty() ? "none" : seen) +
                  ". Nothing was opened. Name that device in CUDA_VISIBLE_DEVICES.",
              {{"uuid", uuid}, {"devices", seen}});
}

}  // namespace

std::shared_ptr<CudaPages> make_cuda_pages(const CudaPagesOptions& options) {
  const cuda::Driver& driver = cuda::load_driver(options.library);
  cuda::initialize(driver);
  const CudaDevice device = cuda::describe(driver, options.uuid.empty() ? options.device : index_of(driver, options.uuid));
  if (!device.vmm || !device.posix_fd) {
    throw Error(ErrorKind::driver,
                "shared pages: device " + std::to_string(device.index) + " (" + device.name +
                    ") cannot export pages as file descriptors. Nothing was made. Each process needs an arena of its own there.",
                {{"device", std::int64_t{device.index}}, {"code", std::int64_t{cuda::result::kNotSupported}}});
  }
  return std::make_shared<cuda::SharedPages>(driver, device, options);
}

}  // namespace remap
