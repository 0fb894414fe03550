# SPDX-License-Identifier: Apache-2.0
"""Swapping whole models, with the means of a session: a turn begins when all of one model is there, and all others are away.

What systems do that put models to sleep and wake them. The model whose turn it is gets everything that the others do not need
while they sleep (they keep the ring's pages and their own KV cache); nothing streams, and no controller decides by what would
pay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import remap
from remap.errors import InvalidState

__all__ = ["WholeModels"]

Moved = Mapping[str, Mapping[int, int]]


class WholeModels:
    """A session as `SharedEngines` sees it, over `session`, whose tenants have `layers[name]` layers.

    follow: told of blocks that have moved, before anything else moves.
    """

    broker = ""
    one_at_a_time = True

    def __init__(self, session: remap.Session, layers: Mapping[str, int], follow: Callable[[Moved], None]) -> None:
        self._session, self._layers, self._follow = session, dict(layers), follow
        self.swaps = 0

    def activate(self, name: str, *, alone: bool, partial: bool | float) -> Any:
        """All of `name` in, all of the others out, and every byte there when this returns. Where live blocks of others lie in the
        way, the report says so and nothing but who is active has changed, as with `Session.activate`. Raises InvalidState
        (field tenant) unless `alone`."""
        if not alone:  # a turn that is to come; the awake model has the memory until its own is over
            raise InvalidState(f"{name!r} wakes when its turn begins; nothing changed", tenant=name)
        report = self._session.activate(name, alone=True, partial=False)
        if not report.activated:
            return report
        self._follow(report.moved)
        for other, layers in self._layers.items():
            if other != name:
                self._follow(remap.advanced.lend(self._session, other, layers - 1, 1, to=name).moved)
        remap.advanced.settle(self._session)
        self._session.exclusively(lambda core: core.tenant(name).prefetcher.drain())  # the copies of its layers
        self.swaps += 1
        return replace(report, moved={})

    def deactivate(self, name: str) -> None:
        """No model was woken ahead of a turn."""

    def step(self, demand: Mapping[str, Any]) -> Any:
        """Nothing changes within a turn."""
        return SimpleNamespace(moved={}, changed=False, wanted={})

    def snapshot(self) -> remap.Snapshot:
        """The session's."""
        return self._session.snapshot()
