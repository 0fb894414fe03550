// SPDX-License-Identifier: Apache-2.0
// remap::Error -> the class of remap.errors with the same name, numbers as attributes.
#include "common.h"
#include "remap/error.h"

namespace remap::python {
namespace {

const char* class_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::invalid_argument: return "InvalidArgument";
    case ErrorKind::invalid_state: return "InvalidState";
    case ErrorKind::out_of_memory: return "OutOfMemory";
    case ErrorKind::limit_exceeded: return "LimitExceeded";
    case ErrorKind::stale_plan: return "StalePlan";
    case ErrorKind::driver: return "DriverError";
    case ErrorKind::arena_broken: return "ArenaBroken";
    case ErrorKind::forked_process: return "ForkedProcess";
  }
  return "Error";
}

}  // namespace

void bind_errors(py::module_&) {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    if (!pointer) return;
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      try {
        py::object kind = py::module_::import("remap.errors").attr(class_name(error.kind()));
        py::dict fields;
        for (const auto& [name, value] : error.fields()) fields[py::str(name)] = py::cast(value);
        py::object raised = kind(py::str(error.what()), **fields);
        PyErr_SetObject(kind.ptr(), raised.ptr());
      } catch (py::error_already_set& other) {
        other.restore();  // Python code runs here, so Ctrl-C can come: it is raised, and not a RuntimeError in its place
      }
    }
  });
}

}  // namespace remap::python
