// The host backend's streams, events and copies.
#include <dirent.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <future>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "backend/copy_bytes.h"
#include "backend/host_stream.h"
#include "check.h"
#include "remap/backends.h"

using namespace remap;
using namespace std::chrono_literals;
using host::HostStreams;

namespace {

constexpr auto kForever = std::chrono::nanoseconds::max();

// Holds a stream until opened.
struct Gate {
  std::promise<void> promise;
  std::shared_future<void> future{promise.get_future()};
  void open() { promise.set_value(); }
  std::function<void()> wait() const {
    return [future = future] { future.wait(); };
  }
};

TEST(events_may_go_while_pending) {
  HostStreams streams(1);
  const StreamHandle first = streams.create_stream(), second = streams.create_stream();
  const EventHandle event = streams.create_event(true), end = streams.create_event(true);
  Gate gate;
  streams.call(first, gate.wait());
  streams.record(event, first);
  streams.stream_wait(second, event);
  streams.destroy_event(event);
  CHECK_ERROR(ErrorKind::invalid_argument, streams.query(event));
  CHECK_ERROR(ErrorKind::invalid_argument, (streams.record(event, first), 0));
  streams.record(end, second);
  CHECK(!streams.query(end));
  gate.open();
  CHECK(streams.synchronize(end, kForever));
}

TEST(a_failure_reaches_every_waiter) {
  HostStreams streams(1);
  const StreamHandle first = streams.create_stream(), second = streams.create_stream(), third = streams.create_stream();
  const EventHandle before = streams.create_event(true), behind = streams.create_event(true), other = streams.create_event(true),
                    fine = streams.create_event(true);
  std::byte target{1};
  const std::byte source{2};
  Gate gate;
  streams.record(before, first);
  streams.call(first, gate.wait());
  streams.call(first, [] { throw Error(ErrorKind::driver, "lost", {{"code", std::int64_t{719}}}); });
  streams.copy(first, &target, &source, 1);  // must not happen any more
  streams.record(behind, first);
  streams.stream_wait(second, behind);
  streams.record(other, second);
  streams.record(fine, third);
  auto waiter = std::async(std::launch::async, [&] { return streams.synchronize(behind, kForever); });
  std::this_thread::sleep_for(1ms);
  gate.open();
  CHECK_ERROR(ErrorKind::driver, waiter.get());
  CHECK_ERROR(ErrorKind::driver, streams.synchronize(other, kForever));
  CHECK_ERROR(ErrorKind::driver, streams.query(behind));
  CHECK_ERROR(ErrorKind::driver, streams.elapsed(before, behind));
  CHECK(streams.synchronize(before, kForever) && streams.synchronize(fine, kForever));
  streams.record(behind, first);  // the stream stays failed
  CHECK_ERROR(ErrorKind::driver, streams.synchronize(behind, kForever));
  CHECK(target == std::byte{1});
  streams.record(behind, third);  // the event does not
  CHECK(streams.synchronize(behind, kForever));
  streams.call(third, [] { throw std::runtime_error("not ours"); });
  streams.record(behind, third);
  CHECK_ERROR(ErrorKind::driver, streams.synchronize(behind, kForever));
  streams.destroy_stream(first);
}

TEST(destroying_waits_for_the_work) {
  HostStreams streams(1);
  std::vector<std::byte> bytes(1 << 20);
  for (int i = 1; i <= 20; ++i) {
    const StreamHandle stream = streams.create_stream();
    for (int j = 0; j < 5; ++j) streams.fill(stream, bytes.data(), static_cast<std::uint8_t>(i), bytes.size());
    streams.destroy_stream(stream);
    CHECK(bytes.front() == static_cast<std::byte>(i) && bytes.back() == static_cast<std::byte>(i));
    CHECK_ERROR(ErrorKind::invalid_argument, (streams.destroy_stream(stream), 0));
    CHECK_ERROR(ErrorKind::invalid_argument, (streams.fill(stream, bytes.data(), 0, 1), 0));
  }
  std::atomic<bool> ran{false};
  {
    HostStreams closing(1);
    closing.call(closing.create_stream(), [&] {
      std::this_thread::sleep_for(2ms);
      ran = true;
    });
  }
  CHECK(ran);
}

TEST(workers_are_named_and_take_no_signals) {
  HostStreams streams(2);
  streams.create_stream();
  std::size_t found = 0;
  DIR* tasks = ::opendir("/proc/self/task");
  CHECK(tasks != nullptr);
  while (const dirent* entry = ::readdir(tasks)) {
    const std::string path = std::string("/proc/self/task/") + entry->d_name;
    std::string name;
    std::ifstream(path + "/comm") >> name;
    if (name != "remap-stream" && name != "remap-copy") continue;
    std::ifstream status(path + "/status");
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("SigBlk:", 0) != 0) continue;
      const auto mask = std::stoull(line.substr(7), nullptr, 16);
      const std::uint64_t wanted = (1u << (2 - 1)) | (1u << (15 - 1)) | (1u << (10 - 1));  // SIGINT, SIGTERM, SIGUSR1
      CHECK((mask & wanted) == wanted);
      ++found;
    }
  }
  ::closedir(tasks);
  CHECK(found == 2);
}

TEST(copies_are_exact_at_every_alignment) {
  constexpr std::size_t kMost = (std::size_t{5} << 20) + 777;
  std::vector<std::byte> from(kMost + 128), to(kMost + 256);
  std::mt19937 random(7);
  for (auto& byte : from) byte = static_cast<std::byte>(random());
  host::CopyPool alone(1), shared(3);
  const std::size_t sizes[] = {0, 1, 63, 64, 255, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 319, (2 << 20) + 1, kMost};
  for (const std::size_t size : sizes) {
    for (int i = 0; i < 4; ++i) {
      const std::size_t a = i == 0 ? 0 : random() % 128, b = i == 0 ? 0 : random() % 128;
      for (int way = 0; way < 3; ++way) {
        std::fill(to.begin(), to.end(), std::byte{0xee});
        if (way == 0) host::copy_bytes(to.data() + 64 + b, from.data() + a, size);
        if (way == 1) alone.copy(to.data() + 64 + b, from.data() + a, size);
        if (way == 2) shared.copy(to.data() + 64 + b, from.data() + a, size);
        CHECK(size == 0 || std::memcmp(to.data() + 64 + b, from.data() + a, size) == 0);
        CHECK(to[63 + b] == std::byte{0xee} && to[64 + b + size] == std::byte{0xee});
      }
    }
  }
}

}  // namespace
