// SPDX-License-Identifier: Apache-2.0
// Page numbers as an argument from Python: any sequence of integers, or a `range`, which costs no Python object a page.
#pragma once

#include <limits>
#include <utility>
#include <vector>

#include "common.h"
#include "remap/plan.h"

namespace remap::python {

struct PageList {
  std::vector<PageId> pages;
};

}  // namespace remap::python

namespace pybind11::detail {

template <>
struct type_caster<remap::python::PageList> {
  PYBIND11_TYPE_CASTER(remap::python::PageList, const_name("Sequence[int]"));

  bool load(handle source, bool convert) {
    if (PyRange_Check(source.ptr())) return load_range(source);
    make_caster<std::vector<remap::PageId>> pages;
    if (!pages.load(source, convert)) return false;
    value.pages = cast_op<std::vector<remap::PageId>&&>(std::move(pages));
    return true;
  }

 private:
  // A range's numbers are first, first + step, ...: if its first and its last are page numbers, all are.
  bool load_range(handle source) {
    const Py_ssize_t count = PyObject_Length(source.ptr());
    long long first = 0;
    long long step = 1;
    if (count < 0 || !number(source, "start", first) || (count > 1 && !number(source, "step", step))) {
      PyErr_Clear();  // longer than memory, or a bound beyond 64 bits: no list of pages
      return false;
    }
    constexpr long long kMost = std::numeric_limits<remap::PageId>::max();
    if (count == 0) return true;
    if (first < 0 || first > kMost) return false;
    // Before multiplying: with count - 1 steps of at least 1 the last number would lie outside anyway.
    if (count > 1 && (step > kMost || step < -kMost || count - 1 > kMost / (step < 0 ? -step : step))) return false;
    const long long last = first + (count - 1) * step;
    if (last < 0 || last > kMost) return false;
    value.pages.resize(static_cast<std::size_t>(count));
    long long page = first;
    for (remap::PageId& each : value.pages) {
      each = static_cast<remap::PageId>(page);
      page += step;
    }
    return true;
  }

  static bool number(handle source, const char* name, long long& out) {
    const object attribute = reinterpret_steal<object>(PyObject_GetAttrString(source.ptr(), name));
    if (!attribute) return false;
    out = PyLong_AsLongLong(attribute.ptr());
    return !(out == -1 && PyErr_Occurred() != nullptr);
  }
};

}  // namespace pybind11::detail
