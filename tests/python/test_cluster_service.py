"""Requests that an instance has and nobody waits for: it is told."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("msgspec")

from remap.cluster.messages import Asked, Command, Decline, Died, Event, Report, Reported, Restart, Route
from remap.cluster.service import MOST_FAULTS, Cancel, Fatal, Service, Submit


class Control:
    """Sends every request to instance "a", the restarted ones to "b"."""

    def __init__(self) -> None:
        self.next = "a"

    def on(self, event: Event, now_s: float) -> list[Command]:
        if isinstance(event, Died):
            return [Restart((event.instance,))]
        return [Route(event.id, self.next)] if isinstance(event, Asked) else []

    def epoch_of(self, instance: str) -> int:
        return 0

    def members(self, instance: str) -> list[str]:
        return [instance]


def reported(instance: str, *requests: tuple[str, int]) -> Reported:
    return Reported(Report(instance, 0, "serving", requests=requests))


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
