"""The obvious arena: dictionaries that say what bytes each block and each layer must have, and how many pages each owner.

It knows nothing of regions, rings or plans. What it must be told is which blocks moved; everything else follows from
counting: alpha layers' worth of pages are KV, `buffers` layers' worth are the ring, the rest are where they always were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class TenantModel:
    """One tenant with layers of equal size."""

    layer_pages: int
    layers: Sequence[bytes]
    base_kv_pages: int  # KV pages that are not made of layers
    remapped: int = 0
    buffers: int = 0
    blocks: dict[int, int] = field(default_factory=dict)  # live block -> the value of all its bytes

    def remap(self, layers: int, buffers: int, moved: Mapping[int, int]) -> None:
        self.remapped, self.buffers = (layers, buffers) if layers else (0, 0)
        news = [moved.get(block, block) for block in self.blocks]
        assert len(set(news)) == len(news), "two live blocks became one"
        assert set(moved) <= set(self.blocks), "a block that is not live moved"
        self.blocks = dict(zip(news, self.blocks.values()))

    @property
    def ring_pages(self) -> int:
        return self.buffers * self.layer_pages

    @property
    def kv_pages(self) -> int:
        return self.base_kv_pages + self.remapped * self.layer_pages

    @property
    def params_pages(self) -> int:
        return (len(self.layers) - self.remapped - self.buffers) * self.layer_pages


@dataclass
class ArenaModel:
    """All tenants over `total` pages."""

    total: int
    tenants: dict[str, TenantModel] = field(default_factory=dict)

    @property
    def free_pages(self) -> int:
        return self.total - sum(t.kv_pages + t.ring_pages + t.params_pages for t in self.tenants.values())

    def pages(self) -> dict[str, int]:
        tenants = self.tenants.values()
        return {
            "free": self.free_pages,
            "params": sum(t.params_pages for t in tenants),
            "kv": sum(t.kv_pages for t in tenants),
            "ring": sum(t.ring_pages for t in tenants),
            "outside": 0,
            "quarantine": 0,
            "total": self.total,
        }
