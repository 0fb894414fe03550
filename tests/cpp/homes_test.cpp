// Homes that plans set: a layer gives its pages up for good, another one gets a home of them, and back; refused and undone.
#include <cstring>

#include "plans.h"

using namespace remap;
using namespace remap::testing;

namespace {

constexpr std::size_t kPage = HostArena::kPage;
constexpr TenantId kCold = 2;

// Beside TwoLayers another tenant, whose layer of two pages has no home, and in whose KV region 2 3 4 5 have places.
struct World : TwoLayers {
  RegionId rest = 0, cold = 0, cold_kv = 0;

  explicit World(Mode mode, bool exchange = true) : TwoLayers(mode, exchange, 8, {4, 5}) {
    std::memset(arena->address(one), 1, 2 * kPage);
    std::memset(arena->address(two), 2, 2 * kPage);
    const std::vector<PageId> own = arena->take(1, Owner::params, kCold, {4, 5});
    rest = arena->add_layer_region(kCold, "rest", own);
    std::memset(arena->address(rest), 3, kPage);
    cold = arena->add_empty_layer_region(kCold, "cold", 2, own[0]);
    cold_kv = arena->add_kv_region(kCold, 4);
    arena->designate(cold_kv, 0, {2, 3, 4, 5});
    arena->check();
  }
  bool reads(RegionId region, int value) const {
    const std::byte* at = arena->address(region);
    return at[0] == static_cast<std::byte>(value) && at[2 * kPage - 1] == static_cast<std::byte>(value);
  }
  Step home(RegionId region, std::vector<PageId> pages) const {
    Step step;
    step.kind = Step::Kind::set_home;
    step.set_home = {region, std::move(pages)};
    return step;
  }
  std::vector<Step> give_up() const {
    return {point(two, {kNoPage, kNoPage}, true, 1), home(two, {}), owner({2, 3}, Owner::params, Owner::free)};
  }
  std::vector<Step> come(RegionId region, std::vector<PageId> pages, TenantId tenant) const {
    return {home(region, pages), owner(pages, Owner::kv, Owner::params, tenant), point(region, pages, true, 0)};
  }
  Plan sweep() const {
    Plan all = plan(give_up());
    all.steps.push_back(owner({4, 5}, Owner::free, Owner::kv));
    return all;
  }
  void intact() const { CHECK(reads(one, 1) && reads(two, 2)); }
  void reached() {
    apply({owner({2, 3}, Owner::free, Owner::kv, kCold)});
    decide();
    apply(come(cold, {3, 2}, kCold));
    decide();
    CHECK((arena->shown(cold) == std::vector<PageId>{3, 2}) && reads(cold, 0) && reads(one, 1));
  }
};

TEST(pages_of_a_layer_become_another_tenants_layer) {
  everywhere<World>([](World& world) {
    CHECK(world.arena->mode() == Mode::strict || world.arena->address(world.cold)[2 * kPage - 1] == std::byte{3});
    const auto observer = std::make_shared<Observer>();
    for (int times = 1; times <= 3; ++times) {
      world.apply(world.give_up());
      world.decide(observer);
      CHECK(world.arena->counts()[Owner::free] == 5);
      world.apply({owner({2, 3}, Owner::free, Owner::kv, kCold)});
      world.decide();
      world.apply(world.come(world.cold, {3, 2}, kCold));
      world.decide(observer);
      CHECK(world.reads(world.cold, 0));  // not what layer two left there
      std::memset(world.arena->address(world.cold), 7, 2 * kPage);
      // The first one comes home to other pages meanwhile, and then to those that it had.
      world.apply({owner({4, 5}, Owner::free, Owner::kv)});
      world.decide();
      world.apply(world.come(world.two, {5, 4}, kTenant));
      world.decide(observer);
      CHECK((world.arena->shown(world.two) == std::vector<PageId>{5, 4}) && world.arena->counts()[Owner::params] == 7);
      std::memset(world.arena->address(world.two), 2, 2 * kPage);
      CHECK(world.reads(world.cold, 7) && world.reads(world.two, 2));
      world.apply({point(world.cold, {kNoPage, kNoPage}, true, 0), world.home(world.cold, {}),
                   owner({2, 3}, Owner::params, Owner::free, kCold)});
      world.decide();
      world.apply({point(world.two, {kNoPage, kNoPage}, true, 1), world.home(world.two, {}),
                   owner({4, 5}, Owner::params, Owner::free)});
      world.decide();
      world.apply({owner({2, 3}, Owner::free, Owner::kv)});
      world.decide();
      world.apply(world.come(world.two, {2, 3}, kTenant));
      world.decide(observer);
      CHECK(world.reads(world.two, 0));
    }
    const bool strict = world.arena->mode() == Mode::strict;
    CHECK(observer->released_count == (strict ? 0 : 9));
    world.apply(world.give_up());
    world.decide();
    world.arena->remove_tenant(kTenant);
    world.arena->remove_tenant(kCold);
    world.arena->check();
    CHECK(world.arena->counts()[Owner::free] == 8 && !world.arena->knows(kTenant) && !world.arena->knows(kCold));
  });
}

TEST(every_call_of_giving_up_fails) { every_call_of_a_plan_fails<World>(); }

struct Coming : World {
  explicit Coming(Mode mode, bool exchange = true) : World(mode, exchange) {
    apply(give_up());
    decide();
    apply({owner({2, 3}, Owner::free, Owner::kv, kCold)});
    decide();
  }
  Plan sweep() const { return plan(come(cold, {2, 3}, kCold)); }
  void intact() const { CHECK(reads(one, 1)); }
  void reached() const { CHECK((arena->shown(cold) == std::vector<PageId>{2, 3}) && reads(cold, 0)); }
};

TEST(every_call_of_coming_fails) { every_call_of_a_plan_fails<Coming>(); }

// As one change: a layer gives its pages up, and they become another tenant's layer; or the draft of that is dropped, in part or whole.
TEST(a_home_passes_on_within_a_change) {
  everywhere<World>([](World& world) {
    const auto before = world.state();
    Draft draft(world.arena);
    draft.add(world.plan(world.give_up()));
    for (int times = 0; times < 2; ++times) {
      const std::size_t place = draft.begin();
      draft.add(world.plan({owner({2, 3}, Owner::free, Owner::kv, kCold)}));
      draft.add(world.plan(world.come(world.cold, {3, 2}, kCold)));
      CHECK_ERROR(ErrorKind::invalid_argument, draft.add(world.plan({world.home(world.two, {2, 3})})));  // it is the other's
      if (times == 0) draft.cut(place);
    }
    CHECK(world.state() == before);
    world.executor->apply(draft);
    CHECK(world.executor->zero_due() == 2 * kPage);
    world.decide();
    CHECK((world.arena->shown(world.cold) == std::vector<PageId>{3, 2}) && world.reads(world.cold, 0) && world.reads(world.one, 1));
  });
}

// In one plan two layers of a tenant exchange a page of their homes, whichever step comes first.
TEST(two_homes_of_one_plan_exchange_pages) {
  everywhere<World>([](World& world) {
    const Step none_one = point(world.one, {kNoPage, kNoPage}, true, 0), none_two = point(world.two, {kNoPage, kNoPage}, true, 1);
    world.arena->designate(world.kv, 4, {0, 1});
    world.apply({none_one, none_two, owner({0, 1, 2, 3}, Owner::params, Owner::kv)});
    world.decide();
    for (const bool first : {true, false}) {
      const Step a = world.home(world.one, first ? std::vector<PageId>{0, 2} : std::vector<PageId>{0, 1});
      const Step b = world.home(world.two, first ? std::vector<PageId>{1, 3} : std::vector<PageId>{2, 3});
      world.apply(first ? std::vector<Step>{a, b} : std::vector<Step>{b, a});
      world.decide();
    }
    world.apply({owner({0, 1, 2, 3}, Owner::kv, Owner::params), point(world.one, {0, 1}, true, 0), point(world.two, {2, 3}, true, 1)});
    world.decide();
  });
}

TEST(what_cannot_be_a_home_is_refused_before_any_backend_call) {
  everywhere<World>([](World& world) {
    const Step none = point(world.two, {kNoPage, kNoPage}, true, 1);
    const Step free = owner({2, 3}, Owner::params, Owner::free);
    const std::vector<std::vector<Step>> bad{
        {world.home(world.two, {4, 5})},                                  // it has one, and shows it
        {world.home(world.two, {})},                                      // it shows it
        {world.home(world.kv, {})},
        {world.home(77, {})},
        {world.home(world.cold, {4})},
        {world.home(world.cold, {4, 8})},
        {world.home(world.cold, {4, 4})},
        {world.home(world.cold, {2, 3})},                                 // another region's
        {world.home(world.cold, {4, 5}), world.home(world.cold, {4, 5})},
        {none, free, world.home(world.cold, {2, 3})},                     // layer two would not know that they are not its own
        {none, world.home(world.two, {4, 5}), free},                      // empty only now
        {point(world.cold, {4, 5}, true, 0)},                             // no home, and not its own
        {owner({4, 5}, Owner::free, Owner::params, kCold), world.home(world.cold, {5, 4}), point(world.cold, {4, 5}, true, 0)},
    };
    for (const auto& steps : bad) world.refuses(ErrorKind::invalid_argument, world.plan(steps));
    CHECK_ERROR(ErrorKind::invalid_argument, world.arena->add_empty_layer_region(kCold, "bad", 0));
    CHECK_ERROR(ErrorKind::invalid_argument, world.arena->add_empty_layer_region(kCold, "bad", 1, 0));  // another tenant's
    CHECK_ERROR(ErrorKind::invalid_argument, world.arena->add_empty_layer_region(kCold, "bad", 1, 8));
    world.fault->arm(Call::map, 1);
    if (world.arena->mode() == Mode::aliased) {
      const auto before = world.state();
      CHECK_ERROR(ErrorKind::driver, world.arena->add_empty_layer_region(kCold, "fails", 2, 6));
      CHECK(world.state() == before);
    }
    world.fault->disarm();
    world.arena->check();
  });
}

}  // namespace
