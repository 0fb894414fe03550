"""Turns of many models, played in virtual time: nobody starves, switches are paid for, and targets that can be met are."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from remap.policy.turns import Next, PresentTurn, Queue, Turns

SECONDS = st.floats(0.0, 4.0, allow_nan=False)
MODELS = st.lists(
    st.tuples(SECONDS, st.floats(0.01, 0.3), st.sampled_from([0.3, 1.0, 5.0, math.inf])), min_size=2, max_size=6
)
ARRIVALS = st.lists(st.tuples(st.integers(0, 5), st.floats(0.0, 60.0), st.integers(1, 60)), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(MODELS, ARRIVALS, st.sampled_from([0.1, 1.0, 3.0]), st.sampled_from([0.0, 2.0, 20.0]))
def test_nobody_starves_and_switches_are_paid_for(models, arrivals, quantum_s, patience_s) -> None:  # type: ignore[no-untyped-def]
    """models: seconds of a switch and of a pass, and the target of a first token. Each arrival is so many passes of work."""
    policy = Turns(quantum_s, patience_s)
    pending = sorted((at, index % len(models), passes) for index, at, passes in arrivals)
    work, due, since = [0] * len(models), [math.inf] * len(models), [0.0] * len(models)
    turn, now, end = None, 0.0, 0.0
    longest_turn = 0.0
    waits: list[float] = []
    paid = switched = 0.0
    while pending or any(work):
        while pending and pending[0][0] <= now:
            at, index, passes = pending.pop(0)
            if not work[index]:
                due[index] = at + models[index][2]
                if turn is None or int(turn.name) != index:
                    since[index] = now
            work[index] += passes
        queues = {
            str(index): Queue(since[index], due[index], 0.0 if turn and int(turn.name) == index else switch, each)
            for index, (switch, each, _) in enumerate(models)
            if work[index]
        }
        found = policy.decide(now, turn, queues)
        if found.name is None:
            assert not queues
            now = pending[0][0]
            continue
        index = int(found.name)
        assert work[index]
        if turn is None or found.name != turn.name:
            if turn is not None:
                longest_turn = max(longest_turn, now - turn.begun_s)
                if turn.name in queues:  # somebody else ended it
                    paid, switched = paid + now - turn.begun_s, switched + turn.switch_s
                    since[int(turn.name)] = now
            waits.append(now - since[index])
            turn = PresentTurn(found.name, now, models[index][0])
            now += models[index][0]
        assert found.follower is None or (found.follower in queues and found.at_s > now - turn.switch_s - 1e-9)
        now += models[index][1]
        work[index] -= 1
        due[index] = now + models[index][2] if work[index] else math.inf
        end = now
    assert turn is not None
    longest_turn = max(longest_turn, end - turn.begun_s)
    assert switched <= paid / 2 + 1e-6
    assert max(waits) <= patience_s + len(models) * longest_turn + 1e-6


def test_a_turn_lasts_until_others_are_due() -> None:
    policy = Turns(quantum_s=1.0)
    mine, other = Queue(0.0, 3.0, 0.0, 0.1), Queue(0.0, 10.0, 2.0, 0.5)
    found = policy.decide(2.0, PresentTurn("a", 0.0, 0.5), {"a": mine, "b": other})
    assert found == Next("a", "b", 10.0 - 2.5 - 0.2 - 0.2)  # b's switch and pass, two of a's passes, and the margin
    assert policy.decide(7.3, PresentTurn("a", 0.0, 0.5), {"a": mine, "b": other}) == Next("b")
    # Two that are due at once: the first of them has to begin early enough for the second.
    third = Queue(0.0, 10.0, 2.0, 0.5)
    found = policy.decide(2.0, PresentTurn("a", 0.0, 0.5), {"a": mine, "b": other, "c": third})
    assert found == Next("a", "b", 10.0 - 5.4)


def test_a_turn_that_is_ahead_of_its_tokens_ends_after_its_quantum() -> None:
    """It would be back in time, so whoever waits need not wait for its last moment."""
    policy = Turns(quantum_s=1.0)
    queues = {"a": Queue(0.0, 30.0, 0.0, 0.1), "b": Queue(0.0, 20.0, 2.0, 0.5)}
    assert policy.decide(0.9, PresentTurn("a", 0.0), queues).name == "a"
    assert policy.decide(1.0, PresentTurn("a", 0.0), queues) == Next("b")


def test_who_has_lost_its_target_makes_nobody_else_late() -> None:
    policy = Turns(quantum_s=1.0, patience_s=30.0)
    late, due = Queue(0.0, 1.0, 1.0, 0.1), Queue(4.0, 6.0, 1.0, 0.1)
    assert policy.decide(4.0, None, {"late": late, "due": due}) == Next("due")
    assert policy.decide(31.0, None, {"late": late, "due": Queue(30.5, 33.0, 1.0, 0.1)}) == Next("late")
    # A turn without a target of its own, and others who wait without one: each for its quantum, longest waiting first.
    queues = {"a": Queue(0.0), "b": Queue(2.0), "c": Queue(1.0)}
    assert policy.decide(0.5, PresentTurn("a", 0.0), queues) == Next("a", "c", 1.0)
    assert policy.decide(1.0, PresentTurn("a", 0.0), queues) == Next("c")
