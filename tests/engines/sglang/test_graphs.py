"""Graphs, with SGLang's defaults otherwise: they are replayed while all layers are at home and never while one is away, and the
tokens are those of stock SGLang.

On a GPU these are its own CUDA graphs, where SGLang and remap are installed (not run yet). On a CPU graphs.py says what is
made up.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from conftest import Engines, Served
from test_sglang import EAGER, REMAP, assert_clean, prompts

ROUNDS = [
    {"prompts": prompts(3, seed=7), "new": 20, "idle": 1},  # three rows of a graph for four
    {"prompts": prompts(8, seed=3), "new": 130, "idle": 2},
    {"prompts": prompts(3, seed=8), "new": 20, "idle": 1},
]
GRAPHS = {
    "cuda_graph_bs_decode": [4, 8],
    "cuda_graph_backend_prefill": "breakable",
    "cuda_graph_bs_prefill": [32, 64, 128, 256],
}
# On a GPU pages have 2 MiB, and the cache grows by 16 of them: layers of that size, and requests that need more.
LARGE = ("wide", [{**each, "new": 3 * each["new"]} for each in ROUNDS], {"REMAP_CAPACITY": "432MiB"})


def story(served: Served) -> list[tuple[int, bool]]:
    """(layers that are remapped, whether a graph was replayed) of each batch, by the logs of both."""
    layers, found = 0, []
    for line in served.log.splitlines():
        change, batch = re.search(r"remapped layers (\d+), tokens", line), re.search(r"(cpu|cuda) graph: (\w+)", line)
        if change:
            layers = int(change[1])
        if batch:
            found.append((layers, batch[2] == "True"))
    return found


@pytest.fixture(scope="module", params=[{}, {"disable_radix_cache": True, "disable_overlap_schedule": True}])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**EAGER, **request.param}


def test_graphs_are_replayed_with_layers_at_home_and_tokens_are_stock_sglangs(
    engines: Engines, options: dict[str, Any]
):
    model, rounds, more = LARGE if engines.cuda else ("tiny", ROUNDS, {})
    pretend = {} if engines.cuda else {"PRETEND_GRAPHS": "1"}
    stock = engines.serve({**options, "max_total_tokens": 8192}, rounds, model)
    remapped = engines.serve({**options, **GRAPHS}, rounds, model, **{**REMAP, **more, **pretend})
    assert_clean(stock)
    assert_clean(remapped)
    assert remapped.tokens == stock.tokens
    assert remapped.retracted == 0
    assert max(remapped.remapped) >= 2 and remapped.remapped[-1] == 0
    batches = story(remapped)
    away = [graph for layers, graph in batches if layers]
    assert len(away) > 50 and not any(away)
    last = max(number for number, (layers, _) in enumerate(batches) if layers)
    for home in ([graph for layers, graph in batches[:20]], [graph for _, graph in batches[last + 1 :]]):
        assert sum(home) >= 15  # SGLang pads no prompt to more than twice its length; a layer may be on its way
