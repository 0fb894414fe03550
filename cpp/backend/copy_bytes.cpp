// SPDX-License-Identifier: Apache-2.0
#include "backend/copy_bytes.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "backend/thread.h"

namespace remap::host {
namespace {

// Below this a copy fits the caches and ordinary stores are faster.
constexpr std::size_t kStreamingBytes = std::size_t{1} << 20;
// Bytes that a thread takes at a time: small enough that a thread which is held up does not hold up the copy.
constexpr std::size_t kChunkBytes = std::size_t{512} << 10;
constexpr std::size_t kSharedBytes = 4 * kChunkBytes;

using Streamer = void (*)(std::byte*, const std::byte*, std::size_t) noexcept;

#if defined(__x86_64__)
// Pre: `to` is aligned to 64 and `bytes` a multiple of 256.
__attribute__((target("avx512f"))) void stream_avx512(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  for (std::size_t i = 0; i < bytes; i += 256) {
    const __m512i a = _mm512_loadu_si512(from + i);
    const __m512i b = _mm512_loadu_si512(from + i + 64);
    const __m512i c = _mm512_loadu_si512(from + i + 128);
    const __m512i d = _mm512_loadu_si512(from + i + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 192), d);
  }
  _mm_sfence();  // streaming stores are not ordered by the release that publishes the copy
}

__attribute__((target("avx2"))) void stream_avx2(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  for (std::size_t i = 0; i < bytes; i += 128) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
    const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 64));
    const __m256i d = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 96));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 32), b);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 64), c);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 96), d);
  }
  _mm_sfence();
}
#endif

Streamer choose_streamer() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return stream_avx512;
  if (__builtin_cpu_supports("avx2")) return stream_avx2;
#endif
  return nullptr;
}

void stream_bytes(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  static const Streamer streamer = choose_streamer();
  const std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(to) % 64) % 64;
  if (streamer == nullptr || bytes < head + 256) {
    std::memcpy(to, from, bytes);
    return;
  }
  const std::size_t body = (bytes - head) / 256 * 256;
  if (head != 0) std::memcpy(to, from, head);
  streamer(to + head, from + head, body);
  if (head + body != bytes) std::memcpy(to + head + body, from + head + body, bytes - head - body);
}

}  // namespace

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  if (bytes == 0) return;
  if (bytes < kStreamingBytes) {
    std::memcpy(to, from, bytes);
  } else {
    stream_bytes(to, from, bytes);
  }
}

CopyPool::CopyPool(std::size_t threads) {
  try {
    for (std::size_t i = 1; i < threads; ++i) {
      helpers_.reserve(i);  // so that a started thread always has a place
      helpers_.push_back(start_thread("remap-copy", [this] { work(); }));
    }
  } catch (...) {
    stop();
    throw;
  }
}

CopyPool::~CopyPool() { stop(); }

void CopyPool::stop() noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  offered_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void CopyPool::take_chunks() noexcept {
  for (;;) {
    const std::size_t at = next_.fetch_add(kChunkBytes, std::memory_order_relaxed);
    if (at >= bytes_) return;
    stream_bytes(to_ + at, from_ + at, bytes_ - at < kChunkBytes ? bytes_ - at : kChunkBytes);
  }
}

void CopyPool::copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
  if (helpers_.empty() || bytes < kSharedBytes || !turn.try_lock()) {
    copy_bytes(to, from, bytes);
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    to_ = to;
    from_ = from;
    bytes_ = bytes;
    next_.store(0, std::memory_order_relaxed);
    ++offers_;
    open_ = true;
  }
  offered_.notify_all();
  take_chunks();
  // All chunks are taken. A helper that has not joined by now finds the copy closed and touches nothing of it.
  std::unique_lock<std::mutex> lock(mutex_);
  open_ = false;
  left_.wait(lock, [this] { return helping_ == 0; });
}

void CopyPool::work() {
  std::size_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    offered_.wait(lock, [&] { return stopping_ || (open_ && offers_ != seen); });
    if (stopping_) return;
    seen = offers_;
    ++helping_;
    lock.unlock();
    take_chunks();
    lock.lock();
    if (--helping_ == 0) left_.notify_one();
  }
}

}  // namespace remap::host
