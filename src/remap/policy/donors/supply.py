# SPDX-License-Identifier: Apache-2.0
"""From a need for KV blocks to each donor's share: the plan of least cost over all donors at once.

Cost, in seconds a pass: the time by which a pass of those concerned becomes longer, if the plan is carried out now.

    cost = sum over the quotes taken of (stall_s + share * reload_s)

    unused KV         0: no pass waits for it, now or later
    paused KV,        stall_s = 0, share = pass_s / next_use_s (`share_of_pass`): the giver's next turn has to copy back
    inactive layers     what it gave, reload_s, once. Until then the receiver makes next_use_s / pass_s passes, over which
                        the reload is spread. Over a whole plan this is pass_s times the share of time that goes into
                        switching turns. reload_s is link time: a bound on the wait, part of which may be hidden
    active layers     stall_s is certified before any change, by the exact period (schedule.py). share = contention:
                        each pass copies the layer again, and kappa of that time is lost to the computation even if the
                        copy is hidden. This is the rent that also brings layers home (rental.py)

So an inactive layer is cheaper than one that is streamed at no stall while its giver's next turn is more than
1 / kappa passes away, and dearer afterwards. If the next turn or the receiver's pass is not known, there is no honest
common unit: share is 0. Plans of equal cost go by the kinds: fewest blocks from active donors, then from inactive ones;
unused KV before paused KV; then the donors in the order given.

Donors of one inactive kind are one line, in the order given: `ranking.py` says who is needed last, by a policy that the
operator chose, and cost does not overrule it. A donor's quotes are increments: the i-th is given only with those before
it. Marginal cost need not rise along them (an odd number of streamed layers in two fixed buffers waits longer than the
even one after it). KV is pages: it is taken block by block at proportional cost, and so fills exactly what layers, which
are given whole, leave.

The optimum is exact (derived; dynamic programming for knapsack covers). After each line of layers, a *front* has for
each number of blocks the cheapest plan that gives as many, without plans that cost no less than another which gives more.
The last step adds to each plan the KV that it still needs. A front of more than `MOST_PLANS` is thinned: plans that cost
at most d less than the next larger one go, and d is added to the result's `gap_s`, by which its cost may exceed the
optimum. Even then no line alone is cheaper, and nothing is superfluous.

Sources: Oneiros (section 5.1, algorithm 1) takes the layers of inactive models first, one model after another, each up
to its cap, and one layer a step of active ones last. Corrected here: as many increments at once as the need asks for (its
+1 layer per step cannot meet a burst); KV before layers where it is cheaper; among active donors not one victim but the
cheapest increments; never more than needed; and the report of unmet blocks (its line 23 has no cap, and there is no
fallback when nothing is left). The cost is derived.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["NOTHING", "Kind", "Portion", "Quote", "Supply", "choose", "share_of_pass"]

Kind = Literal["idle_kv", "paused_kv", "inactive", "active"]

KINDS: tuple[Kind, ...] = ("idle_kv", "paused_kv", "inactive", "active")
"""In the order in which they are asked at equal cost."""

MOST_PLANS = 128
"""Plans on a front, and one. Each thinning adds at most 1 / MOST_PLANS of the costs on the front to `gap_s`."""


class Quote(NamedTuple):
    """One increment that a donor can give, beyond its quotes before this one.

    blocks: in blocks of the receiver, at least 0. stall_s: seconds added to each pass of the donor; may be negative
    (see above), but not of KV. reload_s: seconds to undo it, at least 0. share: of these, what falls on each pass.
    step: the caller's own data for carrying it out; not used here.
    """

    donor: str
    kind: Kind
    blocks: int
    stall_s: float
    reload_s: float
    share: float = 0.0
    step: object = None


@dataclass(frozen=True)
class Portion:
    """The first `count` (>= 1) quotes of one donor of one kind: `blocks` in all, fewer than they offer only of KV."""

    donor: str
    count: int
    blocks: int
    kind: Kind


class Supply(NamedTuple):
    """The portions to take. unmet: blocks that no donor can give. stall_s: certified seconds per pass, over all donors together.

    cost_s: seconds per pass as well, reloads included. gap_s: by how much cost_s may exceed the optimum; 0: not at all.
    """

    taken: tuple[Portion, ...]
    unmet: int
    stall_s: float
    cost_s: float = 0.0
    gap_s: float = 0.0


NOTHING = Supply((), 0, 0.0)
"""The supply of no need: one shared object."""


def share_of_pass(pass_s: float, next_use_s: float | None) -> float:
    """The share of a reload that falls on each pass of `pass_s` seconds until the giver's next use, at most all of it.
    0 if the use is not known (None), or the pass (0)."""
    if next_use_s is None or pass_s <= 0.0:
        return 0.0
    return pass_s / max(pass_s, next_use_s)


def choose(need_blocks: int, quotes_by_donor: Sequence[Sequence[Quote]], *, one_active: bool = False) -> Supply:
    """The cheapest plan that gives `need_blocks`, or as many of them as can be given (see the module).

    quotes_by_donor: one sequence for each donor and kind, its quotes nested; those of one kind in the order in which
    they are to be asked. one_active: take from at most one active donor (each was certified against what the others
    copy now). Takes are in the order of kinds, then of `quotes_by_donor`. Nothing is looked at when nothing is needed.
    """
    if need_blocks == 0:
        return NOTHING
    of: dict[Kind, list[Sequence[Quote]]] = {kind: [] for kind in KINDS}
    for quotes in quotes_by_donor:
        if quotes:
            of[quotes[0].kind].append(quotes)
    kv = _Line([*of["idle_kv"], *of["paused_kv"]])
    # Place 0: the inactive donors together; then one active donor each.
    lines = [_Line(of["inactive"]), *[_Line([each]) for each in of["active"]]]
    given = [line.blocks[-1] for line in lines]
    target = min(need_blocks, kv.blocks[-1] + given[0] + (max(given[1:], default=0) if one_active else sum(given[1:])))
    # Unused KV gives the others for nothing.
    most = max(0, target - sum([quote.blocks for quotes in of["idle_kv"] for quote in quotes]))

    options = [line.useful(most) for line in lines]
    places = range(len(lines))
    front, cost, exact, gap = [_EMPTY], math.inf, True, 0.0
    for alternatives in (places[:1], places[1:]) if one_active else [places[i : i + 1] for i in places]:
        front = _extended(front, [(place, lines[place], options[place]) for place in alternatives], most, cost)
        if len(front) > MOST_PLANS:
            front, lost = _thinned(front)
            exact, gap = False, gap + lost
        # A plan that costs more than this one alone costs more than it with any other line as well.
        cost, plan = _cheapest(front, kv, target)
    if not exact:
        alone = [_plan_of([(place, n)], lines) for place in places for n in options[place]]
        cost, plan = _cheapest([_trimmed(plan, lines, kv, target), *alone], kv, target)

    rest = _rest(plan, target)
    taken = kv.portions(kv.covering(rest), rest)
    for place, count in plan[-1]:
        taken += lines[place].portions(count, lines[place].blocks[count])
    stall = math.fsum([quote.stall_s for _, quotes in taken for quote in quotes])
    return Supply(tuple([portion for portion, _ in taken]), need_blocks - target, stall, cost, gap)


_Plan = tuple[float, int, int, tuple[tuple[int, int], ...]]
"""Without KV: cost, blocks of active donors, blocks of inactive ones, and (place, quotes taken) of each line that gives.
Plans that give enough compare as they are."""

_EMPTY: _Plan = (0.0, 0, 0, ())


class _Line:
    """Quotes that are taken in this order, as prefix sums: entry n is the gain, or the cost, of the first n."""

    def __init__(self, quotes_by_donor: Sequence[Sequence[Quote]]) -> None:
        self.active = bool(quotes_by_donor) and quotes_by_donor[0][0].kind == "active"
        # No plan takes a donor's last quotes, which may give nothing, to reach the next donor's.
        self.donors = quotes_by_donor if self.active else [_giving(quotes) for quotes in quotes_by_donor]
        blocks, cost = 0, 0.0
        self.blocks, self.cost = [blocks], [cost]
        for quotes in self.donors:
            for quote in quotes:
                blocks += quote.blocks
                cost += quote.stall_s + quote.share * quote.reload_s
                self.blocks.append(blocks)
                self.cost.append(cost)

    def covering(self, blocks: int) -> int:
        """The fewest quotes that give `blocks` blocks."""
        return bisect_left(self.blocks, blocks)

    def cost_of(self, blocks: int) -> float:
        """Of exactly `blocks` blocks, as KV is taken: the last quote costs in proportion."""
        n = self.covering(blocks)
        if self.blocks[n] == blocks:
            return self.cost[n]
        part = (blocks - self.blocks[n - 1]) * (self.cost[n] - self.cost[n - 1])
        return self.cost[n - 1] + part / (self.blocks[n] - self.blocks[n - 1])

    def useful(self, most: int) -> Sequence[int]:
        """Every n > 0 that may be part of the optimum: after the first that gives `most`, only cheaper ones."""
        first = self.covering(min(most, self.blocks[-1]))
        least, later = self.cost[first], self.cost[first + 1 :]
        if not later or min(later) >= least:
            return range(1, first + 1)
        return [*range(1, first + 1), *(n for n, cost in enumerate(later, first + 1) if cost < least)]

    def portions(self, count: int, blocks: int) -> list[tuple[Portion, Sequence[Quote]]]:
        """The first `count` quotes as each donor's share, and of which quotes; `blocks` in all."""
        found = []
        for quotes in self.donors:
            if count <= 0:
                break
            if quotes:
                taken = quotes[:count]
                given = min(blocks, sum([quote.blocks for quote in taken]))
                found.append((Portion(taken[0].donor, len(taken), given, taken[0].kind), taken))
                count, blocks = count - len(taken), blocks - given
        return found


def _giving(quotes: Sequence[Quote]) -> Sequence[Quote]:
    end = len(quotes)
    while end and not quotes[end - 1].blocks:
        end -= 1
    return quotes if end == len(quotes) else quotes[:end]


def _extended(
    front: Sequence[_Plan], alternatives: Iterable[tuple[int, _Line, Sequence[int]]], most: int, limit: float
) -> list[_Plan]:
    """The front of all plans that are one of `front`, alone or with a run of one of the alternatives (place, line, what
    may be taken of it); most blocks first. More than `most` blocks count as `most`; a plan that costs more than `limit` is
    left out."""
    best = {min(most, plan[1] + plan[2]): plan for plan in front}
    for place, line, counts in alternatives:
        for n in counts:
            more = line.cost[n]
            active, inactive = (line.blocks[n], 0) if line.active else (0, line.blocks[n])
            for cost, by_active, by_inactive, taken in front:
                cost += more
                if cost > limit:
                    continue
                by_active, by_inactive = by_active + active, by_inactive + inactive
                given = min(most, by_active + by_inactive)
                known = best.get(given)
                if known is None or cost <= known[0]:
                    plan = (cost, by_active, by_inactive, (*taken, (place, n)))
                    if known is None or plan < known:
                        best[given] = plan
    kept: list[_Plan] = []
    for given in sorted(best, reverse=True):
        if not kept or best[given][:3] < kept[-1][:3]:
            kept.append(best[given])
    return kept


def _thinned(front: Sequence[_Plan]) -> tuple[list[_Plan], float]:
    """At most `MOST_PLANS` plans and one, and by how much what they lead to may be dearer at most."""
    apart = (front[0][0] - front[-1][0]) / MOST_PLANS
    kept, lost = [front[0]], 0.0
    for plan in front[1:]:
        more = kept[-1][0] - plan[0]
        if more > apart:
            kept.append(plan)
        else:
            lost = max(lost, more)
    return kept, lost


def _rest(plan: _Plan, target: int) -> int:
    """Blocks that KV has to give beside this plan."""
    return max(0, target - plan[1] - plan[2])


def _cheapest(plans: Sequence[_Plan], kv: _Line, target: int) -> tuple[float, _Plan]:
    """The cost of the cheapest with the KV that it still needs, of those for which KV suffices; infinitely much without
    any."""
    found, most = [(math.inf, _EMPTY)], kv.blocks[-1]
    for plan in plans:
        rest = _rest(plan, target)
        if rest <= most:
            found.append((plan[0] + kv.cost_of(rest), plan))
    return min(found, key=_order)


def _order(priced: tuple[float, _Plan]) -> tuple[float, int, int, object]:
    return priced[0], *priced[1][1:]


def _trimmed(plan: _Plan, lines: Sequence[_Line], kv: _Line, target: int) -> _Plan:
    """Thinning may have left something superfluous. Without it."""
    for place, count in plan[-1]:
        others = [each for each in plan[-1] if each[0] != place]
        shorter = [_plan_of([*others, (place, n)] if n else others, lines) for n in range(count + 1)]
        _, plan = _cheapest(shorter, kv, target)
    return plan


def _plan_of(counts: Sequence[tuple[int, int]], lines: Sequence[_Line]) -> _Plan:
    active = sum(lines[place].blocks[n] for place, n in counts if lines[place].active)
    inactive = sum(lines[place].blocks[n] for place, n in counts if not lines[place].active)
    return math.fsum(lines[place].cost[n] for place, n in counts), active, inactive, tuple(counts)
