// Driver libraries that the cuda backend must refuse; cuda_driver_test.cpp makes each by compiling this with another REMAP_STUB.
//   1: older than cuGetProcAddress_v2   2: too old, says the newer lookup   3: new enough, but lacks most entry points
#include <cstring>

#define REMAP_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

int version(int* found) {
  *found = REMAP_STUB == 1 ? 11040 : REMAP_STUB == 2 ? 11080 : 12040;
  return 0;
}

}  // namespace

#if REMAP_STUB == 1
REMAP_EXPORT int cuDriverGetVersion(int* found) { return version(found); }
#else
REMAP_EXPORT int cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, int* status) {
  const bool known = std::strcmp(name, "cuDriverGetVersion") == 0;
  *function = known ? reinterpret_cast<void*>(&version) : nullptr;
  *status = known ? 0 : std::strcmp(name, "cuMemMap") == 0 ? 2 : 1;  // "not in this version", "not found"
  return 0;
}
#endif
