// Plans between any two states of a tenant's pages against the obvious: whose each page is, what each region shows and what is
// loaded, by the words of tenant_pages.h, kept in maps; each plan is carried out there step by step.
#include "remap/tenant_pages.h"
#include "remap/transition_copies.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "check.h"

namespace remap {
namespace {

constexpr TenantId kTenant = 7;
constexpr RegionId kRing = 99;
constexpr RegionId kFirstRegion = 10;

TenantPages tenant(const std::vector<std::uint32_t>& sizes, std::mt19937& random, bool scattered) {
  TenantPages made;
  made.tenant = kTenant;
  made.ring_region = kRing;
  made.ring_preference = {0, static_cast<LayerId>(sizes.size() / 2)};
  PageList pages;
  for (const std::uint32_t size : sizes) {
    for (std::uint32_t at = 0; at < size; ++at) pages.push_back(static_cast<PageId>(pages.size()));
  }
  if (scattered) std::shuffle(pages.begin(), pages.end(), random);
  auto next = pages.begin();
  for (LayerId layer = 0; layer < sizes.size(); ++layer) {
    Layer its;
    its.own = std::make_shared<const PageList>(next, next + sizes[layer]);
    its.pages = sizes[layer];
    its.region = kFirstRegion + layer;
    next += sizes[layer];
    made.layers.push_back(its);
    made.buffer_pages = std::max(made.buffer_pages, sizes[layer]);
  }
  return made;
}

Owner owner_in(const TenantPages& pages, LayerId layer, std::size_t at) {
  const Layer& its = pages.layers[layer];
  const PageId page = (*its.own)[at];
  if (!its.hidden() && at < its.own->size() - its.tail) return Owner::params;
  for (const PageList& buffer : pages.ring) {
    if (std::count(buffer.begin(), buffer.end(), page) != 0) return Owner::ring;
  }
  return std::count(pages.lent.begin(), pages.lent.end(), page) != 0 ? Owner::free : Owner::kv;
}

struct World {
  std::map<PageId, Owner> owner;
  std::map<RegionId, PageList> shown, home;
  std::map<std::size_t, PageId> ring;
  std::set<PageId> loaded;

  explicit World(const TenantPages& now) {
    for (const Layer& layer : now.layers) {
      shown[layer.region] = home[layer.region] = *layer.own;
      for (const PageId page : *layer.own) {
        owner[page] = Owner::params;
        loaded.insert(page);
      }
    }
  }

  void carry_out(const TenantPages& now, const Transition& plan) {
    std::set<PageId> changed;
    std::map<std::size_t, PageId> in_use;
    for (std::size_t index = 0; index < now.ring.size(); ++index) {
      for (std::size_t at = 0; at < now.depth(); ++at) in_use[(index + 1) * now.buffer_pages - now.depth() + at] = now.ring[index][at];
    }
    for (const Step& step : plan.plan.steps) {
      if (step.kind == Step::Kind::set_owner) {
        const SetOwner& its = step.set_owner;
        CHECK(its.tenant == kTenant && its.from != its.to && !its.pages.empty());
        for (const PageId page : its.pages) {
          CHECK(changed.insert(page).second && owner.at(page) == its.from);
          owner[page] = its.to;
          loaded.erase(page);  // whoever has it writes there, or it holds what somebody wrote
        }
      } else if (step.kind == Step::Kind::set_home) {
        home[step.set_home.region] = step.set_home.pages;
      } else if (step.point.region == kRing) {
        CHECK(!step.point.deferred);
        for (std::size_t at = 0; at < step.point.pages.size(); ++at) {
          const std::size_t slot = step.point.first_slot + at;
          CHECK(in_use.count(slot) == 0 || in_use[slot] != step.point.pages[at]);  // it shows that already
          ring[slot] = step.point.pages[at];
        }
      } else {
        CHECK(step.point.deferred && step.point.first_slot == 0 && step.point.region == kFirstRegion + step.point.layer);
        CHECK(shown[step.point.region] != step.point.pages);
        for (const PageId page : step.point.pages) {  // a layer shows no page that is KV at that moment
          CHECK(page == kNoPage || (owner.at(page) != Owner::kv && owner.at(page) != Owner::free));
        }
        shown[step.point.region] = step.point.pages;
      }
    }
    for (const Transition::Load& load : plan.home) {
      for (std::uint32_t at = load.first; at < load.first + load.pages; ++at) {
        CHECK(loaded.insert((*plan.there.layers[load.layer].own)[at]).second);  // it had been away
      }
    }
  }

  void check(const TenantPages& now, const TenantPages& wanted, const Transition& plan, const std::map<PageId, Owner>& had) {
    const TenantPages& there = plan.there;
    CHECK(there.ring == wanted.ring && there.streamed() == wanted.streamed());
    std::set<PageId> its;
    for (LayerId layer = 0; layer < there.layers.size(); ++layer) {
      const Layer& each = there.layers[layer];
      for (std::size_t at = 0; at < each.own->size(); ++at) {
        CHECK(owner.at((*each.own)[at]) == owner_in(there, layer, at));
        its.insert((*each.own)[at]);
        const bool resident = each.where == Where::home && at < each.own->size() - each.tail;
        CHECK(!resident || loaded.count((*each.own)[at]) != 0);
      }
      const PageList shows = there.shows(layer);
      CHECK(shown[each.region] == (shows.empty() ? PageList(shown[each.region].size(), kNoPage) : shows));
      // The same page as the slot of the ring's region to which the layer's copy is brought.
      const std::vector<LayerId> order = there.streamed();
      for (std::uint32_t at = each.size() - each.tail; each.where == Where::home && at < each.size(); ++at) {
        const auto place = std::find(order.begin(), order.end(), layer) - order.begin();
        const std::size_t buffer = static_cast<std::size_t>(place) % there.ring.size();
        CHECK(ring.at((buffer + 1) * there.buffer_pages - each.size() + at) == shows[at]);
      }
      if (each.where == Where::cold || now.layers[layer].where == Where::cold) CHECK(home[each.region] == *each.own);
    }
    PageList kv;
    for (const PageId page : its) {
      if (owner.at(page) == Owner::kv) kv.push_back(page);
    }
    CHECK(there.kv_from_homes() == kv);
    PageList gained, lost;
    for (const auto& [page, before] : had) {
      if (owner[page] == Owner::kv && before != Owner::kv) gained.push_back(page);
      if (owner[page] != Owner::kv && before == Owner::kv) lost.push_back(page);
      const bool kept = its.count(page) != 0 || owner[page] == before || before == Owner::params || before == Owner::ring;
      CHECK(kept);  // of a home that went the KV stays
    }
    const auto sorted = [](PageList pages) { return std::sort(pages.begin(), pages.end()), pages; };
    CHECK(sorted(plan.gained) == gained && sorted(plan.lost) == lost);
    bool moves = false;
    for (std::size_t index = 0; index < now.ring.size(); ++index) {
      for (std::size_t distance = 1; distance <= now.depth(); ++distance) {
        const bool stays = index < there.ring.size() && distance <= there.depth() &&
                           there.ring[index][there.depth() - distance] == now.ring[index][now.depth() - distance];
        moves = moves || !stays;
      }
    }
    CHECK(plan.ring_moves == moves && plan.ring_changes == (now.ring != there.ring));
    CHECK(plan_between(there, there).plan.steps.empty());
  }
};

Streaming draw(std::mt19937& random, const TenantPages& now, const std::vector<bool>& allowed) {
  const auto below = [&](std::size_t end) { return std::uniform_int_distribution<std::size_t>(0, end - 1)(random); };
  Streaming target{std::vector<std::uint32_t>(now.layers.size(), 0), static_cast<std::uint32_t>(1 + below(2)), 0};
  const auto tail = static_cast<std::uint32_t>(1 + below(4));
  std::size_t count = 0, pages = 0;
  for (LayerId layer = 0; layer < now.layers.size(); ++layer) {
    if (!allowed[layer] || below(10) < 3) continue;
    target.tails[layer] = std::min(tail, static_cast<std::uint32_t>(now.layers[layer].own->size()));
    target.depth = std::max(target.depth, target.tails[layer]);
    pages += target.tails[layer];
    ++count;
  }
  if (count > target.buffers && pages >= std::size_t{target.buffers} * target.depth) return target;
  return {std::vector<std::uint32_t>(now.layers.size(), 0), 1, 0};
}

TEST(a_plan_ends_in_the_state_that_it_was_made_for) {
  std::map<std::string, int> seen;
  for (unsigned seed = 0; seed < 500; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](std::size_t end) { return std::uniform_int_distribution<std::size_t>(0, end - 1)(random); };
    std::vector<std::uint32_t> sizes(2 + below(6));
    for (std::uint32_t& size : sizes) size = static_cast<std::uint32_t>(1 + below(5));
    TenantPages now = tenant(sizes, random, seed % 2 != 0);
    World world(now);
    for (int step = 0; step < 12; ++step) {
      std::vector<bool> some(sizes.size()), home(sizes.size()), unfilled(sizes.size(), false);
      bool cold = false, elsewhere = false;
      for (LayerId layer = 0; layer < sizes.size(); ++layer) {
        const Where where = now.layers[layer].where;
        some[layer] = below(10) < 7;
        home[layer] = some[layer] && where == Where::home;
        cold = cold || where == Where::cold;
        elsewhere = elsewhere || where == Where::elsewhere || where == Where::unfilled;
      }
      TenantPages there = now;
      bool to_free = false;
      std::string kind = "streaming";
      const std::size_t drawn = below(4);
      if (drawn == 1 && !cold) {
        kind = "holding";
        for (LayerId layer = 0; layer < sizes.size(); ++layer) {
          unfilled[layer] = some[layer] && now.layers[layer].where != Where::home && below(2) == 0;
        }
        there = now.holding(some, draw(random, now, home), unfilled);
      } else if (drawn == 2 && !elsewhere) {
        kind = "given up";
        for (const LayerId layer : now.streamed()) some[layer] = true;
        there = now.given_up(some);
        to_free = below(2) == 0;
      } else if (drawn == 3 && cold) {
        kind = "with homes";
        std::set<PageId> used;
        for (const Layer& each : now.layers) used.insert(each.own->begin(), each.own->end());
        PageList spare;
        for (const auto& [page, owner] : world.owner) {
          if (owner == Owner::free && used.count(page) == 0) spare.push_back(page);
        }
        std::vector<std::pair<LayerId, PageList>> homes;
        for (LayerId layer = 0; layer < sizes.size(); ++layer) {
          if (now.layers[layer].where != Where::cold || spare.size() < sizes[layer] || below(2) == 0) continue;
          homes.emplace_back(layer, PageList(spare.end() - sizes[layer], spare.end()));
          spare.resize(spare.size() - sizes[layer]);
        }
        there = now.with_homes(homes);
      } else {
        there = now.with_streaming(draw(random, now, home));
        to_free = below(2) == 0;
        const PageList fetched = now.to_fetch(there.streaming());
        const Transition plan = plan_between(now, there, to_free);
        PageList from_lent;
        for (const Step& each : plan.plan.steps) {
          if (each.kind != Step::Kind::set_owner || each.set_owner.from != Owner::free) continue;
          from_lent.insert(from_lent.end(), each.set_owner.pages.begin(), each.set_owner.pages.end());
        }
        std::sort(from_lent.begin(), from_lent.end());
        CHECK(elsewhere || from_lent == fetched);
      }
      ++seen[kind];
      const Transition plan = plan_between(now, there, to_free);
      const std::map<PageId, Owner> had = world.owner;
      world.carry_out(now, plan);
      world.check(now, there, plan, had);
      now = plan.there;
    }
  }
  for (const char* kind : {"streaming", "holding", "given up", "with homes"}) CHECK(seen[kind] > 100);
}

TEST(pages_of_the_ring_stay_where_they_are) {
  std::mt19937 random(1);
  const TenantPages now = tenant({4, 4, 4, 4, 4, 4}, random, false);
  const TenantPages one = now.with_streaming({{2, 2, 2, 2, 0, 0}, 1, 2});
  const TenantPages two = one.with_streaming({{2, 2, 2, 2, 2, 2}, 2, 2});
  CHECK(one.ring.size() == 1 && two.ring.size() == 2 && two.ring[0] == one.ring[0]);
  CHECK(!plan_between(one, two).ring_moves && plan_between(two, one).ring_moves);
  const TenantPages deeper = two.with_streaming({{3, 3, 3, 3, 3, 3}, 2, 3});
  CHECK(PageList(deeper.ring[1].begin() + 1, deeper.ring[1].end()) == two.ring[1]);
}

TEST(what_cannot_stream_is_refused) {
  std::mt19937 random(1);
  const TenantPages now = tenant({2, 2, 2}, random, false);
  CHECK_ERROR(ErrorKind::invalid_argument, now.with_streaming({{2, 2, 0}, 2, 2}));
  CHECK_ERROR(ErrorKind::invalid_argument, now.with_streaming({{1, 1, 1}, 2, 2}));
  CHECK(!now.ring_of({{1, 1, 1}, 2, 2}).has_value());
}

TEST(plans_of_one_change_are_as_one) {
  std::mt19937 random(1);
  const TenantPages now = tenant({2, 2, 2, 2, 2, 2}, random, false);
  const TenantPages four = now.with_streaming({{2, 2, 2, 2, 0, 0}, 1, 2}), two = four.with_streaming({{2, 2, 0, 0, 0, 0}, 1, 2});
  const Transition both = plan_between(four, two).followed_by(plan_between(two, two.with_streaming({{2, 2, 2, 0, 0, 0}, 1, 2})));
  CHECK(both.home.size() == 1 && both.home[0].layer == 3 && both.home[0].pages == 2);  // layer 2 streams again
  const StreamConfiguration copies = configuration_of(both, {9, 9, 9, 9, 9, 9}, 5, nullptr, true, 0);
  CHECK(copies.home[0].bytes == 9 && copies.offsets.size() == 3);
}

TEST(free_pages_of_its_own_layers_are_lent) {
  std::mt19937 random(1);
  const TenantPages now = plan_between(tenant({2, 2, 2}, random, false), tenant({2, 2, 2}, random, false).with_streaming({{2, 2, 0}, 1, 2})).there;
  const PageList its = now.kv_from_homes();
  CHECK(its.size() == 2);
  const Transition freed = plan_free_pages(now, {its[0], 50}, false);
  CHECK(freed.there.lent == PageList{its[0]} && freed.frees && freed.lost == (PageList{its[0], 50}));
  const Transition back = plan_free_pages(freed.there, {its[0]}, true);
  CHECK(back.there == now && back.gained == PageList{its[0]});
}

}  // namespace
}  // namespace remap
