# SPDX-License-Identifier: Apache-2.0
"""Weights written in place in ways that no counter sees: `advanced.rewrite` and `advanced.differing`.

    a layer at home   the caller writes where it lies, and its master copy is made anew from that
    a layer away      meanwhile its tensors show its master copy, which the caller writes; what was copied from there is void

Whatever was written, of half a write too, a layer and its master copy agree afterwards. Until they do, no pass and no change
begins (`Changes.owe`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from remap.errors import InvalidState
from remap.memory.core import Core
from remap.memory.pages import Transition
from remap.memory.state import TenantState

__all__ = ["differing", "rewrite"]

Result = TypeVar("Result")


def rewrite(core: Core, tenant: TenantState, write: Callable[[], Result]) -> Result:
    """`advanced.rewrite`. Call it with the session's lock held, outside of passes."""
    if tenant.source.renew is None:
        raise InvalidState(
            f"the weights of {tenant.name!r} come from buffers or files of the caller, which are not rewritten; nothing "
            "was written; attach the model without weights=, or detach it first",
            tenant=tenant.name,
        )
    _await_loads(core, tenant)
    pages, elsewhere = tenant.pages, tuple(sorted(tenant.pages.gone - tenant.pages.cold))
    if elsewhere:
        raise InvalidState(
            f"another instance computes the layers {elsewhere} of {tenant.name!r}, or their bytes come from it, and new weights "
            "would not reach that; nothing was written; call again once they are home",
            tenant=tenant.name,
            layers=elsewhere,
        )
    tenant.refuse_lost_writes()
    source, away, lost = tenant.source, frozenset(tenant.away()), list[str]()

    def finish() -> None:
        assert source.renew is not None  # checked above
        lost.extend(source.renew(away))
        if away:  # what is in the ring is old, and so is what is at home of a layer of which the rest streams
            sizes = zip(pages.sizes, pages.tails, strict=True)
            home = [(n, 0, size - tail) for n, (size, tail) in enumerate(sizes) if n in away]
            core.changes.configure(tenant, Transition(pages, home, True))
        tenant.written.clear()
        core.registered.pin()

    core.changes.owe(tenant, finish)
    try:
        source.at_masters(away)
        answer = write()
    finally:
        core.changes.writing = False
        core.changes.settle(tenant)
    if lost:
        raise InvalidState(
            f"{lost} of {tenant.name!r} were given memory of another shape or dtype instead of bytes; they are as they were, "
            "and what else was written is in place; write into the tensors, or detach the model first",
            tenant=tenant.name,
            tensors=tuple(lost),
        )
    tenant.refuse_lost_writes()  # tensors that the model has others for now
    return answer


def differing(core: Core, tenant: TenantState) -> dict[int, list[str]]:
    """`advanced.differing`. Call it with the session's lock held, outside of passes."""
    _await_loads(core, tenant)
    return tenant.source.differing(set(range(tenant.parts)) - tenant.away())


def _await_loads(core: Core, tenant: TenantState) -> None:
    """Finish the rest of the last change, and wait for the layers that are on their way home."""
    core.changes.settle(tenant)
    core.changes.retry_failed(tenant)
    core.changes.wake(tenant)
    core.changes.await_worker()
    for layer in range(tenant.parts):
        if layer not in tenant.streamed and layer not in tenant.pages.gone and not tenant.prefetcher.ready(layer):
            tenant.prefetcher.wait(layer)  # outside of passes it blocks this thread until the copy has ended
