"""What vLLM says of its cache is what is there, in the engine's process and in another one."""

from __future__ import annotations

import re
from typing import Any

import pytest
from conftest import Vllm
from test_tokens import BURST, remap, stock


@pytest.fixture(scope="module", params=["0", "1"], ids=["one process", "another process"])
def figures(vllm: Vllm, request: pytest.FixtureRequest) -> Any:
    few = {"kv_cache_memory_bytes": 9 << 20}
    runs = [stock("stock", [BURST[:1]], **few), remap("remap", [BURST[:1]]), remap("burst", [BURST])]
    if request.param == "0":
        runs.append({**remap("fine pages", [BURST[:1]]), "settings": {"page_bytes": "8KiB"}})
    found = vllm.serve(runs, VLLM_ENABLE_V1_MULTIPROCESSING=request.param, VLLM_LOGGING_LEVEL="INFO")
    return {**found, "said": vllm.said()}


def test_the_cache_that_is_there_is_reported_and_the_largest_beside_it(figures: Any):
    run = figures["remap"]
    first, most = run["manifest"]["first_blocks"], run["manifest"]["most_blocks"]
    assert first < most
    info = run["cache_info"]
    assert int(info["num_gpu_blocks"]) == first
    assert int(info["kv_cache_size_tokens"]) <= first * 32
    assert float(info["kv_cache_max_concurrency"]) <= first * 32 / 1024
    assert info.keys() == figures["stock"]["cache_info"].keys()
    assert f"{first} KV blocks now, up to {most}" in figures["said"]


def test_layers_that_leave_are_told(figures: Any):
    assert re.search(r"[1-9]\d* of \d+ layers are away, 0 before; \d+ blocks usable", figures["said"])


def test_what_rounding_to_pages_takes_is_said_and_is_all_that_is_lost(figures: Any):
    plain = int(figures["stock"]["cache_info"]["num_gpu_blocks"])
    for name in ("remap", "fine pages"):
        if name in figures:
            manifest = figures[name]["manifest"]
            lost = (plain - manifest["first_blocks"]) * manifest["block_bytes"]
            assert 0 <= lost <= manifest["page_rounding_bytes"] + manifest["page_bytes"] + manifest["block_bytes"]
    assert figures["remap"]["manifest"]["first_blocks"] < plain
    assert f"{plain} without remap in the same memory" in figures["said"]
    if "fine pages" in figures:
        assert plain - figures["fine pages"]["manifest"]["first_blocks"] <= 1
