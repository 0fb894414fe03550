"""Attaching a model: from tensors to layers, from layers to pages, from pages to one place in the KV region each.

All effects on the arena are undone if any step fails. The model's tensors are re-pointed last of all, by the session: whole
or not at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remap import _core
from remap.errors import InvalidArgument, LimitExceeded, OutOfMemory
from remap.kv.spec import KVGeometry, KVSpec
from remap.memory.plan import TenantPages
from remap.memory.slice_plan import giving_order
from remap.memory.state import Attachment
from remap.model.kv_fit import require_fit
from remap.policy import schedule
from remap.sizes import show_size

if TYPE_CHECKING:
    from torch import nn

    from remap.memory.device import Device
    from remap.memory.host_memory import HostMemory
    from remap.tenant import Tenant

__all__ = ["MAX_BLOCKS", "MAX_BUFFERS", "LayerSource", "attach_layers", "model_source", "raw_source"]

MAX_BUFFERS = (
    2  # ring buffers that the ring's region has room for; more never beat two (theory: beta >= 3 buys only slack)
)

MAX_BLOCKS = 1 << 26  # of one KV cache: the pool's books take a byte a block, whatever memory the blocks have

# Addresses [first, stop) at which attached models' tensors lie, in all sessions of this process: a model can be in one only.
_INSTALLED: list[tuple[int, int]] = []


@dataclass(frozen=True)
class LayerSource:
    """What is to be attached, however it is made: bytes per layer, master copies, and what to do with the addresses."""

    layer_bytes: tuple[int, ...]
    kv_layers: int  # the first ones have a KV cache; what follows (an lm_head) has none
    master_addresses: tuple[int, ...]
    rest_bytes: int
    fill_rest: Callable[[int], None]  # (rest address): copy what belongs to no layer, once
    # (addresses, rest address, tenant): re-point the model's tensors, put hooks and guards in; whole or not at all
    install: Callable[[Sequence[int], int, Tenant], None]
    # (layers, device): back onto ordinary memory there; these layers' bytes come from their masters
    detach: Callable[[Sequence[int], Any], None]
    watch: Callable[[Collection[int]], dict[int, list[str]]]  # these three: see Attachment
    writes: Callable[[Collection[int]], dict[int, list[str]]]
    verify: Callable[[Collection[int]], None] | None
    keep_alive: Any
    modules: tuple[Any, ...] = ()


def raw_source(views: Sequence[memoryview], host: HostMemory | None) -> LayerSource:
    """Layers as plain bytes (an engine that is not torch). What is viewed is the master copies and stays alive.

    host: where a device needs them page-locked. Buffers that cannot be locked where they are have their copies there.
    """
    # from_buffer_copy would copy and from_buffer refuses read-only memory; the address is all that is needed.
    addresses = [_core.buffer_address(view) for view in views]
    if host is not None:
        addresses = [
            host.hold(address, view.nbytes, writable=not view.readonly) for address, view in zip(addresses, views)
        ]
    return LayerSource(
        layer_bytes=tuple(view.nbytes for view in views),
        kv_layers=len(views),
        master_addresses=tuple(addresses),
        rest_bytes=0,
        fill_rest=lambda rest: None,
        install=lambda targets, rest, tenant: None,
        detach=lambda away, device: None,
        watch=lambda layers: {},
        writes=lambda layers: {},
        verify=None,
        keep_alive=views,
    )


def model_source(
    model: nn.Module,
    layers: Any,
    *,
    device: Device,
    memory: Callable[[int, int], Any],
    host: HostMemory | None,
    kv: KVSpec,
    mutable: Sequence[str],
    weights: Any,
    names: Any,
    extra: Sequence[Any] = (),
    embedding: str = "device",
    hooks: bool = True,
) -> LayerSource:
    """A torch model, on the CPU or on `device`. `memory(address, nbytes)` makes a uint8 tensor over a region.

    host: page-locked memory for the master copies, where the device needs that. kv: has to fit the model. extra, embedding,
    hooks: see `Session.attach`.
    """
    device.require_bytes()
    import torch

    from remap.model import bind as modules
    from remap.model import master as masters
    from remap.model import pack as packing
    from remap.model.embedding import HostEmbedding
    from remap.model.guards import Guards
    from remap.model.hooks import attach_hooks

    if embedding not in ("device", "host"):
        raise InvalidArgument(
            f"embedding must be 'device' or 'host', got {embedding!r}; nothing was attached", embedding=embedding
        )
    if isinstance(mutable, str):
        raise InvalidArgument(
            f"mutable= takes a sequence of patterns, not the one string {mutable!r}; nothing was attached; put it into a "
            "tuple",
            mutable=mutable,
        )
    path = modules.find_layers(model) if layers is None else layers
    decoder = modules.resolve_layers(model, path)
    found = decoder if not extra else modules.resolve_layers(model, [*decoder, *_modules(model, extra)])
    everything = (*model.named_parameters(), *model.named_buffers())
    # All tensors on the CPU, or all on the session's device: the first one says which is meant.
    ours = torch.device(device.torch_device)
    meant = next((tensor.device for _, tensor in everything), ours)
    specs = modules.collect(model, found, device=meant if meant.type == "cpu" else ours)
    require_fit(kv, model, decoder)
    gathered = HostEmbedding(model, specs, device, host) if embedding == "host" else None
    if gathered is not None:
        specs = [spec for spec in specs if spec.path != gathered.path]
    for tensor_path, tensor in everything:
        if any(first <= tensor.data_ptr() < stop for first, stop in _INSTALLED):
            raise InvalidArgument(
                f"{tensor_path} lies in a session's memory already: the model, or a part of it, is attached; nothing was "
                "attached; detach it there first",
                path=tensor_path,
            )
    layout = packing.build(specs, layers=len(found), mutable=(*packing.DEFAULT_MUTABLE, *mutable))
    master = masters.make_master(
        model, layout, files=weights, names=names, allocate=host.allocate if host else None, locked=host is not None
    )
    layout = master.layout
    installed: dict[str, Any] = {}

    def tensors(targets: Sequence[int], rest: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        storages = [memory(target, max(1, part.nbytes)) for target, part in zip(targets, layout.layers)]
        if layout.rest.nbytes == 0:  # there is no such region
            return storages, torch.empty(0, dtype=torch.uint8, device=ours)
        return storages, memory(rest, layout.rest.nbytes)

    def fill_rest(rest: int) -> None:
        modules.fill(layout.rest, model, memory(rest, layout.rest.nbytes))
        device.wait_for_torch()  # passes may run on another stream than torch's current one

    def install(targets: Sequence[int], rest: int, tenant: Tenant) -> None:
        storages, resident = installed["storages"], installed["rest"] = tensors(targets, rest)
        parts = zip((*storages, resident), layout.parts)
        installed["ranges"] = [(each.data_ptr(), each.data_ptr() + part.nbytes) for each, part in parts]
        try:
            modules.install(model, layout, storages, resident)
            if gathered is not None:
                gathered.install()
            if hooks:
                attach_hooks(found, tenant, model)
                tenant.expect_whole_pass()
            installed["guards"] = Guards(model, layout, master, tenant, () if gathered is None else (gathered.weight,))
            installed["guards"].install()
            installed["watch"] = modules.WriteWatch(model, layout)
            _INSTALLED.extend(installed["ranges"])
        except BaseException:  # the caller gives the memory up
            if tenant.hooks is not None:
                tenant.hooks.remove()
            modules.restore(model, layout, storages, resident, device=meant)
            if gathered is not None:
                gathered.restore(meant)
            leave()
            raise

    def leave() -> None:
        if "guards" in installed:
            installed["guards"].remove()
        _INSTALLED[:] = [each for each in _INSTALLED if each not in installed["ranges"]]
        installed.clear()

    def detach(away: Sequence[int], where: Any) -> None:
        if not installed:
            return
        # Only a layer that is not in place is taken from its master: a resident one may have been written since.
        master.refuse_change(away)
        lost = installed["watch"].written_in(away)
        sources = {index: master.tensor(index) for index in away if layout.layers[index].nbytes}
        try:
            modules.restore(model, layout, installed["storages"], installed["rest"], sources=sources, device=where)
        except torch.OutOfMemoryError as error:
            needed = sum(part.nbytes for part in layout.parts)
            raise OutOfMemory(
                f"the model's {show_size(needed)} do not fit onto {where or device.torch_device} beside the session's own "
                "memory; the model has not changed; give device='cpu'",
                requested=needed,
                device=str(where or device.torch_device),
            ) from error
        if gathered is not None:
            gathered.restore(where)
        if lost:
            warnings.warn(
                f"writes into layers that were streamed, or loading, are lost: {lost}", RuntimeWarning, stacklevel=4
            )
        device.wait_for_torch()  # the memory copied from is about to be unmapped
        leave()

    if gathered is not None:
        gathered.prepare()
    return LayerSource(
        layer_bytes=tuple(part.nbytes for part in layout.layers),
        kv_layers=len(decoder),
        master_addresses=tuple(master.range(i).address if part.nbytes else 0 for i, part in enumerate(layout.layers)),
        rest_bytes=layout.rest.nbytes,
        fill_rest=fill_rest,
        install=install,
        detach=detach,
        watch=lambda wanted: installed["watch"].written_in(wanted) | master.changed(wanted),
        writes=lambda wanted: installed["watch"].written_in(wanted),
        verify=master.refuse_change if isinstance(master, masters.SafetensorsMaster) else None,
        keep_alive=(master, layout),
        modules=tuple(found),
    )


def attach_layers(
    arena: Any,
    tenant: int,
    source: LayerSource,
    kv: KVSpec,
    name: str,
    copy: Callable[[Sequence[tuple[int, int, int]]], None],
    others: Sequence[Attachment] = (),
    slices: bool = False,
) -> tuple[Attachment, KVGeometry, int, tuple[int, ...]]:
    """Regions, pages and mappings for `source` and its KV cache; the weights are in place afterwards.

    copy([(to, from, bytes)]) brings master copies in and returns when they have arrived. Returns (attachment, geometry, KV
    region, pages of the first min_blocks). Raises OutOfMemory (fields: requested, free, minimum_bytes) before anything
    changes if the free pages do not suffice; on any error the caller removes what was made (tenancy.undo_arrival). others: who
    is attached already: their layers' pages get a place in the new KV region too, and those that they have lent do not become
    anybody's home.
    """
    page_bytes = arena.page_bytes
    if kv.layers != source.kv_layers:
        raise InvalidArgument(
            f"KVSpec.layers is {kv.layers}, the model has {source.kv_layers} layers; nothing was attached",
            kv_layers=kv.layers,
            model_layers=source.kv_layers,
        )
    if kv.max_blocks > MAX_BLOCKS:
        capacity = arena.counts()["total"] * page_bytes
        raise LimitExceeded(
            f"KVSpec.max_blocks is {kv.max_blocks}, a KV cache has at most {MAX_BLOCKS} blocks; nothing was attached; lower "
            f"max_blocks (the session's {show_size(capacity)} hold "
            f"{capacity // kv.block_bytes} of them) or raise block_tokens",
            max_blocks=kv.max_blocks,
            most=MAX_BLOCKS,
        )
    geometry = KVGeometry(kv, page_bytes)
    home_pages = [max(1, -(-nbytes // page_bytes)) for nbytes in source.layer_bytes]
    rest_pages = -(-source.rest_bytes // page_bytes)
    first_pages = geometry.pages_for_blocks(kv.min_blocks)
    needed = sum(home_pages) + rest_pages + first_pages
    lent = sorted(set(arena.free_pages()).intersection(page for other in others for page in other.pages.lent))
    free = arena.counts()["free"] - len(lent)
    if needed > free:
        raise OutOfMemory(
            f"attaching {name!r} needs {needed} pages of {page_bytes} bytes ({sum(home_pages)} for layers, {rest_pages} for "
            f"other tensors, {first_pages} for {kv.min_blocks} KV blocks), {free} are free; nothing was attached; give the "
            f"session {show_size((needed - free) * page_bytes)} more capacity or lower min_blocks",
            requested=needed,
            free=free,
            page_bytes=page_bytes,
            minimum_bytes=needed * page_bytes,
        )
    params = _core.Owner.params
    homes = tuple(tuple(arena.take(count, params, tenant, lent)) for count in home_pages)
    regions = tuple(arena.add_layer_region(tenant, f"{name}.{i}", list(home)) for i, home in enumerate(homes))
    addresses = [arena.address(region) for region in regions]
    rest_address = 0
    if rest_pages:
        rest = arena.add_layer_region(tenant, f"{name}.rest", arena.take(rest_pages, params, tenant, lent))
        rest_address = arena.address(rest)
        source.fill_rest(rest_address)
    copy([part for part in zip(addresses, source.master_addresses, source.layer_bytes) if part[2]])

    # Layers without bytes of their own (all tied) have nothing to give; they never stream.
    pinned = {layer for layer, nbytes in enumerate(source.layer_bytes) if nbytes == 0}
    order = tuple(layer for layer in schedule.nested(len(homes)) if layer not in pinned)
    ring_region, ring_address, preference = 0, 0, order[:MAX_BUFFERS]
    buffer_pages = max(home_pages)
    if len(order) > 1:
        ring_region = arena.add_ring_region(tenant, MAX_BUFFERS * buffer_pages)
        ring_address = arena.address(ring_region)
        for index, layer in enumerate(preference):
            if home_pages[layer] == buffer_pages:
                arena.designate_ring(ring_region, index * buffer_pages, list(homes[layer]))

    lent_now = set(lent)
    free_pages = [page for page in arena.free_pages() if page not in lent_now]
    # The ring's first home comes last: while anything is streamed, these pages are the ring.
    donors = [page for layer in (*order[1:], *order[:1]) for page in homes[layer]]
    if slices:
        donors = giving_order(homes, order, MAX_BUFFERS)
    giving = tuple((free_pages + donors + _of_others(arena, others))[: geometry.region_pages])
    # Own pages without a place get one behind the blocks': what was lent is zeroed there before it comes home.
    placed = set(giving)
    homeless = [page for page in donors if page not in placed]
    kv_region = arena.add_kv_region(tenant, geometry.region_pages + len(homeless))
    all_regions = (*regions, *([rest] if rest_pages else []), *([ring_region] if ring_address else []), kv_region)
    _designate(arena, kv_region, geometry, giving)
    if homeless:
        arena.designate(kv_region, geometry.region_pages, homeless)
    arena.seal(kv_region)
    if arena.mode == _core.Mode.aliased and len(order) > 1:
        for layer in order:
            for ring_layer in preference:
                if home_pages[ring_layer] >= home_pages[layer]:
                    arena.prepare_view(regions[layer], list(homes[ring_layer][: home_pages[layer]]))
    places = set(giving)
    attachment = Attachment(
        pages=TenantPages(tenant, homes, regions, ring_region, ring_preference=preference),
        giving=giving,
        index_of={page: index for index, page in enumerate(giving)},
        layer_bytes=tuple(source.layer_bytes),
        addresses=tuple(addresses),
        regions=tuple((arena.address(region), arena.region_bytes(region)) for region in all_regions),
        rest_address=rest_address,
        ring_address=ring_address,
        lasting=first_pages,
        order=order,
        hosted=_hosted(homes, order, places),
        pinned=pinned,
        detach=source.detach,
        watch=source.watch,
        writes=source.writes,
        verify=source.verify,
        modules=source.modules,
        keep_alive=source.keep_alive,
    )
    return attachment, geometry, kv_region, giving[:first_pages]


def _modules(model: nn.Module, extra: Sequence[Any]) -> list[nn.Module]:
    """What streams besides the decoder's layers: modules, or their dotted paths."""
    found = []
    for each in (extra,) if isinstance(extra, str) else extra:
        if isinstance(each, str):
            try:
                each = model.get_submodule(each)
            except AttributeError as error:
                raise InvalidArgument(
                    f"{type(model).__name__} has no module {each!r}; nothing was attached", path=each
                ) from error
        found.append(each)
    return found


def _of_others(arena: Any, others: Sequence[Attachment]) -> list[int]:
    """What tenants attached earlier may give away some day: layers in ascending order, since the last ones of an idle tenant go
    together; then their KV pages that are nobody's home."""
    homes = [page for other in others for layer in sorted(other.order) for page in other.pages.homes[layer]]
    known = {page for other in others for home in other.pages.homes for page in home}
    kv = [page for page, owner in enumerate(arena.owners()) if owner == _core.Owner.kv and page not in known]
    return homes + kv


def _hosted(homes: Sequence[tuple[int, ...]], order: Sequence[int], places: set[int]) -> int:
    """How many layers' worth the KV region can take, with any number of ring buffers, when layers are given in `order`.

    A region smaller than all homes has no place for the last ones. With two buffers the second layer of the order is ring,
    not KV, so that one more of the later ones is needed.
    """
    placed = sum(places.issuperset(homes[layer]) for layer in order)
    return placed if placed == len(order) else max(0, placed - (MAX_BUFFERS - 1))


def _designate(arena: Any, region: int, geometry: KVGeometry, giving: Sequence[int]) -> None:
    """Each page its slot, in runs of consecutive slots: one mapping call a run."""
    slots = list(geometry.giving_slots(0, len(giving)))
    by_slot = sorted(zip(slots, giving))
    first = 0
    for index in range(1, len(by_slot) + 1):
        if index == len(by_slot) or by_slot[index][0] != by_slot[index - 1][0] + 1:
            arena.designate(region, by_slot[first][0], [page for _, page in by_slot[first:index]])
            first = index
