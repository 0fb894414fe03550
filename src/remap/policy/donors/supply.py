"""From a need for KV blocks to what each donor gives.

Oneiros (section 5.1, algorithm 1) takes the layers of inactive models first, one model after another, each up to its
cap, and those of active models last, one layer a step. Corrected here: as many increments at once as the need asks for
(its +1 layer per step cannot meet a burst); before any layer, memory that costs nobody anything (free pages), or
nothing now (unused KV); among *active* donors not one victim but the increments that stall least per block; never more
than needed; and the report of unmet blocks (its line 23 has no cap, and there is no fallback when nothing is left).

A donor's quotes are increments, nested: the i-th is given only with those before it. Marginal stall need not rise along
them (an odd number of streamed layers in two fixed buffers waits longer than the even one after it), so *runs* of
increments are compared, not single ones: a costly quote does not hide the cheap one behind it.

Active donors share the rest of the need so (derived; the greedy bound for knapsack covers):

    repeat  1. each donor alone could finish with its cheapest run that covers what is missing: a candidate plan
            2. otherwise take the run of least stall per block among those that do not cover it, and go on
    the best candidate of all rounds is the plan

In the first round the candidates are the plans of one active donor alone, so the result is never worse than the best of
these. Rounds go on until a run covers the rest or every quote is taken, so no block stays unmet that could be met.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

__all__ = ["NOTHING", "Kind", "Portion", "Quote", "Supply", "choose"]

Kind = Literal["idle_kv", "paused_kv", "inactive", "active"]

KINDS: tuple[Kind, ...] = ("idle_kv", "paused_kv", "inactive", "active")
"""In the order in which they are asked. Of KV, which is pages, less than a quote may be taken; layers are given whole."""


@dataclass(frozen=True)
class Quote:
    """One increment that a donor can give, beyond its quotes before this one.

    blocks: in blocks of the receiver, at least 0. stall_s: seconds added to each pass of the donor; may be negative
    (see above).
    reload_s: seconds to undo it. step: the caller's own data for carrying it out; not used here.
    """

    donor: str
    kind: Kind
    blocks: int
    stall_s: float
    reload_s: float
    step: object = None


@dataclass(frozen=True)
class Portion:
    """The first `count` (>= 1) quotes of one donor of one kind: `blocks` in all, fewer than they offer only of unused
    KV."""

    donor: str
    count: int
    blocks: int
    kind: Kind


@dataclass(frozen=True)
class Supply:
    """What to take. unmet: blocks that no donor can give. stall_s: seconds per pass, over all donors together."""

    taken: tuple[Portion, ...]
    unmet: int
    stall_s: float


NOTHING = Supply((), 0, 0.0)
"""The supply of no need: one shared object."""


def choose(need_blocks: int, quotes_by_donor: Sequence[Sequence[Quote]]) -> Supply:
    """What to take from whom, so that `need_blocks` are given if all quotes together suffice.

    quotes_by_donor: one sequence for each donor and kind, its quotes nested. Unused KV first, then inactive donors,
    within a kind in the order given, each as far as needed; active donors share the rest as described above, ties by
    reload time and then in the order given. At the end what became superfluous is dropped: active increments whose
    absence stalls nobody more, the costliest first, then those of the other kinds, the last asked first. Takes are in
    the order of kinds, then of `quotes_by_donor`. Nothing is looked at when nothing is needed.
    quotes_by_donor: one sequence for each donor and kind.
    """
    if need_blocks == 0:
        return NOTHING
    lines = [_Line(quotes) for quotes in quotes_by_donor if quotes]
    lines.sort(key=lambda line: KINDS.index(line.kind))  # stable
    plain = [line for line in lines if line.kind != "active"]
    active = [line for line in lines if line.kind == "active"]

    counts, missing = [], need_blocks
    for line in plain:
        counts.append(line.covering(missing) if missing > 0 else 0)
        missing -= line.blocks[counts[-1]]
    shared = _share(active, missing) if missing > 0 else (0,) * len(active)

    spare = sum(line.blocks[n] for line, n in zip(lines, (*counts, *shared))) - need_blocks
    shared, spare = _without_superfluous(active, shared, spare)
    takes = [Portion(line.donor, n, line.blocks[n], line.kind) for line, n in zip(active, shared) if n]
    for line, n in zip(reversed(plain), reversed(counts)):
        while n and line.blocks[n] - line.blocks[n - 1] <= spare:
            spare -= line.blocks[n] - line.blocks[n - 1]
            n -= 1
        if n:
            back = max(0, spare) if line.kind in ("idle_kv", "paused_kv") else 0
            spare -= back
            takes.insert(0, Portion(line.donor, n, line.blocks[n] - back, line.kind))
    given = {(take.donor, take.kind): take.count for take in takes}
    stall = math.fsum(line.stall[given.get((line.donor, line.kind), 0)] for line in lines)
    return Supply(tuple(takes), max(0, -spare), stall)


class _Line:
    """One donor's quotes as prefix sums: entry n is the gain, or the cost, of its first n."""

    def __init__(self, quotes: Sequence[Quote]) -> None:
        self.donor, self.kind = quotes[0].donor, quotes[0].kind
        self.blocks = list(accumulate((quote.blocks for quote in quotes), initial=0))
        self.stall = list(accumulate((quote.stall_s for quote in quotes), initial=0.0))
        self.reload = list(accumulate((quote.reload_s for quote in quotes), initial=0.0))

    def covering(self, missing: int) -> int:
        """The fewest quotes that give `missing` blocks; without enough of them, all that give any."""
        target = min(missing, self.blocks[-1])
        return next(n for n, blocks in enumerate(self.blocks) if blocks >= target)

    def cost(self, n: int) -> tuple[float, float]:
        """The key by which plans are compared: stall first."""
        return self.stall[n], self.reload[n]


def _share(lines: Sequence[_Line], need: int) -> tuple[int, ...]:
    """How many quotes of each active donor. Module docstring; costs lines x quotes for each run taken."""
    counts = [0] * len(lines)
    best: tuple[tuple[float, float], tuple[int, ...]] | None = None
    while True:
        missing = need - sum(line.blocks[n] for line, n in zip(lines, counts))
        spent = [line.cost(n) for line, n in zip(lines, counts)]
        stall, reload = sum(s for s, _ in spent), sum(r for _, r in spent)
        step: tuple[tuple[float, float], int, int] | None = None
        for i, line in enumerate(lines):
            at = counts[i]
            covers = None
            for n in range(at + 1, len(line.blocks)):
                gain = line.blocks[n] - line.blocks[at]
                more = line.stall[n] - line.stall[at], line.reload[n] - line.reload[at]
                if gain >= missing:
                    covers = min(covers, (*more, n)) if covers is not None else (*more, n)
                elif gain and (step is None or (more[0] / gain, more[1] / gain) < step[0]):
                    step = (more[0] / gain, more[1] / gain), i, n
            if covers is not None:
                total = stall + covers[0], reload + covers[1]
                if best is None or total < best[0]:
                    best = total, (*counts[:i], covers[2], *counts[i + 1 :])
        if step is None:
            # Every donor is exhausted, or any further run covers the need.
            return best[1] if best is not None else tuple(counts)
        counts[step[1]] = step[2]


def _without_superfluous(lines: Sequence[_Line], counts: Sequence[int], spare: int) -> tuple[tuple[int, ...], int]:
    """Shorter runs that leave the need met and stall nobody more, the largest saving first; and the blocks still
    spare."""
    kept = list(counts)
    while True:
        found: tuple[tuple[float, float], int, int] | None = None  # (saving, donor, how many are left)
        for i, line in enumerate(lines):
            at = kept[i]
            for n in range(at):  # the shortest first, which equal savings keep
                # spare is below 0 when the need is unmet: then only what gives nothing is superfluous.
                if line.blocks[at] - line.blocks[n] <= max(0, spare) and line.stall[n] <= line.stall[at]:
                    saving = line.stall[at] - line.stall[n], line.reload[at] - line.reload[n]
                    if found is None or saving > found[0]:
                        found = saving, i, n
        if found is None:
            return tuple(kept), spare
        _, i, n = found
        spare -= lines[i].blocks[kept[i]] - lines[i].blocks[n]
        kept[i] = n
