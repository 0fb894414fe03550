# SPDX-License-Identifier: Apache-2.0
"""Make a call of several plans one change: if a later plan fails, the earlier ones are taken back.

The Executor applies each plan whole or not at all. A call that needs several plans (pages go from one tenant to another by way
of `free`) is

    with AllOrNothing(changes, tenants):
        changes.apply_and_settle(tenant, plan)
        changes.exchange(other, plan, slots)

Inside, the journal of `Changes` has each plan that was decided, with what its tenant's pages were before. On any exception,
KeyboardInterrupt included, the plans are taken back, newest first, by the one way back that every plan has (`plan_back`), and
the exception goes on; nothing has changed. An interrupt of that leaves the rest to the end of the call, and one of that to the
next call's beginning (`Changes.take_back`). A listener's error takes nothing back: it is raised behind the change.

Taking back needs the backend too. If that fails, what still stands stays in the journal, for an outer `with` to try once more,
and `changes.applied` is larger than before: then the call must not raise as if nothing had changed, but report its changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import TracebackType

from remap.errors import ArenaBroken, Error
from remap.memory.apply import Changes
from remap.memory.state import TenantState

__all__ = ["AllOrNothing"]


class AllOrNothing:
    """A context manager (see above). `tenants`: it also restores their bookkeeping beside pages and blocks: the slots that drain,
    whether they are active, the certificate of the last change, and how layers were chosen. With `partly`, plans that were
    decided stay, and only a call that decided none has changed nothing."""

    __slots__ = ("_applied", "_before", "_changes", "_partly", "_start")

    def __init__(self, changes: Changes, tenants: Iterable[TenantState], *, partly: bool = False) -> None:
        self._changes = changes
        self._partly = partly
        self._before = [(tenant, tenant.books) for tenant in tenants]

    def __enter__(self) -> None:
        self._applied = self._changes.applied
        self._start = self._changes.journal_end()
        self._changes.open_journal(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, ArenaBroken):
            self.take_back()
        # Not if an interrupt came before: `Changes.take_back` ends it, with the call.
        raised = self._changes.close_journal(self)
        if raised is not None and error is None:
            raise raised

    def take_back(self) -> None:
        """Take back the changes since the `with` began. Can be called again, if it was interrupted. Raises ArenaBroken."""
        changes = self._changes
        changes.undo()  # the undecided change, before the decided ones
        if self._partly and changes.stands_since(self._start):
            return
        try:
            while changes.stands_since(self._start):
                changes.take_back_last()
        except ArenaBroken:
            raise
        except Error:  # `applied` tells the caller; the first error says why
            for tenant, before in self._before:
                tenant.books = replace(tenant.books, active=before.active)
            return
        changes.applied = self._applied
        for tenant, before in self._before:
            tenant.books = replace(
                tenant.books,
                pages=replace(tenant.pages, computed=before.pages.computed),
                active=before.active,
                predicted_stall_s=before.predicted_stall_s,
                since=before.since,
                selection=before.selection,
                by_hand=before.by_hand,
                kept=before.kept,
            )
            if (before.draining, before.draining_target) != (tenant.draining, tenant.draining_target):
                changes.drain_again(tenant, before.draining, before.draining_target)
