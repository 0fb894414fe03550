# SPDX-License-Identifier: Apache-2.0
"""Compose moves of live blocks, {old: new}. Pure."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["compose_all", "compose_moves"]


def compose_moves(moves: Mapping[int, int], later: Mapping[int, int]) -> dict[int, int]:
    """The moves of one tenant's blocks, {old: new}, and then the later ones, as one: a block may move twice."""
    known = set(moves.values())
    first = {old: later.get(new, new) for old, new in moves.items()}
    both = first | {old: new for old, new in later.items() if old not in known}
    return {old: new for old, new in both.items() if old != new}  # some may be back where they were


def compose_all(
    moved: Mapping[str, Mapping[int, int]], later: Mapping[str, Mapping[int, int]]
) -> dict[str, dict[int, int]]:
    """`compose_moves`, for each tenant."""
    return {name: compose_moves(moved.get(name, {}), later.get(name, {})) for name in {**moved, **later}}
