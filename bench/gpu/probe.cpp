// The first thing to run on a new GPU: what the driver's memory calls cost, whether two addresses of one page agree, and
// whether page tables can be edited beside running kernels. Needs a compiler and a driver, nothing else:
//
//   c++ -O2 -std=c++17 bench/gpu/probe.cpp -ldl -lpthread -o probe
//   ./probe --out probe.jsonl [--quick]
//
// The driver is REMAP_LIBCUDA, else libcuda.so.1. The kernels are PTX below, which the driver compiles: no toolkit is needed.
// Where it cannot (the emulated driver runs no device code), copies between host and device stand in for them, and every
// line says so with "kernels": false: such a run shows that the probe works, and nothing about a GPU.
//
// One JSON object a line, flushed at once:
//   {"probe": "device", ...}    driver, device, granularity, kernels or why there are none
//   {"probe": "calls", ...}     one call at one page size: n, median, P99, largest, microseconds
//   {"probe": "aliases", ...}   written through one address, read through another: words read, wrong words
//   {"probe": "edits", ...}     page-table edits while kernels read the pages between: edits, wrong words, costs
//   {"fault": PART, ...}        aliases or edits that the driver refused, that gave wrong bytes, or that died
//   {"failed": PART, ...}       the same of any other part: nothing follows from it for edits
//   {"late": PART, ...}         a part that was stopped, since it took too long
//   {"probe": PART, "skipped"}  a part, or a page size, for which there is too little memory
//   {"probe": "end", ...}       how many parts there are, ran and faulted
//
// Exit status: 0 all is well; 3 a fault, so whoever maps beside kernels should not: run sessions with mode="strict"; 4 no fault,
// but a part failed or was stopped; 2 the probe could not run at all. A fault ends a CUDA context, so every part is a process of its own, and the first process, which
// reports, never calls the driver.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr u64 kMiB = u64{1} << 20;
constexpr int kOutOfMemory = 2;
constexpr int kNotReady = 600;
enum Exit { kWell = 0, kUnable = 2, kFault = 3, kFailed = 4, kLate = 5 };

// -- output ------------------------------------------------------------------------------------------------------------

std::string quoted(const std::string& text) {
  std::string made = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') made += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      made += ' ';
    } else {
      made += c;
    }
  }
  return made + '"';
}

// One JSON object, in the order in which its fields were added.
class Line {
 public:
  Line(const char* key, const std::string& value) { add(key, value); }
  Line& add(const char* key, const std::string& value) { return put(key, quoted(value)); }
  Line& add(const char* key, const char* value) { return put(key, quoted(value)); }
  Line& add(const char* key, bool value) { return put(key, value ? "true" : "false"); }
  Line& add(const char* key, int value) { return put(key, std::to_string(value)); }
  Line& add(const char* key, u64 value) { return put(key, std::to_string(value)); }
  Line& add(const char* key, double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3f", value);
    return put(key, text);
  }
  std::string text() const { return "{" + fields_ + "}\n"; }

 private:
  Line& put(const char* key, const std::string& json) {
    fields_ += (fields_.empty() ? "" : ", ") + quoted(key) + ": " + json;
    return *this;
  }
  std::string fields_;
};

// Lines appended by one write each, so that those of several processes never mix and none is lost with its process.
class Output {
 public:
  explicit Output(const std::string& path)
      : file_(path.empty() ? STDOUT_FILENO : ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644)) {}
  bool usable() const { return file_ >= 0; }
  void write(const Line& line) const {
    const std::string text = line.text();
    std::size_t done = 0;
    while (done < text.size()) {
      const ssize_t some = ::write(file_, text.data() + done, text.size() - done);
      if (some < 0 && errno != EINTR) return;  // nobody is left to tell
      if (some > 0) done += static_cast<std::size_t>(some);
    }
  }

 private:
  int file_;
};

// -- the driver --------------------------------------------------------------------------------------------------------

using DevicePointer = unsigned long long;
using Handle = unsigned long long;
using Context = void*;
using Stream = void*;
using Event = void*;
using Module = void*;
using Function = void*;

struct Location {  // CUmemLocation
  int type;
  int id;
};
struct Properties {  // CUmemAllocationProp
  int type;
  int handle_types;
  Location location;
  void* win32;
  unsigned char flags[8];
};
struct Access {  // CUmemAccessDesc
  Location location;
  int flags;
};

constexpr int kPinned = 1, kOnDevice = 1, kReadWrite = 3, kNonBlocking = 1, kNoTiming = 2;
constexpr int kComputeMajor = 75, kComputeMinor = 76;

struct CallFailed : std::runtime_error {
  CallFailed(std::string name, int result, std::string meaning)
      : std::runtime_error(name + " returned " + std::to_string(result) + meaning), call(std::move(name)), code(result) {}
  std::string call;
  int code;
};

// X(name, version, parameters): the version decides the signature, whatever the driver's own is. A driver without the calls of
// PROBE_KERNEL_CALLS can still be probed with copies.
#define PROBE_CALLS(X)                                                                                                 \
  X(cuInit, 2000, (unsigned))                                                                                          \
  X(cuDriverGetVersion, 2020, (int*))                                                                                  \
  X(cuGetErrorName, 6000, (int, const char**))                                                                         \
  X(cuDeviceGet, 2000, (int*, int))                                                                                    \
  X(cuDeviceGetName, 2000, (char*, int, int))                                                                          \
  X(cuDeviceGetAttribute, 2000, (int*, int, int))                                                                      \
  X(cuDevicePrimaryCtxRetain, 7000, (Context*, int))                                                                   \
  X(cuCtxSetCurrent, 4000, (Context))                                                                                  \
  X(cuMemGetInfo, 3020, (std::size_t*, std::size_t*))                                                                  \
  X(cuMemGetAllocationGranularity, 10020, (std::size_t*, const Properties*, int))                                      \
  X(cuMemAddressReserve, 10020, (DevicePointer*, std::size_t, std::size_t, DevicePointer, unsigned long long))         \
  X(cuMemAddressFree, 10020, (DevicePointer, std::size_t))                                                             \
  X(cuMemCreate, 10020, (Handle*, std::size_t, const Properties*, unsigned long long))                                 \
  X(cuMemRelease, 10020, (Handle))                                                                                     \
  X(cuMemMap, 10020, (DevicePointer, std::size_t, std::size_t, Handle, unsigned long long))                            \
  X(cuMemUnmap, 10020, (DevicePointer, std::size_t))                                                                   \
  X(cuMemSetAccess, 10020, (DevicePointer, std::size_t, const Access*, std::size_t))                                   \
  X(cuMemHostRegister, 6050, (void*, std::size_t, unsigned))                                                           \
  X(cuStreamCreateWithPriority, 5050, (Stream*, unsigned, int))                                                        \
  X(cuStreamSynchronize, 2000, (Stream))                                                                               \
  X(cuStreamQuery, 2000, (Stream))                                                                                     \
  X(cuStreamWaitEvent, 3020, (Stream, Event, unsigned))                                                                \
  X(cuEventCreate, 2000, (Event*, unsigned))                                                                           \
  X(cuEventRecord, 2000, (Event, Stream))                                                                              \
  X(cuEventSynchronize, 2000, (Event))                                                                                 \
  X(cuMemcpyHtoDAsync, 3020, (DevicePointer, const void*, std::size_t, Stream))                                        \
  X(cuMemcpyDtoHAsync, 3020, (void*, DevicePointer, std::size_t, Stream))                                              \
  X(cuMemsetD8Async, 3020, (DevicePointer, unsigned char, std::size_t, Stream))
#define PROBE_KERNEL_CALLS(X)                                                                                          \
  X(cuModuleLoadData, 2000, (Module*, const void*))                                                                    \
  X(cuModuleGetFunction, 2000, (Function*, Module, const char*))                                                       \
  X(cuLaunchKernel, 4000,                                                                                              \
    (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**))

struct Driver {
#define PROBE_DECLARE(name, version, parameters) int(*name) parameters = nullptr;
  PROBE_CALLS(PROBE_DECLARE)
  PROBE_KERNEL_CALLS(PROBE_DECLARE)
#undef PROBE_DECLARE
  std::string library;
  bool emulated = false;
  bool has_kernels = true;

  // Raises if the call failed.
  void check(const char* name, int code) const {
    if (code == 0) return;
    const char* text = nullptr;
    const bool known = cuGetErrorName(code, &text) == 0 && text != nullptr;
    throw CallFailed(name, code, known ? std::string(" (") + text + ")" : "");
  }
};
#define CALL(driver, name, ...) (driver).check(#name, (driver).name(__VA_ARGS__))

Driver load_driver() {
  Driver driver;
  const char* named = std::getenv("REMAP_LIBCUDA");
  driver.library = named != nullptr && *named != '\0' ? named : "libcuda.so.1";
  void* library = ::dlopen(driver.library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(std::string("no driver: ") + ::dlerror());
  using Lookup = int (*)(const char*, void**, int, u64, int*);
  const auto lookup = reinterpret_cast<Lookup>(::dlsym(library, "cuGetProcAddress_v2"));
  if (lookup == nullptr) throw std::runtime_error(driver.library + " has no cuGetProcAddress_v2: CUDA 12 is needed");
  const auto ask = [&](const char* name, int version) {
    void* found = nullptr;
    int status = 0;
    return lookup(name, &found, version, 1, &status) == 0 && status == 0 ? found : nullptr;
  };
#define PROBE_RESOLVE(name, version, parameters)                               \
  driver.name = reinterpret_cast<decltype(driver.name)>(ask(#name, version));  \
  if (driver.name == nullptr) throw std::runtime_error(driver.library + " lacks " #name);
  PROBE_CALLS(PROBE_RESOLVE)
#undef PROBE_RESOLVE
#define PROBE_RESOLVE(name, version, parameters)                               \
  driver.name = reinterpret_cast<decltype(driver.name)>(ask(#name, version));  \
  driver.has_kernels = driver.has_kernels && driver.name != nullptr;
  PROBE_KERNEL_CALLS(PROBE_RESOLVE)
#undef PROBE_RESOLVE
  driver.emulated = ::dlsym(library, "remapEmulatedVersion") != nullptr;
  return driver;
}

// -- kernels -----------------------------------------------------------------------------------------------------------

// Word i of a page with seed s is s * kMix + i: no two pages agree anywhere. All kernels stride over the grid.
constexpr u32 kMix = 2654435761U;

u32 word_at(u32 seed, u64 index) { return seed * kMix + static_cast<u32>(index); }

// probe_fill(at, words, seed)
// probe_check(at, words, seed, wrong): adds the number of words that are not what the seed says to *wrong
// probe_sweep(at, stride, slots, words, seed, nanoseconds, result): checks `slots` ranges of `words` words, `stride` bytes
//   apart, the k-th with seed + k, over and over until the time is up; adds wrong words to result[0], sweeps to result[1]
//   (one a thread). ld.volatile goes to memory each time, through the page tables.
constexpr const char* kPtx = R"ptx(
.visible .entry probe_fill(.param .u64 p_at, .param .u64 p_words, .param .u32 p_seed)
{
  .reg .pred %p<2>;
  .reg .b32 %r<8>;
  .reg .b64 %d<8>;
  ld.param.u64 %d1, [p_at];
  cvta.to.global.u64 %d1, %d1;
  ld.param.u64 %d2, [p_words];
  ld.param.u32 %r1, [p_seed];
  mul.lo.u32 %r1, %r1, 2654435761;
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.u32 %r4, %r2, %r3, %r4;
  cvt.u64.u32 %d3, %r4;
  mov.u32 %r5, %nctaid.x;
  mul.lo.u32 %r5, %r5, %r3;
  cvt.u64.u32 %d4, %r5;
fill_next:
  setp.ge.u64 %p1, %d3, %d2;
  @%p1 bra fill_end;
  cvt.u32.u64 %r6, %d3;
  add.u32 %r6, %r6, %r1;
  shl.b64 %d5, %d3, 2;
  add.u64 %d5, %d5, %d1;
  st.global.u32 [%d5], %r6;
  add.u64 %d3, %d3, %d4;
  bra fill_next;
fill_end:
  ret;
}

.visible .entry probe_check(.param .u64 p_at, .param .u64 p_words, .param .u32 p_seed, .param .u64 p_wrong)
{
  .reg .pred %p<4>;
  .reg .b32 %r<10>;
  .reg .b64 %d<10>;
  ld.param.u64 %d1, [p_at];
  cvta.to.global.u64 %d1, %d1;
  ld.param.u64 %d2, [p_words];
  ld.param.u32 %r1, [p_seed];
  ld.param.u64 %d6, [p_wrong];
  cvta.to.global.u64 %d6, %d6;
  mul.lo.u32 %r1, %r1, 2654435761;
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.u32 %r4, %r2, %r3, %r4;
  cvt.u64.u32 %d3, %r4;
  mov.u32 %r5, %nctaid.x;
  mul.lo.u32 %r5, %r5, %r3;
  cvt.u64.u32 %d4, %r5;
  mov.u64 %d7, 0;
check_next:
  setp.ge.u64 %p1, %d3, %d2;
  @%p1 bra check_end;
  cvt.u32.u64 %r6, %d3;
  add.u32 %r6, %r6, %r1;
  shl.b64 %d5, %d3, 2;
  add.u64 %d5, %d5, %d1;
  ld.global.u32 %r7, [%d5];
  setp.eq.u32 %p2, %r6, %r7;
  @%p2 bra check_step;
  add.u64 %d7, %d7, 1;
check_step:
  add.u64 %d3, %d3, %d4;
  bra check_next;
check_end:
  setp.eq.u64 %p3, %d7, 0;
  @%p3 bra check_done;
  atom.global.add.u64 %d8, [%d6], %d7;
check_done:
  ret;
}

.visible .entry probe_sweep(.param .u64 p_at, .param .u64 p_stride, .param .u32 p_slots, .param .u64 p_words,
                            .param .u32 p_seed, .param .u64 p_nanoseconds, .param .u64 p_result)
{
  .reg .pred %p<6>;
  .reg .b32 %r<16>;
  .reg .b64 %d<24>;
  ld.param.u64 %d1, [p_at];
  cvta.to.global.u64 %d1, %d1;
  ld.param.u64 %d2, [p_stride];
  ld.param.u32 %r1, [p_slots];
  ld.param.u64 %d3, [p_words];
  ld.param.u32 %r2, [p_seed];
  ld.param.u64 %d4, [p_nanoseconds];
  ld.param.u64 %d5, [p_result];
  cvta.to.global.u64 %d5, %d5;
  mov.u32 %r3, %ctaid.x;
  mov.u32 %r4, %ntid.x;
  mov.u32 %r5, %tid.x;
  mad.lo.u32 %r5, %r3, %r4, %r5;
  cvt.u64.u32 %d6, %r5;
  mov.u32 %r6, %nctaid.x;
  mul.lo.u32 %r6, %r6, %r4;
  cvt.u64.u32 %d7, %r6;
  mov.u64 %d8, %globaltimer;
  mov.u64 %d9, 0;
  mov.u64 %d10, 0;
sweep_again:
  mov.u32 %r7, 0;
sweep_slot:
  setp.ge.u32 %p1, %r7, %r1;
  @%p1 bra sweep_over;
  cvt.u64.u32 %d11, %r7;
  mul.lo.u64 %d11, %d11, %d2;
  add.u64 %d11, %d11, %d1;
  add.u32 %r8, %r2, %r7;
  mul.lo.u32 %r8, %r8, 2654435761;
  mov.u64 %d12, %d6;
sweep_word:
  setp.ge.u64 %p2, %d12, %d3;
  @%p2 bra sweep_slot_end;
  cvt.u32.u64 %r9, %d12;
  add.u32 %r9, %r9, %r8;
  shl.b64 %d13, %d12, 2;
  add.u64 %d13, %d13, %d11;
  ld.volatile.global.u32 %r10, [%d13];
  setp.eq.u32 %p3, %r9, %r10;
  @%p3 bra sweep_step;
  add.u64 %d9, %d9, 1;
sweep_step:
  add.u64 %d12, %d12, %d7;
  bra sweep_word;
sweep_slot_end:
  add.u32 %r7, %r7, 1;
  bra sweep_slot;
sweep_over:
  add.u64 %d10, %d10, 1;
  mov.u64 %d14, %globaltimer;
  sub.u64 %d14, %d14, %d8;
  setp.lt.u64 %p4, %d14, %d4;
  @%p4 bra sweep_again;
  setp.eq.u64 %p5, %d9, 0;
  @%p5 bra sweep_count;
  atom.global.add.u64 %d15, [%d5], %d9;
sweep_count:
  atom.global.add.u64 %d15, [%d5+8], %d10;
  ret;
}
)ptx";

std::string ptx_for(int major, int minor) {
  // The oldest target that the driver of such a device still compiles.
  const std::string target = major * 10 + minor >= 75 ? "sm_75" : "sm_70";
  return ".version 6.4\n.target " + target + "\n.address_size 64\n" + kPtx;
}

// -- one device --------------------------------------------------------------------------------------------------------

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The primary context, current on the calling thread, and the kernels if the driver takes them. A part's process ends with
// _exit, so nothing here is given back.
class Gpu {
 public:
  Gpu() : driver(load_driver()) {
    CALL(driver, cuInit, 0);
    CALL(driver, cuDeviceGet, &device, 0);
    CALL(driver, cuDevicePrimaryCtxRetain, &context, device);
    use_here();
    CALL(driver, cuDeviceGetAttribute, &major, kComputeMajor, device);
    CALL(driver, cuDeviceGetAttribute, &minor, kComputeMinor, device);
    load_kernels();
  }

  void use_here() const { CALL(driver, cuCtxSetCurrent, context); }

  Properties properties() const { return Properties{kPinned, 0, {kOnDevice, device}, nullptr, {}}; }

  DevicePointer reserve(u64 bytes) const {
    DevicePointer at = 0;
    CALL(driver, cuMemAddressReserve, &at, bytes, 0, 0, 0);
    return at;
  }
  Handle create(u64 bytes) const {
    const Properties wanted = properties();
    Handle page = 0;
    CALL(driver, cuMemCreate, &page, bytes, &wanted, 0);
    return page;
  }
  void map(DevicePointer at, u64 bytes, Handle page) const { CALL(driver, cuMemMap, at, bytes, 0, page, 0); }
  void unmap(DevicePointer at, u64 bytes) const { CALL(driver, cuMemUnmap, at, bytes); }
  void open(DevicePointer at, u64 bytes) const {
    const Access access{{kOnDevice, device}, kReadWrite};
    CALL(driver, cuMemSetAccess, at, bytes, &access, 1);
  }
  // `bytes` of memory of its own, zeroed.
  DevicePointer memory(u64 bytes) const {
    const DevicePointer at = reserve(bytes);
    map(at, bytes, create(bytes));
    open(at, bytes);
    const Stream once = stream();
    CALL(driver, cuMemsetD8Async, at, 0, bytes, once);
    wait(once);
    return at;
  }
  Stream stream() const {
    Stream made = nullptr;
    CALL(driver, cuStreamCreateWithPriority, &made, kNonBlocking, 0);
    return made;
  }
  Event event() const {
    Event made = nullptr;
    CALL(driver, cuEventCreate, &made, kNoTiming);
    return made;
  }
  void wait(Stream stream) const { CALL(driver, cuStreamSynchronize, stream); }
  bool busy(Stream stream) const {
    const int code = driver.cuStreamQuery(stream);
    if (code != kNotReady) driver.check("cuStreamQuery", code);
    return code == kNotReady;
  }
  // Page-locked, so that copies do not wait on the calling thread.
  std::uint8_t* host(u64 bytes) const {
    void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::runtime_error("no host memory for " + std::to_string(bytes) + " bytes");
    std::memset(at, 0, bytes);
    CALL(driver, cuMemHostRegister, at, bytes, 0);
    return static_cast<std::uint8_t*>(at);
  }

  template <typename... Arguments>
  void launch(Function kernel, unsigned blocks, Stream stream, Arguments... arguments) const {
    void* pointers[] = {&arguments...};
    CALL(driver, cuLaunchKernel, kernel, blocks, 1, 1, kThreads, 1, 1, 0, stream, pointers, nullptr);
  }

  static constexpr unsigned kThreads = 256;
  static constexpr unsigned kBlocks = 264;  // two a multiprocessor of a large GPU

  Driver driver;
  int device = 0;
  int major = 0;
  int minor = 0;
  Context context = nullptr;
  bool kernels = false;
  std::string why_none;
  Function fill = nullptr;
  Function check = nullptr;
  Function sweep = nullptr;

 private:
  void load_kernels() {
    if (!driver.has_kernels) {
      why_none = driver.emulated ? "the emulated driver runs no device code" : "the driver has no cuModuleLoadData";
      return;
    }
    const std::string ptx = ptx_for(major, minor);
    Module module = nullptr;
    const int code = driver.cuModuleLoadData(&module, ptx.c_str());
    if (code != 0) {
      why_none = "cuModuleLoadData returned " + std::to_string(code);
      return;
    }
    CALL(driver, cuModuleGetFunction, &fill, module, "probe_fill");
    CALL(driver, cuModuleGetFunction, &check, module, "probe_check");
    CALL(driver, cuModuleGetFunction, &sweep, module, "probe_sweep");
    kernels = true;
  }
};

// Writes a page's pattern, and counts the words that are not as written: kernels on the device, or copies and the processor.
class Pattern {
 public:
  // bytes: of a page. Copies look at no more than the first kSample of them.
  Pattern(const Gpu& gpu, u64 bytes) : gpu_(gpu), words_(gpu.kernels ? bytes / 4 : std::min(bytes, kSample) / 4) {
    host_ = gpu.host(std::max<u64>(words_ * 4, 4096));
    if (gpu.kernels) wrong_ = gpu.memory(2 * kMiB);
  }
  u64 words() const { return words_; }

  // Enqueued; with copies, waited for.
  void write(DevicePointer at, u32 seed, Stream stream) {
    if (gpu_.kernels) {
      gpu_.launch(gpu_.fill, Gpu::kBlocks, stream, at, words_, seed);
      return;
    }
    for (u64 i = 0; i < words_; ++i) set(i, word_at(seed, i));
    CALL(gpu_.driver, cuMemcpyHtoDAsync, at, host_, words_ * 4, stream);
    gpu_.wait(stream);
  }
  // Enqueued; with copies, waited for. The count comes with `wrong`.
  void read(DevicePointer at, u32 seed, Stream stream) {
    if (gpu_.kernels) {
      gpu_.launch(gpu_.check, Gpu::kBlocks, stream, at, words_, seed, wrong_);
      return;
    }
    CALL(gpu_.driver, cuMemcpyDtoHAsync, host_, at, words_ * 4, stream);
    gpu_.wait(stream);
    for (u64 i = 0; i < words_; ++i) seen_ += get(i) != word_at(seed, i) ? 1 : 0;
  }
  // Wrong words so far; waits for the stream.
  u64 wrong(Stream stream) {
    if (gpu_.kernels) {
      CALL(gpu_.driver, cuMemcpyDtoHAsync, host_, wrong_, sizeof seen_, stream);
      gpu_.wait(stream);
      std::memcpy(&seen_, host_, sizeof seen_);
    }
    return seen_;
  }

  static constexpr u64 kSample = 64 << 10;

 private:
  void set(u64 index, u32 value) { std::memcpy(host_ + 4 * index, &value, 4); }
  u32 get(u64 index) const {
    u32 value = 0;
    std::memcpy(&value, host_ + 4 * index, 4);
    return value;
  }

  const Gpu& gpu_;
  u64 words_;
  std::uint8_t* host_ = nullptr;
  DevicePointer wrong_ = 0;
  u64 seen_ = 0;
};

// -- what is measured --------------------------------------------------------------------------------------------------

struct Samples {
  std::vector<double> us;

  template <typename Call>
  void time(const Call& call) {
    const double begun = now_us();
    call();
    us.push_back(now_us() - begun);
  }
  // The smallest sample that at least this share of them does not exceed.
  double quantile(double share) const {
    if (us.empty()) return 0;
    std::vector<double> sorted = us;
    std::sort(sorted.begin(), sorted.end());
    const auto rank = static_cast<std::size_t>(share * static_cast<double>(sorted.size()) + 0.999999);
    return sorted[std::min(sorted.size(), std::max<std::size_t>(rank, 1)) - 1];
  }
  Line& add_to(Line& line) const {
    return line.add("n", u64{us.size()})
        .add("median_us", quantile(0.5))
        .add("p99_us", quantile(0.99))
        .add("max_us", quantile(1.0));
  }
};

struct Settings {
  bool quick = false;
  std::string out;
};

void part_device(const Settings&, const Output& out) {
  const Gpu gpu;
  int version = 0;
  char name[256] = "";
  std::size_t free = 0, total = 0, minimum = 0, recommended = 0;
  const Properties properties = gpu.properties();
  CALL(gpu.driver, cuDriverGetVersion, &version);
  CALL(gpu.driver, cuDeviceGetName, name, static_cast<int>(sizeof name), gpu.device);
  CALL(gpu.driver, cuMemGetInfo, &free, &total);
  CALL(gpu.driver, cuMemGetAllocationGranularity, &minimum, &properties, 0);
  CALL(gpu.driver, cuMemGetAllocationGranularity, &recommended, &properties, 1);
  Line line("probe", "device");
  line.add("name", name)
      .add("driver_version", version)
      .add("emulated", gpu.driver.emulated)
      .add("compute_capability", std::to_string(gpu.major) + "." + std::to_string(gpu.minor))
      .add("free_bytes", u64{free})
      .add("total_bytes", u64{total})
      .add("granularity_bytes", u64{minimum})
      .add("granularity_recommended_bytes", u64{recommended})
      .add("kernels", gpu.kernels);
  if (!gpu.kernels) line.add("instead", "copies, checked on the host").add("why", gpu.why_none);
  out.write(line);
}

// One round: a page by itself, then a run of pages with one set_access.
void time_calls(const Gpu& gpu, u64 page, u64 run, std::map<std::string, Samples>& taken) {
  DevicePointer at = 0;
  std::vector<Handle> pages(run);
  taken["reserve"].time([&] { at = gpu.reserve(run * page); });
  taken["create"].time([&] { pages[0] = gpu.create(page); });
  taken["map"].time([&] { gpu.map(at, page, pages[0]); });
  taken["set_access"].time([&] { gpu.open(at, page); });
  taken["unmap"].time([&] { gpu.unmap(at, page); });
  for (u64 i = 1; i < run; ++i) pages[i] = gpu.create(page);
  taken["map of a run"].time([&] {
    for (u64 i = 0; i < run; ++i) gpu.map(at + i * page, page, pages[i]);
  });
  taken["set_access of a run"].time([&] { gpu.open(at, run * page); });
  taken["unmap of a run"].time([&] { gpu.unmap(at, run * page); });
  taken["release"].time([&] { CALL(gpu.driver, cuMemRelease, pages[0]); });
  for (u64 i = 1; i < run; ++i) CALL(gpu.driver, cuMemRelease, pages[i]);
  taken["free of addresses"].time([&] { CALL(gpu.driver, cuMemAddressFree, at, run * page); });
}

void part_calls(const Settings& settings, const Output& out) {
  const Gpu gpu;
  std::size_t free = 0, total = 0;
  CALL(gpu.driver, cuMemGetInfo, &free, &total);
  for (const u64 mib : {2, 16, 32, 64}) {
    const u64 page = mib * kMiB;
    const u64 run = std::min<u64>(gpu.driver.emulated ? 2 : 16, free / 2 / page);
    if (run < 2) {
      out.write(Line("probe", "calls").add("page_bytes", page).add("skipped", "two pages do not fit into half of what is free"));
      continue;
    }
    const int rounds = settings.quick ? 20 : mib == 2 ? 200 : 60;
    const double end = now_us() + (gpu.driver.emulated ? 0.1e6 : settings.quick ? 1e6 : 4e6);
    std::map<std::string, Samples> taken;
    for (int warm_up = 0; warm_up < 2; ++warm_up) time_calls(gpu, page, run, taken);
    taken.clear();
    for (int i = 0; i < rounds && (i < 3 || now_us() < end); ++i) time_calls(gpu, page, run, taken);
    for (const auto& [call, samples] : taken) {
      Line line("probe", "calls");
      line.add("page_bytes", page).add("call", call);
      const bool of_run = call.size() > 3 && call.compare(call.size() - 3, 3, "run") == 0;
      line.add("pages", of_run ? run : u64{1});
      out.write(samples.add_to(line));
    }
  }
}

// A page under two addresses. Before each write both addresses are read, so that stale bytes would be in some cache.
void part_aliases(const Settings& settings, const Output& out) {
  const Gpu gpu;
  const u64 page = 2 * kMiB;
  const DevicePointer one = gpu.reserve(page), other = gpu.reserve(page);
  const Handle memory = gpu.create(page);
  for (const DevicePointer at : {one, other}) {
    gpu.map(at, page, memory);
    gpu.open(at, page);
  }
  const Stream first = gpu.stream(), second = gpu.stream();
  const Event written = gpu.event(), looked = gpu.event();
  Pattern pattern(gpu, page);
  const int rounds = settings.quick ? 20 : 500;
  u32 seed = 1;
  pattern.write(one, seed, first);
  gpu.wait(first);
  u64 wrong = 0;
  for (const bool apart : {false, true}) {
    const Stream reader = apart ? second : first;
    for (int i = 0; i < rounds; ++i) {
      const DevicePointer from = i % 2 ? one : other, to = i % 2 ? other : one;
      pattern.read(to, seed, reader);
      pattern.read(from, seed, reader);
      CALL(gpu.driver, cuEventRecord, looked, reader);
      CALL(gpu.driver, cuStreamWaitEvent, first, looked, 0);
      pattern.write(from, ++seed, first);
      CALL(gpu.driver, cuEventRecord, written, first);
      CALL(gpu.driver, cuStreamWaitEvent, reader, written, 0);
      pattern.read(to, seed, reader);
    }
    const u64 all = pattern.wrong(reader);
    out.write(Line("probe", "aliases")
                  .add("case", apart ? "another stream, behind an event" : "the same stream")
                  .add("kernels", gpu.kernels)
                  .add("rounds", rounds)
                  .add("words", pattern.words())
                  .add("wrong", all - wrong));
    wrong = all;
  }
  if (wrong != 0) {
    throw std::runtime_error("what was written through one address was not read through the other, " +
                             std::to_string(wrong) + " words");
  }
}

// Reads the even slots of a reservation, over and over, until it is told to stop: a thread that keeps its stream full.
// copy_bytes: so many come from the host beside each reading, on a stream of their own, as streamed layers do; 0: none.
class Readers {
 public:
  Readers(const Gpu& gpu, DevicePointer at, u64 page, u32 slots, u64 kernel_ns, u64 copy_bytes)
      : gpu_(gpu), at_(at), page_(page), slots_(slots), kernel_ns_(kernel_ns), stream_(gpu.stream()), copy_bytes_(copy_bytes) {
    if (copy_bytes_ > 0) {
      copies_ = gpu.stream();
      sink_ = gpu.memory((copy_bytes_ + 2 * kMiB - 1) / (2 * kMiB) * 2 * kMiB);
      source_ = gpu.host(copy_bytes_);
      for (u64 word = 0; word < copy_bytes_ / 4; ++word) {
        const u32 value = word_at(kSeed, word);
        std::memcpy(source_ + 4 * word, &value, 4);
      }
    }
    if (gpu.kernels) {
      result_ = gpu.memory(2 * kMiB);
      host_ = gpu.host(4096);
    } else {
      host_ = gpu.host(slots * Pattern::kSample);
    }
    for (u64 i = 0; i < kDeep; ++i) events_.push_back(gpu.event());
  }
  void begin() {
    thread_ = std::thread([this] { run(); });
    while (launched_ < kDeep && !over_) std::this_thread::yield();
  }
  // Rethrows what ended the reading early.
  void end() {
    stop_ = true;
    thread_.join();
    if (error_) std::rethrow_exception(error_);
    if (gpu_.kernels) {
      CALL(gpu_.driver, cuMemcpyDtoHAsync, host_, result_, 16, stream_);
      gpu_.wait(stream_);
      std::memcpy(&wrong_, host_, 8);
      std::memcpy(&sweeps_, host_ + 8, 8);
      sweeps_ /= Gpu::kBlocks * Gpu::kThreads;
    }
    if (copied_ > 0) wrong_ += wrong_copies();
  }
  bool busy() const { return gpu_.busy(stream_); }
  bool over() const { return over_; }
  u64 wrong() const { return wrong_; }
  u64 sweeps() const { return sweeps_; }
  u64 launches() const { return launched_; }
  u64 copies() const { return copied_; }

  static constexpr u32 kSeed = 1000;

 private:
  void run() {
    try {
      gpu_.use_here();
      while (!stop_) {
        const Event event = events_[launched_ % kDeep];
        if (launched_ >= kDeep) {
          CALL(gpu_.driver, cuEventSynchronize, event);
          if (!gpu_.kernels && (launched_ + 1) % kDeep == 0) compare();
        }
        enqueue();
        CALL(gpu_.driver, cuEventRecord, event, stream_);
        ++launched_;
        if (copy_bytes_ > 0) {
          if (launched_ % kDeep == 0) gpu_.wait(copies_);
          CALL(gpu_.driver, cuMemcpyHtoDAsync, sink_, source_, copy_bytes_, copies_);
          ++copied_;
        }
      }
      gpu_.wait(stream_);
      if (copy_bytes_ > 0) gpu_.wait(copies_);
      if (!gpu_.kernels) compare();
    } catch (...) {
      error_ = std::current_exception();
    }
    over_ = true;
  }
  void enqueue() {
    if (gpu_.kernels) {
      gpu_.launch(gpu_.sweep, Gpu::kBlocks, stream_, at_, 2 * page_, slots_, page_ / 4, kSeed, kernel_ns_, result_);
      return;
    }
    for (u32 i = 0; i < slots_; ++i) {
      CALL(gpu_.driver, cuMemcpyDtoHAsync, host_ + i * Pattern::kSample, at_ + 2 * i * page_, Pattern::kSample, stream_);
    }
  }
  // Of copies: what the last ones brought.
  void compare() {
    gpu_.wait(stream_);
    for (u32 i = 0; i < slots_; ++i) {
      for (u64 word = 0; word < Pattern::kSample / 4; ++word) {
        u32 value = 0;
        std::memcpy(&value, host_ + i * Pattern::kSample + 4 * word, 4);
        wrong_ += value != word_at(kSeed + i, word) ? 1 : 0;
      }
    }
    ++sweeps_;
  }

  // Words of what the last copy brought that are not the host's.
  u64 wrong_copies() {
    std::uint8_t* back = gpu_.host(copy_bytes_);
    CALL(gpu_.driver, cuMemcpyDtoHAsync, back, sink_, copy_bytes_, copies_);
    gpu_.wait(copies_);
    u64 wrong = 0;
    for (u64 at = 0; at < copy_bytes_; at += 4) wrong += std::memcmp(back + at, source_ + at, 4) != 0 ? 1 : 0;
    return wrong;
  }

  static constexpr u64 kDeep = 4;  // launches that are enqueued and not yet over

  const Gpu& gpu_;
  DevicePointer at_;
  u64 page_;
  u32 slots_;
  u64 kernel_ns_;
  Stream stream_;
  DevicePointer result_ = 0;
  std::uint8_t* host_ = nullptr;
  std::vector<Event> events_;
  std::thread thread_;
  std::atomic<bool> stop_{false}, over_{false};
  std::atomic<u64> launched_{0};
  std::exception_ptr error_;
  u64 wrong_ = 0;
  u64 sweeps_ = 0;
  u64 copy_bytes_;
  Stream copies_{};
  DevicePointer sink_ = 0;
  std::uint8_t* source_ = nullptr;
  u64 copied_ = 0;  // of the thread until it has ended
};

struct EditCase {
  u64 page;
  u32 slots;        // that are read, and as many beside them that are edited
  u64 kernel_ns;    // how long a reading kernel runs
  int edits;
  double seconds;   // after which no more are made
  u64 copy_bytes;   // that come from the host beside each reading
};

// One edit: the slot, which showed one page, shows the other one. Nobody reads it, as nobody reads a layer that is re-pointed.
void edit(const Gpu& gpu, DevicePointer at, u64 page, Handle shows, std::map<std::string, Samples>& taken) {
  taken["unmap"].time([&] { gpu.unmap(at, page); });
  taken["map"].time([&] { gpu.map(at, page, shows); });
  taken["set_access"].time([&] { gpu.open(at, page); });
}

void edits_of(const EditCase& one, const Output& out) {
  const Gpu gpu;
  const u64 page = one.page;
  const u32 slots = one.slots;
  const DevicePointer at = gpu.reserve(2 * slots * page);
  const Stream behind = gpu.stream();
  Pattern pattern(gpu, page);
  for (u32 i = 0; i < slots; ++i) {
    gpu.map(at + 2 * i * page, page, gpu.create(page));
    gpu.open(at + 2 * i * page, page);
    pattern.write(at + 2 * i * page, Readers::kSeed + i, behind);
  }
  // Every odd slot takes turns between a page of its own and one that all of them share, as a layer does with the ring.
  const DevicePointer window = gpu.reserve(page);
  std::vector<Handle> own;
  for (u32 i = 0; i <= slots; ++i) {
    own.push_back(gpu.create(page));
    gpu.map(window, page, own.back());
    gpu.open(window, page);
    pattern.write(window, i + 1, behind);
    gpu.wait(behind);
    gpu.unmap(window, page);
  }
  const Handle shared = own[slots];
  for (u32 i = 0; i < slots; ++i) {
    gpu.map(at + (2 * i + 1) * page, page, shared);
    gpu.open(at + (2 * i + 1) * page, page);
  }
  std::map<std::string, Samples> alone, beside;
  const auto turn = [&](int number, std::map<std::string, Samples>& taken) {
    const u32 slot = static_cast<u32>(number) % slots;
    const bool home = (static_cast<u32>(number) / slots) % 2 == 0;
    const DevicePointer where = at + (2 * slot + 1) * page;
    edit(gpu, where, page, home ? own[slot] : shared, taken);
    pattern.read(where, home ? slot + 1 : slots + 1, behind);
    gpu.wait(behind);
  };
  const int cycle = static_cast<int>(2 * slots);
  const int few = cycle * (gpu.driver.emulated ? 1 : std::max(1, 64 / cycle));
  for (int i = 0; i < few; ++i) turn(i, alone);  // an even number of rounds: every slot shows the shared page again

  Readers readers(gpu, at, page, slots, one.kernel_ns, one.copy_bytes);
  readers.begin();
  const double begun = now_us();
  const double end = begun + 1e6 * (gpu.driver.emulated ? std::min(0.5, one.seconds) : one.seconds);
  int done = 0, with_kernel = 0;
  std::exception_ptr failed;
  try {
    for (; done < one.edits && !readers.over() && now_us() < end; ++done) {
      const bool before = readers.busy();
      turn(done, beside);
      with_kernel += before && readers.busy() ? 1 : 0;
    }
  } catch (...) {
    failed = std::current_exception();
  }
  const double seconds = (now_us() - begun) / 1e6;
  try {
    readers.end();
  } catch (...) {
    if (!failed) failed = std::current_exception();
  }
  u64 wrong = 0;
  if (!failed) {
    for (u32 i = 0; i < slots; ++i) pattern.read(at + 2 * i * page, Readers::kSeed + i, behind);
    wrong = pattern.wrong(behind);
  }
  Line line("probe", "edits");
  line.add("kernels", gpu.kernels)
      .add("page_bytes", page)
      .add("slots", static_cast<int>(slots))
      .add("kernel_us", gpu.kernels ? static_cast<double>(one.kernel_ns) / 1e3 : 0.0)
      .add("asked", one.edits)
      .add("edits", done)
      .add("edits_with_a_reader_before_and_after", with_kernel)
      .add("seconds", seconds)
      .add("launches", readers.launches())
      .add("sweeps", readers.sweeps())
      .add("copies", readers.copies())
      .add("copy_bytes", one.copy_bytes)
      .add("wrong_beside", readers.wrong())
      .add("wrong_behind", wrong);
  for (const auto& [call, samples] : beside) {
    line.add((call + "_median_us").c_str(), samples.quantile(0.5))
        .add((call + "_p99_us").c_str(), samples.quantile(0.99))
        .add((call + "_alone_median_us").c_str(), alone[call].quantile(0.5))
        .add((call + "_alone_p99_us").c_str(), alone[call].quantile(0.99));
  }
  out.write(line);
  if (failed) std::rethrow_exception(failed);
  if (readers.wrong() + wrong != 0) {
    throw std::runtime_error(std::to_string(readers.wrong()) + " wrong words were read beside the edits, " +
                             std::to_string(wrong) + " behind them");
  }
}

EditCase edit_case(const Settings& settings, u64 mib, bool long_kernels) {
  const bool quick = settings.quick;
  EditCase made{mib * kMiB, mib <= 2 ? 16U : 4U, 1'000'000, quick ? 1000 : 10'000, quick ? 5.0 : 12.0, 0};
  if (long_kernels) made = {made.page, made.slots, 50'000'000, quick ? 200 : 2000, quick ? 3.0 : 6.0, 0};
  return made;
}

// 32 MiB is a chunk of a streamed layer; the emulated driver copies slowly.
void edits_beside_copies(const Settings& settings, const Output& out) {
  EditCase made = edit_case(settings, 2, false);
  made.edits /= 2;
  made.seconds /= 2;
  made.copy_bytes = settings.quick ? kMiB : 32 * kMiB;
  edits_of(made, out);
}

// -- parts, each a process ---------------------------------------------------------------------------------------------

// decides: whether a fault of it says that page tables must not be edited beside kernels. What fails in any other part is told,
// and nothing follows from it.
struct Part {
  const char* name;
  double limit_s;  // then it is stopped
  bool decides;
  std::function<void(const Settings&, const Output&)> run;
};

const std::vector<Part>& parts() {
  static const std::vector<Part> all = {
      {"device", 30, false, part_device},
      {"calls", 30, false, part_calls},
      {"aliases", 20, true, part_aliases},
      {"edits", 25, true, [](const Settings& s, const Output& out) { edits_of(edit_case(s, 2, false), out); }},
      {"edits-long-kernels", 15, true, [](const Settings& s, const Output& out) { edits_of(edit_case(s, 2, true), out); }},
      {"edits-large-pages", 25, true, [](const Settings& s, const Output& out) { edits_of(edit_case(s, 32, false), out); }},
      {"edits-beside-copies", 20, true, edits_beside_copies},
  };
  return all;
}

// What the process of a part does. Leaves by _exit: after a fault even the driver's own exit handlers may hang.
[[noreturn]] void be_part(const std::string& name, const Settings& settings, const Output& out) {
  int status = kUnable;
  for (const Part& part : parts()) {
    if (name != part.name) continue;
    const char* const kind = part.decides ? "fault" : "failed";
    const int failed = part.decides ? kFault : kFailed;
    try {
      part.run(settings, out);
      status = kWell;
    } catch (const CallFailed& error) {
      if (error.code == kOutOfMemory) {  // says nothing about edits: somebody else has the memory
        out.write(Line("probe", name).add("skipped", error.what()));
        ::_exit(kUnable);
      }
      out.write(Line(kind, name).add("why", error.what()).add("call", error.call).add("code", error.code));
      status = failed;
    } catch (const std::exception& error) {
      out.write(Line(kind, name).add("why", error.what()));
      status = failed;
    }
  }
  ::_exit(status);
}

// How a part ended. kind and why: of the line that is still to be written; empty if it said so itself.
struct Outcome {
  Exit status;
  const char* kind;
  std::string why;
};

Outcome run_part(const Part& part, const char* self, const Settings& settings) {
  std::vector<std::string> words = {self, "--part", part.name};
  if (!settings.out.empty()) words.insert(words.end(), {"--out", settings.out});
  if (settings.quick) words.emplace_back("--quick");
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const pid_t child = ::fork();
  if (child < 0) return {kUnable, "failed", "no process: " + std::string(std::strerror(errno))};
  const Exit ended = part.decides ? kFault : kFailed;
  const char* const kind = part.decides ? "fault" : "failed";
  if (child == 0) {
    ::execv("/proc/self/exe", arguments.data());
    ::_exit(127);
  }
  const double end = now_us() + part.limit_s * 1e6;
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) != child) {
    if (now_us() > end) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      // Slow is not wrong: a machine that pages its memory in as it is touched may take so long.
      return {kLate, "late", "it took more than " + std::to_string(static_cast<int>(part.limit_s)) + " s and was stopped"};
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (WIFSIGNALED(status)) return {ended, kind, "it was ended by signal " + std::to_string(WTERMSIG(status))};
  const int code = WEXITSTATUS(status);
  if (code == kWell || code == kUnable || code == kFault || code == kFailed) return {static_cast<Exit>(code), "", ""};
  return {ended, kind, "it ended with status " + std::to_string(code)};
}

int usage() {
  std::fprintf(stderr, "usage: probe --out FILE.jsonl [--quick]\n");
  return kUnable;
}

}  // namespace

int main(int count, char** words) {
  Settings settings;
  std::string part;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (word == "--quick") {
      settings.quick = true;
    } else if (word == "--ptx") {  // for a machine with an assembler: what the driver is given
      std::fputs(ptx_for(9, 0).c_str(), stdout);
      return kWell;
    } else if ((word == "--out" || word == "--part") && i + 1 < count) {
      (word == "--out" ? settings.out : part) = words[++i];
    } else {
      return usage();
    }
  }
  const Output out(settings.out);
  if (!out.usable()) {
    std::fprintf(stderr, "probe: cannot write %s: %s\n", settings.out.c_str(), std::strerror(errno));
    return kUnable;
  }
  if (!part.empty()) be_part(part, settings, out);

  const double begun = now_us();
  int faults = 0, ran = 0, others = 0;
  for (const Part& each : parts()) {
    const Outcome outcome = run_part(each, words[0], settings);
    if (!outcome.why.empty()) out.write(Line(outcome.kind, each.name).add("why", outcome.why));
    ran += outcome.status == kWell ? 1 : 0;
    faults += outcome.status == kFault ? 1 : 0;
    others += outcome.status == kFailed || outcome.status == kLate ? 1 : 0;
    if (ran == 0) break;  // no driver, or no device: nothing of the rest could run
  }
  const int status = ran == 0 ? kUnable : faults > 0 ? kFault : others > 0 ? kFailed : kWell;
  out.write(Line("probe", "end")
                .add("ok", status == kWell)
                .add("parts", static_cast<int>(parts().size()))
                .add("ran", ran)
                .add("faults", faults)
                .add("failed_or_late", others)
                .add("seconds", (now_us() - begun) / 1e6));
  return status;
}
