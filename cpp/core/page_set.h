// SPDX-License-Identifier: Apache-2.0
// A set of pages: a bit for each page up to the largest. Pages of an arena are numbered from 0.
#pragma once

#include <algorithm>
#include <vector>

#include "remap/plan.h"

namespace remap {

class PageSet {
 public:
  PageSet() = default;
  explicit PageSet(const std::vector<PageId>& pages) { insert(pages); }
  explicit PageSet(const std::vector<std::vector<PageId>>& lists) {
    for (const std::vector<PageId>& pages : lists) insert(pages);
  }
  void insert(PageId page) {
    if (page >= in_.size()) in_.resize(std::max<std::size_t>(page + std::size_t{1}, 2 * in_.size()), false);
    in_[page] = true;
  }
  void insert(const std::vector<PageId>& pages) {
    for (const PageId page : pages) insert(page);
  }
  bool count(PageId page) const noexcept { return page < in_.size() && in_[page]; }
  bool meets(const std::vector<PageId>& pages) const {
    return std::any_of(pages.begin(), pages.end(), [this](PageId page) { return count(page); });
  }

 private:
  std::vector<bool> in_;
};

}  // namespace remap
