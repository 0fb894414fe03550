// LayerSchedule against what is obvious: a buffer that a use reads has its bytes, copies come in use order, and in steady
// state a pass costs one copy for each position that shares its buffer. Exhaustive over small sizes, random beyond.
#include "schedule/layer_schedule.h"

#include <algorithm>
#include <random>

#include "check.h"

using namespace remap;
using Claim = LayerSchedule::Claim;

namespace {

// Plays the device: copies are instantaneous.
struct Player {
  LayerSchedule schedule;
  std::vector<std::uint32_t> bytes;           // by buffer: the position whose bytes are there
  std::vector<std::uint32_t> copied;          // positions, in the order issued
  std::uint32_t misses = 0;

  Player(std::uint32_t m, std::uint32_t beta) : bytes(beta, LayerSchedule::kNone) { schedule.configure(m, beta); }

  void pump() {
    while (const auto copy = schedule.next()) {
      CHECK(schedule.open(copy->buffer) == LayerSchedule::kNone);
      CHECK(copy->buffer == copy->position % bytes.size());
      load(*copy);
    }
    CHECK(schedule.check());
  }
  void load(const LayerSchedule::Copy& copy) {
    bytes[copy.buffer] = copy.position;
    copied.push_back(copy.position);
    schedule.issued(copy);
    CHECK(schedule.check());
  }
  Claim claim(std::uint32_t position) {
    const Claim result = schedule.claim(position);
    CHECK(schedule.check());
    if (result == Claim::miss) {
      ++misses;
      load({position, schedule.buffer_of(position)});
    }
    if (result != Claim::conflict) {
      pump();
      CHECK(bytes[schedule.buffer_of(position)] == position);
    }
    return result;
  }
  void done(std::uint32_t position) {
    CHECK(bytes[schedule.buffer_of(position)] == position);
    schedule.done(position);
    pump();
  }
  void pass() {
    schedule.begin_pass();
    pump();
    for (std::uint32_t j = 0; j < schedule.positions(); ++j) {
      CHECK(claim(j) == Claim::hit);
      done(j);
    }
    schedule.end_pass();
    pump();
  }
};

// How many of m positions share a buffer with another one.
std::uint32_t shared(std::uint32_t m, std::uint32_t beta) {
  std::uint32_t count = 0;
  for (std::uint32_t j = 0; j < m; ++j) count += (j >= beta || j + beta < m) ? 1 : 0;
  return count;
}

TEST(steady_state_copies_each_shared_position_once_a_pass) {
  for (std::uint32_t m = 0; m <= 12; ++m) {
    for (std::uint32_t beta = 1; beta <= 6; ++beta) {
      Player player(m, beta);
      player.pass();
      for (int pass = 0; pass < 5; ++pass) {
        player.copied.clear();
        player.pass();
        CHECK(player.copied.size() == shared(m, beta));
      }
      CHECK(player.misses == 0);
    }
  }
}

TEST(copies_are_in_use_order) {
  for (std::uint32_t m = 1; m <= 12; ++m) {
    for (std::uint32_t beta = 1; beta <= 6; ++beta) {
      Player player(m, beta);
      for (int pass = 0; pass < 4; ++pass) player.pass();
      // The sequence of all uses, less those that find their bytes in place, is the sequence of copies.
      std::vector<std::uint32_t> expected;
      std::vector<std::uint32_t> holds(beta, LayerSchedule::kNone);
      for (std::uint32_t u = 0; expected.size() < player.copied.size(); ++u) {
        if (holds[u % m % beta] != u % m) expected.push_back(u % m);
        holds[u % m % beta] = u % m;
      }
      CHECK(player.copied == expected);
    }
  }
}

TEST(keeps_given_contents) {
  Player player(2, 2);
  player.bytes = {0, 1};
  player.schedule.configure(2, 2, {0, 1});
  player.pass();
  CHECK(player.copied.empty());
  player.schedule.configure(4, 2, {1, 3});  // 1 does not belong into buffer 0
  player.bytes = {1, 3};
  player.pass();
  CHECK((player.copied == std::vector<std::uint32_t>{0, 1, 2, 3, 0, 1}));
}

TEST(any_sequence_of_calls_is_correct) {
  for (std::uint64_t seed = 0; seed < 20000; ++seed) {
    std::mt19937_64 random(seed);
    const auto m = static_cast<std::uint32_t>(random() % 9);
    const auto beta = static_cast<std::uint32_t>(random() % 4 + 1);
    Player player(m, beta);
    std::vector<std::uint32_t> open;
    for (int call = 0; call < 60; ++call) {
      const std::uint64_t kind = random() % 16;
      if (kind == 0 || kind == 1) {
        open.clear();
        kind == 0 ? player.schedule.begin_pass() : player.schedule.end_pass();
        player.pump();
      } else if (kind == 2 && open.empty()) {
        player.schedule.forget();
        CHECK(player.schedule.check());
        player.pump();
      } else if (m > 0 && kind < 10) {
        const auto position = static_cast<std::uint32_t>(random() % m);
        const bool taken = std::any_of(open.begin(), open.end(), [&](std::uint32_t o) {
          return o != position && o % beta == position % beta;
        });
        CHECK((player.claim(position) == Claim::conflict) == taken);
        if (!taken && std::find(open.begin(), open.end(), position) == open.end()) open.push_back(position);
      } else if (!open.empty()) {
        const std::size_t i = random() % open.size();
        player.done(open[i]);
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
      }
      for (const std::uint32_t o : open) CHECK(player.bytes[o % beta] == o);
    }
    player.misses = 0;
    player.pass();
    CHECK(player.misses == 0);
  }
}

}  // namespace
