// A test double: the emulated driver (REMAP_EMULATED_DRIVER), which runs no device code, with the three kernels of
// bench/gpu/probe.cpp done by the processor, in stream order. REMAP_KERNEL_FAULT makes reading kernels misbehave:
//   refuse-ptx   no module can be loaded        wrong-word   a reader finds one wrong word a launch
//   error        the second reader fails as after a page fault       crash   the second reader ends the process
//   release      no page can be released (no reader is concerned)
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;
using Lookup = int (*)(const char*, void**, int, u64, int*);
using LaunchHostFunction = int (*)(void* stream, void (*function)(void*), void* data);

constexpr int kInvalidPtx = 218, kIllegalAddress = 700, kNotFound = 500, kUnknown = 999;
constexpr u32 kMix = 2654435761U;

void* real_library() {
  static void* const library = ::dlopen(std::getenv("REMAP_EMULATED_DRIVER"), RTLD_NOW | RTLD_LOCAL);
  return library;
}

Lookup real_lookup() { return reinterpret_cast<Lookup>(::dlsym(real_library(), "cuGetProcAddress_v2")); }

bool faulty(const char* how) {
  const char* given = std::getenv("REMAP_KERNEL_FAULT");
  return given != nullptr && std::strcmp(given, how) == 0;
}

// All arguments that any of the kernels has, and the number of its threads.
struct Launch {
  char kind = 0;
  u64 at = 0, stride = 0, words = 0, nanoseconds = 0, result = 0, threads = 0;
  u32 seed = 0, slots = 1;
  bool wrong_word = false;
};

u64 wrong_words(u64 at, u64 words, u32 seed) {
  const auto* const word = reinterpret_cast<const volatile u32*>(at);
  u64 wrong = 0;
  for (u64 i = 0; i < words; ++i) wrong += word[i] != seed * kMix + static_cast<u32>(i) ? 1 : 0;
  return wrong;
}

void add(u64 at, u64 value) { __atomic_fetch_add(reinterpret_cast<u64*>(at), value, __ATOMIC_SEQ_CST); }

void run(void* data) {
  const Launch& it = *static_cast<Launch*>(data);
  if (it.kind == 'f') {
    for (u64 i = 0; i < it.words; ++i) reinterpret_cast<u32*>(it.at)[i] = it.seed * kMix + static_cast<u32>(i);
  } else if (it.kind == 'c') {
    add(it.result, wrong_words(it.at, it.words, it.seed));
  } else {
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(it.nanoseconds);
    do {
      for (u32 k = 0; k < it.slots; ++k) add(it.result, wrong_words(it.at + k * it.stride, it.words, it.seed + k));
      add(it.result + 8, it.threads);
    } while (std::chrono::steady_clock::now() < end);
    add(it.result, it.wrong_word ? 1 : 0);
  }
  delete &it;
}

template <typename T>
T argument(void** arguments, int index) {
  T value;
  std::memcpy(&value, arguments[index], sizeof value);
  return value;
}

int load_module(void** module, const void* text) {
  const char* const ptx = static_cast<const char*>(text);
  const bool known = std::strstr(ptx, ".entry probe_sweep(") != nullptr && std::strstr(ptx, ".target sm_75") != nullptr;
  *module = const_cast<char*>("module");
  return known && !faulty("refuse-ptx") ? 0 : kInvalidPtx;
}

int get_function(void** function, void*, const char* name) {
  const std::string wanted = name;
  *function = const_cast<char*>(wanted == "probe_fill" ? "f" : wanted == "probe_check" ? "c" : "s");
  return wanted.rfind("probe_", 0) == 0 ? 0 : kNotFound;
}

int launch_kernel(void* function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned,
                  void* stream, void** arguments, void**) {
  static std::atomic<int> readers{0};
  static const auto enqueue = [] {
    void* found = nullptr;
    int status = 0;
    real_lookup()("cuLaunchHostFunc", &found, 10000, 1, &status);
    return reinterpret_cast<LaunchHostFunction>(found);
  }();
  auto* const it = new Launch;
  it->kind = *static_cast<const char*>(function);
  it->at = argument<u64>(arguments, 0);
  if (it->kind == 's') {
    it->stride = argument<u64>(arguments, 1);
    it->slots = argument<u32>(arguments, 2);
    it->words = argument<u64>(arguments, 3);
    it->seed = argument<u32>(arguments, 4);
    it->nanoseconds = argument<u64>(arguments, 5);
    it->result = argument<u64>(arguments, 6);
    it->threads = u64{blocks} * threads;
    it->wrong_word = faulty("wrong-word");
    if (++readers >= 2 && faulty("error")) return kIllegalAddress;
    if (readers >= 2 && faulty("crash")) std::abort();
  } else {
    it->words = argument<u64>(arguments, 1);
    it->seed = argument<u32>(arguments, 2);
    if (it->kind == 'c') it->result = argument<u64>(arguments, 3);
  }
  return enqueue(stream, run, it);
}

int refuse_release(u64) { return kUnknown; }

}  // namespace

EXPORT int remapEmulatedVersion() { return 1; }

EXPORT int cuGetProcAddress_v2(const char* name, void** function, int version, u64 flags, int* status) {
  *status = 0;
  const std::string wanted = name;
  if (wanted == "cuModuleLoadData") {
    *function = reinterpret_cast<void*>(&load_module);
  } else if (wanted == "cuModuleGetFunction") {
    *function = reinterpret_cast<void*>(&get_function);
  } else if (wanted == "cuLaunchKernel") {
    *function = reinterpret_cast<void*>(&launch_kernel);
  } else if (wanted == "cuMemRelease" && faulty("release")) {
    *function = reinterpret_cast<void*>(&refuse_release);
  } else {
    return real_lookup()(name, function, version, flags, status);
  }
  return 0;
}
