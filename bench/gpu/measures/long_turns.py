"""C1 and C2 (shared_serving.py) in turns of 20 s, each of which takes most of a call: as many of the sides as there is time
for, the first of them first."""

from __future__ import annotations

from collections.abc import Iterator

from bench.gpu.context import Context
from bench.gpu.registry import measure
from bench.gpu.results import Figure

from .shared_serving import C1, C2, compared

TURNS = (20.0,)


@measure("long turns, C1", needs=("torch", "transformers", "gpu"), full_s=500, quick_s=None)
def long_turns_c1(ctx: Context) -> Iterator[Figure]:
    """OPT-13b, Llama-2-13b and Llama-3-8b."""
    yield from compared(ctx, C1, TURNS)


@measure("long turns, C2", needs=("torch", "transformers", "gpu"), full_s=500, quick_s=None)
def long_turns_c2(ctx: Context) -> Iterator[Figure]:
    """OPT-30b and OPT-6.7b."""
    yield from compared(ctx, C2, TURNS)
