// Two arenas over one memfd, as of two processes: pages go from one to the other by way of `outside`.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "plans.h"

using namespace remap;
using namespace remap::testing;

namespace {

constexpr std::size_t kPage = HostArena::kPage;
constexpr std::size_t kPages = 8;

struct File {
  int number = -1;
  explicit File(std::size_t bytes, int seals = F_SEAL_SHRINK | F_SEAL_GROW) {
    constexpr unsigned kAllowSealing = 2;  // MFD_ALLOW_SEALING
    number = static_cast<int>(::syscall(SYS_memfd_create, "shared", kAllowSealing));
    CHECK(number >= 0 && ::ftruncate(number, static_cast<off_t>(bytes)) == 0);
    CHECK(::fcntl(number, F_ADD_SEALS, seals) == 0);
  }
  ~File() { ::close(number); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
};

// What one of the processes has: a tenant whose KV region has a place for every page.
struct Member {
  std::shared_ptr<FaultBackend> fault;
  std::shared_ptr<Arena> arena;
  std::unique_ptr<Executor> executor;
  RegionId kv = 0;

  Member(const File& file, Mode mode)
      : fault(make_fault_backend(make_host_backend({kPages * kPage, kPage, 1, file.number}))),
        arena(std::make_shared<Arena>(fault, ArenaOptions{kPages * kPage, kPage, mode, true})),
        executor(std::make_unique<Executor>(arena)) {
    kv = arena->add_kv_region(kTenant, kPages);
    std::vector<PageId> all(kPages);
    for (PageId id = 0; id < kPages; ++id) all[id] = id;
    arena->designate(kv, 0, all);
  }
  ~Member() {
    executor->stop();
    arena->close();
  }
  struct Changed : Applied {
    std::size_t zeroed_bytes = 0;
  };
  Changed change(std::vector<Step> steps, const Ordering& ordering = {}) const {
    Changed changed{executor->apply({arena->epoch(), std::move(steps)}, ordering)};
    changed.zeroed_bytes = executor->zero_due();
    executor->commit(nullptr);
    arena->check();
    return changed;
  }
  Changed bring_in(std::vector<PageId> pages) const { return change({owner(std::move(pages), Owner::outside, Owner::free, kNobody)}); }
  Changed hand_out(std::vector<PageId> pages) const { return change({owner(std::move(pages), Owner::free, Owner::outside, kNobody)}); }
  Changed grow(std::vector<PageId> pages) const { return change({owner(std::move(pages), Owner::free, Owner::kv)}); }
  Changed shrink(std::vector<PageId> pages) const { return change({owner(std::move(pages), Owner::kv, Owner::free)}); }
  std::byte* page(PageId id) const { return arena->address(kv) + id * kPage; }
  bool reads(PageId id, int value) const {
    const std::byte* at = page(id);
    return at[0] == static_cast<std::byte>(value) && std::memcmp(at, at + 1, kPage - 1) == 0;
  }
};

template <typename Body>
void in_both_modes(Body&& body) {
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    const File file(kPages * kPage);
    body(Member(file, mode), Member(file, mode));
  }
}

TEST(all_pages_are_outside_at_first) {
  in_both_modes([](const Member& one, const Member&) {
    CHECK(one.arena->counts()[Owner::outside] == kPages && one.arena->free_pages().empty());
    CHECK_ERROR(ErrorKind::out_of_memory, one.arena->take(1, Owner::params, kTenant));
    one.arena->check();
  });
}

TEST(a_page_that_comes_in_reads_zero_and_its_bytes_stay_while_it_is_there) {
  in_both_modes([](const Member& one, const Member& two) {
    one.bring_in({2, 3});
    CHECK(one.grow({2, 3}).zeroed_bytes == 2 * kPage && one.reads(2, 0));
    std::memset(one.page(2), 7, 2 * kPage);
    one.shrink({2});
    one.hand_out({2});
    two.bring_in({2});
    CHECK(two.grow({2}).zeroed_bytes == kPage && two.reads(2, 0));
    CHECK(one.reads(3, 7));  // nobody else has touched that one
    std::memset(two.page(2), 8, kPage);
    two.shrink({2});
    two.hand_out({2});
    one.bring_in({2});
    CHECK(one.grow({2}).zeroed_bytes == kPage && one.reads(2, 0));  // its own page once, but others had it since
  });
}

TEST(the_weights_of_one_can_be_the_kv_of_the_other) {
  in_both_modes([](const Member& one, const Member& two) {
    two.bring_in({0, 1});
    two.grow({0, 1});
    std::memset(two.page(0), 5, 2 * kPage);
    two.shrink({0, 1});
    two.hand_out({0, 1});
    one.bring_in({0, 1});
    const std::vector<PageId> home = one.arena->take(2, Owner::params, kTenant + 1);
    const RegionId layer = one.arena->add_layer_region(kTenant + 1, "layer", home);
    const std::byte* at = one.arena->address(layer);
    CHECK(at[0] == std::byte{0} && std::memcmp(at, at + 1, 2 * kPage - 1) == 0);  // no byte of another process behind its end
    one.arena->check();
  });
}

TEST(what_is_dropped_is_as_before) {
  in_both_modes([](const Member& one, const Member&) {
    one.bring_in({4});
    one.grow({4});
    one.shrink({4});
    Draft draft(one.arena);
    const auto add = [&](std::vector<Step> steps) { draft.add(Plan{one.arena->epoch(), std::move(steps)}); };
    draft.begin();
    add({owner({4}, Owner::free, Owner::outside, kNobody)});
    CHECK_ERROR(ErrorKind::invalid_argument, add({owner({4}, Owner::free, Owner::kv)}));  // beside it nothing else
    CHECK(draft.free_pages().empty());
    draft.cut(0);
    CHECK(one.grow({4}).zeroed_bytes == 0);  // it never left: these are the tenant's own bytes
    draft.begin();
    add({owner({5}, Owner::outside, Owner::free, kNobody)});
    CHECK(draft.free_pages() == std::vector<PageId>{5});
    draft.cut(0);
    one.arena->check();
    CHECK(one.arena->counts()[Owner::outside] == kPages - 1 && one.arena->counts()[Owner::kv] == 1);
    CHECK(one.bring_in({5}).pages_moved == 1 && one.grow({5}).zeroed_bytes == kPage);
  });
}

TEST(pages_go_outside_from_free_alone_and_of_no_tenant) {
  in_both_modes([](const Member& one, const Member&) {
    one.bring_in({4, 5});
    one.grow({4});
    const auto refused = [&](Step step) {
      CHECK_ERROR(ErrorKind::invalid_argument, one.executor->apply({one.arena->epoch(), {std::move(step)}}));
      one.arena->check();
    };
    refused(owner({4}, Owner::kv, Owner::outside, kNobody));
    refused(owner({4}, Owner::kv, Owner::outside));
    refused(owner({6}, Owner::outside, Owner::kv));
    refused(owner({5}, Owner::free, Owner::outside));
    refused(owner({6}, Owner::free, Owner::outside, kNobody));   // it is outside already
    refused(owner({5}, Owner::outside, Owner::free, kNobody));   // it is here already
    refused(owner({5}, Owner::free, Owner::quarantine, kNobody));
    CHECK_ERROR(ErrorKind::invalid_argument,
                one.executor->apply({one.arena->epoch(), {owner({6}, Owner::outside, Owner::free, kNobody), owner({6}, Owner::free, Owner::kv)}}));
    CHECK(one.arena->counts()[Owner::outside] == kPages - 2);
  });
}

TEST(a_page_leaves_when_nothing_is_in_flight_for_it) {
  constexpr std::size_t kLong = std::size_t{32} << 20;
  const File file(kPages * kPage);
  const Member one(file, Mode::aliased), two(file, Mode::aliased);
  one.bring_in({3});
  const StreamHandle stream = one.fault->create_stream();
  std::byte* to = one.fault->allocate_host(kLong);
  std::byte* from = one.fault->allocate_host(kLong);
  for (int i = 0; i < 10; ++i) one.fault->copy(stream, to, from, kLong);
  // Its zeroes are enqueued behind all that, and it is given up again.
  one.change({owner({3}, Owner::free, Owner::kv)}, Ordering{0, stream});
  const EventHandle event = one.fault->create_event(false);
  one.fault->record(event, stream);
  one.change({owner({3}, Owner::kv, Owner::free)}, Ordering{event, stream});
  one.hand_out({3});
  two.bring_in({3});
  two.grow({3});
  std::memset(two.page(3), 7, kPage);
  one.fault->destroy_stream(stream);  // waits for it
  one.fault->destroy_event(event);
  CHECK(two.reads(3, 7));
  one.fault->free_host(to, kLong);
  one.fault->free_host(from, kLong);
}

TEST(no_byte_goes_when_one_of_them_closes) {
  const File file(kPages * kPage);
  const Member one(file, Mode::aliased);
  one.bring_in({1});
  one.grow({1});
  std::memset(one.page(1), 3, kPage);
  { const Member two(file, Mode::aliased); }
  CHECK(one.reads(1, 3));
}

TEST(a_file_that_could_change_its_size_is_refused) {
  const auto refused = [](const File& file, std::size_t pages) {
    CHECK_ERROR(ErrorKind::invalid_argument, make_host_backend({pages * kPage, kPage, 1, file.number}));
  };
  const File good(kPages * kPage), larger((kPages + 1) * kPage), open(kPages * kPage, F_SEAL_GROW);
  refused(larger, kPages);
  refused(good, kPages + 1);
  refused(open, kPages);
  CHECK_ERROR(ErrorKind::invalid_argument, make_host_backend({kPages * kPage, kPage, 1, 1 << 20}));  // no file at all
  const auto before = ::fcntl(good.number, F_GETFD);
  make_host_backend({kPages * kPage, kPage, 1, good.number});
  CHECK(before >= 0 && ::fcntl(good.number, F_GETFD) == before);  // it stays the caller's
}

}  // namespace
