"""A broker in a process of its own that is killed, and the next one at its socket; and whether anything was lost."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from broker_member import PAGE, Process, arena_maps, files_of, until
from broker_serving import Serving

from remap.broker.locks import Lock
from remap.broker.messages import State
from remap.broker.observer import Observer

DEVICE = os.environ.get("REMAP_DEVICE") or "cpu"  # on the emulated driver as well: device_suites.txt
PAGES = 96


class Place:
    """A socket's path, and who serves there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[int, int] = {}
        self.serving = self.begin()
        assert self.serving.said == "ready"
        self.base = len(files_of(self.serving.process.pid))

    def begin(self, pages: int = PAGES) -> Serving:
        return Serving(self.path, pages, PAGE, DEVICE)

    def kill(self) -> None:
        self.serving.kill()

    def again(self) -> None:
        self.serving = self.begin()
        assert self.serving.said == "ready"

    def look(self) -> State:
        with Observer(str(self.path)) as observer:
            return observer.look().state

    def members(self) -> dict[str, int]:
        """Who is connected, by process, and how many pages it has."""
        with Observer(str(self.path)) as observer:
            return {str(each.pid): each.held for each in observer.look().members if each.connected}

    def until_all_are_back(self, *members: Process) -> None:
        numbers = {str(each.process.pid) for each in members}
        until(
            lambda: numbers <= self.members().keys() and self.look().unknown == 0,
            lambda: f"all have joined again, but {self.tell(*members)}",
        )

    def has(self, *members: Process) -> bool:
        """Whether it has exactly these."""
        return self.members().keys() == {str(each.process.pid) for each in members}

    def tell(self, *members: Process) -> str:
        """How all are, for the message of a test that fails. members: those that wait to be told what to do."""
        with Observer(str(self.path)) as observer:
            seen = observer.look()
        each = [
            f"{one.process.pid} is {one.state()} and says {one('problem')!r}, with {files_of(one.process.pid)}"
            for one in members
            if one.process.poll() is None
        ]
        broker = self.serving.process.pid
        return f"{seen.state}, {seen.members}; locked: {self.left()}; broker {broker} with {files_of(broker)}; members {each}"

    def left(self) -> set[int]:
        """The numbers that are locked."""
        lock = Lock(os.open(f"{self.path}.lock", os.O_RDWR))
        try:
            return lock.members()
        finally:
            lock.close()

    def remember(self, *members: Process) -> None:
        """How many descriptors they have: now, and from now on whenever nothing happens."""
        for each in members:
            self.files[each.process.pid] = len(files_of(each.process.pid))

    def check_that_nothing_is_lost(self, *members: Process) -> None:
        """These are all members, and they and the broker have the descriptors and locks that they need, and no others. Of one
        arena, in each; all bytes are their own."""
        self.until_all_are_back(*members)
        until(partial(self._is_quiet, *members), lambda: f"nothing is left behind, but {self.tell(*members)}")
        for each in members:
            assert each("check") in ("right", "asleep")
            assert len({line.split()[4] for line in arena_maps(each.process.pid)}) == (DEVICE == "cpu")
        assert arena_maps(self.serving.process.pid) == []

    def _is_quiet(self, *members: Process) -> bool:
        here = all(len(files_of(each.process.pid)) == self.files[each.process.pid] for each in members)
        # Of each member a connection and its process. A device's pages may be descriptors, of those that made them and others.
        broker = len(files_of(self.serving.process.pid)) - 2 * len(members)
        return (
            here
            and self.has(*members)
            and len(self.left()) == len(members)
            and (DEVICE != "cpu" or broker == self.base)
        )
