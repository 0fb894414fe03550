"""The order of donors, what is expected of their next use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from remap.config import POLICIES
from remap.policy.donors.ranking import Candidate, NextUse, may_donate, rank


def candidate(name: str = "a", **fields: object) -> Candidate:
    values: dict[str, object] = {"active": False, "priority": 0, "order": 0, "last_use": 0, "idle_s": 100.0}
    return Candidate(name, **{**values, "next_use_s": None, "reload_s": 1.0, **fields})  # type: ignore[arg-type]


CANDIDATES = st.lists(
    st.builds(
        candidate,
        name=st.text("abc", max_size=3),
        active=st.booleans(),
        priority=st.integers(-1, 1),
        last_use=st.integers(0, 3),
        next_use_s=st.one_of(st.none(), st.sampled_from([0.0, 1.0, 2.0])),
    ),
    max_size=7,
).map(lambda found: [c._replace(order=i) for i, c in enumerate(found)])


def names(found: list[Candidate]) -> str:
    return "".join(c.name for c in found)


@given(CANDIDATES, st.sampled_from(POLICIES), st.randoms(use_true_random=False))
def test_what_every_ranking_keeps_to(found: list[Candidate], policy: str, random: object) -> None:
    ranked = rank(found, policy)
    assert sorted(c.order for c in ranked) == list(range(len(found)))
    assert [c.active for c in ranked] == sorted(c.active for c in found)
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert rank(shuffled, policy) == ranked
    for first, second in zip(ranked, ranked[1:]):
        if first.active != second.active:
            continue
        if policy == "priority":
            assert first.priority <= second.priority
        elif policy == "mru":
            assert first.last_use >= second.last_use
        elif policy == "lru":
            assert first.last_use <= second.last_use
        else:
            assert first.next_use_s is None or (second.next_use_s is not None and first.next_use_s >= second.next_use_s)


def test_one_tenants_rhythm() -> None:
    uses = NextUse(smoothing=0.5)
    assert uses.expected_s("a", 0.0) is None
    uses.activated("a", 10.0)
    assert uses.expected_s("a", 11.0) is None  # it came once
    uses.activated("a", 14.0)
    assert [uses.expected_s("a", now) for now in (14.0, 15.5, 18.0, 25.0, 30.0)] == [4.0, 2.5, 0.0, 0.0, 0.0]
    assert uses.expected_s("a", 30.25) is None  # away for more than four intervals
    uses.activated("a", 22.0)
    assert uses.expected_s("a", 22.0) == 6.0  # 4 and 8, at one half
    # A clock that jumps back: nothing has passed, the average is what it was, from the new time on.
    assert uses.expected_s("a", -100.0) == 6.0
    uses.activated("a", -50.0)
    assert uses.expected_s("a", -49.0) == 5.0
    once = NextUse()
    for now, expected in ((5.0, None), (3.0, None), (4.0, 1.0)):
        once.activated("a", now)
        assert once.expected_s("a", now) == expected


def test_each_policy_and_who_has_been_idle() -> None:
    rows = (("a", 1, 5, 30.0), ("b", 0, 2, 10.0), ("c", 0, 9, 10.0), ("d", 0, 1, None), ("e", -1, 99, None))
    found = [
        candidate(name, order=at, priority=priority, last_use=use, next_use_s=next_use, active=name == "e")
        for at, (name, priority, use, next_use) in enumerate(rows)
    ]
    # Of equal priority the unknown is farthest; then equally far, c was used last.
    for policy, order in {"priority": "dcbae", "expected_next_use": "dacbe", "mru": "cabde", "lru": "dbace"}.items():
        assert names(rank(found, policy)) == order == names(rank(reversed(found), policy))
    waits = ((1.0, 1.0, 1.0), (1.01, 1.0, 1.0), (3.9, 2.0, 2.0), (4.1, 2.0, 2.0), (1e-9, 1e9, 0.0), (0.0, 1.0, 0.0))
    may = [may_donate(candidate(idle_s=idle, reload_s=reload), min_idle=least) for idle, reload, least in waits]
    assert may == [False, True, False, True, True, False]
    assert may_donate(candidate(active=True, idle_s=0.0, reload_s=9.0))


def test_a_cycle_by_hand() -> None:
    uses, now = NextUse(smoothing=1.0), 0.0
    for turn, name in enumerate("abcabc"):
        now = 10.0 * turn
        uses.activated(name, now)
    assert {name: uses.expected_s(name, now) for name in "abc"} == {"a": 10.0, "b": 20.0, "c": 30.0}
    assert {name: uses.expected_s(name, now + 4.0) for name in "abc"} == {"a": 6.0, "b": 16.0, "c": 26.0}
    assert {name: uses.expected_s(name, now + 70.0) for name in "abc"} == {"a": 0.0, "b": 10.0, "c": 20.0}  # overdue
    uses.activated("c", now + 70.0)  # its turn goes on
    assert uses.expected_s("b", now + 70.0) == 10.0
    assert [uses.expected_s(name, now + 120.0) for name in "abc"] == [0.0, 10.0, 20.0]  # four cycles of 30
    assert uses.expected_s("a", now + 121.0) is None  # longer ago than 4 intervals of its own as well
    uses.activated("b", now + 121.0)  # out of turn
    assert uses.expected_s("b", now + 121.0) == 131.0  # its own interval again
    assert uses.expected_s("c", now + 121.0) == 19.0


def test_no_cycle_before_it_was_seen_twice() -> None:
    uses = NextUse(smoothing=1.0)
    for now, name in enumerate("xabcab"):
        uses.activated(name, float(now))
    assert uses.expected_s("c", 5.0) is None
    uses.activated("c", 6.0)
    assert [uses.expected_s(name, 6.0) for name in "abcx"] == [1.0, 2.0, 3.0, None]
    again = NextUse(smoothing=1.0)
    for now, name in enumerate("xabacabac"):  # a comes back within what repeats: no cycle of different tenants
        again.activated(name, float(now))
    assert [again.expected_s(name, 8.0) for name in "abc"] == [1.0, 2.0, 4.0]


def test_forgetting() -> None:
    uses = NextUse(smoothing=1.0)
    for now, name in enumerate("abcabc"):
        uses.activated(name, float(now))
    uses.forget("b")
    uses.forget("never seen")
    assert uses.expected_s("b", 5.0) is None
    assert [uses.expected_s(name, 5.0) for name in "ac"] == [1.0, 3.0]  # by their own intervals of 3
    for now, name in enumerate("acac"):
        uses.activated(name, 10.0 + now)
    assert [uses.expected_s(name, 13.0) for name in "ac"] == [1.0, 2.0]
    uses.activated("b", 20.0)
    assert uses.expected_s("b", 20.0) is None  # a new tenant of an old name
