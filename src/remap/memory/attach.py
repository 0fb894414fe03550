# SPDX-License-Identifier: Apache-2.0
"""Attach a tenant: give its layers pages, give each page one place in the KV region, and make the tenant's state.

If any step fails, `Attaching.undo` undoes all effects on the arena. The model's tensors are re-pointed last: all or
none.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial

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
from remap.memory.pages import MAX_BUFFERS, NO_PAGE, TenantPages, plan_free_pages, run_of
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
        arena, source, tenant, name = self._arena, arrival.source, arrival.number, arrival.name
        others = tuple(self._tenants.values())
        slices = config.selection == "slices"
        page_bytes = arena.page_bytes
        if kv.layers != source.kv_layers:
            raise InvalidArgument(
                f"KVSpec.layers is {kv.layers}, but the model has {source.kv_layers} layers; nothing was attached",
                kv_layers=kv.layers,
                model_layers=source.kv_layers,
            )
        if kv.max_blocks > MOST_BLOCKS:
            capacity = arena.counts()["total"] * page_bytes
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
        sizes = [max(1, -(-nbytes // page_bytes)) for nbytes in source.layer_bytes]
        layers = len(sizes) if source.embedding_part is None else source.embedding_part
        buffer_pages = max(sizes[:layers])
        # Layers without bytes of their own (all tied) have nothing to give; they never stream.
        pinned = {layer for layer, nbytes in enumerate(source.layer_bytes) if nbytes == 0}
        buffers = MAX_BUFFERS if config.buffers == "auto" else config.buffers
        for_good = _without_home(layers, pinned, resident_layers, buffers)
        home_pages = [0 if layer in for_good else size for layer, size in enumerate(sizes)]
        ring_pages = buffers * buffer_pages if for_good else 0
        rest_pages = -(-source.rest_bytes // page_bytes)
        sink_pages = 0
        first_pages = geometry.pages_for_blocks(kv.min_blocks)
        window = geometry.buffer_pages
        needed = sum(home_pages) + ring_pages + rest_pages + first_pages + window
        broker = ""
        lent = self._lent(others)
        free = arena.counts()["free"] - len(lent)
        if for_good or not any(source.layer_bytes):
            cold = False
        if cold is None:
            if needed > free and self.supply is not None:
                broker = self.supply(needed - free)
                lent = self._lent(others)
                free = arena.counts()["free"] - len(lent)
            cold = needed > free
        if cold:
            # Layers without bytes have nothing to load, and keep their page.
            home_pages = [0 if source.layer_bytes[layer] else 1 for layer in range(len(sizes))]
            first_pages = 0
            sink_pages = 1 if source.modules else 0
            needed = sum(home_pages) + rest_pages + sink_pages + window
        if needed > free and self.supply is not None:
            broker = self.supply(needed - free)
            lent = self._lent(others)
            free = arena.counts()["free"] - len(lent)
        if needed > free:
            raise OutOfMemory(
                f"attaching {name!r} needs {needed} pages of {page_bytes} bytes ({sum(home_pages) + ring_pages} for layers, "
                f"{rest_pages + sink_pages} for other tensors, {first_pages} for {kv.min_blocks} KV blocks, {window} for "
                f"streamed blocks), {free} are free; "
                f"nothing was attached; give the session {show_size((needed - free) * page_bytes)} more "
                "capacity, lower min_blocks, let layers stream for good with resident_layers=, or attach it inactive, without "
                'pages for its layers (active=False, pages="none")' + (f"; {broker}" if broker else ""),
                requested=needed,
                free=free,
                broker=broker,
                page_bytes=page_bytes,
                minimum_bytes=needed * page_bytes,
            )
        params = _core.Owner.params
        homes = tuple(tuple(arena.take(count, params, tenant, lent)) if count else () for count in home_pages)
        ring = [arena.take(buffer_pages, _core.Owner.ring, tenant, lent) for _ in range(buffers if for_good else 0)]
        shows = list(homes)
        for index, layer in enumerate(for_good):
            shows[layer] = tuple(ring[index % buffers][-sizes[layer] :])
        more_regions, rest_address, sink = [], 0, NO_PAGE
        if rest_pages:
            rest = arena.add_layer_region(tenant, f"{name}.rest", arena.take(rest_pages, params, tenant, lent))
            more_regions.append(rest)
            rest_address = arena.address(rest)
            source.fill_rest(rest_address)
        if sink_pages:
            # What tensors without pages show, so that to look at them never ends the process: a page that holds nothing, since
            # somebody may write there as well.
            (sink,) = arena.take(sink_pages, params, tenant, lent)
            more_regions.append(arena.add_layer_region(tenant, f"{name}.sink", [sink]))
        regions = tuple(
            arena.add_layer_region(tenant, f"{name}.{i}", list(pages))
            if pages
            else arena.add_empty_layer_region(tenant, f"{name}.{i}", sizes[i], sink)
            for i, pages in enumerate(shows)
        )
        addresses = [arena.address(region) for region in regions]
        parts = zip(addresses, source.master_addresses, source.layer_bytes, homes)
        self._changes.streams.copy([part[:3] for part in parts if part[2] and part[3]], keep=source.keep_alive)

        # The first of the order is the ring's home: the largest layer. If other layers' pages were ring, blocks would be
        # missing in the middle of the KV region.
        order = tuple(
            layer
            for layer in schedule.nested(layers, sizes.index(buffer_pages))
            if layer not in pinned and not for_good
        )
        ring_region, ring_address, preference = 0, 0, order[:MAX_BUFFERS]
        if for_good or len(order) > 1:
            ring_region = arena.add_ring_region(tenant, MAX_BUFFERS * buffer_pages)
            ring_address = arena.address(ring_region)
            for index, layer in enumerate(preference):
                if home_pages[layer] == buffer_pages:
                    arena.designate_ring(ring_region, index * buffer_pages, list(homes[layer]))
            for index, buffer in enumerate(ring):
                arena.designate_ring(ring_region, index * buffer_pages, buffer)

        shared = arena.take(window, _core.Owner.ring, tenant, lent)
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
        embedding_part = [page for home in homes[layers:] for page in home]
        in_order = free_pages + donors + _of_others(arena, others) + outside + embedding_part
        donation_order = tuple(in_order[: geometry.donation_pages])
        # Own pages without a place get one behind the blocks' places: lent pages are zeroed there before they come
        # home.
        placed = set(donation_order)
        unplaced_pages = [page for page in (*donors, *embedding_part) if page not in placed]
        if cold:  # any page may become its layers'
            unplaced_pages = [page for page in _for_anybody(arena, others) if page not in placed and page not in shared]
        kv_region = arena.add_kv_region(tenant, geometry.region_pages + len(unplaced_pages))
        all_regions = (*regions, *more_regions, *([ring_region] if ring_address else []), kv_region)
        _designate(arena, kv_region, geometry, donation_order)
        if unplaced_pages:
            arena.designate(kv_region, geometry.region_pages, unplaced_pages)
        for r in range(geometry.ranges if window else 0):
            at = (r // 2 % BUFFERS * 2 + r % 2) * geometry.streamed_columns
            slot = (r + 1) * geometry.range_pages - geometry.streamed_columns
            arena.fix(kv_region, slot, shared[at : at + geometry.streamed_columns])
        arena.seal(kv_region)
        if arena.mode == _core.Mode.aliased and len(order) > 1 and not cold:
            for layer in order:
                for ring_layer in preference:
                    if home_pages[ring_layer] >= home_pages[layer]:
                        arena.prepare_view(regions[layer], list(homes[ring_layer][-home_pages[layer] :]))
        turn, compute = Turn(self._lock), ComputeStream(self._changes.streams, self._device)
        prefetcher = _core.Prefetcher(
            self._changes.streams.backend,
            list(zip(addresses, source.master_addresses, source.layer_bytes)),
            # Its copies read the master copies and write to the arena, in whatever order a session is collected.
            keep=(arena, source.keep_alive),
            chunk_bytes=self._copy_chunk_bytes,
        )
        copies = KVCopies(self._changes.streams, compute, (lambda: prefetcher.copy_stream) if window else None)
        host.asks_kv = kv.host_blocks is None
        stored = HostBlocks(
            geometry, kv.host_blocks or 0, host.reserve(kv.host_blocks * kv.block_bytes) if kv.host_blocks else 0
        )
        if window:
            region, unit = arena.address(kv_region), geometry.unit_bytes
            ranges = [
                (region + r * geometry.range_bytes, stored.address + r * stored.total * unit)
                for r in range(geometry.ranges)
            ]
            prefetcher.stream_blocks(list(zip(ranges[::2], ranges[1::2])), unit, BUFFERS)
        made = arrival.tenant = TenantState(
            number=tenant,
            name=name,
            priority=priority,
            config=config,
            source=source,
            books=Books(
                TenantPages(
                    tenant,
                    tuple(map(run_of, homes)),
                    regions,
                    ring_region,
                    tuple(sizes[layer] if layer in for_good else 0 for layer in range(len(homes))),
                    tuple(map(run_of, ring)),
                    preference,
                    sizes=() if cold else tuple(sizes),
                    buffer_pages=buffer_pages,
                    elsewhere=tuple((layer, ()) for layer, home in enumerate(homes) if not home) if cold else (),
                ),
            ),
            donation_order=donation_order,
            donation_lookup=_core.PageOrder(donation_order),
            index_of={page: index for index, page in enumerate(donation_order)},
            layer_bytes=tuple(source.layer_bytes),
            addresses=tuple(addresses),
            regions=tuple((arena.address(region), arena.region_bytes(region)) for region in all_regions),
            rest_address=rest_address,
            ring_address=ring_address,
            reserved=first_pages,
            placed=frozenset(placed.union(unplaced_pages)),
            max_remappable=_max_remappable(homes, order, placed),
            pinned=frozenset(pinned),
            host=host,
            kv=TenantKV(
                geometry,
                arena.address(kv_region),
                copies,
                self._memory,
                turn,
                stored,
                partial(self._hosts.store_kv, host, name, geometry, turn.lock) if kv.host_blocks is None else None,
            ),
            live_prefetcher=prefetcher,
            compute=compute,
            turn=turn,
            timing=PassTimes(source.layer_bytes[:layers]),
            link=self.link,
            chunk_bytes=self._copy_chunk_bytes,
        )
        self._changes.draft.enlist(tenant, made.kv.pool)
        self._calibrate(made, others)
        if for_good:
            made.books = made.books._replace(by_hand=True)
        if for_good or cold:
            self._changes.configure(made)
        if window:  # at most what a copy costs whatever its size: one block's takes hardly longer
            first = ranges[0][0] + geometry.first_streamed * unit
            made.copy_setup_s = self._changes.streams.copy_seconds(first, stored.address, unit)
        if first_pages:
            self._changes.apply(made, plan_free_pages(made.pages, donation_order[:first_pages], give=True))
            self._changes.settle(made)
        hidden = made.bounds = StallBounds(made)
        made.timing.prepare = hidden.prepare
        made.kv.on_stream(hidden.streamable_blocks)
        # For slices the view (view.py) applies max_layers, which counts layers.
        made.controller = Controller(
            replace(config, max_layers=None) if slices else config,
            bound=hidden.bound,
            stall=hidden.stall,
            possible=None if made.plain and not cold else hidden.possible,
            longest=hidden.longest_piece,
        )
        return made

    def _lent(self, others: Sequence[TenantState]) -> list[int]:
        """The free pages that are some layer's, here or in another process."""
        lent = frozenset[int]().union(*(other.pages.lent for other in others))
        return sorted(page for page in self._arena.free_pages() if page in lent or page in self.borrowed)

    def _calibrate(self, tenant: TenantState, others: Sequence[TenantState]) -> None:
        """Load the largest layer once more, to measure the copy's time; its bytes stay the same. Of a tenant without pages what
        others, whose master copies lie in such memory as well, have measured counts, until it measures itself."""
        source = tenant.source
        if tenant.pages.cold:
            alike = [other for other in others if other.host.staged == tenant.host.staged]
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


def _without_home(layers: int, pinned: set[int], resident: int | None, buffers: int) -> tuple[int, ...]:
    """The layers that get no pages of their own, evenly spaced, ascending. resident: how many of the others there are; None:
    all. Raises InvalidArgument (fields resident_layers, layers) for a number that leaves no more than the ring's to stream."""
    streamable = [layer for layer in range(layers) if layer not in pinned]
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
