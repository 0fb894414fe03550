"""What attach made of a model: its pages and homes, where its pages stand in its KV region, and which layers go first."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from remap.kv.spec import KVGeometry
from remap.memory.plan import TenantPages, ring_of
from remap.policy import schedule

if TYPE_CHECKING:
    from remap.memory.host_memory import HostMemory

__all__ = ["Attachment"]


@dataclass
class Attachment:
    """What attach made, and close takes apart again. The session's own bookkeeping of one tenant."""

    pages: TenantPages
    giving: tuple[int, ...]  # page ids in giving order: place i of the KV region's giving order holds giving[i]
    index_of: dict[int, int]  # its inverse
    layer_bytes: tuple[int, ...]
    addresses: tuple[int, ...]  # of the layers' regions
    regions: tuple[tuple[int, int], ...]  # address and bytes of every region: the layers' first
    rest_address: int
    ring_address: int
    lasting: int  # places of the giving order that are the first min_blocks': pages that never leave
    order: tuple[int, ...]  # streamable layers, in the order in which the controller gives them away
    hosted: int  # layers whose homes all have a place in the KV region: the most that can be given
    pinned: set[int] = field(default_factory=set)
    written: dict[int, list[str]] = field(default_factory=dict)  # layer -> tensors written after attach
    detach: Any = None  # callable(layers not in place, device): puts the model back on ordinary memory there
    watch: Any = (
        None  # callable(layers) -> {layer: [what keeps it from being streamed: written since attach, or its file was]}
    )
    writes: Any = None  # callable(layers) -> {layer: [paths written since attach]}
    # callable(layers): raises InvalidState if the weights file that one of them comes from has changed; None: no files
    verify: Any = None
    modules: tuple[Any, ...] = ()  # the layers as torch modules, if they are
    keep_alive: Any = None
    host: HostMemory | None = None  # where the device needs page-locked master copies
    draining: tuple[int, ...] = ()  # region slots withdrawn, waiting for an engine to empty them
    draining_target: tuple[int, int] | None = None
    # Lent pages that are the tenant's again and wait for their layers to come home: KV for the arena, not in the pool.
    reclaimed: frozenset[int] = frozenset()

    # -- which layers ----------------------------------------------------------------------------------------------

    def select(self, remapped: int, buffers: int, selection: str) -> tuple[int, ...]:
        """The layers to stream for `remapped` layers' worth, ascending; () for 0.

        "nested": a prefix of the nested order, which grows without reloading. "uniform": evenly spaced. "suffix": the last ones.
        "onward": what is streamed now, whichever that is, and more of the nested order. "inward": fewer of what is streamed
        now: layers that are lent to other tenants come home first, those that the ring is made of last.
        """
        if remapped == 0:
            return ()
        order, present = self.order, self.pages.streamed
        if selection == "suffix":
            return tuple(sorted(order)[-(remapped + buffers) :])
        if selection == "inward":
            ring = self.pages.ring_layers
            rank = {layer: index for index, layer in enumerate(order)}
            # A suffix comes back from its front, so that it stays one; any other set in the nested order backwards.
            suffix = self.streams_suffix
            lent = {layer for layer in present if self.lends(layer)}
            keep = sorted(
                present,
                key=lambda layer: (layer not in ring, layer in lent, -layer if suffix else rank.get(layer, len(rank))),
            )
            return tuple(sorted(keep[: remapped + buffers]))
        if selection == "onward":
            more = [layer for layer in order if layer not in present][: max(0, remapped + buffers - len(present))]
            return tuple(sorted((*present, *more)))
        if selection == "nested":
            return tuple(sorted(order[: remapped + buffers]))
        ascending = sorted(order)
        return tuple(ascending[index] for index in schedule.uniform(len(ascending), remapped, buffers))

    def possible(self, streamed: Sequence[int], buffers: int) -> bool:
        """Whether a plan can make exactly these layers stream, given what streams now: their homes are large enough for the
        ring, and every page that would become KV has a place in the KV region. For whole layers only."""
        if self.plain or not streamed:
            return not streamed or len(streamed) > buffers
        pages = self.pages
        owned = sum(len(pages.homes[layer]) for layer in streamed)
        if len(streamed) <= buffers or owned < buffers * pages.buffer_pages:
            return False
        if self.unplaced.isdisjoint(streamed):
            return True
        ring = ring_of(pages, tuple(sorted(streamed)), buffers) or ()
        unmoved = pages.kv_from_homes.union(pages.lent, *ring)
        homes = chain.from_iterable(pages.homes[layer] for layer in self.unplaced.intersection(streamed))
        return all(page in self.index_of or page in unmoved for page in homes)

    @functools.cached_property
    def unplaced(self) -> frozenset[int]:
        """Layers of which some page has no place in the KV region: it can be ring, or lent, and nothing else."""
        known = self.index_of.keys()
        return frozenset(layer for layer, home in enumerate(self.pages.homes) if not known >= set(home))

    @functools.cached_property
    def plain(self) -> bool:
        """Whether any of the streamable layers can stream: they are equally large, and all have a place in the KV region."""
        sizes = {len(self.pages.homes[layer]) for layer in self.order}
        return sizes <= {self.pages.buffer_pages} and self.unplaced.isdisjoint(self.order)

    @property
    def streams_suffix(self) -> bool:
        """Whether what streams is nothing, or the last streamable layers."""
        present = self.pages.streamed
        return not present or present == tuple(sorted(self.order)[-len(present) :])

    def lends(self, layer: int) -> bool:
        """Whether other tenants have pages of this layer, or may take them, or it waits to come home from there."""
        home = self.pages.homes[layer]
        return not (self.pages.lent.isdisjoint(home) and self.reclaimed.isdisjoint(home))

    # -- pages of the KV region ------------------------------------------------------------------------------------

    def stand_together(self, pages: Sequence[int]) -> bool:
        """Whether these pages stand in the KV region one after another: so they do if given together, as is usual."""
        first = self.index_of.get(pages[0]) if pages else None
        return first is not None and self.giving[first : first + len(pages)] == tuple(pages)

    def slots_of(self, pages: Sequence[int], geometry: KVGeometry) -> Sequence[int]:
        """Region slots at which these pages stand; a range where they are consecutive, which is the fast case."""
        if self.stand_together(pages):
            return geometry.giving_slots(self.index_of[pages[0]], len(pages))
        places = [self.index_of[page] for page in pages if page in self.index_of]
        if not places:
            return ()
        if places == list(range(places[0], places[0] + len(places))):
            return geometry.giving_slots(places[0], len(places))
        if geometry.ranges == 1:  # a page stands where it was given
            return places
        return [geometry.giving_slot(place) for place in places]
