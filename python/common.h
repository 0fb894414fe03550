// Shared by the binding sources. Bindings translate arguments and errors; they decide nothing.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace remap::python {

void bind_errors(py::module_& module);
void bind_memory(py::module_& module);      // tensors over addresses: DLPack
void bind_backend(py::module_& module);     // the contract and its decorators, for tests and tools
void bind_arena(py::module_& module);       // Arena, Plan, Executor
void bind_prefetcher(py::module_& module);  // Prefetcher

inline std::byte* to_address(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }
inline std::uintptr_t to_int(const std::byte* address) { return reinterpret_cast<std::uintptr_t>(address); }

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

}  // namespace remap::python
