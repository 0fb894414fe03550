// The emulated driver: stands in for libcuda.so.1 where there is no GPU, to prove order and bookkeeping: which calls are made,
// in which state, with which arguments, and what still runs when something is taken away. It proves nothing about speed, and
// what it refuses is what the driver is documented to refuse; only a GPU can confirm that.
//
// Every call of a rule's breach gives the result that the driver would give and leaves a text in the journal. Where a
// driver's behaviour is undefined (handles that were destroyed), the context is lost as well.
#pragma once

#include <sys/types.h>

#include <condition_variable>
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
  bool mapping = false;  // a mapping call is at work, and the setting driver_lock was on when it began
  std::condition_variable mapping_ended;
  const pid_t process;  // a child made by fork cannot use the driver

  CUresult violate(CUresult result, std::string what) { return journal.violate(result, std::move(what)); }
  // A destroyed handle was used, or one that never was: a driver may crash, err, or hit what has the handle's memory now. Here
  // the breach is told and the current context is lost, so that nobody can go on as if the call had merely been refused.
  CUresult poison(std::string what);

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
  kEnqueues = 8,     // waits for mapping calls, with the setting driver_lock
  kWithContext = kInit | kContext,
  kUnsafeWithContext = kInit | kContext | kUnsafe,
  kEnqueuesWithContext = kInit | kContext | kEnqueues,
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
  if (refused != kSuccess) return refused;
  if ((needs & kEnqueues) != 0) emulator.mapping_ended.wait(lock, [&] { return !emulator.mapping; });
  return body(emulator, lock);
}

// Gives the lock up for so long and takes it again: what a call costs, which other calls need not wait for.
void spend(Lock& lock, std::uint64_t ns);

// A call that changes mappings or page-locks memory, for as long as it lasts. With the setting driver_lock it keeps others of its kind and every
// call that enqueues out, its cost included: a driver has locks of its own, which are not documented.
class MappingCall {
 public:
  MappingCall(Emulator& emulator, Lock& lock);
  ~MappingCall();  // with the lock held
  MappingCall(const MappingCall&) = delete;
  MappingCall& operator=(const MappingCall&) = delete;

 private:
  Emulator& emulator_;
  const bool exclusive_;
};

}  // namespace remap::emulated
