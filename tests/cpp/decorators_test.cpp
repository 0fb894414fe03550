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
        {Call::register_host, [&] { b.register_host(mine.data(), kPage, HostUse::locked); }},
        {Call::use_host, [&] { b.use_host(mine.data(), kPage, HostUse::staged); }},
        {Call::create_stream, [&] { stream = b.create_stream(); }},
        {Call::create_event, [&] { event = b.create_event(true); }},
        {Call::fill, [&] { b.fill(stream, master, 5, kPage); }},
        {Call::copy, [&] { b.copy(stream, at, master, kPage); }},
        {Call::copy_batch,
         [&] {
           const CopyRange halves[] = {{at, master, kPage / 2}, {at + kPage / 2, master + kPage / 2, kPage / 2}};
           b.copy_batch(stream, halves, 2);
         }},
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

TEST(what_stands_behind_a_copy_that_fails_is_skipped) {
  auto fault = make_fault_backend(host());
  std::vector<std::byte> from(100, std::byte{1}), to(100);
  const StreamHandle stream = fault->create_stream();
  const EventHandle event = fault->create_event(true);
  fault->fail_async_copy(1);
  fault->copy(stream, to.data(), from.data(), 100);  // accepted
  fault->fill(stream, to.data(), 9, 100);
  fault->record(event, stream);
  CHECK_ERROR(ErrorKind::driver, fault->synchronize(event, kForever));
  CHECK(to[0] != std::byte{9} && to[99] == std::byte{0});
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
  CHECK(log[2].list.size() == 2 && log[2].list[1] == tour.page && log[2].args[1] == 2);
  CHECK(log.back().failed);

  const std::string text = serialize(log);
  const auto again = parse_trace("# a comment\n\n" + text);
  CHECK(again.size() == log.size() && serialize(again) == text);
  for (std::size_t i = 0; i < log.size(); ++i) {
    CHECK(again[i].call == log[i].call && again[i].failed == log[i].failed && again[i].result == log[i].result &&
          again[i].args == log[i].args && again[i].list == log[i].list);
  }
  const auto before = parse_trace("register_host ok 0 4096 8192\nregister_host ok 0 4096 8192 1\n");  // of when it did not say the use
  CHECK(before[0].args[2] == static_cast<std::uint64_t>(HostUse::locked) && before[1].args[2] == 1);
  CHECK_ERROR(ErrorKind::invalid_argument, (parse_trace("register_host ok 0 4096"), 0));
  trace->set_logging(false);
  trace->create_event(true);
  CHECK(trace->log().size() == log.size() && trace->count(Call::create_event) == 2);
  trace->clear_log();
  CHECK(trace->log().empty() && trace->count() == kTour + 2);
}

}  // namespace
