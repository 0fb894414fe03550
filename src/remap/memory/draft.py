# SPDX-License-Identifier: Apache-2.0
"""The change in progress, until it is decided: what every tenant that it concerns was before, and what is due behind it.

A change is made of parts, one within another (`Changes.part`). The core has all its plans, undecided; the tenants' books and
pools are as they will be. `Savepoint` is what a part goes back to if it fails: the rest of the change stays. One store,
`Draft.decided`, makes the whole change final, and from then on it is only carried on with (apply.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from remap import _core
from remap.errors import Error
from remap.memory.books import Books
from remap.memory.moves import compose_moves
from remap.memory.pages import Transition
from remap.memory.state import TenantState

__all__ = ["Draft", "DueWork", "Savepoint"]


@dataclass(frozen=True, slots=True)
class DueWork:
    """What is to be done for one tenant once the change is decided. plan: the consequences of all its plans as of one.
    slots: of the KV region, whose pages its pool gets when they have been zeroed. again: layers are loaded again, since blocks
    were moved over them by plans that are undone, so there may be nothing to decide."""

    plan: Transition
    slots: tuple[int, ...] = ()
    again: bool = False

    def then(self, later: Transition, slots: tuple[int, ...] = (), *, again: bool = False) -> DueWork:
        """This, and what is due of a later plan."""
        return DueWork(self.plan.followed_by(later), self.slots + slots, self.again or again)


@dataclass(slots=True)
class Savepoint:
    """A place in a change. mark: of the core; None: none of the change's plans was applied. before: tenant -> its books and
    pool, of those that were touched since. due, moved: as in Draft, by then."""

    mark: int | None
    due: dict[TenantState, DueWork]
    moved: dict[str, dict[int, int]]
    before: dict[TenantState, tuple[Books, _core.SavedPool]] = field(default_factory=dict)


@dataclass(slots=True)
class Draft:
    """due: by tenant. moved: live blocks, tenant -> {old: new}, in this change. emptied: pages from which blocks have moved:
    no block moves there before the change is decided, since they are where it goes back to. written: tenant -> pages that its
    blocks have moved to, or began to: some may have been its layers', or its ring's, before. applying: plans were handed to the
    core: if it has an undecided change, it is this one. problem: why the last change could not be settled, so that no plan can be
    applied."""

    savepoints: list[Savepoint] = field(default_factory=list)
    due: dict[TenantState, DueWork] = field(default_factory=dict)
    moved: dict[str, dict[int, int]] = field(default_factory=dict)
    emptied: set[int] = field(default_factory=set)
    written: dict[TenantState, frozenset[int]] = field(default_factory=dict)
    applying: bool = False
    problem: Error | None = None
    decided: bool = False
    # What `Changes` has once it is decided.
    moves_told: dict[str, dict[int, int]] = field(default_factory=dict)
    decisions: int = 0

    def save(self, tenant: TenantState) -> None:
        """Record, before the first step in the present part, what that goes back to. Changes no earlier record."""
        before = self.savepoints[-1].before
        if tenant not in before:
            before[tenant] = tenant.books, tenant.kv.pool.save()
            tenant.kv.pool.silence()

    def join(self) -> None:
        """The innermost part is done: it is a piece of the one around it. Can be called again, if it was interrupted."""
        inner, outer = self.savepoints[-1], self.savepoints[-2]
        for tenant, before in inner.before.items():
            outer.before.setdefault(tenant, before)
        self.savepoints.pop()

    def not_yet(self, gained: Sequence[int], due: Collection[int]) -> frozenset[int]:
        """Those of these pages that no block may use before the change is decided. due: they are to be zeroed then."""
        if not due and not self.emptied:
            return frozenset()
        return frozenset(gained).intersection({*due, *self.emptied})

    def add_due(self, tenant: TenantState, plan: Transition, slots: tuple[int, ...]) -> None:
        """A plan of the tenant's was applied."""
        known = self.due.get(tenant)
        self.due = self.due | {tenant: DueWork(plan, slots) if known is None else known.then(plan, slots)}

    def will_write(self, tenant: TenantState, pages: Iterable[int]) -> None:
        """Blocks of the tenant's are about to move to these pages."""
        self.written[tenant] = self.written.get(tenant, frozenset()).union(pages)

    def add_moves(self, tenant: TenantState, moves: dict[int, int]) -> None:
        """Live blocks of the tenant's have moved, {old: new}."""
        self.moved = self.moved | {tenant.name: compose_moves(self.moved.get(tenant.name, {}), moves)}


def restored(tenant: TenantState, books: Books) -> Books:
    """These books again. Layers that were found written meanwhile stay pinned; an earlier change that was settled meanwhile is
    settled."""
    return replace(books, order=tenant.order_of(books.pages), since=tenant.since)
