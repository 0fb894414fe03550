// SPDX-License-Identifier: Apache-2.0
#include "common.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ core of remap: pages, mappings, plans, prefetching. Use it through the package.";
  remap::python::bind_errors(module);
  remap::python::bind_memory(module);
  remap::python::bind_backend(module);
  remap::python::bind_sim(module);
  remap::python::bind_arena(module);
  remap::python::bind_prefetcher(module);
  remap::python::bind_block_pool(module);
  remap::python::bind_tenant_pages(module);
  remap::python::bind_change(module);
}
