# SPDX-License-Identifier: Apache-2.0
"""The demo with more models than memory: one run, in the process that demo_run made for it.

SmolLM2 and Llamas with random weights, of several sizes, share an arena in which the three largest have room. Prompts come at
random, most of them for few models. The baseline lets whole models leave and come back, as with a sleep mode: as many as fit
stay, and a pass begins when all layers have come. With remap a model takes the pages of layers that are needed last, and its
first pass begins while its layers load.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from remap.errors import InvalidArgument
from remap.internals import internals
from remap.sizes import show_size

from .demo_config import FITTING_MODELS, MOST_MODELS, DemoConfig, Progress
from .demo_report import RunResult
from .demo_tenants import KV_SHARE, deal, reporter, summed
from .shared_world import LARGE, ModelSpec, SharedWorld

if TYPE_CHECKING:
    from remap_serve.engine import Request, SharedEngines, SharedResult

__all__ = ["budget_of", "build_cold_world", "make_requests", "run_cold"]

# The three largest first: these are what has room, and what is asked for most.
MODELS = (
    ModelSpec("SmolLM2"),
    ModelSpec("broad", layers=8, hidden=896, intermediate=2432, heads=14, kv_heads=2),
    ModelSpec("wide", layers=10, hidden=768, intermediate=2048, heads=12, kv_heads=4),
    ModelSpec("even", layers=12, hidden=640, intermediate=1728, heads=10, kv_heads=5),
    ModelSpec("long", layers=20, hidden=448, intermediate=1216, heads=7, kv_heads=7),
    ModelSpec("middle", layers=15, hidden=512, intermediate=1536, heads=8, kv_heads=4),
    ModelSpec("deep", layers=28, hidden=384, intermediate=1024, heads=6, kv_heads=2),
    ModelSpec("small", layers=5, hidden=768, intermediate=2048, heads=12, kv_heads=4),
)
QUANTUM_S = 1.0
RATE = 1.0
"""Requests a second."""
MOST_PROMPT, MOST_NEW = 160, 12
"""Tokens. Answers of models that are seldom asked for are short, and the demo takes minutes."""
MIN_BLOCKS = 12
KEPT_PAGES = 2
"""Of a model without pages: its buffers, and the page that its layers' addresses show meanwhile."""


def build_cold_world(config: DemoConfig) -> SharedWorld:
    """The models. Raises InvalidArgument (fields tenants, or budget and least) if there are fewer models, or if the largest has
    no room beside what the others keep."""
    if not FITTING_MODELS < config.tenants <= MOST_MODELS:
        raise InvalidArgument(
            f"tenants must be from {FITTING_MODELS + 1} to {MOST_MODELS}, got {config.tenants}; nothing was loaded",
            tenants=config.tenants,
        )
    preset = replace(
        LARGE,
        name="cold",
        models=MODELS,
        dtype=config.dtype,
        page_bytes=config.page_bytes,
        block_tokens=config.block_tokens,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        decode_cost=config.decode_cost,
    )
    world = SharedWorld(preset, kv_share=KV_SHARE, tenants=config.tenants)
    world.start_blocks = dict.fromkeys(world.names, MIN_BLOCKS)
    # Twice the pages of the first blocks, since the pages that come need not stand together.
    least = max(world.weight_bytes(name) + 2 * _kv_bytes(world, name) for name in world.names)
    least += KEPT_PAGES * len(world.names) * config.page_bytes
    if config.budget_bytes and config.budget_bytes < least:
        raise InvalidArgument(
            f"a budget of {show_size(config.budget_bytes)} does not hold the largest of {config.tenants} models beside what "
            f"the others keep; nothing was served, give at least {show_size(least)}",
            budget=config.budget_bytes,
            least=least,
        )
    return world


def _kv_bytes(world: SharedWorld, name: str) -> int:
    """Pages that hold the first blocks of a model's KV cache."""
    page = world.preset.page_bytes
    return -(-MIN_BLOCKS * world.block_bytes(name) // page) * page


def budget_of(world: SharedWorld, config: DemoConfig) -> int:
    """The budget that the user gave, or what the three largest models take with a tenth of it as KV cache."""
    largest = sum(sorted(map(world.weight_bytes, world.names))[-FITTING_MODELS:])
    page = config.page_bytes
    return (config.budget_bytes or round((1 + KV_SHARE) * largest)) // page * page


def fitting(world: SharedWorld, budget: int) -> tuple[str, ...]:
    """The models that the budget holds at once, whole, each with its first blocks: those asked for most come first."""
    held: list[str] = []
    for name in world.names:
        if sum(world.weight_bytes(each) + _kv_bytes(world, each) for each in (*held, name)) <= budget:
            held.append(name)
    return tuple(held)


def make_requests(world: SharedWorld, config: DemoConfig) -> dict[str, list[Request]]:
    """The demo's shorter prompts, which come at random (Poisson); model i is asked for in proportion to 1 / (i + 1), and each at
    least once where there are enough requests."""
    from remap.cli import smollm2

    from .demo_prompts import PROMPTS
    from .demo_requests import make_requests as real_requests

    _, tokenizer, _ = smollm2.load(config.dtype)
    stop = frozenset([tokenizer.eos_token_id])
    short = [one for one in real_requests(tokenizer, len(PROMPTS), stop) if len(one.prompt) <= MOST_PROMPT]
    rng, at, asked = random.Random(0), 0.0, []
    names = rng.choices(world.names, [1 / (index + 1) for index in range(len(world.names))], k=config.requests)
    names[: len(world.names)] = world.names[: config.requests]
    rng.shuffle(names)
    for number, name in enumerate(names):
        at += rng.expovariate(RATE)
        request = short[number % len(short)]
        sampling = replace(request.sampling, max_tokens=min(MOST_NEW, request.sampling.max_tokens))
        asked.append((name, replace(request, id=f"{number:02d}", sampling=sampling, arrival_s=at)))
    return deal(world, asked)


def run_cold(kind: str, config: DemoConfig, report: Callable[[Progress], None]) -> RunResult:
    """Serve all requests once, as `demo_run.run_one` does, and add up the numbers of all models."""
    import torch

    torch.set_num_threads(config.threads)
    world = build_cold_world(config)
    return serve_cold(kind, world, make_requests(world, config), budget_of(world, config), report)


def serve_cold(
    kind: str,
    world: SharedWorld,
    requests: Mapping[str, list[Request]],
    budget: int,
    report: Callable[[Progress], None],
) -> RunResult:
    """One run in a session of its own."""
    from remap import Session
    from remap.advanced import Knobs
    from remap_serve.engine import SharedEngines

    from .whole_models import LRUModels

    ample = kind == "unconstrained"
    blocks, capacity = world.start_blocks, budget
    if ample:
        # Twice what all requests take at once, so that no model's reserve is taken from another's layers.
        tokens = world.preset.block_tokens
        blocks = {
            name: 2 * max(MIN_BLOCKS, sum(-(-one.max_kv_tokens // tokens) for one in requests[name]))
            for name in world.names
        }
        # An inactive model's layers, and its tensors outside of them, each begin on a page of their own.
        capacity = world.capacity(blocks) + len(world.names) * world.preset.page_bytes
    world.last_capacity_bytes = capacity
    make = LRUModels if kind == "baseline" else Session
    # min_idle: of equal priority, the model that is needed last gives first.
    knobs = Knobs(min_idle=0.0)
    with make(capacity, device="cpu", page_bytes=world.preset.page_bytes, config=knobs) as session:
        engines = world.attach(
            session,
            blocks,
            dict.fromkeys(world.names),
            stream=False,
            remaps=True,
            max_num_seqs=world.preset.max_num_seqs,
            pages="own" if ample else "none",
        )
        shared = SharedEngines(session, engines, quantum_s=QUANTUM_S)
        shared.run(_warm(requests))
        copied = _copied(session)
        away: list[int] = []
        on_report = reporter(requests, report)

        def on_step(shared: SharedEngines, steps: Mapping[str, Any]) -> None:
            away.append(sum(len(internals(engine.tenant).cold) for engine in shared.engines.values()))
            on_report(shared, steps)

        result = shared.run(requests, on_step)
        copied = _copied(session) - copied
    run = summed(kind, world, requests, result)
    held = fitting(world, budget)
    return replace(
        run,
        # Layers without pages, in the place of layers whose pages are KV.
        timeline=tuple(replace(point, layers_remapped=count) for point, count in zip(run.timeline, away, strict=True)),
        layers_remapped_peak=max(away, default=0),
        tenants={name: {**numbers, "weight_bytes": world.weight_bytes(name)} for name, numbers in run.tenants.items()},
        cold={
            "models": len(world.names),
            "models_fitting": len(held),
            "requests_of_others": sum(len(mine) for name, mine in requests.items() if name not in held),
            **turns(result),
            "copied_bytes": copied,
        },
    )


def turns(result: SharedResult) -> dict[str, float]:
    """Of turns that began with layers away (cold starts), and of all others: how many, the median of the time before a pass may
    begin, and of that until the first pass has ended."""
    found: dict[str, float] = {}
    for kind, cold in (("cold", True), ("warm", False)):
        mine = [one for one in result.activations if bool(one.restored_layers) is cold and one.first_pass_s is not None]
        found[f"{kind}_starts"] = len(mine)
        found[f"{kind}_begin_s"] = statistics.median(one.seconds for one in mine) if mine else 0.0
        found[f"{kind}_first_pass_s"] = statistics.median(one.first_pass_s or 0.0 for one in mine) if mine else 0.0
    return found


def _warm(requests: Mapping[str, list[Request]]) -> dict[str, list[Request]]:
    """A short request for each model, unmeasured: first passes allocate thread pools and scratch memory."""
    from remap_serve.engine import Request, SamplingParams

    return {name: [Request(f"warm-{name}", tuple(range(3, 40)), SamplingParams(max_tokens=2))] for name in requests}


def _copied(session: Any) -> int:
    return sum(one.copied_bytes for one in session.snapshot().tenants.values())
