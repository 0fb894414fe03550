# SPDX-License-Identifier: Apache-2.0
"""Which thread may touch a session or a tenant at any moment: three locks, and their order.

    SessionLock   one call at a time that changes the session: step, activate, lend, remap, attach, detach, settle, close
    patience      a call that waits for other processes: it asks with the session's lock held, waits without it, and goes on with
                  it held. One such call at a time: attach, activate
    Turn          one tenant's passes and block calls on the one hand, the change in progress on the other

Engines on their own threads serve passes, allocate and free while another thread's call is under way. These rules make
the call's checks, changes and bookkeeping one step for them:

    a call that changes tenants claims each of them first (Turn.claim). It does not claim those inside a pass: it
        leaves them alone or refuses. The others begin no pass and hand out no block until the call is over
    a pass, allocate, free and returned run under the turn's lock, held for microseconds, if the tenant is not claimed;
        otherwise behind the session's lock, hence after the change
    a tenant that has left stays claimed: all these calls come behind the session's lock, and are refused there

Order of locks: patience, the session's, then a turn's. A thread that holds a turn's lock takes no other lock of this file.

An interrupt (KeyboardInterrupt) can come between any two lines. The locks are the interpreter's own and are used only
in `with` blocks, so none stays locked. The next call releases the claims that an interrupted call left behind
(SessionLock.begin).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

from .errors import ForkedProcess, InvalidState

__all__ = ["Moved", "SessionLock", "Turn", "exclusive", "outermost"]

Method = TypeVar("Method", bound=Callable[..., Any])
Moved = dict[str, dict[int, int]]  # tenant -> {old block: new block}


def _nothing() -> None:
    return None


class SessionLock:
    """The session's lock. It refuses a forked child before that waits: the lock's holder may not exist there."""

    def __init__(
        self,
        fork_generation: Callable[[], int],
        session: Any,
        begin: Callable[[Any], list[Moved]],
        end: Callable[[Any, list[Moved] | None, bool], None],
    ) -> None:
        """fork_generation(): the core's; another number in every forked child. begin, end: see the methods; their first
        argument is the session, which its own lock does not keep alive. Both can be called again after an interrupt."""
        self.held = threading.RLock()
        # Whether this thread holds it. Python has no public name for this; threading.Condition uses the same one.
        self.is_held: Callable[[], bool] = self.held._is_owned  # type: ignore[attr-defined]
        self.patience = threading.RLock()
        self._fork_generation = fork_generation
        self._generation = fork_generation()
        self._session = weakref.ref(session)
        self._begin = begin
        self._end = end

    def refuse_fork(self) -> None:
        if self._fork_generation() != self._generation:
            raise ForkedProcess(
                "this process was forked from the one that owns the session and must not touch it; nothing changed; "
                "start workers with the 'spawn' method, or open a session in the child"
            )

    def is_within(self) -> bool:
        """Whether this thread is inside a call: it holds the lock, or waits without it."""
        return self.is_held() or self.patience._is_owned()  # type: ignore[attr-defined]

    def refuse_inside(self, name: str) -> None:
        """Raises InvalidState (field call) inside another call of the same thread."""
        self.refuse_fork()
        if self.is_within():
            raise InvalidState(
                f"{name} was called inside another call of this session, by a listener or a signal handler; nothing changed; "
                f"call {name} when that call has returned",
                call=name,
            )

    def free(self) -> bool:
        """Whether this thread could have it at once. Another may be faster: no promise, but no long wait either."""
        if not self.held.acquire(blocking=False):
            return False
        self.held.release()
        return True

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """call(...) while no other thread is in a call that changes something; at once inside such a call of the same
        thread (a listener's)."""
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
        """A call begins, with the lock held. Undoes what an interrupted call has left. Returns the list in which the
        call notes the moves of its report."""
        session = self._session()
        if session is None:
            raise InvalidState("the session is gone, and was not closed; nothing changed; open a new one")
        return self._begin(session)

    def end(self, told: list[Moved] | None, failed: bool = False) -> None:
        """The call is over. failed: undo the work that it had begun; its moves go into the next report."""
        session = self._session()
        if session is not None:
            self._end(session, told, failed)


def exclusive(method: Method) -> Method:
    """A method of an object with a SessionLock `_lock`. One such method runs at a time. On any exception: undo, then
    re-raise. If undoing is interrupted as well, the next call finishes it first."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        lock: SessionLock = self._lock
        lock.refuse_fork()
        if lock.is_held():
            return method(self, *args, **kwargs)
        told = None
        # The try surrounds the `with`: an interrupt may come after the lock is released and before the report is
        # returned.
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


def outermost(method: Method) -> Method:
    """As `exclusive`, for what adds or removes tenants: raises InvalidState (field call) inside another call of the same
    thread (a listener's, or a signal handler's), which goes on with the tenants that it has begun with."""
    alone = exclusive(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        lock: SessionLock = self._lock
        lock.refuse_inside(method.__name__.lstrip("_"))
        return alone(self, *args, **kwargs)

    return cast(Method, call)


class Turn:
    """One tenant's turn: see the module's docstring.

    A pass is open from `enter` to `leave`, and no longer than the object lives that brackets it: an interrupt can come between
    the end of a `with` block and the first line that would end the pass, and then nobody can end it (`tenant._Exit`).
    """

    __slots__ = ("_left", "_open", "_session", "_thread", "claimed", "lock")

    def __init__(self, session: SessionLock) -> None:
        self._session = session
        self.lock = threading.Lock()
        self.claimed = False
        self._left = ""  # the tenant's name, once it has left
        self._open: Callable[[], object] = _nothing
        self._thread: threading.Thread | None = None

    @property
    def open_pass(self) -> object:
        """What brackets the open pass, or None."""
        return self._open()

    @property
    def elsewhere(self) -> bool:
        """Whether the last pass is one of another thread, which still runs."""
        thread = self._thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    def enter(self, bracket: object) -> None:
        """A pass of this thread is open, as long as `bracket` lives. Called with `lock` held."""
        self._thread = threading.current_thread()
        self._open = weakref.ref(bracket)

    def leave(self) -> None:
        """No pass is open."""
        self._open = _nothing

    def claim(self) -> None:
        """Claim the tenant for the change in progress, unless a pass is open. Called with the session's lock held."""
        with self.lock:
            self.claimed = self.open_pass is None

    def release(self) -> None:
        self.claimed = bool(self._left)

    def retire(self, name: str) -> None:
        """The tenant has left: from now on every call raises InvalidState (field tenant)."""
        self._left, self.claimed = name, True

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """call(...) while no change of the tenant is in progress, or after that change."""
        self._session.refuse_fork()
        with self.lock:
            if not self.claimed:
                return call(*args)
        return self._session.run(self._unless_left, call, *args)

    def exclusively(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """call(...) as a change of this tenant: no other change, no pass's begin and no block call runs beside it."""
        return self._session.run(self._claimed, call, *args, **kwargs)

    def _claimed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self.claimed
        self.claim()
        try:
            return self._unless_left(call, *args, **kwargs)
        finally:
            self.claimed = before

    def _unless_left(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._left:
            raise InvalidState(
                f"tenant {self._left!r} was detached, or its session closed; nothing changed; attach the model again",
                tenant=self._left,
            )
        return call(*args, **kwargs)
