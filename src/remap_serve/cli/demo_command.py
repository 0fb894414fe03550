# SPDX-License-Identifier: Apache-2.0
"""`remap demo`: its options, and a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from remap.cli import smollm2
from remap.cli.errors import exit_on_error, writable
from remap.cli.options import MEMORY, Json, MaxBatchTokens, MaxNumSeqs, memory_bytes
from remap.errors import InvalidArgument
from remap.sizes import show_size

from .demo_config import ASKED, BUDGETS, FITTING_MODELS, MOST_MODELS, DemoConfig, default_config

__all__ = ["demo"]

DEFAULTS = default_config()


def demo(
    memory: Annotated[
        str | None,
        typer.Option(
            help=f"{MEMORY} With the ring.",
            show_default=f"{BUDGETS[DEFAULTS.dtype] >> 20}MiB; of several tenants the weights that have room, and a tenth",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = DEFAULTS.dtype,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=DEFAULTS.requests,
            help="Serve the first N prompts.",
            show_default=f"{ASKED}; of several tenants all {DEFAULTS.requests}",
        ),
    ] = None,
    max_num_seqs: MaxNumSeqs = DEFAULTS.max_num_seqs,
    max_batch_tokens: MaxBatchTokens = DEFAULTS.max_batch_tokens,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one KV block.")] = DEFAULTS.block_tokens,
    threads: Annotated[int, typer.Option(min=1, help="Threads that compute, in all three runs.")] = DEFAULTS.threads,
    tenants: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_MODELS,
            help=f"Models on the arena: SmolLM2, and others with random weights; from {FITTING_MODELS + 1} on in memory for "
            f"{FITTING_MODELS}, and requests come one by one.",
        ),
    ] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of the three runs; for several, shows medians and ranges.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.html.")] = Path("out"),
    as_json: Json = False,
) -> None:
    """Serve real prompts on a real model in a fixed memory budget, without and with remap, and compare."""
    from .demo import demo as run

    with exit_on_error():
        config = DemoConfig(
            budget_bytes=_budget(memory, tenants, dtype),
            dtype=dtype,
            requests=requests or (ASKED if tenants == 1 else DEFAULTS.requests),
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            block_tokens=block_tokens,
            threads=threads,
            tenants=tenants,
        )
        for name in ("demo.json", "demo.html"):
            writable(out / name)
        run(config, out, Console(stderr=as_json), rounds)
        if as_json:
            typer.echo((out / "demo.json").read_text(encoding="utf-8"), nl=False)


def _budget(text: str | None, tenants: int, dtype: str) -> int:
    """Refuses what cannot suffice before a model is loaded; a run knows exactly how much does."""
    weights = smollm2.weight_bytes(dtype)
    if text is None:
        return BUDGETS[dtype] if tenants == 1 else 0
    budget = memory_bytes(text)
    if budget <= weights:
        raise InvalidArgument(
            f"memory must hold the weights of {smollm2.MODEL_NAME} ({show_size(weights)} in {dtype}) and KV cache, got "
            f"{show_size(budget)}; nothing was run; give more, or leave it out",
            name="memory",
            value=budget,
            needed=weights,
        )
    return budget
