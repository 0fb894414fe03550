"""What to take from whom, by trying everything. Tests `remap.policy.donors.supply`; nothing here is greedy or keeps anything.

A plan is how many quotes are taken of each donor, a tuple as long as the list of donors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any


def plans(quotes_by_donor: Sequence[Sequence[Any]]) -> Iterator[tuple[int, ...]]:
    """Every plan."""
    yield from itertools.product(*(range(len(quotes) + 1) for quotes in quotes_by_donor))


def blocks_of(quotes_by_donor: Sequence[Sequence[Any]], plan: Sequence[int]) -> int:
    return sum(quote.blocks for quotes, count in zip(quotes_by_donor, plan) for quote in quotes[:count])


def stall_of(quotes_by_donor: Sequence[Sequence[Any]], plan: Sequence[int]) -> float:
    return sum(quote.stall_s for quotes, count in zip(quotes_by_donor, plan) for quote in quotes[:count])


def best_stall(need: int, quotes_by_donor: Sequence[Sequence[Any]]) -> float | None:
    """The least stall of any plan that gives `need` blocks; None when all quotes together do not."""
    return min(
        (
            stall_of(quotes_by_donor, plan)
            for plan in plans(quotes_by_donor)
            if blocks_of(quotes_by_donor, plan) >= need
        ),
        default=None,
    )


def best_stall_of_one(need: int, quotes_by_donor: Sequence[Sequence[Any]]) -> float | None:
    """The least stall of any plan that takes from one donor only; None when no donor gives `need` blocks alone."""
    alone = (best_stall(need, [quotes]) for quotes in quotes_by_donor)
    return min((stall for stall in alone if stall is not None), default=None)
