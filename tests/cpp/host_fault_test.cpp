// The host backend's memory when system calls fail half-way: nothing has changed, or the arena says that it is broken.
#include <sys/mman.h>

#include <cerrno>
#include <memory>
#include <vector>

#include "backend/host_memory.h"
#include "check.h"
#include "host_probe.h"

using namespace remap;
using namespace remap::testing;
using host::HostMemory;

namespace {

constexpr std::size_t kSmall = 4096;

// Fails the n-th call of one kind, from then on until disarmed.
struct FailingSystem : host::System {
  int maps = 0, moves = 0, protects = 0, advises = 0, punches = 0;  // 0: never; n: the n-th from now
  bool forever = false;
  int code = ENOMEM;
  std::size_t single = 0;  // if set: mremap refuses more than this, as kernels before 6.17 do across mappings
  bool fails(int& countdown) {
    if (countdown == 0 || --countdown != 0) return false;
    if (forever) countdown = 1;
    errno = code;
    return true;
  }
  void* map(void* at, std::size_t bytes, int protection, int flags, int file, off_t offset) noexcept override {
    return fails(maps) ? MAP_FAILED : System::map(at, bytes, protection, flags, file, offset);
  }
  void* move(void* from, std::size_t bytes, void* to) noexcept override {
    if (single != 0 && bytes > single) {
      errno = EFAULT;
      return MAP_FAILED;
    }
    return fails(moves) ? MAP_FAILED : System::move(from, bytes, to);
  }
  int protect(void* at, std::size_t bytes, int protection) noexcept override {
    if (fails(protects)) {
      System::protect(at, kSmall, protection);  // half-way: the kernel stops at the mapping that fails
      errno = code;
      return -1;
    }
    return System::protect(at, bytes, protection);
  }
  int advise(void* at, std::size_t bytes, int advice) noexcept override {
    return fails(advises) ? -1 : System::advise(at, bytes, advice);
  }
  int punch(int file, off_t offset, std::size_t bytes) noexcept override {
    return fails(punches) ? -1 : System::punch(file, offset, bytes);
  }
};

struct Rig {
  std::shared_ptr<FailingSystem> system = std::make_shared<FailingSystem>();
  HostMemory memory{8 * kSmall, kSmall, system};
  std::vector<PageHandle> pages;
  std::byte* a = nullptr;
  std::byte* b = nullptr;
  Rig() {
    for (int i = 0; i < 8; ++i) pages.push_back(memory.create_page(kSmall));
    a = memory.reserve(4 * kSmall, kSmall);
    b = memory.reserve(4 * kSmall, kSmall);
    const PageHandle one[] = {pages[0], pages[1], pages[4], pages[3]};
    const PageHandle other[] = {pages[7], pages[6], pages[5], pages[2]};
    memory.map(a, one, 4, kSmall);
    memory.map(b, other, 4, kSmall);
    for (std::byte* at : {a, b}) {
      memory.set_access(at, 4 * kSmall, Access::read_write);
      for (std::size_t i = 0; i < 4; ++i) at[i * kSmall] = static_cast<std::byte>(i + (at == b ? 16 : 1));
    }
  }
  bool intact() const {
    for (std::size_t i = 0; i < 4; ++i) {
      if (a[i * kSmall] != static_cast<std::byte>(i + 1) || b[i * kSmall] != static_cast<std::byte>(i + 16)) return false;
    }
    return true;
  }
};

TEST(exchange_fails_at_every_move_and_changes_nothing) {
  for (const bool one_by_one : {false, true}) {
    Rig rig;
    if (one_by_one) rig.system->single = kSmall;
    const Usage before = usage_of(rig.memory);
    int moves = 1;
    for (;; ++moves) {
      rig.system->moves = moves;
      rig.system->code = moves % 2 == 0 ? ENOMEM : EINVAL;
      try {
        rig.memory.exchange(rig.a, rig.b, 4 * kSmall);
        break;
      } catch (const Error& error) {
        CHECK(error.kind() == (moves % 2 == 0 ? ErrorKind::out_of_memory : ErrorKind::driver));
      }
      CHECK(rig.intact() && same(before, usage_of(rig.memory)));
    }
    CHECK(moves == 1 + (one_by_one ? 12 : 3 + 4 + 3));
    CHECK(rig.a[0] == std::byte{16} && rig.b[0] == std::byte{1});
    rig.system->moves = 0;
    rig.memory.exchange(rig.a, rig.b, 4 * kSmall);
    CHECK(rig.intact());
  }
}

TEST(what_cannot_be_undone_breaks_the_arena) {
  Rig rig;
  rig.system->forever = true;
  rig.system->moves = 5;  // the fifth and every one after it: moving back as well
  CHECK_ERROR(ErrorKind::arena_broken, (rig.memory.exchange(rig.a, rig.b, 4 * kSmall), 0));
  Rig other;
  other.memory.unmap(other.a, 4 * kSmall);
  other.system->forever = true;
  other.system->maps = 2;
  const PageHandle apart[] = {other.pages[0], other.pages[2]};
  CHECK_ERROR(ErrorKind::arena_broken, (other.memory.map(other.a, apart, 2, kSmall), 0));
}

TEST(map_fails_at_every_run_and_changes_nothing) {
  Rig rig;
  rig.memory.unmap(rig.a, 4 * kSmall);
  const Usage before = usage_of(rig.memory);
  const PageHandle apart[] = {rig.pages[0], rig.pages[2], rig.pages[4], rig.pages[6]};
  for (int run = 1; run <= 4; ++run) {
    rig.system->maps = run;
    CHECK_ERROR(ErrorKind::out_of_memory, (rig.memory.map(rig.a, apart, 4, kSmall), 0));
    CHECK(same(before, usage_of(rig.memory)) && kernel_mappings(rig.a, 4 * kSmall) == 1);
  }
  rig.system->advises = 1;
  rig.system->code = EAGAIN;
  CHECK_ERROR(ErrorKind::driver, (rig.memory.map(rig.a, apart, 4, kSmall), 0));
  CHECK(same(before, usage_of(rig.memory)) && kernel_mappings(rig.a, 4 * kSmall) == 1);
  rig.memory.map(rig.a, apart, 4, kSmall);
}

TEST(other_failures_change_nothing) {
  Rig rig;
  rig.memory.set_access(rig.a, kSmall, Access::read);
  const Usage before = usage_of(rig.memory);
  rig.system->protects = 1;
  CHECK_ERROR(ErrorKind::out_of_memory, (rig.memory.set_access(rig.a, 4 * kSmall, Access::none), 0));
  CHECK(same(before, usage_of(rig.memory)));
  CHECK(readable(rig.a) && !writable(rig.a) && rig.intact());
  rig.system->maps = 1;
  rig.system->code = EAGAIN;
  CHECK_ERROR(ErrorKind::driver, (rig.memory.unmap(rig.a, 4 * kSmall), 0));
  CHECK(same(before, usage_of(rig.memory)) && rig.intact());
  rig.system->maps = 1;
  rig.system->code = ENOMEM;  // once: room is made, and giving back succeeds
  rig.memory.unmap(rig.a, 4 * kSmall);
  rig.system->punches = 1;
  rig.system->code = EIO;
  CHECK_ERROR(ErrorKind::driver, (rig.memory.destroy_page(rig.pages[0]), 0));
  rig.memory.destroy_page(rig.pages[0]);
  rig.system->code = EINVAL;  // a kernel without MADV_POPULATE_READ: touched instead
  rig.system->advises = 1;
  rig.memory.populate(rig.b, 4 * kSmall);
}

TEST(a_reservation_that_cannot_be_retired_stays) {
  Rig rig;
  std::byte* at = rig.memory.reserve(2 * kSmall, kSmall);
  const Usage before = usage_of(rig.memory);
  rig.system->maps = 1;
  rig.system->code = EINVAL;
  CHECK_ERROR(ErrorKind::driver, rig.memory.retire(at, 2 * kSmall));
  rig.system->maps = 1;  // the kernel has no mapping left: what is kept for that is given up
  rig.system->code = ENOMEM;
  rig.system->forever = true;
  CHECK_ERROR(ErrorKind::out_of_memory, rig.memory.retire(at, 2 * kSmall));
  rig.system->forever = false;
  CHECK(same(before, usage_of(rig.memory)));
  rig.system->maps = 1;
  rig.memory.retire(at, 2 * kSmall);
  CHECK(at[0] == std::byte{0} && at[2 * kSmall - 1] == std::byte{0} && same(before, usage_of(rig.memory)));
  const PageHandle page[] = {rig.pages[0]};
  CHECK_ERROR(ErrorKind::invalid_state, rig.memory.map(at, page, 1, kSmall));
  rig.memory.release(at, 2 * kSmall);
  CHECK(rig.intact());
}

}  // namespace
