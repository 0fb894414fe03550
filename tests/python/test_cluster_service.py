"""Requests that an instance has and nobody waits for: it is told. Requests that end instances: they are found out."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("msgspec")

from remap.cluster.messages import (
    Command,
    Decline,
    Died,
    Event,
    InstanceReport,
    PlacementAsked,
    Reported,
    Restart,
    Route,
    Tick,
    Tokens,
)
from remap.cluster.service import MOST_FAULTS, TRIAL_TOKENS, Cancel, Fatal, Service, Submit


class Control:
    """Sends every request to instance "a", the restarted ones to "b"."""

    def __init__(self) -> None:
        self.next = "a"

    def on(self, event: Event, now_s: float) -> list[Command]:
        if isinstance(event, Died):
            return [Restart((event.instance,))]
        return [Route(event.id, self.next)] if isinstance(event, PlacementAsked) else []

    def epoch_of(self, instance: str) -> int:
        return 0

    def members(self, instance: str) -> list[str]:
        return [instance]


def reported(instance: str, *requests: tuple[str, int]) -> Reported:
    return Reported(InstanceReport(instance, 0, "serving", requests=requests))


@pytest.fixture
def service() -> Any:
    control: Any = Control()
    found = Service[str](control, len)
    found.ask("r", "question", 0.0)
    return found


def test_a_request_that_was_cancelled_on_its_way_elsewhere_is_cancelled_where_it_comes_to(service: Any) -> None:
    assert service.on(reported("b", ("r", 1)), 0.0) == []  # it may move
    assert service.cancel("r", 0.0) == [Cancel("b", "r", 1)]
    assert service.on(reported("a", ("r", 1)), 0.0) == [Cancel("a", "r", 1)]
    assert service.on(reported("a"), 0.0) == []


def test_an_attempt_that_is_over_is_cancelled_and_the_last_one_is_not(service: Any) -> None:
    service.bounced("r", 1, 0.0)
    assert service.on(reported("a", ("r", 2)), 0.0) == []
    assert service.on(reported("b", ("r", 1)), 0.0) == [Cancel("b", "r", 1)]
    assert service.on(reported("a", ("r", 2), ("nobody", 7)), 0.0) == [Cancel("a", "nobody", 7)]


def test_a_request_whose_instances_fail_again_and_again_ends(service: Any) -> None:
    for fault in range(1, MOST_FAULTS):
        (action,) = service.on(Died("a"), 0.0)
        assert isinstance(action, Submit) and action.submission.attempt == fault + 1
    (end,) = service.on(Died("a"), 0.0)
    assert isinstance(end, Decline) and isinstance(end.error, Fatal)
    assert end.error.fields == {"request": "r", "faults": MOST_FAULTS}
    assert "r" not in service.ledger and service.on(Died("a"), 0.0) == []


def started(actions: list[Any]) -> list[str]:
    """The requests that are submitted, and nothing else is done."""
    assert all(isinstance(action, Submit) for action in actions)
    return [action.submission.id for action in actions]


def get(service: Any, id: str, count: int) -> None:
    """It gets so many tokens more."""
    first = len(service.ledger.tokens(id))
    service.take(Tokens(id, service.ledger.attempt(id), first, tuple(range(count))), 0.0)


@pytest.fixture
def suspects(service: Any) -> Any:
    """Two requests that were with two instances when they failed: the first of them is on trial."""
    service.ask("s", "question", 0.0)
    assert started(service.on(Died("a"), 0.0)) == ["r", "s"]  # once is nobody's fault
    assert started(service.on(Died("a"), 0.0)) == ["r"]
    return service


def test_suspects_start_one_after_the_other(suspects: Any) -> None:
    get(suspects, "r", TRIAL_TOKENS - 1)
    assert started(suspects.on(Tick(), 0.0)) == []
    get(suspects, "r", 1)
    assert started(suspects.on(Tick(), 0.0)) == ["s"]
    suspects.ask("t", "question", 0.0)  # nobody else waits
    # The one on trial is blamed alone. Who had its trial before has a longer one now.
    end, again, other = suspects.on(Died("a"), 0.0)
    assert isinstance(end, Decline) and end.id == "s" and started([again, other]) == ["t", "r"]
    get(suspects, "r", TRIAL_TOKENS**2 - 1)
    (end, again) = suspects.on(Died("a"), 0.0)
    assert isinstance(end, Decline) and (end.id, end.error.faults) == ("r", MOST_FAULTS + 1)
    assert started([again]) == ["t"]


@pytest.mark.parametrize("ends", ["answered", "cancelled"])
def test_a_suspect_that_ends_is_followed_by_the_next(suspects: Any, ends: str) -> None:
    if ends == "answered":
        suspects.take(Tokens("r", 3, 0, (5,), "stop"), 0.0)
        assert started(suspects.on(Tick(), 0.0)) == ["s"]
    else:
        cancel, start = suspects.cancel("r", 0.0)
        assert isinstance(cancel, Cancel) and started([start]) == ["s"]


def test_a_suspect_that_is_cancelled_while_it_waits_has_no_trial_nor_has_another_of_its_name(suspects: Any) -> None:
    assert suspects.cancel("s", 0.0) == []
    assert started(suspects.ask("s", "another question", 0.0)) == ["s"]
    assert suspects.cancel("r", 0.0) == [Cancel("a", "r", 3)]
    assert started(suspects.ask("r", "another question", 0.0)) == ["r"]
    assert started(suspects.on(Died("a"), 0.0)) == ["s", "r"]
