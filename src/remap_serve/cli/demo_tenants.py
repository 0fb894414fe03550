# SPDX-License-Identifier: Apache-2.0
"""The demo with several models on one arena, in turns: one run, in the process that demo_run made for it.

SmolLM2 and Llamas with random weights (shared_world.py) share the demo's prompts, which all arrive at once. The
baseline is a static partition: each model has the KV cache that the budget left it, and preempts when that is full,
while the others' KV caches and weights lie idle. With remap the model whose turn it is may use both.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from remap.errors import InvalidArgument
from remap.sizes import show_size
from remap_serve.engine.metrics import StepSample

from .demo_config import FITTING_MODELS, DemoConfig, Progress
from .demo_report import RunResult
from .shared_world import LARGE, SharedWorld, Wiring

if TYPE_CHECKING:
    from remap_serve.engine import Request, SharedEngines, SharedResult
    from remap_serve.engine.engine import StepOutput


__all__ = ["KV_SHARE", "build_world", "deal", "model_name", "reporter", "run_tenants", "summed"]

# Without a budget of the user's: KV as a share of the weights. Oneiros' combinations have 0.04 to 0.38.
KV_SHARE = 0.1
QUANTUM_S = 2.0
PROGRESS_EVERY_S = 0.1


def model_name(tenants: int) -> str:
    """The names of the models, for titles."""
    return f"SmolLM2-135M-Instruct and {tenants - 1} random Llama{'s' if tenants > 2 else ''} in turns"


def build_world(config: DemoConfig) -> SharedWorld:
    """The models, and KV caches that together fill the budget.

    The budget is config.budget_bytes; 0 means the weights and a tenth of them. Raises InvalidArgument (fields tenants,
    or budget and least) if there are fewer models, or if they do not fit.
    """
    if not 2 <= config.tenants <= FITTING_MODELS:
        raise InvalidArgument(
            f"tenants must be from 1 to {FITTING_MODELS}, got {config.tenants}; nothing was loaded",
            tenants=config.tenants,
        )
    preset = replace(
        LARGE,
        dtype=config.dtype,
        page_bytes=config.page_bytes,
        block_tokens=config.block_tokens,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        decode_cost=config.decode_cost,
    )
    world = SharedWorld(preset, kv_share=KV_SHARE, tenants=config.tenants)
    if config.budget_bytes:
        weights = sum(map(world.weight_bytes, world.names))
        # A page each may be lost to rounding.
        spare = config.budget_bytes - weights - config.tenants * config.page_bytes
        least = world.budget_bytes - round(0.8 * KV_SHARE * weights)
        if config.budget_bytes < least:
            raise InvalidArgument(
                f"a budget of {show_size(config.budget_bytes)} is too small for {config.tenants} models, their weights "
                f"take {show_size(weights)}; nothing was served, give at least {show_size(least)}",
                budget=config.budget_bytes,
                least=least,
            )
        world.start_blocks = {
            name: int(spare * world.weight_bytes(name) / weights) // world.block_bytes(name) for name in world.names
        }
    return world


def make_room(world: SharedWorld, requests: Mapping[str, list[Request]], config: DemoConfig) -> None:
    """Give each model's KV cache room for the longest of its requests, which the engine could not serve otherwise.

    Without a budget of the user's the arena grows by the missing bytes; else the models with more than they need have less.
    Raises InvalidArgument (fields budget and least) if the longest requests do not fit; nothing has changed then.
    """
    need = {
        name: max((-(-one.max_kv_tokens // world.preset.block_tokens) for one in mine), default=0)
        for name, mine in requests.items()
    }
    grown = {name: max(start, need[name]) for name, start in world.start_blocks.items()}
    if config.budget_bytes and world.capacity(grown) > config.budget_bytes:
        least = world.capacity(need)
        spare = config.budget_bytes - least
        if spare < 0:
            raise InvalidArgument(
                f"a budget of {show_size(config.budget_bytes)} has no room for the longest request of each of "
                f"{config.tenants} models; nothing was served, give at least {show_size(least)}",
                budget=config.budget_bytes,
                least=least,
            )
        # Whole spare pages, so that none is lost to rounding.
        weights = sum(map(world.weight_bytes, world.names))
        page = config.page_bytes
        for name in world.names:
            mine = int(spare * world.weight_bytes(name) / weights) // page * page
            grown[name] = need[name] + mine // world.block_bytes(name)
    world.start_blocks = grown


def make_requests(world: SharedWorld, config: DemoConfig) -> dict[str, list[Request]]:
    """The demo's prompts, given to the tenants in turn."""
    from remap.cli import smollm2

    from .demo_requests import make_requests as real_requests

    _, tokenizer, _ = smollm2.load(config.dtype)
    real = real_requests(tokenizer, config.requests, frozenset([tokenizer.eos_token_id]))
    return deal(world, zip(itertools.cycle(world.names), real, strict=False))


def deal(world: SharedWorld, requests: Iterable[tuple[str, Request]]) -> dict[str, list[Request]]:
    """Tenant -> its requests. A model with random weights reads the same ids, as far as its vocabulary has them, and stops at
    none."""
    made: dict[str, list[Request]] = {name: [] for name in world.names}
    for name, request in requests:
        mine = request
        if name != world.names[0]:
            top = world.vocabulary(name)
            prompt = tuple(token % top for token in request.prompt)
            mine = replace(request, prompt=prompt, sampling=replace(request.sampling, stop_token_ids=frozenset()))
        made[name].append(mine)
    return made


def run_tenants(kind: str, config: DemoConfig, report: Callable[[Progress], None]) -> RunResult:
    """Serve all requests once, as `demo_run.run_one` does, and add up the numbers of all tenants."""
    import torch

    torch.set_num_threads(config.threads)
    world = build_world(config)
    requests = make_requests(world, config)
    make_room(world, requests, config)
    wiring = Wiring(controller={} if kind == "remap" else None)
    result = world.serve(
        requests,
        wiring,
        "epochs",
        quantum_s=QUANTUM_S,
        ample=kind == "unconstrained",
        on_step=reporter(requests, report),
    )
    return summed(kind, world, requests, result)


def summed(kind: str, world: SharedWorld, requests: Mapping[str, list[Request]], result: SharedResult) -> RunResult:
    """One RunResult for all tenants.

    It adds numbers of blocks, although a block of one model is larger than a block of another.
    """
    numbers = result.summary()
    duration = numbers["duration_s"]
    timeline = tuple(
        StepSample(
            time_s=sample.time_s,
            kv_used_blocks=sum(one.kv_used_blocks for one in sample.tenants.values()),
            kv_usable_blocks=sum(one.kv_usable_blocks for one in sample.tenants.values()),
            layers_remapped=sum(one.layers_remapped for one in sample.tenants.values()),
            running=sum(one.running for one in sample.tenants.values()),
            waiting=sum(one.waiting for one in sample.tenants.values()),
            preemptions=sum(one.preemptions for one in sample.tenants.values()),
            tokens=0,
            step_s=0.0,
        )
        for sample in result.timeline
    )
    start = sum(one["kv_blocks_start"] for one in numbers["tenants"].values())
    return RunResult(
        kind=kind,
        wall_s=duration,
        preemptions=numbers["preemptions"],
        recomputed_tokens=numbers["recomputed_tokens"],
        ttft_s=tuple(value for one in result.metrics.values() for value in one.ttft_s),
        tbt_s=tuple(value for one in result.metrics.values() for value in one.tbt_s),
        tpot_s=tuple(value for one in result.metrics.values() for value in one.tpot_s),
        longest_gap_s=tuple(value for one in result.metrics.values() for value in one.longest_gap_s),
        capacity_bytes=world.last_capacity_bytes,
        kv_blocks_start=start,
        kv_blocks_peak=max((point.kv_usable_blocks for point in timeline), default=start),
        layers=sum(map(world.layers, world.names)),
        layers_remapped_peak=max((point.layers_remapped for point in timeline), default=0),
        stall_fraction=numbers["stall_s"] / duration if duration > 0 else 0.0,
        tokens=tuple(result.outputs[name][request.id].tokens for name in world.names for request in requests[name]),
        timeline=timeline,
        pauses=numbers["pauses"],
        tenants={
            name: {
                key: one[key] for key in ("ttft_p99_s", "tbt_p99_s", "kv_blocks_start", "kv_blocks_peak", "preemptions")
            }
            for name, one in numbers["tenants"].items()
        },
    )


def reporter(
    requests: Mapping[str, list[Request]], report: Callable[[Progress], None]
) -> Callable[[SharedEngines, Mapping[str, StepOutput]], None]:
    """As the on_step of demo_run, over all tenants."""
    limits = {(name, one.id): one.sampling.max_tokens for name, mine in requests.items() for one in mine}
    done = {"generated": 0, "finished": 0, "total": sum(limits.values())}
    last = time.perf_counter()

    def on_step(shared: SharedEngines, steps: Mapping[str, Any]) -> None:
        nonlocal last
        for name, step in steps.items():
            done["generated"] += len(step.tokens)
            done["finished"] += len(step.finished)
            done["total"] -= sum(limits[name, output.id] - len(output.tokens) for output in step.finished)
        now = time.perf_counter()
        if now - last < PROGRESS_EVERY_S and done["finished"] < len(limits):
            return
        last = now
        tenants = shared.last_sample.tenants.values()
        report(
            Progress(
                **done,
                running=sum(one.running for one in tenants),
                waiting=sum(one.waiting for one in tenants),
                kv_blocks=sum(one.kv_usable_blocks for one in tenants),
                layers_remapped=sum(one.layers_remapped for one in tenants),
                preemptions=sum(one.preemptions for one in tenants),
            )
        )

    return on_step
