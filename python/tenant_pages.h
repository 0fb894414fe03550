// SPDX-License-Identifier: Apache-2.0
// Tenants' pages and the plans between them, as Python has them.
#pragma once

#include "remap/tenant_pages.h"

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "common.h"

namespace remap::python {

// Pages in order: a range where they are consecutive, as a layer's usually are, and otherwise a tuple. So equal pages are equal
// objects, and most plans cost the same for layers of 10 pages and of 10,000.
inline py::object as_pages(const std::vector<PageId>& pages) {
  if (pages.empty()) return py::tuple();
  bool run = true;
  for (std::size_t at = 1; run && at < pages.size(); ++at) run = pages[at] == pages[at - 1] + 1;
  if (!run) return py::tuple(py::cast(pages));
  return py::reinterpret_steal<py::object>(PyObject_CallFunction(reinterpret_cast<PyObject*>(&PyRange_Type), "nn", py::ssize_t{pages[0]},
                                                                 static_cast<py::ssize_t>(pages[0] + pages.size())));
}

template <typename Value>
py::object as_tuple(const std::vector<Value>& values) {
  return py::tuple(py::cast(values));
}

struct Known {
  enum Name : std::size_t { homes, own, tails, ring, lent, sizes, elsewhere, unfilled, streamed, lending, ring_layers, kv, gone, cold, held, absent, regions, preference, computed, for_good, count };
};

inline Streaming streaming_of(py::handle target) {
  return {target.attr("tails").cast<std::vector<std::uint32_t>>(), target.attr("buffers").cast<std::uint32_t>(),
          target.attr("depth").cast<std::uint32_t>()};
}

// A value, and what Python has asked of it.
struct Pages {
  TenantPages value;
  std::vector<py::object> own;  // of each layer
  mutable std::array<py::object, Known::count> known;

  explicit Pages(TenantPages pages, const Pages* before = nullptr) : value(std::move(pages)) {
    own.reserve(value.layers.size());
    for (std::size_t layer = 0; layer < value.layers.size(); ++layer) {
      const bool same = before != nullptr && before->value.layers[layer].own == value.layers[layer].own;
      own.push_back(same ? before->own[layer] : as_pages(*value.layers[layer].own));
    }
    if (before != nullptr && before->value.lent == value.lent) known[Known::lent] = before->known[Known::lent];
    if (before != nullptr && before->value.ring == value.ring) known[Known::ring] = before->known[Known::ring];
  }
};

using Held = std::shared_ptr<Pages>;

// A plan, and the state behind it as Python has it.
struct Planned {
  Transition value;
  Held there;
  std::string selection;
};

}  // namespace remap::python
