// The host backend's memory: regions, pages, mappings, exchange, limits, and what the kernel says about them.

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "backend/host_memory.h"
#include "check.h"
#include "host_probe.h"
#include "remap/backends.h"

using namespace remap;
using namespace remap::testing;

namespace {

constexpr std::size_t kSmall = 4096;
constexpr std::size_t kPage = std::size_t{2} << 20;

std::shared_ptr<Backend> open_backend(std::size_t pages, std::size_t page_bytes = kSmall) {
  return make_host_backend({pages * page_bytes, page_bytes, 1});
}

TEST(options_are_checked) {
  CHECK_ERROR(ErrorKind::invalid_argument, make_host_backend({0, kSmall, 1}));
  CHECK_ERROR(ErrorKind::invalid_argument, make_host_backend({kSmall, 0, 1}));
  CHECK_ERROR(ErrorKind::invalid_argument, make_host_backend({kSmall, kSmall / 2, 1}));
  CHECK_ERROR(ErrorKind::invalid_argument, make_host_backend({kSmall + 1, kSmall, 1}));
  CHECK_ERROR(ErrorKind::invalid_argument, make_host_backend({kSmall, kSmall, 0}));
}

TEST(every_precondition_is_checked) {
  auto backend = open_backend(8);
  std::byte* at = backend->reserve(8 * kSmall, kSmall);
  std::vector<PageHandle> pages;
  for (int i = 0; i < 8; ++i) pages.push_back(backend->create_page(kSmall));
  backend->map(at + 2 * kSmall, pages.data(), 2, kSmall);  // slots 2 and 3
  const Usage before = backend->usage();
  int dummy = 0;
  auto* foreign = reinterpret_cast<std::byte*>(&dummy);
  const PageHandle bad[] = {pages[4], 0};
  const auto argument = [&](const std::function<void()>& call) { CHECK_ERROR(ErrorKind::invalid_argument, (call(), 0)); };
  const auto state = [&](const std::function<void()>& call) { CHECK_ERROR(ErrorKind::invalid_state, (call(), 0)); };
  argument([&] { backend->map(at + 1, pages.data(), 1, kSmall); });
  argument([&] { backend->map(at, pages.data(), 0, kSmall); });
  argument([&] { backend->map(at, pages.data(), 1, 2 * kSmall); });
  argument([&] { backend->map(at + 7 * kSmall, pages.data(), 2, kSmall); });
  argument([&] { backend->map(at, bad, 2, kSmall); });
  argument([&] { backend->map(nullptr, pages.data(), 1, kSmall); });
  argument([&] { backend->map(at, pages.data(), ~std::size_t{0} / kSmall, kSmall); });
  state([&] { backend->map(at, pages.data() + 4, 3, kSmall); });
  state([&] { backend->map(at + 3 * kSmall, pages.data() + 4, 1, kSmall); });
  for (const auto& range : {std::pair<std::size_t, std::size_t>{0, 1}, {1, 2}, {3, 2}, {2, 3}}) {
    std::byte* from = at + range.first * kSmall;
    const std::size_t bytes = range.second * kSmall;
    state([&] { backend->unmap(from, bytes); });
    state([&] { backend->set_access(from, bytes, Access::read); });
    state([&] { backend->populate(from, bytes); });
    state([&] { backend->exchange(from, at + 2 * kSmall, bytes); });
  }
  argument([&] { backend->unmap(at + 2 * kSmall, 100); });
  argument([&] { backend->unmap(at + 2 * kSmall, 0); });
  argument([&] { backend->set_access(foreign, kSmall, Access::read); });
  argument([&] { backend->exchange(at + 2 * kSmall, at + 2 * kSmall, kSmall); });
  argument([&] { backend->destroy_page(12345); });
  argument([&] { backend->destroy_page(0); });
  argument([&] { backend->free_host(at, kSmall); });
  argument([&] { backend->allocate_host(0); });
  CHECK(same(before, backend->usage()));
  CHECK(kernel_mappings(at, 8 * kSmall) <= before.mappings);
}

TEST(exchange_of_large_pages_moves_populated_tables) {
  auto backend = open_backend(8, kPage);
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

}  // namespace
