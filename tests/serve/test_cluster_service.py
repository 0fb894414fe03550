"""Requests that an instance has and nobody waits for: it is told. Requests that end instances: they are found out, and no others
are blamed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from control_worlds import MODEL, NETWORK, description
from effort import some
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("msgspec")

from remap_serve.cluster.control import Control as ClusterControl
from remap_serve.cluster.messages import (
    Command,
    Death,
    Decline,
    Died,
    Event,
    InstanceReport,
    Joined,
    PlacementAsked,
    Reported,
    Restart,
    Route,
    Tick,
    Tokens,
)
from remap_serve.cluster.service import APART_S, MOST_FAULTS, QUIET_S, TRIAL_TOKENS, Cancel, Fatal, Service, Submit


class Control:
    """Sends every request to instance "a", the restarted ones to "b"."""

    def __init__(self) -> None:
        self.next = "a"
        self.descriptions = {"a": description("a"), "b": description("b")}

    def on(self, event: Event, now_s: float) -> list[Command]:
        if isinstance(event, Died):
            node = self.descriptions[event.instance].node
            return [Restart((event.instance,), Death(event.instance, node, event.why, event.outside))]
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
    now_s = 0.0
    for fault in range(1, MOST_FAULTS):
        assert service.on(Died("a", why=f"fault {fault}"), now_s) == service.on(Tick(), now_s + APART_S / 2) == []
        now_s += APART_S if fault < MOST_FAULTS - 1 else QUIET_S
        (action,) = service.on(Tick(), now_s)
        assert isinstance(action, Submit) and action.submission.attempt == fault + 1
    assert service.on(Died("a", why="the last"), now_s) == service.on(Tick(), now_s + APART_S / 2) == []
    (end,) = service.on(Tick(), now_s + APART_S)
    assert isinstance(end, Decline) and isinstance(end.error, Fatal)
    assert (end.error.request, end.error.faults) == ("r", MOST_FAULTS)
    assert [death.why for death in end.error.deaths] == ["fault 1", "fault 2", "the last"]
    assert "a (fault 2)" in str(end.error)
    assert "r" not in service.ledger and service.on(Died("a"), now_s + 9) == service.on(Tick(), now_s + 99) == []


@pytest.mark.parametrize(
    ("nodes", "when_s", "near"),
    [
        ("", -0.9 * APART_S, True),
        ("", 0.9 * APART_S, True),
        ("", -0.9 * QUIET_S, False),
        ("11", -0.9 * QUIET_S, False),
        ("112", -0.9 * QUIET_S, True),
        ("121", -0.9 * QUIET_S, False),
    ],
)
def test_a_death_near_another_says_nothing_of_a_request_on_trial(
    service: Any, nodes: str, when_s: float, near: bool
) -> None:
    """A node died while a request that was there twice before was on trial at it: the request was taken to be why. Where all are
    on one node, to be of one says nothing."""
    service.control.descriptions |= {name: replace(description(name), node=node) for name, node in zip("abc", nodes)}
    for now_s in (0.0, 10.0):
        service.on(Died("a"), now_s)
        service.on(Tick(), now_s + QUIET_S)
    assert service.suspects == ["r"]
    for at_s, name in sorted([(20.0, "a"), (20.0 + when_s, "b")]):
        service.on(Died(name), at_s)
    found = service.on(Tick(), 20.0 + APART_S)
    assert [type(each) for each in found] == ([] if near else [Decline])
    if not near:
        return
    assert started(service.on(Tick(), 20.0 + QUIET_S)) == ["r"]
    service.on(Died("a"), 30.0)
    (end,) = service.on(Tick(), 30.0 + APART_S)
    assert isinstance(end, Decline) and end.error.faults == MOST_FAULTS


def test_two_that_end_each_instance_do_not_excuse_each_other(suspects: Any) -> None:
    """One's trial ended an instance of a node, half a second later the other's another one: neither was found, for ever."""
    suspects.control.descriptions |= {name: replace(description(name), node=node) for name, node in zip("abc", "112")}
    suspects.on(Died("b"), 9.0)
    suspects.on(Died("a"), 9.1)
    assert started(suspects.on(Tick(), 9.1 + APART_S)) == []  # "r" may have been at what ended "b"
    suspects.control.next = "b"
    assert started(suspects.on(Tick(), 9.1 + QUIET_S)) == ["s"]
    suspects.on(Died("b"), 9.2 + QUIET_S)
    (end,) = suspects.on(Tick(), 9.2 + QUIET_S + APART_S)
    assert isinstance(end, Decline) and end.id == "s"


def test_an_end_from_outside_counts_against_no_request(service: Any) -> None:
    """A rolling update that met a long request three times ended it."""
    for fault in range(2 * MOST_FAULTS):
        assert started(service.on(Died("a", outside=True), float(fault))) == [
            "r"
        ]  # at once: nothing is to be waited for
    assert service.suspects == []


@pytest.mark.parametrize("said", ["bounced", "answered", "cancelled"])
def test_a_lost_request_that_is_heard_of_while_it_waits_is_asked_for_once(service: Any, said: str) -> None:
    service.on(Died("a"), 0.0)
    if said == "bounced":  # where it was submitted to, who refused it before its end was known
        assert service.bounced("r", 1, 0.1) == []
        assert started(service.on(Tick(), APART_S)) == ["r"]
        return
    if said == "answered":  # the tokens were on their way
        service.take(Tokens("r", 1, 0, (5,), "stop"), 0.1)
    else:
        service.cancel("r", 0.1)
    assert started(service.ask("r", "another question", 0.2)) == ["r"]
    assert service.on(Tick(), APART_S) == []


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
    service.on(Died("a"), 0.0)
    assert started(service.on(Tick(), 1.0)) == ["r", "s"]  # once is nobody's fault
    service.on(Died("a"), 1.0)
    assert started(service.on(Tick(), 9.0)) == ["r"]
    return service


def test_suspects_start_one_after_the_other(suspects: Any) -> None:
    get(suspects, "r", TRIAL_TOKENS - 1)
    assert started(suspects.on(Tick(), 9.0)) == []
    get(suspects, "r", 1)
    assert started(suspects.on(Tick(), 9.0)) == ["s"]
    suspects.ask("t", "question", 9.0)  # nobody else waits
    # The one on trial is blamed alone. Who had its trial before has a longer one now.
    suspects.on(Died("a"), 10.0)
    end, other = suspects.on(Tick(), 10.0 + APART_S)
    assert isinstance(end, Decline) and end.id == "s" and started([other]) == ["t"]
    assert started(suspects.on(Tick(), 19.0)) == ["r"]
    get(suspects, "r", TRIAL_TOKENS**2 - 1)
    suspects.on(Died("a"), 20.0)
    (end, again) = suspects.on(Tick(), 29.0)
    assert isinstance(end, Decline) and (end.id, end.error.faults) == ("r", MOST_FAULTS + 1)
    assert started([again]) == ["t"]


@pytest.mark.parametrize("ends", ["answered", "cancelled"])
def test_a_suspect_that_ends_is_followed_by_the_next(suspects: Any, ends: str) -> None:
    if ends == "answered":
        suspects.take(Tokens("r", 3, 0, (5,), "stop"), 9.0)
        assert started(suspects.on(Tick(), 9.0)) == ["s"]
    else:
        cancel, start = suspects.cancel("r", 9.0)
        assert isinstance(cancel, Cancel) and started([start]) == ["s"]


def test_a_suspect_that_is_cancelled_while_it_waits_has_no_trial_nor_has_another_of_its_name(suspects: Any) -> None:
    assert suspects.cancel("s", 9.0) == []
    assert started(suspects.ask("s", "another question", 9.0)) == ["s"]
    assert suspects.cancel("r", 9.0) == [Cancel("a", "r", 3)]
    assert started(suspects.ask("r", "another question", 9.0)) == ["r"]
    suspects.on(Died("a"), 9.0)
    assert started(suspects.on(Tick(), 10.0)) == ["s", "r"]


class Histories:
    """Deaths at random, and why each came: the reference, which the service does not know. met: the causes at which a request was
    lost, by its id."""

    def __init__(self, nodes: int, each: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.node_of = {f"{node}{number}": str(node) for node in range(nodes) for number in range(each)}
        self.control = ClusterControl(MODEL, NETWORK, timeout_s=1e9)
        self.service = Service[str](self.control, len)
        self.now_s = 0.0
        self.due: list[tuple[float, str, object]] = []  # when, who dies (or joins, by the cause None), and why
        self.poisons: set[str] = set()
        self.kills: dict[str, int] = {}
        self.met: dict[str, set[object]] = {}
        self.blamed: dict[str, Fatal] = {}
        self.others = 0  # deaths that no request was the cause of
        for name in self.node_of:
            self.join(name)

    def join(self, name: str) -> None:
        self.see(Joined(replace(description(name), node=self.node_of[name])))
        self.see(Reported(InstanceReport(name, self.control.epoch_of(name) or 0)))

    def see(self, event: Event) -> None:
        self.carry_out(self.service.on(event, self.now_s))

    def ask(self, id: str) -> None:
        self.met[id] = set()
        self.carry_out(self.service.ask(id, "?", self.now_s))

    def carry_out(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Decline):
                assert isinstance(action.error, Fatal)
                self.blamed[action.id] = action.error
            elif isinstance(action, Submit) and action.submission.id in self.poisons:
                cause = action.submission.id, action.submission.attempt
                self.due.append((self.now_s + self.random.uniform(0.0, 0.3), action.instance, cause))

    def crash(self, at_s: float, names: list[str], spread_s: float) -> None:
        """One cause ends these, one after another."""
        cause = object()
        self.due += [(at_s + self.random.uniform(0.0, spread_s), name, cause) for name in names]

    def run(self, until_s: float) -> None:
        """Until then, or until nothing is to come."""
        while self.now_s < until_s and (self.due or len(self.service.ledger)):
            tick_s = self.now_s + 0.1
            for one in sorted((each for each in self.due if each[0] <= tick_s), key=lambda each: each[0]):
                self.due.remove(one)
                self.now_s = max(self.now_s, one[0])
                self.happen(*one[1:])
            self.now_s = max(self.now_s, tick_s)
            self.see(Tick())
            self.compute()
        self.now_s = max(self.now_s, until_s)

    def happen(self, name: str, cause: object) -> None:
        if cause is None:
            self.join(name)
        elif self.control.epoch_of(name) is not None:
            there = [id for id in self.service.ledger.ids if self.service.ledger.where(id) == name]
            poison = cause[0] if isinstance(cause, tuple) else None
            if poison is not None and poison not in there:
                return  # another cause was first
            self.kills[poison or ""] = self.kills.get(poison or "", 0) + 1
            for id in there:
                self.met[id].add(cause)
            self.see(Died(name))
            self.due.append((self.now_s + self.random.uniform(0.2, 5.0), name, None))

    def compute(self) -> None:
        """A token for each that is somewhere; a poison gets none."""
        for id in self.service.ledger.ids:
            if self.service.ledger.where(id) is not None and id not in self.poisons:
                first, attempt = len(self.service.ledger.tokens(id)), self.service.ledger.attempt(id)
                last = first == 100
                self.service.take(Tokens(id, attempt, first, (7,), "length" if last else None), self.now_s)


@settings(max_examples=some(40, 300), deadline=None)
@given(
    nodes=st.integers(1, 3),
    each=st.integers(1, 4),
    seed=st.integers(0, 10_000),
    crashes=st.lists(st.tuples(st.floats(1.0, 12.0), st.integers(0, 2)), max_size=5),
    slowly=st.booleans(),
    singles=st.lists(st.floats(1.0, 12.0), max_size=3),
    poisons=st.lists(st.floats(0.5, 12.0), max_size=2),
)
def test_nobody_is_blamed_for_what_one_cause_explains_and_who_ends_each_instance_is_found(
    nodes: int,
    each: int,
    seed: int,
    crashes: list[tuple[float, int]],
    slowly: bool,
    singles: list[float],
    poisons: list[float],
) -> None:
    """A node that died ended 14 of 3,000 requests as if they had killed its instances, one after another."""
    world = Histories(nodes, each, seed)
    for number in range(30):
        world.ask(f"r{number}")
    for at_s, node in crashes:
        names = [name for name, where in world.node_of.items() if where == str(node % nodes)]
        world.crash(at_s, names, 0.95 * QUIET_S if slowly else 0.13)
    for at_s in singles:
        world.crash(at_s, [world.random.choice(list(world.node_of))], 0.0)
    for number, at_s in enumerate(sorted(poisons)):
        world.run(at_s)
        world.poisons.add(f"p{number}")
        world.ask(f"p{number}")
    world.run(600.0)
    assert len(world.service.ledger) == 0
    for id, error in world.blamed.items():
        assert len(error.deaths) == error.faults >= MOST_FAULTS
        if id not in world.poisons:
            assert len(world.met[id]) >= (2 if slowly else MOST_FAULTS), id
    others = world.kills.pop("", 0)
    assert world.kills.keys() <= world.poisons <= world.blamed.keys()
    for kills in world.kills.values():
        assert kills <= MOST_FAULTS + others + sum(world.kills.values()) - kills
    if len(poisons) == 1 and not others:
        assert world.kills["p0"] == MOST_FAULTS and world.blamed.keys() == world.poisons
