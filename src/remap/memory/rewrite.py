# SPDX-License-Identifier: Apache-2.0
"""Weights written in place in ways that no counter sees: `advanced.rewrite` and `advanced.differing`.

    every layer home, its bytes there -> the caller writes -> the master copies are made anew from the layers

The layers are what the model computes with, so they are right whatever was written, and the copies follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from remap.errors import InvalidState
from remap.memory.core import Core
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
    away = tuple(sorted(tenant.away()))
    if away:
        raise InvalidState(
            f"new weights would be written into the layers {away} of {tenant.name!r}, whose memory is KV cache now or lent; "
            "nothing was written; call again once they are home",
            tenant=tenant.name,
            layers=away,
        )
    tenant.refuse_lost_writes()
    try:
        return write()
    finally:  # also of half a write: layers and copies agree
        tenant.source.renew()
        tenant.written.clear()
        core.registered.pin()


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
