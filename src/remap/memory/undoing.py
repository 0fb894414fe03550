"""Make a call of several plans one change: if a later plan fails, the earlier ones are taken back.

The Executor applies each plan whole or not at all. A call that needs several plans (pages go from one tenant to another
by way of `free`) says after each plan how to take it back:

    with AllOrNothing(changes, tenants) as undo:
        changes.apply_and_settle(tenant, plan)
        undo.append(take_it_back)

On any exception, KeyboardInterrupt included: take the plans back, newest first, then re-raise; nothing has changed.
Taking back needs the backend too. If that fails, or if the body did not say how, `changes.applied` is larger than
before: then the call must not raise as if nothing had changed, but report what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType

from remap.errors import ArenaBroken, Error
from remap.memory.apply import Changes
from remap.memory.state import TenantState

__all__ = ["AllOrNothing"]


class AllOrNothing:
    """A context manager (see above). `tenants`: it also restores their bookkeeping beside pages and blocks: the slots
    that drain, the certificate of the last change, and how layers were chosen."""

    __slots__ = ("_applied", "_before", "_changes", "_undo")

    def __init__(self, changes: Changes, tenants: Iterable[TenantState]) -> None:
        self._changes = changes
        self._applied = changes.applied
        self._undo: list[Callable[[], None]] = []
        self._before = [(tenant, tenant.books) for tenant in tenants]

    def __enter__(self) -> list[Callable[[], None]]:
        """The list to which the body appends: one entry for each plan that was applied."""
        return self._undo

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        changes, undo = self._changes, self._undo
        if error is None or isinstance(error, ArenaBroken):
            return
        changes.undo()  # the undecided change, before the decided ones
        if changes.applied - self._applied != len(undo):
            return  # some change could not be taken back, or is meant to stay
        try:
            while undo:
                undo[-1]()
                undo.pop()
        except ArenaBroken:
            raise
        except Error:
            return  # `applied` tells the caller; the first error says why
        changes.applied = self._applied
        for tenant, before in self._before:
            tenant.write(
                predicted_stall_s=before.predicted_stall_s,
                since=before.since,
                selection=before.selection,
                by_hand=before.by_hand,
            )
            if (before.draining, before.draining_target) != (tenant.draining, tenant.draining_target):
                changes.drain_again(tenant, before.draining, before.draining_target)
