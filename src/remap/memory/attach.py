# SPDX-License-Identifier: Apache-2.0
"""Attach a tenant: give its layers pages, give each page one place in the KV region, and make the tenant's state.

If any step fails, `Attaching.undo` undoes all effects on the arena. The model's tensors are re-pointed last: all or
none.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from remap import _core
from remap.config import Knobs
from remap.errors import InvalidArgument, LimitExceeded, OutOfMemory
from remap.kv.cache import TenantKV
from remap.kv.host import HostBlocks
from remap.kv.spec import BUFFERS, MOST_BLOCKS, KVGeometry, KVSpec
from remap.locking import SessionLock, Turn
from remap.memory.apply import Changes
from remap.memory.bounds import StallBounds
from remap.memory.device import Device
from remap.memory.host_memory import HostMemories, HostMemory
from remap.memory.kv_copies import KVCopies
from remap.memory.pages import MAX_BUFFERS, NO_PAGE, TenantPages, Transition, plan_free_pages, run_of
from remap.memory.shared_link import SharedLink
from remap.memory.state import Books, TenantState
from remap.memory.streams import ComputeStream
from remap.memory.timing import PassTimes
from remap.model.protocols import Handle
from remap.model.source import LayerSource
from remap.policy import schedule
from remap.policy.controller import Controller
from remap.sizes import MOST_BYTES, show_size, shown

__all__ = ["Attaching", "level_by_level"]


@dataclass
class _Arrival:
    """A tenant on its way in: the record by which a failed attach is undone."""

    number: int
    name: str
    source: LayerSource
    tenant: TenantState | None = None
    installing: bool = False  # the model's tensors may have been re-pointed


class _Wanted(NamedTuple):
    """How many pages a tenant takes. sizes: of the region of each part (`TenantState.parts`); homes: of these its own. empty:
    layers without bytes of their own (all tied), which have nothing to give and never stream. for_good: layers that get no pages
    of their own; ring: for these. rest, sink: for tensors outside of layers. first: for the blocks that it always has. window:
    for blocks that are copied in while a pass runs. cold: layers come and go whole, and have none at first."""

    sizes: Sequence[int]
    layers: int
    empty: Sequence[int]
    for_good: Sequence[int]
    homes: Sequence[int]
    ring: int
    rest: int
    first: int
    window: int
    sink: int = 0
    cold: bool = False

    @property
    def pages(self) -> int:
        return sum(self.homes) + self.ring + self.rest + self.sink + self.first + self.window

    @property
    def buffer_pages(self) -> int:
        """Of the largest layer."""
        return max(self.sizes[: self.layers])


class _Taken(NamedTuple):
    """What it has got. homes: pages of each part. ring: of each buffer, for layers without a home. regions: of each part."""

    homes: tuple[tuple[int, ...], ...]
    ring: Sequence[Sequence[int]]
    regions: tuple[int, ...]
    more_regions: Sequence[int]
    rest_address: int


class _Places(NamedTuple):
    """Pages with a place in the KV region: in the order in which they are given, and those without a place among the blocks."""

    order: tuple[int, ...]
    behind: Sequence[int]


class Attaching:
    """A session's arriving tenants. Called with the session's lock held."""

    def __init__(
        self,
        changes: Changes,
        tenants: dict[str, TenantState],
        device: Device,
        lock: SessionLock,
        memory: Callable[[int, int], object],
        hosts: HostMemories,
        copy_chunk_bytes: int,
    ) -> None:
        """tenants: the session's own, as hosts. memory(address, nbytes) makes byte tensors over a region."""
        self._changes = changes
        self._arena = changes.arena
        self._tenants = tenants
        self._device = device
        self._lock = lock
        self._memory = memory
        self._hosts = hosts
        self._copy_chunk_bytes = copy_chunk_bytes
        self.link = SharedLink(tenants)
        self._next = 0
        self._arriving: _Arrival | None = None
        # Asks other processes for this many pages, which are free then, or fewer. None: there are none.
        self.supply: Callable[[int], str] | None = None
        self.borrowed: Container[int] = ()  # pages that others may call home, so they become no layer's

    def admit(
        self,
        source: LayerSource,
        name: str,
        priority: int,
        kv: KVSpec,
        config: Knobs,
        host: HostMemory,
        active: bool,
        clock: Callable[[], float],
        handle: Callable[[TenantState], Handle],
        resident_layers: int | None = None,
        pages: str = "auto",
    ) -> TenantState:
        """Make a new tenant of the session. host: the page-locked memory of its master copies, if they need any; if
        this raises, the caller gives it back. handle(state): makes what shows the tenant, which no caller knows before this
        returns. resident_layers, pages: see `Session.attach`.

        On any error nothing stays behind. Raises InvalidArgument, LimitExceeded and OutOfMemory (fields: requested,
        free, minimum_bytes) as `Session.attach` says.
        """
        number = self._next
        self._next = number + 1
        arrival = self._arriving = _Arrival(number, name, source)
        try:
            tenant = self._place(arrival, priority, kv, config, host, resident_layers, _cold_at_first(pages, active))
            tenant.books = tenant.books._replace(active=active)
            tenant.last_pass_s = clock()  # now: it was not idle while its weights were copied
            tenant.handle = handle(tenant)
            arrival.installing = True
            source.install(tenant.addresses, tenant.rest_address, tenant.handle)
            self._tenants[name] = tenant  # from here it is attached
        except BaseException:
            self.undo()
            raise
        self._arriving = None
        return tenant

    def undo(self) -> None:
        """Remove all traces of a tenant whose attach was not completed. Can be called again. Raises ArenaBroken."""
        arrival = self._arriving
        if arrival is None:
            return
        tenant = arrival.tenant
        if tenant is None or self._tenants.get(arrival.name) is not tenant:
            self._changes.undo()
            if arrival.installing:
                arrival.source.detach((), None)
            if tenant is not None:
                self._changes.forget(tenant)
                tenant.retire()
                self._changes.release(tenant)
            if not self._arena.broken and self._arena.knows(arrival.number):
                self._arena.remove_tenant(arrival.number, undoing=True)
        self._arriving = None

    def _place(
        self,
        arrival: _Arrival,
        priority: int,
        kv: KVSpec,
        config: Knobs,
        host: HostMemory,
        resident_layers: int | None,
        cold: bool | None,
    ) -> TenantState:
        """Make regions, pages and mappings for the source and its KV cache, and put the weights in place. cold: without pages for
        layers and KV blocks; None: only if there are too few.

        Raises before anything changes if there are too few free pages. The layers' pages of tenants attached already
        get a place in the new KV region too; pages that they have lent become no layer's home.
        """
        arena, source, number = self._arena, arrival.source, arrival.number
        geometry = self._geometry(kv, source)
        wanted, lent = self._find_pages(
            arrival.name, _wanted(source, geometry, config, resident_layers), source, kv, cold
        )
        taken = self._take_pages(arrival, wanted, lent)
        # The first of the order is the ring's home: the largest layer. If other layers' pages were ring, blocks would be
        # missing in the middle of the KV region.
        order = tuple(
            layer
            for layer in schedule.nested(wanted.layers, wanted.sizes.index(wanted.buffer_pages))
            if source.layer_bytes[layer] and not wanted.for_good
        )
        ring_region = self._make_ring(number, wanted, taken, order)
        shared = arena.take(wanted.window, _core.Owner.ring, number, lent)
        places = self._order_pages(geometry, wanted, taken, order, lent, shared, slices=config.selection == "slices")
        kv_region = self._make_kv(number, geometry, places, shared)
        if arena.mode == _core.Mode.aliased and len(order) > 1 and not wanted.cold:
            for layer in order:
                for ring_layer in order[:MAX_BUFFERS]:
                    if wanted.homes[ring_layer] >= wanted.homes[layer]:
                        shown = taken.homes[ring_layer][-wanted.homes[layer] :]
                        arena.prepare_view(taken.regions[layer], list(shown))
        addresses = tuple(arena.address(region) for region in taken.regions)
        all_regions = (*taken.regions, *taken.more_regions, *([ring_region] if ring_region else []), kv_region)
        turn, compute = Turn(self._lock), ComputeStream(self._changes.streams, self._device)
        prefetcher = _core.Prefetcher(
            self._changes.streams.backend,
            list(zip(addresses, source.master_addresses, source.layer_bytes)),
            # Its copies read the master copies and write to the arena, in whatever order a session is collected.
            keep=(arena, source.keep_alive),
            chunk_bytes=self._copy_chunk_bytes,
        )
        copies = KVCopies(self._changes.streams, compute, (lambda: prefetcher.copy_stream) if shared else None)
        host.asks_kv = kv.host_blocks is None
        stored = HostBlocks(
            geometry, kv.host_blocks or 0, host.reserve(kv.host_blocks * kv.block_bytes) if kv.host_blocks else 0
        )
        made = arrival.tenant = TenantState(
            number=number,
            name=arrival.name,
            priority=priority,
            config=config,
            source=source,
            books=Books(_first_pages(number, wanted, taken, ring_region, order), by_hand=bool(wanted.for_good)),
            donation_order=places.order,
            donation_lookup=_core.PageOrder(places.order),
            index_of={page: index for index, page in enumerate(places.order)},
            layer_bytes=tuple(source.layer_bytes),
            addresses=addresses,
            regions=tuple((arena.address(region), arena.region_bytes(region)) for region in all_regions),
            rest_address=taken.rest_address,
            ring_address=arena.address(ring_region) if ring_region else 0,
            reserved=wanted.first,
            placed=frozenset({*places.order, *places.behind}),
            max_remappable=_max_remappable(taken.homes, order, set(places.order)),
            pinned=frozenset(wanted.empty),
            host=host,
            kv=TenantKV(
                geometry,
                arena.address(kv_region),
                copies,
                self._memory,
                turn,
                stored,
                partial(self._hosts.store_kv, host, arrival.name, geometry, turn.lock) if host.asks_kv else None,
            ),
            live_prefetcher=prefetcher,
            compute=compute,
            turn=turn,
            timing=PassTimes(source.layer_bytes[: wanted.layers]),
            link=self.link,
            chunk_bytes=self._copy_chunk_bytes,
        )
        self._begin(made, wanted)
        return made

    def _geometry(self, kv: KVSpec, source: LayerSource) -> KVGeometry:
        """Raises InvalidArgument and LimitExceeded as `admit` does."""
        page_bytes = self._arena.page_bytes
        if kv.layers != source.kv_layers and (kv.dtype != "uint8" or kv.streamed_blocks):
            raise InvalidArgument(
                f"KVSpec.layers is {kv.layers}, but the model has {source.kv_layers} layers; nothing was attached",
                kv_layers=kv.layers,
                model_layers=source.kv_layers,
            )
        if kv.max_blocks > MOST_BLOCKS:
            capacity = self._arena.counts()["total"] * page_bytes
            raise LimitExceeded(
                f"KVSpec.max_blocks is {kv.max_blocks}, but a KV cache has at most {MOST_BLOCKS} blocks; nothing was "
                f"attached; lower max_blocks (the session's {show_size(capacity)} hold "
                f"{capacity // kv.block_bytes} blocks) or raise block_tokens",
                max_blocks=kv.max_blocks,
                most=MOST_BLOCKS,
            )
        geometry = KVGeometry(kv, page_bytes)
        for what, count, most in (
            ("host_blocks", kv.host_blocks or 0, MOST_BLOCKS),
            ("host_bytes", (kv.host_blocks or 0) * kv.block_bytes, MOST_BYTES),
            ("region_bytes", geometry.region_bytes, MOST_BYTES),
        ):
            if count > most:
                raise LimitExceeded(
                    f"the KVSpec makes {what} {shown(count)}, and {most} are the most that there can be; nothing was attached; "
                    "lower max_blocks, host_blocks or the size of a block",
                    limit_name=what,
                    requested=shown(count),
                    limit=most,
                )
        return geometry

    def _find_pages(
        self, name: str, wanted: _Wanted, source: LayerSource, kv: KVSpec, cold: bool | None
    ) -> tuple[_Wanted, list[int]]:
        """What is wanted, if there are as many pages, and the free pages that it may not take. Raises OutOfMemory."""
        if wanted.for_good or not any(source.layer_bytes):
            cold = False
        if cold is None:
            cold = wanted.pages > self._supplied(wanted.pages)[1]
        if cold:
            wanted = _without_pages(wanted, source)
        lent, free, broker = self._supplied(wanted.pages)
        if wanted.pages > free:
            page_bytes, layers = self._arena.page_bytes, sum(wanted.homes) + wanted.ring
            short = (wanted.pages - free) * page_bytes
            raise OutOfMemory(
                f"attaching {name!r} needs {wanted.pages} pages of {page_bytes} bytes ({layers} for layers, "
                f"{wanted.rest + wanted.sink} for other tensors, {wanted.first} for {kv.min_blocks} KV blocks, {wanted.window} "
                f"for streamed blocks), {free} are free; nothing was attached; give the session {show_size(short)} more "
                "capacity, lower min_blocks, let layers stream for good with resident_layers=, or attach it inactive, without "
                'pages for its layers (active=False, pages="none")' + (f"; {broker}" if broker else ""),
                requested=wanted.pages,
                free=free,
                broker=broker,
                page_bytes=page_bytes,
                minimum_bytes=wanted.pages * page_bytes,
            )
        return wanted, lent

    def _supplied(self, pages: int) -> tuple[list[int], int, str]:
        """(free pages that are some layer's, how many others are free, why no broker answers), after other processes were asked
        for what of `pages` is lacking."""
        lent, free, broker = self._lent(), self._arena.counts()["free"], ""
        if pages > free - len(lent) and self.supply is not None:
            broker = self.supply(pages - free + len(lent))
            lent, free = self._lent(), self._arena.counts()["free"]
        return lent, free - len(lent), broker

    def _take_pages(self, arrival: _Arrival, wanted: _Wanted, lent: Sequence[int]) -> _Taken:
        """Pages and regions of layers and of what stands outside of them, with their bytes."""
        arena, source, number, name = self._arena, arrival.source, arrival.number, arrival.name
        params, width = _core.Owner.params, wanted.buffer_pages
        homes = tuple(tuple(arena.take(count, params, number, lent)) if count else () for count in wanted.homes)
        ring = [arena.take(width, _core.Owner.ring, number, lent) for _ in range(wanted.ring // width)]
        shows = list(homes)
        for index, layer in enumerate(wanted.for_good):
            shows[layer] = tuple(ring[index % len(ring)][-wanted.sizes[layer] :])
        more_regions, rest_address, sink = [], 0, NO_PAGE
        if wanted.rest:
            rest = arena.add_layer_region(number, f"{name}.rest", arena.take(wanted.rest, params, number, lent))
            more_regions.append(rest)
            rest_address = arena.address(rest)
            source.fill_rest(rest_address)
        if wanted.sink:
            # What tensors without pages show, so that to look at them never ends the process: a page that holds nothing, since
            # somebody may write there as well.
            (sink,) = arena.take(wanted.sink, params, number, lent)
            more_regions.append(arena.add_layer_region(number, f"{name}.sink", [sink]))
        regions = tuple(
            arena.add_layer_region(number, f"{name}.{i}", list(pages))
            if pages
            else arena.add_empty_layer_region(number, f"{name}.{i}", wanted.sizes[i], sink)
            for i, pages in enumerate(shows)
        )
        parts = zip(map(arena.address, regions), source.master_addresses, source.layer_bytes, homes)
        self._changes.streams.copy([part[:3] for part in parts if part[2] and part[3]], keep=source.keep_alive)
        return _Taken(homes, ring, regions, more_regions, rest_address)

    def _make_ring(self, number: int, wanted: _Wanted, taken: _Taken, order: Sequence[int]) -> int:
        """The ring's region; 0: no layer can stream."""
        if not wanted.for_good and len(order) < 2:
            return 0
        arena, width = self._arena, wanted.buffer_pages
        region: int = arena.add_ring_region(number, MAX_BUFFERS * width)
        for index, layer in enumerate(order[:MAX_BUFFERS]):
            if wanted.homes[layer] == width:
                arena.designate_ring(region, index * width, list(taken.homes[layer]))
        for index, buffer in enumerate(taken.ring):
            arena.designate_ring(region, index * width, buffer)
        return region

    def _order_pages(
        self,
        geometry: KVGeometry,
        wanted: _Wanted,
        taken: _Taken,
        order: Sequence[int],
        lent: Sequence[int],
        shared: Sequence[int],
        *,
        slices: bool,
    ) -> _Places:
        """Which pages get a place in the KV region, and in which order they are given."""
        arena, homes, others = self._arena, taken.homes, tuple(self._tenants.values())
        lent_now = set(lent)
        free_pages = [page for page in arena.free_pages() if page not in lent_now]
        # The ring's first home comes last: its pages are the ring while anything is streamed.
        donors = [page for layer in (*order[1:], *order[:1]) for page in homes[layer]]
        if slices:
            donors = level_by_level(homes, order)
        homes_here = {page for other in others for page in other.pages.lent}
        outside = [page for page in lent if page not in homes_here]
        outside += [
            page for page, owner in enumerate(arena.owners()) if owner == _core.Owner.outside and page not in homes_here
        ]
        # What it gives up and never lends comes last.
        embedding_part = [page for home in homes[wanted.layers :] for page in home]
        in_order = free_pages + donors + _of_others(arena, others) + outside + embedding_part
        donation_order = tuple(in_order[: geometry.donation_pages])
        # Own pages without a place get one behind the blocks' places: lent pages are zeroed there before they come
        # home. Of a tenant without pages any may become its layers'.
        placed = set(donation_order)
        behind = [page for page in (*donors, *embedding_part) if page not in placed]
        if wanted.cold:
            behind = [page for page in _for_anybody(arena, others) if page not in placed and page not in shared]
        return _Places(donation_order, behind)

    def _make_kv(self, number: int, geometry: KVGeometry, places: _Places, shared: Sequence[int]) -> int:
        """The KV region."""
        arena = self._arena
        region: int = arena.add_kv_region(number, geometry.region_pages + len(places.behind))
        _designate(arena, region, geometry, places.order)
        if places.behind:
            arena.designate(region, geometry.region_pages, places.behind)
        for r in range(geometry.ranges if shared else 0):
            at = (r // 2 % BUFFERS * 2 + r % 2) * geometry.streamed_columns
            slot = (r + 1) * geometry.range_pages - geometry.streamed_columns
            arena.fix(region, slot, shared[at : at + geometry.streamed_columns])
        arena.seal(region)
        return region

    def _begin(self, made: TenantState, wanted: _Wanted) -> None:
        """Measure its link, give it its first blocks, and make what decides for it."""
        changes, geometry, config = self._changes, made.kv.geometry, made.config
        changes.draft.enlist(made.number, made.kv.pool)
        self._calibrate(made)
        if wanted.for_good or wanted.cold:
            changes.configure(made, Transition(made.pages))
        if wanted.window:
            region, stored, unit = made.kv.address, made.kv.host, geometry.unit_bytes
            ranges = [
                (region + r * geometry.range_bytes, stored.address + r * stored.total * unit)
                for r in range(geometry.ranges)
            ]
            made.prefetcher.stream_blocks(list(zip(ranges[::2], ranges[1::2])), unit, BUFFERS)
            # At most what a copy costs whatever its size: one block's takes hardly longer.
            first = region + geometry.first_streamed * unit
            made.copy_setup_s = changes.streams.copy_seconds(first, stored.address, unit)
        if wanted.first:
            changes.apply(made, plan_free_pages(made.pages, made.donation_order[: wanted.first], give=True))
            changes.settle(made)
        hidden = made.bounds = StallBounds(made)
        made.timing.prepare = hidden.prepare
        made.kv.on_stream(hidden.streamable_blocks)
        # For slices the view (view.py) applies max_layers, which counts layers.
        made.controller = Controller(
            replace(config, max_layers=None) if config.selection == "slices" else config,
            bound=hidden.bound,
            stall=hidden.stall,
            possible=None if made.plain and not wanted.cold else hidden.possible,
            longest=hidden.longest_piece,
        )

    def _lent(self) -> list[int]:
        """The free pages that are some layer's, here or in another process."""
        lent = frozenset[int]().union(*(other.pages.lent for other in self._tenants.values()))
        return sorted(page for page in self._arena.free_pages() if page in lent or page in self.borrowed)

    def _calibrate(self, tenant: TenantState) -> None:
        """Load the largest layer once more, to measure the copy's time; its bytes stay the same. Of a tenant without pages what
        others, whose master copies lie in such memory as well, have measured counts, until it measures itself."""
        source = tenant.source
        if tenant.pages.cold:
            alike = [other for other in self._tenants.values() if other.host.staged == tenant.host.staged]
            rates = [rate for rate in (other.timing.seconds_per_byte() for other in alike) if rate]
            if rates:
                tenant.timing.calibrate_link(1.0 / max(rates))
            return
        largest = max(range(tenant.layers), key=lambda layer: source.layer_bytes[layer])
        nbytes = source.layer_bytes[largest]
        if nbytes:
            target, master = tenant.addresses[largest], source.master_addresses[largest]
            seconds = self._changes.streams.copy_seconds(target, master, nbytes, keep=source.keep_alive)
            tenant.timing.calibrate_link(nbytes / max(seconds, 1e-9))


def _wanted(source: LayerSource, geometry: KVGeometry, config: Knobs, resident_layers: int | None) -> _Wanted:
    """Of a tenant with pages. Raises InvalidArgument as `_without_home` does."""
    sizes = [max(1, -(-nbytes // geometry.page_bytes)) for nbytes in source.layer_bytes]
    layers = len(sizes) if source.embedding_part is None else source.embedding_part
    empty = [layer for layer, nbytes in enumerate(source.layer_bytes) if nbytes == 0]
    buffers = MAX_BUFFERS if config.buffers == "auto" else config.buffers
    for_good = _without_home(layers, empty, resident_layers, buffers)
    return _Wanted(
        sizes=sizes,
        layers=layers,
        empty=empty,
        for_good=for_good,
        homes=[0 if layer in for_good else size for layer, size in enumerate(sizes)],
        ring=buffers * max(sizes[:layers]) if for_good else 0,
        rest=-(-source.rest_bytes // geometry.page_bytes),
        first=geometry.pages_for_blocks(geometry.spec.min_blocks),
        window=geometry.buffer_pages,
    )


def _without_pages(wanted: _Wanted, source: LayerSource) -> _Wanted:
    """The same tenant, whose layers and blocks get pages later. Layers without bytes keep theirs: they have nothing to load."""
    homes = [0 if nbytes else 1 for nbytes in source.layer_bytes]
    return wanted._replace(homes=homes, first=0, sink=1 if source.modules else 0, cold=True)


def _first_pages(number: int, wanted: _Wanted, taken: _Taken, ring_region: int, order: Sequence[int]) -> TenantPages:
    cold = wanted.cold
    return TenantPages(
        number,
        tuple(map(run_of, taken.homes)),
        taken.regions,
        ring_region,
        tuple(size if layer in wanted.for_good else 0 for layer, size in enumerate(wanted.sizes)),
        tuple(map(run_of, taken.ring)),
        order[:MAX_BUFFERS],
        sizes=() if cold else tuple(wanted.sizes),
        buffer_pages=wanted.buffer_pages,
        elsewhere=tuple((layer, ()) for layer, home in enumerate(taken.homes) if not home) if cold else (),
    )


def _without_home(layers: int, empty: Sequence[int], resident: int | None, buffers: int) -> tuple[int, ...]:
    """The layers that get no pages of their own, evenly spaced, ascending. resident: how many of the others there are; None:
    all. Raises InvalidArgument (fields resident_layers, layers) for a number that leaves no more than the ring's to stream."""
    streamable = [layer for layer in range(layers) if layer not in empty]
    if resident is None or resident >= layers:
        return ()
    streamed = min(len(streamable), layers - resident)
    if streamed <= buffers:
        raise InvalidArgument(
            f"resident_layers={resident} leaves {streamed} of {layers} layers to stream, through {buffers} buffers as large as "
            f"layers: that saves nothing; nothing was attached; give at most {layers - buffers - 1}, or None",
            resident_layers=resident,
            layers=layers,
            buffers=buffers,
        )
    return tuple(streamable[index] for index in schedule.uniform(len(streamable), streamed - buffers, buffers))


def _cold_at_first(pages: str, active: bool) -> bool | None:
    return {"own": False, "none": True, "auto": False if active else None}[pages]


def _for_anybody(arena: _core.Arena, others: Sequence[TenantState]) -> list[int]:
    """The pages that may be one tenant's now and another's later: all but those that are ring for good."""
    homes = {page for other in others for home in other.pages.homes for page in home}
    return [page for page, owner in enumerate(arena.owners()) if owner != _core.Owner.ring or page in homes]


def _of_others(arena: _core.Arena, others: Sequence[TenantState]) -> list[int]:
    """The pages that tenants attached earlier may give away some day: layers in ascending order, since the last ones of
    an idle tenant go together; then their KV pages that are no tenant's home."""
    homes = [
        page
        for other in others
        for layer in (*sorted(other.order), *range(other.layers, other.parts))
        for page in other.pages.homes[layer]
    ]
    known = {page for other in others for home in other.pages.homes for page in home}
    kv = [page for page, owner in enumerate(arena.owners()) if owner == _core.Owner.kv and page not in known]
    return homes + kv


def level_by_level(homes: Sequence[tuple[int, ...]], order: Sequence[int]) -> list[int]:
    """Pages of the layers in `order`, as slices give them: the pages that k tail pages give stand together.

    The last pages of all layers come first, then the last but one, and so on. The first layers of `order` come last,
    since the ring is made of their tails. A KV block that straddles pages becomes usable only if its pages stand
    together.
    """
    rest, ring = order[MAX_BUFFERS:], order[:MAX_BUFFERS]
    depth = max((len(homes[layer]) for layer in rest), default=0)
    levels = (homes[layer][-level] for level in range(1, depth + 1) for layer in rest if level <= len(homes[layer]))
    return [*levels, *(page for layer in reversed(ring) for page in reversed(homes[layer]))]


def _max_remappable(homes: Sequence[tuple[int, ...]], order: Sequence[int], places: set[int]) -> int:
    """How many layers' worth the KV region can take, with any number of ring buffers, if layers are given in `order`.

    A region smaller than all homes has no place for the last ones. With two buffers the second layer of the order is
    ring, not KV, so one more of the later layers is needed.
    """
    placed = sum(places.issuperset(homes[layer]) for layer in order)
    return placed if placed == len(order) else max(0, placed - (MAX_BUFFERS - 1))


def _designate(arena: _core.Arena, region: int, geometry: KVGeometry, donation_order: Sequence[int]) -> None:
    """Give each page its slot, in runs of consecutive slots: one mapping call per run."""
    slots = list(geometry.donation_slots(0, len(donation_order)))
    by_slot = sorted(zip(slots, donation_order))
    first = 0
    for index in range(1, len(by_slot) + 1):
        if index == len(by_slot) or by_slot[index][0] != by_slot[index - 1][0] + 1:
            arena.designate(region, by_slot[first][0], [page for _, page in by_slot[first:index]])
            first = index
