// SPDX-License-Identifier: Apache-2.0
#include "looking.h"
#include "page_list.h"
#include "remap/fork.h"

namespace remap::python {
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
      .def(py::init([](const PageList& pages) { return PageOrder(pages.pages); }), py::arg("pages"));
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
}

}  // namespace remap::python
