// SPDX-License-Identifier: Apache-2.0
#include "remap/tenant_pages.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>

#include "remap/page_set.h"
#include "remap/error.h"

namespace remap {
namespace {

const std::shared_ptr<const PageList>& no_pages() {
  static const auto none = std::make_shared<const PageList>();
  return none;
}

Error::Value number(std::size_t value) { return static_cast<std::int64_t>(value); }

PageList tail_of(const PageList& pages, std::size_t count) {
  return PageList(pages.end() - static_cast<std::ptrdiff_t>(std::min(count, pages.size())), pages.end());
}

std::size_t sum(const std::vector<std::uint32_t>& tails) { return std::accumulate(tails.begin(), tails.end(), std::size_t{0}); }

std::vector<LayerId> layers_of(const std::vector<std::uint32_t>& tails) {
  std::vector<LayerId> found;
  for (LayerId layer = 0; layer < tails.size(); ++layer) {
    if (tails[layer] != 0) found.push_back(layer);
  }
  return found;
}

Ring choose_ring(const TenantPages& now, const Streaming& target) {
  if (std::optional<Ring> ring = now.ring_of(target)) return *std::move(ring);
  const std::size_t needed = std::size_t{target.buffers} * target.depth;
  throw Error(ErrorKind::invalid_argument,
              std::to_string(target.buffers) + " ring buffers of " + std::to_string(target.depth) + " pages need " +
                  std::to_string(needed) + " pages, but only " + std::to_string(sum(target.tails)) +
                  " stream; nothing was planned; stream more or use fewer buffers",
              {{"buffers", number(target.buffers)}, {"needed_pages", number(needed)}, {"available_pages", number(sum(target.tails))}});
}

// The pages of a ring in the making: a place is a buffer and the distance from its end, 1 for the last page.
class Filling {
 public:
  Filling(const TenantPages& now, const Streaming& target)
      : now_(now), target_(target), pages_(target.buffers, PageList(target.depth, kNoPage)) {}

  std::size_t filled() const noexcept { return filled_; }
  PageId& at(std::size_t buffer, std::size_t distance) { return pages_[buffer][target_.depth - distance]; }
  void put(std::size_t buffer, std::size_t distance, PageId page) {
    at(buffer, distance) = page;
    used_.insert(page);
    ++filled_;
  }
  template <typename Allowed>
  void fill(const std::vector<LayerId>& order, Allowed&& allowed) {
    const auto home = [&](LayerId layer) -> const PageList& { return *now_.layers[layer].own; };
    const auto takes = [&](PageId page) { return !used_.count(page) && allowed(page); };
    // One layer a buffer, each page where it stands at home: the region shows them so from the start.
    for (std::size_t distance = 1; distance <= target_.depth; ++distance) {
      for (std::size_t buffer = 0; buffer < target_.buffers; ++buffer) {
        const LayerId layer = order[buffer];
        if (at(buffer, distance) != kNoPage || distance > target_.tails[layer]) continue;
        const PageId page = home(layer)[home(layer).size() - distance];
        if (takes(page)) put(buffer, distance, page);
      }
    }
    // Then of as few layers as possible, which are the last to come home; a page of each in turn, last ones first.
    std::vector<PageList> free;
    std::size_t found = 0, empty = std::size_t{target_.buffers} * target_.depth - filled_;
    for (const LayerId layer : order) {
      if (found >= empty) break;
      free.emplace_back();
      for (std::size_t distance = 1; distance <= target_.tails[layer]; ++distance) {
        const PageId page = home(layer)[home(layer).size() - distance];
        if (takes(page)) free.back().push_back(page);
      }
      found += free.back().size();
    }
    std::size_t level = 0, next = 0;
    for (std::size_t distance = 1; distance <= target_.depth; ++distance) {
      for (std::size_t buffer = 0; buffer < target_.buffers; ++buffer) {
        if (at(buffer, distance) != kNoPage) continue;
        if (found == 0) return;
        while (level >= free[next].size()) step(free.size(), level, next);
        put(buffer, distance, free[next][level]);
        --found;
        step(free.size(), level, next);
      }
    }
  }
  Ring take() { return std::move(pages_); }

 private:
  static void step(std::size_t lists, std::size_t& level, std::size_t& next) {
    if (++next < lists) return;
    next = 0;
    ++level;
  }
  const TenantPages& now_;
  const Streaming& target_;
  Ring pages_;
  PageSet used_;
  std::size_t filled_ = 0;
};

}  // namespace

// ---- looking --------------------------------------------------------------------------------------------------------

Streaming TenantPages::streaming() const {
  Streaming found{{}, static_cast<std::uint32_t>(ring.size()), depth()};
  for (const Layer& layer : layers) found.tails.push_back(layer.tail);
  return found;
}

std::vector<LayerId> TenantPages::streamed() const {
  std::vector<LayerId> found;
  for (LayerId layer = 0; layer < layers.size(); ++layer) {
    if (layers[layer].tail != 0) found.push_back(layer);
  }
  return found;
}

bool TenantPages::for_good() const noexcept {
  return std::any_of(layers.begin(), layers.end(), [](const Layer& each) {
    return each.where == Where::home && each.tail != 0 && each.own->empty();
  });
}

PageList TenantPages::away(LayerId layer) const {
  return layers[layer].where == Where::home ? tail_of(*layers[layer].own, layers[layer].tail) : PageList{};
}

std::vector<LayerId> TenantPages::lending() const {
  std::vector<LayerId> found;
  const PageSet others(lent);
  for (const LayerId layer : lent.empty() ? std::vector<LayerId>{} : streamed()) {
    if (others.meets(away(layer))) found.push_back(layer);
  }
  return found;
}

std::vector<LayerId> TenantPages::ring_layers() const {
  std::vector<LayerId> found;
  const PageSet its(ring);
  for (const LayerId layer : streamed()) {
    if (its.meets(*layers[layer].own)) found.push_back(layer);
  }
  return found;
}

PageList TenantPages::kv_from_homes() const {
  PageSet others(ring);
  others.insert(lent);
  PageList found;
  for (LayerId layer = 0; layer < layers.size(); ++layer) {
    for (const PageId page : layers[layer].hidden() ? *layers[layer].own : away(layer)) {
      if (!others.count(page)) found.push_back(page);
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

PageList TenantPages::held() const {
  PageList found;
  for (const PageList& buffer : ring) found.insert(found.end(), buffer.begin(), buffer.end());
  for (const Layer& each : layers) {
    if (each.where == Where::home && !each.own->empty()) found.insert(found.end(), each.own->begin(), each.own->end() - each.tail);
  }
  return found;
}

PageList TenantPages::shows(LayerId layer) const {
  const Layer& its = layers[layer];
  if (its.hidden()) return {};
  if (its.tail == 0) return *its.own;
  PageList found(its.own->begin(), its.own->end() - static_cast<std::ptrdiff_t>(std::min<std::size_t>(its.tail, its.own->size())));
  const std::vector<LayerId> order = streamed();
  const auto place = static_cast<std::size_t>(std::lower_bound(order.begin(), order.end(), layer) - order.begin());
  const PageList tail = tail_of(ring[place % ring.size()], its.tail);
  found.insert(found.end(), tail.begin(), tail.end());
  return found;
}

bool operator==(const TenantPages& left, const TenantPages& right) {
  const auto same = [](const Layer& a, const Layer& b) {
    return a.pages == b.pages && a.tail == b.tail && a.where == b.where && a.region == b.region &&
           (a.own == b.own || *a.own == *b.own);
  };
  return left.tenant == right.tenant && left.ring_region == right.ring_region && left.ring == right.ring &&
         left.ring_preference == right.ring_preference && left.lent == right.lent && left.buffer_pages == right.buffer_pages &&
         left.computed == right.computed &&
         std::equal(left.layers.begin(), left.layers.end(), right.layers.begin(), right.layers.end(), same);
}

// ---- other states -----------------------------------------------------------------------------------------------------

TenantPages TenantPages::with_streaming(const Streaming& target) const {
  const std::size_t streams = layers_of(target.tails).size();
  if (streams != 0 && (target.buffers < 1 || target.buffers >= streams)) {
    throw Error(ErrorKind::invalid_argument,
                std::to_string(streams) + " streamed layers need between 1 and " + std::to_string(streams - 1) +
                    " ring buffers, got " + std::to_string(target.buffers) +
                    ": with as many buffers as layers no page would become free; nothing was planned",
                {{"buffers", number(target.buffers)}, {"streamed", number(streams)}});
  }
  TenantPages there(*this);
  there.ring = choose_ring(*this, target);
  for (LayerId layer = 0; layer < layers.size(); ++layer) there.layers[layer].tail = target.tails[layer];
  return there;
}

TenantPages TenantPages::holding(const std::vector<bool>& held, const Streaming& target, const std::vector<bool>& unfilled) const {
  TenantPages there(*this);
  there.ring = choose_ring(*this, target);
  for (LayerId layer = 0; layer < layers.size(); ++layer) {
    Layer& its = there.layers[layer];
    its.tail = target.tails[layer];
    if (held[layer] && !unfilled[layer]) {
      its.where = Where::home;
    } else {
      its.where = its.own->empty() ? Where::cold : unfilled[layer] ? Where::unfilled : Where::elsewhere;
    }
  }
  return there;
}

TenantPages TenantPages::given_up(const std::vector<bool>& gone) const {
  TenantPages there(*this);
  there.ring.clear();
  there.lent.clear();
  for (LayerId layer = 0; layer < layers.size(); ++layer) {
    Layer& its = there.layers[layer];
    its.tail = 0;
    if (!gone[layer] || its.where != Where::home) continue;
    its.where = Where::cold;
    its.own = no_pages();
  }
  return there;
}

TenantPages TenantPages::with_homes(const std::vector<std::pair<LayerId, PageList>>& homes) const {
  TenantPages there(*this);
  for (const auto& [layer, pages] : homes) {
    Layer& its = there.layers.at(layer);
    its.where = Where::home;
    its.own = std::make_shared<const PageList>(pages);
    its.pages = static_cast<std::uint32_t>(pages.size());
  }
  return there;
}

TenantPages TenantPages::filled(LayerId layer) const {
  TenantPages there(*this);
  there.layers.at(layer).where = Where::home;
  return there;
}

// ---- the ring ---------------------------------------------------------------------------------------------------------

std::optional<Ring> TenantPages::ring_of(const Streaming& target) const {
  const std::vector<std::uint32_t>& tails = target.tails;
  const std::vector<LayerId> chosen = layers_of(tails), present = streamed();
  if (chosen.empty()) return Ring{};
  if (ring.size() == target.buffers && depth() == target.depth) {
    const std::vector<LayerId> giving = ring_layers();
    const auto shorter = [&](LayerId layer) { return tails[layer] < layers[layer].tail; };
    if (std::none_of(giving.begin(), giving.end(), shorter)) return ring;  // the usual case: a ring that stays
  }
  const std::size_t needed = std::size_t{target.buffers} * target.depth;
  if (sum(tails) < needed || chosen.size() < target.buffers) return std::nullopt;
  std::vector<std::size_t> rank(layers.size(), ring_preference.size());
  for (std::size_t place = ring_preference.size(); place-- > 0;) rank[ring_preference[place]] = place;
  // Pages that are neither KV nor lent come first: no block has to move for them. Lent and KV pages count the same.
  const PageSet its(ring);
  PageSet given;
  std::vector<bool> gives(layers.size(), false);
  for (const LayerId layer : present) {
    for (const PageId page : away(layer)) {
      if (its.count(page)) continue;
      given.insert(page);
      gives[layer] = true;
    }
  }
  // First the layers that the ring's region shows already, then those that give nothing else, then large ones.
  std::vector<LayerId> order(chosen);
  std::sort(order.begin(), order.end(), [&](LayerId a, LayerId b) {
    if (rank[a] != rank[b]) return rank[a] < rank[b];
    if (gives[a] != gives[b]) return static_cast<bool>(gives[b]);
    return tails[a] != tails[b] ? tails[a] > tails[b] : a < b;
  });
  PageSet streaming;
  for (const LayerId layer : chosen) streaming.insert(tail_of(*layers[layer].own, tails[layer]));
  Filling made(*this, target);
  for (std::size_t buffer = 0; buffer < std::min<std::size_t>(ring.size(), target.buffers); ++buffer) {
    for (std::size_t distance = 1; distance <= std::min(depth(), target.depth); ++distance) {
      const PageId page = ring[buffer][depth() - distance];
      if (streaming.count(page)) made.put(buffer, distance, page);
    }
  }
  if (made.filled() < needed) made.fill(order, [&](PageId page) { return !given.count(page); });
  if (made.filled() < needed) made.fill(order, [](PageId) { return true; });
  return made.take();
}

PageList TenantPages::to_fetch(const Streaming& target) const {
  if (lent.empty()) return {};
  const PageSet its(choose_ring(*this, target));
  PageSet stay;
  for (LayerId layer = 0; layer < layers.size(); ++layer) {
    for (const PageId page : layers[layer].where == Where::home ? tail_of(*layers[layer].own, target.tails[layer]) : PageList{}) {
      if (!its.count(page)) stay.insert(page);
    }
  }
  PageList found;
  std::copy_if(lent.begin(), lent.end(), std::back_inserter(found), [&](PageId page) { return !stay.count(page); });
  return found;
}

// ---- from one state to another --------------------------------------------------------------------------------------------

namespace {

// Whose a page of a layer is. lent: it is free, or another's.
enum class Whose : std::uint8_t { params, ring, kv, lent, free };

Owner owner_of(Whose whose) {
  switch (whose) {
    case Whose::params: return Owner::params;
    case Whose::ring: return Owner::ring;
    case Whose::kv: return Owner::kv;
    case Whose::lent:
    case Whose::free: break;
  }
  return Owner::free;
}

// The pages that change hands, by owner before and after, in the order of layers and pages.
class Moves {
 public:
  void add(Whose was, Whose becomes, PageId page) {
    const std::pair key{owner_of(was), owner_of(becomes)};
    auto group = std::find_if(groups_.begin(), groups_.end(), [&](const auto& each) { return each.first == key; });
    if (group == groups_.end()) group = groups_.insert(groups_.end(), {key, {}});
    group->second.push_back(page);
  }
  template <typename Chosen>
  PageList pages(Chosen&& chosen) const {
    PageList found;
    for (const auto& [key, pages] : groups_) {
      if (chosen(key.first, key.second)) found.insert(found.end(), pages.begin(), pages.end());
    }
    return found;
  }
  // Pages leave KV first (strict mode unmaps them), and enter KV last (their layers' regions have let go of them by then).
  void append(Plan& plan, TenantId tenant, bool last) const {
    for (const auto& [key, pages] : groups_) {
      if ((key.second == Owner::kv || key.second == Owner::free) != last) continue;
      Step step;
      step.kind = Step::Kind::set_owner;
      step.set_owner = SetOwner{pages, key.first, key.second, tenant};
      plan.steps.push_back(std::move(step));
    }
  }

 private:
  std::vector<std::pair<std::pair<Owner, Owner>, PageList>> groups_;
};

void add_point(Plan& plan, RegionId region, std::size_t slot, PageList pages, bool deferred, LayerId layer) {
  Step step;
  step.kind = Step::Kind::point;
  step.point = Point{region, slot, std::move(pages), deferred, layer};
  plan.steps.push_back(std::move(step));
}

// The ring's region: runs of slots that are to show other pages than the old ring had there.
void add_ring_points(Plan& plan, const TenantPages& now, const Ring& ring) {
  for (std::size_t index = 0; index < ring.size(); ++index) {
    const PageList& fresh = ring[index];
    const PageList old = index < now.ring.size() ? now.ring[index] : PageList{};
    const std::size_t slot = (index + 1) * now.buffer_pages - fresh.size();
    const auto same = [&](std::size_t at) {
      const std::size_t distance = fresh.size() - at;
      return distance <= old.size() && old[old.size() - distance] == fresh[at];
    };
    for (std::size_t first = 0; first < fresh.size(); ++first) {
      std::size_t stop = first;
      while (stop < fresh.size() && !same(stop)) ++stop;
      if (stop > first) {
        const auto begin = fresh.begin() + static_cast<std::ptrdiff_t>(first);
        add_point(plan, now.ring_region, slot + first, PageList(begin, fresh.begin() + static_cast<std::ptrdiff_t>(stop)), false, 0);
      }
      first = stop;
    }
  }
}

void move_pages(const TenantPages& now, const TenantPages& there, bool to_free, Moves& moves, PageList& freed) {
  const PageSet was_ring(now.ring), is_ring(there.ring), lent(now.lent);
  for (LayerId layer = 0; layer < now.layers.size(); ++layer) {
    const Layer &before = now.layers[layer], &after = there.layers[layer];
    const PageList &old = *before.own, &fresh = *after.own;
    const std::size_t had = old.size() - std::min<std::size_t>(before.absent(), old.size());
    const std::size_t has = fresh.size() - std::min<std::size_t>(after.absent(), fresh.size());
    if (before.own != after.own && old != fresh) {  // the home goes or comes with what is the layer's and the ring's
      for (std::size_t at = 0; at < old.size(); ++at) {
        if (at < had || was_ring.count(old[at])) moves.add(at < had ? Whose::params : Whose::ring, Whose::free, old[at]);
      }
      for (std::size_t at = 0; at < fresh.size(); ++at) {
        if (at < has || is_ring.count(fresh[at])) moves.add(Whose::free, at < has ? Whose::params : Whose::ring, fresh[at]);
      }
      continue;
    }
    for (std::size_t at = std::min(had, has); at < old.size(); ++at) {
      const PageId page = old[at];
      const Whose was = at < had               ? Whose::params
                        : was_ring.count(page) ? Whose::ring
                        : lent.count(page)     ? Whose::lent
                                               : Whose::kv;
      Whose becomes = at < has ? Whose::params : is_ring.count(page) ? Whose::ring : Whose::kv;
      if (was == becomes || (was == Whose::lent && becomes == Whose::kv)) continue;
      if (becomes == Whose::kv && to_free) {
        becomes = Whose::free;
        freed.push_back(page);
      }
      moves.add(was, becomes, page);
    }
  }
}

}  // namespace

Transition plan_between(const TenantPages& now, const TenantPages& there, bool to_free) {
  Transition made;
  made.there = there;
  Moves moves;
  PageList freed;
  move_pages(now, there, to_free, moves, freed);
  PageSet fetched(moves.pages([](Owner was, Owner) { return was == Owner::free; }));
  PageList& lent = made.there.lent;
  lent.erase(std::remove_if(lent.begin(), lent.end(), [&](PageId page) { return fetched.count(page); }), lent.end());
  lent.insert(lent.end(), freed.begin(), freed.end());
  std::sort(lent.begin(), lent.end());

  moves.append(made.plan, now.tenant, false);
  add_ring_points(made.plan, now, there.ring);
  for (LayerId layer = 0; layer < now.layers.size(); ++layer) {
    const Layer &before = now.layers[layer], &after = there.layers[layer];
    if (before.tail == 0 && after.tail == 0 && before.where == Where::home && after.where == Where::home) continue;
    const PageList shown = now.shows(layer), shows = there.shows(layer);
    if (shown == shows) continue;
    add_point(made.plan, before.region, 0, shows.empty() ? PageList(shown.size(), kNoPage) : shows, true, layer);
    if (!after.hidden()) made.held.push_back(layer);
  }
  bool same_places = true;
  for (LayerId layer = 0; layer < now.layers.size(); ++layer) {
    const Layer &before = now.layers[layer], &after = there.layers[layer];
    same_places = same_places && (before.where == Where::home) == (after.where == Where::home) &&
                  (before.where == Where::home || *before.own == *after.own);
    if ((before.where == Where::cold) == (after.where == Where::cold)) continue;
    Step step;
    step.kind = Step::Kind::set_home;
    step.set_home = SetHome{before.region, after.where == Where::home ? *after.own : PageList{}};
    made.plan.steps.push_back(std::move(step));
  }
  moves.append(made.plan, now.tenant, true);
  made.frees = !moves.pages([](Owner, Owner becomes) { return becomes == Owner::free; }).empty();
  made.gained = moves.pages([](Owner, Owner becomes) { return becomes == Owner::kv; });
  made.lost = moves.pages([](Owner was, Owner) { return was == Owner::kv; });

  // What comes home: of a layer that was elsewhere, or waited for its bytes, all that does not stream.
  for (LayerId layer = 0; layer < now.layers.size(); ++layer) {
    const Layer &before = now.layers[layer], &after = there.layers[layer];
    const bool gone = before.where != Where::home;
    if (same_places ? before.tail == 0 : (before.tail == 0 && !gone) || after.where != Where::home) continue;
    const std::uint32_t had = gone ? after.size() : before.tail;
    if (after.tail < had) made.home.push_back({layer, after.size() - had, had - after.tail});
  }
  made.ring_changes = there.ring != now.ring;
  for (std::size_t index = 0; index < now.ring.size(); ++index) {
    const PageList& old = now.ring[index];
    const PageList fresh = index < there.ring.size() ? there.ring[index] : PageList{};
    made.ring_moves = made.ring_moves || old.size() > fresh.size() || !std::equal(old.rbegin(), old.rend(), fresh.rbegin());
  }
  return made;
}

Transition plan_free_pages(const TenantPages& now, const PageList& pages, bool give) {
  Transition made;
  made.there = now;
  Step step;
  step.kind = Step::Kind::set_owner;
  step.set_owner = SetOwner{pages, give ? Owner::free : Owner::kv, give ? Owner::kv : Owner::free, now.tenant};
  made.plan.steps.push_back(std::move(step));
  made.frees = !give;
  (give ? made.gained : made.lost) = pages;
  // Pages of the tenant's own streamed layers are lent exactly while they are not its KV.
  PageList& lent = made.there.lent;
  const PageSet named(pages);
  if (give) {
    lent.erase(std::remove_if(lent.begin(), lent.end(), [&](PageId page) { return named.count(page); }), lent.end());
  } else {
    const PageList its = now.kv_from_homes();
    std::copy_if(its.begin(), its.end(), std::back_inserter(lent), [&](PageId page) { return named.count(page); });
    std::sort(lent.begin(), lent.end());
  }
  return made;
}

std::vector<LayerId> Transition::reload() const {
  std::vector<LayerId> found;
  for (const Load& load : home) found.push_back(load.layer);
  return found;
}

Transition Transition::followed_by(const Transition& later) const {
  Transition both(later);
  std::map<LayerId, std::pair<std::uint32_t, std::uint32_t>> loads;  // layer -> pages from, and to before
  for (const Transition* each : {this, &later}) {
    for (const Load& load : each->home) {
      const auto found = loads.emplace(load.layer, std::pair(load.first, load.first)).first;
      found->second.first = std::min(found->second.first, load.first);
      found->second.second = std::max(found->second.second, load.first + load.pages);
    }
  }
  both.home.clear();
  for (const auto& [layer, pages] : loads) {
    const Layer& its = later.there.layers[layer];
    const std::uint32_t end = std::min(pages.second, its.size() - its.tail);  // the rest streams again
    if (pages.first < end && its.where == Where::home) both.home.push_back({layer, pages.first, end - pages.first});
  }
  both.held.insert(both.held.end(), held.begin(), held.end());
  std::sort(both.held.begin(), both.held.end());
  both.held.erase(std::unique(both.held.begin(), both.held.end()), both.held.end());
  const auto elsewhere = [&](LayerId layer) { return later.there.layers[layer].where != Where::home; };
  both.held.erase(std::remove_if(both.held.begin(), both.held.end(), elsewhere), both.held.end());
  both.ring_changes = both.ring_changes || ring_changes;
  both.ring_moves = both.ring_moves || ring_moves;
  both.frees = both.frees || frees;
  return both;
}

}  // namespace remap
