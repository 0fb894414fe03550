// SPDX-License-Identifier: Apache-2.0
// Fast copies between host buffers and the arena, and the threads that share them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace remap::host {

// Copies like memcpy (no overlap). Large copies go past the caches: each loaded byte is used once, by another core, and is
// larger than a core's cache; ordinary stores would read every destination line first and push out the computation's data.
// All bytes are visible to a thread that synchronises with the caller afterwards.
void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

// Splits large copies over `threads` threads, the caller included. Any thread may call copy(); while one large copy is
// shared out, others run on their caller alone.
class CopyPool {
 public:
  explicit CopyPool(std::size_t threads);
  ~CopyPool();
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;

  void copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

 private:
  void work();
  void stop() noexcept;
  void take_chunks() noexcept;

  std::mutex turn_;  // held by the one whose copy is shared out
  std::mutex mutex_;  // guards all below but the chunk counter
  std::condition_variable offered_;
  std::condition_variable left_;
  std::byte* to_ = nullptr;  // the copy: written by its caller before it is offered, constant while helpers are in it
  const std::byte* from_ = nullptr;
  std::size_t bytes_ = 0;
  std::atomic<std::size_t> next_{0};  // offset of the next chunk to take
  std::size_t offers_ = 0;            // counts the copies offered, so that a helper takes part in each at most once
  std::size_t helping_ = 0;           // helpers in the copy
  bool open_ = false;                 // helpers may still join
  bool stopping_ = false;
  std::vector<std::thread> helpers_;
};

}  // namespace remap::host
