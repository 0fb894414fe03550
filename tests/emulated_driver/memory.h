// Device memory: reserved addresses, pages, and what stands where. Rules and results are those of the driver's virtual memory
// calls; where its documentation leaves a choice the stricter reading holds.
//
// A page is a range of a memfd, a mapping is a MAP_SHARED | MAP_FIXED view of it, a reservation is PROT_NONE: the processor may
// touch what is mapped with access, and faults on everything else, as a kernel would.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "journal.h"
#include "settings.h"

namespace remap::emulated {

// All with Emulator::mutex held.
class Memory {
 public:
  Memory(const Settings& settings, Journal& journal) : settings_(settings), journal_(journal) {}

  CUresult reserve(CUdeviceptr* at, std::size_t bytes, std::size_t alignment, unsigned long long flags);
  CUresult free_range(CUdeviceptr at, std::size_t bytes);

  CUresult granularity(std::size_t* bytes, const CUmemAllocationProp* properties, int option);
  // A new page holds garbage, or what the page before it held.
  CUresult create(CUmemGenericAllocationHandle* page, std::size_t bytes, const CUmemAllocationProp* properties,
                  unsigned long long flags);
  // Of one that was made with that type: a descriptor, the caller's.
  CUresult export_page(int* descriptor, CUmemGenericAllocationHandle page, int type, unsigned long long flags);
  // The same memory, in any process; the descriptor stays the caller's.
  CUresult import_page(CUmemGenericAllocationHandle* page, int descriptor, int type);
  // Mappings keep the memory.
  CUresult release(CUmemGenericAllocationHandle page);

  CUresult map(CUdeviceptr at, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle page,
               unsigned long long flags);
  // kSuccess if the range is whole mappings without holes; else the violation is recorded, named after `entry`.
  CUresult whole_mappings(const char* entry, CUdeviceptr at, std::size_t bytes);
  CUresult unmap(CUdeviceptr at, std::size_t bytes);
  CUresult set_access(CUdeviceptr at, std::size_t bytes, const CUmemAccessDesc* descriptors, std::size_t count);

  bool reserved(CUdeviceptr at) const;
  std::size_t mappings_in(CUdeviceptr at, std::size_t bytes) const;  // that begin in it
  // Whether every byte is mapped; with `access`, whether `device` may use it so as well.
  bool mapped(CUdeviceptr at, std::size_t bytes) const;
  bool accessible(CUdeviceptr at, std::size_t bytes, CUdevice device, int access) const;

  std::size_t used_bytes(CUdevice device) const;
  std::size_t reservations() const { return reservations_.size(); }
  std::size_t mappings() const { return mappings_.size(); }
  std::size_t pages() const { return pages_; }
  bool empty() const { return reservations_.empty() && pages_ == 0; }

 private:
  // Physical memory: lives as long as a handle or a mapping refers to it.
  struct Physical {
    Memory* memory = nullptr;
    CUdevice device = 0;
    std::size_t bytes = 0;
    int file = -1;
    std::size_t offset = 0;
    bool shareable = false;  // then `file` is the page's own, and other processes may have it too
    bool imported = false;   // and who made it counts it
    Physical() = default;
    Physical(const Physical&) = delete;
    Physical& operator=(const Physical&) = delete;
    ~Physical();
  };
  struct Mapping {
    std::size_t bytes = 0;
    std::shared_ptr<Physical> page;
    std::map<CUdevice, int> access;
  };
  using Mappings = std::map<CUdeviceptr, Mapping>;

  CUresult check_properties(const char* entry, const CUmemAllocationProp* properties);
  CUresult find_place(Physical& page);
  CUresult find_place_of_its_own(Physical& page);
  void give_back(const Physical& page) noexcept;
  const Mapping* mapping_at(CUdeviceptr at, CUdeviceptr* begin) const;

  const Settings& settings_;
  Journal& journal_;
  // Declared before what refers to pages, whose end gives space back to these.
  int file_ = -1;
  std::size_t file_bytes_ = 0;
  std::size_t in_file_ = 0;                                // pages in `file_`
  std::map<std::size_t, std::vector<std::size_t>> spare_;  // page size -> offsets
  std::map<CUdevice, std::size_t> used_;
  std::size_t pages_ = 0;
  std::map<CUdeviceptr, std::size_t> reservations_;
  std::map<CUmemGenericAllocationHandle, std::shared_ptr<Physical>> handles_;
  Mappings mappings_;
  CUmemGenericAllocationHandle next_handle_ = 0x7000'0001;
};

}  // namespace remap::emulated
