// The host backend as the operating system sees it: forked children, bounded memory, kernel limits, nothing left behind.
#include <dirent.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "child.h"
#include "remap/backends.h"
#include "usage.h"

using namespace remap;
using namespace remap::testing;

namespace {

constexpr std::size_t kSmall = 4096;
constexpr std::size_t kPage = std::size_t{2} << 20;

std::size_t entries(const char* directory) {
  std::size_t count = 0;
  DIR* listing = ::opendir(directory);
  CHECK(listing != nullptr);
  while (::readdir(listing) != nullptr) ++count;
  ::closedir(listing);
  return count;
}

// Kernel mappings whose line in /proc/self/maps has `text`, or of the whole process.
std::size_t mappings_of(const std::string& text) {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find(text) != std::string::npos;
  return count;
}

std::size_t resident_arena_bytes() {
  std::ifstream smaps("/proc/self/smaps");
  std::size_t kib = 0;
  bool ours = false;
  for (std::string line; std::getline(smaps, line);) {
    const std::string first = line.substr(0, line.find(' '));
    if (first.find('-') != std::string::npos && first.find(':') == std::string::npos) {
      ours = line.find("/memfd:remap") != std::string::npos;
    } else if (ours && first == "Pss:") {
      kib += std::stoull(line.substr(first.size()));
    }
  }
  return kib * 1024;
}

struct Mapped {
  std::shared_ptr<Backend> backend;
  std::byte* at = nullptr;
  std::vector<PageHandle> pages;
  std::size_t bytes = 0;
  Mapped(std::size_t count, std::size_t page_bytes) : backend(make_host_backend({count * page_bytes, page_bytes, 2})) {
    for (std::size_t i = 0; i < count; ++i) pages.push_back(backend->create_page(page_bytes));
    bytes = count * page_bytes;
    at = backend->reserve(bytes, kSmall);
    backend->map(at, pages.data(), count, page_bytes);
    backend->set_access(at, bytes, Access::read_write);
    std::memset(at, 7, bytes);
  }
};

bool killed_by_fault(int status) { return WIFSIGNALED(status) && (WTERMSIG(status) == SIGSEGV || WTERMSIG(status) == SIGBUS); }

TEST(a_forked_child_cannot_touch_the_arena) {
  Mapped m(4, kPage);
  const PageHandle& page = m.pages[0];
  std::byte* other = m.backend->reserve(kPage, kPage);
  m.backend->map(other, &page, 1, kPage);
  m.backend->set_access(other, kPage, Access::read_write);
  std::byte* third = m.backend->reserve(kPage, kPage);
  m.backend->map(third, &m.pages[1], 1, kPage);
  m.backend->set_access(third, kPage, Access::read);
  m.backend->exchange(other, third, kPage);  // a moved mapping must be as protected as a fresh one
  for (std::byte* at : {m.at, m.at + 3 * kPage, other, third}) {
    CHECK(killed_by_fault(in_child([&] { CHECK(*const_cast<volatile std::byte*>(at) == std::byte{7}); })));
    CHECK(killed_by_fault(in_child([&] { *const_cast<volatile std::byte*>(at) = std::byte{9}; })));
    CHECK(*at == std::byte{7});
  }
}

TEST(resident_memory_is_bounded_by_capacity) {
  constexpr std::size_t kCount = 8;
  Mapped m(kCount, kPage);
  for (int i = 0; i < 3; ++i) {
    std::byte* alias = m.backend->reserve(m.bytes, kPage);
    m.backend->map(alias, m.pages.data(), kCount, kPage);
    m.backend->set_access(alias, m.bytes, Access::read_write);
    m.backend->populate(alias, m.bytes);
    std::memset(alias, i, m.bytes);
  }
  const std::size_t full = resident_arena_bytes();
  CHECK(full <= kCount * kPage && full >= kCount * kPage - 64 * 1024);  // Pss is rounded down for each mapping
}

TEST(a_destroyed_page_gives_its_memory_back) {
  Mapped m(8, kPage);
  m.backend->unmap(m.at, 6 * kPage);
  for (std::size_t i = 0; i < 6; ++i) {
    m.backend->destroy_page(m.pages[i]);
    m.pages[i] = m.backend->create_page(kPage);
  }
  m.backend->map(m.at, m.pages.data(), 6, kPage);
  m.backend->set_access(m.at, 6 * kPage, Access::read);
  CHECK(resident_arena_bytes() == 2 * kPage);
}

TEST(exchange_of_large_pages_moves_populated_tables) {
  auto backend = make_host_backend({8 * kPage, kPage, 1});
  CHECK(backend->can_exchange());
  std::byte* a = backend->reserve(4 * kPage, kPage);
  std::byte* b = backend->reserve(4 * kPage, kPage);
  std::vector<PageHandle> pages;
  for (int i = 0; i < 8; ++i) pages.push_back(backend->create_page(kPage));
  const PageHandle mixed[] = {pages[7], pages[2], pages[3], pages[0]};
  backend->map(a, pages.data() + 4, 3, kPage);
  backend->map(a + 3 * kPage, pages.data() + 1, 1, kPage);
  backend->map(b, mixed, 4, kPage);
  for (std::byte* at : {a, b}) {
    backend->set_access(at, 4 * kPage, Access::read_write);
    for (std::size_t i = 0; i < 4; ++i) std::memset(at + i * kPage, static_cast<int>(i + (at == b ? 16 : 1)), kPage);
  }
  const Usage before = backend->usage();
  for (int round = 0; round < 3; ++round) {
    backend->exchange(a, b, 4 * kPage);
    for (std::size_t i = 0; i < 4; ++i) {
      const auto one = static_cast<std::byte>(i + (round % 2 == 0 ? 16 : 1));
      const auto other = static_cast<std::byte>(i + (round % 2 == 0 ? 1 : 16));
      CHECK(std::all_of(a + i * kPage, a + (i + 1) * kPage, [&](std::byte value) { return value == one; }));
      CHECK(std::all_of(b + i * kPage, b + (i + 1) * kPage, [&](std::byte value) { return value == other; }));
    }
  }
  CHECK(same(before, backend->usage()));
  CHECK_ERROR(ErrorKind::invalid_argument, backend->exchange(a, a + kPage, 2 * kPage));
}

TEST(nothing_is_left_behind) {
  const auto cycle = [] {
    Mapped m(4, kPage);
    std::byte* other = m.backend->reserve(2 * kPage, kPage);
    m.backend->map(other, m.pages.data(), 2, kPage);
    m.backend->exchange(m.at + 2 * kPage, other, 2 * kPage);
    std::byte* master = m.backend->allocate_host(kPage);
    const StreamHandle stream = m.backend->create_stream();
    m.backend->copy(stream, m.at, master, kPage);
    m.backend->record(m.backend->create_event(true), stream);
  };
  for (int i = 0; i < 3; ++i) cycle();  // thread stacks are kept by the C library
  const std::size_t files = entries("/proc/self/fd");
  const std::size_t threads = entries("/proc/self/task");
  [[maybe_unused]] const std::size_t mappings = mappings_of("-");
  for (int i = 0; i < 30; ++i) cycle();
  CHECK(entries("/proc/self/fd") == files);
  CHECK(entries("/proc/self/task") == threads);
#if !defined(__SANITIZE_THREAD__)  // TSan's own mappings grow
  CHECK(mappings_of("-") <= mappings + 8);  // malloc may take some
#endif
  CHECK(mappings_of("/memfd:remap") == 0);
}

}  // namespace
