// SPDX-License-Identifier: Apache-2.0
// Pages of a device that several processes share, and how a page is made.
//
// Concurrency: `lock_` guards the list. A backend's page has a use of it, and its handle stays the driver's until the use ends.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/cuda/context.h"
#include "remap/backends.h"

namespace remap::cuda {

// Pre: a context is current. Throws out_of_memory (requested, free, capacity) or driver.
AllocationHandle make_allocation(const Driver& driver, const AllocationProperties& properties, std::size_t bytes);

class SharedPages final : public CudaPages {
 public:
  SharedPages(const Driver& driver, const CudaDevice& device, const CudaPagesOptions& options);
  // The memory goes when no process has it any more. A forked child leaves it alone.
  ~SharedPages() override;
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;

  std::size_t page_bytes() const noexcept override { return page_bytes_; }
  std::size_t count() const override;
  int device() const noexcept override { return index_; }
  const std::string& uuid() const noexcept override { return uuid_; }
  int export_page(std::size_t number) const override;
  void import_page(int descriptor) override;
  void close() override;

  // A use of the page, until put(). Throws out_of_memory beyond the last one, invalid_argument for another size. Pre: a context is
  // current, for put() too.
  AllocationHandle take(std::size_t number, std::size_t bytes);
  void put(std::size_t number) noexcept;

 private:
  struct Page {
    AllocationHandle handle = 0;  // 0: let go of
    std::size_t uses = 0;
  };
  void let_go(Page& page) noexcept;

  const unsigned generation_;
  const int index_;
  const std::string uuid_;
  const std::size_t page_bytes_;
  std::unique_ptr<Context> context_;
  mutable std::mutex lock_;
  std::vector<Page> pages_;
  bool closed_ = false;
};

}  // namespace remap::cuda
