// SPDX-License-Identifier: Apache-2.0
// The Prefetcher's work under its lock: tickets, copies, readers. The rules are in prefetch_state.h.
#include "schedule/prefetch_state.h"

#include <algorithm>
#include <optional>

namespace remap {

[[noreturn]] void prefetch::refuse(const std::string& what, Error::Fields fields) {
  throw Error(ErrorKind::invalid_argument, what + "; nothing was changed", std::move(fields));
}

void Prefetcher::State::unref(Ticket* ticket) noexcept {
  if (ticket != nullptr && --ticket->refs == 0) free.push_back(ticket);  // reserved in grow()
}

void Prefetcher::State::grow() {
  auto ticket = std::make_unique<Ticket>();
  pool.reserve(pool.size() + 1);
  free.reserve(pool.size() + 1);
  ticket->end = backend->create_event(false);
  free.push_back(ticket.get());
  pool.push_back(std::move(ticket));
}

Ticket* Prefetcher::State::acquire() {
  collect();
  if (free.empty()) {
    // A copy that no caller waits for any more (its buffer was filled again since) need not be followed.
    const auto stolen = std::find_if(in_flight.begin(), in_flight.end(), [](Ticket* t) { return t->refs == 1; });
    if (pool.size() < kTickets || stolen == in_flight.end()) {
      grow();
    } else {
      Ticket* ticket = *stolen;
      in_flight.erase(stolen);
      if (sample.ticket == ticket) sample.ticket = nullptr;
      unref(ticket);
    }
  }
  Ticket* ticket = free.back();
  free.pop_back();
  ticket->refs = 1;
  ticket->complete = false;
  return ticket;
}

bool Prefetcher::State::poll(Ticket* ticket) {
  if (ticket == nullptr || ticket->complete) return true;
  try {
    ticket->complete = backend->query(ticket->end);
  } catch (const Error&) {
    broken = std::current_exception();
    throw;
  }
  return ticket->complete;
}

void Prefetcher::State::collect() noexcept {
  try {
    while (!in_flight.empty() && !broken && poll(in_flight.front())) {
      Ticket* ticket = in_flight.front();
      in_flight.pop_front();
      if (sample.ticket == ticket) {
        sample.ticket = nullptr;
        try {
          stats.copy_s += backend->elapsed(sample.start, sample.end);
          stats.timed_bytes += ticket->bytes;
        } catch (const Error&) {
          // Not timed; the copy itself is good.
        }
      }
      unref(ticket);
    }
  } catch (const Error&) {
    // poll() has kept it in `broken`.
  }
}

bool Prefetcher::State::begin_sample(StreamHandle copies) noexcept {
  if (sample.ticket != nullptr) return false;
  try {
    if (sample.start == 0) sample.start = backend->create_event(true);
    if (sample.end == 0) sample.end = backend->create_event(true);
    backend->record(sample.start, copies);
    return true;
  } catch (...) {
    return false;
  }
}

void Prefetcher::State::end_sample(StreamHandle copies, const Ticket* ticket) noexcept {
  try {
    backend->record(sample.end, copies);
    sample.ticket = ticket;
  } catch (...) {
    sample.ticket = nullptr;
  }
}

void Prefetcher::State::enqueue(StreamHandle copies, const std::vector<CopyRange>& ranges, bool& enqueued) {
  std::size_t room = chunk_bytes;  // of the present chunk
  bool first = true;
  chunk.clear();
  const auto send = [&] {
    if (chunk.empty()) return;
    const CopyRange& front = chunk.front();
    // Its bytes are overwritten by the chunk that follows it on the same stream.
    if (!first) backend->fill(copies, front.to, 0, std::min(front.bytes, kGap));
    if (chunk.size() == 1) {
      backend->copy(copies, front.to, front.from, front.bytes);
    } else {
      backend->copy_batch(copies, chunk.data(), chunk.size());
    }
    enqueued = true;
    first = false;
    chunk.clear();
    room = chunk_bytes;
  };
  for (CopyRange left : ranges) {
    while (left.bytes != 0) {
      const std::size_t size = chunk_bytes == 0 ? left.bytes : std::min(room, left.bytes);
      chunk.push_back({left.to, left.from, size});
      left = {left.to + size, left.from + size, left.bytes - size};
      room -= chunk_bytes == 0 ? 0 : size;
      if (chunk_bytes != 0 && room == 0) send();
    }
  }
  send();
}

Ticket* Prefetcher::State::issue(std::size_t bytes, const std::vector<Reader>* readers, bool timed) {
  if (broken) std::rethrow_exception(broken);
  Ticket* ticket = acquire();
  bool listed = false;
  bool enqueued = false;
  try {
    in_flight.push_back(ticket);  // first: nothing but the backend may fail once the copy is enqueued
    listed = true;
    const StreamHandle copies = stream.load(std::memory_order_relaxed);
    if (readers != nullptr) {
      for (const Reader& reader : *readers) backend->stream_wait(copies, reader.event);
    }
    timed = timed && begin_sample(copies);
    enqueue(copies, ranges, enqueued);
    if (timed) end_sample(copies, ticket);  // before the copy's own event: complete when that is
    backend->record(ticket->end, copies);
  } catch (...) {
    // A copy whose end no event shows: only destroying the stream waits for it.
    if (enqueued) broken = std::current_exception();
    if (sample.ticket == ticket) sample.ticket = nullptr;
    if (listed) in_flight.pop_back();
    unref(ticket);
    throw;
  }
  ticket->bytes = bytes;
  ++ticket->refs;
  return ticket;
}

void Prefetcher::State::issue_ring(const LayerSchedule::Copy& copy) {
  Slot& slot = slots[copy.buffer];
  schedule.lost(copy.buffer);
  const LayerId layer = streamed[copy.position];
  const Slice slice = slices[copy.position];
  const std::size_t bytes = layers[layer].bytes - slice.offset;
  ranges.assign({{slot.address + slice.place, layers[layer].master + slice.offset, bytes}});
  Ticket* ticket = issue(bytes, &slot.readers, true);
  ++stats.copies;
  stats.copied_bytes += bytes;
  unref(std::exchange(slot.ready, ticket));
  schedule.issued(copy);
}

void Prefetcher::State::issue_blocks(const LayerSchedule::Copy& copy) {
  Slot& slot = block_slots[copy.buffer];
  block_schedule.lost(copy.buffer);
  ranges.clear();
  for (const BlockRange& range : blocks.layers[copy.position]) {
    for (const BlockRun& run : runs) {
      ranges.push_back({range.region + run.block * blocks.unit_bytes, range.host + run.host * blocks.unit_bytes,
                        run.count * blocks.unit_bytes});
    }
  }
  Ticket* ticket = issue(run_bytes, &slot.readers, false);
  stats.block_bytes += run_bytes;
  unref(std::exchange(slot.ready, ticket));
  block_schedule.issued(copy);
}

void Prefetcher::State::issue_reload(Reload& reload) {
  const LayerMemory& memory = layers[reload.layer];
  ranges.assign({{memory.region + reload.first, memory.master + reload.first, reload.bytes}});
  reload.ticket = issue(reload.bytes, nullptr, true);
  ++stats.copies;
  stats.copied_bytes += reload.bytes;
}

Reload* Prefetcher::State::next_reload() {
  for (Reload& reload : reloads) {
    // Held or failed: the region does not show the layer's own pages yet, and a copy would go into the ring.
    if (reload.ticket == nullptr && (states[reload.layer].load(std::memory_order_relaxed) & (kHeld | kFailed)) == 0) return &reload;
  }
  return nullptr;
}

void Prefetcher::State::pump() noexcept {
  try {
    collect();
    while (!broken) {
      const std::optional<LayerSchedule::Copy> copy = schedule.next();
      Reload* reload = next_reload();
      std::optional<LayerSchedule::Copy> part;
      if (!runs.empty()) part = block_schedule.next();
      if (part && block_schedule.next_is_later()) part.reset();
      // A layer's weights before its blocks, and both in the order of the layers.
      const bool weights = (reload != nullptr && part && reload->layer <= part->position) ||
                           (copy && part && !schedule.next_is_later() && streamed[copy->position] <= part->position);
      if (part && !weights) {
        issue_blocks(*part);
      } else if (reload != nullptr && (!copy || reload->layer < streamed[copy->position])) {
        issue_reload(*reload);
      } else if (copy) {
        issue_ring(*copy);
      } else {
        return;
      }
    }
  } catch (...) {
    // See above.
  }
}

void Prefetcher::State::recover() {
  if (!broken) return;
  // A reader's stream that failed with us runs nothing any more; waiting for its event would only pass the failure on. It
  // says so however it is asked: an error of one call only was the call's own, and that reader may still run.
  const auto throws = [](auto&& look) {
    try {
      static_cast<void>(look());
      return false;
    } catch (const Error&) {
      return true;
    }
  };
  const auto failed = [&](EventHandle event) {
    return throws([&] { return backend->query(event); }) &&
           throws([&] { return backend->synchronize(event, std::chrono::nanoseconds(0)); });
  };
  std::vector<EventHandle> dead;
  for_slots([&](const Slot& slot) {
    for (const Reader& reader : slot.readers) {
      if (failed(reader.event)) dead.push_back(reader.event);
    }
  });
  const auto is_dead = [&](const Reader& reader) { return std::find(dead.begin(), dead.end(), reader.event) != dead.end(); };
  spare.reserve(spare.size() + dead.size());
  if (next_stream == 0) next_stream = backend->create_stream();
  // This may wait, also in a pass on a stream, where nothing else does. It must: a copy that was enqueued before the
  // failure may still be running, its end can be seen by no event any more, and the next copy writes to the same buffers.
  // With that, all that the old stream came behind (configure's `after`, readers of buffers that left the ring) has
  // happened, and the new one need not wait for it again. It does not wait for ever: the old stream waits only for events
  // that were recorded before, none of them by a call that is still to come. And it is rare: an error was thrown, and the
  // engine chose to go on.
  backend->destroy_stream(stream.load(std::memory_order_relaxed));

  // From here nothing throws.
  for_slots([&](Slot& slot) {
    slot.readers.erase(std::remove_if(slot.readers.begin(), slot.readers.end(), is_dead), slot.readers.end());
  });
  spare.insert(spare.end(), dead.begin(), dead.end());
  stream.store(std::exchange(next_stream, 0), std::memory_order_relaxed);
  schedule.forget();
  block_schedule.forget();
  for (Ticket* ticket : in_flight) unref(ticket);
  in_flight.clear();
  sample.ticket = nullptr;
  for_slots([&](Slot& slot) { unref(std::exchange(slot.ready, nullptr)); });
  for (Reload& reload : reloads) unref(std::exchange(reload.ticket, nullptr));
  broken = nullptr;
}

void Prefetcher::State::record_reader(Slot& slot, StreamHandle reader_stream) {
  Reader* entry = nullptr;
  for (Reader& reader : slot.readers) {
    if (reader.stream == reader_stream) entry = &reader;  // one stream runs in order: the new recording covers the old
  }
  for (std::size_t i = 0; entry == nullptr && i < slot.readers.size(); ++i) {
    try {
      if (backend->query(slot.readers[i].event)) entry = &slot.readers[i];
    } catch (const Error&) {
      // That reader's stream has failed, which is its user's to report; its event is left alone.
    }
  }
  if (entry != nullptr) {
    backend->record(entry->event, reader_stream);
    entry->stream = reader_stream;
    return;
  }
  slot.readers.reserve(slot.readers.size() + 1);
  if (spare.empty()) {
    spare.reserve(1);
    spare.push_back(backend->create_event(false));
  }
  backend->record(spare.back(), reader_stream);
  slot.readers.push_back({reader_stream, spare.back()});
  spare.pop_back();
}

void Prefetcher::State::close_readers() {
  for_slots([&](Slot& slot) {
    for (const StreamHandle reader : slot.open) {
      if (reader != 0) record_reader(slot, reader);
    }
  });
  for_slots([](Slot& slot) { slot.open.clear(); });
}

void Prefetcher::State::read_blocks(std::vector<BlockRun> named) noexcept {
  runs.swap(named);
  std::size_t count = 0;
  for (const BlockRun& run : runs) count += run.count;
  for (LayerId layer = 0; layer < blocks.layers.size(); ++layer) {
    const auto bits = static_cast<std::uint8_t>(get(layer) & ~kBlocks);
    if (count != 0) set(layer, static_cast<std::uint8_t>(bits | kBlocks));
    if (count == 0 && get(layer) != bits) set(layer, bits);
  }
  if (blocks.layers.empty()) return;
  run_bytes = count * blocks.unit_bytes * blocks.layers.front().size();
  block_schedule.end_pass();
  block_schedule.forget();  // the buffers have other blocks than these
  if (count != 0) block_schedule.begin_pass();
}

void Prefetcher::State::expect_waits(bool expected) noexcept {
  for (LayerId layer = 0; layer < layers.size(); ++layer) {
    const auto bits = static_cast<std::uint8_t>(get(layer) & ~kUnwaited);
    if (get(layer) != 0) set(layer, expected && bits != 0 ? static_cast<std::uint8_t>(bits | kUnwaited) : bits);
  }
}

void Prefetcher::State::loaded(LayerId layer) noexcept {
  const auto its = [&](const Reload& reload) { return reload.layer == layer; };
  for (const Reload& reload : reloads) {
    if (its(reload)) unref(reload.ticket);
  }
  reloads.erase(std::remove_if(reloads.begin(), reloads.end(), its), reloads.end());
  set(layer, static_cast<std::uint8_t>(get(layer) & ~kReload));
}

void Prefetcher::State::look(LayerId layer) noexcept {
  if (get(layer) != kReload) return;
  if (simulator && released_s[layer] > simulator->now()) return;  // by the worker's clock it has not come yet
  try {
    for (const Reload& reload : reloads) {
      if (reload.layer == layer && (reload.ticket == nullptr || !poll(reload.ticket))) return;
    }
    loaded(layer);
  } catch (const Error&) {
    // The copy stream's: kept for those who wait.
  }
}

void Prefetcher::State::bring(LayerId layer) {
  awaited.clear();
  const std::uint8_t bits = get(layer);
  Ticket* ring = (bits & kStreamed) != 0 ? claim(layer) : nullptr;
  if ((bits & kReload) != 0) {
    awaited.reserve(reloads.size() + 1);
    for (Reload& reload : reloads) {
      if (reload.layer != layer) continue;
      if (reload.ticket == nullptr) issue_reload(reload);
      if (!poll(reload.ticket)) awaited.push_back(reload.ticket);
    }
    if (awaited.empty()) loaded(layer);
  }
  if (!poll(ring)) awaited.push_back(ring);
  if ((bits & kBlocks) != 0) {
    Ticket* part = claim_blocks(layer);
    if (!poll(part)) awaited.push_back(part);
  }
}

Ticket* Prefetcher::State::claim_blocks(LayerId layer) {
  const std::uint32_t buffer = block_schedule.buffer_of(layer);
  switch (block_schedule.claim(layer)) {
    case LayerSchedule::Claim::hit:
      break;
    case LayerSchedule::Claim::conflict:
      throw Error(ErrorKind::invalid_state,
                  "wait(" + std::to_string(layer) + ") needs the buffer in which layer " +
                      std::to_string(block_schedule.open(buffer)) + " still reads its KV blocks; nothing was changed; call done(" +
                      std::to_string(block_schedule.open(buffer)) + ") first, or begin the pass again",
                  {{"layer", std::int64_t{layer}}, {"open_layer", std::int64_t{block_schedule.open(buffer)}},
                   {"buffer", std::int64_t{buffer}}});
    case LayerSchedule::Claim::miss:
      ++stats.misses;
      try {
        issue_blocks({layer, buffer});
      } catch (...) {
        block_schedule.done(layer);
        throw;
      }
      break;
  }
  return block_slots[buffer].ready;
}

Ticket* Prefetcher::State::claim(LayerId layer) {
  const std::uint32_t at = position[layer];
  const std::uint32_t buffer = schedule.buffer_of(at);
  switch (schedule.claim(at)) {
    case LayerSchedule::Claim::hit:
      break;
    case LayerSchedule::Claim::conflict: {
      const LayerId other = streamed[schedule.open(buffer)];
      throw Error(ErrorKind::invalid_state,
                  "wait(" + std::to_string(layer) + ") needs the ring buffer that layer " + std::to_string(other) +
                      " is still using; nothing was changed; call done(" + std::to_string(other) +
                      ") first, or begin the pass again",
                  {{"layer", std::int64_t{layer}}, {"open_layer", std::int64_t{other}}, {"buffer", std::int64_t{buffer}}});
    }
    case LayerSchedule::Claim::miss:
      ++stats.misses;
      try {
        issue_ring({at, buffer});
      } catch (...) {
        schedule.done(at);
        throw;
      }
      break;
  }
  return slots[buffer].ready;
}

void Prefetcher::State::enter(LayerId layer, StreamHandle reader) {
  if ((get(layer) & kStreamed) != 0) slots[schedule.buffer_of(position[layer])].open.push_back(reader);
  if ((get(layer) & kBlocks) != 0) block_slots[block_schedule.buffer_of(layer)].open.push_back(reader);
}

bool Prefetcher::State::finish(const LayerSchedule& uses, std::vector<Slot>& of, std::uint32_t position, StreamHandle reader) {
  const std::uint32_t buffer = uses.buffer_of(position);
  if (uses.open(buffer) != position) return false;
  Slot& slot = of[buffer];
  if (reader != 0) record_reader(slot, reader);
  const auto at = std::find(slot.open.begin(), slot.open.end(), reader);
  if (at != slot.open.end()) {
    slot.open.erase(at);
  } else if (!slot.open.empty()) {
    slot.open.pop_back();
  }
  return slot.open.empty();
}

bool Prefetcher::State::early(LayerId layer, StreamHandle reader) {
  if (!simulator || released_s[layer] == 0) return false;
  if (released_s[layer] <= simulator->now()) released_s[layer] = 0;  // for good: time does not go back
  return reader != 0 && released_s[layer] > simulator->stream_end(reader);
}

bool Prefetcher::State::any_open() const noexcept {
  for (std::uint32_t s = 0; s < slots.size(); ++s) {
    if (schedule.open(s) != LayerSchedule::kNone) return true;
  }
  for (std::uint32_t s = 0; s < block_slots.size(); ++s) {
    if (block_schedule.open(s) != LayerSchedule::kNone) return true;
  }
  return false;
}

}  // namespace remap
