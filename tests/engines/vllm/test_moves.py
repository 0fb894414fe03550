"""Blocks that move get their new ids in the block tables of vLLM's runners: vLLM's own tables, without an engine.

Kernels write the tables of Model Runner V2 on a GPU; here a loop writes what was staged for them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="runs where vLLM is installed: make test-engines")

import torch
from vllm.v1.worker.block_table import MultiGroupBlockTable
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.block_table import BlockTables

from remap.adapters.vllm import engine_internals

BLOCKS, REQUESTS, WIDTH = 40, 4, 8
ROWS = {0: [3, 7, 11], 2: [12, 4], 3: [39]}
MOVES = {7: 20, 39: 1, 12: 21}
MOVED = {0: [3, 20, 11], 2: [21, 4], 3: [1]}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM falls back to without it: this processor has none, and vLLM takes it for a given."""
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)


def second_runner(**more: Any) -> Any:
    """As Model Runner V2 keeps them."""
    tables = BlockTables([16], REQUESTS, 64, [WIDTH], CPU)
    for row, ids in ROWS.items():
        tables.append_block_ids(row, (ids[:1],), overwrite=True)
        tables.append_block_ids(row, (ids[1:],), overwrite=False)
    apply(tables)
    return SimpleNamespace(block_tables=tables, kv_cache_config=SimpleNamespace(num_blocks=BLOCKS), **more)


def apply(tables: Any) -> None:
    """`apply_staged_writes`, whose kernels need a GPU."""
    for table in tables.block_tables:
        begin = 0
        ends = table._staged_write_cu_lens
        for row, start, end in zip(table._staged_write_indices, table._staged_write_starts, ends):
            values = torch.tensor(table._staged_write_contents[begin:end], dtype=torch.int32)
            table.gpu[row, start : start + len(values)] = values
            begin = end
        table.clear_staged_writes()


def first_runner() -> Any:
    """As GPUModelRunner keeps them."""
    tables = MultiGroupBlockTable(REQUESTS, 64, False, CPU, [16], [WIDTH])
    for row, ids in ROWS.items():
        tables.add_row((ids,), row)
    requests = {str(row): SimpleNamespace(block_ids=(list(ids),)) for row, ids in ROWS.items()}
    return SimpleNamespace(input_batch=SimpleNamespace(block_table=tables), requests=requests)


def test_on_the_device() -> None:
    runner = second_runner(pcp_manager=None)
    assert engine_internals.can_rename_blocks(runner)
    (table,) = runner.block_tables.block_tables
    address, before = table.gpu.data_ptr(), table.gpu.clone()
    engine_internals.rename_blocks(runner, MOVES)
    assert table.gpu.data_ptr() == address  # kernels have it
    for row, ids in MOVED.items():
        assert table.gpu[row, : len(ids)].tolist() == ids
        assert runner.block_tables.num_blocks.np[0, row] == len(ids)
    assert before[1].equal(table.gpu[1])
    runner.block_tables.append_block_ids(0, ([30],), overwrite=False)  # and it goes on
    apply(runner.block_tables)
    assert table.gpu[0, :4].tolist() == [*MOVED[0], 30]


def test_on_the_host() -> None:
    runner = first_runner()
    assert engine_internals.can_rename_blocks(runner)
    engine_internals.rename_blocks(runner, MOVES)
    (table,) = runner.input_batch.block_table.block_tables
    for row, ids in MOVED.items():
        assert table.block_table.np[row, : len(ids)].tolist() == ids
        assert runner.requests[str(row)].block_ids == (ids,)


def test_tables_that_another_object_makes_are_not_renamed() -> None:
    assert not engine_internals.can_rename_blocks(second_runner(pcp_manager=object()))
    assert not engine_internals.can_rename_blocks(SimpleNamespace())
