# SPDX-License-Identifier: Apache-2.0
"""From a setup and a policy to something that runs: the session with its tenants attached, one engine each, and who runs them.

recompute, swap and static   tenants of a session on the sim backend whose memory does not change while they serve
ideal                        recompute, with more memory
remap                        the same session, asked before every pass: `session.step`
sleep                        the same session by `WholeModels`, which moves all of a model at once, when turns change
pie                          pools that count, and a clock (Pie has no counterpart in the library)
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from remap.errors import InvalidArgument
from remap.kv.spec import KVSpec, with_streamed
from remap.policy.hardware import Machine, Model
from remap_serve.engine.scheduler import Schedule, Scheduler
from remap_serve.sim.engine import SimEngine
from remap_serve.sim.passes import Cost, Pass, PiePass, SessionPass
from remap_serve.sim.policies import Policy
from remap_serve.sim.pools import PiePool, VirtualClock
from remap_serve.sim.roofline import Roofline
from remap_serve.sim.running import Concurrent, Serving, TurnServing
from remap_serve.sim.scheduling import make_scheduling
from remap_serve.sim.setup import TURNS, Setup, TenantSetup
from remap_serve.sim.whole_models import WholeModels

__all__ = ["World", "fitting", "make_world", "masters"]

_STATIC_BUFFERS = 2
_HOST_BLOCKS = 1 << 17
"""Of host memory for KV, where requests are swapped: two million tokens a tenant, more than any run asks for. A request that asks
in vain recomputes."""


@dataclass
class World:
    """One run's: close it afterwards."""

    clock: Any
    engines: dict[str, SimEngine]
    runner: Serving
    session: Any = None
    close: Callable[[], None] = field(default=lambda: None)


def make_world(setup: Setup, policy: Policy) -> World:
    """Everything attached and ready, at some virtual time. On an error nothing stays behind. Raises what `fitting` raises."""
    fitting(setup, policy)
    setup = setup.whole() if policy.whole else setup.times(policy.memory)
    return _pie_world(setup, policy) if policy.kind == "pie" else _session_world(setup, policy)


def fitting(setup: Setup, policy: Policy) -> None:
    """Raises InvalidArgument for a policy that this setup cannot run (policy), and for a machine whose link takes all of its
    memory's bandwidth (machine), before anything is made."""
    on = setup.machine
    link = on.h2d_bytes_per_s + on.d2h_bytes_per_s
    if on.hbm_bytes_per_s <= link:
        raise InvalidArgument(
            f"{on.name}: its memory moves {on.hbm_bytes_per_s / 1e9:.4g} GB/s, and its link {link / 1e9:.4g} GB/s in both "
            "directions together, which leaves nothing to compute with beside copies; nothing was run; serving is simulated for "
            "devices with memory of their own",
            machine=on.name,
            hbm_bytes_per_s=on.hbm_bytes_per_s,
            link_bytes_per_s=link,
        )
    if policy.kind == "sleep" and setup.sharing not in TURNS:
        raise InvalidArgument(
            f"the policy {policy.name!r} is of models that take turns, not of sharing {setup.sharing!r}; nothing was run; leave "
            "it out, or let them take turns",
            policy=policy.name,
            sharing=setup.sharing,
        )
    if policy.kind == "swap" and setup.scheduler != "prefill-first":
        raise InvalidArgument(
            f"the policy {policy.name!r} is of the prefill-first scheduler (vLLM V0), not of {setup.scheduler!r}; nothing was "
            "run; leave it out or change the scheduler",
            policy=policy.name,
            scheduler=setup.scheduler,
        )
    for tenant in setup.tenants:
        layers, most = tenant.model.layers, tenant.model.layers - _STATIC_BUFFERS
        if policy.kind == "static" and _static_layers(tenant.model, policy) > most:
            raise InvalidArgument(
                f"{policy.name!r} streams {_static_layers(tenant.model, policy)} layers; {tenant.name} has {layers}, of which at "
                f"most {max(0, most)} can be streamed through {_STATIC_BUFFERS} buffers; nothing was run; stream fewer, or leave "
                "it out",
                policy=policy.name,
                tenant=tenant.name,
                layers=layers,
            )


def masters(layer_bytes: Sequence[int]) -> list[memoryview]:
    """Master copies of a simulated session (`Session.attach_bytes`): one read-only buffer of each of these sizes, in bytes.

    On simulated memory without bytes a copy reads nothing, so layers of all models can share one range of address space: all
    begin at the same address and cost no memory until a caller reads them; they read as zero, and the address space is given
    back with the last of them.

    Raises InvalidArgument (field layer_bytes) for a size below 1, or if there are none.
    """
    sizes = list(layer_bytes)
    if not sizes or min(sizes) < 1:
        raise InvalidArgument(
            f"layer_bytes must be sizes of at least 1 byte, at least one of them, got {sizes[:8]!r}; nothing was created",
            layer_bytes=sizes,
        )
    # Private and never writable: the kernel does not even promise memory for it, however large the layers are.
    whole = memoryview(mmap.mmap(-1, max(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ))
    return [whole[:size] for size in sizes]


def _session_world(setup: Setup, policy: Policy) -> World:
    import remap
    from remap.memory.device import simulated

    specs = [_spec(setup, tenant, policy) for tenant in setup.tenants]
    pages = 0
    for tenant, (spec, reserved) in zip(setup.tenants, specs):
        pages += tenant.model.layers * -(-tenant.model.layer_bytes // setup.page_bytes)
        pages += -(-reserved * spec.block_bytes // setup.page_bytes)
    capacity = pages * setup.page_bytes
    backend = simulated(setup.machine)
    platform = remap.advanced.Platform(backend=backend)
    session = remap.Session(capacity, page_bytes=setup.page_bytes, config=policy.config, platform=platform)
    try:
        engines: dict[str, SimEngine] = {}
        managed: Any = session if policy.kind == "remap" else None
        if policy.kind == "sleep":
            layers = {tenant.name: tenant.model.layers for tenant in setup.tenants}
            managed = WholeModels(session, layers, partial(_follow, engines))
        elif policy.manager is not None:
            managed = policy.manager(session, partial(_follow, engines))
        for tenant, (spec, _) in zip(setup.tenants, specs):
            attached = session.attach_bytes(
                masters([tenant.model.layer_bytes] * tenant.model.layers),
                name=tenant.name,
                priority=tenant.priority,
                kv=spec,
            )
            passes = SessionPass(backend, attached, _cost(setup, tenant), tenant.model)
            if policy.kind == "static":
                _stream_from_the_start(session, tenant.name, tenant.model, policy)
            most = spec.max_blocks if managed is not None else attached.kv.usable_blocks
            scheduler = _scheduling(setup, tenant, policy.swaps, overlap=policy.kind != "swap", stream=policy.stream)
            engines[tenant.name] = _engine(setup, tenant, attached, scheduler, passes, backend, managed, most)
    except BaseException:
        session.close()
        raise
    runner = _runner(setup, managed, engines, backend, policy.partial)
    return World(backend, engines, runner, session, session.close)


def _follow(engines: Mapping[str, SimEngine], moved: Mapping[str, Mapping[int, int]]) -> None:
    for name, pairs in moved.items():
        engines[name].follow(pairs)


def _spec(setup: Setup, tenant: TenantSetup, policy: Policy) -> tuple[KVSpec, int]:
    """(the KV cache, blocks of the whole reservation). The region has room for whatever the arena has."""
    model, reserved = tenant.model, setup.kv_blocks(tenant)
    block_bytes = setup.block_tokens * model.kv_bytes_per_token
    most = reserved
    if policy.kind in ("remap", "sleep", "static"):
        most = max(reserved, sum(_memory(setup, one) for one in setup.tenants) // block_bytes)
    shape: dict[str, Any] = {"layers": model.layers, "kv_heads": model.kv_heads, "head_dim": model.head_dim}
    shape["dtype"] = {1: "int8", 2: "bfloat16", 4: "float32"}[model.dtype_bytes]
    if model.dense_layers:  # their KV, too: blocks of bytes, since layers that stay have no place in the arena
        shape = {"layers": 1, "kv_heads": 1, "head_dim": model.kv_bytes_per_token // 2, "dtype": "uint8"}
        shape["layout"] = "block_major"
    spec = KVSpec(
        **shape,
        block_tokens=setup.block_tokens,
        min_blocks=max(1, int(policy.pooled * reserved)) if policy.kind in ("remap", "sleep") else reserved,
        max_blocks=most,
        host_blocks=_HOST_BLOCKS if policy.swaps else 0,
    )
    return (_with_streamed(spec, reserved, model, setup) if policy.stream else spec), reserved


def _with_streamed(spec: KVSpec, reserved: int, model: Model, setup: Setup) -> KVSpec:
    """As many streamed blocks as two reservations have, or one where their buffers would leave no room for the longest
    request; none where they would leave no room at all."""
    longest = -(-model.context // setup.block_tokens)
    wide, narrow = (with_streamed(spec, times * reserved, setup.page_bytes) for times in (2, 1))
    return wide if wide.min_blocks >= longest else narrow if narrow.min_blocks else spec


def _memory(setup: Setup, tenant: TenantSetup) -> int:
    """Bytes of its reservation, also where the blocks were given and do not go with `memory_bytes`."""
    model, kv = tenant.model, setup.kv_blocks(tenant) * setup.block_tokens * tenant.model.kv_bytes_per_token
    return max(tenant.memory_bytes, model.layers * -(-model.layer_bytes // setup.page_bytes) * setup.page_bytes + kv)


def _cost(setup: Setup, tenant: TenantSetup) -> Cost:
    return Roofline(setup.machine, tenant.model) if tenant.cost is None else tenant.cost


def _stream_from_the_start(session: Any, name: str, model: Model, policy: Policy) -> None:
    from remap import advanced

    advanced.remap(session, name, _static_layers(model, policy), _STATIC_BUFFERS, "uniform")


def _static_layers(model: Model, policy: Policy) -> int:
    share = policy.static
    return max(1, round(share * model.layers)) if share < 1 else int(share)


def _scheduling(
    setup: Setup, tenant: TenantSetup, swap: bool = False, overlap: bool = True, stream: bool = False
) -> Scheduler:
    return make_scheduling(
        setup.scheduler,
        block_tokens=setup.block_tokens,
        context=tenant.model.context,
        swap=swap,
        overlap=overlap,
        stream=stream,
        **setup.scheduling,
    )


def _engine(
    setup: Setup,
    tenant: TenantSetup,
    attached: Any,
    scheduler: Scheduler,
    runner: Pass,
    clock: Any,
    session: Any,
    most: int,
    kind: type[SimEngine] = SimEngine,
) -> SimEngine:
    return kind(
        attached,
        scheduler,
        runner,
        clock,
        session=session,
        gap_s=setup.gap,
        most_blocks=most,
        context=tenant.model.context,
    )


def _runner(
    setup: Setup, session: Any, engines: Mapping[str, SimEngine], clock: Any, partial: bool | float | None = None
) -> Serving:
    if setup.sharing in TURNS:
        return TurnServing(session, engines, clock, setup.sharing, quantum_s=setup.quantum_s, partial=partial)
    return Concurrent(session, engines, clock, gap_s=setup.gap)


# -- Pie ---------------------------------------------------------------------------------------------------------------


@dataclass
class _PieTenant:
    """A tenant under Pie, as engines and timelines see it."""

    name: str
    kv: PiePool
    remapped: int = 0
    alpha: float = 0.0
    lent_pages: int = 0


class PieEngine(SimEngine):
    """Adaptive expansion (Pie, section 3.3): one layer's KV more goes to host memory while more blocks are wanted and its copies
    would be hidden; one less while passes wait for copies. Decided by decoding passes: prompts hide more than what follows.

    The paper leaves the ratio of violations open; waiting for less than 2 % of the computation is forgiven, as the controller's
    `slowdown` does. A request that has the engine to itself and still does not fit gets layer after layer until it does: it would
    wait for ever otherwise.
    """

    FORGIVEN = 0.02

    runner: PiePass

    def launch(self) -> Schedule:
        pool: PiePool = self.tenant.kv
        if not pool.fixed:
            self._resize(pool)
        return super().launch()

    def _resize(self, pool: PiePool) -> None:
        last, swapped = self.runner.last, pool.swapped
        if swapped < pool.most_swapped and self._head_cannot_run(pool):
            pool.set(swapped + 1)
        elif swapped and last.stall_s > self.FORGIVEN * last.compute_s:
            pool.set(swapped - 1)
        elif swapped < pool.most_swapped and (wanted := self.demand().blocks) > pool.free_blocks:
            tokens = pool.block_tokens * min(pool.blocks_at(swapped + 1), pool.live_blocks + wanted)
            if self.runner.hidden(tokens, swapped + 1, self.FORGIVEN) > swapped:
                pool.set(swapped + 1)

    def _head_cannot_run(self, pool: PiePool) -> bool:
        scheduler = self.scheduler
        if scheduler.running or not scheduler.waiting:
            return False
        return scheduler.blocks_for(scheduler.waiting[0].length) > pool.usable_blocks


def _closed_form(clock: Any, machine: Machine, model: Model, cost: Cost, pool: PiePool) -> PiePass:
    return PiePass(
        clock,
        machine,
        model,
        cost,
        used_tokens=lambda: pool.live_blocks * pool.block_tokens,
        swapped_layers=lambda: pool.swapped,
    )


def _pie_world(setup: Setup, policy: Policy) -> World:
    clock = VirtualClock()
    engines: dict[str, SimEngine] = {}
    for tenant in setup.tenants:
        model = tenant.model
        pool = PiePool(setup.kv_blocks(tenant), setup.block_tokens, model.layers)
        if policy.static:
            pool.fix(policy.static)
        scheduler = _scheduling(setup, tenant)
        make, kind = policy.pie or (_closed_form, PieEngine)
        passes = make(clock, setup.machine, model, _cost(setup, tenant), pool)
        stand_in = _PieTenant(tenant.name, pool)
        most = pool.usable_blocks if pool.fixed else pool.blocks_at(pool.most_swapped)
        engines[tenant.name] = _engine(setup, tenant, stand_in, scheduler, passes, clock, None, most, kind)
    return World(clock, engines, _runner(setup, None, engines, clock))
