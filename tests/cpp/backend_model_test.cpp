// Every backend's mappings at random, against an obvious model: what is refused, and after each call every page's
// bytes, every access and the number of mappings. The emulated driver is strict as well: a wrong order, a wrong range
// or a leak is a violation.
#include <algorithm>
#include <random>

#include "cuda_world.h"
#include "host_probe.h"

namespace {

using namespace remap;
using namespace remap::testing;

constexpr std::size_t kSlots = 24, kTags = 12;

struct Shown {
  int page = -1;
  Access access = Access::none;
};
using Model = std::vector<Shown>;

// The contract's upper bound for the kernel's mappings, counted the slow way.
std::size_t ranges(const Model& model) {
  std::size_t count = 1;
  for (std::size_t i = 1; i < model.size(); ++i) {
    const Shown &a = model[i - 1], &b = model[i];
    const bool merges = a.page < 0 ? b.page < 0 : b.page == a.page + 1 && a.access == b.access;
    count += merges ? 0 : 1;
  }
  return count;
}

// `look(at, model)` sees more of what this backend says.
template <typename Look>
void agrees_with_the_model(Backend& backend, unsigned seed, Look&& look) {
  const std::size_t page_bytes = backend.granularity();
  std::mt19937 random(seed);
  const auto pick = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  std::byte* at = backend.reserve(kSlots * page_bytes, page_bytes);
  std::byte* tags = backend.reserve(kTags * page_bytes, page_bytes);
  std::vector<PageHandle> pages;
  for (std::size_t i = 0; i < kTags; ++i) pages.push_back(backend.create_page(page_bytes));
  backend.map(tags, pages.data(), kTags, page_bytes);
  backend.set_access(tags, kTags * page_bytes, Access::read_write);
  for (std::size_t i = 0; i < kTags; ++i) tags[i * page_bytes] = static_cast<std::byte>(i);
  Model model(kSlots);
  for (int step = 0; step < 250; ++step) {
    const std::size_t kind = pick(backend.can_exchange() ? 4 : 3);
    const std::size_t first = pick(kSlots), count = 1 + pick(std::min<std::size_t>(8, kSlots - first));
    const std::size_t second = pick(kSlots - count + 1), start = pick(kTags - count + 1);
    const bool ascending = pick(2) == 0, apart = first + count <= second || second + count <= first;
    const auto access = static_cast<Access>(pick(3));
    const auto page_of = [&](std::size_t i) { return ascending ? start + i : start + count - 1 - i; };
    const auto all = [&](std::size_t from, bool mapped) {
      const auto begin = model.begin() + static_cast<std::ptrdiff_t>(from);
      return std::all_of(begin, begin + static_cast<std::ptrdiff_t>(count),
                         [&](const Shown& one) { return (one.page >= 0) == mapped; });
    };
    std::vector<PageHandle> chosen;
    for (std::size_t i = 0; i < count; ++i) chosen.push_back(pages[page_of(i)]);
    std::byte* place = at + first * page_bytes;
    const std::size_t bytes = count * page_bytes;
    const bool expected = all(first, kind != 0) && (kind != 3 || (all(second, true) && apart));
    bool happened = true;
    try {
      if (kind == 0) backend.map(place, chosen.data(), count, page_bytes);
      if (kind == 1) backend.unmap(place, bytes);
      if (kind == 2) backend.set_access(place, bytes, access);
      if (kind == 3) backend.exchange(place, at + second * page_bytes, bytes);
    } catch (const Error& error) {
      happened = false;
      CHECK(error.kind() == ErrorKind::invalid_state || (error.kind() == ErrorKind::invalid_argument && !apart));
    }
    CHECK(happened == expected);
    for (std::size_t i = 0; happened && i < count; ++i) {
      Shown& one = model[first + i];
      if (kind == 0) one = {static_cast<int>(page_of(i)), Access::none};
      if (kind == 1) one = {};
      if (kind == 2) one.access = access;
      if (kind == 3) std::swap(one, model[second + i]);
    }
    std::size_t mapped = kTags;
    for (std::size_t i = 0; i < kSlots; ++i) {
      mapped += model[i].page >= 0 ? 1 : 0;
      if (model[i].access != Access::none) CHECK(at[i * page_bytes] == static_cast<std::byte>(model[i].page));
    }
    CHECK(backend.usage().mapped_bytes == mapped * page_bytes);
    look(at, model, mapped);
    const std::size_t probe = pick(kSlots);
    CHECK(readable(at + probe * page_bytes) == (model[probe].access != Access::none));
    CHECK(writable(at + probe * page_bytes) == (model[probe].access == Access::read_write));
    if (model[probe].access == Access::read_write) at[probe * page_bytes] = static_cast<std::byte>(model[probe].page);
  }
  for (std::size_t i = 0; i < kSlots; ++i) {
    if (model[i].page >= 0) backend.unmap(at + i * page_bytes, page_bytes);
  }
  backend.unmap(tags, kTags * page_bytes);
  for (const PageHandle page : pages) backend.destroy_page(page);
  backend.release(at, kSlots * page_bytes);
  backend.release(tags, kTags * page_bytes);
  CHECK(empty(backend.usage()));
}

TEST(host) {
  for (unsigned seed = 1; seed <= 8; ++seed) {
    const auto backend = make_host_backend({kTags * 4096, 4096, 1});
    agrees_with_the_model(*backend, seed, [&](const std::byte* at, const Model& model, std::size_t) {
      CHECK(backend->usage().mappings == ranges(model) + 1);  // and the one of `tags`
      CHECK(kernel_mappings(at, kSlots * 4096) <= ranges(model));
    });
  }
}

CLEAN_TEST(cuda) {
  for (unsigned seed = 1; seed <= 8; ++seed) {
    emulate();
    const auto backend = open_cuda();
    agrees_with_the_model(*backend, seed, [](const std::byte*, const Model&, std::size_t mapped) {
      CHECK(live("mappings") == mapped);
    });
  }
}

}  // namespace
