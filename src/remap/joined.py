"""How a session joins a broker, and does what other processes ask of it.

What the broker asks comes on a thread of the membership's. It calls the session as any other thread does, and does not keep it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from remap.errors import Error, InvalidArgument, InvalidState
from remap.memory.core import Core

if TYPE_CHECKING:
    from remap.broker.member import Membership

__all__ = ["Asked", "membership"]

UNIX = "unix:"


class Session(Protocol):
    """The part of `remap.Session` that this calls."""

    @property
    def closed(self) -> bool: ...
    def exclusively(self, call: Callable[[Core], Any], *, claims: bool = ...) -> Any: ...


def membership(device: object, capacity: object, page_bytes: object, host_budget: object) -> Membership | None:
    """Of the broker that the device names; None if it names none. Raises InvalidArgument for sizes that are the broker's, or are
    for GPUs, and as `remap.broker.member.join`."""
    if not isinstance(device, str) or not device.startswith(UNIX):
        return None
    if capacity is not None or page_bytes != "auto":
        raise InvalidArgument(
            f"{device}: capacity and page_bytes are the broker's; nothing was opened; leave both out",
            device=device,
            capacity=capacity,
            page_bytes=page_bytes,
        )
    if host_budget is not None:
        raise InvalidArgument(
            f"host_budget is for device 'cuda', this is {device}; nothing was opened; leave it out", device=device
        )
    from remap.broker.member import join

    return join(device.removeprefix(UNIX))


class Asked:
    """What the broker asks of a session (`remap.broker.member.Asked`)."""

    def __init__(self, session: Session, membership: Membership) -> None:
        self._session = weakref.ref(session)
        self._membership = membership

    def granted(self, pages: Sequence[int]) -> None:
        session = self._session()
        try:
            if session is None:
                raise InvalidState("the session is gone; nothing changed")
            session.exclusively(partial(_take_in, pages), claims=False)
        except Error:
            if session is None or session.closed:  # else `take_in` has given them back
                self._membership.give(pages)
            raise

    def returned(self, pages: Sequence[int]) -> None:
        self.granted(pages)
        session = self._session()
        if session is not None:
            session.exclusively(_come_home)

    def recalled(self, pages: int, layers: bool) -> None:
        session = self._session()
        if session is not None:
            session.exclusively(partial(_give_up, pages, layers))

    def named(self, pages: Sequence[int], gently: bool) -> None:
        session = self._session()
        if session is not None:
            session.exclusively(partial(_give_named, pages, gently))


def _take_in(pages: Sequence[int], core: Core) -> None:
    if core.outside is not None:
        core.outside.take_in(pages)


def _come_home(core: Core) -> None:
    if core.outside is not None:
        core.outside.come_home()


def _give_up(pages: int, layers: bool, core: Core) -> None:
    if core.outside is not None:
        core.outside.give_up(pages, layers=layers)


def _give_named(pages: Sequence[int], gently: bool, core: Core) -> None:
    if core.outside is not None:
        core.outside.give_named(pages, gently=gently)
