// SPDX-License-Identifier: Apache-2.0
// The sim backend as Python sees it: its clock, and what it was made with.
#include "remap/sim.h"

#include <memory>
#include <string>

#include "common.h"

namespace remap::python {
namespace {

py::typing::Dict<py::str, py::typing::Dict<py::str, py::float_>> traffic(const SimBackend& backend) {
  py::typing::Dict<py::str, py::typing::Dict<py::str, py::float_>> out;
  for (const auto& [name, route] : {std::pair("h2d", SimRoute::to_device), std::pair("d2h", SimRoute::to_host),
                                    std::pair("d2d", SimRoute::inside_device)}) {
    const SimTraffic traffic = backend.traffic(route);
    py::dict entry;
    entry["copies"] = traffic.copies;
    entry["bytes"] = traffic.bytes;
    entry["busy_s"] = traffic.busy_s;
    out[name] = entry;
  }
  return out;
}

}  // namespace

// No call here waits or takes long, so the GIL is kept.
void bind_sim(py::module_& module) {
  py::class_<SimBackend, Backend, std::shared_ptr<SimBackend>>(module, "SimBackend")
      .def_property_readonly("machine", [](const SimBackend& b) { return b.options().machine; })
      .def_property_readonly("capacity_bytes", [](const SimBackend& b) { return b.options().capacity_bytes; })
      .def_property_readonly("backed", [](const SimBackend& b) { return b.options().backed; })
      .def_property_readonly("now", &SimBackend::now)
      .def("read_clock", &SimBackend::now, "`now` as a method, for who takes a clock as a callable.")
      .def("advance", &SimBackend::advance, py::arg("seconds"))
      .def("advance_to", &SimBackend::advance_to, py::arg("time"))
      .def("compute", &SimBackend::compute, py::arg("stream"), py::arg("seconds"))
      .def("stream_end", &SimBackend::stream_end, py::arg("stream"))
      .def("hold", &SimBackend::hold, py::arg("stream"), py::arg("time"))
      .def("finish", &SimBackend::finish, py::arg("stream"))
      .def("join", &SimBackend::join)
      .def("traffic", &traffic);
  // Here, and not with its class: its signature names the class above.
  more_of<Backend>(module, "Backend").def_property_readonly("simulator", &Backend::simulator);
  module.def(
      "make_sim_backend",
      [](std::size_t capacity_bytes, double h2d, double d2h, double hbm, std::size_t granularity, double duplex, double copy_setup_s,
         double create_page_s, double map_s, double set_access_s, double unmap_s, bool contention, bool backed,
         std::string machine) {
        SimOptions options;
        options.machine = std::move(machine);
        options.capacity_bytes = capacity_bytes;
        options.granularity = granularity;
        options.h2d_bytes_per_s = h2d;
        options.d2h_bytes_per_s = d2h;
        options.hbm_bytes_per_s = hbm;
        options.duplex = duplex;
        options.copy_setup_s = copy_setup_s;
        options.create_page_s = create_page_s;
        options.map_s = map_s;
        options.set_access_s = set_access_s;
        options.unmap_s = unmap_s;
        options.contention = contention;
        options.backed = backed;
        return make_sim_backend(options);
      },
      py::kw_only(), py::arg("capacity_bytes"), py::arg("h2d_bytes_per_s"), py::arg("d2h_bytes_per_s"), py::arg("hbm_bytes_per_s"),
      py::arg("granularity") = std::size_t{2} << 20, py::arg("duplex") = 1.0, py::arg("copy_setup_s") = 0.0,
      py::arg("create_page_s") = 0.0, py::arg("map_s") = 0.0, py::arg("set_access_s") = 0.0, py::arg("unmap_s") = 0.0,
      py::arg("contention") = true, py::arg("backed") = false, py::arg("machine") = "custom");
}

}  // namespace remap::python
