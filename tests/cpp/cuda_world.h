// The cuda backend on the emulated driver: a world of its own for each test, whose end checks that no rule was broken and
// nothing was left behind.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "emulated_driver.h"
#include "remap/backends.h"
#include "usage.h"

namespace remap::testing {

constexpr std::chrono::seconds kWait{20};

inline void arm(const char* name, std::uint64_t nth, int code, bool forever = false) {
  CONTROL(remapEmulatedArm)(name, nth, code, forever ? 1 : 0);
}
// Calls of an entry point since this was made.
class Counted {
 public:
  explicit Counted(const char* name) : name_(name), before_(calls(name)) {}
  bool operator==(std::uint64_t expected) const { return calls(name_) - before_ == expected; }

 private:
  const char* name_;
  std::uint64_t before_;
};

// Makes the emulated machine anew.
inline void emulate(std::size_t memory = 64 << 20, std::size_t devices = 1) {
  CONTROL(remapEmulatedReset)();
  configure("granularity", kPage);
  configure("memory", memory);
  configure("devices", devices);
}

inline std::shared_ptr<Backend> open_cuda(CudaOptions options = {}) {
  if (options.library.empty()) options.library = REMAP_EMULATED_DRIVER_PATH;
  return make_cuda_backend(options);
}

// With host memory in pieces of which a test can afford several.
constexpr std::size_t kSmallPiece = std::size_t{2} << 20;
inline CudaOptions small_pieces() {
  CudaOptions options;
  options.host_piece_bytes = kSmallPiece;
  return options;
}

// By a driver of this version. Entry points are asked for once a path: each version has a spelling of its own.
inline std::shared_ptr<Backend> open_cuda_of(std::uint64_t version) {
  static std::vector<std::uint64_t> spelled;
  configure("driver_version", version);
  std::size_t at = 0;
  while (at < spelled.size() && spelled[at] != version) ++at;
  if (at == spelled.size()) spelled.push_back(version);
  CudaOptions options;
  options.library = REMAP_EMULATED_DRIVER_PATH;
  for (std::size_t i = 0; i <= at; ++i) options.library.insert(options.library.rfind('/'), "/.");
  return open_cuda(options);
}

// After everything was closed.
inline void check_clean() {
  std::string trouble;
  for (std::uint64_t i = 0; i < CONTROL(remapEmulatedViolations)(); ++i) {
    trouble += std::string(CONTROL(remapEmulatedViolation)(i)) + "\n";
  }
  for (const char* kind : {"reservations", "mappings", "pages", "streams", "events", "registrations", "contexts", "work"}) {
    if (live(kind) != 0) trouble += std::to_string(live(kind)) + " " + kind + "\n";
  }
  if (!trouble.empty()) throw std::logic_error("broken rules, or left behind:\n" + trouble);
}

inline const Error::Value* field(const Error& error, const std::string& name) {
  for (const auto& each : error.fields()) {
    if (each.first == name) return &each.second;
  }
  return nullptr;
}

// The error that `body` throws; fails if it throws none.
template <typename Body>
Error error_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  throw std::logic_error("expected an error, got none");
}

// Pages behind a region, readable and writable; taken back by release().
struct Shown {
  Backend& backend;
  std::byte* at = nullptr;
  std::vector<PageHandle> pages;

  Shown(Backend& owner, std::size_t count) : backend(owner), at(owner.reserve(count * kPage, kPage)) {
    for (std::size_t i = 0; i < count; ++i) pages.push_back(owner.create_page(kPage));
    owner.map(at, pages.data(), count, kPage);
    owner.set_access(at, count * kPage, Access::read_write);
  }
  std::size_t bytes() const { return pages.size() * kPage; }
  void release() {
    backend.unmap(at, bytes());
    backend.release(at, bytes());
    for (const PageHandle page : pages) backend.destroy_page(page);
  }
};

inline bool all_are(const std::byte* at, int value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) {
    if (at[i] != static_cast<std::byte>(value)) return false;
  }
  return true;
}

}  // namespace remap::testing

// A test, and then what it left.
#define CLEAN_TEST(name)                                                                                               \
  void name();                                                                                                         \
  [[maybe_unused]] const bool name##_added =                                                                           \
      remap::testing::add(#name, name) && remap::testing::add(#name " leaves nothing", remap::testing::check_clean);   \
  void name()
