// What the emulated machine is like: from the environment, and from tests (remapEmulatedConfigure).
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "driver_abi.h"

namespace remap::emulated {

struct Settings {
  std::uint64_t memory_bytes = std::uint64_t{4} << 30;  // of each device
  std::uint64_t granularity = std::uint64_t{2} << 20;   // a power of two
  std::uint64_t devices = 1;
  std::uint64_t driver_version = 13000;
  std::uint64_t h2d_bytes_per_s = 0, d2h_bytes_per_s = 0;  // 0: as fast as memory goes
  std::uint64_t channel_ops = 1024;                        // not done, a stream: then enqueueing blocks
  std::uint64_t pin_ns_per_gib = 0;                        // what page-locking costs
  // What mapping calls cost, for each page that the call concerns. Spent in the call, and not under Emulator::mutex.
  std::uint64_t map_ns = 0, unmap_ns = 0, set_access_ns = 0;
  std::uint64_t driver_lock = 0;  // nothing is enqueued while a mapping call lasts
  std::uint64_t jitter_us = 0;    // copies and fills begin late by a random time up to this
  // Whether work that fails takes its whole context with it, as on a device. By default it takes its stream alone, so that one
  // process can go on testing.
  std::uint64_t lose_context = 0;
  std::map<int, int> attributes;  // of devices, instead of the built-in answers

  static Settings from_environment();
  // By a name of settings.cpp, or attribute.N. False for an unknown name or a value that makes no sense.
  bool set(const std::string& name, std::uint64_t value);
  int attribute(int which, CUdevice device) const;
};

}  // namespace remap::emulated
