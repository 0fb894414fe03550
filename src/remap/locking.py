"""The session's lock, which knows about fork."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .errors import ForkedProcess

__all__ = ["SessionLock"]


class SessionLock:
    """The session's lock. A forked child is refused before it waits: the lock's holder may not exist there."""

    def __init__(self, fork_generation: Callable[[], int]) -> None:
        """fork_generation(): another number in every forked child (the core's)."""
        self._lock = threading.RLock()
        self._fork_generation = fork_generation
        self._generation = fork_generation()

    def refuse_fork(self) -> None:
        if self._fork_generation() != self._generation:
            raise ForkedProcess(
                "this process was forked from the one that owns the session and must not touch it; nothing changed; start "
                "workers with the 'spawn' method, or open a session in the child"
            )

    def __enter__(self) -> None:
        self.refuse_fork()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
