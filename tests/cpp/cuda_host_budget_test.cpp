// What may be page-locked: judged from the texts of the files that say what is left. And what is known of a range before.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "backend/cuda/host_budget.h"
#include "check.h"

namespace {

using namespace remap::cuda;

constexpr std::size_t kKiB = 1024;
std::size_t spared(std::size_t left) { return left - left / 16; }

const char* const kMeminfo =
    "MemTotal:       24611188 kB\n"
    "MemFree:        21000000 kB\n"
    "MemAvailable:   22000000 kB\n"
    "Buffers:            1234 kB\n";

struct Judged {
  const char* what;
  HostLimits limits;
  std::size_t bytes;
  LimitedBy by;
};

HostLimits with(std::vector<HostLimits::Group> groups) { return {kMeminfo, {}, std::move(groups)}; }

TEST(what_is_left_is_the_least_that_any_file_says) {
  const std::size_t machine = spared(22000000 * kKiB);
  const auto by_machine = LimitedBy::machine, by_cgroup = LimitedBy::cgroup;
  const char* const kCached = "anon 100\ninactive_file 2500000000\nactive_file 900\n";
  const std::vector<std::string> nodes = {
      "Node 0 MemTotal:  9000000 kB\nNode 0 MemFree:  3000000 kB\nNode 0 Inactive(file):  500000 kB\n",
      "Node 1 MemTotal:  9000000 kB\nNode 1 MemFree:  1000000 kB\nNode 1 Inactive(file):  0 kB\n"};
  const HostLimits::Group largest{"8000000000\n", "1000000000\n", ""}, tightest{"4000000000\n", "3000000000\n", ""};
  const HostLimits::Group unlimited{"max\n", "9000000000\n", ""}, unlimited_v1{"9223372036854771712\n", "5000\n", ""};
  const std::vector<Judged> all = {
      {"no group", with({}), machine, by_machine},
      {"no limit, also v1's", with({unlimited, unlimited_v1}), machine, by_machine},
      {"an old kernel", {"MemTotal: 100 kB\nMemFree: 64 kB\n", {}, {}}, spared(64 * kKiB), by_machine},
      {"a missing file", {}, 0, by_machine},
      {"the tightest group", with({largest, tightest, unlimited}), spared(1000000000), by_cgroup},
      {"more than the machine has", with({{"90000000000\n", "1000000000\n", ""}}), machine, by_machine},
      {"inactive file cache", with({{"4000000000", "3500000000", kCached}}), spared(3000000000), by_cgroup},
      // v1 counts the groups below under "total_"; its plain number is the group's own.
      {"v1's total",
       with({{"4000000000", "3500000000", "inactive_file 5\ntotal_inactive_file 500000000\n"}}),
       spared(1000000000),
       by_cgroup},
      // Counters are read one after the other, so a cache can be larger than the use.
      {"more cache than use",
       with({{"4000000000", "3500000000", "inactive_file 9900000000\n"}}),
       spared(4000000000),
       by_cgroup},
      {"a group above its limit", with({{"1000", "2000", ""}}), 0, by_cgroup},
      {"nodes with processors", {kMeminfo, nodes, {}}, spared(4500000 * kKiB), by_machine},
  };
  for (const Judged& each : all) {
    const auto budget = host_budget(each.limits);
    if (budget.bytes != each.bytes || budget.limited_by != each.by) throw std::logic_error(each.what);
  }
}

void write(const std::filesystem::path& root, const std::string& name, const std::string& text) {
  const auto path = root / name;
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

// A machine with cgroup v2 for the process and v1's memory controller beside it, and a GPU's memory as node 1.
TEST(the_files_of_all_levels_are_found) {
  char name[] = "/tmp/remap-limits-XXXXXX";
  CHECK(mkdtemp(name) != nullptr);
  const std::filesystem::path root = name;
  write(root, "proc/meminfo", kMeminfo);
  write(root, "proc/self/cgroup", "7:cpu,memory:/outer\n3:freezer:/elsewhere\n0::/user/job\n");
  write(root, "sys/fs/cgroup/user/job/memory.max", "max\n");
  write(root, "sys/fs/cgroup/user/job/memory.current", "10\n");
  write(root, "sys/fs/cgroup/user/memory.max", "7000\n");
  write(root, "sys/fs/cgroup/user/memory.current", "2000\n");
  write(root, "sys/fs/cgroup/user/memory.stat", "inactive_file 600\n");
  write(root, "sys/fs/cgroup/memory/outer/memory.limit_in_bytes", "9000\n");
  write(root, "sys/fs/cgroup/memory/outer/memory.usage_in_bytes", "1000\n");
  write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write(root, "sys/devices/system/node/has_cpu", "0\n");
  write(root, "sys/devices/system/node/has_memory", "0-1\n");
  write(root, "sys/devices/system/node/node0/meminfo", "Node 0 MemFree: 5 kB\n");
  write(root, "sys/devices/system/node/node1/meminfo", "Node 1 MemFree: 90000000 kB\n");

  HostLimits limits = read_host_limits(name);
  CHECK(limits.meminfo == kMeminfo);
  CHECK(limits.nodes.size() == 1 && limits.nodes[0] == "Node 0 MemFree: 5 kB\n");
  CHECK(limits.groups.size() == 4);  // the v2 root has no memory.max
  CHECK(host_budget(limits).bytes == spared(5 * kKiB));
  limits.nodes.clear();
  CHECK(host_budget(limits).bytes == spared(7000 - 1400));

  write(root, "sys/devices/system/node/has_cpu", "0-1\n");  // two sockets: nothing to keep apart
  CHECK(read_host_limits(name).nodes.empty());
  std::filesystem::remove_all(root);
}

const char* const kMaps =
    "1000-3000 rw-p 00000000 00:00 0 \n"
    "3000-5000 r--p 00001000 fe:01 4711    /lib/some thing.so\n"
    "5000-6000 rw-s 00000000 00:01 12    /memfd:x (deleted)\n"
    "8000-9000 ---p 00000000 00:00 0 \n"
    "9000-a000 rw-p 00000000 00:00 0     [heap]\n";

// An environment variable while it lasts.
class Variable {
 public:
  explicit Variable(const char* value) { setenv("REMAP_HOST_BUDGET", value, 1); }
  ~Variable() { unsetenv("REMAP_HOST_BUDGET"); }
};

TEST(the_user_sets_a_budget_by_option_or_environment) {
  CHECK(!user_budget(0).set());
  CHECK(user_budget(7).bytes == 7 && user_budget(7).limited_by == LimitedBy::host_budget);
  {
    const Variable variable("1.5GiB");
    CHECK(user_budget(0).bytes == std::size_t{3} << 29 && user_budget(0).limited_by == LimitedBy::environment);
    CHECK(user_budget(7).bytes == 7 && user_budget(7).limited_by == LimitedBy::host_budget);  // the option wins
  }
  {
    const Variable empty("");
    CHECK(!user_budget(0).set());
  }
  {
    const Variable bytes("24");
    CHECK(user_budget(0).bytes == 24);
  }
  for (const char* wrong : {"lots", "0", "-1", "1.5", "0.3B", "24gib", "GiB", "1GiB2", "9999999999TiB", " "}) {
    const Variable variable(wrong);
    CHECK_ERROR(remap::ErrorKind::invalid_argument, (void)user_budget(0));
  }
  CHECK(std::string(to_string(LimitedBy::environment)) == "REMAP_HOST_BUDGET");
}

// Shared memory is the process's own as private memory is: no page of it is in the file cache that could be given up.
TEST(shared_memory_without_a_file_is_no_file) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const int file = static_cast<int>(syscall(SYS_memfd_create, "remap-test", 0));
  CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(4 * page)) == 0);
  void* places[] = {mmap(nullptr, 4 * page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0),
                    mmap(nullptr, 4 * page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)};
  for (void* place : places) {
    CHECK(place != MAP_FAILED);
    const auto at = reinterpret_cast<std::uintptr_t>(place);
    static_cast<volatile char*>(place)[0] = 1;
    const RangeFacts facts = range_facts(read_text("/proc/self/maps"), at, 4 * page);
    CHECK(facts.readable && facts.writable && facts.file_bytes == 0);
    CHECK(resident_bytes(at, 4 * page) == page);
    munmap(place, 4 * page);
  }
  close(file);
  const auto code = reinterpret_cast<std::uintptr_t>(&shared_memory_without_a_file_is_no_file);
  CHECK(range_facts(read_text("/proc/self/maps"), code, 1).file_bytes == 1);
}

TEST(a_range_is_judged_by_the_mappings_under_it) {
  RangeFacts facts = range_facts(kMaps, 0x1234, 100);
  CHECK(facts.readable && facts.writable && facts.file_bytes == 0);
  facts = range_facts(kMaps, 0x2000, 0x1800);  // into the file
  CHECK(facts.readable && !facts.writable && facts.file_bytes == 0x800);
  facts = range_facts(kMaps, 0x1000, 0x5000);  // three mappings, to the last byte
  CHECK(facts.readable && !facts.writable && facts.file_bytes == 0x2000);
  facts = range_facts(kMaps, 0x5000, 0x1001);  // one byte into the hole
  CHECK(!facts.readable && !facts.writable);
  CHECK(!range_facts(kMaps, 0x6000, 0x1000).readable);
  CHECK(!range_facts(kMaps, 0x8000, 0x10).readable);
  CHECK(!range_facts(kMaps, 0x9fff, 2).readable);
  CHECK(!range_facts(kMaps, 0x100, 0x10).readable);
}

}  // namespace
