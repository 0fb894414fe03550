"""Taking a tenant in: its memory, its KV cache, its copies and its controller, all or nothing."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

from . import _core
from .attaching import LayerSource, attach_layers
from .bounds import HiddenCopies
from .controller import Controller, ControllerConfig
from .host_memory import HostMemory
from .kv_cache import KVCache
from .kv_geometry import KVSpec
from .offers import offers_to
from .ordering import ComputeStream
from .planner import plan_free_pages
from .tenant import Tenant

if TYPE_CHECKING:
    from .session import Session

__all__ = ["admit"]


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
    arena, changes, streams, number = session._arena, session._changes, session._streams, session._next_tenant
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
    try:
        prefetcher = _core.Prefetcher(
            session._backend,
            list(zip(attachment.addresses, source.master_addresses, source.layer_bytes)),
            keep=arena,
        )
        compute = ComputeStream(streams, session._device)
        mover = functools.partial(changes.move_bytes, compute)
        cache = KVCache(geometry, arena.address(region), mover, session._memory)
        tenant = Tenant(session, number, name, priority, attachment, cache, prefetcher, compute)
        _calibrate(session, tenant, source)
        if first:
            changes.apply(tenant, plan_free_pages(attachment.pages, arena.epoch, first, give=True))
            changes.settle(tenant)
        source.install(attachment.addresses, attachment.rest_address)
    except BaseException:
        # Whatever it was, an interrupt included: nothing stays behind. It goes on to the caller.
        arena.remove_tenant(number, undoing=True)
        raise
    session._next_tenant += 1
    session._tenants[name] = tenant
    session._configs[name] = config
    tenant.active = active
    tenant._slices = config.selection == "slices"
    hidden = tenant._hidden = HiddenCopies(tenant, config)
    # In slices the cap, which is in layers, is in the view (policy.py).
    counted = replace(config, cap=None) if config.selection == "slices" else config
    session._controllers[name] = Controller(
        counted, bound=hidden.bound, stall=hidden.stall, possible=None if attachment.plain else hidden.possible
    )
    tenant._prepare = hidden.prepare
    tenant._others = functools.partial(offers_to, session, tenant)
    return tenant


def _calibrate(session: Session, tenant: Tenant, source: LayerSource) -> None:
    """Load the largest layer once more, with a clock: the bytes are the same, the copy's time is not known yet."""
    largest = max(range(tenant.layers), key=lambda layer: source.layer_bytes[layer])
    nbytes = source.layer_bytes[largest]
    if nbytes:
        target, master = tenant._attachment.addresses[largest], source.master_addresses[largest]
        seconds = session._streams.copy_seconds(target, master, nbytes, keep=source.keep_alive)
        tenant.calibrate_link(nbytes / max(seconds, 1e-9))
