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

TEST(the_machine_limits_where_no_cgroup_does) {
  HostLimits limits;
  limits.meminfo = kMeminfo;
  CHECK(host_budget(limits).bytes == spared(22000000 * kKiB));
  limits.groups.push_back({"max\n", "5000000000\n", ""});
  limits.groups.push_back({"9223372036854771712\n", "5000000000\n", ""});  // v1's "no limit"
  CHECK(host_budget(limits).bytes == spared(22000000 * kKiB));
}

TEST(an_old_kernel_says_what_is_free_and_a_missing_file_nothing) {
  HostLimits limits;
  limits.meminfo = "MemTotal: 100 kB\nMemFree: 64 kB\n";
  CHECK(host_budget(limits).bytes == spared(64 * kKiB));
  limits.meminfo.clear();
  CHECK(host_budget(limits).bytes == 0);
}

TEST(the_tightest_cgroup_limits) {
  HostLimits limits;
  limits.meminfo = kMeminfo;
  limits.groups.push_back({"8000000000\n", "1000000000\n", ""});
  limits.groups.push_back({"4000000000\n", "3000000000\n", ""});
  limits.groups.push_back({"max\n", "9000000000\n", ""});
  CHECK(host_budget(limits).bytes == spared(1000000000));
  CHECK(host_budget(limits).limited_by == LimitedBy::cgroup);
  limits.groups.resize(1);
  limits.groups[0].limit = "90000000000\n";  // more than the machine has
  CHECK(host_budget(limits).limited_by == LimitedBy::machine);
}

TEST(inactive_file_cache_counts_as_left) {
  HostLimits limits;
  limits.meminfo = kMeminfo;
  limits.groups.push_back({"4000000000", "3500000000", "anon 100\ninactive_file 2500000000\nactive_file 900\n"});
  CHECK(host_budget(limits).bytes == spared(3000000000));
  // v1 counts the groups below under "total_"; its plain number is the group's own.
  limits.groups.back().stat = "inactive_file 5\ntotal_inactive_file 500000000\n";
  CHECK(host_budget(limits).bytes == spared(1000000000));
  // Counters are read one after the other, so a cache can be larger than the use.
  limits.groups.back().stat = "inactive_file 9900000000\n";
  CHECK(host_budget(limits).bytes == spared(4000000000));
}

TEST(a_cgroup_above_its_limit_leaves_nothing) {
  HostLimits limits;
  limits.meminfo = kMeminfo;
  limits.groups.push_back({"1000", "2000", ""});
  CHECK(host_budget(limits).bytes == 0);
}

TEST(nodes_with_processors_bound_it_where_there_are_others) {
  HostLimits limits;
  limits.meminfo = kMeminfo;
  limits.nodes.push_back("Node 0 MemTotal:  9000000 kB\nNode 0 MemFree:  3000000 kB\nNode 0 Inactive(file):  500000 kB\n");
  limits.nodes.push_back("Node 1 MemTotal:  9000000 kB\nNode 1 MemFree:  1000000 kB\nNode 1 Inactive(file):  0 kB\n");
  CHECK(host_budget(limits).bytes == spared(4500000 * kKiB));
}

TEST(lists_are_read) {
  CHECK(parse_list("0-2,5\n") == (std::vector<int>{0, 1, 2, 5}));
  CHECK(parse_list("3\n") == std::vector<int>{3});
  CHECK(parse_list("\n").empty() && parse_list("").empty());
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

TEST(this_machine_has_something_left) {
  const std::size_t budget = host_budget(read_host_limits()).bytes;
  CHECK(budget > 0);
  CHECK(budget < (std::size_t{1} << 50));
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

TEST(sizes_are_read) {
  CHECK(parse_size("24GiB") == std::size_t{24} << 30 && parse_size(" 4096 ") == 4096 && parse_size("2.5 KB\n") == 2500);
  CHECK(parse_size("1TB") == 1000000000000 && parse_size("3B") == 3 && parse_size("0.5KiB") == 512);
  for (const char* wrong : {"", "x", "1.", ".5KB", "1.5", "1e3", "+3", "3 Bytes", "1 2"}) CHECK(parse_size(wrong) == 0);
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

TEST(what_is_in_memory_is_counted) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* place = mmap(nullptr, 8 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(place != MAP_FAILED);
  (void)madvise(place, 8 * page, MADV_NOHUGEPAGE);
  auto* bytes = static_cast<volatile char*>(place);
  const auto at = reinterpret_cast<std::uintptr_t>(place);
  CHECK(resident_bytes(at, 8 * page) == 0);
  bytes[0] = bytes[3 * page] = 1;
  CHECK(resident_bytes(at, 8 * page) == 2 * page);
  CHECK(resident_bytes(at + 5, 10) == 10);  // never more than was asked about
  munmap(place, 8 * page);
}

}  // namespace
