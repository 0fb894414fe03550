// SPDX-License-Identifier: Apache-2.0
// A set of pages: a bit for each page up to the largest. Pages of an arena are numbered from 0.
#pragma once

#include <algorithm>
#include <bitset>
#include <cstdint>
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
    const std::size_t word = page / kBits;
    if (word >= words_.size()) words_.resize(std::max(word + 1, 2 * words_.size()));
    words_[word] |= bit(page);
  }
  void insert(const std::vector<PageId>& pages) {
    for (const PageId page : pages) insert(page);
  }
  void erase(PageId page) noexcept {
    if (page / kBits < words_.size()) words_[page / kBits] &= ~bit(page);
  }
  bool count(PageId page) const noexcept { return page / kBits < words_.size() && (words_[page / kBits] & bit(page)) != 0; }
  bool meets(const std::vector<PageId>& pages) const {
    return std::any_of(pages.begin(), pages.end(), [this](PageId page) { return count(page); });
  }
  // How many pages are in both.
  std::size_t shared(const PageSet& other) const noexcept {
    std::size_t found = 0;
    for (std::size_t at = 0; at < std::min(words_.size(), other.words_.size()); ++at) {
      found += std::bitset<kBits>(words_[at] & other.words_[at]).count();
    }
    return found;
  }

 private:
  static constexpr std::size_t kBits = 64;
  static std::uint64_t bit(PageId page) noexcept { return std::uint64_t{1} << page % kBits; }
  std::vector<std::uint64_t> words_;
};

}  // namespace remap
