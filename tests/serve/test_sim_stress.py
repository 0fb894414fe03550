"""Small setups of every kind, drawn at random: nothing raises, every request is served or refused, no token and no page is lost.

A draw is a number: `served(Draw.of(random.Random(n)))` is that run again.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import remap
from remap.policy.hardware import Machine, Model, machine
from remap_serve.sim import serving
from remap_serve.sim.policies import ABLATIONS, find
from remap_serve.sim.results import PolicyResult
from remap_serve.sim.serving import SHARINGS, Setup, TenantSetup, simulate
from remap_serve.sim.workload import Item
from remap_serve.sim.worlds import World

MIB = 1 << 20
POLICIES = (
    *("recompute", "swap", "pie", "pie:1.5", "pie:4", "static", "static:1", "static:40%", "kv-pool", "kv-pool+swap"),
    *("remap", "remap:slices+eager-reversion", "remap:uncapped+dwell=1", "remap:pooled=0.1+partial=0.3"),
    *("remap:slices+uncapped", "remap:reload_s=10+min_idle=0", "remap:max_layers=1", "remap:auto+single+preempt"),
    *("remap:weights+pool+preempt", "remap:weights+uncapped+dwell=1", "remap:weights+pooled=0.1+partial=0.3"),
    *("remap:weights+slices+uncapped+pool", "remap:weights+reload_s=10+min_idle=0", "remap:weights+max_layers=1"),
    *(f"remap:{name}" for name in ABLATIONS),
    *(f"remap:weights+{name}" for name in ABLATIONS),
    "ideal",
)  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """A setup, its requests, and a policy."""

    setup: Setup
    items: tuple[Item, ...]
    policy: str

    @staticmethod
    def of(rng: random.Random, most_requests: int = 120) -> Draw:
        scheduler = rng.choice(("prefill-first", "prefill-first", "chunked"))
        policy = rng.choice([name for name in POLICIES if scheduler != "chunked" or name != "swap"])
        names = ("a", "b", "c")[: rng.choice((1, 2, 2, 3))]
        block_tokens = rng.choice((4, 8, 16, 16, 32))
        on = _machine(rng)
        # Static streaming takes more layers than there are of the smallest model, or it is refused.
        models = [_model(rng, name, 5 if policy.startswith("static") else 1) for name in names]
        tenants = tuple(
            TenantSetup(
                one.name,
                one,
                one.layers * one.layer_bytes + 64 * MIB,
                priority=rng.randint(0, 2),
                kv_blocks=max(1, rng.choice((100, 500, 2000, 2000)) * rng.randint(1, 10) // (10 * block_tokens)),
            )
            for one in models
        )
        setup = Setup(
            on,
            tenants,
            rng.choice(SHARINGS),
            scheduler,
            quantum_s=rng.choice((0.0, 1e-4, 0.05, 1.0, 100.0)),
            block_tokens=block_tokens,
            activation_bytes=0,
            scheduling=rng.choice(({}, {}, {"max_num_seqs": 1}, {"max_num_seqs": 4}, {"lookahead_blocks": 0})),
        )
        return Draw(setup, _items(rng, names, most_requests), policy)


def _machine(rng: random.Random) -> Machine:
    link = rng.choice((1e8, 2e9, 45e9))
    figures = {
        "hbm_bytes_per_s": max(100e9, 3 * link),
        "flops": rng.choice((5e11, 5e12, 1e15)),
        "h2d_bytes_per_s": link,
    }
    figures |= {
        "d2h_bytes_per_s": link * rng.choice((0.5, 1.0)),
        "iteration_gap_s": rng.choice((0.0, 1e-6, 0.001, 0.1)),
    }
    return machine("GH200-96GB").with_(name="drawn", **figures)


def _model(rng: random.Random, name: str, least: int) -> Model:
    heads = rng.choice((1, 4, 8))
    hidden = heads * 64
    return Model(
        name=name,
        layers=rng.choice([layers for layers in (1, 2, 3, 5, 8, 12) if layers >= least]),
        hidden=hidden,
        heads=heads,
        kv_heads=rng.choice((1, heads)),
        head_dim=64,
        vocab=1000,
        dtype_bytes=rng.choice((1, 2, 4)),
        layer_bytes=rng.choice((1, 3 * MIB + 5, 16 * MIB, 40 * MIB)),
        resident_bytes=rng.choice((0, 5 * MIB)),
        linear_ops=(("all", hidden, 4 * hidden),),
        head=(hidden, 1000),
        context=rng.choice((2, 64, 1024)),
    )


def _items(rng: random.Random, names: tuple[str, ...], most: int) -> tuple[Item, ...]:
    span, mean = rng.choice((0.0, 0.5, 5.0, 50.0)), rng.choice((5, 50, 300))

    def item() -> Item:
        name, at = rng.choice(names), round(rng.uniform(0.0, span), 3)
        return Item(name, at, max(1, int(rng.expovariate(1 / mean))), max(1, int(rng.expovariate(2 / mean))))

    return tuple(sorted((item() for _ in range(rng.randint(1, most))), key=lambda item: item.time_s))


def asked(setup: Setup, item: Item) -> int:
    """Tokens of its answer: prompt and answer are cut to the context."""
    (context,) = [one.model.context for one in setup.tenants if one.name == item.tenant]
    return min(item.output_tokens, max(1, context - min(item.prompt_tokens, max(1, context - 1))))


@contextmanager
def watched(patch: pytest.MonkeyPatch) -> Iterator[list[World]]:
    """All worlds made within are looked at after their run, before they close."""
    worlds: list[World] = []
    make, close = serving.make_world, World.close

    def made(setup: Setup, policy: Any) -> World:
        worlds.append(make(setup, policy))
        return worlds[-1]

    def checked(world: World) -> None:
        try:
            if sys.exc_info()[0] is not None:
                return  # it did not end: that is what is told
            if world.session is not None:
                remap.advanced.check(world.session)
            for engine in world.engines.values():
                kv, scheduler = engine.tenant.kv, engine.scheduler
                assert kv.live_blocks == scheduler.used_blocks == 0, (kv.live_blocks, scheduler.used_blocks)
                assert not scheduler.running and not scheduler.waiting and not getattr(scheduler, "swapped", ())
        finally:
            close(world)

    patch.setattr(serving, "make_world", made)
    patch.setattr(World, "close", checked)
    yield worlds


def served(draw: Draw) -> PolicyResult:
    """Run it, and check what holds of every run."""
    setup, items = draw.setup, draw.items
    seen: list[tuple[int, int]] = []
    found = simulate(setup, items, draw.policy, lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert math.isfinite(found.virtual_s) and found.virtual_s >= 0
    for tenant, one in zip(found.tenants, setup.tenants, strict=True):
        mine = [item for item in items if item.tenant == one.name]
        assert tenant.requests == len(mine) and len(tenant.ttft_s) == tenant.finished <= len(mine)
        most = sum(asked(setup, item) for item in mine)
        # One that was given up for want of memory may have had its first tokens.
        firsts = tenant.output_tokens - sum(count for _, count in tenant.tbt)
        assert tenant.finished <= firsts <= len(mine) and tenant.output_tokens <= most
        if tenant.finished == len(mine):
            assert tenant.output_tokens == most
        assert all(ttft > 0 for ttft in tenant.ttft_s) and all(gap > 0 for gap, _ in tenant.tbt)
        assert tenant.compute_s >= 0 and tenant.stall_s >= -1e-12
        assert tenant.kv_blocks_peak >= tenant.kv_blocks_start
        assert not (find(draw.policy).kind == "swap" and tenant.recomputed_tokens)
        last = [sample for sample in found.timeline if sample.tenant == one.name][-1:]
        for sample in last:
            assert sample.preemptions == tenant.preemptions
            assert sample.stall_s == pytest.approx(tenant.stall_s, rel=1e-9, abs=1e-12)
            assert (sample.running, sample.waiting, sample.kv_used_blocks) == (0, 0, 0)
    return found


@pytest.mark.slow
@given(number=st.integers(0, 2**32))
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_is_drawn_is_served(number: int) -> None:
    with pytest.MonkeyPatch.context() as patch, watched(patch) as worlds:
        served(Draw.of(random.Random(number)))
        assert worlds
