// SPDX-License-Identifier: Apache-2.0
#include "backend/sim/links.h"

#include <algorithm>
#include <limits>

namespace remap::sim {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

}  // namespace

// The first copy that is not over at `time`.
Links::Engine::const_iterator Links::first_after(const Engine& engine, double time) noexcept {
  return std::partition_point(engine.begin(), engine.end(), [&](const Busy& busy) { return busy.end <= time; });
}

// Bytes that begin to move at `moving`: at full rate but where the other engine's move as well.
double Links::end_of(double moving, double bytes, double rate, double duplex, const Engine& other) noexcept {
  if (duplex == 1) return moving + bytes / rate;
  double at = moving;
  for (auto busy = first_after(other, moving); busy != other.end(); ++busy) {
    if (busy->moving > at) {
      if (bytes <= (busy->moving - at) * rate) break;
      bytes -= (busy->moving - at) * rate;
      at = busy->moving;
    }
    const double slowed = rate * duplex;
    if (bytes <= (busy->end - at) * slowed) return at + bytes / slowed;
    bytes -= (busy->end - at) * slowed;
    at = busy->end;
  }
  return at + bytes / rate;
}

double Links::copy(SimRoute route, double earliest, std::size_t bytes) {
  const auto size = static_cast<double>(bytes);
  SimTraffic& traffic = traffic_[static_cast<std::size_t>(route)];
  double start = earliest;
  double end = 0;
  if (route == SimRoute::inside_device) {
    end = start + size / (options_.hbm_bytes_per_s / 2);
  } else {
    const bool down = route == SimRoute::to_device;
    const double rate = down ? options_.h2d_bytes_per_s : options_.d2h_bytes_per_s;
    Engine& engine = engines_[down ? 0 : 1];
    const Engine& other = engines_[down ? 1 : 0];
    const auto ends = [&] { return end_of(start + options_.copy_setup_s, size, rate, options_.duplex, other); };
    auto next = first_after(engine, start);
    for (end = ends(); next != engine.end() && next->start < end; ++next) {
      start = std::max(start, next->end);
      end = ends();
    }
    const double moving = start + options_.copy_setup_s;
    engine.insert(next, {start, moving, end, size / (end - moving) / options_.hbm_bytes_per_s});
  }
  ++traffic.copies;
  traffic.bytes += bytes;
  traffic.busy_s += end - start;
  return end;
}

double Links::compute(double start, double seconds) const noexcept {
  if (!options_.contention) return start + seconds;
  std::array<Engine::const_iterator, 2> next;
  for (std::size_t i = 0; i < 2; ++i) next[i] = first_after(engines_[i], start);
  double at = start;
  for (;;) {
    double rate = 1;
    double change = kNever;  // when the rate is another one
    for (std::size_t i = 0; i < 2; ++i) {
      if (next[i] == engines_[i].end()) continue;
      const bool moving = next[i]->moving <= at;
      if (moving) rate -= next[i]->share;
      change = std::min(change, moving ? next[i]->end : next[i]->moving);
    }
    if (change == kNever || seconds <= (change - at) * rate) return at + seconds / rate;
    seconds -= (change - at) * rate;
    at = change;
    for (std::size_t i = 0; i < 2; ++i) {
      if (next[i] != engines_[i].end() && next[i]->end <= at) ++next[i];
    }
  }
}

void Links::forget_before(double now) noexcept {
  for (Engine& engine : engines_) {
    while (!engine.empty() && engine.front().end <= now) engine.pop_front();
  }
}

}  // namespace remap::sim
