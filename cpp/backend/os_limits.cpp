// SPDX-License-Identifier: Apache-2.0
#include "backend/os_limits.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace remap::os {
namespace {

#if defined(__x86_64__)
constexpr std::size_t kAddresses = std::size_t{1} << 47;  // of a process, with page tables of four levels
#else
constexpr std::size_t kAddresses = std::size_t{1} << 48;
#endif

// A call may need a few mappings for itself, and the arena gives some up and takes them again while it undoes a change.
constexpr std::size_t kMappingsBeside = 64;

// A file of /proc, piece by piece.
class Text {
 public:
  explicit Text(const char* path) noexcept : file_(::open(path, O_RDONLY | O_CLOEXEC)) {}
  ~Text() {
    if (file_ >= 0) ::close(file_);
  }
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;

  // Ends with NUL. 0 at the end, and for a file that cannot be read.
  std::size_t read(char* buffer, std::size_t size) noexcept {
    const ssize_t got = file_ < 0 ? 0 : ::read(file_, buffer, size - 1);
    buffer[got > 0 ? got : 0] = '\0';
    return got > 0 ? static_cast<std::size_t>(got) : 0;
  }

 private:
  int file_;
};

std::size_t number_of(const char* path, std::size_t otherwise) noexcept {
  char text[64];
  return Text(path).read(text, sizeof text) == 0 ? otherwise : std::strtoull(text, nullptr, 10);
}

// The bytes of a line "name   12 kB".
std::size_t bytes_of(const char* text, const char* name) noexcept {
  const char* line = std::strstr(text, name);
  return line == nullptr ? 0 : 1024 * std::strtoull(line + std::strlen(name), nullptr, 10);
}

std::size_t count_mappings() noexcept {
  Text maps("/proc/self/maps");
  char piece[8192];
  std::size_t lines = 0;
  while (const std::size_t got = maps.read(piece, sizeof piece)) lines += std::count(piece, piece + got, '\n');
  return lines;
}

std::size_t limit_of(decltype(RLIMIT_AS) which) noexcept {
  rlimit limit{};
  if (::getrlimit(which, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kNoLimit;
  return static_cast<std::size_t>(limit.rlim_cur);
}

std::int64_t number(std::size_t value) noexcept {
  return static_cast<std::int64_t>(std::min<std::size_t>(value, INT64_MAX));
}

bool over(const Limit& limit, std::size_t more) noexcept {
  return limit.most != kNoLimit && more > limit.most - std::min(limit.most, limit.in_use);
}

Error exceeded(const std::string& call, int code, Error::Fields fields, const char* limited_by, std::size_t requested,
               const Limit& limit, const char* what, const char* advice) {
  fields.emplace_back("limited_by", std::string(limited_by));
  fields.emplace_back("requested", number(requested));
  fields.emplace_back("in_use", number(limit.in_use));
  fields.emplace_back("limit", number(limit.most));
  fields.emplace_back("errno", std::int64_t{code});
  return Error(ErrorKind::limit_exceeded,
               call + ": " + std::to_string(requested) + " " + what + " more would pass the limit of " +
                   std::to_string(limit.most) + " that " + limited_by + " sets, of which " + std::to_string(limit.in_use) +
                   " are in use. Nothing changed. " + advice,
               std::move(fields));
}

}  // namespace

Limits read_limits() noexcept {
  char status[16384];
  Text("/proc/self/status").read(status, sizeof status);
  Limits limits;
  limits.addresses = {bytes_of(status, "VmSize:"), limit_of(RLIMIT_AS)};
  limits.data = {bytes_of(status, "VmData:"), limit_of(RLIMIT_DATA)};
  limits.locked = {bytes_of(status, "VmLck:"), limit_of(RLIMIT_MEMLOCK)};
  limits.mappings = {count_mappings(), number_of("/proc/sys/vm/max_map_count", kNoLimit)};
  limits.files.most = limits.files.in_use = limit_of(RLIMIT_NOFILE);  // asked for only when all are in use
  limits.file_size.most = limit_of(RLIMIT_FSIZE);
  if (number_of("/proc/sys/vm/overcommit_memory", 0) == 2) {
    char meminfo[4096];
    Text("/proc/meminfo").read(meminfo, sizeof meminfo);
    limits.committed = {bytes_of(meminfo, "Committed_AS:"), bytes_of(meminfo, "CommitLimit:")};
  }
  return limits;
}

std::optional<Error> limit_met(const std::string& call, int code, const Asked& asked, const Error::Fields& fields,
                               const Limits& limits) {
  const auto met = [&](const char* limited_by, std::size_t requested, const Limit& limit, const char* what,
                       const char* advice) {
    return exceeded(call, code, fields, limited_by, requested, limit, what, advice);
  };
  if (code == EMFILE) return met("RLIMIT_NOFILE", 1, limits.files, "file descriptor", "Raise it (ulimit -n), or close files.");
  if (code == EFBIG && over(limits.file_size, asked.file_size)) {
    return met("RLIMIT_FSIZE", asked.file_size, limits.file_size, "bytes of a file",
               "Raise it (ulimit -f): the arena's pages are a file in memory.");
  }
  if (code != ENOMEM && code != EAGAIN) return std::nullopt;
  if (over(limits.addresses, asked.addresses)) {
    return met("RLIMIT_AS", asked.addresses, limits.addresses, "bytes of addresses",
               "Raise it (ulimit -v), or ask for less.");
  }
  if (asked.addresses >= kAddresses) {
    return met("address space", asked.addresses, {limits.addresses.in_use, kAddresses}, "bytes of addresses",
               "No process has that many: ask for less.");
  }
  if (over(limits.data, asked.data)) {
    return met("RLIMIT_DATA", asked.data, limits.data, "bytes of private memory", "Raise it (ulimit -d), or ask for less.");
  }
  // Only of a process that said mlockall(MCL_FUTURE): its mappings are locked at once.
  if (code == EAGAIN && limits.locked.in_use != 0 && over(limits.locked, asked.addresses)) {
    return met("RLIMIT_MEMLOCK", asked.addresses, limits.locked, "bytes of locked memory",
               "Raise it (ulimit -l), or call munlockall(): the process locks all that it maps.");
  }
  if (asked.mappings != 0 && over(limits.mappings, asked.mappings + kMappingsBeside)) {
    return met("vm.max_map_count", asked.mappings, limits.mappings, "mappings",
               "Raise it (sysctl vm.max_map_count), or use larger pages.");
  }
  if (over(limits.committed, asked.data)) {
    return met("vm.overcommit_memory", asked.data, limits.committed, "bytes of the machine's memory",
               "The machine never promises more than it has (vm.overcommit_memory = 2): free memory, or ask for less.");
  }
  return std::nullopt;
}

Error refusal(const std::string& call, int code, const Asked& asked, const Error::Fields& fields) {
  if (std::optional<Error> met = limit_met(call, code, asked, fields, read_limits())) return *met;
  Error::Fields told = fields;
  told.emplace_back("errno", std::int64_t{code});
  if (code != ENOMEM) {
    return Error(ErrorKind::driver, call + ": " + std::strerror(code) + ". Nothing changed.", std::move(told));
  }
  told.emplace_back("limited_by", std::string("memory"));
  told.emplace_back("requested", number(std::max(asked.addresses, asked.data)));
  return Error(ErrorKind::out_of_memory,
               call + ": the kernel has no memory for it (ENOMEM), and no limit of the process is reached. Nothing changed. "
                      "Free memory, or ask for less.",
               std::move(told));
}

void require_file_size(const std::string& call, std::size_t bytes, const Error::Fields& fields) {
  const Asked asked{0, 0, 0, bytes};
  Limits limits;
  limits.file_size.most = limit_of(RLIMIT_FSIZE);
  if (std::optional<Error> met = limit_met(call, EFBIG, asked, fields, limits)) throw *met;
}

}  // namespace remap::os
