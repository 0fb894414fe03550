// What a stream's worker does.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "emulator.h"
#include "streams.h"
#include "text.h"

namespace remap::emulated {
namespace {

// Bytes that are moved between two looks at the mappings.
constexpr std::size_t kChunk = std::size_t{256} << 10;

thread_local bool inside_host_function = false;

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

unsigned char* bytes_at(CUdeviceptr at) { return reinterpret_cast<unsigned char*>(static_cast<std::uintptr_t>(at)); }

void sleep_s(double seconds) {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

}  // namespace

bool Streams::in_host_function() { return inside_host_function; }

void Streams::work(const Shared& stream) {
  Lock lock(emulator_.mutex);
  for (;;) {
    stream->changed.wait(lock, [&] { return stream->destroyed || !stream->queue.empty(); });
    if (stream->queue.empty()) break;
    stream->running.emplace(std::move(stream->queue.front()));
    stream->queue.pop_front();
    if (stream->running->engine == nullptr) {
      const Operation* before = nullptr;
      Operation* next = &*stream->running;
      line_up(*stream, before, *next);
      for (auto behind = stream->queue.begin(); next->engine != nullptr && behind != stream->queue.end(); ++behind) {
        before = next;
        next = &*behind;
        line_up(*stream, before, *next);
      }
    }
    run(lock, *stream);
    stream->running.reset();
    ++stream->finished;
    stream->changed.notify_all();
  }
  all_.erase(stream);
}

void Streams::run(Lock& lock, Stream& stream) {
  const Operation& operation = *stream.running;
  switch (operation.kind) {
    case Operation::Kind::record:
      operation.recording->complete = true;
      operation.recording->error = error_of(stream);
      operation.recording->at_s = now_s();
      recorded_.notify_all();
      break;
    case Operation::Kind::wait:
      if (!operation.recording) break;
      recorded_.wait(lock, [&] { return operation.recording->complete; });
      if (stream.error == kSuccess && !operation.for_order_alone) stream.error = operation.recording->error;
      break;
    case Operation::Kind::copy:
      if (error_of(stream) == kSuccess) await_turn(lock, operation);
      if (error_of(stream) == kSuccess) move_bytes(lock, stream);
      leave_line(operation);
      break;
    case Operation::Kind::fill:
      if (error_of(stream) == kSuccess) move_bytes(lock, stream);
      break;
    case Operation::Kind::call:
      if (error_of(stream) != kSuccess) break;
      lock.unlock();
      inside_host_function = true;
      operation.function(operation.data);
      inside_host_function = false;
      lock.lock();
      break;
  }
}

void Streams::await_turn(Lock& lock, const Operation& copy) {
  if (copy.ticket == 0) return;
  CopyEngine& engine = *copy.engine;
  engine.moved.wait(lock, [&] { return engine.line.front() == copy.ticket; });
}

// Also of a copy that is skipped, wherever it stands.
void Streams::leave_line(const Operation& copy) {
  if (copy.ticket == 0) return;
  std::deque<std::uint64_t>& line = copy.engine->line;
  line.erase(std::find(line.begin(), line.end(), copy.ticket));
  copy.engine->moved.notify_all();
}

void Streams::move_bytes(Lock& lock, Stream& stream) {
  const Operation& operation = *stream.running;  // constant until the worker itself ends it
  const CUresult injected = emulator_.journal.arrived(std::string("run:") + operation.entry);
  const std::uint64_t jitter_us = emulator_.settings.jitter_us;
  if (jitter_us > 0) {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    const std::uint64_t late_us = random_ % jitter_us;
    lock.unlock();
    sleep_s(static_cast<double>(late_us) * 1e-6);
    lock.lock();
  }
  const double begun = now_s();
  // Work that fails has done some of it.
  const std::size_t until = injected == kSuccess ? operation.bytes : operation.bytes / 2;
  for (std::size_t done = 0; done < until;) {
    const std::size_t part = std::min(kChunk, until - done);
    if (const CUresult refused = check_access(stream, operation, done, part); refused != kSuccess) {
      fail(stream, refused);
      return;
    }
    stream.touching = true;
    lock.unlock();
    if (operation.kind == Operation::Kind::fill) {
      std::memset(bytes_at(operation.to.at + done), operation.value, part);
    } else {
      std::memmove(bytes_at(operation.to.at + done), bytes_at(operation.from.at + done), part);
    }
    lock.lock();
    stream.touching = false;
    touched_.notify_all();
    done += part;
  }
  if (operation.bytes_per_s > 0) {
    const double least = static_cast<double>(until) / static_cast<double>(operation.bytes_per_s);
    lock.unlock();
    sleep_s(least - (now_s() - begun));
    lock.lock();
  }
  if (injected != kSuccess) fail(stream, injected);
}

CUresult Streams::check_access(const Stream& stream, const Operation& operation, std::size_t done, std::size_t bytes) {
  const auto usable = [&](const Place& place, int access) {
    switch (place.kind) {
      case Place::Kind::device:
        return emulator_.memory.accessible(place.at + done, bytes, stream.device, access);
      case Place::Kind::locked:
        return emulator_.host.alive(place.registration);
      case Place::Kind::pageable:
      case Place::Kind::none:
        break;
    }
    return true;
  };
  for (const auto& [place, access] : {std::pair{&operation.from, kAccessRead}, std::pair{&operation.to, kAccessReadWrite}}) {
    if (usable(*place, access)) continue;
    return emulator_.violate(kIllegalAddress, std::string(operation.entry) + " ran on memory that is unmapped, has no access " +
                                                  "or is no longer registered: " +
                                                  range_text(place->at + done, bytes));
  }
  return kSuccess;
}

void Streams::fail(Stream& stream, CUresult error) {
  stream.error = error;
  if (emulator_.settings.lose_context != 0) emulator_.contexts.lose(stream.context, error);
}

}  // namespace remap::emulated
