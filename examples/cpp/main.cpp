// Takes an engine through growing its KV cache and back, and compares every byte on the way. engine.h is what to read first.
//
//   remap_example [--device cpu|cuda:N] [--strict]       0: every byte was right   1: something was not   2: wrong arguments
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "engine.h"

namespace {

using example::Engine;
using example::kFirstKvPages;
using example::kGivenLayer;
using example::kLayerPages;
using example::kLayers;

constexpr int kPasses = 3;

// A check of this program's own: errors of the library are remap::Error.
void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

void expect_pass(Engine& engine, const std::string& when) {
  for (const example::Layer& layer : engine.layers) std::fill_n(layer.seen.get(), layer.bytes, std::byte{0});
  engine.pass();
  engine.finish();
  for (remap::LayerId i = 0; i < kLayers; ++i) {
    for (std::size_t at = 0; at < engine.layers[i].bytes; ++at) {
      expect(engine.layers[i].seen.get()[at] == example::weight(i, at),
             when + ": layer " + std::to_string(i) + " is wrong at byte " + std::to_string(at));
    }
  }
}

void expect_kv(Engine& engine, std::size_t first_page, std::size_t pages, std::uint8_t value, const std::string& when) {
  const std::size_t bytes = pages * engine.page_bytes;
  const std::shared_ptr<std::byte> seen = example::host_bytes(engine.backend, bytes);
  engine.read(seen.get(), engine.arena->address(engine.kv) + first_page * engine.page_bytes, bytes);
  engine.finish();
  expect(std::all_of(seen.get(), seen.get() + bytes, [value](std::byte each) { return each == static_cast<std::byte>(value); }),
         when + ": KV pages from " + std::to_string(first_page) + " on do not hold " + std::to_string(value));
}

void expect_refused(Engine& engine, const remap::Plan& late) {
  const std::vector<remap::Owner> before = engine.arena->owners();
  try {
    engine.executor->apply(late);
  } catch (const remap::Error& error) {
    if (error.kind() != remap::ErrorKind::stale_plan) throw;  // the kind decides, never the text
    expect(engine.arena->owners() == before, "a refused plan changed owners");
    return;  // an engine plans again, from what the arena says now
  }
  throw std::runtime_error("a stale plan was applied");
}

void run(const std::string& device, remap::Mode mode) {
  Engine engine(device, mode);
  const remap::PageCounts at_first = engine.arena->counts();
  expect_kv(engine, 0, kFirstKvPages, 0, "new");  // whatever a page held before: who is given it reads zero
  engine.write_kv(0, kFirstKvPages, 0xA1);
  expect_pass(engine, "resident");
  const std::uint64_t copies = engine.prefetcher->stats().copies;

  const remap::Plan plan = engine.give_to_kv();
  for (int pass = 0; pass < kPasses; ++pass) {
    expect_pass(engine, "streaming");
    expect_kv(engine, 0, kFirstKvPages, 0xA1, "streaming");
    expect_kv(engine, kFirstKvPages, kLayerPages, 0xB2, "streaming");
  }
  const std::uint64_t streamed = engine.prefetcher->stats().copies - copies;
  expect(streamed >= 2 * kPasses, "two layers share one buffer, so each pass loads both");
  expect(engine.arena->counts()[remap::Owner::kv] == kFirstKvPages + kLayerPages, "KV has not grown");
  expect_refused(engine, plan);

  engine.give_back();
  for (int pass = 0; pass < kPasses; ++pass) expect_pass(engine, "given back");
  expect_kv(engine, 0, kFirstKvPages, 0xA1, "given back");
  expect(engine.arena->counts().by_owner == at_first.by_owner, "the pages do not belong to whom they belonged at first");
  const example::Layer& given = engine.layers[kGivenLayer];
  expect(engine.arena->shown(given.region) == given.home, "layer 3 is not at home");
  engine.arena->check();  // for tests: throws if an invariant of arena.h does not hold
  std::cout << "ok on " << device << (mode == remap::Mode::strict ? ", strict" : "") << ": KV grew from " << kFirstKvPages
            << " to " << kFirstKvPages + kLayerPages << " pages of " << engine.page_bytes << " bytes and back; " << streamed
            << " copies of streamed layers in " << kPasses << " passes\n";
}

bool is_device(const std::string& name) {
  const auto digit = [](char each) { return each >= '0' && each <= '9'; };
  return name == "cpu" || (name.compare(0, 5, "cuda:") == 0 && name.size() > 5 && name.size() < 9 &&
                           std::all_of(name.begin() + 5, name.end(), digit));
}

}  // namespace

int main(int argc, char** argv) {
  std::string device = "cpu";
  remap::Mode mode = remap::Mode::aliased;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--strict") {
      mode = remap::Mode::strict;
    } else if (argument == "--device" && i + 1 < argc && is_device(argv[i + 1])) {
      device = argv[++i];
    } else {
      std::cerr << "usage: " << argv[0] << " [--device cpu|cuda:N] [--strict]\n";
      return 2;
    }
  }
  try {
    run(device, mode);
    return 0;
  } catch (const remap::Error& error) {
    // The sentence says what was expected, what did not change and what to do next; the numbers in it are fields. After
    // ErrorKind::arena_broken only closing is left; any other call that failed has changed nothing.
    std::cerr << "remap: " << error.what() << '\n';
    for (const auto& field : error.fields()) {
      std::cerr << "  " << field.first << ": ";
      std::visit([](const auto& value) { std::cerr << value << '\n'; }, field.second);
    }
  } catch (const std::exception& error) {
    std::cerr << "wrong: " << error.what() << '\n';
  }
  return 1;
}
