#include "settings.h"

#include <cstdlib>

namespace remap::emulated {
namespace {

bool power_of_two(std::uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

}  // namespace

Settings Settings::from_environment() {
  struct Variable {
    const char* variable;
    const char* name;
    double unit;
  };
  constexpr Variable kVariables[] = {
      {"REMAP_EMULATED_MEMORY", "memory", 1},
      {"REMAP_EMULATED_GRANULARITY", "granularity", 1},
      {"REMAP_EMULATED_DEVICES", "devices", 1},
      {"REMAP_EMULATED_DRIVER_VERSION", "driver_version", 1},
      {"REMAP_EMULATED_COPY_GBPS", "copy_bytes_per_s", 1e9},  // the next two say it for one direction
      {"REMAP_EMULATED_H2D_GBPS", "h2d_bytes_per_s", 1e9},
      {"REMAP_EMULATED_D2H_GBPS", "d2h_bytes_per_s", 1e9},
      {"REMAP_EMULATED_CHANNEL_OPS", "channel_ops", 1},
      {"REMAP_EMULATED_PIN_S_PER_GIB", "pin_ns_per_gib", 1e9},
      {"REMAP_EMULATED_MAP_US", "map_ns", 1e3},
      {"REMAP_EMULATED_UNMAP_US", "unmap_ns", 1e3},
      {"REMAP_EMULATED_SET_ACCESS_US", "set_access_ns", 1e3},
      {"REMAP_EMULATED_DRIVER_LOCK", "driver_lock", 1},
  };
  Settings settings;
  for (const Variable& each : kVariables) {
    const char* text = std::getenv(each.variable);
    if (text == nullptr || *text == '\0') continue;
    settings.set(each.name, static_cast<std::uint64_t>(std::strtod(text, nullptr) * each.unit));
  }
  return settings;
}

bool Settings::set(const std::string& name, std::uint64_t value) {
  constexpr std::uint64_t kMostDevices = 64;
  constexpr std::uint64_t kOsPage = 4096;
  if (name == "memory") {
    memory_bytes = value;
  } else if (name == "granularity") {
    if (!power_of_two(value) || value < kOsPage) return false;
    granularity = value;
  } else if (name == "devices") {
    if (value > kMostDevices) return false;
    devices = static_cast<int>(value);
  } else if (name == "driver_version") {
    driver_version = static_cast<int>(value);
  } else if (name == "h2d_bytes_per_s") {
    h2d_bytes_per_s = value;
  } else if (name == "d2h_bytes_per_s") {
    d2h_bytes_per_s = value;
  } else if (name == "copy_bytes_per_s") {
    h2d_bytes_per_s = d2h_bytes_per_s = value;
  } else if (name == "channel_ops") {
    if (value == 0) return false;
    channel_ops = value;
  } else if (name == "pin_ns_per_gib") {
    pin_ns_per_gib = value;
  } else if (name == "map_ns") {
    map_ns = value;
  } else if (name == "unmap_ns") {
    unmap_ns = value;
  } else if (name == "set_access_ns") {
    set_access_ns = value;
  } else if (name == "driver_lock") {
    driver_lock = value != 0;
  } else if (name == "jitter_us") {
    jitter_us = value;
  } else if (name == "lose_context") {
    lose_context = value != 0;
  } else if (name.compare(0, 10, "attribute.") == 0) {
    attributes[std::atoi(name.c_str() + 10)] = static_cast<int>(value);
  } else {
    return false;
  }
  return true;
}

int Settings::attribute(int which, CUdevice device) const {
  const auto set = attributes.find(which);
  if (set != attributes.end()) return set->second;
  switch (which) {
    case 33: return 1 + device;  // PCI bus
    case 75: return 9;           // compute capability, major
    case 102:                    // virtual memory management
    case 103:                    // pages as POSIX file descriptors
    case 113: return 1;          // read-only host registration
    default: return 0;           // among them: integrated, host page tables, GPUDirect RDMA, fabric handles
  }
}

}  // namespace remap::emulated
