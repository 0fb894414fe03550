// SPDX-License-Identifier: Apache-2.0
// Prefetcher: carries out what LayerSchedule allows, on one copy stream. How it stays correct: prefetch_state.h.
#include <algorithm>

#include "schedule/prefetch_state.h"

namespace remap {

Prefetcher::Prefetcher(std::shared_ptr<Backend> backend, std::vector<LayerMemory> layers, std::size_t chunk_bytes)
    : count_(layers.size()),
      states_(std::make_unique<std::atomic<std::uint8_t>[]>(layers.size())),
      state_(std::make_unique<State>()) {
  if (!backend) refuse("a Prefetcher needs a backend", {});
  for (std::size_t layer = 0; layer < count_; ++layer) {
    for (const std::byte* at : {static_cast<const std::byte*>(layers[layer].region), layers[layer].master}) {
      const auto begin = reinterpret_cast<std::uintptr_t>(at);
      if (at == nullptr || begin + layers[layer].bytes >= begin) continue;
      refuse("the " + std::to_string(layers[layer].bytes) + " bytes of layer " + std::to_string(layer) +
                 " pass the end of the address space",
             {{"layer", static_cast<std::int64_t>(layer)}, {"bytes", static_cast<std::int64_t>(layers[layer].bytes)}});
    }
  }
  for (std::size_t layer = 0; layer < count_; ++layer) states_[layer].store(0, std::memory_order_relaxed);
  State& s = *state_;
  s.backend = std::move(backend);
  s.layers = std::move(layers);
  s.chunk_bytes = chunk_bytes;
  s.states = states_.get();
  s.position.resize(count_);
  s.errors.resize(count_);
  s.simulator = s.backend->simulator();
  if (s.simulator) s.released_s.resize(count_);
  s.timer = std::make_unique<PassTimer>(*s.backend, s.stats);
  s.stream.store(s.backend->create_stream(), std::memory_order_relaxed);
}

void Prefetcher::close() {
  guard();
  State& s = *state_;
  const std::lock_guard<std::mutex> lock(s.mutex);
  std::exception_ptr first;
  // Takes the handle, and leaves 0, when it has been given back.
  const auto give_back = [&](std::uint64_t& handle, void (Backend::*destroy)(std::uint64_t)) {
    if (handle == 0) return;
    try {
      (*s.backend.*destroy)(handle);
      handle = 0;
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  };
  StreamHandle stream = s.stream.load(std::memory_order_relaxed);
  give_back(stream, &Backend::destroy_stream);  // waits for its copies
  s.stream.store(stream, std::memory_order_relaxed);
  give_back(s.next_stream, &Backend::destroy_stream);
  for (const auto& ticket : s.pool) {
    give_back(ticket->end, &Backend::destroy_event);
  }
  s.for_slots([&](Slot& slot) {
    for (Reader& reader : slot.readers) give_back(reader.event, &Backend::destroy_event);
  });
  give_back(s.sample.start, &Backend::destroy_event);
  give_back(s.sample.end, &Backend::destroy_event);
  for (EventHandle& event : s.spare) give_back(event, &Backend::destroy_event);
  if (first) std::rethrow_exception(first);
}

Prefetcher::~Prefetcher() {
  if (fork_generation() != fork_generation_) {
    (void)state_.release();  // its threads, locks and events are the parent's
    return;
  }
  // A destructor has no caller to tell. A failure of a moment must leave nothing behind, so it is tried a second time.
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      close();
      return;
    } catch (...) {
      continue;
    }
  }
}

bool Prefetcher::released(LayerId layer, const std::function<bool()>& current) noexcept {
  if (layer >= count_) return true;
  State& s = *state_;
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (current && !current()) return false;
  s.errors[layer] = nullptr;  // re-pointing failed before, and was tried again
  if (s.simulator) s.released_s[layer] = s.simulator->now();
  s.set(layer, static_cast<std::uint8_t>(s.get(layer) & ~(kHeld | kFailed)));
  s.pump();
  s.changed.notify_all();
  return true;
}

bool Prefetcher::failed(LayerId layer, std::exception_ptr error, const std::function<bool()>& current) noexcept {
  if (layer >= count_) return true;
  State& s = *state_;
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (current && !current()) return false;
  s.errors[layer] = std::move(error);
  s.set(layer, static_cast<std::uint8_t>((s.get(layer) & ~kHeld) | kFailed));
  s.changed.notify_all();
  return true;
}

void Prefetcher::stream_blocks(const BlockLayout& layout) {
  guard();
  State& s = *state_;
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (s.in_pass.load(std::memory_order_relaxed) || !s.blocks.layers.empty()) {
    throw Error(ErrorKind::invalid_state, "stream_blocks inside a pass, or a second time; nothing was changed");
  }
  bool good = !layout.layers.empty() && layout.layers.size() <= count_ && layout.unit_bytes > 0 && layout.buffers > 0;
  for (const std::vector<BlockRange>& ranges : layout.layers) {
    good = good && !ranges.empty();
    for (const BlockRange& range : ranges) good = good && range.region != nullptr && range.host != nullptr;
  }
  if (!good) {
    refuse("KV blocks stream in ranges of 1 to " + std::to_string(count_) + " layers, at addresses, in units of 1 byte at least, "
               "through 1 buffer at least",
           {{"layers", static_cast<std::int64_t>(layout.layers.size())}, {"most", static_cast<std::int64_t>(count_)},
            {"unit_bytes", static_cast<std::int64_t>(layout.unit_bytes)}, {"buffers", std::int64_t{layout.buffers}}});
  }
  std::vector<Slot> slots(layout.buffers);
  LayerSchedule schedule;
  schedule.configure(static_cast<std::uint32_t>(layout.layers.size()), layout.buffers);
  s.blocks = layout;  // the last step that may fail
  s.block_slots.swap(slots);
  s.block_schedule = std::move(schedule);
}

void Prefetcher::State::validate(const std::vector<BlockRun>& named) const {
  if (named.empty() || !blocks.layers.empty()) return;
  refuse("the pass names " + std::to_string(named.size()) + " runs of KV blocks, and no call has said where such blocks are copied in",
         {{"runs", static_cast<std::int64_t>(named.size())}});
}

void Prefetcher::begin_pass(StreamHandle stream, std::vector<BlockRun> blocks, EventHandle filled) {
  guard();
  State& s = *state_;
  if (stream != 0) s.uses_streams.store(true, std::memory_order_relaxed);
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.validate(blocks);
  const EventHandle start = s.timer->start(stream);
  try {
    s.close_readers();
    s.recover();
    if (filled != 0) s.backend->stream_wait(s.stream.load(std::memory_order_relaxed), filled);
  } catch (...) {
    s.timer->give_back(start);
    throw;
  }
  if (s.in_pass.load(std::memory_order_relaxed)) ++s.stats.abandoned;
  s.schedule.begin_pass();
  s.read_blocks(std::move(blocks));
  s.in_pass.store(true, std::memory_order_relaxed);
  s.expect_waits(true);
  s.pass_stream = stream;
  s.timer->begin(stream, start);
  s.pump();
}

std::uint64_t Prefetcher::end_pass() {
  guard();
  State& s = *state_;
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (!s.in_pass.load(std::memory_order_relaxed)) {
    throw Error(ErrorKind::invalid_state, "end_pass outside a pass; nothing was changed; call begin_pass() first");
  }
  s.close_readers();
  s.read_blocks({});
  s.expect_waits(false);
  s.schedule.end_pass();
  s.in_pass.store(false, std::memory_order_relaxed);
  s.pass_stream = 0;
  const std::uint64_t pass = ++s.stats.passes;
  s.timer->end(pass);
  s.stats.last_pass_copies = s.stats.copies - std::exchange(s.copies_at_end, s.stats.copies);
  s.pump();
  return pass;
}

bool Prefetcher::in_pass() const {
  guard();
  return state_->in_pass.load(std::memory_order_relaxed);
}

std::vector<LayerId> Prefetcher::unwaited() const {
  guard();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  std::vector<LayerId> found;
  for (LayerId layer = 0; layer < count_; ++layer) {
    if ((state_->get(layer) & kUnwaited) != 0) found.push_back(layer);
  }
  return found;
}

bool Prefetcher::wait(LayerId layer, StreamHandle stream, std::chrono::nanoseconds timeout) {
  if (layer >= count_) {
    refuse("wait for layer " + std::to_string(layer) + ", expected less than " + std::to_string(count_),
           {{"layer", std::int64_t{layer}}, {"layers", static_cast<std::int64_t>(count_)}});
  }
  if (ready(layer)) return true;
  guard();
  State& s = *state_;
  if (stream != 0) s.uses_streams.store(true, std::memory_order_relaxed);
  const Clock::time_point start = Clock::now();
  std::unique_lock<std::mutex> lock(s.mutex);
  if (stream == 0) stream = s.pass_stream;
  StallMark stalled(*s.timer);
  const bool measured = s.timer->measures(stream);
  for (;;) {
    const Clock::time_point now = Clock::now();
    const std::chrono::nanoseconds left = timeout - (now - start);
    const std::chrono::nanoseconds slice = std::clamp(left, std::chrono::nanoseconds(0), kSlice);
    const std::uint8_t bits = s.get(layer);
    if ((bits & kFailed) != 0) std::rethrow_exception(s.errors[layer]);
    if ((bits & kHeld) != 0) {
      if (left.count() <= 0) return false;
      if (measured) stalled.mark();
      s.changed.wait_until(lock, now + slice);
      if (!stalled.marked()) s.timer->blocked(seconds(Clock::now() - now));
      continue;
    }
    if ((bits & ~kUnwaited) == 0) {
      s.waited(layer);
      return true;
    }

    s.bring(layer);
    const bool early = s.early(layer, stream);
    if (s.awaited.empty() && !early) {
      s.enter(layer, stream);
      s.waited(layer);
      stalled.over();
      s.pump();
      return true;
    }
    if (stream != 0) {
      if (measured) stalled.mark();
      for (Ticket* ticket : s.awaited) s.backend->stream_wait(stream, ticket->end);
      if (early) s.simulator->hold(stream, s.released_s[layer]);
      s.enter(layer, stream);
      s.waited(layer);
      stalled.over();
      s.pump();
      return true;
    }
    if (left.count() <= 0) return false;
    Ticket* ticket = s.awaited.front();  // and around again for the next one
    ++ticket->refs;
    lock.unlock();
    std::exception_ptr error;
    try {
      s.backend->synchronize(ticket->end, slice);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    s.unref(ticket);
    s.timer->blocked(seconds(Clock::now() - now));
    if (error) {
      s.broken = error;
      std::rethrow_exception(error);
    }
  }
}

void Prefetcher::done(LayerId layer, StreamHandle stream) {
  if (layer >= count_) {
    refuse("done for layer " + std::to_string(layer) + ", expected less than " + std::to_string(count_),
           {{"layer", std::int64_t{layer}}, {"layers", static_cast<std::int64_t>(count_)}});
  }
  if (ready(layer)) return;
  guard();
  State& s = *state_;
  if (stream != 0) s.uses_streams.store(true, std::memory_order_relaxed);
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (stream == 0) stream = s.pass_stream;
  const std::uint32_t position = s.position[layer];
  const bool ring = (s.get(layer) & kStreamed) != 0 && s.finish(s.schedule, s.slots, position, stream);
  const bool blocks = (s.get(layer) & kBlocks) != 0 && s.finish(s.block_schedule, s.block_slots, layer, stream);
  if (ring) s.schedule.done(position);
  if (blocks) s.block_schedule.done(layer);
  if (ring || blocks) s.pump();
}

void Prefetcher::drain() {
  guard();
  State& s = *state_;
  std::unique_lock<std::mutex> lock(s.mutex);
  for (;;) {
    s.collect();
    if (s.broken) std::rethrow_exception(s.broken);
    if (s.in_flight.empty()) return;
    Ticket* ticket = s.in_flight.back();
    ++ticket->refs;
    lock.unlock();
    std::exception_ptr error;
    try {
      s.backend->synchronize(ticket->end, kSlice);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    s.unref(ticket);
    if (error) s.broken = error;
  }
}

PrefetchStats Prefetcher::stats() const {
  guard();
  State& s = *state_;
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.collect();
  s.timer->collect();
  return s.stats;
}

std::vector<PassTiming> Prefetcher::take_timings() {
  guard();
  State& s = *state_;
  const std::lock_guard<std::mutex> lock(s.mutex);
  return s.timer->take();
}

bool Prefetcher::loading() const {
  guard();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return !state_->reloads.empty();
}

bool Prefetcher::arrived(LayerId layer) {
  if (ready(layer)) return true;
  guard();
  if (layer >= count_) return false;
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->look(layer);
  return ready(layer);
}

bool Prefetcher::uses_streams() const {
  guard();
  return state_->uses_streams.load(std::memory_order_relaxed);
}

StreamHandle Prefetcher::copy_stream() const {
  guard();
  return state_->stream.load(std::memory_order_relaxed);
}

}  // namespace remap
