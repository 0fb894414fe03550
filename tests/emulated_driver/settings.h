// What the emulated machine is like: from the environment, and from tests (remapEmulatedConfigure).
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "driver_abi.h"

namespace remap::emulated {

struct Settings {
  std::size_t memory_bytes = std::size_t{4} << 30;  // REMAP_EMULATED_MEMORY, of each device
  std::size_t granularity = std::size_t{2} << 20;   // REMAP_EMULATED_GRANULARITY, a power of two
  int devices = 1;                                  // REMAP_EMULATED_DEVICES
  int driver_version = 13000;                       // REMAP_EMULATED_DRIVER_VERSION
  std::uint64_t h2d_bytes_per_s = 0;                // REMAP_EMULATED_H2D_GBPS; 0: as fast as memory goes
  std::uint64_t d2h_bytes_per_s = 0;                // REMAP_EMULATED_D2H_GBPS
  std::uint64_t channel_ops = 1024;                 // REMAP_EMULATED_CHANNEL_OPS, not done, a stream: then enqueueing blocks
  std::uint64_t pin_ns_per_gib = 0;                 // REMAP_EMULATED_PIN_S_PER_GIB: what page-locking costs
  // What mapping calls cost, for each page that the call concerns. Spent in the call, and not under Emulator::mutex.
  std::uint64_t map_ns = 0;         // REMAP_EMULATED_MAP_US
  std::uint64_t unmap_ns = 0;       // REMAP_EMULATED_UNMAP_US
  std::uint64_t set_access_ns = 0;  // REMAP_EMULATED_SET_ACCESS_US
  bool driver_lock = false;         // REMAP_EMULATED_DRIVER_LOCK: nothing is enqueued while a mapping call lasts
  std::uint64_t jitter_us = 0;                      // copies and fills begin late by a random time up to this
  // Whether work that fails takes its whole context with it, as on a device. By default it takes its stream alone, so that one
  // process can go on testing.
  bool lose_context = false;
  std::map<int, int> attributes;  // of devices, instead of the built-in answers

  static Settings from_environment();
  // By name: memory, granularity, devices, driver_version, h2d_bytes_per_s, d2h_bytes_per_s, copy_bytes_per_s
  // (both), channel_ops, pin_ns_per_gib, map_ns, unmap_ns, set_access_ns, driver_lock, jitter_us, lose_context, attribute.N. False for an unknown name or a value that makes no sense; nothing is changed then.
  bool set(const std::string& name, std::uint64_t value);
  int attribute(int which, CUdevice device) const;
};

}  // namespace remap::emulated
