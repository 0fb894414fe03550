"""What is taken from whom: against brute force over every plan, and case by case."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference import supply_brute
from remap.policy.donors.supply import KINDS, NOTHING, Kind, Portion, Quote, Supply, choose

Quotes = list[list[Quote]]


def quotes(donor: str, kind: Kind, *increments: tuple[int, float]) -> list[Quote]:
    return [Quote(donor, kind, blocks, stall, 1.0, (donor, i)) for i, (blocks, stall) in enumerate(increments)]


def given_by(supply: Supply) -> int:
    return sum(take.blocks for take in supply.taken)


def steps_taken(supply: Supply, offered: Quotes) -> list[Quote]:
    """The quotes that the takes name."""
    by_name = {(line[0].donor, line[0].kind): line for line in offered if line}
    return [quote for take in supply.taken for quote in by_name[take.donor, take.kind][: take.count]]


# Stalls are multiples of 1/8, so that sums are exact; negative ones make marginal stall fall along a donor's quotes.
INCREMENTS = st.tuples(st.integers(0, 9), st.integers(-8, 24).map(lambda eighths: eighths / 8))
ACTIVE = st.lists(st.lists(INCREMENTS, max_size=4), max_size=4).map(
    lambda lines: [quotes(f"active-{i}", "active", *line) for i, line in enumerate(lines)]
)
PLAIN = st.lists(
    st.tuples(st.sampled_from(["idle_kv", "inactive"]), st.lists(st.integers(0, 9), max_size=4)), max_size=4
).map(lambda lines: [quotes(f"plain-{i}", kind, *[(b, 0.0) for b in blocks]) for i, (kind, blocks) in enumerate(lines)])


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 40), ACTIVE)
@example(10, [quotes("a", "active", (9, 0.5), (9, 4.0)), quotes("b", "active", (10, 1.0))])  # greedy alone stalls 1.5
def test_never_worse_than_the_best_single_donor(need: int, offered: Quotes) -> None:
    supply = choose(need, offered)
    alone = supply_brute.best_stall_of_one(need, offered)
    best = supply_brute.best_stall(need, offered)
    if best is None:
        assert supply.unmet == need - sum(q.blocks for line in offered for q in line) > 0
    else:
        assert supply.unmet == 0
        assert best <= supply.stall_s
    if alone is not None:
        assert supply.stall_s <= alone


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 60), PLAIN, ACTIVE, st.randoms(use_true_random=False))
def test_what_every_supply_keeps_to(need: int, plain: Quotes, active: Quotes, random: object) -> None:
    offered = [*plain, *active]
    random.shuffle(offered)  # type: ignore[attr-defined]
    supply = choose(need, offered)
    together = sum(q.blocks for line in offered for q in line)
    assert supply.unmet == max(0, need - together)
    taken = steps_taken(supply, offered)
    assert supply.stall_s == sum(q.stall_s for q in taken)
    assert given_by(supply) + supply.unmet >= need
    # The order of the kinds, and within a kind that of the offers.
    names = [(line[0].kind, line[0].donor) for line in offered if line]
    keys = [(KINDS.index(take.kind), names.index((take.kind, take.donor))) for take in supply.taken]
    assert keys == sorted(set(keys))
    spare = given_by(supply) + supply.unmet - need
    for take in supply.taken:
        line = next(line for line in offered if line and (line[0].donor, line[0].kind) == (take.donor, take.kind))
        sums = [sum(q.blocks for q in line[:n]) for n in range(len(line) + 1)]
        stalls = [sum(q.stall_s for q in line[:n]) for n in range(len(line) + 1)]
        assert take.count >= 1
        if take.kind == "idle_kv":
            assert sums[take.count - 1] < take.blocks <= sums[take.count]
            assert spare == 0  # where pages are given, they are given exactly
        else:
            assert take.blocks == sums[take.count]
            # Nothing superfluous: any shorter run leaves the need unmet or, of an active donor, stalls more.
            for n in range(take.count):
                less = sums[take.count] - sums[n]
                assert less > spare or (take.kind == "active" and stalls[n] > stalls[take.count])


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), PLAIN, ACTIVE)
def test_active_donors_are_asked_for_what_the_others_cannot_give(need: int, plain: Quotes, active: Quotes) -> None:
    supply = choose(need, [*active, *plain])
    others = sum(q.blocks for line in plain for q in line)
    if others >= need:
        assert all(take.kind != "active" for take in supply.taken)
        assert supply.stall_s == 0
    else:
        alone = choose(need - others, active)
        assert [t for t in supply.taken if t.kind == "active"] == list(alone.taken)
        assert supply.stall_s == alone.stall_s


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 14),
    st.lists(st.lists(st.integers(0, 20), max_size=4).map(sorted), max_size=3),
    st.integers(1, 3),
)
def test_equal_layers_of_rising_stall_are_shared_optimally(need: int, marginal: list[list[int]], size: int) -> None:
    offered = [quotes(str(i), "active", *[(size, m / 8) for m in line]) for i, line in enumerate(marginal)]
    best = supply_brute.best_stall(need, offered)
    if best is not None:
        supply = choose(need, offered)
        assert supply.stall_s == best
        assert given_by(supply) == math.ceil(need / size) * size


def test_nothing_needed_is_one_shared_object() -> None:
    class Untouchable:
        def __iter__(self) -> object:
            raise AssertionError("looked at")

    assert choose(0, Untouchable()) is NOTHING  # type: ignore[arg-type]
    assert Supply((), 0, 0.0) == NOTHING


def test_the_order_of_the_kinds() -> None:
    offered = [
        quotes("d", "active", (4, 0.0)),
        quotes("c", "inactive", (4, 0.0), (4, 0.0)),
        quotes("e", "inactive", (4, 0.0)),
        quotes("c", "idle_kv", (4, 0.0)),
    ]
    idle, first = Portion("c", 1, 4, "idle_kv"), Portion("c", 1, 4, "inactive")
    both, second = Portion("c", 2, 8, "inactive"), Portion("e", 1, 4, "inactive")
    assert choose(4, offered).taken == (idle,)
    assert choose(3, offered).taken == (Portion("c", 1, 3, "idle_kv"),)  # pages are taken in part
    assert choose(8, offered).taken == (idle, first)
    assert choose(13, offered).taken == (Portion("c", 1, 1, "idle_kv"), both, second)  # the layer made 3 spare
    assert choose(16, offered).taken == (idle, both, second)
    assert choose(20, offered) == Supply((idle, both, second, Portion("d", 1, 4, "active")), 0, 0.0)
    assert choose(21, offered).unmet == 1


def test_a_costly_increment_does_not_hide_the_cheap_one_behind_it() -> None:
    # Two fixed buffers: an odd number of streamed layers stalls 8, the next even one nothing more than 1 in all.
    parity = quotes("a", "active", (5, 8.0), (5, -7.0), (5, 8.0), (5, -7.0))
    steady = quotes("b", "active", (5, 2.0), (5, 2.0))
    assert choose(10, [parity, steady]) == Supply((Portion("a", 2, 10, "active"),), 0, 1.0)
    assert choose(15, [parity, steady]) == Supply((Portion("a", 4, 20, "active"),), 0, 2.0)
    assert choose(25, [parity, steady]) == Supply((Portion("a", 4, 20, "active"), Portion("b", 1, 5, "active")), 0, 4.0)
    # Ten blocks that stall 1 are better than the five needed that stall 2, and worse than five that stall 0.5.
    assert choose(5, [parity, steady]).taken == (Portion("a", 2, 10, "active"),)
    assert choose(5, [parity, quotes("b", "active", (5, 0.5))]).taken == (Portion("b", 1, 5, "active"),)


def test_the_costliest_superfluous_increment_is_dropped() -> None:
    # The last donor has to be asked, and then one of the first two is not needed: b, the dearer.
    lines = {"a": (3, 1.0), "b": (3, 1.125), "c": (9, 4.0), "d": (20, 40.0)}
    supply = choose(31, [quotes(name, "active", line) for name, line in lines.items()])
    assert [(take.donor, take.blocks) for take in supply.taken] == [("a", 3), ("c", 9), ("d", 20)]
    assert (supply.stall_s, supply.unmet) == (45.0, 0)


def test_the_reload_decides_between_equal_stalls() -> None:
    slow = [replace(q, reload_s=9.0) for q in quotes("slow", "active", (5, 0.0), (5, 0.0))]
    fast = quotes("fast", "active", (5, 0.0), (5, 0.0))
    assert choose(10, [slow, fast]).taken == (Portion("fast", 2, 10, "active"),)
    assert choose(15, [slow, fast]).taken == (Portion("slow", 1, 5, "active"), Portion("fast", 2, 10, "active"))


def test_increments_without_blocks() -> None:
    # A ring of two buffers costs two layers: the first gives nothing by itself.
    ring = quotes("a", "active", (0, 1.0), (0, 0.0), (6, 0.0), (0, 5.0))
    assert choose(6, [ring]) == Supply((Portion("a", 3, 6, "active"),), 0, 1.0)
    assert choose(7, [ring]) == Supply((Portion("a", 3, 6, "active"),), 1, 1.0)
    assert choose(7, [quotes("b", "inactive", (0, 0.0), (0, 0.0))]) == Supply((), 7, 0.0)
    assert choose(7, []) == choose(7, [[]]) == Supply((), 7, 0.0)
