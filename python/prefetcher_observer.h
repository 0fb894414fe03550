// Joins two parts that do not know each other: the executor's worker tells the prefetcher that a region is in place.
#pragma once

#include <memory>
#include <utility>

#include "remap/executor.h"
#include "remap/prefetcher.h"

namespace remap {

class PrefetcherObserver final : public PointObserver {
 public:
  explicit PrefetcherObserver(std::shared_ptr<Prefetcher> prefetcher) : prefetcher_(std::move(prefetcher)) {}
  void released(std::uint32_t layer) noexcept override { prefetcher_->released(layer); }
  void failed(std::uint32_t layer, std::exception_ptr error) noexcept override {
    prefetcher_->failed(layer, std::move(error));
  }

 private:
  std::shared_ptr<Prefetcher> prefetcher_;
};

}  // namespace remap
