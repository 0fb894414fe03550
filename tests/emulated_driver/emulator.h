// The emulated driver: stands in for libcuda.so.1 where there is no GPU, to prove order and bookkeeping: which calls are made,
// in which state, with which arguments, and what still runs when something is taken away. It proves nothing about speed, and
// what it refuses is what the driver is documented to refuse; only a GPU can confirm that.
//
// Every call of a rule's breach gives the result that the driver would give and leaves a text in the journal.
#pragma once

#include <sys/types.h>

#include <mutex>
#include <string>

#include "contexts.h"
#include "host_memory.h"
#include "journal.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"

namespace remap::emulated {

class Emulator {
 public:
  static Emulator& instance();

  std::mutex mutex;  // guards all below but `process`
  Settings settings = Settings::from_environment();
  Journal journal;
  Contexts contexts{journal};
  HostMemory host{journal};
  Memory memory{settings, journal};
  Streams streams{*this};
  bool initialized = false;
  const pid_t process;  // a child made by fork cannot use the driver

  CUresult violate(CUresult result, std::string what) { return journal.violate(result, std::move(what)); }

 private:
  Emulator();
};

pid_t current_process();

// What an entry point needs; they add up.
enum Needs : unsigned {
  kNothing = 0,
  kInit = 1,         // cuInit
  kContext = 2,      // a current context that is not lost
  kUnsafe = 4,       // is unsafe while somebody captures
  kWithContext = kInit | kContext,
  kUnsafeWithContext = kInit | kContext | kUnsafe,
};

// What each entry point begins with, the mutex held: kSuccess, an injected error, or the rule that was broken.
CUresult admit(Emulator& emulator, const char* entry, unsigned needs);

// An entry point: `body(emulator, lock)` if it is admitted.
template <typename Body>
CUresult serve(const char* entry, unsigned needs, Body&& body) {
  Emulator& emulator = Emulator::instance();
  // Not even the lock: the thread that holds it may not exist in the child.
  if (emulator.process != current_process()) return kNotInitialized;
  Lock lock(emulator.mutex);
  const CUresult refused = admit(emulator, entry, needs);
  return refused != kSuccess ? refused : body(emulator, lock);
}

}  // namespace remap::emulated
