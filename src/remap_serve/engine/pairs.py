# SPDX-License-Identifier: Apache-2.0
"""How an offline batch keeps the KV of its sequences: in pairs of blocks, as keys and values or as activations."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["END", "PAIR", "Kept", "Pair"]

PAIR = 2
END = PAIR + 1
"""Blocks that the last pair of a sequence takes: with its staging."""


@dataclass(slots=True)
class Pair:
    """Two consecutive blocks of a sequence. staging: the pool's block that takes their activations until both are complete; None
    if they are keys and values. host, shown: once they are out: their host blocks, and the streamed blocks that show them."""

    activations: bool
    staging: int | None = None
    host: list[int] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Kept:
    """The blocks of a running sequence: `out` pairs are in host memory, the first ones; `promised` host blocks are its own."""

    pairs: list[Pair] = field(default_factory=list)
    out: int = 0
    promised: int = 0
