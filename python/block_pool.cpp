// SPDX-License-Identifier: Apache-2.0
// The block pool (remap/block_pool.h) for remap.kv.pool, which adds listeners and what is said about ids that are none.
#include "remap/block_pool.h"

#include <algorithm>

#include "common.h"
#include "page_list.h"

namespace remap::python {
namespace {

using Slot = BlockPool::Slot;
using Given = py::typing::List<py::int_>;
using Numbers = py::typing::Tuple<py::int_, py::ellipsis>;

// A range where they are consecutive, which costs no object a block.
py::object as_sequence(const std::vector<std::uint32_t>& ids) {
  if (ids.empty()) return py::tuple();
  const std::size_t last = ids.size() - 1;
  if (ids[last] - ids[0] == last) {
    return py::module_::import("builtins").attr("range")(ids[0], ids[last] + std::size_t{1});
  }
  return py::tuple(py::cast(ids));
}

Numbers as_tuple(const std::vector<std::uint32_t>& ids) { return Numbers(py::tuple(py::cast(ids))); }

// -1 for what is no id of a block.
std::int64_t as_id(py::handle object) {
  if (!PyLong_Check(object.ptr()) || PyBool_Check(object.ptr())) return -1;
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
  return overflow != 0 ? -1 : value;
}

// The ids, and the place of the first that `allowed` refuses, or that was named before; -1: there is none.
template <typename Allowed>
std::pair<BlockPool::Ids, py::ssize_t> read_ids(const Given& given, Allowed&& allowed) {
  BlockPool::Ids ids;
  ids.reserve(given.size());
  bool ascending = true;
  for (std::size_t place = 0; place < given.size(); ++place) {
    const std::int64_t id = as_id(given[place]);
    if (!allowed(id)) return {std::move(ids), static_cast<py::ssize_t>(place)};
    ascending = ascending && (ids.empty() || ids.back() < id);
    ids.push_back(static_cast<BlockId>(id));
  }
  if (!ascending) {
    BlockPool::Ids sorted(ids);
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) {
      const auto first = std::find(ids.begin(), ids.end(), *twice);
      return {ids, std::find(first + 1, ids.end(), *twice) - ids.begin()};
    }
  }
  return {std::move(ids), -1};
}

}  // namespace

void bind_block_pool(py::module_& module) {
  py::class_<BlockPool::Saved>(module, "SavedPool");
  py::class_<BlockPool, std::shared_ptr<BlockPool>>(module, "BlockPool", "Without listeners: see remap.kv.pool.")
      .def(py::init([](std::size_t ranges, std::size_t range_pages, std::size_t page_bytes, std::size_t unit_bytes,
                       std::size_t max_blocks) {
             return BlockPool(PoolShape{ranges, range_pages, page_bytes, unit_bytes, max_blocks});
           }),
           py::arg("ranges"), py::arg("range_pages"), py::arg("page_bytes"), py::arg("unit_bytes"), py::arg("max_blocks"))
      .def_property_readonly("usable_blocks", &BlockPool::usable_blocks)
      .def_property_readonly("free_blocks", &BlockPool::free_blocks)
      .def_property_readonly("live_blocks", &BlockPool::live_blocks)
      .def_property_readonly("withdrawn_blocks", &BlockPool::withdrawn_blocks)
      .def_property_readonly("external", &BlockPool::external)
      .def_property_readonly("changes", &BlockPool::changes)
      .def_property_readonly("withdrawn", &BlockPool::withdrawn)
      .def("closed_slots", [](const BlockPool& pool) { return as_tuple(pool.closed_slots()); })
      .def("live_ids", [](const BlockPool& pool) { return as_tuple(pool.live_ids()); })
      .def("open_ids", [](const BlockPool& pool) { return as_tuple(pool.open_ids()); })
      .def("owned_slots", [](const BlockPool& pool) { return as_tuple(pool.owned_slots()); })
      .def(  // into the caller's list: an interrupt behind the call finds them there
          "take",
          [](BlockPool& pool, std::size_t count, Given into) {
            for (const BlockId id : pool.allocate(count)) into.append(id);
          },
          py::arg("count"), py::arg("into"))
      .def(
          "release",
          [](BlockPool& pool, const Given& ids, bool draining) {
            const auto [found, wrong] =
                read_ids(ids, [&](std::int64_t id) { return draining ? pool.is_draining(id) : pool.is_live(id); });
            if (wrong < 0) pool.release(found);
            return wrong;
          },
          py::arg("ids"), py::arg("draining"))
      .def(
          "first_not_live",
          [](const BlockPool& pool, const Given& ids) {
            return read_ids(ids, [&](std::int64_t id) { return pool.is_live(id); }).second;
          },
          py::arg("ids"))
      .def("mark_owned",
           [](BlockPool& pool, const PageList& slots) {
             return as_sequence(pool.mark(slots.pages, Slot::absent, Slot::open, "is owned already"));
           })
      .def("mark_withdrawn",
           [](BlockPool& pool, const PageList& slots) {
             return as_sequence(pool.mark(slots.pages, Slot::open, Slot::closed, "is not owned, or withdrawn already"));
           })
      .def("mark_open",
           [](BlockPool& pool, const PageList& slots) {
             return as_sequence(pool.mark(slots.pages, Slot::closed, Slot::open, "is not withdrawn"));
           })
      .def("remove_pages",
           [](BlockPool& pool, const PageList& slots) {
             pool.mark(slots.pages, Slot::closed, Slot::absent, "must be withdrawn before it is taken");
           })
      .def("pending", [](const BlockPool& pool, const PageList& slots) { return as_tuple(pool.pending(slots.pages)); })
      .def("vacant", [](const BlockPool& pool, const PageList& slots) { return pool.vacant(slots.pages); })
      .def(
          "usable_with",
          [](const BlockPool& pool, const PageList& lost, const PageList& gained) {
            return pool.usable_with(lost.pages, gained.pages);
          },
          py::arg("lost") = py::tuple(), py::arg("gained") = py::tuple())
      .def("plan_moves", [](const BlockPool& pool, const PageList& slots) { return pool.plan_moves(slots.pages); })
      .def("commit_moves", &BlockPool::commit_moves, py::arg("moves"))
      .def("make_external", &BlockPool::make_external)
      .def("news",
           [](BlockPool& pool) {
             const BlockPool::News news = pool.news();
             return std::pair(as_sequence(news.added), as_sequence(news.withdrawn));
           })
      .def(
          "told",
          [](BlockPool& pool, const PageList& added, const PageList& withdrawn) { pool.told({added.pages, withdrawn.pages}); },
          py::arg("added"), py::arg("withdrawn"))
      .def("withdrawn_news", [](BlockPool& pool) { return as_sequence(pool.withdrawn_news()); })
      .def_property_readonly("has_news", &BlockPool::has_news)
      .def("save", &BlockPool::save)
      .def("restore", &BlockPool::restore, py::arg("saved"))
      .def("check", &BlockPool::check);
}

}  // namespace remap::python
