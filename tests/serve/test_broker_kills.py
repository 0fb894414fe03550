"""Members and the broker are killed while KV of paused requests is on its way from one process to another."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")

import broker_turns
from broker_member import LAYERS, Process, until
from broker_place import DEVICE, PAGES, Place
from broker_serving import BROKER_POINTS
from broker_turns import POINTS

KILLS = int(os.environ.get("REMAP_BROKER_KILLS", "6"))
SEED = int(os.environ.get("REMAP_BROKER_SEED", "0"))
MOST_S = 0.15
"""How far into what others do a kill comes, at most; and for how long one that is to kill itself is waited for."""
Start = Callable[..., Process]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "s")
    yield made
    made.serving.kill()


@pytest.fixture
def start(place: Place) -> Iterator[Start]:
    made: list[Process] = []

    def one(name: str, value: int) -> Process:
        made.append(Process(str(place.path), name, LAYERS, value, broker_turns.__file__))
        return made[-1]

    yield one
    for each in made:
        if each.process.poll() is None:
            each.kill()


class Turns:
    """Members of which some are paused in the midst of their requests, while others have more to do than they have pages for."""

    def __init__(self, rng: random.Random, place: Place, start: Start) -> None:
        self._rng, self._place, self._start = rng, place, start
        self._values = 0
        self.alive: dict[str, Process] = {}
        self.running: dict[str, str] = {}
        self.met: dict[str, int] = {}
        for name in ("one", "two", "three"):
            self.join(name)

    def join(self, name: str) -> None:
        """Its layers and first blocks may be KV of the others, who are paused, and give it."""
        self.rest(*sorted(self.alive))
        self._values += 1
        joined = self._start(name, 1 + self._values % 250)
        self.finish()
        self.alive[name] = joined
        self._place.remember(self.alive[name])

    def begin(self, name: str, *line: object) -> None:
        self.running[name] = str(line[0])
        self.alive[name].begin(*line)

    def finish(self) -> None:
        """What they do, all of them."""
        for name, verb in sorted(self.running.items()):
            if verb == "rest":
                self.alive[name].begin("stop")
        for name in sorted(self.running):
            said = self.alive[name].read()
            if self.running[name] == "rest":
                assert said.isdigit(), f"{name}: rest: {said!r}"
                said = self.alive[name].read()
            right = said in ("paused", "asked", "active", "armed", "idle", "stopped") or said.isdigit()
            assert right, f"{name}: {self.running[name]}: {said!r}"
        self.running.clear()

    def crowd(self) -> None:
        """One serves, which will lack pages; the others have as many live blocks as they get, and are paused."""
        taker = self._rng.choice(sorted(self.alive))
        for name in sorted(self.alive.keys() - {taker}):
            self.wake(name)
            for line in (("ask", self._rng.randrange(10, 30), 100), ("serve", self._rng.randrange(4, 12)), ("pause",)):
                self.act(name, *line)
        self.wake(taker)
        self.act(taker, "ask", self._rng.randrange(20, 50), 100)
        self.taker = taker

    def act(self, name: str, *line: object) -> None:
        self.begin(name, *line)
        self.finish()

    def rest(self, *names: str) -> None:
        """These are paused, and give what others want, until all have finished what they do."""
        for name in names:
            self.begin(name, "pause")
        self.finish()
        for name in names:
            self.begin(name, "rest")

    def wake(self, name: str) -> None:
        """Its layers may be another's KV."""
        self.rest(*sorted(self.alive.keys() - {name}))
        until(lambda: self.alive[name]("resume") == "active", f"{name} has its layers")
        self.finish()

    def set_off(self) -> None:
        """The one takes, the others give, all at once."""
        expects = self._rng.randrange(1, 200) if self._rng.random() < 0.5 else 0
        for name in sorted(self.alive):
            self.begin(name, *(("serve", 40, expects) if name == self.taker else ("rest",)))

    def kill_one(self) -> str:
        """In the midst of it: a member, by name, or the broker. At a point of its own choice, if it comes there, else at any
        time."""
        victim = self._rng.choice([*self.alive, self.taker, "broker", "broker"])
        process = self._place.serving.process if victim == "broker" else self.alive[victim].process
        at = ""
        if self._rng.random() < 0.7:
            points = BROKER_POINTS if victim == "broker" else POINTS[:4] if victim != self.taker else POINTS[4:]
            at = self._rng.choice(points)
            passages = self._rng.randrange(1, 4)
            if victim == "broker":
                self._place.serving.die(points.index(at), passages)
            else:
                self.begin(victim, "die", POINTS.index(at), passages)
                self.finish()
        self.set_off()
        until_s = time.monotonic() + (2 * MOST_S if at else MOST_S * self._rng.random())
        while time.monotonic() < until_s and process.poll() is None:
            time.sleep(0.001)
        met = process.poll() is not None
        where = f"{'broker' if victim == 'broker' else 'taker' if victim == self.taker else 'giver'} {at if met else 'any time'}"
        self.met[where] = self.met.get(where, 0) + 1
        if victim == "broker":
            self._place.kill()
        else:
            self.running.pop(victim)
            self.alive.pop(victim).kill()
        return victim

    def end_all(self) -> None:
        """Every request that was asked for ends."""
        for name in sorted(self.alive):
            self.wake(name)
            self.rest(*sorted(self.alive.keys() - {name}))
            ended, _, asked = self.alive[name]("finish").split()
            assert ended == asked
            assert self.alive[name]("idle_steps") == "idle"
            self.finish()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_members_and_the_broker_are_killed_while_paused_kv_is_on_its_way(place: Place, start: Start, seed: int) -> None:
    """Those that give, those that get, and the broker between the two. Every request of a member that lives ends, and each of its
    passes finds the bytes of those before it; no block has a byte of another process when it is taken; no page, descriptor, map
    or lock is lost. A longer run: `REMAP_BROKER_KILLS`, and others: `REMAP_BROKER_SEED`."""
    rng = random.Random(seed + SEED)
    turns = Turns(rng, place, start)
    for number in range(KILLS):
        turns.crowd()
        victim = turns.kill_one()
        if victim == "broker":
            if rng.random() < 0.5:
                turns.finish()
            place.again()
        turns.finish()
        place.until_all_are_back(*turns.alive.values())
        if victim != "broker":
            until(partial(place.has, *turns.alive.values()), place.tell)
        if rng.random() < 0.4:
            turns.end_all()
        if victim != "broker":
            turns.join(victim)
        place.check_that_nothing_is_lost(*turns.alive.values())
        sys.stdout.write(f"{number + 1} kills; {turns.met}\n")  # shown with -rP
        sys.stdout.flush()
    turns.end_all()
    members = list(turns.alive.values())
    place.check_that_nothing_is_lost(*members)
    for each in members:
        assert each("check") in ("right", "asleep")
        assert each("close") == "closed"
        assert each("left") == "0 0" or DEVICE != "cpu"
    until(lambda: place.look().free == PAGES, place.tell)
    assert place.left() == set()
