// What the library exports: cuGetProcAddress and the few symbols that are looked up by name, and the control calls.
#include "control.h"

#include <cstring>
#include <iterator>
#include <string>

#include "emulator.h"
#include "entry_points.h"

REMAP_EMULATED_EXPORT int cuGetProcAddress(const char* symbol, void** function, int version, std::uint64_t flags);
REMAP_EMULATED_EXPORT int cuGetProcAddress_v2(const char* symbol, void** function, int version, std::uint64_t flags, int* status);

namespace remap::emulated {
namespace {

struct EntryPoint {
  const char* name;
  int version;
  void* function;
};
const EntryPoint kEntryPoints[] = {
#define REMAP_EMULATED_LIST(name, version, parameters) {#name, version, reinterpret_cast<void*>(&entry::name)},
    REMAP_EMULATED_ENTRY_POINTS(REMAP_EMULATED_LIST)
#undef REMAP_EMULATED_LIST
    {"cuGetProcAddress", 11030, reinterpret_cast<void*>(&cuGetProcAddress)},
    {"cuGetProcAddress", 12000, reinterpret_cast<void*>(&cuGetProcAddress_v2)},
};

enum : int { kFound = 0, kSymbolMissing = 1, kVersionTooLow = 2 };
enum : std::uint64_t { kDefaultLookup = 0, kLegacyLookup = 1 };  // per-thread variants of entry points are not served

CUresult look_up(const char* symbol, void** function, int version, std::uint64_t flags, int* status) {
  if (symbol == nullptr || function == nullptr || flags > kLegacyLookup) return kInvalidValue;
  Emulator& e = Emulator::instance();
  int offered = 0;
  {
    const Lock lock(e.mutex);
    offered = static_cast<int>(e.settings.driver_version);
  }
  if (version > offered) return kInvalidValue;
  const EntryPoint* best = nullptr;
  bool known = false;
  for (const EntryPoint& each : kEntryPoints) {
    if (std::strcmp(each.name, symbol) != 0 || each.version > offered) continue;
    known = true;
    if (each.version <= version && (best == nullptr || each.version > best->version)) best = &each;
  }
  *function = best != nullptr ? best->function : nullptr;
  if (status != nullptr) *status = best != nullptr ? kFound : known ? kVersionTooLow : kSymbolMissing;
  return best != nullptr || status != nullptr ? kSuccess : kNotFound;
}

}  // namespace
}  // namespace remap::emulated

using remap::emulated::Emulator;
using remap::emulated::Lock;

int cuGetProcAddress_v2(const char* symbol, void** function, int version, std::uint64_t flags, int* status) {
  int found = 0;
  return remap::emulated::look_up(symbol, function, version, flags, status != nullptr ? status : &found);
}
int cuGetProcAddress(const char* symbol, void** function, int version, std::uint64_t flags) {
  return remap::emulated::look_up(symbol, function, version, flags, nullptr);
}
REMAP_EMULATED_EXPORT int cuInit(unsigned flags) { return remap::emulated::entry::cuInit(flags); }
REMAP_EMULATED_EXPORT int cuDriverGetVersion(int* version) { return remap::emulated::entry::cuDriverGetVersion(version); }

// ---- control -----------------------------------------------------------------------------------------------------------

int remapEmulatedVersion() { return 1; }

void remapEmulatedReset() {
  Emulator& e = Emulator::instance();
  const Lock lock(e.mutex);
  const std::size_t granularity = e.settings.granularity;
  e.settings = remap::emulated::Settings::from_environment();
  if (!e.memory.empty()) e.settings.granularity = granularity;
  e.journal.reset();
  e.contexts.heal();
  e.streams.heal();
}

int remapEmulatedConfigure(const char* name, std::uint64_t value) {
  Emulator& e = Emulator::instance();
  const Lock lock(e.mutex);
  remap::emulated::Settings changed = e.settings;
  if (name == nullptr || !changed.set(name, value)) return -1;
  const bool geometry = changed.granularity != e.settings.granularity || changed.devices != e.settings.devices;
  if (geometry && !e.memory.empty()) return -2;
  e.settings = changed;
  return 0;
}

void remapEmulatedArm(const char* name, std::uint64_t nth, int code, int forever) {
  Emulator& e = Emulator::instance();
  const Lock lock(e.mutex);
  e.journal.arm(name, nth, code, forever != 0);
}

void remapEmulatedDisarm() {
  Emulator& e = Emulator::instance();
  const Lock lock(e.mutex);
  e.journal.disarm();
}

std::uint64_t remapEmulatedCalls(const char* name) {
  Emulator& e = Emulator::instance();
  const Lock lock(e.mutex);
  return e.journal.calls(name);
}

const char* remapEmulatedEntryPoint(std::uint64_t index) {
  return index < std::size(remap::emulated::kEntryPoints) ? remap::emulated::kEntryPoints[index].name : nullptr;
}

std::uint64_t remapEmulatedViolations() {
  Emulator& e = Emulator::instance();
  const Lock lock(e.mutex);
  return e.journal.violations().size();
}

const char* remapEmulatedViolation(std::uint64_t index) {
  thread_local std::string text;
  Emulator& e = Emulator::instance();
  const Lock lock(e.mutex);
  if (index >= e.journal.violations().size()) return nullptr;
  text = e.journal.violations()[index];
  return text.c_str();
}

std::uint64_t remapEmulatedPageable() {
  Emulator& e = Emulator::instance();
  const Lock lock(e.mutex);
  return e.journal.pageable();
}

std::uint64_t remapEmulatedLive(const char* kind) {
  Emulator& e = Emulator::instance();
  const Lock lock(e.mutex);
  const std::string what = kind == nullptr ? "" : kind;
  if (what == "reservations") return e.memory.reservations();
  if (what == "mappings") return e.memory.mappings();
  if (what == "pages") return e.memory.pages();
  if (what == "streams") return e.streams.streams();
  if (what == "events") return e.streams.events();
  if (what == "registrations") return e.host.count();
  if (what == "contexts") return e.contexts.references();
  if (what == "work") return e.streams.unfinished();
  if (what == "blocked") return e.streams.blocked();
  return ~std::uint64_t{0};
}
