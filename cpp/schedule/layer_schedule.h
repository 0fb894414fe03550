// SPDX-License-Identifier: Apache-2.0
// LayerSchedule: which copy into the ring may be issued when. Pure: it knows no device, no memory, no thread and no clock.
//
// Streamed layers are called by their position j = 0 .. m-1 in the pass. Slots are fixed: position j always uses ring
// buffer j mod beta (addresses never change, so captured graphs stay valid). The uses of all passes form one sequence,
// use u being position u mod m of pass u div m, so looking ahead crosses the end of a pass by itself.
//
//   wanted_ = C   first use that the computation has not asked for
//   issued_ = I   first use whose copy is neither issued nor superfluous; C <= I <= C + m
//   open_[s]      the position whose use of buffer s is claimed and not done
//   content_[s]   the position whose bytes buffer s has, or will have when the last copy issued into it is finished
//
// Invariants (checked by check()):
//   for all u in [C, I): content_[slot(u)] == position(u)          layers fetched ahead are still there
//   for all s: open_[s] == kNone or content_[s] in {open_[s], kNone}   no copy overwrites a buffer that is being read
// The first one bounds I - C by min(m, beta), so the loops over [C, I) below are short.
//
// Copies are handed out strictly in use order: the copy for use I waits until its buffer is neither open nor wanted by an
// earlier use, and nothing overtakes it. That is D_k = max(D_{k-1}, C_{prev(k)}) + tau_k, the recurrence of the schedule
// mathematics. A buffer that already has the wanted bytes needs no copy: a buffer with a single occupant (m = 3, beta = 2:
// buffer 1) is loaded once, and what an abandoned pass left behind is used where the new pass wants it.
//
// The computation may deviate: skip positions (early exit, layer drop), repeat one, ask out of order. Asking forward
// skips what lies between; asking backward is an extra use, served from the buffer if it still has the bytes, otherwise
// by a copy on demand, which takes the buffer from the use it was fetched for, and that use is fetched again later.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace remap {

class LayerSchedule {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  struct Copy {
    std::uint32_t position;
    std::uint32_t buffer;
  };

  enum class Claim : std::uint8_t {
    hit,       // the buffer has the bytes, or a copy that was issued brings them
    miss,      // the caller must issue the copy now (and call issued()), or give up (done())
    conflict,  // another position's use of the same buffer is open: nothing was changed
  };

  // `contents[s]` is what buffer s already has (a position of the new numbering that uses buffer s, else ignored); missing
  // entries mean nothing. No pass is begun. Pre: buffers > 0 or positions == 0.
  void configure(std::uint32_t positions, std::uint32_t buffers, const std::vector<std::uint32_t>& contents = {});

  std::uint32_t positions() const noexcept { return positions_; }
  std::uint32_t buffer_of(std::uint32_t position) const noexcept { return position % buffers_; }
  std::uint32_t content(std::uint32_t buffer) const noexcept { return content_[buffer]; }
  std::uint32_t open(std::uint32_t buffer) const noexcept { return open_[buffer]; }

  // Both forget open uses: before, the caller has made sure that no copy issued from now on can overtake their readers.
  // begin_pass after an unfinished pass skips the rest of that pass.
  void begin_pass() noexcept;
  void end_pass() noexcept;

  // The next copy in use order, if it may be issued now. Call issued() when it is, and ask again, until there is none.
  std::optional<Copy> next() noexcept;
  // Whether next() is for a use of a later pass than the present one.
  bool next_is_later() const noexcept { return issued_ >= pass_end_; }
  void issued(const Copy& copy) noexcept { content_[copy.buffer] = copy.position; }

  // The computation wants to read `position`. Asking again before done() changes nothing.
  Claim claim(std::uint32_t position) noexcept;
  // The computation is finished with it, or a copy behind its reader is ordered: the buffer may be overwritten.
  void done(std::uint32_t position) noexcept;

  // The contents of a buffer (all buffers) are unknown.
  void lost(std::uint32_t buffer) noexcept;
  void forget() noexcept;

  bool check() const noexcept;

 private:
  std::uint32_t position_of(std::uint64_t use) const noexcept { return static_cast<std::uint32_t>(use % positions_); }
  std::uint32_t slot(std::uint64_t use) const noexcept { return position_of(use) % buffers_; }
  // The use in [C, I) that buffer `buffer` was fetched for, or I.
  std::uint64_t fetched_for(std::uint32_t buffer) const noexcept;

  std::uint32_t positions_ = 0;  // m
  std::uint32_t buffers_ = 1;    // beta
  std::vector<std::uint32_t> content_;
  std::vector<std::uint32_t> open_;
  std::uint64_t wanted_ = 0;      // C
  std::uint64_t issued_ = 0;      // I
  std::uint64_t pass_begin_ = 0;  // the current pass is [pass_begin_, pass_end_); before the first one it is empty
  std::uint64_t pass_end_ = 0;
};

}  // namespace remap
