// Threads of tests: what one throws is thrown again where it is joined.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace remap::testing {

class Thread {
 public:
  explicit Thread(std::function<void()> body)
      : thread_([this, body = std::move(body)] {
          try {
            body();
          } catch (...) {
            error_ = std::current_exception();
          }
        }) {}
  ~Thread() {
    if (thread_.joinable()) thread_.join();
  }
  void join() {
    thread_.join();
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::exception_ptr error_;
  std::thread thread_;
};

// Runs all bodies at once, until all have ended.
inline void together(const std::vector<std::function<void()>>& bodies) {
  std::vector<std::unique_ptr<Thread>> threads;
  for (const auto& body : bodies) threads.push_back(std::make_unique<Thread>(body));
  std::exception_ptr error;
  for (const auto& thread : threads) {
    try {
      thread->join();
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

// body(0) .. body(n - 1)
inline void on_threads(std::size_t n, const std::function<void(std::size_t)>& body) {
  std::vector<std::function<void()>> bodies;
  for (std::size_t i = 0; i < n; ++i) bodies.emplace_back([&body, i] { body(i); });
  together(bodies);
}

// Looks again and again while it lives, or until it is stopped.
class Looking {
 public:
  explicit Looking(std::function<void()> look)
      : thread_([this, look = std::move(look)] {
          while (!stop_) {
            look();
            std::this_thread::sleep_for(std::chrono::microseconds(20));
          }
        }) {}
  ~Looking() { stop_ = true; }
  void stop() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  Thread thread_;
};

}  // namespace remap::testing
