// Which limit is named for a call that the kernel refused, whatever the numbers; and one that is real.
#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>
#include <string>
#include <utility>
#include <variant>

#include "backend/host_memory.h"
#include "backend/os_limits.h"
#include "check.h"
#include "child.h"

using namespace remap;
using namespace remap::testing;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

template <typename T>
T field(const Error& error, const std::string& name) {
  for (const auto& [key, value] : error.fields()) {
    if (key == name) return std::get<T>(value);
  }
  throw std::logic_error("no field " + name);
}

// "" if no limit is named.
std::string named(int code, const os::Asked& asked, const os::Limits& limits) {
  const auto met = os::limit_met("call", code, asked, {}, limits);
  if (!met) return "";
  CHECK(met->kind() == ErrorKind::limit_exceeded && field<std::int64_t>(*met, "errno") == code);
  CHECK(field<std::int64_t>(*met, "in_use") + field<std::int64_t>(*met, "requested") + 64 > field<std::int64_t>(*met, "limit"));
  return field<std::string>(*met, "limited_by");
}

os::Limits all_but_full() {
  os::Limits limits;
  limits.addresses = limits.data = limits.locked = limits.committed = {10 * kMiB, 11 * kMiB};
  limits.mappings = {1000, 1100};
  limits.files = {1024, 1024};
  limits.file_size = {0, 11 * kMiB};
  return limits;
}

TEST(the_limit_that_a_call_met_is_named) {
  const os::Limits full = all_but_full();
  CHECK(named(ENOMEM, {2 * kMiB}, full) == "RLIMIT_AS");
  CHECK(named(ENOMEM, {0, 2 * kMiB}, full) == "RLIMIT_DATA");
  CHECK(named(ENOMEM, {0, 0, 50}, full) == "vm.max_map_count");
  CHECK(named(ENOMEM, {std::size_t{1} << 62}, {}) == "address space");
  CHECK(named(EMFILE, {}, full) == "RLIMIT_NOFILE");
  CHECK(named(EFBIG, {0, 0, 0, 12 * kMiB}, full) == "RLIMIT_FSIZE");
  CHECK(named(EAGAIN, {2 * kMiB, 2 * kMiB}, full) == "RLIMIT_AS");  // a thread's stack
  os::Limits only;
  only.locked = full.locked;
  CHECK(named(EAGAIN, {2 * kMiB}, only) == "RLIMIT_MEMLOCK");
  CHECK(named(ENOMEM, {2 * kMiB}, only).empty());
  only.locked.in_use = 0;  // nothing is locked: it was not that
  CHECK(named(EAGAIN, {2 * kMiB}, only).empty());
  only.committed = full.committed;
  CHECK(named(ENOMEM, {0, 2 * kMiB}, only) == "vm.overcommit_memory");
}

TEST(no_limit_is_named_that_was_not_met) {
  const os::Limits full = all_but_full();
  CHECK(named(ENOMEM, {kMiB, kMiB, 10}, full).empty());
  CHECK(named(EAGAIN, {kMiB}, full).empty());
  CHECK(named(EFBIG, {0, 0, 0, 11 * kMiB}, full).empty());
  CHECK(named(EINVAL, {kMiB * kMiB, kMiB * kMiB, 1 << 20}, full).empty());
  CHECK(named(ENOMEM, {std::size_t{1} << 40, std::size_t{1} << 40, 1 << 20}, {}).empty());
  const Error memory = os::refusal("call", ENOMEM, {kMiB}, {});
  CHECK(memory.kind() == ErrorKind::out_of_memory && field<std::string>(memory, "limited_by") == "memory");
  CHECK(os::refusal("call", EIO, {}, {}).kind() == ErrorKind::driver);
}

TEST(what_is_in_use_is_read) {
  const os::Limits now = os::read_limits();
  CHECK(now.addresses.in_use > kMiB && now.data.in_use > 0 && now.mappings.in_use > 10 && now.mappings.most > 1000);
}

TEST(a_capacity_longer_than_files_may_be_is_refused_without_a_signal) {
  const int status = in_child([] {
    const rlimit limit{kMiB, kMiB};
    CHECK(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
    host::HostMemory(kMiB, 4096);
    try {
      host::HostMemory(2 * kMiB, 4096);
    } catch (const Error& error) {
      CHECK(field<std::string>(error, "limited_by") == "RLIMIT_FSIZE");
      return;
    }
    throw std::logic_error("not refused");
  });
  CHECK(ended_well(status));
}

}  // namespace
