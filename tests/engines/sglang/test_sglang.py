"""SGLang on a CPU, with and without remap: the same tokens, no retractions, quiet books, and everything home when it is idle.

The model is a random llama of 8 layers; weights take 34 MiB, so that 38 MiB leave room for some 380 tokens of KV cache.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from conftest import Engines, Served

LEAKS = ("memory leak", "Mem Leak", "double free", "use-after-free", "Traceback")
REMAP = {"REMAP_ENABLE": "1", "REMAP_CAPACITY": "38MiB", "REMAP_SLOWDOWN": "1000"}
# SGLang admits what it guesses to fit; a low conservativeness makes it guess wrong, and retract.
EAGER = {"max_running_requests": 8, "schedule_conservativeness": 0.1}


def prompts(count: int, seed: int, first: int = 5, step: int = 3) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 2048) for _ in range(first + step * i)] for i in range(count)]


def assert_clean(served: Served) -> None:
    assert served.returncode == 0, served.log[-4000:]
    for word in LEAKS:
        assert word not in served.log


# -- one token a page, no prefix cache ---------------------------------------------------------------------------------

BURST = [{"prompts": prompts(8, seed=3), "new": 130, "idle": 3}]
TOKENS: dict[str, Any] = {**EAGER, "disable_radix_cache": True}


@pytest.fixture(scope="module")
def plenty(engines: Engines) -> Served:
    return engines.serve({**TOKENS, "max_total_tokens": 4096}, BURST)


@pytest.fixture(scope="module")
def remapped(engines: Engines) -> Served:
    return engines.serve(TOKENS, BURST, **REMAP)


def test_tokens_are_those_of_an_engine_with_room_for_all(plenty: Served, remapped: Served):
    assert_clean(plenty)
    assert_clean(remapped)
    assert "layers attached" not in plenty.log  # the plugin is installed there too, and not switched on
    assert [len(answer) for answer in plenty.tokens[0]] == [130] * 8
    assert remapped.tokens == plenty.tokens
    assert plenty.retracted == 0


def test_layers_went_and_were_streamed_and_nobody_was_retracted(engines: Engines, remapped: Served):
    at_start = int(remapped.log.split(" tokens usable")[0].rsplit(" ", 1)[1])
    stock = engines.serve({**TOKENS, "max_total_tokens": at_start}, BURST)
    assert_clean(stock)
    assert stock.retracted > 0  # the same memory for KV, without remap
    assert remapped.retracted == 0
    assert max(remapped.remapped) >= 2
    assert remapped.streamed[-1] > 100 * 2**20  # some layers, in some hundred passes


def test_everything_comes_home_when_it_is_idle(remapped: Served):
    at_start = int(remapped.log.split(" tokens usable")[0].rsplit(" ", 1)[1])
    assert remapped.remapped[-1] == 0
    assert remapped.capacity == [at_start]


# -- new weights between requests --------------------------------------------------------------------------------------


def test_updated_weights_are_what_streams_afterwards(engines: Engines, plenty: Served):
    """By a checkpoint and by tensors. Right behind a burst, so that layers may be away when the update comes."""
    new, old = str(engines.work / "tiny-new"), str(engines.work / "tiny")
    (first,) = BURST
    rounds = [
        {**first, "idle": 0},
        {**first, "idle": 0, "update": ["disk", new]},
        {**first, "idle": 0, "update": ["tensor", old]},
        {**first, "update": ["tensor", new]},
    ]
    other = engines.serve({**TOKENS, "max_total_tokens": 4096, "model_path": new}, BURST)
    updated = engines.serve(TOKENS, rounds, **REMAP)
    assert_clean(other)
    assert_clean(updated)
    assert [done for done, *_ in updated.updated] == [True] * 7, updated.updated
    assert max(updated.remapped) >= 2 and updated.remapped[-1] == 0
    assert updated.tokens == [plenty.tokens[0], other.tokens[0], plenty.tokens[0], other.tokens[0]]
    assert plenty.tokens != other.tokens


# -- pages of 16, prefix cache, chunked prompts, a flush ---------------------------------------------------------------


def test_with_pages_and_a_prefix_cache(engines: Engines):
    shared = prompts(1, seed=4, first=70)[0]
    family = [shared + tail for tail in prompts(6, seed=5)]
    long = prompts(1, seed=6, first=300)
    rounds = [
        {"prompts": family, "new": 120, "idle": 2},
        {"prompts": long + family[:4], "new": 40, "idle": 2},
        {"prompts": family, "new": 20, "idle": 2, "flush": True},
        {"prompts": family, "new": 120, "idle": 3},
    ]
    engine = {**EAGER, "page_size": 16, "chunked_prefill_size": 64, "max_prefill_tokens": 256}
    plenty = engines.serve({**engine, "max_total_tokens": 4096}, rounds)
    remapped = engines.serve(engine, rounds, **REMAP)
    assert_clean(plenty)
    assert_clean(remapped)
    assert remapped.tokens == plenty.tokens
    assert remapped.retracted == 0
    assert max(remapped.remapped) >= 2
    assert remapped.remapped[-1] == 0
    assert len(set(remapped.capacity)) == 1  # what was at the start, after each round
    assert "Cache flushed successfully" in remapped.log


def test_a_cap_on_layers_holds_and_what_does_not_fit_is_retracted_as_ever(engines: Engines, plenty: Served):
    capped = engines.serve({**TOKENS, "disable_overlap_schedule": True}, BURST, **REMAP, REMAP_MAX_LAYERS="1")
    assert_clean(capped)
    assert max(capped.remapped) == 1
    assert capped.retracted > 0
    assert [len(answer) for answer in capped.tokens[0]] == [130] * 8
    assert capped.tokens == plenty.tokens


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_an_engine_that_is_enabled_without_a_capacity_does_not_start(engines: Engines):
    served = engines.serve(TOKENS, BURST, REMAP_ENABLE="1")
    assert served.returncode != 0
    assert "REMAP_ENABLE is set but REMAP_CAPACITY is not" in served.log
    assert served.tokens == []


def test_an_older_version_is_refused_and_the_refusal_is_raised_again_at_the_start(engines: Engines):
    script = """
import sglang.version
sglang.version.__version__ = "0.5.9"
from sglang.srt.plugins.hook_registry import HookRegistry
from remap.adapters.sglang import register
from remap.errors import InvalidState
try:
    register()
except InvalidState as refusal:
    assert (refusal.version, refusal.tested) == ("0.5.9", ("0.5.23",))
else:
    raise SystemExit("registered")
(target, hooks), = HookRegistry._hooks.items()
assert target.endswith("ModelRunner.alloc_memory_pool")
try:
    hooks[0][1](None)
except InvalidState:
    print("refused")
"""
    done = engines.run("-c", script, **REMAP)
    assert done.returncode == 0, done.stdout
    assert done.stdout.rstrip().endswith("refused")


def test_a_newer_version_in_which_a_hook_would_not_fit_is_refused_another_is_served(engines: Engines):
    script = """
import sglang.version
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.plugins.hook_registry import HookRegistry
from remap.adapters.sglang import register, versions
from remap.errors import InvalidState
sglang.version.__version__ = "0.6.0"
register()
assert len(HookRegistry._hooks) == sum(map(len, versions.TARGETS.values()))
PrefillBudget.check_prefill = lambda self, tokens: None
try:
    versions.check_version("0.7.0")
except InvalidState as refusal:
    print("UNLIKE", refusal.unlike)
"""
    done = engines.run("-c", script, **REMAP)
    assert done.returncode == 0, done.stdout
    assert "this is 0.6.0" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("UNLIKE")]
    assert line.count(":PrefillBudget.check_prefill ") == 1 and line.count(" takes ") == 1


def test_a_newer_version_is_tried_before_it_serves(engines: Engines, plenty: Served):
    served = engines.serve(TOKENS, BURST, **REMAP, PRETEND_TESTED="0.5.22")
    assert_clean(served)
    assert "remap was tested with SGLang 0.5.22, this is 0.5.23" in served.log
    assert served.tokens == plenty.tokens
    assert served.retracted == 0 and max(served.remapped) >= 2 and served.remapped[-1] == 0


def test_a_newer_version_that_fails_the_trial_does_not_start(engines: Engines):
    served = engines.serve(TOKENS, BURST, **REMAP, PRETEND_TESTED="0.5.22", PRETEND_PAST="1")
    assert served.returncode != 0 and served.tokens == []
    (said,) = {line for line in served.log.splitlines() if "a trial before the first request failed" in line}
    assert "remap was tested with SGLang 0.5.22; with 0.5.23" in said


def test_every_hook_has_a_place_in_this_version(engines: Engines):
    script = """
import sglang.srt.managers.scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from remap.adapters.sglang import versions
load_plugins()
wanted = {target for targets in versions.TARGETS.values() for target in targets}
print("MISSING", sorted(wanted - HookRegistry._patched))
from sglang.srt.server_args import ServerArgs
known = {name for base in ServerArgs.__mro__ for name in getattr(base, "__annotations__", ())}
print("UNKNOWN", sorted(set(versions._SERVED) - known))
"""
    done = engines.run("-c", script, **REMAP)
    assert done.returncode == 0, done.stdout
    assert "MISSING []" in done.stdout, done.stdout[-500:]
    assert "UNKNOWN []" in done.stdout, done.stdout[-500:]
