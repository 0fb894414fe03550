// The host backend's threads and copies.
#include <dirent.h>

#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "backend/copy_bytes.h"
#include "backend/host_stream.h"
#include "check.h"
#include "remap/backends.h"

using namespace remap;
using host::HostStreams;

namespace {

TEST(a_call_that_throws_fails_its_stream_whatever_it_throws) {
  for (const bool ours : {true, false}) {
    HostStreams streams(1);
    const StreamHandle stream = streams.create_stream();
    const EventHandle event = streams.create_event(true);
    streams.call(stream, [ours] {
      if (ours) throw Error(ErrorKind::driver, "lost");
      throw std::runtime_error("not ours");
    });
    streams.record(event, stream);
    CHECK_ERROR(ErrorKind::driver, streams.synchronize(event, std::chrono::nanoseconds::max()));
  }
  CHECK_ERROR(ErrorKind::invalid_argument, make_host_backend({4096, 4096, 0}));
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
