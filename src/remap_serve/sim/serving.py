# SPDX-License-Identifier: Apache-2.0
"""Serving simulated: the production session, controller, planner, arena, executor and prefetcher, in virtual time.

    setup = Setup(machine("GH200-96GB"), tenants("C1", machine("GH200-96GB")))
    simulate(setup, items, "remap").headline()

The memory of a tenant is its reservation of the device: weights, what engines take besides (activations), and KV of the rest.
All policies but "ideal" get the same reservations, in pages of the same arena; what differs is what happens when the KV
runs out. "ideal" gets more memory instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from remap.errors import InvalidArgument
from remap_serve.sim import policies
from remap_serve.sim.policies import POLICIES, Policy
from remap_serve.sim.results import PolicyResult, TenantResult
from remap_serve.sim.setup import COMBINATIONS, SHARINGS, Setup, TenantSetup, tenants
from remap_serve.sim.workload import Item
from remap_serve.sim.worlds import World, fitting, make_world

__all__ = ["COMBINATIONS", "POLICIES", "SHARINGS", "Setup", "TenantSetup", "fitting", "simulate", "tenants"]


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
    world: World = make_world(setup, policy)
    try:
        begun = world.clock.now
        world.runner.serve(items, progress)
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
