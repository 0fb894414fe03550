// Page-locked ranges of the application's memory.
#pragma once

#include <cstdint>
#include <map>

#include "journal.h"

namespace remap::emulated {

// All with Emulator::mutex held.
class HostMemory {
 public:
  explicit HostMemory(Journal& journal) : journal_(journal) {}

  struct Registration {
    std::uint64_t id = 0;  // never given twice: work remembers whose memory it uses
    std::size_t bytes = 0;
    bool read_only = false;
    CUcontext context = nullptr;
  };

  // Refuses a part of any OS page that is registered already: that is what is locked. Memory that cannot be written needs
  // the read-only flag.
  CUresult add(void* at, std::size_t bytes, unsigned flags, CUcontext context);
  CUresult remove(void* at);
  // The registration in which the whole range lies; null if there is none.
  const Registration* covering(std::uintptr_t at, std::size_t bytes) const;
  // Whether a registration holds a byte of the range.
  bool touches(std::uintptr_t at, std::size_t bytes) const;
  bool alive(std::uint64_t id) const;
  // 0 if `at` is not the start of one.
  std::size_t bytes_at(void* at) const;
  std::size_t count() const { return ranges_.size(); }
  std::size_t count_of(CUcontext context) const;

 private:
  Journal& journal_;
  std::map<std::uintptr_t, Registration> ranges_;
  std::uint64_t next_id_ = 1;
};

}  // namespace remap::emulated
