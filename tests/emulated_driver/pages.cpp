// Pages: physical memory and its handles.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "memory.h"
#include "text.h"

namespace remap::emulated {
namespace {

constexpr unsigned char kGarbage = 0xA5;  // a new page's bytes: a driver does not promise zeroes
constexpr std::size_t kWorthTrimming = std::size_t{64} << 20;
constexpr int kAttributeRdma = 110;
constexpr int kAttributeFabric = 128;

const std::string kName = "remap-emulated-cuda";

int new_file(const std::string& name = kName) {
  constexpr unsigned kCloseOnExec = 1;
  return static_cast<int>(syscall(SYS_memfd_create, name.c_str(), kCloseOnExec));
}

// A shareable page's file is named after its device: all that an importing process learns of it.
int device_of_file(int file) {
  char text[128] = {};
  if (readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), text, sizeof(text) - 1) < 0) return -1;
  const std::string name = "/memfd:" + kName + ":";
  return std::strncmp(text, name.c_str(), name.size()) == 0 ? std::atoi(text + name.size()) : -1;
}

bool extend(int file, std::size_t from, std::size_t bytes) {
  if (ftruncate(file, static_cast<off_t>(from + bytes)) != 0) return false;
  void* view = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(from));
  if (view == MAP_FAILED) return false;
  std::memset(view, kGarbage, bytes);
  munmap(view, bytes);
  return true;
}

}  // namespace

Memory::Physical::~Physical() {
  if (memory != nullptr) memory->give_back(*this);
}

CUresult Memory::check_properties(const char* entry, const CUmemAllocationProp* properties) {
  const std::string name = entry;
  if (properties == nullptr || properties->type != kPinnedAllocation || properties->location.type != kDeviceLocation) {
    return journal_.violate(kInvalidValue, name + ": not a pinned allocation on a device");
  }
  const CUdevice device = properties->location.id;
  if (device < 0 || device >= static_cast<int>(settings_.devices)) {
    return journal_.violate(kInvalidDevice, name + ": no device " + std::to_string(device));
  }
  const int types = properties->requestedHandleTypes;
  if ((types & ~(kPosixFd | kFabricHandle)) != 0 || properties->win32HandleMetaData != nullptr) {
    return journal_.violate(kInvalidValue, name + ": handle types " + std::to_string(types));
  }
  const bool fabric = (types & kFabricHandle) != 0 && settings_.attribute(kAttributeFabric, device) == 0;
  const bool rdma = properties->allocFlags.gpuDirectRDMACapable != 0 && settings_.attribute(kAttributeRdma, device) == 0;
  if (fabric || rdma) return journal_.violate(kNotSupported, name + ": the device has no " + (fabric ? "fabric" : "RDMA"));
  return kSuccess;
}

CUresult Memory::granularity(std::size_t* bytes, const CUmemAllocationProp* properties, int option) {
  if (bytes == nullptr || option < 0 || option > 1) {
    return journal_.violate(kInvalidValue, "cuMemGetAllocationGranularity: option " + std::to_string(option));
  }
  const CUresult refused = check_properties("cuMemGetAllocationGranularity", properties);
  if (refused == kSuccess) *bytes = settings_.granularity;
  return refused;
}

CUresult Memory::create(CUmemGenericAllocationHandle* handle, std::size_t bytes, const CUmemAllocationProp* properties,
                        unsigned long long flags) {
  if (handle == nullptr || flags != 0) return journal_.violate(kInvalidValue, "cuMemCreate: no place for a handle, or flags");
  if (const CUresult refused = check_properties("cuMemCreate", properties); refused != kSuccess) return refused;
  if (bytes == 0 || bytes % settings_.granularity != 0) {
    return journal_.violate(kInvalidValue, "cuMemCreate: " + std::to_string(bytes) + " bytes are not a multiple of the " +
                                               "granularity " + std::to_string(settings_.granularity));
  }
  const CUdevice device = properties->location.id;
  if (bytes > settings_.memory_bytes - std::min(settings_.memory_bytes, used_bytes(device))) return kOutOfMemory;
  auto page = std::make_shared<Physical>();
  page->device = device;
  page->bytes = bytes;
  page->shareable = (properties->requestedHandleTypes & kPosixFd) != 0;
  const CUresult failed = page->shareable ? find_place_of_its_own(*page) : find_place(*page);
  if (failed != kSuccess) return failed;
  page->memory = this;
  used_[device] += bytes;
  ++pages_;
  *handle = next_handle_++;
  handles_.emplace(*handle, std::move(page));
  return kSuccess;
}

CUresult Memory::find_place(Physical& page) {
  if (file_ < 0) file_ = new_file();
  if (file_ < 0) return kOutOfMemory;
  std::vector<std::size_t>& spare = spare_[page.bytes];
  if (!spare.empty()) {
    page.offset = spare.back();  // with whatever stood there: another process's page would be no cleaner
    spare.pop_back();
  } else {
    if (!extend(file_, file_bytes_, page.bytes)) return kOutOfMemory;
    page.offset = file_bytes_;
    file_bytes_ += page.bytes;
  }
  page.file = file_;
  ++in_file_;
  return kSuccess;
}

CUresult Memory::find_place_of_its_own(Physical& page) {
  page.file = new_file(kName + ":" + std::to_string(page.device));
  if (page.file >= 0 && extend(page.file, 0, page.bytes)) return kSuccess;
  if (page.file >= 0) close(page.file);
  return kOutOfMemory;
}

CUresult Memory::export_page(int* descriptor, CUmemGenericAllocationHandle handle, int type, unsigned long long flags) {
  const auto found = handles_.find(handle);
  if (found == handles_.end() || descriptor == nullptr || flags != 0 || type != kPosixFd || !found->second->shareable) {
    return journal_.violate(kInvalidValue, "cuMemExportToShareableHandle: expected a page that was made with handle type 1");
  }
  const int copy = fcntl(found->second->file, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return kOutOfMemory;
  *descriptor = copy;
  return kSuccess;
}

CUresult Memory::import_page(CUmemGenericAllocationHandle* handle, int descriptor, int type) {
  struct stat found = {};
  const int device = device_of_file(descriptor);
  if (handle == nullptr || type != kPosixFd || device < 0 || fstat(descriptor, &found) != 0) {
    return journal_.violate(kInvalidValue, "cuMemImportFromShareableHandle: expected the descriptor of a shared page");
  }
  if (device >= static_cast<int>(settings_.devices)) {
    return journal_.violate(kInvalidDevice, "cuMemImportFromShareableHandle: no device " + std::to_string(device));
  }
  auto page = std::make_shared<Physical>();
  page->file = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (page->file < 0) return kOutOfMemory;
  page->device = device;
  page->bytes = static_cast<std::size_t>(found.st_size);
  page->shareable = page->imported = true;
  page->memory = this;
  ++pages_;
  *handle = next_handle_++;
  handles_.emplace(*handle, std::move(page));
  return kSuccess;
}

void Memory::give_back(const Physical& page) noexcept {
  --pages_;
  if (!page.imported) used_[page.device] -= page.bytes;
  if (page.shareable) {
    close(page.file);
    return;
  }
  spare_[page.bytes].push_back(page.offset);
  if (--in_file_ > 0 || file_bytes_ < kWorthTrimming) return;
  if (ftruncate(file_, 0) != 0) return;
  spare_.clear();
  file_bytes_ = 0;
}

CUresult Memory::release(CUmemGenericAllocationHandle handle) {
  if (handles_.erase(handle) == 0) return journal_.violate(kInvalidValue, "cuMemRelease: unknown or released handle");
  return kSuccess;
}

std::size_t Memory::used_bytes(CUdevice device) const {
  const auto found = used_.find(device);
  return found == used_.end() ? 0 : found->second;
}

}  // namespace remap::emulated
