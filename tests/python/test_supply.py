"""What is taken from whom: against brute force over every plan, and case by case."""

from __future__ import annotations

import random
from unittest.mock import patch

from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference import supply_brute
from remap.policy.donors import supply as supply_module
from remap.policy.donors.supply import KINDS, NOTHING, Kind, Portion, Quote, Supply, choose, share_of_pass

Quotes = list[list[Quote]]


def quotes(
    donor: str, kind: Kind, *increments: tuple[int, float], reload: float = 1.0, share: float = 0.0
) -> list[Quote]:
    return [
        Quote(donor, kind, blocks, stall, reload, share, (donor, i)) for i, (blocks, stall) in enumerate(increments)
    ]


def given_by(supply: Supply) -> int:
    return sum(take.blocks for take in supply.taken)


def of_kind(supply: Supply, kind: Kind) -> int:
    return sum(take.blocks for take in supply.taken if take.kind == kind)


def steps_taken(supply: Supply, offered: Quotes) -> list[Quote]:
    """The quotes that the takes name."""
    by_name = {(line[0].donor, line[0].kind): line for line in offered if line}
    return [quote for take in supply.taken for quote in by_name[take.donor, take.kind][: take.count]]


# Costs are multiples of 1/8, so that sums are exact; negative stalls make marginal cost fall along a donor's quotes.
EIGHTHS = st.integers(0, 6)


def _active(lines: list[list[tuple[int, int, int]]]) -> Quotes:
    return [
        [
            Quote(f"active-{i}", "active", b, stall / 8, reload, 1 / 8, (i, j))
            for j, (b, stall, reload) in enumerate(line)
        ]
        for i, line in enumerate(lines)
    ]


def _others(kind: Kind, lines: list[list[tuple[int, int]]]) -> Quotes:
    """Of KV, each block costs as much, so that a part of a quote costs a multiple of 1/8 too."""
    return [
        [
            Quote(f"{kind}-{i}", kind, blocks, 0.0, float(reload * (kind == "inactive" or blocks)), 1 / 8, (i, j))
            for j, (blocks, reload) in enumerate(line)
        ]
        for i, line in enumerate(lines)
    ]


def _of_kind(
    kind: Kind, most_blocks: int, most_quotes: int, reload: st.SearchStrategy[int] = EIGHTHS
) -> st.SearchStrategy[Quotes]:
    line = st.lists(st.tuples(st.integers(0, most_blocks), reload), max_size=most_quotes)
    return st.lists(line, max_size=2).map(lambda lines: _others(kind, lines))


def _actives(most: int, most_quotes: int) -> st.SearchStrategy[Quotes]:
    increment = st.tuples(st.integers(0, 7), st.integers(-6, 20), EIGHTHS)
    return st.lists(st.lists(increment, max_size=most_quotes), max_size=most).map(_active)


FEW = st.tuples(
    _of_kind("idle_kv", 3, 1, st.just(0)), _of_kind("paused_kv", 5, 1), _of_kind("inactive", 6, 3), _actives(2, 3)
).map(lambda kinds: [line for kind in kinds for line in kind])
ACTIVE = _actives(4, 4)
PARITY = [Quote("a", "active", 4, stall, 0.0) for stall in (2.0, -1.5, 2.0, -1.5)]


@settings(max_examples=examples(600), deadline=None)
@given(st.integers(1, 40), st.one_of(FEW, ACTIVE), st.booleans())
@example(5, [PARITY, _others("inactive", [[(5, 3)]])[0]], False)
@example(6, [*_others("idle_kv", [[(4, 0)]]), PARITY[:2]], False)  # a run that ends a stall is better than what is free
@example(9, _active([[(9, 4, 0), (9, 32, 0)], [(10, 8, 0)], [(4, 3, 0), (5, 0, 0)]]), True)
@example(10, _active([[(12, 8, 0)], [(10, 8, 0)]]), False)  # as dear, and more blocks than are needed
@example(10, [quotes("a", "active", (9, 0.5), (9, 4.0)), quotes("b", "active", (10, 1.0))], False)  # per block: 1.5
def test_as_cheap_as_the_best_of_all_plans(need: int, offered: Quotes, one_active: bool) -> None:
    found = choose(need, offered, one_active=one_active)
    best = supply_brute.best(need, offered, one_active)
    assert (found.unmet, found.cost_s, found.gap_s) == (best.unmet, best.cost_s, 0.0)
    assert (of_kind(found, "active"), of_kind(found, "inactive")) == (best.active, best.inactive)  # the order of kinds
    assert found.stall_s == sum(quote.stall_s for quote in steps_taken(found, offered))


@settings(max_examples=examples(400), deadline=None)
@given(st.integers(0, 60), FEW, ACTIVE, st.sampled_from([1, 2, 256]), st.randoms(use_true_random=False))
def test_what_every_supply_keeps_to(
    need: int, few: Quotes, active: Quotes, most_plans: int, shuffled: random.Random
) -> None:
    offered = [*(line for line in few if line and line[0].kind != "active"), *active]
    shuffled.shuffle(offered)
    with patch.object(supply_module, "MOST_PLANS", most_plans):
        found = choose(need, offered)
        # Once more, and with the kinds in another order: only the order within a kind counts.
        again = choose(need, sorted(offered, key=lambda line: -KINDS.index(line[0].kind) if line else 0))
    assert again == found
    assert found.unmet == max(0, need - sum(q.blocks for line in offered for q in line))
    assert given_by(found) + found.unmet >= need
    # The order of the kinds, and within a kind that of the offers.
    names = [(line[0].kind, line[0].donor) for line in offered if line]
    keys = [(KINDS.index(take.kind), names.index((take.kind, take.donor))) for take in found.taken]
    assert keys == sorted(set(keys))
    # Of all kinds but the active one, a donor is asked when those before it have given everything.
    for kind in KINDS[:3]:
        lines = [line for line in offered if line and line[0].kind == kind]
        blocks = [sum(t.blocks for t in found.taken if (t.donor, t.kind) == (line[0].donor, kind)) for line in lines]
        last = max((i for i, given in enumerate(blocks) if given), default=0)
        assert all(given == sum(q.blocks for q in line) for given, line in list(zip(blocks, lines))[:last])
    spare = given_by(found) + found.unmet - need
    for take in found.taken:
        line = next(line for line in offered if line and (line[0].donor, line[0].kind) == (take.donor, take.kind))
        sums = [sum(q.blocks for q in line[:n]) for n in range(len(line) + 1)]
        costs = [supply_brute.cost_of(line, n) for n in range(len(line) + 1)]
        assert take.count >= 1
        if take.kind in ("idle_kv", "paused_kv"):
            assert sums[take.count - 1] < take.blocks <= sums[take.count]
            assert spare == 0  # where pages are given, they are given exactly
            continue
        assert take.blocks == sums[take.count]
        # Nothing superfluous: any shorter run of the last donor asked leaves the need unmet or costs more.
        if take.kind == "active" or take == [each for each in found.taken if each.kind == "inactive"][-1]:
            for n in range(take.count):
                assert sums[take.count] - sums[n] > spare or costs[n] > costs[take.count]


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(1, 30), FEW, st.sampled_from([1, 2, 4]), st.booleans())
def test_a_thinned_front_costs_more_by_no_more_than_it_says(need, offered, most_plans, one_active) -> None:
    best, alone = supply_brute.best(need, offered, one_active), supply_brute.best_of_one(need, offered)
    with patch.object(supply_module, "MOST_PLANS", most_plans):
        found = choose(need, offered, one_active=one_active)
    assert found.unmet == best.unmet
    assert best.cost_s <= found.cost_s <= best.cost_s + found.gap_s
    assert (found.unmet, found.cost_s) <= (alone.unmet, alone.cost_s)  # never worse than the best single donor


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=2, unique=True), st.integers(1, 9))
def test_thinning_bounds_the_front_and_what_it_loses(costs: list[int], most_plans: int) -> None:
    front = [(float(cost), blocks, 0, ()) for blocks, cost in sorted(enumerate(sorted(costs)), reverse=True)]
    with patch.object(supply_module, "MOST_PLANS", most_plans):
        kept, lost = supply_module._thinned(front)
    assert len(kept) <= most_plans + 1
    assert lost <= (front[0][0] - front[-1][0]) / most_plans
    for plan in front:  # one that gives no less costs no more than `lost` above
        assert min(each[0] for each in kept if each[1] >= plan[1]) <= plan[0] + lost


def test_what_a_giver_needs_soon_is_dearer_than_what_is_streamed() -> None:
    """Layers that take 10 ms to copy, and passes of 20 ms; an active one is hidden, and its copies cost a tenth."""
    own = quotes("", "active", (5, 0.0), (5, 0.0), reload=0.01, share=0.1)

    def taken(next_use_s: float | None) -> list[str]:
        share = share_of_pass(0.02, next_use_s)
        layers = quotes("layers", "inactive", (5, 0.0), (5, 0.0), reload=0.01, share=share)
        # Twice as much KV as a layer has: a block of it takes as long to copy.
        paused = quotes("kv", "paused_kv", (10, 0.0), reload=0.02, share=share)
        return [f"{take.donor or 'own'} {take.blocks}" for take in choose(15, [layers, own, paused]).taken]

    assert taken(1.0) == ["kv 10", "layers 5"]
    assert taken(0.201) == ["kv 10", "layers 5"]  # 10.05 passes: 1 / 10.05 of a reload falls on each
    assert taken(0.199) == ["kv 5", "own 10"]
    assert taken(None) == ["kv 10", "layers 5"]


def test_the_share_of_a_reload_that_falls_on_a_pass() -> None:
    assert share_of_pass(0.02, 1.0) == 0.02
    assert share_of_pass(0.02, 0.02) == share_of_pass(0.02, 0.01) == share_of_pass(0.02, 0.0) == 1.0
    assert share_of_pass(0.02, None) == share_of_pass(0.0, 0.0) == share_of_pass(0.0, 1.0) == 0.0


def test_a_costly_increment_does_not_hide_the_cheap_one_behind_it() -> None:
    # Two fixed buffers: an odd number of streamed layers stalls 8, the next even one nothing more than 1 in all.
    parity = quotes("a", "active", (5, 8.0), (5, -7.0), (5, 8.0), (5, -7.0))
    steady = quotes("b", "active", (5, 2.0), (5, 2.0))
    assert choose(10, [parity, steady]) == Supply((Portion("a", 2, 10, "active"),), 0, 1.0, 1.0)
    both = (Portion("a", 2, 10, "active"), Portion("b", 1, 5, "active"))
    assert choose(15, [parity, steady]) == Supply((Portion("a", 4, 20, "active"),), 0, 2.0, 2.0)
    assert choose(15, [parity[:2], steady]) == Supply(both, 0, 3.0, 3.0)


def test_one_active_donor_may_copy_more() -> None:
    first = quotes("a", "active", (5, 1.0), (5, 3.0))
    second = quotes("b", "active", (5, 1.0), (5, 4.0))
    idle = quotes("c", "inactive", (4, 0.0), reload=3.0, share=1.0)
    assert choose(10, [first, second], one_active=True) == Supply((Portion("a", 2, 10, "active"),), 0, 4.0, 4.0)
    # Whose turn it is depends on what others give: with the idle layer, one layer is enough.
    assert [take.donor for take in choose(9, [first, second, idle]).taken] == ["a", "b"]
    assert [take.donor for take in choose(9, [second, first, idle], one_active=True).taken] == ["c", "b"]


def test_who_has_nothing_is_not_asked_and_nothing_needed_is_not_looked_for() -> None:
    assert choose(7, []) == choose(7, [[]]) == Supply((), 7, 0.0)
    assert choose(0, iter(())) is NOTHING and Supply((), 0, 0.0) == NOTHING  # type: ignore[arg-type]
    # A donor of which nothing can be used is not asked on the way to the next.
    useless, useful = quotes("b", "inactive", (0, 0.0)), quotes("c", "inactive", (4, 0.0))
    assert choose(3, [useless, useful]).taken == (Portion("c", 1, 4, "inactive"),)
