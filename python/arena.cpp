// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include "common.h"
#include "page_list.h"
#include "remap/arena.h"
#include "remap/executor.h"
#include "remap/fork.h"

namespace remap::python {
namespace {

const Arena& arena_of(const Arena& arena) { return arena; }
const Arena& arena_of(const Draft& draft) { return draft.arena(); }

// Looking takes the lock of the arena's tables, which set-up calls and plans hold while they call the driver.
template <typename Class, typename Result, typename... Arguments>
auto looking(Result (Class::*look)(Arguments...) const) {
  return [look](const Class& at, Arguments... arguments) {
    // Also where somebody has that lock and zeroes pages: other threads of Python need not wait for that.
    const bool waits = arena_of(at).backend().device().kind == DeviceInfo::Kind::cuda || arena_of(at).busy();
    return beside_streams(waits, [&] { return (at.*look)(arguments...); });
  };
}

}  // namespace

void bind_arena(py::module_& module) {
  module.def("fork_generation", &fork_generation, "Grows by one in every forked child.");
  py::enum_<Owner>(module, "Owner")
      .value("free", Owner::free)
      .value("params", Owner::params)
      .value("kv", Owner::kv)
      .value("ring", Owner::ring)
      .value("outside", Owner::outside)
      .value("quarantine", Owner::quarantine);
  py::enum_<Mode>(module, "Mode").value("aliased", Mode::aliased).value("strict", Mode::strict);

  py::class_<Lease, std::shared_ptr<Lease>>(module, "Lease", "Keeps the addresses of one region while it lives: see Arena.hold.");
  py::class_<PageOrder>(module, "PageOrder", "Pages in an order, for Draft.count_free and first_free.")
      .def(py::init([](const PageList& pages) { return PageOrder{pages.pages}; }), py::arg("pages"));
  py::class_<Arena, std::shared_ptr<Arena>>(module, "Arena")
      .def(py::init([](std::shared_ptr<Backend> backend, std::size_t capacity_bytes, std::size_t page_bytes, Mode mode, bool outside) {
             return std::make_shared<Arena>(std::move(backend), ArenaOptions{capacity_bytes, page_bytes, mode, outside});
           }),
           py::arg("backend"), py::arg("capacity_bytes"), py::arg("page_bytes"), py::arg("mode"), py::arg("outside") = false,
           ReleaseGil())
      .def(
          "take",
          [](Arena& arena, std::size_t count, Owner owner, TenantId tenant, const PageList& excluded) {
            return arena.take(count, owner, tenant, excluded.pages);
          },
          py::arg("count"), py::arg("owner"), py::arg("tenant"), py::arg("excluded") = std::vector<PageId>{}, ReleaseGil())
      .def(
          "add_layer_region",
          [](Arena& arena, TenantId tenant, const std::string& name, const PageList& pages) {
            return arena.add_layer_region(tenant, name, pages.pages);
          },
          py::arg("tenant"), py::arg("name"), py::arg("pages"), ReleaseGil())
      .def("add_empty_layer_region", &Arena::add_empty_layer_region, py::arg("tenant"), py::arg("name"), py::arg("slots"),
           py::arg("stand_in") = kNoPage, ReleaseGil())
      .def("add_ring_region", &Arena::add_ring_region, py::arg("tenant"), py::arg("slots"), ReleaseGil())
      .def("add_kv_region", &Arena::add_kv_region, py::arg("tenant"), py::arg("slots"), ReleaseGil())
      .def(
          "designate",
          [](Arena& arena, RegionId region, std::size_t first_slot, const PageList& pages) {
            arena.designate(region, first_slot, pages.pages);
          },
          py::arg("region"), py::arg("first_slot"), py::arg("pages"), ReleaseGil())
      .def(
          "fix",
          [](Arena& arena, RegionId region, std::size_t first_slot, const PageList& pages) {
            arena.fix(region, first_slot, pages.pages);
          },
          py::arg("region"), py::arg("first_slot"), py::arg("pages"), ReleaseGil())
      .def(
          "designate_ring",
          [](Arena& arena, RegionId region, std::size_t first_slot, const PageList& pages) {
            arena.designate_ring(region, first_slot, pages.pages);
          },
          py::arg("region"), py::arg("first_slot"), py::arg("pages"), ReleaseGil())
      .def(
          "prepare_view",
          [](Arena& arena, RegionId region, const PageList& pages) { arena.prepare_view(region, pages.pages); },
          py::arg("region"), py::arg("pages"), ReleaseGil())
      .def("remove_tenant", &Arena::remove_tenant, py::arg("tenant"), py::arg("undoing") = false, ReleaseGil())
      .def(
          "declare_registered",
          [](Arena& arena, std::uintptr_t address, std::size_t bytes) { arena.declare_registered(to_address(address), bytes); },
          py::arg("address"), py::arg("nbytes"), ReleaseGil())
      .def(
          "withdraw_registered",
          [](Arena& arena, std::uintptr_t address, std::size_t bytes) { arena.withdraw_registered(to_address(address), bytes); },
          py::arg("address"), py::arg("nbytes"), ReleaseGil())
      .def("registered",
           [](const Arena& arena) {
             std::vector<std::pair<std::uintptr_t, std::size_t>> out;
             for (const auto& [address, bytes] : looking(&Arena::registered)(arena)) out.emplace_back(to_int(address), bytes);
             return out;
           })
      .def("seal", &Arena::seal, py::arg("kv_region"), ReleaseGil())
      .def(
          "hold",
          [](Arena& arena, std::uintptr_t address, std::size_t bytes) { return arena.hold(to_address(address), bytes); },
          py::arg("address"), py::arg("nbytes"), ReleaseGil())
      .def("close", &Arena::close, ReleaseGil())
      .def("address", [](const Arena& arena, RegionId region) { return to_int(looking(&Arena::address)(arena, region)); })
      .def("region_bytes", looking(&Arena::region_bytes))
      .def("shown", looking(&Arena::shown))
      .def("owners", looking(&Arena::owners))
      .def("tenants",
           [](const Arena& arena) {
             const std::vector<TenantId> tenants = looking(&Arena::tenants)(arena);
             std::vector<std::int64_t> out;
             out.reserve(tenants.size());
             for (const TenantId tenant : tenants) out.push_back(tenant == kNobody ? -1 : static_cast<std::int64_t>(tenant));
             return out;
           })
      .def("free_pages", looking(&Arena::free_pages))
      .def("knows", &Arena::knows, py::arg("tenant"), ReleaseGil())
      .def("counts",
           [](const Arena& arena, const py::object& tenant) {
             const PageCounts counts = tenant.is_none()
                                           ? looking<Arena, PageCounts>(&Arena::counts)(arena)
                                           : looking<Arena, PageCounts, TenantId>(&Arena::counts)(arena, tenant.cast<TenantId>());
             py::typing::Dict<py::str, py::int_> out;
             for (std::size_t i = 0; i < kOwners; ++i) out[owner_name(static_cast<Owner>(i))] = counts.by_owner[i];
             out["total"] = counts.total;
             return out;
           },
           py::arg("tenant") = py::none())
      .def("check", &Arena::check, ReleaseGil())
      .def_property_readonly("regions", looking(&Arena::regions))
      .def_property_readonly("epoch", &Arena::epoch)
      .def_property_readonly("page_bytes", &Arena::page_bytes)
      .def_property_readonly("total_pages", &Arena::total_pages)
      .def_property_readonly("mode", &Arena::mode)
      .def_property_readonly("broken", &Arena::broken)
      .def_property_readonly("closed", &Arena::closed);

  py::class_<Plan>(module, "Plan")
      .def(py::init([](std::uint64_t epoch) { return Plan{epoch, {}}; }), py::arg("epoch"))
      .def(
          "set_owner",
          [](Plan& plan, PageList pages, Owner from, Owner to, TenantId tenant) {
            Step step;
            step.kind = Step::Kind::set_owner;
            step.set_owner = SetOwner{std::move(pages.pages), from, to, tenant};
            plan.steps.push_back(std::move(step));
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

  py::class_<Draft>(module, "Draft", "What a change would be: see remap/draft.h.")
      .def(py::init<std::shared_ptr<Arena>>(), py::arg("arena"))
      .def("add", &Draft::add, py::arg("plan"), ReleaseGil())
      .def("cut", &Draft::cut, py::arg("plans"), ReleaseGil())
      .def_property_readonly("plans", &Draft::plans)
      .def("free_pages", looking(&Draft::free_pages))
      .def("count_free", [](const Draft& draft, const PageOrder& order) { return looking(&Draft::count_free)(draft, order.pages); })
      .def("first_free",
           [](const Draft& draft, const PageOrder& order, std::size_t most) {
             return looking(&Draft::first_free)(draft, order.pages, most);
           },
           py::arg("order"), py::arg("most"))
      .def("holders",
           [](const Draft& draft, const PageList& pages) {
             std::vector<std::pair<std::int64_t, std::vector<PageId>>> out;
             for (auto& [tenant, held] : looking(&Draft::holders)(draft, pages.pages)) {
               out.emplace_back(tenant == kNobody ? -1 : static_cast<std::int64_t>(tenant), std::move(held));
             }
             return out;
           })
      .def("unmaps", looking(&Draft::unmaps), py::arg("ring"));

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
          [](Executor& executor, Draft& draft, const std::vector<std::tuple<TenantId, EventHandle, StreamHandle>>& orderings) {
            Executor::Orderings made;
            for (const auto& [tenant, after, zero_on] : orderings) made.emplace_back(tenant, Ordering{after, zero_on});
            return executor.apply(draft, made);
          },
          py::arg("draft"), py::arg("orderings"), ReleaseGil())
      .def(
          "pass_on",
          [](Executor& executor, Draft& draft, const Plan& plan) {
            draft.add(plan);
            try {
              executor.apply(draft);
            } catch (...) {
              draft.cut(0);
              throw;
            }
            executor.commit(nullptr);
          },
          py::arg("draft"), py::arg("plan"), ReleaseGil())
      .def("zero_free", &Executor::zero_free, ReleaseGil())
      .def("zero_due", &Executor::zero_due, py::arg("behind") = std::vector<EventHandle>{}, ReleaseGil())
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
