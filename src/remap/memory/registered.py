# SPDX-License-Identifier: Apache-2.0
"""Declared ranges: memory whose pages NCCL, a network card or the like has looked up, and uses at its address.

The regions there must always show the same pages. The arena refuses plans that would change that; layers that intersect
a declared range are pinned, so that no such plan is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from remap.errors import InvalidState
from remap.memory.state import TenantState

if TYPE_CHECKING:
    from remap import _core

__all__ = ["Registered"]

_Range = tuple[int, int]  # address, bytes


class Registered:
    """A session's declared ranges. Called with the session's lock held."""

    def __init__(self, arena: _core.Arena, tenants: Mapping[str, TenantState]) -> None:
        self._arena = arena
        self._tenants = tenants

    def declare(self, address: int, nbytes: int) -> None:
        """As `remap.advanced.declare_registered`."""
        for tenant in self._tenants.values():
            away = tenant.pages.cold.union(tenant.streamed)
            streamed = sorted(_layers_in(tenant, [(address, nbytes)]).intersection(away))
            if streamed:
                raise InvalidState(
                    f"layer {streamed[0]} of {tenant.name!r} is streamed, or has no pages, so its region shows other pages "
                    "than its own; nothing changed; bring it home, settle, then register the range and declare it",
                    tenant=tenant.name,
                    layer=streamed[0],
                )
        self._arena.declare_registered(address, nbytes)
        self.pin()

    def withdraw(self, address: int, nbytes: int) -> None:
        """As `remap.advanced.withdraw_registered`."""
        self._arena.withdraw_registered(address, nbytes)
        self.pin()

    def refuse_detach(self, tenant: TenantState) -> None:
        """Raises InvalidState (fields tenant, address, nbytes) if a range of the tenant's is declared."""
        for address, nbytes in self._arena.registered():
            if _internals(tenant.regions, [(address, nbytes)]):
                raise InvalidState(
                    f"{nbytes} bytes at {address:#x}, memory of tenant {tenant.name!r}, are declared as registered; "
                    "nothing changed; deregister them and call withdraw_registered first",
                    tenant=tenant.name,
                    address=address,
                    nbytes=nbytes,
                )

    def pin(self) -> None:
        """Pin the layers that intersect a declared range. Finds all pinned layers anew, since a layer may be pinned for
        several reasons; so this can be called at any time."""
        ranges = self._arena.registered()
        for tenant in self._tenants.values():
            empty = {layer for layer, nbytes in enumerate(tenant.layer_bytes) if nbytes == 0}
            tenant.pinned = frozenset(empty | tenant.written.keys() | _layers_in(tenant, ranges))


def _layers_in(tenant: TenantState, ranges: Iterable[_Range]) -> set[int]:
    return _internals(tenant.regions[: tenant.parts], list(ranges))


def _internals(regions: Iterable[_Range], ranges: list[_Range]) -> set[int]:
    """Which of the regions, by index, have a byte in one of the ranges."""
    return {
        index
        for index, (at, size) in enumerate(regions)
        if any(address < at + size and at < address + nbytes for address, nbytes in ranges)
    }
