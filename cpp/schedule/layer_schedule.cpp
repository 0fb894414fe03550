// SPDX-License-Identifier: Apache-2.0
#include "schedule/layer_schedule.h"

#include <algorithm>

namespace remap {

void LayerSchedule::configure(std::uint32_t positions, std::uint32_t buffers,
                              const std::vector<std::uint32_t>& contents) {
  // Everything that can throw comes first.
  std::vector<std::uint32_t> content(buffers, kNone);
  std::vector<std::uint32_t> open(buffers, kNone);
  for (std::uint32_t s = 0; s < buffers && s < contents.size(); ++s) {
    if (contents[s] < positions && contents[s] % buffers == s) content[s] = contents[s];
  }
  positions_ = positions;
  buffers_ = std::max<std::uint32_t>(buffers, 1);
  content_.swap(content);
  open_.swap(open);
  wanted_ = issued_ = pass_begin_ = pass_end_ = 0;
}

void LayerSchedule::begin_pass() noexcept {
  std::fill(open_.begin(), open_.end(), kNone);
  if (positions_ == 0) return;
  // A pass that was begun but never used (C at its beginning) is simply begun again.
  wanted_ = (wanted_ + positions_ - 1) / positions_ * positions_;
  issued_ = std::max(issued_, wanted_);
  pass_begin_ = wanted_;
  pass_end_ = wanted_ + positions_;
}

void LayerSchedule::end_pass() noexcept {
  std::fill(open_.begin(), open_.end(), kNone);
  wanted_ = std::max(wanted_, pass_end_);
  issued_ = std::max(issued_, wanted_);
}

std::uint64_t LayerSchedule::fetched_for(std::uint32_t buffer) const noexcept {
  for (std::uint64_t u = wanted_; u < issued_; ++u) {
    if (slot(u) == buffer) return u;
  }
  return issued_;
}

std::optional<LayerSchedule::Copy> LayerSchedule::next() noexcept {
  // At C + m every position is fetched once (then m <= beta): going on would say the same again for the pass after.
  while (positions_ != 0 && issued_ < wanted_ + positions_) {
    const std::uint32_t position = position_of(issued_);
    const std::uint32_t buffer = position % buffers_;
    if (content_[buffer] == position) {
      ++issued_;
      continue;
    }
    if (open_[buffer] != kNone || fetched_for(buffer) != issued_) return std::nullopt;
    return Copy{position, buffer};
  }
  return std::nullopt;
}

LayerSchedule::Claim LayerSchedule::claim(std::uint32_t position) noexcept {
  const std::uint32_t buffer = position % buffers_;
  if (open_[buffer] != kNone && open_[buffer] != position) return Claim::conflict;
  if (open_[buffer] == position) return content_[buffer] == position ? Claim::hit : Claim::miss;

  const bool in_order = wanted_ < pass_end_ && pass_begin_ + position >= wanted_;
  if (in_order) {
    // The uses between the expected one and this one are skipped: their buffers may be overwritten, none is being read.
    wanted_ = pass_begin_ + position + 1;
    issued_ = std::max(issued_, wanted_);
  }
  open_[buffer] = position;
  if (content_[buffer] == position) return Claim::hit;
  // A later use may have been fetched into this buffer already (only an extra use gets here with one): fetch it again.
  issued_ = fetched_for(buffer);
  content_[buffer] = kNone;
  return Claim::miss;
}

void LayerSchedule::done(std::uint32_t position) noexcept {
  const std::uint32_t buffer = position % buffers_;
  if (open_[buffer] == position) open_[buffer] = kNone;
}

void LayerSchedule::lost(std::uint32_t buffer) noexcept {
  issued_ = fetched_for(buffer);
  content_[buffer] = kNone;
}

void LayerSchedule::forget() noexcept {
  issued_ = wanted_;
  std::fill(content_.begin(), content_.end(), kNone);
}

bool LayerSchedule::check() const noexcept {
  if (issued_ < wanted_ || issued_ - wanted_ > positions_) return false;
  for (std::uint64_t u = wanted_; u < issued_; ++u) {
    if (content_[slot(u)] != position_of(u)) return false;
  }
  for (std::size_t s = 0; s < open_.size(); ++s) {
    if (open_[s] != kNone && content_[s] != open_[s] && content_[s] != kNone) return false;
  }
  return true;
}

}  // namespace remap
