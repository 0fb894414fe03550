"""What must hold of tenants that share an arena, recomputed page by page from scratch. Slow and obvious."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Books", "SharingModel", "TenantBooks"]


@dataclass
class TenantBooks:
    """One tenant: what never changes of it, and the byte that its engine has written into each block that it holds."""

    number: int
    homes: tuple[tuple[int, ...], ...]  # pages of each layer, from attach on
    min_blocks: int
    active: bool = True
    blocks: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Books:
    """What the owners of all pages say of one tenant."""

    lent: frozenset[int]  # of its homes: free, or another tenant's
    lent_to: Mapping[str, int]
    borrowed: int  # of its KV: homes of other tenants
    kv: int
    ring: int
    params: int


class SharingModel:
    """Pages by number, tenants by name."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.tenants: dict[str, TenantBooks] = {}
        self.last: list[int | None] = [None] * pages  # whose each page was last: whoever gets it next gets zeroes

    def books(self, name: str, owners: Sequence[str], tenant_of: Sequence[int]) -> Books:
        """From the arena's two lists: the owner's kind of each page, and its tenant."""
        one = self.tenants[name]
        homes = [page for home in one.homes for page in home]
        lent = frozenset(
            page for page in homes if owners[page] == "free" or (owners[page] == "kv" and tenant_of[page] != one.number)
        )
        lent_to: dict[str, int] = {}
        for other, its in self.tenants.items():
            count = sum(owners[page] == "kv" and tenant_of[page] == its.number for page in lent)
            if count:
                lent_to[other] = count
        others = {page for other, its in self.tenants.items() if other != name for home in its.homes for page in home}
        mine = [page for page in range(self.pages) if owners[page] != "free" and tenant_of[page] == one.number]
        return Books(
            lent=lent,
            lent_to=lent_to,
            borrowed=sum(owners[page] == "kv" and page in others for page in mine),
            kv=sum(owners[page] == "kv" for page in mine),
            ring=sum(owners[page] == "ring" for page in mine),
            params=sum(owners[page] == "params" for page in mine),
        )

    def violations(
        self, name: str, owners: Sequence[str], tenant_of: Sequence[int], streamed: Collection[int], buffers: int
    ) -> list[str]:
        """Rules about one tenant's layers that the owners break."""
        one, found = self.tenants[name], []
        largest = max(map(len, one.homes))
        if len(streamed) == len(one.homes) and not buffers:
            found.append("all layers are away and there is no ring")
        if buffers and len(streamed) <= buffers:
            found.append(f"{len(streamed)} layers stream through {buffers} buffers")
        ring = 0
        for layer, home in enumerate(one.homes):
            for page in home:
                kind, mine = owners[page], tenant_of[page] == one.number
                ring += kind == "ring"
                if layer not in streamed and (kind != "params" or not mine):
                    found.append(f"page {page} of resident layer {layer} is {kind} of {tenant_of[page]}")
                if kind == "ring" and not mine:
                    found.append(f"page {page} is somebody else's ring")
                if layer in streamed and kind == "params":
                    found.append(f"page {page} of streamed layer {layer} is params")
        if ring != buffers * largest:
            found.append(f"{ring} pages are ring, {buffers} buffers of {largest} are to be")
        return found

    def changed_hands(self, owners: Sequence[str], tenant_of: Sequence[int]) -> dict[int, int]:
        """KV pages whose tenant is another one than before: page -> tenant. Remembers whose they are now."""
        found = {}
        for page in range(self.pages):
            if owners[page] == "free":
                continue
            if owners[page] == "kv" and self.last[page] not in (None, tenant_of[page]):
                found[page] = tenant_of[page]
            self.last[page] = tenant_of[page]
        return found
