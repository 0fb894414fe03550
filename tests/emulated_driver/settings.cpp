#include "settings.h"

#include <cstdlib>

namespace remap::emulated {
namespace {

bool power_of_two(std::uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

// The name, the environment's variable (REMAP_EMULATED_...) and what its unit is in the setting's, and where it is kept.
struct Known {
  const char* name;
  const char* variable;
  double unit;
  std::uint64_t Settings::* place;
};
constexpr Known kKnown[] = {
    {"memory", "MEMORY", 1, &Settings::memory_bytes},
    {"granularity", "GRANULARITY", 1, &Settings::granularity},
    {"devices", "DEVICES", 1, &Settings::devices},
    {"driver_version", "DRIVER_VERSION", 1, &Settings::driver_version},
    {"copy_bytes_per_s", "COPY_GBPS", 1e9, &Settings::h2d_bytes_per_s},  // and the other direction; the next two say it for one
    {"h2d_bytes_per_s", "H2D_GBPS", 1e9, &Settings::h2d_bytes_per_s},
    {"d2h_bytes_per_s", "D2H_GBPS", 1e9, &Settings::d2h_bytes_per_s},
    {"channel_ops", "CHANNEL_OPS", 1, &Settings::channel_ops},
    {"pin_ns_per_gib", "PIN_S_PER_GIB", 1e9, &Settings::pin_ns_per_gib},
    {"map_ns", "MAP_US", 1e3, &Settings::map_ns},
    {"unmap_ns", "UNMAP_US", 1e3, &Settings::unmap_ns},
    {"set_access_ns", "SET_ACCESS_US", 1e3, &Settings::set_access_ns},
    {"driver_lock", "DRIVER_LOCK", 1, &Settings::driver_lock},
    {"jitter_us", nullptr, 1, &Settings::jitter_us},
    {"lose_context", nullptr, 1, &Settings::lose_context},
};

bool sensible(const std::string& name, std::uint64_t value) {
  constexpr std::uint64_t kMostDevices = 64, kOsPage = 4096;
  if (name == "granularity") return power_of_two(value) && value >= kOsPage;
  if (name == "devices") return value <= kMostDevices;
  return name != "channel_ops" || value > 0;
}

}  // namespace

Settings Settings::from_environment() {
  Settings settings;
  for (const Known& each : kKnown) {
    if (each.variable == nullptr) continue;
    const char* text = std::getenv((std::string("REMAP_EMULATED_") + each.variable).c_str());
    if (text == nullptr || *text == '\0') continue;
    settings.set(each.name, static_cast<std::uint64_t>(std::strtod(text, nullptr) * each.unit));
  }
  return settings;
}

bool Settings::set(const std::string& name, std::uint64_t value) {
  if (name.compare(0, 10, "attribute.") == 0) {
    attributes[std::atoi(name.c_str() + 10)] = static_cast<int>(value);
    return true;
  }
  for (const Known& each : kKnown) {
    if (name != each.name || !sensible(name, value)) continue;
    this->*each.place = value;
    if (name == "copy_bytes_per_s") d2h_bytes_per_s = value;
    return true;
  }
  return false;
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
