"""Sessions that engines of one process share: the first engine opens it, the last one closes it."""

from __future__ import annotations

from pathlib import Path

from remap.errors import InvalidArgument
from remap.memory.device import Platform
from remap.session import Session

__all__ = ["SharedSession", "shared"]


class SharedSession:
    """A session, and how many engines of this process are in it. Called by one thread at a time."""

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
        """Bytes of a page of the open session, for an engine that has no wish of its own; None if no engine has entered."""
        return None if self._session is None or self._session.closed else self._session.snapshot().page_bytes

    def enter(self, *, capacity: int, device: str, page_bytes: int, copy_chunk_bytes: int) -> Session:
        """The session: opened for the first engine, the same one for others. Raises InvalidArgument (fields capacity,
        page_bytes) if they ask for another one, and what `Session` raises; nobody has entered then."""
        if self._session is None or self._session.closed:
            platform = Platform(copy_chunk_bytes=copy_chunk_bytes)
            self._session = Session(capacity, device, page_bytes=page_bytes, platform=platform)
            self._users = 0
        there = self._session.snapshot()
        if (there.page_bytes, there.capacity_bytes) != (page_bytes, capacity):
            raise InvalidArgument(
                f"the arena has {there.capacity_bytes} bytes in pages of {there.page_bytes}, this engine asks for {capacity} in "
                f"pages of {page_bytes}; it was not started; give all of them the same capacity and page size",
                capacity=capacity,
                page_bytes=page_bytes,
            )
        self._users += 1
        return self._session

    def name_for(self, model: str) -> str:
        """The model's own name, numbered if it is there already."""
        base, taken = Path(model).name, self.session.snapshot().tenants
        return next(name for name in (base, *(f"{base}-{n}" for n in range(2, len(taken) + 3))) if name not in taken)

    def leave(self, tenant: str) -> None:
        """The engine is done: its tenant is taken out; with the last one the session is closed."""
        self._users -= 1
        if not self._users:
            self.session.close()
        elif tenant in self.session.snapshot().tenants:
            self.session.detach(tenant)


_SHARED: dict[str, SharedSession] = {}


def shared(name: str) -> SharedSession:
    """What engines of this process share under this name; without one, nothing: a session of its own."""
    return _SHARED.setdefault(name, SharedSession()) if name else SharedSession()
