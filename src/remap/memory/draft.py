# SPDX-License-Identifier: Apache-2.0
"""The change in progress, until it is made: what every tenant that it concerns was before, and what will be due behind it.

A change is made of parts, one within another (`Changes.part`). The core's draft has all its plans; the tenants' books and pools
are as they will be. `Savepoint` is what a part goes back to if it fails: the rest of the change stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from remap import _core
from remap.errors import Error
from remap.memory.pages import Transition
from remap.memory.state import Books, TenantState

__all__ = ["Change", "DueWork", "Moves", "Savepoint", "compose_moves", "restored"]

Moves = Sequence[tuple[int, int]]
"""(old, new) of live blocks that move at once: no new one is an old one."""


@dataclass(frozen=True, slots=True)
class DueWork:
    """What is to be done for one tenant once the change is made. plan: the consequences of all its plans as of one.
    slots: of the KV region, whose pages its pool gets when they have been zeroed. moves: of its live blocks, in this order."""

    plan: Transition
    slots: tuple[int, ...] = ()
    moves: tuple[Moves, ...] = ()


@dataclass(slots=True)
class Savepoint:
    """A place in a change. plans: how many the core's draft had. due: as in Change, by then. before: tenant -> its books and
    pool, of those that were touched since."""

    plans: int
    due: dict[TenantState, DueWork]
    before: dict[TenantState, tuple[Books, _core.SavedPool]] = field(default_factory=dict)


@dataclass(slots=True)
class Change:
    """due: by tenant. applying: the core was asked to make it. problem: why the last change could not be settled, so that no plan
    can be applied. moved, decisions: what `Changes` has once it is made."""

    savepoints: list[Savepoint] = field(default_factory=list)
    due: dict[TenantState, DueWork] = field(default_factory=dict)
    applying: bool = False
    problem: Error | None = None
    moved: dict[str, dict[int, int]] = field(default_factory=dict)
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

    def add_due(self, tenant: TenantState, later: DueWork) -> None:
        """A plan of the tenant's was applied, behind those before it."""
        known = self.due.get(tenant)
        if known is not None:
            plan = known.plan.followed_by(later.plan)
            later = DueWork(plan, known.slots + later.slots, known.moves + later.moves)
        self.due = self.due | {tenant: later}


def restored(tenant: TenantState, books: Books) -> Books:
    """These books again. Layers that were found written meanwhile stay pinned; an earlier change that was settled meanwhile is
    settled."""
    return replace(books, order=tenant.order_of(books.pages), since=tenant.since)


def compose_moves(moves: Mapping[int, int], later: Mapping[int, int]) -> dict[int, int]:
    """The moves of one tenant's blocks, {old: new}, and then the later ones, as one: a block may move twice."""
    known = set(moves.values())
    first = {old: later.get(new, new) for old, new in moves.items()}
    both = first | {old: new for old, new in later.items() if old not in known}
    return {old: new for old, new in both.items() if old != new}  # some may be back where they were
