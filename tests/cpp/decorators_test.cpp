// The decorators: fault, limit and trace, and replaying what was traced.
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "remap/backends.h"
#include "remap/decorators.h"
#include "usage.h"

using namespace remap;
using namespace remap::testing;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kPage = 4096;
constexpr auto kForever = std::chrono::nanoseconds::max();

std::shared_ptr<Backend> host(std::size_t pages = 16) { return make_host_backend({pages * kPage, kPage, 1}); }

// All but adopt_stream and forget_stream, which the host has no streams for: cuda_stream_test.cpp shows those.
constexpr std::size_t kTour = kCallKinds - 2;

// Calls every kind of call once, in an order in which all of them succeed.
struct Tour {
  std::shared_ptr<Backend> backend;
  std::byte* at = nullptr;
  std::byte* master = nullptr;
  std::vector<std::byte> mine = std::vector<std::byte>(kPage, std::byte{3});
  PageHandle page = 0;
  StreamHandle stream = 0;
  EventHandle event = 0;
  std::vector<std::pair<Call, std::function<void()>>> calls() {
    Backend& b = *backend;
    return {
        {Call::reserve, [&] { at = b.reserve(4 * kPage, kPage); }},
        {Call::create_page, [&] { page = b.create_page(kPage); }},
        {Call::map, [&] { const PageHandle pages[] = {page, page}; b.map(at, pages, 2, kPage); }},
        {Call::set_access, [&] { b.set_access(at, 2 * kPage, Access::read_write); }},
        {Call::exchange, [&] { b.exchange(at, at + kPage, kPage); }},
        {Call::populate, [&] { b.populate(at, kPage); }},
        {Call::allocate_host, [&] { master = b.allocate_host(kPage); }},
        {Call::register_host, [&] { b.register_host(mine.data(), kPage); }},
        {Call::create_stream, [&] { stream = b.create_stream(); }},
        {Call::create_event, [&] { event = b.create_event(true); }},
        {Call::fill, [&] { b.fill(stream, master, 5, kPage); }},
        {Call::copy, [&] { b.copy(stream, at, master, kPage); }},
        {Call::record, [&] { b.record(event, stream); }},
        {Call::stream_wait, [&] { b.stream_wait(stream, event); }},
        {Call::synchronize, [&] { CHECK(b.synchronize(event, kForever)); }},
        {Call::query, [&] { CHECK(b.query(event)); }},
        {Call::elapsed, [&] { CHECK(b.elapsed(event, event) == 0); }},
        {Call::destroy_event, [&] { b.destroy_event(event); }},
        {Call::destroy_stream, [&] { b.destroy_stream(stream); }},
        {Call::unregister_host, [&] { b.unregister_host(mine.data(), kPage); }},
        {Call::free_host, [&] { b.free_host(master, kPage); }},
        {Call::unmap, [&] { b.unmap(at, 2 * kPage); }},
        {Call::destroy_page, [&] { b.destroy_page(page); }},
        {Call::retire, [&] { b.retire(at, 4 * kPage); }},
        {Call::release, [&] { b.release(at, 4 * kPage); }},
    };
  }
};

// Every call can be made to fail once; then nothing has changed, and the same call succeeds.
TEST(every_call_can_fail_and_be_retried) {
  auto fault = make_fault_backend(host());
  Tour tour{fault};
  std::uint64_t total = 0;
  for (auto& step : tour.calls()) {
    const Usage before = fault->usage();
    fault->arm(step.first, 1, false, ErrorKind::out_of_memory);
    try {
      step.second();
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::out_of_memory);
      CHECK(error.fields().size() == 2 && std::get<std::string>(error.fields()[0].second) == call_name(step.first));
      CHECK(error.fields()[1].first == "nth" && std::get<std::int64_t>(error.fields()[1].second) == 1);
    }
    CHECK(same(before, fault->usage()));
    step.second();
    total += 2;
    CHECK(fault->calls(step.first) == 2 && fault->calls() == total);
  }
  CHECK(same(fault->usage(), Usage{}));
}

TEST(faults_come_at_the_nth_call_once_or_for_ever) {
  auto fault = make_fault_backend(host());
  fault->arm(Call::create_event, 3);
  fault->create_event(true);
  fault->create_stream();  // another kind does not count
  fault->create_event(true);
  CHECK_ERROR(ErrorKind::driver, fault->create_event(true));
  fault->create_event(true);
  fault->arm(Call::create_event, 2, true);
  fault->create_event(true);
  for (int i = 0; i < 3; ++i) CHECK_ERROR(ErrorKind::driver, fault->create_event(true));
  fault->disarm();
  fault->create_event(true);
  fault->arm_any(2, true, ErrorKind::limit_exceeded);
  fault->create_event(true);
  CHECK_ERROR(ErrorKind::limit_exceeded, fault->create_event(true));
  CHECK_ERROR(ErrorKind::limit_exceeded, fault->reserve(kPage, kPage));
  fault->disarm();
  CHECK_ERROR(ErrorKind::invalid_argument, (fault->arm(Call::map, 0), 0));
}

// Each limit: at n-1 and n allowed, at n+1 refused with nothing changed, and room again after giving back.
TEST(limits_are_exact) {
  const auto check = [](const Limits& limits, const std::function<void(Backend&)>& take, const std::function<void(Backend&)>& give) {
    auto backend = make_limit_backend(host(), limits);
    for (int round = 0; round < 2; ++round) {
      take(*backend);
      take(*backend);
      const Usage before = backend->usage();
      CHECK_ERROR(ErrorKind::limit_exceeded, (take(*backend), 0));
      CHECK(same(before, backend->usage()));
      give(*backend);
      take(*backend);
      CHECK_ERROR(ErrorKind::limit_exceeded, (take(*backend), 0));
      give(*backend);
      give(*backend);
    }
  };
  std::vector<std::uint64_t> held;
  std::vector<std::byte*> places;
  const auto pop = [](auto& list) {
    const auto last = list.back();
    list.pop_back();
    return last;
  };
  Limits limits;
  limits.page_bytes = 2 * kPage;
  check(limits, [&](Backend& b) { held.push_back(b.create_page(kPage)); }, [&](Backend& b) { b.destroy_page(pop(held)); });
  limits = {};
  limits.reserved_bytes = 2 * kPage;
  check(limits, [&](Backend& b) { places.push_back(b.reserve(kPage, kPage)); }, [&](Backend& b) { b.release(pop(places), kPage); });
  limits = {};
  limits.host_bytes = 2 * kPage;
  check(limits, [&](Backend& b) { places.push_back(b.allocate_host(kPage)); }, [&](Backend& b) { b.free_host(pop(places), kPage); });
  std::vector<std::byte> mine(4 * kPage);
  std::size_t registered = 0;
  check(
      limits, [&](Backend& b) { b.register_host(mine.data() + registered * kPage, kPage); ++registered; },
      [&](Backend& b) { --registered; b.unregister_host(mine.data() + registered * kPage, kPage); });
  limits = {};
  limits.streams = 2;
  check(limits, [&](Backend& b) { held.push_back(b.create_stream()); }, [&](Backend& b) { b.destroy_stream(pop(held)); });
  limits = {};
  limits.events = 2;
  check(limits, [&](Backend& b) { held.push_back(b.create_event(true)); }, [&](Backend& b) { b.destroy_event(pop(held)); });
  limits = {};
  limits.mappings = 2;
  std::byte* at = nullptr;
  PageHandle page = 0;
  std::size_t mapped = 0;
  check(
      limits,
      [&](Backend& b) {
        if (b.usage().reserved_bytes == 0) {
          at = b.reserve(8 * kPage, kPage);
          page = b.create_page(kPage);
        }
        b.map(at + mapped * kPage, &page, 1, kPage);
        ++mapped;
      },
      [&](Backend& b) { --mapped; b.unmap(at + mapped * kPage, kPage); });
}

TEST(a_failed_call_gives_its_count_back) {
  auto fault = make_fault_backend(host());
  Limits limits;
  limits.page_bytes = kPage;
  limits.mappings = 1;
  limits.events = 1;
  auto backend = make_limit_backend(fault, limits);
  fault->arm(Call::create_page, 1);
  CHECK_ERROR(ErrorKind::driver, backend->create_page(kPage));
  const PageHandle page = backend->create_page(kPage);
  std::byte* at = backend->reserve(2 * kPage, kPage);
  fault->arm(Call::map, 1);
  CHECK_ERROR(ErrorKind::driver, (backend->map(at, &page, 1, kPage), 0));
  backend->map(at, &page, 1, kPage);
  fault->arm(Call::unmap, 1);
  CHECK_ERROR(ErrorKind::driver, (backend->unmap(at, kPage), 0));
  CHECK_ERROR(ErrorKind::limit_exceeded, (backend->map(at + kPage, &page, 1, kPage), 0));  // still counted
  backend->unmap(at, kPage);
  fault->arm(Call::destroy_page, 1);
  CHECK_ERROR(ErrorKind::driver, (backend->destroy_page(page), 0));
  CHECK_ERROR(ErrorKind::limit_exceeded, backend->create_page(kPage));
  backend->destroy_page(page);
  backend->create_page(kPage);
}

TEST(a_trace_counts_and_logs_every_call) {
  auto trace = make_trace_backend(host());
  Tour tour{trace};
  auto calls = tour.calls();
  for (auto& step : calls) step.second();
  CHECK_ERROR(ErrorKind::invalid_argument, (trace->unmap(nullptr, kPage), 0));
  CHECK(calls.size() == kTour);
  CHECK(trace->count() == kTour + 1 && trace->count(Call::unmap) == 2 && trace->failed(Call::unmap) == 1);
  const auto log = trace->log();
  CHECK(log.size() == kTour + 1);
  for (std::size_t i = 0; i < calls.size(); ++i) CHECK(log[i].call == calls[i].first && !log[i].failed);
  CHECK(log[0].result == reinterpret_cast<std::uintptr_t>(tour.at) && log[0].args[0] == 4 * kPage);
  CHECK(log[2].pages.size() == 2 && log[2].pages[1] == tour.page && log[2].args[1] == 2);
  CHECK(log.back().failed);

  const std::string text = serialize(log);
  const auto again = parse_trace("# a comment\n\n" + text);
  CHECK(again.size() == log.size() && serialize(again) == text);
  for (std::size_t i = 0; i < log.size(); ++i) {
    CHECK(again[i].call == log[i].call && again[i].failed == log[i].failed && again[i].result == log[i].result &&
          again[i].args == log[i].args && again[i].pages == log[i].pages);
  }
  trace->set_logging(false);
  trace->create_event(true);
  CHECK(trace->log().size() == log.size() && trace->count(Call::create_event) == 2);
  trace->clear_log();
  CHECK(trace->log().empty() && trace->count() == kTour + 2);
}

TEST(bad_trace_lines_are_named) {
  const char* lines[] = {"nothing ok 0", "reserve", "reserve maybe 1 2 3", "reserve ok 1 2", "reserve ok 1 2 x", "reserve ok 1 2 3 4",
                         "map ok 0 1 2 4096 pages 7", "map ok 0 1 1 4096", "unmap ok 0 99999999999999999999 1"};
  for (const char* line : lines) {
    try {
      parse_trace(std::string("create_event ok 1 0\n") + line + "\n");
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::invalid_argument && std::get<std::int64_t>(error.fields()[0].second) == 2);
    }
  }
}

// Random use, traced; then replayed on a fresh backend, which must end with the same usage.
TEST(a_random_trace_replays) {
  for (unsigned seed = 1; seed <= 5; ++seed) {
    std::mt19937 random(seed);
    const auto pick = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
    std::vector<std::byte> mine(kPage);  // outlives the backend, whose stream may still copy
    auto fault = make_fault_backend(host());
    auto trace = make_trace_backend(fault);
    std::byte* at = trace->reserve(16 * kPage, kPage);
    trace->register_host(mine.data(), kPage);
    std::vector<PageHandle> pages;
    const StreamHandle stream = trace->create_stream();
    const EventHandle event = trace->create_event(true);
    for (int step = 0; step < 300; ++step) {
      if (step % 37 == 0) fault->arm_any(1 + pick(5));
      try {
        switch (pick(8)) {
          case 0: pages.push_back(trace->create_page(kPage)); break;
          case 1: if (!pages.empty()) { trace->destroy_page(pages.back()); pages.pop_back(); } break;
          case 2: if (!pages.empty()) trace->map(at + pick(16) * kPage, &pages[pick(pages.size())], 1, kPage); break;
          case 3: trace->unmap(at + pick(16) * kPage, kPage * (1 + pick(2))); break;
          case 4: trace->set_access(at + pick(16) * kPage, kPage, Access::read_write); break;
          case 5: trace->exchange(at + pick(16) * kPage, at + pick(16) * kPage, kPage); break;
          case 6: trace->copy(stream, mine.data() + 7, mine.data() + 2000, 100); break;
          case 7: trace->record(event, stream); trace->synchronize(event, kForever); break;
        }
      } catch (const Error&) {
      }
    }
    fault->disarm();
    const auto log = parse_trace(serialize(trace->log()));
    auto fresh = host();
    const ReplayResult result = replay(log, *fresh);
    if (!result.ok) throw std::logic_error(result.message);
    CHECK(same(fresh->usage(), trace->usage()));
  }
}

TEST(replay_finds_the_first_divergence) {
  auto trace = make_trace_backend(host(2));
  const PageHandle first = trace->create_page(kPage);
  trace->create_page(kPage);
  CHECK_ERROR(ErrorKind::out_of_memory, trace->create_page(kPage));
  trace->destroy_page(first);
  const auto log = trace->log();
  auto smaller = host(1);
  ReplayResult result = replay(log, *smaller);
  CHECK(!result.ok && result.divergence == 1 && result.replayed == 1 && !result.message.empty());
  auto equal = host(2), larger = host(3);
  CHECK(replay(log, *equal).ok);
  ReplayOptions strict;
  strict.failed = ReplayOptions::Failed::expect;
  auto again = host(2);
  CHECK(replay(log, *again, strict).ok);
  result = replay(log, *larger, strict);
  CHECK(!result.ok && result.divergence == 2);
  TraceRecord lost;
  lost.call = Call::destroy_page;
  lost.args[0] = 77;
  auto last = host(1);
  CHECK(!replay({lost}, *last).ok);
}

}  // namespace
