"""Taking a tenant in: its memory, its KV cache, its copies and its controller, all or nothing."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from remap import _core
from remap.kv.cache import KVCache
from remap.kv.spec import KVSpec
from remap.locking import Turn
from remap.memory.attach import LayerSource, attach_layers
from remap.memory.bounds import HiddenCopies
from remap.memory.host_memory import HostMemory
from remap.memory.offers import offers_to
from remap.memory.plan import plan_free_pages
from remap.memory.streams import ComputeStream
from remap.policy.controller import Controller, ControllerConfig
from remap.tenant import Tenant

if TYPE_CHECKING:
    from remap.session import Session

__all__ = ["Arrival", "admit", "undo_arrival"]


@dataclass
class Arrival:
    """A tenant on its way in: what has to be undone if it does not come to be attached."""

    number: int
    name: str
    source: LayerSource
    tenant: Tenant | None = None
    installing: bool = False  # the model's tensors may have been re-pointed


def admit(
    session: Session,
    source: LayerSource,
    name: str,
    priority: int,
    kv: KVSpec,
    config: ControllerConfig,
    host: HostMemory | None,
    active: bool = True,
) -> Tenant:
    """A new tenant of the session. host: the page-locked memory that its master copies are in, if they are.

    The model's tensors are re-pointed last. On any error nothing stays behind; `host` is the caller's to give back then.
    """
    number = session._next_tenant
    session._next_tenant = number + 1
    arrival = session._arriving = Arrival(number, name, source)
    try:
        tenant = _admit(session, arrival, priority, kv, config, host, active)
    except BaseException:
        undo_arrival(session)
        raise
    session._arriving = None
    return tenant


def _admit(
    session: Session,
    arrival: Arrival,
    priority: int,
    kv: KVSpec,
    config: ControllerConfig,
    host: HostMemory | None,
    active: bool,
) -> Tenant:
    arena, changes, streams = session._arena, session._changes, session._streams
    number, name, source = arrival.number, arrival.name, arrival.source
    copy = functools.partial(streams.copy, keep=source.keep_alive)
    attachment, geometry, region, first = attach_layers(
        arena,
        number,
        source,
        kv,
        name,
        copy,
        [other._attachment for other in session._tenants.values()],
        config.selection == "slices",
    )
    attachment.host = host
    prefetcher = _core.Prefetcher(
        session._backend,
        list(zip(attachment.addresses, source.master_addresses, source.layer_bytes)),
        keep=(
            arena,
            source.keep_alive,
        ),  # its copies read the one and write to the other, in whatever order a session is collected
        chunk_bytes=session._copy_chunk_bytes,
    )
    compute = ComputeStream(streams, session._device)
    mover = functools.partial(changes.move_bytes, compute)
    turn = Turn(session._lock)
    cache = KVCache(geometry, arena.address(region), mover, session._memory, turn)
    tenant = arrival.tenant = Tenant(session, number, name, priority, attachment, cache, prefetcher, compute, turn)
    _calibrate(session, tenant, source)
    if first:
        changes.apply(tenant, plan_free_pages(attachment.pages, arena.epoch, first, give=True))
        changes.settle(tenant)
    tenant.active = active
    tenant._slowdown = config.slowdown
    tenant._slices = config.selection == "slices"
    hidden = tenant._hidden = HiddenCopies(tenant, config)
    tenant._prepare = hidden.prepare
    tenant._others = functools.partial(offers_to, session, tenant)
    # In slices the cap, which is in layers, is in the view (policy.py).
    counted = replace(config, cap=None) if config.selection == "slices" else config
    session._controllers[name] = Controller(
        counted, bound=hidden.bound, stall=hidden.stall, possible=None if attachment.plain else hidden.possible
    )
    session._configs[name] = config
    arrival.installing = True
    source.install(attachment.addresses, attachment.rest_address, tenant)
    session._tenants[name] = tenant  # from here it is attached
    return tenant


def undo_arrival(session: Session) -> None:
    """Nothing stays behind of a tenant that did not come to be attached. Can be called again. Raises ArenaBroken."""
    arrival = session._arriving
    if arrival is None:
        return
    tenant = arrival.tenant
    if tenant is None or session._tenants.get(arrival.name) is not tenant:
        session._changes.undo()
        if arrival.installing:
            arrival.source.detach((), None)
        if tenant is not None:
            session._changes.forget(tenant)
            tenant._retire()
            tenant._release()
        session._controllers.pop(arrival.name, None)
        session._configs.pop(arrival.name, None)
        arena = session._arena
        if not arena.broken and arena.counts(arrival.number)["total"]:
            arena.remove_tenant(arrival.number, undoing=True)
    session._arriving = None


def _calibrate(session: Session, tenant: Tenant, source: LayerSource) -> None:
    """Load the largest layer once more, with a clock: the bytes are the same, the copy's time is not known yet."""
    largest = max(range(tenant.layers), key=lambda layer: source.layer_bytes[layer])
    nbytes = source.layer_bytes[largest]
    if nbytes:
        target, master = tenant._attachment.addresses[largest], source.master_addresses[largest]
        seconds = session._streams.copy_seconds(target, master, nbytes, keep=source.keep_alive)
        tenant.calibrate_link(nbytes / max(seconds, 1e-9))
