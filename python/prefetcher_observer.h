// SPDX-License-Identifier: Apache-2.0
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
  bool released(std::uint32_t layer, const std::function<bool()>& current) noexcept override {
    return prefetcher_->released(layer, current);
  }
  bool failed(std::uint32_t layer, std::exception_ptr error, const std::function<bool()>& current) noexcept override {
    return prefetcher_->failed(layer, std::move(error), current);
  }

 private:
  std::shared_ptr<Prefetcher> prefetcher_;
};

}  // namespace remap
