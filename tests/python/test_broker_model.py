"""The protocol of docs/notes/broker.md, in every order of its steps: `reference.broker_model` visits all states within `Limits`.

No run is cut at a depth: what is limited is how often members ask, and how much goes wrong. The farthest states are 15 to 28
steps away. Each rule of the protocol is then left out in turn, and the same checker has to find what goes wrong.
"""

from __future__ import annotations

import pytest

from reference.broker_model import (
    BEGINS_PASS,
    DRAINED,
    ENDS_PASS,
    GRANT,
    JOIN,
    KEEP,
    RECALL,
    UNMET,
    WANT,
    WELCOME,
    Limits,
    Rules,
    explore,
)

RIGHT = (
    *(Limits(gives=1), Limits(kills=1), Limits(stops=1)),
    *(Limits(asks=1, breaks=1), Limits(asks=1, broker_kills=1, kills=1), Limits(asks=1, broker_kills=1, stops=1)),
    *(Limits(asks=1, broker_kills=2, pages=1), Limits(asks=1, broker_kills=1, pages=1, newcomer=True)),
    *(Limits(members=3), Limits(members=3, asks=1, kills=1), Limits(members=3, pages=1, kills=1)),
    *(Limits(members=3, pages=1, asks=1, broker_kills=1), Limits(members=3, pages=1, asks=1, breaks=1)),
    *(Limits(members=3, pages=1, stops=1), Limits(members=3, pages=1, asks=1, kills=1, newcomer=True)),
)
LARGE = (
    *(Limits(asks=1, gives=1, breaks=1), Limits(asks=1, pages=1, breaks=2)),
    Limits(asks=1, gives=1, breaks=1, broker_kills=1, pages=1),
)
"""Two members and three; each party crashes at every point, and a broker begins again. `make test` leaves out the large ones."""

BROKEN = (*(each for each in RIGHT if each.breaks or each.broker_kills), Limits(asks=1, pages=1, breaks=2))

TWO_OWNERS = "has two owners"
NOT_FREE = "is free in the ledger, and a member has it"
DISAGREE = "disagree about page"
STUCK = "nothing leads on"
WITHOUT = {
    "taker_zeroes": (Limits(asks=1), "reads bytes of member"),
    "drained_behind_last_reader": (Limits(asks=1), TWO_OWNERS),
    "donor_says_unzeroed": (Limits(pages=1, gives=1), "reads bytes of member"),
    "member_checks_connection": (Limits(asks=1, broker_kills=1), NOT_FREE),
    "broker_checks_stamp": (Limits(asks=1, gives=1, breaks=1), DISAGREE),
    "stamps_go_on_behind_claims": (Limits(members=1, pages=1, asks=1, gives=1, breaks=1, broker_kills=1), DISAGREE),
    "joins_are_numbered": (Limits(pages=1, asks=1, breaks=2), "claims page 0, which is not its own"),
    "dead_give_back": (Limits(asks=1, kills=1), "is lost"),
    "dead_means_process_ended": (Limits(asks=1, kills=1), NOT_FREE),
    "new_broker_waits_for_locks": (Limits(asks=1, broker_kills=1), NOT_FREE),
    "lock_before_join": (Limits(asks=1, broker_kills=1, newcomer=True), NOT_FREE),
    "join_repeats_ask": (Limits(asks=1, broker_kills=1), STUCK),
    "join_forgets_recalls": (Limits(asks=1, breaks=1), STUCK),
    "every_recall_is_answered": (Limits(asks=1), STUCK),
    "passes_never_wait": (Limits(asks=1), "is kept from its next pass"),
}
"""A rule that is left out: what it takes to see that, and what is seen."""


def said(limits: Limits) -> str:
    """The limits that are not the usual ones."""
    usual = Limits()
    return (
        ", ".join(f"{name}={value}" for name, value in vars(limits).items() if value != getattr(usual, name)) or "usual"
    )


@pytest.mark.parametrize("limits", [*RIGHT, *(pytest.param(each, marks=pytest.mark.slow) for each in LARGE)], ids=said)
def test_every_state_is_right(limits: Limits) -> None:
    found = explore(limits)
    assert found.problem == "", "\n".join((found.problem, *found.trace))
    assert found.quiet > 10 and found.depth > 10  # and something has happened


@pytest.mark.parametrize(
    "limits", [pytest.param(each, marks=pytest.mark.slow) if each.pages > 1 else each for each in BROKEN], ids=said
)
def test_what_is_built_needs_no_stamps_and_no_join_numbers(limits: Limits) -> None:
    found = explore(limits, Rules.built())
    assert found.problem == "", "\n".join((found.problem, *found.trace))
    assert found.quiet > 10 and found.depth > 10


@pytest.mark.parametrize("rule", ["new_broker_waits_for_locks", "lock_before_join", "join_forgets_recalls"])
def test_what_is_built_needs_these_rules(rule: str) -> None:
    limits, problem = WITHOUT[rule]
    assert problem in explore(limits, Rules.built(**{rule: False})).problem


@pytest.mark.parametrize("rule", Rules.names())
def test_a_rule_that_is_left_out_is_missed(rule: str) -> None:
    limits, problem = WITHOUT[rule]
    found = explore(limits, Rules.without(rule))
    assert problem in found.problem, found
    assert found.trace, "the first state is right"


def test_everything_that_can_happen_does() -> None:
    runs = (
        Limits(),
        Limits(gives=1, asks=1, kills=1),
        Limits(asks=1, breaks=1),
        Limits(asks=1, broker_kills=1, stops=1),
    )
    kinds = frozenset().union(*(explore(limits).kinds for limits in runs))
    assert {JOIN, WANT, DRAINED, KEEP, WELCOME, GRANT, RECALL, UNMET, BEGINS_PASS, ENDS_PASS} <= kinds
    assert {"is killed", "is stopped", "goes on", "ends", "joins", "gives up page", "and keeps", "zeroes page"} <= kinds
    assert {"connection breaks of", "the broker is killed", "a broker begins", "the deadline passes"} <= kinds
    assert {"broker reads late", "broker sees the end of", "broker sees the end of the socket of"} <= kinds


def test_a_run_beyond_its_bound_says_so() -> None:
    with pytest.raises(MemoryError, match="more than 100 states"):
        explore(Limits(), most_states=100)
