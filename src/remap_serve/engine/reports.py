# SPDX-License-Identifier: Apache-2.0
"""The session's last report, until the tables of all engines follow it, and the engines have freed what it wants.

A report tells which live blocks moved, once. An interrupt (Ctrl-C) may come between the session's call and the engine's tables:
so the report is kept, and the next call that touches the tables lets them follow first. Of a call that an interrupt has ended the
session's next report tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from remap.errors import Error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Reports"]


class Tables(Protocol):
    """An owner of block tables: an engine (which see)."""

    def follow(self, moved: Mapping[int, int]) -> None: ...
    def release(self, blocks: int) -> int: ...
    def offer(self) -> None: ...


class Reports:
    """engines: by tenant name, all that the session moves blocks of."""

    def __init__(self, engines: Mapping[str, Tables]) -> None:
        self._engines = WeakValueDictionary(engines)  # they refer to this
        self._report: Any = None
        self._asking = False  # or an interrupt has ended that

    def ask(self, call: Callable[[], Any]) -> Any:
        """call() of the session: its report, with all tables as it says. Engines free the blocks that it wants; if they have
        freed some, call() again, until it wants none that they can free."""
        self.follow()
        if self._asking:  # what an interrupt ended may have used offers up
            self._offer()
        self._asking = True
        try:
            while self._release(self._called(call)):
                pass
        except Error:
            self._asking = False  # nothing has moved since the last report
            raise
        self._asking = False
        return self._report

    def _called(self, call: Callable[[], Any]) -> Mapping[str, int]:
        """Who is to free how many blocks, by the report of call()."""
        try:
            self._report = call()
        except Error:
            self._offer()
            raise
        self.follow()
        wanted: Mapping[str, int] = self._report.wanted
        return wanted

    def _release(self, wanted: Mapping[str, int]) -> bool:
        """Whether a block was freed."""
        known = [(self._engines[name], blocks) for name, blocks in wanted.items() if name in self._engines]
        return sum([engine.release(blocks) for engine, blocks in known]) > 0

    def _offer(self) -> None:
        for engine in self._engines.values():
            engine.offer()

    def follow(self) -> None:
        """Let all tables follow the last report. Can be called again."""
        moved = {} if self._report is None else self._report.moved
        for name, pairs in moved.items():
            if name in self._engines:
                self._engines[name].follow(pairs)

    def settle(self, step: Callable[[], Any]) -> None:
        """Before tables are touched outside of `ask`. step: the session's."""
        if self._asking:
            self.ask(step)
        else:
            self.follow()
