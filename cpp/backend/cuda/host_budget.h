// SPDX-License-Identifier: Apache-2.0
// How much host memory may be page-locked, and what there is to know about a range before that is done.
//
// Page-locked memory can neither be reclaimed nor swapped out: an excess over the spare memory of the machine or the cgroup ends
// in the out-of-memory killer, not in an error. So the limits are read before anything is allocated.
//
// Reading files and judging them are separate, so that the judgement can be tested on any text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace remap::cuda {

// The texts of the files that state the limits; an empty text is a file that is not there.
struct HostLimits {
  std::string meminfo;             // /proc/meminfo
  std::vector<std::string> nodes;  // meminfo of the NUMA nodes with processors, where there are others; see host_budget()
  struct Group {
    std::string limit;  // memory.max (v2) or memory.limit_in_bytes (v1)
    std::string usage;  // memory.current or memory.usage_in_bytes
    std::string stat;   // memory.stat
  };
  std::vector<Group> groups;  // the process's memory cgroup and all above it
};

// The bound of page-locked memory: the user's setting, or else the tightest of the bounds shared with others.
enum class LimitedBy { host_budget, environment, cgroup, machine };
// "host_budget", "REMAP_HOST_BUDGET", "cgroup", "machine": the field limited_by of errors, and of the probe.
const char* to_string(LimitedBy by) noexcept;

struct HostBudget {
  std::size_t bytes = 0;
  LimitedBy limited_by = LimitedBy::machine;
  bool set() const noexcept { return limited_by == LimitedBy::host_budget || limited_by == LimitedBy::environment; }
};

// The user's setting: `option` bytes if that is not 0, else the environment variable REMAP_HOST_BUDGET ("24GiB", or a number of
// bytes). Not set() if there is neither. Throws invalid_argument (fields name, value) for a text that is no size above 0.
HostBudget user_budget(std::size_t option);

// A size as users write it: "24GiB", "1.5 GB", "4096". 0 for anything else, and for 0 itself.
std::size_t parse_size(const std::string& text);

// `root` stands before every path: empty, but in tests.
HostLimits read_host_limits(const std::string& root = {});

// The bytes that may be page-locked now if the user sets no budget: the least of MemAvailable and of what each cgroup has left,
// less a sixteenth that stays for all others. A cgroup's inactive file cache counts as left: it goes when memory is asked for. On
// machines whose GPU memory is a NUMA node of the system (GH200), MemAvailable counts that too; there the nodes with processors
// bound it.
HostBudget host_budget(const HostLimits& limits);

// "0-2,5" -> 0, 1, 2, 5
std::vector<int> parse_list(const std::string& text);

// The entries of /proc/self/maps for [at, at + bytes).
struct RangeFacts {
  bool readable = true;        // mapped in whole, and may be read
  bool writable = true;        // may be written in whole
  // Behind which a file stands, whose pages could be reclaimed until they are locked. Shared memory that has no file on a disk
  // (anonymous, memfd, System V, /dev/shm) is none of it: the system does not count its pages as available.
  std::size_t file_bytes = 0;
};
RangeFacts range_facts(const std::string& maps, std::uintptr_t at, std::size_t bytes);

std::string read_text(const std::string& path);

// Of an existing mapping: how much is in memory now.
std::size_t resident_bytes(std::uintptr_t at, std::size_t bytes);

}  // namespace remap::cuda
