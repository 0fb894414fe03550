# SPDX-License-Identifier: Apache-2.0
"""The settings of a run of the demo, and its reports of progress."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .demo_prompts import PROMPTS

__all__ = ["ASKED", "BUDGETS", "FITTING_MODELS", "MOST_MODELS", "DemoConfig", "Progress", "default_config"]

FITTING_MODELS = 3
"""The most models that have room at once. Of more, the largest three have."""
MOST_MODELS = 8
"""Models that the demo has."""
ASKED = 24
"""Requests of one model by default: enough for KV to run out, and over in three minutes. All take twice as long."""
BUDGETS = {"float32": 640 << 20, "bfloat16": 352 << 20}
"""Of one model, by dtype: they leave the KV cache about 160 blocks at the start."""


@dataclass(frozen=True)
class DemoConfig:
    """The settings of a run; the same for all three."""

    budget_bytes: int = BUDGETS["float32"]  # the arena: weights, KV cache and ring of baseline and remap
    dtype: str = "float32"
    requests: int = len(PROMPTS)
    max_num_seqs: int = 24
    max_batch_tokens: int = 256
    decode_cost: int = 5  # prompt tokens that one decoding sequence costs in a pass, see engine.scheduler
    block_tokens: int = 16
    page_bytes: int = 2 << 20
    threads: int = 1
    weights_from_file: bool = True  # master copy: the memory-mapped safetensors file; else a copy in memory
    tenants: int = (
        1  # models on the arena; of several, budget_bytes 0 means their weights (of more than three, the largest
    )
    # three's) and a tenth of them


def default_config() -> DemoConfig:
    """The settings for this machine.

    dtype is bfloat16 if the processor multiplies it (half the bytes, twice the speed), else float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        flags = ""
    if "avx512_bf16" in flags or "amx_bf16" in flags:
        return DemoConfig(budget_bytes=BUDGETS["bfloat16"], dtype="bfloat16")
    return DemoConfig()


@dataclass(frozen=True)
class Progress:
    """A report of a run's progress. `total` shrinks when a request ends before its limit."""

    generated: int
    total: int
    finished: int
    running: int
    waiting: int
    kv_blocks: int
    layers_remapped: float
    preemptions: int
