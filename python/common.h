// SPDX-License-Identifier: Apache-2.0
// Shared by the binding sources. Bindings translate arguments and errors; they decide nothing.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>
#include <unistd.h>

#include <chrono>

namespace py = pybind11;

namespace remap::python {

void bind_errors(py::module_& module);
void bind_memory(py::module_& module);      // tensors over addresses: DLPack
void bind_backend(py::module_& module);     // the contract and its decorators, for tests and tools
void bind_sim(py::module_& module);         // the backend in virtual time; after bind_backend
void bind_arena(py::module_& module);       // Arena
void bind_prefetcher(py::module_& module);  // Prefetcher
void bind_block_pool(py::module_& module);  // BlockPool
void bind_tenant_pages(py::module_& module);  // TenantPages, Transition
void bind_change(py::module_& module);      // Plan, Draft, Executor; after all of those

// How long a blocked wait leaves a pending Ctrl-C unanswered, at most.
constexpr std::chrono::milliseconds kSignalInterval{50};

inline std::byte* to_address(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }
inline std::uintptr_t to_int(const std::byte* address) { return reinterpret_cast<std::uintptr_t>(address); }

// From now on a thread that asks for the GIL does not get it: it sleeps for ever or is ended.
inline bool interpreter_ends() noexcept {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Lets other Python threads run while it exists. Not py::gil_scoped_release: when the interpreter is ending, taking the GIL
// back ends a daemon thread by unwinding its stack, which must not begin in a destructor that cannot throw (the process would
// be terminated). Such a thread sleeps instead, as it does from Python 3.14 on.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() noexcept(false) {
    while (interpreter_ends()) pause();
    PyEval_RestoreThread(state_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

// A class that is bound already, for methods whose signatures name classes that are bound after it.
template <typename Bound>
py::class_<Bound, std::shared_ptr<Bound>> more_of(const py::module_& module, const char* name) {
  return py::reinterpret_borrow<py::class_<Bound, std::shared_ptr<Bound>>>(module.attr(name));
}

using ReleaseGil = py::call_guard<GilRelease>;

// Without the GIL where streams are used: a driver lets a call wait until a stream has room (or another thread wait that holds
// a lock of ours meanwhile), and what the stream does until then may be a host function that wants the GIL. Elsewhere the call
// is short, and letting go of the GIL would only invite other threads in.
template <typename Call>
auto beside_streams(bool streams, Call&& call) {
  if (!streams) return call();
  const GilRelease release;
  return call();
}

}  // namespace remap::python
