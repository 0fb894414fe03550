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
blocks only, so none stays locked. Claims that an interrupted call left behind are released by the next one (SessionLock.run).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

from .errors import ForkedProcess, InvalidState

__all__ = ["SessionLock", "Turn", "exclusive"]

Method = TypeVar("Method", bound=Callable[..., Any])


class SessionLock:
    """The session's lock. A forked child is refused before it waits: the lock's holder may not exist there."""

    def __init__(
        self,
        fork_generation: Callable[[], int],
        session: Any,
        undo: Callable[[Any], None],
        over: Callable[[Any], None],
    ) -> None:
        """fork_generation(): another number in every forked child (the core's). undo(session): takes back what a call has begun
        and not decided; nothing if there is nothing. over(session): the call has ended, its claims with it. Both can be called
        again. The session is not kept alive by its own lock."""
        self._lock = threading.RLock()
        # Python has no public name for this. threading.Condition relies on it in the same way.
        self._is_held: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        self._fork_generation = fork_generation
        self._generation = fork_generation()
        self._session = weakref.ref(session)
        self._undo = undo
        self._over = over

    def refuse_fork(self) -> None:
        if self._fork_generation() != self._generation:
            raise ForkedProcess(
                "this process was forked from the one that owns the session and must not touch it; nothing changed; start "
                "workers with the 'spawn' method, or open a session in the child"
            )

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """call(...) while no other thread is in one. What it had begun is undone if it raises, whatever it raises; if undoing
        is interrupted as well, the next call does that first. Inside another call of the same thread (a listener's): at once."""
        self.refuse_fork()
        if self._is_held():
            return call(*args, **kwargs)
        with self._lock:
            session = self._session()
            if session is None:
                raise InvalidState("the session was not closed, and is gone; nothing changed; open a new one")
            self._undo(session)
            self._over(session)
            try:
                return call(*args, **kwargs)
            except BaseException:
                self._undo(session)
                raise
            finally:
                self._over(session)


def exclusive(method: Method) -> Method:
    """A method of an object with a SessionLock `_lock`, run by it."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._lock.run(method, self, *args, **kwargs)

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
        self.claim()
        return call(*args, **kwargs)
