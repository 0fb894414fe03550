// SPDX-License-Identifier: Apache-2.0
// The backend contract as Python sees it: for the conformance suite, benchmarks and tools. Addresses are ints.
#include "remap/backend.h"

#include <chrono>
#include <cmath>

#include "common.h"
#include "remap/backends.h"
#include "remap/decorators.h"
#include "remap/sim.h"

namespace remap::python {
namespace {

const char* kind_name(DeviceInfo::Kind kind) {
  switch (kind) {
    case DeviceInfo::Kind::host: return "host";
    case DeviceInfo::Kind::cuda: return "cuda";
    case DeviceInfo::Kind::sim: return "sim";
  }
  return "host";
}

// pybind11 makes an enumeration's value of any number.
template <typename Enum>
Enum known(Enum value, Enum last) {
  if (value <= last) return value;
  throw Error(ErrorKind::invalid_argument, "Unknown value " + std::to_string(static_cast<int>(value)) + " of an enumeration. Nothing changed.",
              {{"value", std::int64_t{static_cast<int>(value)}}});
}

bool synchronize(Backend& backend, EventHandle event, double timeout_s) {
  if (std::isnan(timeout_s)) throw Error(ErrorKind::invalid_argument, "A timeout is a number of seconds. Nothing changed.");
  if (backend.device().kind == DeviceInfo::Kind::sim) {
    // Virtual time passes at once, and the timeout is in it: nothing to interrupt, and slices of it would not end by our clock.
    const double most = std::chrono::duration<double>(std::chrono::nanoseconds::max()).count() / 2;
    const std::chrono::duration<double> timeout(std::fmin(std::fmax(timeout_s, 0.0), most));
    return backend.synchronize(event, std::chrono::duration_cast<std::chrono::nanoseconds>(timeout));
  }
  constexpr double kForeverS = 1e9;  // more does not fit a clock's nanoseconds
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::fmin(timeout_s, kForeverS));
  while (true) {
    {
      const GilRelease release;
      const auto left = deadline - std::chrono::steady_clock::now();
      const auto slice = std::min<std::chrono::nanoseconds>(
          kSignalInterval, std::max<std::chrono::nanoseconds>(
                                    std::chrono::nanoseconds(0), std::chrono::duration_cast<std::chrono::nanoseconds>(left)));
      if (backend.synchronize(event, slice)) return true;
      if (std::chrono::steady_clock::now() >= deadline) return false;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

py::typing::Dict<py::str, py::int_> usage(const Backend& backend) {
  const Usage usage = backend.usage();
  py::typing::Dict<py::str, py::int_> out;
  out["reserved_bytes"] = usage.reserved_bytes;
  out["page_bytes"] = usage.page_bytes;
  out["mapped_bytes"] = usage.mapped_bytes;
  out["host_bytes"] = usage.host_bytes;
  out["mappings"] = usage.mappings;
  out["streams"] = usage.streams;
  out["events"] = usage.events;
  return out;
}

void bind_contract(py::module_& module) {
  py::class_<Backend, std::shared_ptr<Backend>>(module, "Backend")
      .def_property_readonly("name", &Backend::name)
      .def_property_readonly("granularity", &Backend::granularity)
      .def_property_readonly("can_exchange", &Backend::can_exchange)
      .def_property_readonly("new_pages_are_zero", &Backend::new_pages_are_zero)
      .def("usage", &usage)
      .def_property_readonly("device_kind", [](const Backend& b) { return kind_name(b.device().kind); })
      .def_property_readonly("device_index", [](const Backend& b) { return b.device().index; })
      .def_property_readonly("host_addressable", [](const Backend& b) { return b.device().host_addressable; })
      .def("reserve", [](Backend& b, std::size_t bytes, std::size_t align) { return to_int(b.reserve(bytes, align)); }, ReleaseGil())
      .def("release", [](Backend& b, std::uintptr_t at, std::size_t bytes) { b.release(to_address(at), bytes); }, ReleaseGil())
      .def("retire", [](Backend& b, std::uintptr_t at, std::size_t bytes) { b.retire(to_address(at), bytes); }, ReleaseGil())
      .def("create_page", &Backend::create_page, ReleaseGil())
      .def("destroy_page", &Backend::destroy_page, ReleaseGil())
      .def("map",
           [](Backend& b, std::uintptr_t at, const std::vector<PageHandle>& pages, std::size_t page_bytes) {
             b.map(to_address(at), pages.data(), pages.size(), page_bytes);
           }, ReleaseGil())
      .def("unmap", [](Backend& b, std::uintptr_t at, std::size_t bytes) { b.unmap(to_address(at), bytes); }, ReleaseGil())
      .def("set_access",
           [](Backend& b, std::uintptr_t at, std::size_t bytes, Access access) {
             b.set_access(to_address(at), bytes, known(access, Access::read_write));
           }, ReleaseGil())
      .def("exchange",
           [](Backend& b, std::uintptr_t x, std::uintptr_t y, std::size_t bytes) { b.exchange(to_address(x), to_address(y), bytes); }, ReleaseGil())
      .def("populate", [](Backend& b, std::uintptr_t at, std::size_t bytes) { b.populate(to_address(at), bytes); }, ReleaseGil())
      .def("allocate_host", [](Backend& b, std::size_t bytes) { return to_int(b.allocate_host(bytes)); }, ReleaseGil())
      .def("free_host", [](Backend& b, std::uintptr_t at, std::size_t bytes) { b.free_host(to_address(at), bytes); }, ReleaseGil())
      .def("register_host",
           [](Backend& b, std::uintptr_t at, std::size_t bytes, HostUse use) {
             b.register_host(to_address(at), bytes, known(use, HostUse::staged));
           },
           py::arg("address"), py::arg("bytes"), py::arg("use") = HostUse::locked, ReleaseGil())
      .def("unregister_host", [](Backend& b, std::uintptr_t at, std::size_t bytes) { b.unregister_host(to_address(at), bytes); }, ReleaseGil())
      .def("use_host",
           [](Backend& b, std::uintptr_t at, std::size_t bytes, HostUse use) {
             b.use_host(to_address(at), bytes, known(use, HostUse::staged));
           },
           py::arg("address"), py::arg("bytes"), py::arg("use"), ReleaseGil())
      .def("create_stream", &Backend::create_stream, ReleaseGil())
      .def("destroy_stream", &Backend::destroy_stream, ReleaseGil())
      .def("adopt_stream", &Backend::adopt_stream, py::arg("native"), ReleaseGil())
      .def("forget_stream", &Backend::forget_stream, py::arg("stream"), ReleaseGil())
      .def("copy",
           [](Backend& b, StreamHandle stream, std::uintptr_t to, std::uintptr_t from, std::size_t bytes) {
             b.copy(stream, to_address(to), to_address(from), bytes);
           }, ReleaseGil())
      .def("copy_batch",
           [](Backend& b, StreamHandle stream, const std::vector<std::tuple<std::uintptr_t, std::uintptr_t, std::size_t>>& ranges) {
             std::vector<CopyRange> copies;
             copies.reserve(ranges.size());
             for (const auto& [to, from, bytes] : ranges) copies.push_back({to_address(to), to_address(from), bytes});
             b.copy_batch(stream, copies.data(), copies.size());
           }, py::arg("stream"), py::arg("ranges"), ReleaseGil())
      .def("fill",
           [](Backend& b, StreamHandle stream, std::uintptr_t to, std::uint8_t value, std::size_t bytes) {
             b.fill(stream, to_address(to), value, bytes);
           }, ReleaseGil())
      .def("create_event", &Backend::create_event, py::arg("timed") = true, ReleaseGil())
      .def("destroy_event", &Backend::destroy_event, ReleaseGil())
      .def("record", &Backend::record, ReleaseGil())
      .def("stream_wait", &Backend::stream_wait, ReleaseGil())
      .def("query", &Backend::query, ReleaseGil())
      .def("synchronize", &synchronize, py::arg("event"), py::arg("timeout_s"))
      .def("elapsed", &Backend::elapsed);
}

void bind_decorators(py::module_& module) {
  py::enum_<Call> calls(module, "Call");
  for (std::size_t i = 0; i < kCallKinds; ++i) calls.value(call_name(static_cast<Call>(i)), static_cast<Call>(i));
  py::enum_<ErrorKind>(module, "ErrorKind")
      .value("driver", ErrorKind::driver)
      .value("out_of_memory", ErrorKind::out_of_memory)
      .value("limit_exceeded", ErrorKind::limit_exceeded)
      .value("invalid_argument", ErrorKind::invalid_argument);

  const auto kind = py::arg_v("kind", ErrorKind::driver, "ErrorKind.driver");
  py::class_<FaultBackend, Backend, std::shared_ptr<FaultBackend>>(module, "FaultBackend")
      .def("arm", &FaultBackend::arm, py::arg("call"), py::arg("nth"), py::arg("forever") = false, kind)
      .def("arm_any", &FaultBackend::arm_any, py::arg("nth"), py::arg("forever") = false, kind)
      .def("fail_async_copy", &FaultBackend::fail_async_copy, py::arg("nth"), py::arg("forever") = false)
      .def("disarm", &FaultBackend::disarm)
      .def("calls", [](const FaultBackend& b, const py::object& call) {
             return call.is_none() ? b.calls() : b.calls(call.cast<Call>());
           }, py::arg("call") = py::none());

  py::class_<TraceRecord>(module, "TraceRecord")
      .def_readonly("call", &TraceRecord::call)
      .def_readonly("failed", &TraceRecord::failed)
      .def_readonly("result", &TraceRecord::result)
      .def_readonly("args", &TraceRecord::args)
      .def_readonly("list", &TraceRecord::list);
  py::class_<TraceBackend, Backend, std::shared_ptr<TraceBackend>>(module, "TraceBackend")
      .def("count", [](const TraceBackend& b, const py::object& call) {
             return call.is_none() ? b.count() : b.count(known(call.cast<Call>(), Call::elapsed));
           }, py::arg("call") = py::none())
      .def("set_logging", &TraceBackend::set_logging)
      .def("log", &TraceBackend::log)
      .def("clear_log", &TraceBackend::clear_log);
  py::class_<ReplayResult>(module, "ReplayResult")
      .def_readonly("ok", &ReplayResult::ok)
      .def_readonly("replayed", &ReplayResult::replayed)
      .def_readonly("divergence", &ReplayResult::divergence)
      .def_readonly("message", &ReplayResult::message);
  module.def("serialize_trace", &serialize);
  module.def("parse_trace", &parse_trace);
  module.def("replay", [](const std::vector<TraceRecord>& log, Backend& backend) { return replay(log, backend); }, ReleaseGil());
}

}  // namespace

void bind_backend(py::module_& module) {
  py::enum_<HostUse>(module, "HostUse").value("locked", HostUse::locked).value("staged", HostUse::staged);
  py::enum_<Access>(module, "Access").value("none", Access::none).value("read", Access::read).value("read_write", Access::read_write);
  bind_contract(module);
  bind_decorators(module);
  module.def(
      "make_host_backend",
      [](std::size_t capacity_bytes, std::size_t page_bytes, std::size_t copy_threads, std::optional<int> file) {
        if (file && *file < 0) {
          throw Error(ErrorKind::invalid_argument, "host backend: file " + std::to_string(*file) + " is no memfd: give None for a new one",
                      {{"file", std::int64_t{*file}}});
        }
        return make_host_backend(HostOptions{capacity_bytes, page_bytes, copy_threads, file.value_or(-1)});
      },
      py::arg("capacity_bytes"), py::arg("page_bytes"), py::arg("copy_threads") = 1, py::arg("file") = py::none(), ReleaseGil());
  py::enum_<ShareableHandle>(module, "ShareableHandle")
      .value("none", ShareableHandle::none)
      .value("posix_fd", ShareableHandle::posix_fd)
      .value("fabric", ShareableHandle::fabric);
  py::class_<CudaPages, std::shared_ptr<CudaPages>>(module, "CudaPages")
      .def_property_readonly("page_bytes", &CudaPages::page_bytes)
      .def_property_readonly("count", &CudaPages::count)
      .def_property_readonly("device", &CudaPages::device)
      .def_property_readonly("uuid", &CudaPages::uuid)
      .def("export_page", &CudaPages::export_page, py::arg("number"), ReleaseGil())
      .def("import_page", &CudaPages::import_page, py::arg("descriptor"), ReleaseGil())
      .def("close", &CudaPages::close, ReleaseGil());
  module.def(
      "make_cuda_pages",
      [](std::size_t page_bytes, std::size_t count, int device, std::string uuid, std::string library) {
        return make_cuda_pages(CudaPagesOptions{device, std::move(uuid), std::move(library), page_bytes, count});
      },
      py::arg("page_bytes"), py::arg("count") = 0, py::arg("device") = 0, py::arg("uuid") = "", py::arg("library") = "",
      ReleaseGil());
  module.def(
      "make_cuda_backend",
      [](int device, std::string library, ShareableHandle shareable, bool gpu_direct_rdma, std::size_t host_budget_bytes,
         std::size_t host_piece_bytes, std::optional<std::shared_ptr<CudaPages>> pages) {
        known(shareable, ShareableHandle::fabric);
        return make_cuda_backend(
            CudaOptions{device, std::move(library), shareable, gpu_direct_rdma, host_budget_bytes, host_piece_bytes, pages.value_or(nullptr)});
      },
      py::arg("device") = 0, py::arg("library") = "", py::arg_v("shareable", ShareableHandle::none, "ShareableHandle.none"),
      py::arg("gpu_direct_rdma") = false, py::arg("host_budget_bytes") = 0,
      py::arg("host_piece_bytes") = CudaOptions{}.host_piece_bytes, py::arg("pages") = py::none(), ReleaseGil());
  module.def(
      "host_room",
      [](std::size_t budget_bytes) {
        const HostRoom room = host_room(budget_bytes);
        return py::make_tuple(room.bytes, room.limited_by);
      },
      py::arg("budget_bytes") = 0);
  module.def("machine_room", [] {
    const HostRoom room = machine_room();
    return py::make_tuple(room.bytes, room.limited_by);
  });
  module.def(
      "probe_cuda",
      [](const std::string& library) {
        const CudaProbe probe = probe_cuda(library);
        py::list devices;
        for (const CudaDevice& device : probe.devices) {
          py::dict entry;
          entry["index"] = device.index;
          entry["name"] = device.name;
          entry["total_bytes"] = device.total_bytes;
          entry["free_bytes"] = device.free_bytes;
          entry["vmm"] = device.vmm;
          entry["granularity"] = device.granularity;
          entry["recommended_granularity"] = device.recommended_granularity;
          entry["posix_fd"] = device.posix_fd;
          entry["fabric"] = device.fabric;
          entry["gpu_direct_rdma"] = device.gpu_direct_rdma;
          entry["read_only_host_register"] = device.read_only_host_register;
          entry["coherent"] = device.coherent;
          entry["integrated"] = device.integrated;
          entry["compute_capability"] = py::make_tuple(device.compute_major, device.compute_minor);
          entry["uuid"] = device.uuid;
          entry["pcie"] = py::make_tuple(device.pcie_domain, device.pcie_bus, device.pcie_device);
          devices.append(entry);
        }
        py::typing::Dict<py::str, py::object> out;
        out["library"] = probe.library;
        out["driver_version"] = probe.driver_version;
        out["emulated"] = probe.emulated;
        out["host_budget_bytes"] = probe.host_budget_bytes;
        out["host_limited_by"] = probe.host_limited_by;
        out["devices"] = devices;
        return out;
      },
      py::arg("library") = "");
  module.def("make_fault_backend", &make_fault_backend, py::arg("inner"));
  module.def("make_trace_backend", &make_trace_backend, py::arg("inner"));
  module.def(
      "make_limit_backend",
      [](std::shared_ptr<Backend> inner, const py::KWArgs<py::int_>& arguments) {
        Limits limits;
        for (const auto& [key, value] : arguments) {
          const auto name = key.cast<std::string>();
          std::size_t* field = name == "page_bytes"       ? &limits.page_bytes
                               : name == "reserved_bytes" ? &limits.reserved_bytes
                               : name == "mappings"       ? &limits.mappings
                               : name == "host_bytes"     ? &limits.host_bytes
                               : name == "streams"        ? &limits.streams
                               : name == "events"         ? &limits.events
                                                          : nullptr;
          if (field == nullptr) throw Error(ErrorKind::invalid_argument, "Unknown limit '" + name + "'. Nothing was created.");
          *field = value.cast<std::size_t>();
        }
        return make_limit_backend(std::move(inner), limits);
      },
      py::arg("inner"));
}

}  // namespace remap::python
