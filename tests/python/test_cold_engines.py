"""More models than memory under the engine: who is given a turn takes the pages of the others, and every token is the same."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

import remap
from remap.inside import inside

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import kv_spec, make  # noqa: E402

from remap.engine import LLMEngine, Request, SamplingParams, SharedEngines  # noqa: E402

PAGE = 16384
KINDS = ("llama", "qwen3", "llama-odd", "llama", "qwen3")


def requests(names: list[str]) -> dict[str, list[Request]]:
    rng = random.Random(3)
    made: dict[str, list[Request]] = {name: [] for name in names}
    for number in range(3 * len(names)):
        prompt = tuple(rng.randrange(3, 50) for _ in range(rng.randint(4, 24)))
        made[names[number % len(names)]].append(
            Request(f"{number}", prompt, SamplingParams(max_tokens=rng.randint(2, 8)))
        )
    return made


def serve(memory: int | None, quantum_s: float, host_kv: Any = "auto") -> tuple[Any, list[Any], int]:
    """(tokens, activations, the most models whose layers were all at home at once)."""
    models = {f"m{i}": make(kind, seed=i) for i, kind in enumerate(KINDS)}
    knobs = remap.advanced.Knobs(min_idle=0.0)
    with remap.Session(memory or 64 << 20, page_bytes=PAGE, config=knobs, host_kv=host_kv) as session:
        engines = {}
        for name, model in models.items():
            spec = kv_spec(model, min_blocks=8, max_blocks=4000)
            tenant = session.attach(
                model, name=name, kv=spec, active=False, pages="none" if memory else "own", hooks=False
            )
            engines[name] = LLMEngine(model, tenant, session=session, max_num_seqs=4, max_batch_tokens=32)
        shared = SharedEngines(session, engines, quantum_s=quantum_s)
        home = 0

        def look(*_: Any) -> None:
            nonlocal home
            home = max(home, sum(not session._tenants[name].pages.cold for name in models))

        result = shared.run(requests(list(models)), look)
        remap.advanced.check(session)
        for name in models:
            assert inside(engines[name].tenant).stats().abandoned == 0
        return result.tokens(), list(result.activations), home


@pytest.mark.parametrize("quantum_s", [math.inf, 0.003])
def test_tokens_are_those_of_ample_memory(quantum_s: float) -> None:
    ample, _, all_of_them = serve(None, quantum_s)
    tokens, activations, home = serve(2 << 20, quantum_s)
    assert tokens == ample and all_of_them == len(KINDS) and 1 <= home <= 2  # at once
    assert {turn.tenant for turn in activations if turn.restored_layers} == {f"m{i}" for i in range(len(KINDS))}
