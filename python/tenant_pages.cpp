// SPDX-License-Identifier: Apache-2.0
// Tenants' pages and the plans between them (remap/tenant_pages.h) for remap.memory.pages. What Python asks for is made once a
// value, since a step asks for the same again and again.
#include "tenant_pages.h"

#include <algorithm>

#include "page_list.h"
#include "remap/error.h"
#include "remap/transition_copies.h"

namespace remap::python {
namespace {

py::object as_ring(const Ring& ring) {
  py::tuple found(ring.size());
  for (std::size_t at = 0; at < ring.size(); ++at) found[at] = as_pages(ring[at]);
  return std::move(found);
}

std::vector<PageId> pages_of(py::handle object) {
  py::detail::make_caster<PageList> caster;
  if (!caster.load(object, true)) throw py::type_error("pages must be a sequence of page numbers");
  return py::detail::cast_op<PageList&&>(std::move(caster)).pages;
}

template <typename Value>
py::object as_set(const std::vector<Value>& values) {
  return py::reinterpret_steal<py::object>(PyFrozenSet_New(py::cast(values).ptr()));
}

Held after(const Held& before, TenantPages value) { return std::make_shared<Pages>(std::move(value), before.get()); }

std::vector<bool> marked(const Pages& pages, const py::iterable& layers) {
  std::vector<bool> found(pages.value.layers.size(), false);
  for (const py::handle each : layers) found.at(each.cast<std::size_t>()) = true;
  return found;
}

template <typename Chosen>
std::vector<LayerId> layers_where(const TenantPages& pages, Chosen&& chosen) {
  std::vector<LayerId> found;
  for (LayerId layer = 0; layer < pages.layers.size(); ++layer) {
    if (chosen(pages.layers[layer])) found.push_back(layer);
  }
  return found;
}

template <typename Get>
py::object of_layers(const TenantPages& pages, Get&& get) {
  py::tuple found(pages.layers.size());
  for (std::size_t layer = 0; layer < pages.layers.size(); ++layer) found[layer] = get(pages.layers[layer], layer);
  return std::move(found);
}

using Every = py::typing::Iterable<py::object>;
using Numbers = py::typing::Iterable<py::int_>;

Pages make_pages(TenantId tenant, const Every& homes, const std::vector<RegionId>& regions, RegionId ring_region,
                 const std::vector<std::uint32_t>& tails, const Every& ring, std::vector<LayerId> preference,
                 const Numbers& lent, const std::vector<std::uint32_t>& sizes, std::uint32_t buffer_pages,
                 const Every& elsewhere, const Numbers& unfilled) {
  TenantPages made;
  made.tenant = tenant;
  made.ring_region = ring_region;
  made.ring_preference = std::move(preference);
  for (const py::handle home : homes) {
    const std::size_t layer = made.layers.size();
    Layer its;
    its.own = std::make_shared<const std::vector<PageId>>(pages_of(home));
    its.pages = sizes.empty() ? static_cast<std::uint32_t>(its.own->size()) : sizes.at(layer);
    its.tail = tails.at(layer);
    its.region = regions.at(layer);
    made.layers.push_back(std::move(its));
  }
  for (const py::handle each : elsewhere) {
    const auto pair = each.cast<py::tuple>();
    Layer& its = made.layers.at(pair[0].cast<std::size_t>());
    its.own = std::make_shared<const std::vector<PageId>>(pages_of(pair[1]));
    its.where = its.own->empty() ? Where::cold : Where::elsewhere;
  }
  for (const py::handle each : unfilled) made.layers.at(each.cast<std::size_t>()).where = Where::unfilled;
  for (const py::handle each : ring) made.ring.push_back(pages_of(each));
  for (const py::handle each : lent) made.lent.push_back(each.cast<PageId>());
  std::sort(made.lent.begin(), made.lent.end());
  for (const Layer& each : made.layers) made.buffer_pages = std::max(made.buffer_pages, each.size());
  if (buffer_pages != 0) made.buffer_pages = buffer_pages;
  return Pages(std::move(made));
}

Planned planned(const Held& now, Transition made) {
  Held there = after(now, std::move(made.there));
  made.there = there->value;
  return {std::move(made), std::move(there), ""};
}

template <std::size_t Name, typename Class, typename Make>
void keep(Class& cls, const char* name, Make make) {
  cls.def_property_readonly(name, [make](const Pages& pages) {
    py::object& known = pages.known[Name];
    if (!known) known = make(pages);
    return known;
  });
}

py::list steps_of(const Plan& plan) {
  py::list found;
  for (const Step& step : plan.steps) {
    if (step.kind == Step::Kind::set_owner) {
      const SetOwner& its = step.set_owner;
      found.append(py::make_tuple("set_owner", as_pages(its.pages), owner_name(its.from), owner_name(its.to), its.tenant));
    } else if (step.kind == Step::Kind::point) {
      const Point& its = step.point;
      found.append(py::make_tuple("point", its.region, its.first_slot, as_pages(its.pages), its.deferred, its.layer));
    } else {
      found.append(py::make_tuple("set_home", step.set_home.region, as_pages(step.set_home.pages)));
    }
  }
  return found;
}

}  // namespace

void bind_tenant_pages(py::module_& module) {
  py::class_<Pages, Held> pages(module, "TenantPages", "One tenant's pages as a value: see remap/tenant_pages.h.");
  pages.def(py::init(&make_pages), py::arg("tenant"), py::arg("homes"), py::arg("layer_regions"), py::arg("ring_region"),
            py::arg("tails"), py::arg("ring") = py::tuple(), py::arg("ring_preference") = std::vector<LayerId>{},
            py::arg("lent") = py::tuple(), py::arg("sizes") = std::vector<std::uint32_t>{}, py::arg("buffer_pages") = 0,
            py::arg("elsewhere") = py::tuple(), py::arg("unfilled") = py::tuple());
  pages.def("__eq__", [](const Pages& one, const py::object& other) {
         return py::isinstance<Pages>(other) && one.value == other.cast<const Pages&>().value;
       })
      .def("__hash__", [](const Pages& its) { return its.value.tenant; });
  pages.def_property_readonly("tenant", [](const Pages& its) { return its.value.tenant; })
      .def_property_readonly("ring_region", [](const Pages& its) { return its.value.ring_region; })
      .def_property_readonly("buffer_pages", [](const Pages& its) { return its.value.buffer_pages; })
      .def_property_readonly("depth", [](const Pages& its) { return its.value.depth(); });
  keep<Known::for_good>(pages, "for_good", [](const Pages& its) { return py::object(py::bool_(its.value.for_good())); });
  keep<Known::homes>(pages, "homes", [](const Pages& its) {
    return of_layers(its.value, [&](const Layer& each, std::size_t layer) -> py::object {
      return each.where == Where::home ? its.own[layer] : py::object(py::tuple());
    });
  });
  keep<Known::own>(pages, "own", [](const Pages& its) {
    return of_layers(its.value, [&](const Layer&, std::size_t layer) { return its.own[layer]; });
  });
  keep<Known::tails>(pages, "tails", [](const Pages& its) { return of_layers(its.value, [](const Layer& each, std::size_t) { return each.tail; }); });
  keep<Known::sizes>(pages, "sizes", [](const Pages& its) { return of_layers(its.value, [](const Layer& each, std::size_t) { return each.size(); }); });
  keep<Known::absent>(pages, "absent", [](const Pages& its) { return of_layers(its.value, [](const Layer& each, std::size_t) { return each.absent(); }); });
  keep<Known::regions>(pages, "layer_regions", [](const Pages& its) { return of_layers(its.value, [](const Layer& each, std::size_t) { return each.region; }); });
  keep<Known::preference>(pages, "ring_preference", [](const Pages& its) { return as_tuple(its.value.ring_preference); });
  keep<Known::ring>(pages, "ring", [](const Pages& its) { return as_ring(its.value.ring); });
  keep<Known::lent>(pages, "lent", [](const Pages& its) { return as_set(its.value.lent); });
  keep<Known::streamed>(pages, "streamed", [](const Pages& its) { return as_tuple(its.value.streamed()); });
  keep<Known::lending>(pages, "lending", [](const Pages& its) { return as_set(its.value.lending()); });
  keep<Known::ring_layers>(pages, "ring_layers", [](const Pages& its) { return as_tuple(its.value.ring_layers()); });
  keep<Known::kv>(pages, "kv_from_homes", [](const Pages& its) { return as_set(its.value.kv_from_homes()); });
  keep<Known::held>(pages, "held", [](const Pages& its) { return as_tuple(its.value.held()); });
  keep<Known::gone>(pages, "gone", [](const Pages& its) { return as_set(layers_where(its.value, [](const Layer& each) { return each.where != Where::home; })); });
  keep<Known::cold>(pages, "cold", [](const Pages& its) { return as_set(layers_where(its.value, [](const Layer& each) { return each.where == Where::cold; })); });
  keep<Known::unfilled>(pages, "unfilled", [](const Pages& its) { return as_set(layers_where(its.value, [](const Layer& each) { return each.where == Where::unfilled; })); });
  keep<Known::elsewhere>(pages, "elsewhere", [](const Pages& its) {
    py::list found;
    for (std::size_t layer = 0; layer < its.own.size(); ++layer) {
      if (its.value.layers[layer].where != Where::home) found.append(py::make_tuple(layer, its.own[layer]));
    }
    return py::object(py::tuple(found));
  });
  keep<Known::computed>(pages, "computed", [](const Pages& its) -> py::object {
    if (!its.value.computed) return py::none();
    return py::module_::import("builtins").attr("range")(its.value.computed->first, its.value.computed->second);
  });
  pages.def("computes", [](const Pages& its, LayerId layer) {
    const auto& computed = its.value.computed;
    return its.value.layers.at(layer).where == Where::home && (!computed || (computed->first <= layer && layer < computed->second));
  });
  pages.def("away", [](const Pages& its, LayerId layer) { return as_pages(its.value.away(layer)); })
      .def("shows", [](const Pages& its, LayerId layer) { return as_pages(its.value.shows(layer)); });
  pages
      .def("with_streaming",
           [](const Held& its, const py::object& target) {
             if (its->value.for_good()) {
               const py::object kind = py::module_::import("remap.errors").attr("InvalidState");
               const auto streams = its->value.streamed();
               const std::string text = std::to_string(streams.size()) +
                                        " layers have no pages of their own and stream for good; nothing was planned; attach "
                                        "without resident_layers for layers that come and go";
               const py::object error = kind(text, py::arg("streamed") = as_tuple(streams));
               PyErr_SetObject(kind.ptr(), error.ptr());
               throw py::error_already_set();
             }
             return after(its, its->value.with_streaming(streaming_of(target)));
           })
      .def(
          "holding",
          [](const Held& its, const Numbers& layers, const py::object& target, const Numbers& unfilled) {
            return after(its, its->value.holding(marked(*its, layers), streaming_of(target), marked(*its, unfilled)));
          },
          py::arg("layers"), py::arg("target"), py::kw_only(), py::arg("unfilled") = py::tuple())
      .def("given_up",
           [](const Held& its, const Numbers& layers) { return after(its, its->value.given_up(marked(*its, layers))); })
      .def("with_homes",
           [](const Held& its, const py::typing::Dict<py::int_, py::object>& homes) {
             std::vector<std::pair<LayerId, std::vector<PageId>>> found;
             for (const auto& [layer, its_pages] : homes) found.emplace_back(layer.cast<LayerId>(), pages_of(its_pages));
             return after(its, its->value.with_homes(found));
           })
      .def("filled", [](const Held& its, LayerId layer) { return after(its, its->value.filled(layer)); })
      .def("preferring",
           [](const Held& its, std::vector<LayerId> layers) {
             TenantPages there(its->value);
             there.ring_preference = std::move(layers);
             return after(its, std::move(there));
           })
      .def("computing",
           [](const Held& its, const std::optional<std::pair<LayerId, LayerId>>& computed) {
             TenantPages there(its->value);
             there.computed = computed;
             return after(its, std::move(there));
           })
      .def("ring_of",
           [](const Pages& its, const py::object& target) -> py::object {
             const auto ring = its.value.ring_of(streaming_of(target));
             return ring ? as_ring(*ring) : py::object(py::none());
           })
      .def("to_fetch",
           [](const Pages& its, const py::object& target) { return as_set(its.value.to_fetch(streaming_of(target))); });

  py::class_<Planned>(module, "Transition", "A plan from one state of a tenant's pages to another: see remap/tenant_pages.h.")
      .def(py::init([](const Held& there, const std::vector<std::tuple<LayerId, std::uint32_t, std::uint32_t>>& home, bool ring) {
             Transition made;
             made.there = there->value;
             for (const auto& [layer, first, count] : home) made.home.push_back({layer, first, count});
             made.ring_changes = ring;
             return Planned{std::move(made), there, ""};
           }),
           py::arg("there"), py::arg("home") = py::tuple(), py::arg("ring_changes") = false,
           "No step: these pages of layers, (layer, first page, how many), are loaded again, and the ring if ring_changes.")
      .def_property_readonly("there", [](const Planned& plan) { return plan.there; })
      .def_property_readonly("steps", [](const Planned& plan) { return py::object(steps_of(plan.value.plan)); })
      .def("__bool__", [](const Planned& plan) { return !plan.value.plan.steps.empty(); })
      .def_property_readonly("gained", [](const Planned& plan) { return as_pages(plan.value.gained); })
      .def_property_readonly("lost", [](const Planned& plan) { return as_pages(plan.value.lost); })
      .def_property_readonly("held", [](const Planned& plan) { return as_tuple(plan.value.held); })
      .def_property_readonly("home",
                             [](const Planned& plan) {
                               py::list found;
                               for (const auto& load : plan.value.home) found.append(py::make_tuple(load.layer, load.first, load.pages));
                               return py::object(py::tuple(found));
                             })
      .def_property_readonly("reload",
                             [](const Planned& plan) {
                               return as_tuple(plan.value.reload());
                             })
      .def_property_readonly("streamed", [](const Planned& plan) { return as_tuple(plan.there->value.streamed()); })
      .def_property_readonly("ring_moves", [](const Planned& plan) { return plan.value.ring_moves; })
      .def_property_readonly("ring_changes", [](const Planned& plan) { return plan.value.ring_changes; })
      .def_property_readonly("frees", [](const Planned& plan) { return plan.value.frees; })
      .def_readwrite("selection", &Planned::selection, "How the layers that stream after it were chosen; \"\": as before it.")
      .def(
          "copies",
          [](const Planned& plan, const std::vector<std::size_t>& layer_bytes, std::size_t page_bytes) {
            const StreamConfiguration found = configuration_of(plan.value, layer_bytes, page_bytes, nullptr, true, 0);
            py::list home;
            for (const auto& each : found.home) home.append(py::make_tuple(each.layer, each.first, each.bytes));
            return std::tuple<py::object, py::object, py::object>(as_tuple(found.offsets), as_tuple(found.places), py::tuple(home));
          },
          py::arg("layer_bytes"), py::arg("page_bytes"))
      .def(
          "configure",
          [](const Planned& plan, Prefetcher& prefetcher, const std::vector<std::size_t>& layer_bytes, std::size_t page_bytes,
             std::uintptr_t ring) { prefetcher.configure(configuration_of(plan.value, layer_bytes, page_bytes, to_address(ring), false, 0)); },
          py::arg("prefetcher"), py::arg("layer_bytes"), py::arg("page_bytes"), py::arg("ring"), ReleaseGil());
  module.def(
      "plan_between",
      [](const Held& now, const Held& there, bool to_free) {
        Transition made = plan_between(now->value, there->value, to_free);
        const bool same = made.there == there->value;  // what is lent differs, if anything does
        return same ? Planned{std::move(made), there, ""} : planned(there, std::move(made));
      },
      py::arg("now"), py::arg("there"), py::arg("to_free") = false);
  module.def(
      "plan_free_pages",
      [](const Held& now, const PageList& its, bool give) {
        Transition made = plan_free_pages(now->value, its.pages, give);
        if (made.there.lent == now->value.lent) return Planned{std::move(made), now, ""};
        return planned(now, std::move(made));
      },
      py::arg("now"), py::arg("pages"), py::arg("give"));
}

}  // namespace remap::python
