// SPDX-License-Identifier: Apache-2.0
// Prefetcher::configure: from one set of streamed layers to the next, all or nothing.
#include <algorithm>

#include "schedule/prefetch_state.h"

namespace remap {

namespace {

std::int64_t number(std::size_t value) { return static_cast<std::int64_t>(value); }

}  // namespace

void Prefetcher::State::validate(const StreamConfiguration& c) const {
  const std::size_t count = layers.size();
  std::vector<std::uint8_t> named(count, 0);
  const auto name = [&](LayerId layer, std::uint8_t as, const char* list) {
    if (layer >= count) {
      refuse(std::string(list) + " names layer " + std::to_string(layer) + ", expected less than " + std::to_string(count),
             {{"layer", std::int64_t{layer}}, {"layers", number(count)}});
    }
    if ((named[layer] & as) != 0) {
      refuse(std::string(list) + " names layer " + std::to_string(layer) + " twice",
             {{"layer", std::int64_t{layer}}});
    }
    named[layer] = static_cast<std::uint8_t>(named[layer] | as);
  };
  for (std::size_t j = 0; j < c.streamed.size(); ++j) {
    const LayerId layer = c.streamed[j];
    name(layer, kStreamed, "streamed");
    if (j > 0 && c.streamed[j - 1] > layer) {
      refuse("streamed must be ascending, but layer " + std::to_string(layer) + " follows layer " +
                 std::to_string(c.streamed[j - 1]),
             {{"layer", std::int64_t{layer}}});
    }
    const LayerMemory& memory = layers[layer];
    if (memory.master == nullptr || memory.bytes == 0) {
      refuse("layer " + std::to_string(layer) + " has no master copy to stream from", {{"layer", std::int64_t{layer}}});
    }
    if (c.offsets.empty() && memory.bytes > c.ring_bytes) {
      refuse("layer " + std::to_string(layer) + " has " + std::to_string(memory.bytes) +
                 " bytes, more than a ring buffer of " + std::to_string(c.ring_bytes),
             {{"layer", std::int64_t{layer}}, {"bytes", number(memory.bytes)}, {"ring_bytes", number(c.ring_bytes)}});
    }
  }
  if (!c.streamed.empty()) {
    if (c.ring.empty() || c.ring.size() >= LayerSchedule::kNone) {
      refuse("streaming " + std::to_string(c.streamed.size()) + " layers needs a ring of at least one buffer",
             {{"streamed", number(c.streamed.size())}, {"buffers", number(c.ring.size())}});
    }
    std::vector<std::uintptr_t> sorted;
    for (const std::byte* buffer : c.ring) sorted.push_back(reinterpret_cast<std::uintptr_t>(buffer));
    std::sort(sorted.begin(), sorted.end());
    for (std::size_t s = 0; s < sorted.size(); ++s) {
      if (sorted[s] == 0 || sorted[s] + c.ring_bytes < sorted[s] || (s > 0 && sorted[s] - sorted[s - 1] < c.ring_bytes)) {
        refuse("the ring's buffers must be separate memory of " + std::to_string(c.ring_bytes) + " bytes each",
               {{"buffers", number(c.ring.size())}, {"ring_bytes", number(c.ring_bytes)}});
      }
    }
  }
  for (const LayerId layer : c.held) name(layer, kHeld, "held");
  for (const LayerId layer : c.elsewhere) name(layer, static_cast<std::uint8_t>(kStreamed | kReload), "elsewhere");
  validate_slices(c);
}

// Pre: the layers of `streamed` are good.
void Prefetcher::State::validate_slices(const StreamConfiguration& c) const {
  for (const auto* list : {&c.offsets, &c.places}) {
    if (list->empty() || list->size() == c.streamed.size()) continue;
    refuse("offsets and places have one entry for each of the " + std::to_string(c.streamed.size()) + " streamed layers, or none",
           {{"streamed", number(c.streamed.size())}, {"entries", number(list->size())}});
  }
  std::vector<std::size_t> resident(layers.size());  // bytes of each layer that are to be at home
  for (std::size_t layer = 0; layer < layers.size(); ++layer) resident[layer] = layers[layer].bytes;
  for (std::size_t j = 0; j < c.streamed.size(); ++j) {
    const LayerId layer = c.streamed[j];
    const std::size_t offset = c.offsets.empty() ? 0 : c.offsets[j];
    const std::size_t place = c.places.empty() ? 0 : c.places[j];
    const std::size_t bytes = layers[layer].bytes;
    if (offset >= bytes || place > c.ring_bytes || bytes - offset > c.ring_bytes - place) {
      refuse("bytes " + std::to_string(offset) + " to " + std::to_string(bytes) + " of layer " + std::to_string(layer) +
                 " are none, or do not fit a ring buffer of " + std::to_string(c.ring_bytes) + " bytes at " + std::to_string(place),
             {{"layer", std::int64_t{layer}}, {"offset", number(offset)}, {"bytes", number(bytes)}, {"place", number(place)},
              {"ring_bytes", number(c.ring_bytes)}});
    }
    resident[layer] = offset;
  }
  for (const HomePart& part : c.home) {
    if (part.layer >= layers.size()) {
      refuse("home names layer " + std::to_string(part.layer) + ", expected less than " + std::to_string(layers.size()),
             {{"layer", std::int64_t{part.layer}}, {"layers", number(layers.size())}});
    }
    const LayerMemory& memory = layers[part.layer];
    std::size_t& until = resident[part.layer];
    if (memory.master == nullptr || memory.region == nullptr || part.bytes == 0 || part.first >= until ||
        part.bytes > until - part.first) {
      refuse("bytes " + std::to_string(part.first) + " to " + std::to_string(part.first + part.bytes) + " of layer " +
                 std::to_string(part.layer) + " do not come home: only what lies before " + std::to_string(until) +
                 " is there, and a layer has one part at most",
             {{"layer", std::int64_t{part.layer}}, {"first", number(part.first)}, {"bytes", number(part.bytes)},
              {"until", number(until)}});
    }
    until = 0;
  }
}

std::vector<Reload> Prefetcher::State::outstanding(const StreamConfiguration& c) const {
  std::vector<std::size_t> resident(layers.size());
  for (std::size_t layer = 0; layer < layers.size(); ++layer) resident[layer] = layers[layer].bytes;
  for (std::size_t j = 0; j < c.streamed.size(); ++j) resident[c.streamed[j]] = c.offsets.empty() ? 0 : c.offsets[j];
  for (const LayerId layer : c.elsewhere) resident[layer] = 0;
  std::vector<Reload> next;
  next.reserve(reloads.size() + c.home.size());
  for (const HomePart& part : c.home) next.push_back({part.layer, part.first, part.bytes, nullptr});
  const std::size_t named = next.size();
  for (const Reload& old : reloads) {
    if (old.first >= resident[old.layer]) continue;  // streams from now on, or is computed elsewhere
    const std::size_t end = std::min(old.first + old.bytes, resident[old.layer]);
    Reload* part = nullptr;
    for (std::size_t i = 0; i < named; ++i) {
      const bool meets = next[i].layer == old.layer && next[i].first < end && old.first < next[i].first + next[i].bytes;
      if (meets) part = &next[i];
    }
    if (part == nullptr) {
      next.push_back({old.layer, old.first, end - old.first, old.ticket});
      continue;
    }
    // An earlier copy of these bytes is older than their pages: all of both is loaded anew.
    const std::size_t first = std::min(part->first, old.first);
    part->bytes = std::max(part->first + part->bytes, end) - first;
    part->first = first;
  }
  std::sort(next.begin(), next.end(), [](const Reload& a, const Reload& b) {
    return a.layer != b.layer ? a.layer < b.layer : a.first < b.first;
  });
  return next;
}

void Prefetcher::configure(const StreamConfiguration& c) {
  guard();
  State& s = *state_;
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (s.in_pass.load(std::memory_order_relaxed) || s.any_open()) {
    throw Error(ErrorKind::invalid_state,
                "configure inside a pass, or while a layer is waited for and not done; nothing was changed; call end_pass() first");
  }
  s.validate(c);
  s.recover();
  s.collect();

  // Everything that can fail is made before anything changes.
  std::vector<std::uint8_t> bits(count_);
  for (LayerId layer = 0; layer < count_; ++layer) bits[layer] = static_cast<std::uint8_t>(s.get(layer) & ~kStreamed);
  for (const LayerId layer : c.streamed) bits[layer] = static_cast<std::uint8_t>((bits[layer] & kHeld) | kStreamed);
  for (const HomePart& part : c.home) bits[part.layer] = static_cast<std::uint8_t>(bits[part.layer] & ~kFailed);
  for (const LayerId layer : c.elsewhere) bits[layer] = static_cast<std::uint8_t>(bits[layer] & (kHeld | kFailed));
  std::vector<Reload> reloads = s.outstanding(c);
  for (const Reload& reload : reloads) bits[reload.layer] = static_cast<std::uint8_t>(bits[reload.layer] | kReload);
  for (const LayerId layer : c.held) bits[layer] = static_cast<std::uint8_t>((bits[layer] & ~kFailed) | kHeld);
  const auto buffers = static_cast<std::uint32_t>(c.streamed.empty() ? 0 : c.ring.size());
  std::vector<LayerId> streamed = c.streamed;
  std::vector<Slice> slices(streamed.size());
  for (std::size_t j = 0; j < slices.size(); ++j) {
    slices[j] = {c.offsets.empty() ? 0 : c.offsets[j], c.places.empty() ? 0 : c.places[j]};
  }
  std::vector<Slot> slots(buffers);
  std::vector<std::uint32_t> origin(buffers, LayerSchedule::kNone);    // the old slot at the same address
  std::vector<std::uint32_t> contents(buffers, LayerSchedule::kNone);  // what it has, in new positions
  std::vector<bool> stays(s.slots.size(), false);
  std::size_t leaving = 0;
  for (std::uint32_t b = 0; b < buffers; ++b) {
    slots[b].address = c.ring[b];
    for (std::uint32_t old = 0; old < s.slots.size(); ++old) {
      if (s.slots[old].address != c.ring[b]) continue;
      origin[b] = old;
      stays[old] = true;
      const std::uint32_t had = s.schedule.content(old);
      if (had == LayerSchedule::kNone || c.fresh) continue;
      const auto at = std::lower_bound(streamed.begin(), streamed.end(), s.streamed[had]);
      if (at == streamed.end() || *at != s.streamed[had]) continue;
      const auto j = static_cast<std::uint32_t>(at - streamed.begin());
      if (j % buffers == b && slices[j] == s.slices[had]) contents[b] = j;
    }
  }
  for (std::size_t old = 0; old < s.slots.size(); ++old) {
    if (!stays[old]) leaving += s.slots[old].readers.size();
  }
  s.spare.reserve(s.spare.size() + leaving + buffers);
  LayerSchedule schedule;
  schedule.configure(static_cast<std::uint32_t>(streamed.size()), buffers, contents);
  // Two copies a buffer may be under way when passes follow each other closely; more tickets come when they are needed.
  const std::size_t wanted = std::min(kTickets, std::size_t{2} * buffers + reloads.size());
  while (s.free.size() < wanted) s.grow();
  const StreamHandle copies = s.stream.load(std::memory_order_relaxed);
  while (s.spare.size() < buffers) s.spare.push_back(s.backend->create_event(false));  // kept, whatever happens
  // Readers of memory that leaves the ring: it may be part of what is written next. Of a buffer that stays, pages may have
  // come home.
  for (std::size_t old = 0; old < s.slots.size(); ++old) {
    if (stays[old] && c.home.empty()) continue;
    for (const Reader& reader : s.slots[old].readers) s.backend->stream_wait(copies, reader.event);
  }
  if (c.after != 0) s.backend->stream_wait(copies, c.after);

  // From here nothing throws.
  for (std::uint32_t b = 0; b < buffers; ++b) {
    if (origin[b] == LayerSchedule::kNone) continue;
    Slot& old = s.slots[origin[b]];
    slots[b].readers.swap(old.readers);
    if (contents[b] != LayerSchedule::kNone) std::swap(slots[b].ready, old.ready);
  }
  for (Slot& old : s.slots) {
    s.unref(std::exchange(old.ready, nullptr));
    // The copy stream waits for the recordings made; their events may be used for others.
    for (const Reader& reader : old.readers) s.spare.push_back(reader.event);
  }
  s.slots.swap(slots);
  s.streamed.swap(streamed);
  s.slices.swap(slices);
  s.schedule = std::move(schedule);

  for (std::uint32_t j = 0; j < s.streamed.size(); ++j) s.position[s.streamed[j]] = j;
  for (const Reload& reload : reloads) {
    if (reload.ticket != nullptr) ++reload.ticket->refs;
  }
  for (const Reload& old : s.reloads) s.unref(old.ticket);  // reloads wanted no longer, or counted twice by now
  s.reloads.swap(reloads);
  for (LayerId layer = 0; layer < count_; ++layer) {
    if ((bits[layer] & kFailed) == 0) s.errors[layer] = nullptr;
    s.set(layer, bits[layer]);  // once: no thread may see a layer ready in between
  }
  s.pump();
}

}  // namespace remap
