// Primary contexts, one a device, and which of them is current on the calling thread.
#pragma once

#include <map>
#include <vector>

#include "journal.h"

namespace remap::emulated {

// All with Emulator::mutex held, but for the stack of the calling thread's own.
class Contexts {
 public:
  explicit Contexts(Journal& journal) : journal_(journal) {}

  // The calling thread's stack, the current one last.
  static std::vector<CUcontext>& stack();
  static CUcontext current() { return stack().empty() ? nullptr : stack().back(); }

  // A device's primary context is the same pointer each time.
  static CUcontext handle_of(CUdevice device);
  CUcontext retain(CUdevice device);
  // How often the device's context is retained.
  unsigned references(CUdevice device) const;
  void release(CUdevice device);
  unsigned references() const;

  CUdevice device_of(CUcontext context) const;
  // kSuccess; kInvalidContext for none or an unknown one, kContextIsDestroyed after the last release, else what it was lost to.
  CUresult state(CUcontext context) const;
  void lose(CUcontext context, CUresult error) { states_[context].error = error; }
  // For tests that lost one on purpose; a process cannot do that.
  void heal();

  CUresult push(CUcontext context);
  CUresult pop(CUcontext* context);
  CUresult set_current(CUcontext context);

 private:
  struct State {
    CUdevice device = 0;
    unsigned retained = 0;
    CUresult error = kSuccess;
  };
  Journal& journal_;
  std::map<CUcontext, State> states_;
};

}  // namespace remap::emulated
