"""Two engines of SGLang on the pages of one broker, with memory for one: each ends its turn for the other, with requests or
without, and the tokens are those that each gives alone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import Engines, Served
from test_sglang import TOKENS, assert_clean, prompts

MODELS = ("tiny", "tiny-new")
REMAP = {"REMAP_ENABLE": "1", "REMAP_TURN_S": "1"}
ROUNDS = [
    {"prompts": prompts(6, seed=7 + number), "new": 90, "idle": idle} for number, idle in ((0, 0), (1, 4), (2, 0))
]


@contextmanager
def broker(engines: Engines, path: Path, capacity: str) -> Iterator[str]:
    command = [
        engines.python,
        "-m",
        "remap",
        "serve",
        "--socket",
        str(path),
        "--capacity",
        capacity,
        "--page-bytes",
        "64KiB",
    ]
    with subprocess.Popen(
        command, env=engines.environment(), cwd=engines.work, stdout=subprocess.PIPE, text=True
    ) as serving:
        assert serving.stdout is not None and serving.stdout.readline()
        try:
            yield f"unix:{path}"
        finally:
            serving.terminate()


@pytest.fixture(scope="module", params=[True, False], ids=["no prefix cache", "prefix cache"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**TOKENS, "disable_radix_cache": request.param, "context_length": 512}


def test_two_engines_that_do_not_fit_together_take_turns(
    engines: Engines, tmp_path: Path, options: dict[str, Any]
) -> None:
    def together(arena: str) -> list[Served]:
        def serve(model: str) -> Served:
            return engines.serve(options, ROUNDS, model, model, REMAP_ARENA=arena, **REMAP)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(serve, MODELS))

    with broker(engines, tmp_path / "s", "50MiB") as arena:
        served = together(arena)
    for model, one in zip(MODELS, served, strict=True):
        assert_clean(one)
        assert "gives its turn" in one.log
        alone = engines.serve({**options, "max_total_tokens": 8192}, ROUNDS, model)
        assert_clean(alone)
        assert one.tokens == alone.tokens
