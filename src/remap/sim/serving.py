"""Serving simulated: the production session, controller, planner, arena, executor and prefetcher, in virtual time.

    setup = Setup(machine("GH200-96GB"), tenants("C1", machine("GH200-96GB")))
    simulate(setup, items, "remap").headline()

The memory of a tenant is its reservation of the device: weights, what engines take besides (activations), and KV of the rest.
All policies get the same reservations, in pages of the same arena; what differs is what happens when the KV runs out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from remap.errors import InvalidArgument
from remap.sim import policies
from remap.sim.hardware import Machine, Model, model
from remap.sim.passes import Cost
from remap.sim.policies import POLICIES, Policy
from remap.sim.results import PolicyResult, TenantResult
from remap.sim.scheduling import SCHEDULERS
from remap.sim.sequences import Sequence as Request
from remap.sim.workload import Item
from remap.sim.worlds import World, fitting, make_world
from remap.sizes import parse_size

__all__ = ["COMBINATIONS", "POLICIES", "SHARINGS", "Setup", "TenantSetup", "fitting", "simulate", "tenants"]

SHARINGS = ("temporal", "spatial", "mig")
COMBINATIONS: Mapping[str, str] = {
    "C1": "OPT-13b:35%,Llama-2-13b:35%,Llama-3-8b:20%",
    "C2": "OPT-30b:65%,OPT-6.7b:15%",
}
"""Oneiros, Table 1: models and their shares of the device's memory."""

ALONE = 0.9
"""The share of the device's memory that a model alone has, where none is given (vLLM's gpu_memory_utilization)."""


@dataclass(frozen=True)
class TenantSetup:
    """One tenant: weights, activations and KV in `memory_bytes`. name: as in the items. priority: see `Session.attach`.

    kv_blocks: of its reservation, as they are; None: what `memory_bytes` leaves. cost: seconds of computation, with the two
    methods of `Roofline`; None: the roofline of the machine. Only the latter knows the part of a device that "mig" gives.
    """

    name: str
    model: Model
    memory_bytes: int
    priority: int = 0
    kv_blocks: int | None = None
    cost: Cost | None = None


@dataclass(frozen=True)
class Setup:
    """What is simulated, but for the policy and the requests.

    sharing: "temporal" (one tenant computes at a time, in turns of `quantum_s`), "spatial" (all compute, and passes that overlap
    share the device) or "mig" (every tenant has a partition of its own: memory as reserved, and of computation, memory bandwidth
    and link the same part of what all have). scheduler: "prefill-first" or "chunked". gap_s: between two passes of a
    tenant; None: the machine's. activation_bytes: taken by each engine besides weights and KV. scheduling: the scheduler's
    settings that are not vLLM's defaults, see `make_scheduling`.

    Raises InvalidArgument for unknown names, no tenants, two of one name, or a reservation that leaves no KV.
    """

    machine: Machine
    tenants: tuple[TenantSetup, ...]
    sharing: str = "temporal"
    scheduler: str = "prefill-first"
    quantum_s: float = 1.0
    block_tokens: int = 16
    gap_s: float | None = None
    activation_bytes: int = 500_000_000
    page_bytes: int = 2 << 20
    scheduling: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sharing not in SHARINGS or self.scheduler not in SCHEDULERS:
            raise InvalidArgument(
                f"sharing must be one of {', '.join(SHARINGS)} and scheduler one of {', '.join(SCHEDULERS)}, got "
                f"{self.sharing!r} and {self.scheduler!r}; nothing was made",
                sharing=self.sharing,
                scheduler=self.scheduler,
            )
        names = [tenant.name for tenant in self.tenants]
        if not names or len(set(names)) < len(names):
            raise InvalidArgument(
                f"expected at least one tenant, each with a name of its own, got {names}; nothing was made",
                tenants=names,
            )
        reserved = sum(tenant.memory_bytes for tenant in self.tenants)
        if reserved > self.machine.hbm_bytes:
            raise InvalidArgument(
                f"the tenants reserve {reserved} bytes, {self.machine.name} has {self.machine.hbm_bytes}; nothing was made; give "
                "them smaller shares",
                requested=reserved,
                available=self.machine.hbm_bytes,
            )
        for tenant in self.tenants:
            if self.kv_blocks(tenant) < 1:
                weights = tenant.model.layers * tenant.model.layer_bytes + tenant.model.resident_bytes
                raise InvalidArgument(
                    f"{tenant.name} reserves {tenant.memory_bytes} bytes; its weights take {weights} and its activations "
                    f"{self.activation_bytes}, which leaves no block of KV; nothing was made; reserve more",
                    tenant=tenant.name,
                    requested=weights + self.activation_bytes,
                    available=tenant.memory_bytes,
                )

    @property
    def gap(self) -> float:
        """Seconds between two passes."""
        return self.machine.iteration_gap_s if self.gap_s is None else self.gap_s

    def kv_blocks(self, tenant: TenantSetup) -> int:
        """Blocks of KV that the reservation leaves, layers in whole pages, or that were given."""
        if tenant.kv_blocks is not None:
            return tenant.kv_blocks
        pages = -(-tenant.model.layer_bytes // self.page_bytes) * tenant.model.layers
        left = tenant.memory_bytes - pages * self.page_bytes - tenant.model.resident_bytes - self.activation_bytes
        return left // (self.block_tokens * tenant.model.kv_bytes_per_token)


def tenants(text: str, on: Machine, models: object = None) -> tuple[TenantSetup, ...]:
    """From "C1", "C2", one model, or "OPT-13b:35%,chat=Llama-3-8b:20GiB": models with shares of the machine or sizes.

    A model that occurs twice gets a number behind its name, unless it has one before "=". models: the user's own (see
    `hardware.model`). Raises InvalidArgument for an unknown model or a share that is none.
    """
    parts = [part.strip() for part in COMBINATIONS.get(text, text).split(",") if part.strip()]
    made: list[TenantSetup] = []
    for part in parts:
        name, equals, rest = part.rpartition("=")
        label, _, share = rest.partition(":")
        if equals and not name.strip():
            raise InvalidArgument(f"{part!r} has no name before '='; nothing was made; give one", tenant=part)
        found = model(label, models)  # type: ignore[arg-type]
        chosen = name if equals else found.name
        if not equals and any(one.name == chosen for one in made):
            chosen = f"{chosen}-{sum(one.model is found or one.model.name == found.name for one in made) + 1}"
        if not share and len(parts) > 1:
            raise InvalidArgument(
                f"{part!r} says no share; several tenants need one each, as in OPT-13b:35%,Llama-3-8b:20%; nothing was made",
                tenant=part,
            )
        made.append(TenantSetup(chosen, found, _bytes(share, on)))
    if not made:
        raise InvalidArgument(
            f"expected models or one of {', '.join(COMBINATIONS)}, got {text!r}; nothing was made", tenants=text
        )
    return tuple(made)


def _bytes(share: str, on: Machine) -> int:
    if not share:
        return int(ALONE * on.hbm_bytes)
    if not share.endswith("%"):
        return parse_size(share, "tenants")
    try:
        part = float(share[:-1]) / 100.0
    except ValueError:
        part = 0.0
    if not 0 < part <= 1:
        raise InvalidArgument(f"a share is above 0 and at most 100 %, got {share!r}; nothing was made", share=share)
    return int(part * on.hbm_bytes)


def simulate(
    setup: Setup,
    items: Sequence[Item],
    policy: str | Policy,
    on_progress: Callable[[int, int], None] | None = None,
) -> PolicyResult:
    """Serve `items` under one policy. Equal arguments give an equal result, but for `wall_s`.

    on_progress: (requests finished, of how many), now and then. Raises InvalidArgument for an unknown policy or tenant, and for
    a policy that the sharing or the scheduler does not have, before anything runs.
    """
    chosen = policies.find(policy) if isinstance(policy, str) else policy
    unknown = sorted({item.tenant for item in items} - {tenant.name for tenant in setup.tenants})
    if unknown:
        raise InvalidArgument(
            f"no tenant {unknown[0]!r}, there are {[tenant.name for tenant in setup.tenants]}; nothing was run",
            tenant=unknown[0],
        )
    begun = time.perf_counter()
    parts = _partitions(setup) if setup.sharing == "mig" else [setup]
    results, served = [], 0
    first = min(
        (item.time_s for item in items), default=0.0
    )  # of all tenants, also where each has a machine of its own
    for part in parts:
        names = {tenant.name for tenant in part.tenants}
        mine = [item for item in items if item.tenant in names]
        base = served

        def progress(finished: int, base: int = base) -> None:
            if on_progress is not None:
                on_progress(base + finished, len(items))

        results.append(_serve(part, mine, chosen, first, progress))
        served += len(mine)
    return _joined(chosen.name, results, time.perf_counter() - begun)


def _partitions(setup: Setup) -> list[Setup]:
    """MIG: single-tenant machines, each with its part of everything."""
    whole = sum(tenant.memory_bytes for tenant in setup.tenants)
    parts = []
    for tenant in setup.tenants:
        share = tenant.memory_bytes / whole
        machine = setup.machine
        part = machine.with_(
            hbm_bytes_per_s=machine.hbm_bytes_per_s * share,
            flops=machine.flops * share,
            h2d_bytes_per_s=machine.h2d_bytes_per_s * share,
            d2h_bytes_per_s=machine.d2h_bytes_per_s * share,
        )
        parts.append(replace(setup, machine=part, tenants=(tenant,), sharing="spatial"))
    return parts


def _serve(
    setup: Setup, items: Sequence[Item], policy: Policy, first_s: float, progress: Callable[[int], None]
) -> PolicyResult:
    requests = [
        Request(order, item.tenant, item.time_s, item.prompt_tokens, item.output_tokens)
        for order, item in enumerate(items)
    ]
    world: World = make_world(setup, policy)
    try:
        begun = world.clock.now
        world.runner.serve(requests, progress)
        engines = world.engines.values()
        last = max((engine.last_finish_s for engine in engines), default=begun)
        results: list[TenantResult] = [engine.result() for engine in engines]
        return PolicyResult(
            policy=policy.name,
            tenants=tuple(results),
            timeline=world.runner.timeline.samples(),
            virtual_s=max(0.0, last - begun - first_s),
            wall_s=0.0,
            iterations=world.runner.iterations,
            decisions=world.runner.decisions,
        )
    finally:
        world.close()


def _joined(name: str, results: Sequence[PolicyResult], wall_s: float) -> PolicyResult:
    return PolicyResult(
        policy=name,
        tenants=tuple(tenant for result in results for tenant in result.tenants),
        timeline=tuple(sample for result in results for sample in result.timeline),
        virtual_s=max(result.virtual_s for result in results),
        wall_s=wall_s,
        iterations=sum(result.iterations for result in results),
        decisions=sum(result.decisions for result in results),
    )
