"""Members of a broker that take, free, sleep, serve and check at random, several at a time, and are killed in the midst of it."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping

from broker_member import LAYERS, Process

ANSWERS: dict[str, Callable[[str], bool]] = {
    "take": str.isdigit,
    "free": "freed".__eq__,
    "thin": "thinned".__eq__,
    "check": lambda said: said in ("right", "asleep"),
    "sleep": "asleep".__eq__,
    "cold": "asleep".__eq__,
    "idle": "idle".__eq__,
    "wake": lambda said: said.startswith(("True ", "False ", "cold ")),
}
"""Verb -> whether that may be the answer. Taking and checking look at bytes."""
MOST_S = 0.1
"""How far into what others do a kill comes, at most."""


class Crowd:
    """layers: name -> of that member. Each process writes a byte of its own, so that no one reads what its dead namesake wrote
    without being found out."""

    def __init__(self, rng: random.Random, start: Callable[..., Process], layers: Mapping[str, int]) -> None:
        self.killed, self.asleep = 0, set[str]()
        self._rng, self._start, self._layers = rng, start, layers
        self._running: dict[str, str] = {}
        self.said: dict[str, str] = {}
        self._started = 0
        self.alive: dict[str, Process] = {}
        for name in layers:
            self.join(name)

    def join(self, name: str) -> None:
        self._started += 1
        self.alive[name] = self._start(name, self._layers[name], 1 + self._started % 250)

    def begin(self, name: str, *line: object) -> None:
        """line: what is to be done, else anything."""
        said = line or self._anything(name)
        self._running[name] = str(said[0])
        self.alive[name].begin(*said)

    def _anything(self, name: str) -> tuple[object, ...]:
        what = self._rng.random()
        if what < 0.3 and self._layers[name] > LAYERS:
            return ("wake" if name in self.asleep else self._rng.choice(("sleep", "cold", "idle")),)
        if what < 0.6:
            return ("check",) if name in self.asleep else ("take", self._rng.randrange(1, 120), 0)
        if what < 0.75:
            return ("thin" if self._rng.random() < 0.3 else "free",)
        return ("check",)

    def begin_some(self) -> None:
        """And let them come to any point of it."""
        for name in sorted(self.alive.keys() - self._running.keys()):
            if self._rng.random() < 0.7:
                self.begin(name)
        time.sleep(MOST_S * self._rng.random())

    def finish(self) -> None:
        """What they do, all of them."""
        for name, verb in sorted(self._running.items()):
            said = self.alive[name].read()
            assert ANSWERS[verb](said), f"{name}: {verb}: {said}"
            if verb in ("sleep", "cold"):
                self.asleep.add(name)
            elif verb == "wake" and said.startswith("True "):
                self.asleep.discard(name)
            self.said[name] = said
        self._running.clear()

    def act(self, name: str, *line: object) -> None:
        self.finish()
        self.begin(name, *line)
        self.finish()

    def kill(self, name: str) -> None:
        """In the midst of what it does. The others go on with it."""
        self.alive.pop(name).kill()
        self._running.pop(name, None)
        self.asleep.discard(name)
        self.killed += 1
        self.finish()

    def stop(self, name: str) -> None:
        """In the midst of what it does, and let it go on once the others have done something."""
        member, verb = self.alive.pop(name), self._running.pop(name, "")
        member.signal(signal.SIGSTOP)
        self.do_something()
        member.signal(signal.SIGCONT)
        self.alive[name] = member
        self._running.update({name: verb} if verb else {})

    def do_something(self) -> None:
        """All that are there."""
        self.finish()
        for each in sorted(self.alive):
            self.act(each)

    def make_room(self) -> None:
        """All are awake, and take nothing any more."""
        self.wake()
        for name in sorted(self.alive):
            self.act(name, "free")

    def wake(self) -> None:
        """All. For the layers of those that are cold there may be no pages before others have freed their blocks; and before they
        themselves have, if another one's layers have come meanwhile."""
        self.finish()
        for tries in range(50):
            if not self.asleep:
                return
            for name in sorted(self.alive if tries else self.alive.keys() - self.asleep):
                self.act(name, "free")
            for name in sorted(self.asleep):
                self.act(name, "wake")
        raise AssertionError(f"{self.asleep} stay cold: {self.said}")
