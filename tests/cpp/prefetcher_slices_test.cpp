// Slices on the fake backend: heads at home, tails through the ring, parts that come home. The same at random, what is
// refused and what fails: prefetcher_test.cpp.
#include <algorithm>

#include "prefetcher_world.h"

using namespace remap;
using namespace remap::testing;

namespace {

TEST(a_slice_brings_its_bytes_to_its_place_and_no_others) {
  World world({6, 6, 4, 1});
  world.slice(3, 1);
  world.backend->finish();
  CHECK(world.backend->copies.front().first == world.ring[0].data() + 3);
  CHECK(world.backend->copies.front().second == world.masters[0].data() + 3);
  for (int pass = 0; pass < 2; ++pass) {
    world.pass(0);
    for (const Buffer& buffer : world.ring) {
      const auto mine = &buffer == &world.ring.front() ? buffer.begin() + 3 : buffer.end();
      CHECK(std::all_of(buffer.begin(), mine, [](std::byte byte) { return byte == kOther; }));
    }
  }
  const PrefetchStats stats = world.prefetcher->stats();
  world.pass(0);
  CHECK(world.prefetcher->stats().copied_bytes - stats.copied_bytes == 3 + 3 + 3 + 1);
  CHECK(world.prefetcher->stats().misses == 0);
  // The last layer's copy is put at the end of the buffer, as its region shows it there.
  const auto small = std::find_if(world.backend->copies.begin(), world.backend->copies.end(),
                                  [&](const auto& copy) { return copy.second == world.masters[3].data(); });
  CHECK(small != world.backend->copies.end() && small->first == world.ring[0].data() + 5);
}

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

TEST(wait_sees_the_ring_and_the_part_that_comes_home) {
  for (const bool on_stream : {false, true}) {
    World world(3);
    const StreamHandle stream = on_stream ? world.backend->create_stream() : 0;
    world.slice(4, 1);
    world.pass(stream);
    world.backend->finish();
    for (std::size_t i = 2; i < kBytes; ++i) world.regions[1][i] = kOther;
    world.backend->copies.clear();
    const StreamConfiguration c = world.change({0, 1, 2}, 1, 2);
    CHECK(c.home.size() == 3 && c.home[1].first == 2 && c.home[1].bytes == 2);
    world.configure(c, 2);
    // Regions are still to be re-pointed: what comes home would be written into the ring.
    for (const auto& copy : world.backend->copies) CHECK(copy.first == world.ring[0].data() + 4);
    CHECK(world.prefetcher->loading());
    CHECK(!world.prefetcher->wait(1, stream, kNow));
    world.release(c);
    world.prefetcher->begin_pass(stream);
    world.use(0, stream);
    CHECK(world.prefetcher->wait(1, stream));
    if (!on_stream) {
      for (std::size_t i = 0; i < 4; ++i) CHECK(world.regions[1][i] == World::tag(1));
      for (std::size_t i = 4; i < kBytes; ++i) CHECK(world.ring[0][i] == World::tag(1));
    }
    world.compute(1, stream);
    world.prefetcher->done(1, stream);
    world.use(2, stream);
    world.prefetcher->end_pass();
    world.backend->finish();
    CHECK(world.regions[1][4] == kOther);  // not what goes on streaming
    world.pass(stream);
    world.backend->finish();
    world.pass(stream);  // a layer that was seen loaded is no longer listed
    CHECK(!world.prefetcher->loading());
    for (LayerId layer = 0; layer < 3; ++layer) CHECK(!world.prefetcher->ready(layer));
    world.slice(0, 0);
    world.pass(stream);
    world.backend->finish();
    world.pass(stream);
    for (LayerId layer = 0; layer < 3; ++layer) CHECK(world.prefetcher->ready(layer));
  }
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
