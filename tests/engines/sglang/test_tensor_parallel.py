"""Two ranks of SGLang, each a process with a scheduler and a session of its own: the tokens are those of two ranks without remap,
and all ranks make the same change, or none.

Each rank has 20 MiB: its half of the weights takes 17 MiB of them.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from conftest import Engines, Served
from test_graphs import GRAPHS, ROUNDS, story
from test_sglang import EAGER, REMAP, TOKENS, assert_clean, prompts

RANKS = {"tp_size": 2}
BURST = ROUNDS[:2]  # three requests, then eight, which need more than there is
HERE = {**REMAP, "REMAP_CAPACITY": "20MiB"}


@pytest.fixture(scope="module")
def pair(engines: Engines) -> Engines:
    if engines.cuda:
        pytest.skip("the model and its memory are those of a CPU's test; two GPUs have not been tried")
    if (os.cpu_count() or 1) < 2:
        pytest.skip("SGLang binds each rank to a core of its own, and there is one")
    return engines


def serve(pair: Engines, engine: dict[str, Any], rounds: list[dict[str, Any]], **more: str) -> Served:
    served = pair.serve({**engine, **RANKS}, rounds, SGLANG_CPU_OMP_THREADS_BIND="0|1", **more)
    assert_clean(served)
    return served


@pytest.fixture(scope="module")
def plenty(pair: Engines) -> Served:
    return serve(pair, {**TOKENS, "max_total_tokens": 4096}, BURST)


def test_ranks_remap_together_and_replay_graphs_together(pair: Engines, plenty: Served):
    """With overlap scheduling, SGLang's default."""
    remapped = serve(pair, {**TOKENS, **GRAPHS}, BURST, **HERE, PRETEND_GRAPHS="1")
    assert remapped.log.count("layers attached") == 2
    assert remapped.tokens == plenty.tokens
    assert remapped.retracted == 0
    assert max(remapped.remapped) >= 2 and remapped.remapped[-1] == 0
    assert remapped.streamed[-1] > 50 * 2**20
    at_start = int(remapped.log.split(" tokens usable")[0].rsplit(" ", 1)[1])
    assert remapped.capacity == [at_start] * 2
    batches = story(remapped)
    assert sum(graph for layers, graph in batches[:20]) >= 15
    away = [graph for layers, graph in batches if layers]
    assert len(away) > 50 and not any(away)


def test_a_change_that_one_rank_cannot_make_is_made_on_none(pair: Engines, plenty: Served):
    served = serve(pair, TOKENS, BURST, **HERE, PRETEND_SHORT="1")
    assert "rank 1: no memory, as was pretended; all ranks stay at 1 layers" in served.log
    assert max(served.remapped) == 1 and served.remapped[-1] == 0
    assert served.retracted > 0  # what two layers would have been for
    assert served.tokens == plenty.tokens


def test_without_overlap_with_a_prefix_cache_a_flush_and_new_weights(pair: Engines):
    shared = prompts(1, seed=4, first=70)[0]
    family = [shared + tail for tail in prompts(6, seed=5)]
    new, old = (str(pair.work / name) for name in ("tiny-new", "tiny"))
    rounds = [
        {"prompts": family, "new": 120, "idle": 0},
        {"prompts": family, "new": 20, "idle": 2, "flush": True, "update": ["disk", new]},
        {"prompts": family, "new": 120, "idle": 3, "update": ["tensor", old]},
    ]
    engine = {
        **EAGER,
        "page_size": 16,
        "chunked_prefill_size": 64,
        "max_prefill_tokens": 256,
        "disable_overlap_schedule": True,
    }
    stock = serve(pair, {**engine, "max_total_tokens": 4096}, rounds)
    remapped = serve(pair, engine, rounds, **HERE)
    assert [done for done, *_ in remapped.updated] == [done for done, *_ in stock.updated] == [True] * 4
    assert remapped.tokens == stock.tokens and stock.tokens[0] != stock.tokens[1]
    assert remapped.retracted == 0
    assert max(remapped.remapped) >= 2 and remapped.remapped[-1] == 0
    assert remapped.capacity[1] == remapped.capacity[2]
    assert "Cache flushed successfully" in remapped.log
