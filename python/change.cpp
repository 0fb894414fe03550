// SPDX-License-Identifier: Apache-2.0
// Drafts and how they are carried out (remap/draft.h, remap/executor.h).
#include <optional>

#include "looking.h"
#include "page_list.h"
#include "prefetcher_observer.h"
#include "remap/block_pool.h"
#include "remap/executor.h"
#include "remap/prefetcher.h"
#include "remap/transition_copies.h"
#include "tenant_pages.h"

namespace remap::python {
namespace {

// The draft, and the attribute `books` of each tenant in it, which goes back together with the pools. A change has claimed its tenants
// (locking.py), so no other thread changes their pools, with the GIL or without it. Who only counts blocks meanwhile takes no lock: no
// array of a pool is made anew, so it finds numbers from before the change, from behind it, or from within.
class Change {
 public:
  explicit Change(std::shared_ptr<Arena> arena) : draft(std::move(arena)) {}

  Draft draft;

  std::size_t begin() {
    notes_.emplace_back();
    return draft.begin();
  }
  void keep(const py::object& tenant) {
    if (notes_.empty()) throw Error(ErrorKind::invalid_state, "No change has begun. Nothing changed; do this within a part of one.");
    note(notes_.back(), {tenant, tenant.attr("books"), tenant.attr("number").cast<TenantId>()});
  }
  void join(std::size_t depth) {
    draft.join(depth);
    while (depth != 0 && notes_.size() > depth) {
      const std::vector<Note> inner = std::move(notes_.back());
      notes_.pop_back();
      for (const Note& each : inner) note(notes_.back(), each);
    }
  }
  void cut(std::size_t depth) {
    looking_at([&] { draft.cut(depth); });
    while (notes_.size() > depth) {
      for (const Note& each : notes_.back()) each.tenant.attr("books") = each.books;
      notes_.pop_back();
    }
  }
  void end() {
    draft.end();
    notes_.clear();
  }
  py::typing::List<py::object> rests() {
    py::typing::List<py::object> found;
    for (const auto& rest : draft.rests()) {
      for (const Note& each : notes_.front()) {
        if (each.number == rest->tenant) found.append(py::make_tuple(each.tenant, each.books, rest));
      }
    }
    return found;
  }
  template <typename Call>
  void looking_at(Call&& call) const {
    beside_streams(draft.arena().backend().device().kind == DeviceInfo::Kind::cuda || draft.arena().busy(), call);
  }

 private:
  struct Note {
    py::object tenant, books;
    TenantId number = kNobody;
  };
  static void note(std::vector<Note>& notes, const Note& its) {
    const auto same = [&](const Note& each) { return each.tenant.is(its.tenant); };
    if (std::none_of(notes.begin(), notes.end(), same)) notes.push_back(its);
  }
  std::vector<std::vector<Note>> notes_;  // of each savepoint
};

Step owners(PageList pages, Owner from, Owner to, TenantId tenant) {
  Step step;
  step.kind = Step::Kind::set_owner;
  step.set_owner = SetOwner{std::move(pages.pages), from, to, tenant};
  return step;
}

using After = std::vector<std::tuple<TenantId, EventHandle, StreamHandle>>;
// What is left to be done for a tenant, its prefetcher (none: it leaves), its layers' bytes, where its ring begins, an event that its copies
// and the worker come behind, and whether it serves no pass.
using Share = std::tuple<std::shared_ptr<Rest>, std::optional<std::shared_ptr<Prefetcher>>, std::vector<std::size_t>, std::uintptr_t,
                         EventHandle, bool>;

void settle(Executor& executor, const Change& change, const std::vector<Share>& shares) {
  const Arena& arena = change.draft.arena();
  if (executor.undecided()) {
    const GilRelease release;
    std::vector<Executor::Share> made;
    for (const auto& [rest, prefetcher, layer_bytes, ring, after, asleep] : shares) {
      made.push_back({rest->tenant, prefetcher ? std::make_shared<PrefetcherObserver>(*prefetcher) : nullptr, after, asleep});
      if (!prefetcher) continue;
      const bool holds = arena.mode() == Mode::aliased;
      (*prefetcher)->configure(configuration_of(rest->plan, layer_bytes, arena.page_bytes(), to_address(ring), holds, after));
    }
    executor.commit(made);
  }
  for (const auto& [rest, prefetcher, layer_bytes, ring, after, asleep] : shares) {
    if (prefetcher) change.draft.hand_over(*rest);
  }
}

}  // namespace

void bind_change(py::module_& module) {
  py::class_<Plan>(module, "Plan")
      .def(py::init([](std::uint64_t epoch) { return Plan{epoch, {}}; }), py::arg("epoch"))
      .def(
          "set_owner",
          [](Plan& plan, PageList pages, Owner from, Owner to, TenantId tenant) {
            plan.steps.push_back(owners(std::move(pages), from, to, tenant));
          },
          py::arg("pages"), py::arg("from_owner"), py::arg("to_owner"), py::arg("tenant"))
      .def(
          "point",
          [](Plan& plan, RegionId region, std::size_t first_slot, PageList pages, bool deferred, std::uint32_t layer) {
            Step step;
            step.kind = Step::Kind::point;
            step.point = Point{region, first_slot, std::move(pages.pages), deferred, layer};
            plan.steps.push_back(std::move(step));
          },
          py::arg("region"), py::arg("first_slot"), py::arg("pages"), py::arg("deferred"), py::arg("layer"))
      .def(
          "set_home",
          [](Plan& plan, RegionId region, PageList pages) {
            Step step;
            step.kind = Step::Kind::set_home;
            step.set_home = SetHome{region, std::move(pages.pages)};
            plan.steps.push_back(std::move(step));
          },
          py::arg("region"), py::arg("pages"))
      .def_readwrite("epoch", &Plan::epoch);

  py::class_<Applied>(module, "Applied")
      .def_readonly("epoch", &Applied::epoch)
      .def_readonly("pages_moved", &Applied::pages_moved)
      .def_readonly("due", &Applied::due)
      .def_readonly("points_done", &Applied::points_done)
      .def_readonly("points_deferred", &Applied::points_deferred);

  py::class_<Rest, std::shared_ptr<Rest>>(module, "Rest", "What a change leaves to be done for one tenant: see remap/draft.h.")
      .def_property_readonly("held", [](const Rest& rest) { return as_tuple(rest.plan.held); })
      .def_property_readonly("reload", [](const Rest& rest) { return as_tuple(rest.plan.reload()); })
      .def_property_readonly("frees", [](const Rest& rest) { return rest.plan.frees; })
      .def_readonly("moves", &Rest::moves)
      .def(
          "awaits_copies",
          [](const Rest& rest, const Held& before, Prefetcher& prefetcher) {
            return beside_streams(prefetcher.uses_streams(), [&] { return awaits_copies(rest.plan, before->value, prefetcher); });
          },
          py::arg("before"), py::arg("prefetcher"))
      .def_property_readonly("late", [](const Rest& rest) { return as_tuple(rest.late); });

  py::class_<Change>(module, "Draft", "What a change would be: see remap/draft.h.")
      .def(py::init<std::shared_ptr<Arena>>(), py::arg("arena"))
      .def("enlist", [](Change& change, TenantId tenant, std::shared_ptr<BlockPool> pool) { change.draft.enlist(tenant, std::move(pool)); },
           py::arg("tenant"), py::arg("pool"))
      .def("dismiss", [](Change& change, TenantId tenant) { change.draft.dismiss(tenant); }, py::arg("tenant"))
      .def("begin", &Change::begin)
      .def("join", &Change::join, py::arg("depth"))
      .def("cut", &Change::cut, py::arg("depth"))
      .def("end", &Change::end)
      .def("keep", &Change::keep, py::arg("tenant"), "The attribute `books` of the tenant goes back with the change.")
      .def_property_readonly("depth", [](const Change& change) { return change.draft.depth(); })
      .def_property_readonly("plans", [](const Change& change) { return change.draft.plans(); })
      .def(
          "add",
          [](Change& change, Plan plan) {
            std::vector<PageId> late;
            change.looking_at([&] { late = change.draft.add(std::move(plan)).late; });
            return late;
          },
          py::arg("plan"))
      .def(
          "take_in",
          [](Change& change, const py::object& tenant, const Planned& plan) {
            change.keep(tenant);
            Transition its = plan.value;
            its.plan.epoch = change.draft.arena().epoch();  // an earlier change is settled by now
            Draft::Outcome outcome;
            change.looking_at([&] { outcome = change.draft.add(std::move(its)); });
            py::object moves = py::none();
            if (outcome.added) {
              py::dict made;
              for (const auto& [old, fresh] : outcome.moves) made[py::int_(old)] = py::int_(fresh);
              moves = std::move(made);
            }
            return py::typing::Tuple<py::object, py::object, py::int_>(py::make_tuple(moves, as_tuple(outcome.pending), outcome.room));
          },
          py::arg("tenant"), py::arg("plan"),
          "`add`, of a tenant that is kept. (old block -> new one, live blocks in pages that go, for how many there is room); None instead "
          "of the first: there is too little, and nothing has changed.")
      .def("withdraw",
           [](Change& change, TenantId tenant, const PageList& slots) { change.draft.withdraw(tenant, slots.pages); },
           py::arg("tenant"), py::arg("slots"))
      .def("reopen", [](Change& change, TenantId tenant) { change.draft.reopen(tenant); }, py::arg("tenant"))
      .def("rests", &Change::rests, "(tenant, its books before the change, Rest) each.")
      .def(
          "moves_ring",
          [](const Change& change, const Rest& rest, const Held& before) {
            bool moves = false;
            change.looking_at([&] { moves = change.draft.moves_ring(rest, before->value); });
            return moves;
          },
          py::arg("rest"), py::arg("before"))
      .def("free_pages", [](const Change& change) { return looking(&Draft::free_pages)(change.draft); })
      .def("count_free", [](const Change& change, const PageOrder& order) { return looking(&Draft::count_free)(change.draft, order); },
           py::arg("order"))
      .def("first_free",
           [](const Change& change, const PageOrder& order, std::size_t most) {
             return looking(&Draft::first_free)(change.draft, order, most);
           },
           py::arg("order"), py::arg("most"))
      .def("losses",
           [](const Change& change, const Held& pages, py::object target) {
             return looking(&Draft::losses)(change.draft, pages->value, streaming_of(target));
           },
           py::arg("pages"), py::arg("target"))
      .def("holders", [](const Change& change, const PageList& pages) {
        std::vector<std::pair<std::int64_t, std::vector<PageId>>> out;
        for (auto& [tenant, held] : looking(&Draft::holders)(change.draft, pages.pages)) {
          out.emplace_back(tenant == kNobody ? -1 : static_cast<std::int64_t>(tenant), std::move(held));
        }
        return out;
      });

  py::class_<Executor, std::shared_ptr<Executor>>(module, "Executor")
      .def(py::init<std::shared_ptr<Arena>>(), py::arg("arena"))
      .def(
          "apply",
          [](Executor& executor, const Plan& plan, EventHandle after, StreamHandle zero_on) {
            return executor.apply(plan, Ordering{after, zero_on});
          },
          py::arg("plan"), py::arg("after") = 0, py::arg("zero_on") = 0, ReleaseGil())
      .def(
          "change",
          [](Executor& executor, Change& change, const After& orderings) {
            Executor::Orderings made;
            for (const auto& [tenant, after, zero_on] : orderings) made.emplace_back(tenant, Ordering{after, zero_on});
            {
              const GilRelease release;
              executor.apply(change.draft, made);
            }
            change.end();
          },
          py::arg("draft"), py::arg("orderings"))
      .def(
          "pass_on",
          [](Executor& executor, Change& change, PageList pages, bool out) {
            Draft& draft = change.draft;
            Plan plan{draft.arena().epoch(), {}};
            plan.steps.push_back(owners(std::move(pages), out ? Owner::free : Owner::outside, out ? Owner::outside : Owner::free, kNobody));
            if (draft.depth() != 0) throw Error(ErrorKind::invalid_state, "A change is under way. Nothing changed; end it first.");
            draft.begin();
            try {
              draft.add(std::move(plan));
              executor.apply(draft);
            } catch (...) {
              draft.cut(0);
              throw;
            }
            executor.commit(nullptr);
          },
          py::arg("draft"), py::arg("pages"), py::arg("out"), ReleaseGil(),
          "Free pages go to other processes (out), or theirs come in as free ones.")
      .def("zero_free", &Executor::zero_free, ReleaseGil())
      .def("zero_due", &Executor::zero_due, py::arg("behind") = std::vector<EventHandle>{}, ReleaseGil())
      .def(
          "commit",
          [](Executor& executor, const std::optional<std::shared_ptr<Prefetcher>>& prefetcher, EventHandle after, bool asleep) {
            executor.commit(prefetcher ? std::make_shared<PrefetcherObserver>(*prefetcher) : nullptr, after, asleep);
          },
          py::arg("prefetcher"), py::arg("after") = 0, py::arg("asleep") = false, ReleaseGil())
      .def("settle", &settle, py::arg("draft"), py::arg("shares"),
           "Configures the prefetchers and commits, unless that is done; then pools get what they were to get late.")
      .def("wake", &Executor::wake, py::arg("tenant"), py::arg("after") = 0, ReleaseGil())
      .def("drain", &Executor::drain, ReleaseGil())
      .def("undecided", &Executor::undecided)
      .def(
          "failed_points",
          [](const Executor& executor, std::optional<TenantId> tenant) {
            return tenant ? executor.failed_points(*tenant) : executor.failed_points();
          },
          py::arg("tenant") = py::none())
      .def(
          "retry_failed",
          [](Executor& executor, std::optional<TenantId> tenant) {
            return tenant ? executor.retry_failed(*tenant) : executor.retry_failed();
          },
          py::arg("tenant") = py::none(), ReleaseGil())
      .def("forget", &Executor::forget, ReleaseGil())
      .def("stop", &Executor::stop, ReleaseGil());
}

}  // namespace remap::python
