// What tests ask the emulated driver about, and what they tell it to fail: rule violations, counts of calls, injected errors.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "driver_abi.h"

namespace remap::emulated {

// All with Emulator::mutex held.
class Journal {
 public:
  // A rule was broken: remembered, and `result` handed through.
  CUresult violate(CUresult result, std::string what);
  const std::vector<std::string>& violations() const { return violations_; }

  // A copy whose host side is not page-locked. Allowed; a device would make its caller wait.
  void pageable_copy() { ++pageable_; }
  std::uint64_t pageable() const { return pageable_; }

  // The nth arrival (1: the next) at `point` gives `code`; with `forever`, all from then on. A point is an entry point's name,
  // or "run:" and the name of one that enqueues: its work then fails while it runs on its stream.
  void arm(const std::string& point, std::uint64_t nth, CUresult code, bool forever);
  void disarm() { faults_.clear(); }
  // Counts the arrival; the injected error, or kSuccess.
  CUresult arrived(const std::string& point);
  std::uint64_t calls(const char* entry) const;  // null: of all entry points

  void reset();

 private:
  struct Fault {
    std::uint64_t nth = 0;
    CUresult code = kSuccess;
    bool forever = false;
  };
  std::vector<std::string> violations_;
  std::uint64_t pageable_ = 0;
  std::map<std::string, Fault> faults_;
  std::map<std::string, std::uint64_t> calls_;
};

}  // namespace remap::emulated
