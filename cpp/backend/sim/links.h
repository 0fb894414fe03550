// SPDX-License-Identifier: Apache-2.0
// When copies and kernels of the sim backend begin and end. Pure arithmetic on virtual seconds; the caller's lock covers it.
#pragma once

#include <array>
#include <cstddef>
#include <deque>

#include "remap/sim.h"

namespace remap::sim {

// One copy on an engine. Between `moving` and `end` its bytes are under way.
struct Busy {
  double start = 0;
  double moving = 0;
  double end = 0;
  double share = 0;  // of the device memory's bandwidth
};

class Links {
 public:
  explicit Links(const SimOptions& options) : options_(options) {}

  // Puts a copy into the first gap from `earliest` on that is long enough. Returns its end.
  double copy(SimRoute route, double earliest, std::size_t bytes);
  // When a kernel of `seconds` that starts at `start` is done, beside the copies that are known now.
  double compute(double start, double seconds) const noexcept;
  // Nothing will be put before `now` any more: entries that ended by then are forgotten.
  void forget_before(double now) noexcept;
  // Of an engine, in the order of time; no two overlap.
  const std::deque<Busy>& busy(SimRoute route) const { return engines_.at(static_cast<std::size_t>(route)); }
  const SimTraffic& traffic(SimRoute route) const noexcept { return traffic_[static_cast<std::size_t>(route)]; }

 private:
  using Engine = std::deque<Busy>;

  static Engine::const_iterator first_after(const Engine& engine, double time) noexcept;
  static double end_of(double moving, double bytes, double rate, double duplex, const Engine& other) noexcept;

  const SimOptions& options_;
  std::array<Engine, 2> engines_;  // by SimRoute
  std::array<SimTraffic, 3> traffic_{};
};

}  // namespace remap::sim
