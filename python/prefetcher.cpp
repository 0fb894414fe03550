// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <string_view>

#include "common.h"
#include "remap/prefetcher.h"

namespace remap::python {
namespace {

void wait_blocking(Prefetcher& prefetcher, LayerId layer, StreamHandle stream) {
  if (prefetcher.ready(layer)) return;  // the resident layer's whole cost: one load, no GIL traffic
  while (true) {
    {
      const GilRelease release;
      if (prefetcher.wait(layer, stream, kSignalInterval)) return;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

void done(Prefetcher& prefetcher, LayerId layer, StreamHandle stream) {
  if (prefetcher.ready(layer)) return;
  beside_streams(stream != 0 || prefetcher.uses_streams(), [&] { prefetcher.done(layer, stream); });
}

template <typename T>
bool is(const py::object& value) {
  py::detail::make_caster<T> caster;
  return caster.load(value, true);
}

// Where no overload before it takes the arguments: they are of the wrong kind, or no number of 32 or 64 bits.
[[noreturn]] void refuse(const char* call, const py::object& layer, const py::object& stream) {
  const bool known = is<LayerId>(layer);
  PyObject* const wrong = (known ? stream : layer).ptr();
  const std::string kind = Py_TYPE(wrong)->tp_name;
  int beyond = 0;
  const long long value = PyLong_Check(wrong) != 0 ? PyLong_AsLongLongAndOverflow(wrong, &beyond) : 0;
  const std::string got = PyLong_Check(wrong) == 0 ? "a value of type " + kind
                          : beyond != 0            ? "an int beyond 64 bits"
                                                   : std::to_string(value);
  throw Error(ErrorKind::invalid_argument,
              std::string(call) + ": " +
                  (known ? "stream must be the handle of a stream, an int from 0 on"
                         : "layer must be the number of a layer, an int from 0 on") +
                  ", got " + got + "; nothing changed",
              {{"field", std::string(known ? "stream" : "layer")}, {"type", kind}});
}

// `wait` and `done` for who calls them for every layer of every pass: a resident layer costs a load, without the search for an overload
// that fits. All else is the method's.
struct LayerCall {
  const Prefetcher* prefetcher;  // the method's, which keeps it alive, and with it what its copies use
  py::object method;
};

PyObject* call_layer(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  const auto* call = static_cast<const LayerCall*>(PyCapsule_GetPointer(self, nullptr));
  if (count == 1 && names == nullptr && PyLong_CheckExact(arguments[0])) {
    int beyond = 0;
    const long long layer = PyLong_AsLongLongAndOverflow(arguments[0], &beyond);
    const bool fits = beyond == 0 && layer >= 0 && layer <= std::numeric_limits<LayerId>::max();
    if (fits && call->prefetcher->ready(static_cast<LayerId>(layer))) Py_RETURN_NONE;
  }
  return PyObject_Vectorcall(call->method.ptr(), arguments, static_cast<std::size_t>(count), names);
}

py::object layer_call(const py::object& prefetcher, const char* name) {
  static PyMethodDef wait{"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_layer)),
                          METH_FASTCALL | METH_KEYWORDS, "wait(layer, stream=0)\n--\n\nPrefetcher.wait."};
  static PyMethodDef done{"done", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_layer)),
                          METH_FASTCALL | METH_KEYWORDS, "done(layer, stream=0)\n--\n\nPrefetcher.done."};
  auto call = std::make_unique<LayerCall>(LayerCall{prefetcher.cast<const Prefetcher*>(), prefetcher.attr(name)});
  const py::capsule self(call.release(), [](void* its) { delete static_cast<LayerCall*>(its); });
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(std::string_view(name) == "wait" ? &wait : &done, self.ptr(), nullptr));
}

}  // namespace

void bind_prefetcher(py::module_& module) {
  py::class_<PrefetchStats>(module, "PrefetchStats")
      .def_readonly("passes", &PrefetchStats::passes)
      .def_readonly("abandoned", &PrefetchStats::abandoned)
      .def_readonly("copies", &PrefetchStats::copies)
      .def_readonly("copied_bytes", &PrefetchStats::copied_bytes)
      .def_readonly("block_bytes", &PrefetchStats::block_bytes)
      .def_readonly("copy_s", &PrefetchStats::copy_s)
      .def_readonly("timed_bytes", &PrefetchStats::timed_bytes)
      .def_readonly("misses", &PrefetchStats::misses)
      .def_readonly("stall_s", &PrefetchStats::stall_s)
      .def_readonly("last_pass_stall_s", &PrefetchStats::last_pass_stall_s)
      .def_readonly("last_pass_s", &PrefetchStats::last_pass_s)
      .def_readonly("last_pass_copies", &PrefetchStats::last_pass_copies);

  py::class_<Prefetcher, std::shared_ptr<Prefetcher>>(module, "Prefetcher")
      .def(py::init([](std::shared_ptr<Backend> backend,
                       const std::vector<std::tuple<std::uintptr_t, std::uintptr_t, std::size_t>>& layers, const py::object&,
                       std::size_t chunk_bytes) {
             std::vector<LayerMemory> memory;
             memory.reserve(layers.size());
             for (const auto& [region, master, bytes] : layers) memory.push_back({to_address(region), to_address(master), bytes});
             return std::make_shared<Prefetcher>(std::move(backend), std::move(memory), chunk_bytes);
           }),
           // keep: what the layers' memory belongs to. It outlives the prefetcher, whose end waits for its copies, in whatever
           // order a session that was not closed is collected.
           py::keep_alive<1, 4>(), py::arg("backend"), py::arg("layers"), py::arg("keep") = py::none(),
           py::arg("chunk_bytes") = 0)
      .def(
          "configure",
          [](Prefetcher& prefetcher, std::vector<LayerId> streamed, const std::vector<std::uintptr_t>& ring,
             std::size_t ring_bytes, std::vector<LayerId> held, EventHandle after, bool fresh,
             std::vector<std::size_t> offsets, std::vector<std::size_t> places,
             const std::vector<std::tuple<LayerId, std::size_t, std::size_t>>& home, std::vector<LayerId> elsewhere) {
            StreamConfiguration configuration;
            configuration.streamed = std::move(streamed);
            for (std::uintptr_t address : ring) configuration.ring.push_back(to_address(address));
            configuration.ring_bytes = ring_bytes;
            configuration.held = std::move(held);
            configuration.after = after;
            configuration.fresh = fresh;
            configuration.offsets = std::move(offsets);
            configuration.places = std::move(places);
            for (const auto& [layer, first, bytes] : home) configuration.home.push_back({layer, first, bytes});
            configuration.elsewhere = std::move(elsewhere);
            const GilRelease release;
            prefetcher.configure(configuration);
          },
          py::arg("streamed"), py::arg("ring"), py::arg("ring_bytes"), py::arg("held") = std::vector<LayerId>{}, py::arg("after") = 0,
          py::arg("fresh") = false, py::arg("offsets") = std::vector<std::size_t>{},
          py::arg("places") = std::vector<std::size_t>{},
          py::arg("home") = std::vector<std::tuple<LayerId, std::size_t, std::size_t>>{},
          py::arg("elsewhere") = std::vector<LayerId>{})
      .def(
          "begin_pass",
          [](Prefetcher& prefetcher, StreamHandle stream,
             const std::vector<std::tuple<std::size_t, std::size_t, std::size_t>>& blocks, EventHandle filled) {
            std::vector<BlockRun> runs;
            runs.reserve(blocks.size());
            for (const auto& [block, host, count] : blocks) runs.push_back({block, host, count});
            beside_streams(stream != 0 || prefetcher.uses_streams(),
                           [&] { prefetcher.begin_pass(stream, std::move(runs), filled); });
          },
          py::arg("stream") = 0, py::arg("blocks") = std::vector<std::tuple<std::size_t, std::size_t, std::size_t>>{},
          py::arg("filled") = 0)
      .def(
          "stream_blocks",
          [](Prefetcher& prefetcher, const std::vector<std::vector<std::pair<std::uintptr_t, std::uintptr_t>>>& layers,
             std::size_t unit_bytes, std::uint32_t buffers) {
            BlockLayout layout;
            for (const auto& ranges : layers) {
              std::vector<BlockRange>& its = layout.layers.emplace_back();
              for (const auto& [region, host] : ranges) its.push_back({to_address(region), to_address(host)});
            }
            layout.unit_bytes = unit_bytes;
            layout.buffers = buffers;
            const GilRelease release;
            prefetcher.stream_blocks(layout);
          },
          py::arg("layers"), py::arg("unit_bytes"), py::arg("buffers"))
      .def("end_pass",
           [](Prefetcher& prefetcher) {
             return beside_streams(prefetcher.uses_streams(), [&] { return prefetcher.end_pass(); });
           })
      .def("unwaited",
           [](const Prefetcher& prefetcher) {
             return beside_streams(prefetcher.uses_streams(), [&] { return prefetcher.unwaited(); });
           })
      .def("wait", &wait_blocking, py::arg("layer"), py::arg("stream") = 0)
      .def(
          "wait", [](Prefetcher&, const py::object& layer, const py::object& stream) { refuse("wait", layer, stream); },
          py::arg("layer"), py::arg("stream") = 0)
      .def("done", &done, py::arg("layer"), py::arg("stream") = 0)
      .def(
          "done", [](Prefetcher&, const py::object& layer, const py::object& stream) { refuse("done", layer, stream); },
          py::arg("layer"), py::arg("stream") = 0)
      .def("ready",
           [](Prefetcher& prefetcher, LayerId layer) {
             if (prefetcher.ready(layer)) return true;
             return beside_streams(prefetcher.uses_streams(), [&] { return prefetcher.arrived(layer); });
           })
      .def("ready",
           [](const Prefetcher&, const py::object& layer) -> bool { refuse("ready", layer, py::int_(0)); })
      .def("close", &Prefetcher::close, ReleaseGil())
      .def("loading",
           [](const Prefetcher& prefetcher) {
             return beside_streams(prefetcher.uses_streams(), [&] { return prefetcher.loading(); });
           })
      .def("drain", &Prefetcher::drain, ReleaseGil())
      .def("stats",
           [](const Prefetcher& prefetcher) {
             return beside_streams(prefetcher.uses_streams(), [&] { return prefetcher.stats(); });
           })
      .def("take_timings",
           [](Prefetcher& prefetcher) {
             std::vector<std::tuple<std::uint64_t, double, double>> out;
             const auto taken = beside_streams(prefetcher.uses_streams(), [&] { return prefetcher.take_timings(); });
             for (const PassTiming& each : taken) out.emplace_back(each.pass, each.seconds, each.stall_s);
             return out;
           })
      .def_property_readonly(
          "wait_call", [](const py::object& its) { return layer_call(its, "wait"); },
          "`wait`, quicker for layers that are there.")
      .def_property_readonly(
          "done_call", [](const py::object& its) { return layer_call(its, "done"); },
          "`done`, quicker for layers that are there.")
      .def_property_readonly("copy_stream", &Prefetcher::copy_stream)
      .def_property_readonly("in_pass", &Prefetcher::in_pass);
}

}  // namespace remap::python
