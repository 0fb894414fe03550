"""Who may touch a session, and who a tenant, at any moment: two locks, and what a thread may hold of them.

    SessionLock   one call that changes the session at a time: step, activate, lend, remap, attach, detach, settle, close
    Turn          one tenant's passes and block calls on the one hand, the change in progress on the other

Engines on threads of their own serve passes, allocate and free while another thread's call is under way. So that its checks,
its changes and its bookkeeping are one step for them:

    a call that changes tenants claims each of them first (Turn.claim): those inside a pass are not claimed, and the call
        leaves them alone or refuses; of the others no pass begins and no block is handed out until the call is over
    a pass, allocate, free, returned: if the tenant is not claimed, under the turn's lock, which is held for microseconds;
        if it is, behind the session's lock, hence after the change

Order of locks: the session's, then a turn's. Who holds a turn's lock takes no other lock of this file.

An interrupt (KeyboardInterrupt) can come between any two lines. Both locks are locks of the interpreter itself, used as `with`
blocks only, so none stays locked. Claims that an interrupted call left behind are released by the next one (SessionLock.begin).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

from .errors import ForkedProcess, InvalidState

__all__ = ["Moved", "SessionLock", "Turn", "exclusive"]

Method = TypeVar("Method", bound=Callable[..., Any])
Moved = dict[str, dict[int, int]]  # tenant -> {old block: new block}


class SessionLock:
    """The session's lock. A forked child is refused before it waits: the lock's holder may not exist there."""

    def __init__(
        self,
        fork_generation: Callable[[], int],
        session: Any,
        begin: Callable[[Any], list[Moved]],
        end: Callable[[Any, list[Moved] | None, bool], None],
    ) -> None:
        """fork_generation(): another number in every forked child (the core's). begin, end: see the methods; the session comes
        first, which is not kept alive by its own lock. Both can be called again after an interrupt."""
        self.held = threading.RLock()
        # Whether this thread holds it. Python has no public name for this; threading.Condition relies on it in the same way.
        self.is_held: Callable[[], bool] = self.held._is_owned  # type: ignore[attr-defined]
        self._fork_generation = fork_generation
        self._generation = fork_generation()
        self._session = weakref.ref(session)
        self._begin = begin
        self._end = end

    def refuse_fork(self) -> None:
        if self._fork_generation() != self._generation:
            raise ForkedProcess(
                "this process was forked from the one that owns the session and must not touch it; nothing changed; start "
                "workers with the 'spawn' method, or open a session in the child"
            )

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """call(...) while no other thread is in a call that changes something. Inside such a call of the same thread (a
        listener's): at once."""
        self.refuse_fork()
        if self.is_held():
            return call(*args, **kwargs)
        with self.held:
            self.begin()
            try:
                result = call(*args, **kwargs)
                self.end(None)
                return result
            except BaseException:
                self.end(None, failed=True)
                raise

    def begin(self) -> list[Moved]:
        """A call begins, with the lock held. What an interrupted one has left is undone first. Returns where the call notes the
        moves that its report tells of."""
        session = self._session()
        if session is None:
            raise InvalidState("the session was not closed, and is gone; nothing changed; open a new one")
        return self._begin(session)

    def end(self, told: list[Moved] | None, failed: bool = False) -> None:
        """The call is over. failed: what it had begun is undone, and what it was about to tell is told by the next report."""
        session = self._session()
        if session is not None:
            self._end(session, told, failed)


def exclusive(method: Method) -> Method:
    """A method of an object with a SessionLock `_lock`: one at a time, and undone if it raises, whatever it raises. If undoing is
    interrupted as well, the next call does it first."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        lock: SessionLock = self._lock
        lock.refuse_fork()
        if lock.is_held():
            return method(self, *args, **kwargs)
        told = None
        # The try around the `with`: an interrupt may come when the lock has been released and the report has not been returned.
        try:
            with lock.held:
                told = lock.begin()
                result = method(self, *args, **kwargs)
                lock.end(told)
                return result
        except BaseException:
            with lock.held:
                lock.end(told, failed=True)
            raise

    return cast(Method, call)


class Turn:
    """Of one tenant: see the module's docstring. `open_pass` is whoever has a pass open, or None; written under `lock`."""

    __slots__ = ("_session", "claimed", "lock", "open_pass")

    def __init__(self, session: SessionLock) -> None:
        self._session = session
        self.lock = threading.Lock()
        self.claimed = False
        self.open_pass: object = None

    def claim(self) -> None:
        """For the change in progress, unless a pass is open. Called with the session's lock held."""
        with self.lock:
            self.claimed = self.open_pass is None

    def release(self) -> None:
        self.claimed = False

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """call(...) while no change is in progress: after the one that is."""
        self._session.refuse_fork()
        with self.lock:
            if not self.claimed:
                return call(*args)
        return self._session.run(call, *args)

    def exclusively(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """call(...) as a change of this tenant of its own: no other one, no pass's begin and no block call beside it."""
        return self._session.run(self._claimed, call, *args, **kwargs)

    def _claimed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self.claimed
        self.claim()
        try:
            return call(*args, **kwargs)
        finally:
            self.claimed = before
