# SPDX-License-Identifier: Apache-2.0
"""Sessions that engines of one process share: the first engine opens it, the last one closes it, or somebody else has opened it
for them (`hosted`); and those of a broker's pages, which engines of any process share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remap.adapters.settings import Settings
from remap.config import Config
from remap.errors import InvalidArgument, InvalidState
from remap.memory.device import Platform
from remap.session import Session

__all__ = ["SharedSession", "hosted", "join", "shared"]


def join(settings: Settings, device: str, *, config: Config | None = None) -> Session:
    """A session with the pages of the broker that the settings name, for an engine that computes on `device`. config: by
    default the settings' own, of which `policy` is the session's.

    Raises InvalidState (fields arena, device, broker) unless the broker's pages are that device's; InvalidArgument
    (fields name, value, broker) if the settings name a capacity or a page size that is not the broker's, and (field path) if no
    broker is there; InvalidState (field why) if it refuses.
    """
    session = Session(
        device=settings.arena,
        config=config or settings.controller(),
        platform=Platform(copy_chunk_bytes=settings.copy_chunk_bytes),
    )
    if session.device != device:
        session.close()
        raise InvalidState(
            f"REMAP_ARENA={settings.arena}: the broker's pages are of {session.device}, and this engine computes on {device}; "
            f"the engine was not started; start a broker with --device {device}, or name an arena of this process",
            arena=settings.arena,
            device=device,
            broker=session.device,
        )
    there = session.snapshot()
    for name, asked, has in (
        ("REMAP_CAPACITY", settings.capacity, there.capacity_bytes),
        ("REMAP_PAGE_BYTES", settings.page_bytes, there.page_bytes),
    ):
        if asked is not None and asked != has:
            session.close()
            raise InvalidArgument(
                f"{name} is {asked}, and the broker of REMAP_ARENA={settings.arena} has {has}; the engine was not started; unset "
                f"{name}: it is the broker's",
                name=name,
                value=asked,
                broker=has,
            )
    return session


class SharedSession:
    """A session, and the number of engines of this process that use it. One thread at a time may call it."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._users = 0

    @property
    def session(self) -> Session:
        """The open session. Raises InvalidArgument if no engine has entered."""
        if self._session is None or self._session.closed:
            raise InvalidArgument("no engine has entered this arena, or all have left; nothing changed")
        return self._session

    @property
    def page_bytes(self) -> int | None:
        """Bytes of a page of the open session, for an engine that sets no page size; None if no engine has entered."""
        return None if self._session is None or self._session.closed else self._session.snapshot().page_bytes

    def join(self, settings: Settings, device: str) -> int:
        """The capacity of the broker's arena that the settings name; the session is open then, and `enter` counts the engine.

        A session that no engine has entered, of one whose start failed, is opened anew: the broker may be another one. Raises
        as `join`.
        """
        if self._session is not None and not self._users:
            self._session.close()
        if self._session is None or self._session.closed:
            self._session, self._users = None, 0
            self._session = join(settings, device)
        return self._session.capacity_bytes

    def enter(
        self, *, capacity: int, device: str, page_bytes: int, copy_chunk_bytes: int | None, config: Config | None = None
    ) -> Session:
        """The session. The first engine opens it, with its `config`: the order in which tenants give is one for all. Later
        engines get the same one.

        Raises InvalidArgument (fields capacity, page_bytes) if an engine asks for other sizes than the first one did,
        and the errors of `Session`; the engine has not entered then.
        """
        if self._session is None or self._session.closed:
            platform = Platform(copy_chunk_bytes=copy_chunk_bytes)
            self._session = Session(capacity, device, page_bytes=page_bytes, platform=platform, config=config)
            self._users = 0
        there = self._session.snapshot()
        if (there.page_bytes, there.capacity_bytes) != (page_bytes, capacity):
            raise InvalidArgument(
                f"the arena has {there.capacity_bytes} bytes in pages of {there.page_bytes}, but this engine asks for "
                f"{capacity} bytes in pages of {page_bytes}; the engine has not entered; give all engines the same "
                "capacity and page size",
                capacity=capacity,
                page_bytes=page_bytes,
            )
        self._users += 1
        return self._session

    def name_for(self, model: str) -> str:
        """A tenant's name for the model: its own name, with a number if another tenant has that."""
        base, taken = Path(model).name, self.session.snapshot().tenants
        return next(name for name in (base, *(f"{base}-{n}" for n in range(2, len(taken) + 3))) if name not in taken)

    @contextmanager
    def lending(self, session: Session) -> Iterator[None]:
        """`hosted`."""
        if self._session is not None and not self._session.closed:
            raise InvalidState(
                "engines of this process have this arena open; nothing changed; give your session another name",
                users=self._users,
            )
        self._session, self._users = session, 1
        try:
            yield
        finally:
            users, self._users = self._users - 1, 0
            self._session = None
        if users:  # not behind an error, which says more
            raise InvalidState(
                f"{users} engines still use the session: {sorted(session.snapshot().tenants)}; no other engine can enter it "
                "now; shut them down before",
                users=users,
            )

    def leave(self, tenant: str) -> None:
        """Detach the engine's tenant. The last engine closes the session instead."""
        self._users -= 1
        if not self._users:
            self.session.close()
        elif tenant in self.session.snapshot().tenants:
            self.session.detach(tenant)


_SHARED: dict[str, SharedSession] = {}


@contextmanager
def hosted(name: str, session: Session) -> Iterator[None]:
    """Engines of this process that start with REMAP_ARENA=name attach to this session, which is open and stays its owner's to
    close: one that has models of your own, say. Its capacity and page size are the engines' REMAP_CAPACITY and REMAP_PAGE_BYTES.

    Raises InvalidState (field users) if engines have opened an arena of that name already; nothing has changed then; and in the
    end if engines are left that have not been shut down.
    """
    with shared(name).lending(session):
        yield


def shared(name: str) -> SharedSession:
    """The session that engines of this process share under this name. An empty name gives an engine one of its own."""
    return _SHARED.setdefault(name, SharedSession()) if name else SharedSession()
