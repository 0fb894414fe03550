"""What to take from whom, by trying everything. Tests `remap.policy.donors.supply`; nothing here is greedy or keeps anything.

A plan is how much each donor gives, a tuple as long as the list of donors: blocks of KV, or how many quotes of layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

KV = ("idle_kv", "paused_kv")


@dataclass(frozen=True, order=True)
class Outcome:
    """In the order in which plans are compared. active, inactive: blocks of such donors."""

    unmet: int
    cost_s: float
    active: int
    inactive: int


def total(quotes: Sequence[Any]) -> int:
    return sum(quote.blocks for quote in quotes)


def cost_of(quotes: Sequence[Any], amount: int) -> float:
    """Of so many blocks of KV, taken in order and paid in proportion; or of so many quotes of layers."""
    if not quotes or quotes[0].kind not in KV:
        return sum(quote.stall_s + quote.share * quote.reload_s for quote in quotes[:amount])
    cost = 0.0
    for quote in quotes:
        part = min(amount, quote.blocks)
        amount -= part
        if part:
            cost += part * (quote.stall_s + quote.share * quote.reload_s) / quote.blocks
    return cost


def blocks_of(quotes: Sequence[Any], amount: int) -> int:
    return amount if quotes and quotes[0].kind in KV else total(quotes[:amount])


def plans(quotes_by_donor: Sequence[Sequence[Any]], one_active: bool = False) -> Iterator[tuple[int, ...]]:
    """Every plan in which no donor but an active one is asked before those of its kind that come first gave all."""
    amounts = [total(quotes) if quotes and quotes[0].kind in KV else len(quotes) for quotes in quotes_by_donor]
    for plan in itertools.product(*(range(amount + 1) for amount in amounts)):
        active = 0
        short: set[str] = set()  # kinds of which somebody has not given all
        allowed = True
        for quotes, amount in zip(quotes_by_donor, plan):
            kind = quotes[0].kind if quotes else "active"
            if kind == "active":
                active += amount > 0
                continue
            allowed = allowed and not (amount and kind in short)
            if blocks_of(quotes, amount) < total(quotes):
                short.add(kind)
        if allowed and not (one_active and active > 1):
            yield plan


def outcome(need: int, quotes_by_donor: Sequence[Sequence[Any]], plan: Sequence[int]) -> Outcome:
    given = [blocks_of(quotes, amount) for quotes, amount in zip(quotes_by_donor, plan)]
    of = {
        kind: sum(blocks for quotes, blocks in zip(quotes_by_donor, given) if quotes and quotes[0].kind == kind)
        for kind in ("active", "inactive")
    }
    cost = sum(cost_of(quotes, amount) for quotes, amount in zip(quotes_by_donor, plan))
    return Outcome(max(0, need - sum(given)), cost, of["active"], of["inactive"])


def best(need: int, quotes_by_donor: Sequence[Sequence[Any]], one_active: bool = False) -> Outcome:
    """Of all plans."""
    return min(outcome(need, quotes_by_donor, plan) for plan in plans(quotes_by_donor, one_active))


def best_of_one(need: int, quotes_by_donor: Sequence[Sequence[Any]]) -> Outcome:
    """Of all plans that take from one donor only, if another of its kind need not be asked first."""
    firsts = {quotes[0].kind: quotes for quotes in reversed(quotes_by_donor) if quotes and quotes[0].kind != "active"}
    alone = [*firsts.values(), *(quotes for quotes in quotes_by_donor if quotes and quotes[0].kind == "active")]
    return min((best(need, [quotes]) for quotes in alone), default=Outcome(need, 0.0, 0, 0))
