// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/host_budget.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <locale>
#include <sstream>

#include "remap/error.h"

namespace remap::cuda {
namespace {

constexpr const char* kVariable = "REMAP_HOST_BUDGET";
constexpr std::size_t kUnlimited = ~std::size_t{0};
// cgroup v1 writes "no limit" as the largest multiple of an OS page that fits a signed number.
constexpr std::size_t kNoLimitV1 = std::size_t{1} << 62;

// The number behind `key` (and blanks, or a colon) at the start of a line or behind "Node N "; `otherwise` if there is none.
std::size_t number_of(const std::string& text, const std::string& key, std::size_t otherwise) {
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    if (word == "Node") words >> word >> word;
    if (word != key && word != key + ":") continue;
    std::size_t value = 0;
    if (!(words >> value)) continue;
    std::string unit;
    words >> unit;
    return unit == "kB" ? value * 1024 : value;
  }
  return otherwise;
}

// A file that holds one number; "max" and everything else that is not one: `otherwise`.
std::size_t whole_number(const std::string& text, std::size_t otherwise) {
  std::istringstream words(text);
  std::size_t value = 0;
  return words >> value ? value : otherwise;
}

std::size_t left_in(const HostLimits::Group& group) {
  const std::size_t limit = whole_number(group.limit, kUnlimited);
  if (limit >= kNoLimitV1) return kUnlimited;
  const std::size_t usage = whole_number(group.usage, 0);
  // v1 counts the groups below under a name of its own; v2 counts them in all its numbers.
  const std::size_t cache = number_of(group.stat, "total_inactive_file", number_of(group.stat, "inactive_file", 0));
  const std::size_t held = usage - std::min(usage, cache);
  return limit - std::min(limit, held);
}

// By the name that the kernel gives a mapping of it.
bool shared_memory(const std::string& name) {
  for (const char* prefix : {"/dev/zero (deleted)", "/memfd:", "/SYSV", "/dev/shm/", "/anon_hugepage"}) {
    if (name.compare(0, std::string(prefix).size(), prefix) == 0) return true;
  }
  return false;
}

// `path`, and its parents, up to "".
std::vector<std::string> with_parents(std::string path) {
  std::vector<std::string> all;
  while (!path.empty() && path.back() == '/') path.pop_back();
  while (!path.empty()) {
    all.push_back(path);
    path.erase(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
  all.emplace_back();
  return all;
}

bool lists(const std::string& controllers, const std::string& name) {
  std::istringstream words(controllers);
  std::string word;
  while (std::getline(words, word, ',')) {
    if (word == name) return true;
  }
  return false;
}

}  // namespace

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  return text.str();
}

std::vector<int> parse_list(const std::string& text) {
  std::vector<int> all;
  std::istringstream parts(text);
  std::string part;
  while (std::getline(parts, part, ',')) {
    std::istringstream numbers(part);
    int first = 0;
    if (!(numbers >> first)) continue;
    int last = first;
    char dash = 0;
    if (numbers >> dash && dash == '-') numbers >> last;
    for (int value = first; value <= last; ++value) all.push_back(value);
  }
  return all;
}

HostLimits read_host_limits(const std::string& root) {
  HostLimits limits;
  limits.meminfo = read_text(root + "/proc/meminfo");

  const std::string nodes = root + "/sys/devices/system/node/";
  const std::vector<int> with_processors = parse_list(read_text(nodes + "has_cpu"));
  const std::vector<int> with_memory = parse_list(read_text(nodes + "has_memory"));
  const auto has_processors = [&](int node) {
    return std::find(with_processors.begin(), with_processors.end(), node) != with_processors.end();
  };
  if (!std::all_of(with_memory.begin(), with_memory.end(), has_processors)) {
    for (const int node : with_memory) {
      if (has_processors(node)) limits.nodes.push_back(read_text(nodes + "node" + std::to_string(node) + "/meminfo"));
    }
  }

  // Lines are "number:controllers:path"; v2's has no controllers. In a container the path may be one that only the host sees,
  // and the limit stands at the mount itself: the last of the parents.
  std::istringstream lines(read_text(root + "/proc/self/cgroup"));
  std::string line;
  while (std::getline(lines, line)) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && !lists(controllers, "memory")) continue;
    const std::string mount = root + "/sys/fs/cgroup" + (v2 ? "" : "/memory");
    for (const std::string& path : with_parents(line.substr(second + 1))) {
      const std::string directory = mount + path + "/";
      HostLimits::Group group;
      group.limit = read_text(directory + (v2 ? "memory.max" : "memory.limit_in_bytes"));
      if (group.limit.empty()) continue;
      group.usage = read_text(directory + (v2 ? "memory.current" : "memory.usage_in_bytes"));
      group.stat = read_text(directory + "memory.stat");
      limits.groups.push_back(std::move(group));
    }
  }
  return limits;
}

const char* to_string(LimitedBy by) noexcept {
  switch (by) {
    case LimitedBy::host_budget: return "host_budget";
    case LimitedBy::environment: return kVariable;
    case LimitedBy::cgroup: return "cgroup";
    case LimitedBy::machine: break;
  }
  return "machine";
}

std::size_t parse_size(const std::string& text) {
  struct Unit {
    const char* name;
    double bytes;
  };
  constexpr Unit kUnits[] = {{"B", 1},    {"KiB", 1ULL << 10}, {"MiB", 1ULL << 20}, {"GiB", 1ULL << 30}, {"TiB", 1ULL << 40},
                             {"KB", 1e3}, {"MB", 1e6},         {"GB", 1e9},         {"TB", 1e12}};
  const auto skip = [&](const char* among, std::size_t from) {
    const std::size_t found = text.find_first_not_of(among, from);
    return found == std::string::npos ? text.size() : found;
  };
  constexpr const char* kBlank = " \t\n\r\f\v";
  constexpr const char* kDigits = "0123456789";
  const std::size_t begin = skip(kBlank, 0);
  const std::size_t whole = skip(kDigits, begin);
  std::size_t end = whole;
  if (end < text.size() && text[end] == '.') {
    end = skip(kDigits, whole + 1);
    if (end == whole + 1) return 0;
  }
  if (whole == begin) return 0;
  const std::size_t unit = skip(kBlank, end);
  std::string name = text.substr(unit);
  while (!name.empty() && std::string(kBlank).find(name.back()) != std::string::npos) name.pop_back();
  double factor = 0;
  if (name.empty() && end == whole) factor = 1;  // bytes
  for (const Unit& each : kUnits) {
    if (name == each.name) factor = each.bytes;
  }
  std::istringstream number(text.substr(begin, end - begin));
  number.imbue(std::locale::classic());
  double value = 0;
  if (!(number >> value)) return 0;
  value *= factor;
  constexpr double kMost = 9223372036854775808.0;  // 2^63: errors carry signed numbers
  return value >= 1 && value < kMost && value == std::floor(value) ? static_cast<std::size_t>(value) : 0;
}

HostBudget user_budget(std::size_t option) {
  if (option != 0) return {option, LimitedBy::host_budget};
  const char* text = std::getenv(kVariable);
  if (text == nullptr || *text == '\0') return {};
  const std::size_t bytes = parse_size(text);
  if (bytes != 0) return {bytes, LimitedBy::environment};
  throw Error(ErrorKind::invalid_argument,
              std::string(kVariable) + " must be a size above 0 such as 24GiB, or a number of bytes, got '" + text +
                  "'. Nothing was opened. Correct it, or unset it for what the machine has to spare.",
              {{"name", std::string(kVariable)}, {"value", std::string(text)}});
}

HostBudget host_budget(const HostLimits& limits) {
  // MemAvailable came with Linux 3.14.
  LimitedBy by = LimitedBy::machine;
  std::size_t left = number_of(limits.meminfo, "MemAvailable", number_of(limits.meminfo, "MemFree", 0));
  if (!limits.nodes.empty()) {
    std::size_t on_nodes = 0;
    for (const std::string& node : limits.nodes) {
      on_nodes += number_of(node, "MemFree", 0) + number_of(node, "Inactive(file)", 0);
    }
    left = std::min(left, on_nodes);
  }
  for (const HostLimits::Group& group : limits.groups) {
    const std::size_t in_group = left_in(group);
    if (in_group >= left) continue;
    left = in_group;
    by = LimitedBy::cgroup;
  }
  return {left - left / 16, by};
}

RangeFacts range_facts(const std::string& maps, std::uintptr_t at, std::size_t bytes) {
  RangeFacts facts;
  const std::uintptr_t end = at + bytes;
  std::uintptr_t next = at;  // all below is accounted for
  std::istringstream lines(maps);
  std::string line;
  while (next < end && std::getline(lines, line)) {
    std::istringstream words(line);
    std::uintptr_t first = 0;
    std::uintptr_t last = 0;
    char dash = 0;
    std::string permissions;
    std::string offset;
    std::string device;
    std::uint64_t inode = 0;
    words >> std::hex >> first >> dash >> last >> permissions >> offset >> device >> std::dec >> inode;
    if (!words || last <= next) continue;
    std::string name;
    std::getline(words >> std::ws, name);
    if (first > next) break;
    const std::uintptr_t stop = std::min<std::uintptr_t>(last, end);
    facts.readable = facts.readable && permissions[0] == 'r';
    facts.writable = facts.writable && permissions[1] == 'w';
    if (inode != 0 && !shared_memory(name)) facts.file_bytes += stop - next;
    next = stop;
  }
  if (next < end) facts.readable = facts.writable = false;
  return facts;
}

std::size_t resident_bytes(std::uintptr_t at, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  constexpr std::size_t kChunk = 1 << 16;  // OS pages asked about at once
  std::vector<unsigned char> present(kChunk);
  std::uintptr_t next = at / page * page;
  const std::uintptr_t end = at + bytes;
  std::size_t resident = 0;
  while (next < end) {
    const std::size_t length = std::min<std::size_t>(kChunk * page, end - next);
    const std::size_t pages = (length + page - 1) / page;
    if (::mincore(reinterpret_cast<void*>(next), length, present.data()) == 0) {
      for (std::size_t i = 0; i < pages; ++i) resident += present[i] & 1 ? page : 0;
    }
    next += pages * page;
  }
  return std::min(resident, bytes);
}

}  // namespace remap::cuda
