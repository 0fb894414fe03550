// Memory runs out at the k-th allocation, for every k: a call has happened whole or not at all, and can be made again.
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "plans.h"

namespace {

// Of this thread only: the workers have theirs.
thread_local long countdown = 0;

void* allocate(std::size_t bytes) {
  if (countdown > 0 && --countdown == 0) throw std::bad_alloc();
  if (void* place = std::malloc(bytes == 0 ? 1 : bytes)) return place;
  throw std::bad_alloc();
}

}  // namespace

// With -fsanitize=thread gcc inlines these and not their counterparts, and takes them for a mismatch.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#endif
void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void operator delete(void* place) noexcept { std::free(place); }
void operator delete[](void* place) noexcept { std::free(place); }
void operator delete(void* place, std::size_t) noexcept { std::free(place); }
void operator delete[](void* place, std::size_t) noexcept { std::free(place); }

using namespace remap;
using namespace remap::testing;

namespace {

constexpr std::size_t kPage = HostArena::kPage;
constexpr TenantId kOther = 2;

// Pages 6 and 7 hold another tenant's bytes.
struct World : TwoLayers {
  World(Mode mode, bool exchange) : TwoLayers(mode, exchange, 14, {4, 5, 6, 7}) {
    const auto others = arena->take(2, Owner::params, kOther, {4, 5});
    std::memset(arena->address(arena->add_layer_region(kOther, "other", others)), 7, 2 * kPage);
    arena->remove_tenant(kOther);
  }
};

struct Operation {
  const char* name;
  std::function<void(World&)> prepare;  // memory is there
  std::function<void(World&)> call;     // it is not
};

void nothing(World&) {}

std::vector<Operation> operations() {
  const auto apply = [](World& world) { world.executor->apply(world.stream()); };
  const auto zeroed = [](World& world) {
    world.executor->apply(world.stream());
    world.executor->zero_due();
  };
  const auto apply_back = [](World& world) {
    world.executor->apply(world.stream());
    world.decide();
  };
  const auto give_up = [](World& world) {
    Step homeless;
    homeless.kind = Step::Kind::set_home;
    homeless.set_home = {world.two, {}};
    world.apply({point(world.two, {kNoPage, kNoPage}, true, 1), homeless, owner({2, 3}, Owner::params, Owner::free)});
  };
  const auto three = [](World& world) { world.arena->take(3, Owner::params, 3, {4, 5, 6, 7}); };
  return {
      {"take", nothing, [](World& world) { world.arena->take(2, Owner::params, 3, {4, 5}); }},
      {"add_layer_region", three, [](World& world) { world.arena->add_layer_region(3, "three", {8, 9, 10}); }},
      {"add_empty_layer_region", nothing,
       [](World& world) { world.arena->add_empty_layer_region(kTenant, "empty", 3, 0); }},
      {"apply, a home goes", nothing, give_up},
      {"add_ring_region", nothing, [](World& world) { world.arena->add_ring_region(3, 4); }},
      {"add_kv_region", nothing, [](World& world) { world.arena->add_kv_region(3, 4); }},
      {"designate", [](World& world) { world.arena->add_kv_region(3, 4); },
       [](World& world) { world.arena->designate(6 - 1, 1, {9, 8}); }},
      {"designate_ring", nothing, [](World& world) { world.arena->designate_ring(world.ring, 0, {1, 0}); }},
      {"prepare_view", nothing, [](World& world) { world.arena->prepare_view(world.two, {0, 1}); }},
      {"hold", nothing, [](World& world) { world.arena->hold(world.arena->address(world.kv), kPage); }},
      {"declare", nothing, [](World& world) { world.arena->declare_registered(world.arena->address(world.one), kPage); }},
      {"apply", nothing, apply},
      {"apply back", apply_back, [](World& world) { world.executor->apply(world.back()); }},
      {"zero_due", apply, [](World& world) { world.executor->zero_due(); }},
      {"commit", zeroed, [](World& world) { world.executor->commit(nullptr); }},
      {"remove_tenant", nothing, [](World& world) { world.arena->remove_tenant(kTenant); }},
      {"remove_tenant with prepared views", [](World& world) { world.arena->prepare_view(world.two, {0, 1}); },
       [](World& world) { world.arena->remove_tenant(kTenant); }},
      {"close", nothing, [](World& world) { world.arena->close(); }},
  };
}

TEST(every_allocation_fails_once) {
  long failures = 0;
  for (const Mode mode : {Mode::aliased, Mode::strict}) {
    for (const bool exchange : {true, false}) {
      for (const Operation& operation : operations()) {
        bool done = false;
        for (long k = 1; !done; ++k) {
          CHECK(k < 10000);
          World world(mode, exchange);
          operation.prepare(world);
          const auto before = world.state();
          bool failed = false;
          countdown = k;
          try {
            operation.call(world);
          } catch (const std::bad_alloc&) {
            failed = true;
          } catch (...) {
            countdown = 0;
            throw;
          }
          done = countdown != 0;  // it needed fewer
          countdown = 0;
          try {
            CHECK(!done || !failed);
            CHECK(!world.arena->broken());
            if (failed) {
              ++failures;
              CHECK(world.arena->closed() || world.state() == before || std::strcmp(operation.name, "close") == 0);
              world.arena->check();
              operation.call(world);  // memory is there again
            }
            world.end();
          } catch (const std::exception& error) {
            throw std::logic_error(std::string(operation.name) + (mode == Mode::strict ? ", strict" : ", aliased") +
                                   (exchange ? ", exchange" : "") + ", allocation " + std::to_string(k) + ": " + error.what());
          }
        }
      }
    }
  }
  CHECK(failures > 300);
}

}  // namespace
