#include "emulator.h"

#include <unistd.h>

#include <chrono>
#include <thread>
#include <utility>

namespace remap::emulated {

pid_t current_process() { return getpid(); }

Emulator::Emulator() : process(getpid()) {}

// Never destroyed: workers may still wait in it when the process ends.
Emulator& Emulator::instance() {
  static auto* emulator = new Emulator;
  return *emulator;
}

CUresult Emulator::poison(std::string what) {
  contexts.lose(Contexts::current(), kIllegalAddress);
  return violate(kIllegalAddress, std::move(what) + ": undefined; from here on the context is lost");
}

void spend(Lock& lock, std::uint64_t ns) {
  if (ns == 0) return;
  // A thread that sleeps wakes late by about this much: the last of the time is waited for awake.
  constexpr std::chrono::microseconds kAwake{100};
  lock.unlock();
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(ns);
  std::this_thread::sleep_until(until - kAwake);
  while (std::chrono::steady_clock::now() < until) {
  }
  lock.lock();
}

MappingCall::MappingCall(Emulator& emulator, Lock& lock) : emulator_(emulator), exclusive_(emulator.settings.driver_lock != 0) {
  if (!exclusive_) return;
  emulator_.mapping_ended.wait(lock, [this] { return !emulator_.mapping; });
  emulator_.mapping = true;
}

MappingCall::~MappingCall() {
  if (!exclusive_) return;
  emulator_.mapping = false;
  emulator_.mapping_ended.notify_all();
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
