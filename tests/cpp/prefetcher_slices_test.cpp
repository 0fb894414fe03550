// Slices on the fake backend: heads at home, tails through the ring, parts that come home. The same at random, what is
// refused and what fails: prefetcher_test.cpp.
#include <algorithm>

#include "prefetcher_world.h"

using namespace remap;
using namespace remap::testing;

namespace {

TEST(contents_are_kept_only_at_the_same_offset_and_place) {
  World world(3);
  world.slice(3, 1);
  world.prefetcher->drain();
  world.backend->copies.clear();
  world.slice(3, 1);
  CHECK(world.backend->copies.empty());
  world.slice(4, 1);
  CHECK(world.backend->copies.size() == 1);
  CHECK(world.backend->copies[0].second == world.masters[0].data() + 2);
  world.prefetcher->drain();
  StreamConfiguration c = world.change({0, 1, 2}, 1, 4);
  for (std::size_t& place : c.places) --place;
  world.backend->copies.clear();
  world.prefetcher->configure(c);
  CHECK(world.backend->copies.size() == 1);
}

// Two shrinks without a pass between, then growth over what is still to be loaded.
TEST(parts_add_up_and_growth_cuts_them) {
  World world(2);
  world.slice(5, 1);
  world.prefetcher->drain();
  for (Buffer& region : world.regions) std::fill(region.begin() + 1, region.end(), kOther);
  StreamConfiguration c = world.change({0, 1}, 1, 4);
  world.configure(c, 4);  // held: nothing is loaded yet
  c = world.change({0, 1}, 1, 2);
  world.configure(c, 2);
  c = world.change({0, 1}, 1, 3);  // layer 0's and 1's byte 3 goes again before it came
  world.configure(c, 3);
  CHECK(c.home.empty());
  world.backend->copies.clear();
  world.release(c);
  world.prefetcher->drain();
  for (const Buffer& region : world.regions) {
    CHECK(region[1] != kOther && region[2] != kOther && region[3] == kOther);
  }
  world.pass(0);
  CHECK(!world.prefetcher->loading());
  // A part that meets an outstanding one: both are loaded anew, once.
  world.slice(5, 1);
  world.prefetcher->drain();
  c = world.change({0, 1}, 1, 3);
  world.configure(c, 3);
  world.prefetcher->configure(c);
  world.backend->copies.clear();
  world.release(c);
  const auto home = [&](const auto& copy) { return copy.first == world.regions[1].data() + 1; };
  CHECK(std::count_if(world.backend->copies.begin(), world.backend->copies.end(), home) == 1);
  world.pass(0);
}

}  // namespace
