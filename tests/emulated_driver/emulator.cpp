#include "emulator.h"

#include <unistd.h>

namespace remap::emulated {

pid_t current_process() { return getpid(); }

Emulator::Emulator() : process(getpid()) {}

// Never destroyed: workers may still wait in it when the process ends.
Emulator& Emulator::instance() {
  static auto* emulator = new Emulator;
  return *emulator;
}

CUresult admit(Emulator& emulator, const char* entry, unsigned needs) {
  const std::string name = entry;
  if (const CUresult injected = emulator.journal.arrived(name); injected != kSuccess) return injected;
  if (Streams::in_host_function()) return emulator.violate(kNotPermitted, name + " inside a host function of a stream");
  if ((needs & kInit) != 0 && !emulator.initialized) return emulator.violate(kNotInitialized, name + " before cuInit");
  if ((needs & kContext) != 0) {
    const CUresult state = emulator.contexts.state(Contexts::current());
    if (state == kInvalidContext) return emulator.violate(state, name + ": no current context");
    if (state == kContextIsDestroyed) return emulator.violate(state, name + ": the current context is released");
    if (state != kSuccess) return state;
  }
  return (needs & kUnsafe) != 0 ? emulator.streams.unsafe(entry) : kSuccess;
}

}  // namespace remap::emulated
