# SPDX-License-Identifier: Apache-2.0
"""How a session joins a broker, and does what other processes ask of it.

The broker's questions come on a thread of the membership's. It calls the session as any other thread does, and does not keep it.

Blocks of an engine with its own allocator are given up in the engine's thread: while its tenant is active the engine hands out
blocks without a lock of ours, and between any two lines of that another thread must not withdraw some. So the recall waits for
the engine's next step. While the tenant is inactive the engine does not touch its allocator until `activate` returns, which
takes the session's lock; then the membership's thread does it, under that lock.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from remap.errors import Error, InvalidArgument, InvalidState
from remap.memory.core import Core, events_of
from remap.memory.trace import Event

if TYPE_CHECKING:
    from remap.broker.member import Membership
    from remap.report import Snapshot

__all__ = ["UNIX", "AskedSession", "membership"]

UNIX = "unix:"
STEP_S = 0.2
"""How long the broker's answer waits for an engine's step. Pages that a later step gives are free then."""
STALE_S = 1.0
"""A question that came that long before the engine's step is not dealt with in it."""

_logger = logging.getLogger("remap.broker")


class JoinedSession(Protocol):
    """The part of `remap.Session` that this calls."""

    @property
    def closed(self) -> bool: ...
    def snapshot(self) -> Snapshot: ...
    def exclusively(self, call: Callable[[Core], Any], *, claims: bool = ...) -> Any: ...


def membership(device: object, capacity: object, page_bytes: object, host_budget: object) -> Membership | None:
    """Of the broker that the device names; None if it names none. Raises InvalidArgument for sizes that are the broker's, or are
    for GPUs and its pages are of the host, and as `remap.broker.member.join`."""
    if not isinstance(device, str) or not device.startswith(UNIX):
        return None
    if capacity is not None or page_bytes != "auto":
        raise InvalidArgument(
            f"{device}: capacity and page_bytes are the broker's; nothing was opened; leave both out",
            device=device,
            capacity=capacity,
            page_bytes=page_bytes,
        )
    from remap.broker.member import join

    joined = join(device.removeprefix(UNIX))
    if host_budget is not None and not joined.on_device:
        joined.close()
        raise InvalidArgument(
            f"host_budget is for device 'cuda', and the pages of {device} are of the host; nothing was opened; leave it out",
            device=device,
        )
    return joined


class AskedSession:
    """The calls of the broker on a session (`remap.broker.member.Asked`)."""

    def __init__(self, session: JoinedSession, membership: Membership) -> None:
        self._session = weakref.ref(session)
        self._membership = membership
        # For the engine's next step: what was asked last of each kind, and when. Read and written with the session's lock held.
        self._put_off: dict[str, tuple[float, Callable[[Core], None]]] = {}
        self._attended = threading.Event()
        self.waits = False  # whether a step is waited for: it has to `attend`

    def granted(self) -> None:
        session = self._session()
        try:
            if session is None:
                raise InvalidState("the session is gone; nothing changed")
            expects = session.exclusively(_take_in, claims=False)
        except Error:
            if session is None or session.closed:  # else `take_in` has given them back
                self._membership.give(self._membership.arrived())
            raise
        if expects:
            session.exclusively(_load_expected)

    def unused(self) -> None:
        session = self._session()
        if session is not None and not session.closed:
            session.exclusively(_give_unused, claims=False)

    def returned(self) -> None:
        self.granted()
        self._run("home", _come_home, _come_home)

    def prepare(self) -> bool:
        session = self._session()
        return session is not None and not session.closed and bool(session.exclusively(_prepare, claims=False))

    def recalled(self, pages: int, layers: bool, keeps: bool, ahead: bool) -> None:
        # An engine that takes a step serves: it lends no layers in it.
        now, later = (partial(_give_up, pages, *kind, ahead) for kind in ((layers, keeps), (False, False)))
        self._run("pages", now, later, pages if keeps and not ahead else 0)

    def named(self, pages: Sequence[int], gently: bool) -> None:
        call = partial(_give_named, pages, gently)
        self._run("named", call, call)

    def snapshot(self) -> Snapshot:
        session = self._session()
        if session is None:
            raise InvalidState("the session is gone; nothing changed")
        return session.snapshot()

    def recheck(self) -> None:
        session = self._session()
        if session is not None and not session.closed:
            session.exclusively(_recheck, claims=False)

    def events(self) -> tuple[Event, ...]:
        session = self._session()
        if session is None:
            raise InvalidState("the session is gone; nothing changed")
        found: tuple[Event, ...] = session.exclusively(events_of, claims=False)
        return found

    def attend(self, core: Core) -> None:
        """The questions that were put off, in a step of the engine's, or when it stops serving. Errors are logged, as those of
        other recalls: the step goes on. The broker does not wait for those older than `STALE_S`; a member that still wants
        pages asks again."""
        put_off, self._put_off = self._put_off, {}
        recent = time.monotonic() - STALE_S
        try:
            for when, call in put_off.values():
                if when >= recent:
                    _attempt(call, core)
        finally:
            # Engines that have been asked for KV, and have not freed it yet, are waited for.
            self.waits = core.other_processes is not None and core.other_processes.lacks is not None
            if not self.waits:
                self._attended.set()

    def _run(self, kind: str, now: Callable[[Core], None], later: Callable[[Core], None], layers: int = 0) -> None:
        """Now, or, if that is an engine's to do, in its next step, for which this waits for a while. layers: pages that are asked
        for, for layers of others, which an engine that serves does not give."""
        session = self._session()
        if session is None or session.exclusively(partial(self._now_or_later, kind, now, later, layers)):
            return
        del session
        self._attended.wait(STEP_S)

    def _now_or_later(
        self, kind: str, now: Callable[[Core], None], later: Callable[[Core], None], layers: int, core: Core
    ) -> bool:
        """Whether it is done, or what is left is not waited for; else a step will do it, or the rest."""
        if any(tenant.active and tenant.kv.pool.external for tenant in core.tenants.values()):
            if layers and core.other_processes is not None:
                core.other_processes.pass_over(layers)
            self._put_off[kind] = (time.monotonic(), later)
            awaited = True
        else:
            now(core)
            outside = core.other_processes if kind == "pages" else None
            if outside is not None and outside.held_up:
                self._put_off["rest"] = (time.monotonic(), _give_rest)
            awaited = outside is not None and outside.await_step()
        self.waits = awaited or bool(self._put_off)
        if awaited:
            self._attended.clear()
        return not awaited


def _attempt(call: Callable[[Core], None], core: Core) -> None:
    try:
        call(core)
    except Error as error:
        _logger.warning("what the broker asked for was not done: %s", error)


def _take_in(core: Core) -> bool:
    """Whether some layers wait for that."""
    if core.other_processes is not None:
        core.other_processes.take_arrived()
    return core.other_processes is not None and core.other_processes.expects


def _load_expected(core: Core) -> None:
    if core.other_processes is not None:
        core.other_processes.load_expected(core.cold)


def _give_unused(core: Core) -> None:
    if core.other_processes is not None:
        core.other_processes.give_unused()


def _prepare(core: Core) -> bool:
    return core.other_processes is not None and core.other_processes.prepare()


def _recheck(core: Core) -> None:
    if core.other_processes is not None:
        core.other_processes.recheck()


def _come_home(core: Core) -> None:
    if core.other_processes is not None:
        core.other_processes.come_home()


def _give_up(pages: int, layers: bool, keeps: bool, ahead: bool, core: Core) -> None:
    if core.other_processes is not None and keeps:
        before = {name: len(tenant.cold_layers) for name, tenant in core.tenants.items()}
        core.other_processes.give_for_good(pages, core.cold, ahead=ahead)
        for name, tenant in core.tenants.items():
            gone = len(tenant.cold_layers) - before[name]
            if gone:
                _logger.info("%s has given %d layers up: another process needs pages for its own layers", name, gone)
    elif core.other_processes is not None:
        core.other_processes.give_up(pages, layers=layers, ahead=ahead)


def _give_rest(core: Core) -> None:
    if core.other_processes is not None:
        core.other_processes.give_rest()


def _give_named(pages: Sequence[int], gently: bool, core: Core) -> None:
    if core.other_processes is not None:
        core.other_processes.give_named(pages, gently=gently)
