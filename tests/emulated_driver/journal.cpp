#include "journal.h"

#include <utility>

namespace remap::emulated {

CUresult Journal::violate(CUresult result, std::string what) {
  violations_.push_back(std::move(what));
  return result;
}

void Journal::arm(const std::string& point, std::uint64_t nth, CUresult code, bool forever) {
  faults_[point] = {nth, code, forever};
}

CUresult Journal::arrived(const std::string& point) {
  ++calls_[point];
  const auto found = faults_.find(point);
  if (found == faults_.end()) return kSuccess;
  Fault& fault = found->second;
  if (fault.nth > 1) {
    --fault.nth;
    return kSuccess;
  }
  const CUresult code = fault.code;
  if (!fault.forever) faults_.erase(found);
  return code;
}

std::uint64_t Journal::calls(const char* entry) const {
  if (entry != nullptr) {
    const auto found = calls_.find(entry);
    return found == calls_.end() ? 0 : found->second;
  }
  std::uint64_t sum = 0;
  for (const auto& [point, count] : calls_) sum += point.compare(0, 4, "run:") == 0 ? 0 : count;
  return sum;
}

void Journal::reset() { *this = Journal(); }

}  // namespace remap::emulated
