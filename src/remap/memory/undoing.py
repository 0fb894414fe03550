"""Calls of several plans as one: if a later plan fails, what the earlier ones did is taken back.

Each plan is applied whole or not at all, by the Executor. A call that needs several (pages go from one tenant to another by way
of `free`) says after each of them how to take it back:

    with AllOrNothing(changes, tenants) as undo:
        changes.apply_and_settle(tenant, plan)
        undo.append(take_it_back)

On any exception, KeyboardInterrupt included, that is done, newest first, and the exception goes on: nothing has changed. Taking
back needs the backend too. Where that fails, or where the body did not say how, `changes.applied` is larger than it was: then the
call must not raise as if nothing had changed, but report what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType

from remap.errors import ArenaBroken, Error
from remap.memory.apply import Changes
from remap.memory.state import TenantState

__all__ = ["AllOrNothing"]


class AllOrNothing:
    """A context manager (see above). `tenants`: whose bookkeeping beside pages and blocks is put back as well: what is being
    drained, the certificate of the last change, and how layers were chosen."""

    __slots__ = ("_applied", "_before", "_changes", "_undo")

    def __init__(self, changes: Changes, tenants: Iterable[TenantState]) -> None:
        self._changes = changes
        self._applied = changes.applied
        self._undo: list[Callable[[], None]] = []
        self._before = [
            (
                tenant,
                tenant.draining,
                tenant.draining_target,
                tenant.predicted_stall_s,
                tenant.since,
                tenant.selection,
                tenant.by_hand,
            )
            for tenant in tenants
        ]

    def __enter__(self) -> list[Callable[[], None]]:
        """The list to which the body appends: one entry for each plan that was applied."""
        return self._undo

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        changes, undo = self._changes, self._undo
        if error is None or isinstance(error, ArenaBroken):
            return
        changes.undo()  # what was begun and not decided, before what was
        if changes.applied - self._applied != len(undo):
            return  # something below could not be taken back, or is meant to stay
        try:
            while undo:
                undo[-1]()
                undo.pop()
        except ArenaBroken:
            raise
        except Error:
            return  # the caller is told by `applied`; the first error is the one that says why
        changes.applied = self._applied
        for tenant, draining, target, stall, since, selection, by_hand in self._before:
            tenant.predicted_stall_s, tenant.since = stall, since
            tenant.selection, tenant.by_hand = selection, by_hand
            if (draining, target) != (tenant.draining, tenant.draining_target):
                changes.drain_again(tenant, draining, target)
