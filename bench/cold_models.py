"""More models than memory, under the real engine: `python bench/cold_models.py [--rounds 3] [--json FILE]`.

Eight models (Llamas with random weights, of four shapes) share an arena in which three of the largest have room. Requests come at
random, most of them for few models. The sides, in turn, each in a session of its own:

    ample   memory for all models: the tokens that every side must have, and how quick it could be
    ours    whoever gets a turn takes the pages of those needed last, a few layers of one or all of it, and begins at once
    LRU     whole models: the least recently used ones leave, whole, until there is room; a pass begins when all layers have come
    swap    one model is awake at a time, as with a sleep mode that wakes it whole

Also of each side: how long an activation took until its first pass had ended.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import remap
from remap.internals import internals
from remap_serve.cli.shared_world import ModelSpec, build
from remap_serve.cli.whole_models import LRUModels, SleepingModels
from remap_serve.engine import LLMEngine, Request, SamplingParams, SharedEngines
from remap_serve.sim.results import percentile

PAGE = 64 << 10
SHAPES = (
    {"layers": 16, "hidden": 256, "intermediate": 704, "heads": 8, "kv_heads": 4},
    {"layers": 12, "hidden": 224, "intermediate": 640, "heads": 7, "kv_heads": 7},
    {"layers": 20, "hidden": 192, "intermediate": 512, "heads": 6, "kv_heads": 2},
    {"layers": 10, "hidden": 320, "intermediate": 800, "heads": 10, "kv_heads": 5},
)
SIDES = ("ample", "ours", "LRU", "swap")
BLOCK_TOKENS, MIN_BLOCKS = 16, 12


def requests_for(names: list[str], count: int, rate: float, seed: int) -> dict[str, list[Request]]:
    """Poisson arrivals; model i is asked for in proportion to 1 / (i + 1)."""
    rng, at = random.Random(seed), 0.0
    made: dict[str, list[Request]] = {name: [] for name in names}
    weights = [1 / (index + 1) for index in range(len(names))]
    for number in range(count):
        at += rng.expovariate(rate)
        (name,) = rng.choices(names, weights)
        prompt = tuple(rng.randrange(3, 2048) for _ in range(rng.randint(8, 64)))
        made[name].append(Request(f"{number}", prompt, SamplingParams(max_tokens=rng.randint(4, 12)), at))
    return made


def spec_of(model: Any, capacity: int) -> remap.KVSpec:
    """The KV cache of a model: places for all of the arena's pages."""
    config = model.config
    most = {"max_blocks": 1, "min_blocks": 1}
    shape = {"layers": config.num_hidden_layers, "kv_heads": config.num_key_value_heads, "dtype": "float32"}
    shape |= {"head_dim": config.hidden_size // config.num_attention_heads, "block_tokens": BLOCK_TOKENS}
    block = remap.KVSpec(**shape, **most).block_bytes
    return remap.KVSpec(**shape, min_blocks=MIN_BLOCKS, max_blocks=max(MIN_BLOCKS, capacity // block))


def serve(
    side: str, models: dict[str, Any], requests: dict[str, list[Request]], room: int, quantum_s: float = 0.5
) -> tuple[Any, dict[str, float]]:
    """One run of one side. room: bytes for weights and KV, unless memory is ample."""
    ample = side == "ample"
    rest = sum(-(-sum(p.numel() * 4 for p in _rest(model)) // PAGE) * PAGE for model in models.values())
    whole = sum(sum(p.numel() * 4 for p in model.parameters()) for model in models.values())
    capacity = rest + (2 * whole if ample else room)
    kind = {"ample": remap.Session, "ours": remap.Session, "LRU": LRUModels, "swap": SleepingModels}[side]
    knobs = remap.advanced.Knobs(min_idle=0.0)  # of equal priority, whoever is needed last gives first
    with kind(capacity, device="cpu", page_bytes=PAGE, config=knobs) as session:
        engines = {}
        for name, model in models.items():
            pages = "own" if ample else "none"
            tenant = session.attach(
                model, name=name, kv=spec_of(model, capacity), active=False, pages=pages, hooks=False
            )
            engines[name] = LLMEngine(model, tenant, session=session, max_num_seqs=8, max_batch_tokens=128)
        shared = SharedEngines(session, engines, quantum_s=quantum_s)
        result = shared.run(requests)
        summary = result.summary()
        first = [
            turn.first_pass_s for turn in result.activations if turn.restored_layers and turn.first_pass_s is not None
        ]
        ttft = [value for one in result.metrics.values() for value in one.ttft_s]
        return result.tokens(), {
            "ttft_p50_s": statistics.median(ttft),
            "ttft_p99_s": percentile(ttft, 0.99),
            "tokens_per_s": summary["tokens_per_s"],
            "cold_starts": len(first),
            "cold_first_pass_s": statistics.median(first) if first else 0.0,
            "copied_gb": sum(one.copied_bytes for one in session.snapshot().tenants.values()) / 1e9,
        }


def _rest(model: Any) -> list[Any]:
    layers = {id(p) for p in model.model.layers.parameters()}
    return [p for p in model.parameters() if id(p) not in layers]


def first_tokens(models: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Two models in memory for one, in turns. Seconds from activation: until all layers have come; until the first token; until
    the first token of a model that was warm; and of one that kept as many first layers as are certified to hide the others'
    loading. Each of the first two in every other activation: both see the same machine. "layers": how many were kept."""
    names = list(models)[:2]
    rest = sum(-(-sum(p.numel() * 4 for p in _rest(models[name])) // PAGE) * PAGE for name in names)
    largest = max(sum(p.numel() * 4 for p in models[name].model.layers.parameters()) for name in names)
    seen: dict[str, list[float]] = {"load": [], "cold": [], "warm": [], "kept": [], "layers": []}
    knobs = remap.advanced.Knobs(policy="lru", min_idle=0.0, reload_s=0.0)
    capacity = rest + int(1.3 * largest)
    with remap.Session(capacity, device="cpu", page_bytes=PAGE, config=knobs) as session:
        engines = {}
        for name in names:
            tenant = session.attach(
                models[name], name=name, kv=spec_of(models[name], capacity), active=False, pages="none", hooks=False
            )
            engines[name] = LLMEngine(models[name], tenant, session=session, max_num_seqs=8, max_batch_tokens=128)

        def first(name: str) -> None:
            engine = engines[name]
            engine.add_request(Request(f"{time.perf_counter_ns()}", tuple(range(3, 35)), SamplingParams(max_tokens=1)))
            while engine.unfinished:
                engine.step()

        for number in range(4 * rounds + 2):
            name = names[number % 2]
            begun = time.perf_counter()
            assert session.activate(name, alone=True).activated
            if number // 2 % 2:
                remap.advanced.settle(session)
                internals(session.tenants[name])._state.prefetcher.drain()
                seen["load"].append(time.perf_counter() - begun)
            else:
                first(name)
                seen["cold"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            first(name)
            seen["warm"].append(time.perf_counter() - begun)
            session.deactivate(name, pages="auto")
            remap.advanced.settle(session)
            tenant = session.snapshot().tenants[name]
            seen["layers"].append(tenant.layers - len(tenant.cold))
            begun = time.perf_counter()
            assert session.activate(name, alone=True).activated
            first(name)
            seen["kept"].append(time.perf_counter() - begun)
    return {kind: times[1:] for kind, times in seen.items()}  # the first ones warm the machine up


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--memory", type=int, default=3, help="of the largest models, that have room")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--quantum-s", type=float, default=0.5, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="that compute; by default all cores, and copies compete with them")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    specs = [
        ModelSpec(f"m{i}", **SHAPES[i % len(SHAPES)], vocabulary=2048, positions=512) for i in range(options.models)
    ]
    models = {spec.name: build(spec, "float32", index)[0] for index, spec in enumerate(specs)}
    sizes = [sum(p.numel() * 4 for p in model.model.layers.parameters()) for model in models.values()]
    room = options.memory * int(1.15 * max(sizes))  # layers, and KV of 15 % beside
    firsts = first_tokens(models, 4 * options.rounds)
    middle = {kind: statistics.median(times) for kind, times in firsts.items()}
    print(
        f"first token of a cold model {middle['cold'] * 1e3:.3g} ms (n = {len(firsts['cold'])}), its load alone "
        f"{middle['load'] * 1e3:.3g} ms, first token of a warm one {middle['warm'] * 1e3:.3g} ms, of one with the certified "
        f"{middle['layers']:g} layers at home {middle['kept'] * 1e3:.3g} ms: kept / warm = "
        f"{middle['kept'] / middle['warm']:.3g}, "
        f"cold / load = {middle['cold'] / middle['load']:.3g}, cold / (load + warm) = "
        f"{middle['cold'] / (middle['load'] + middle['warm']):.3g}"
    )
    seen: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    serve("ample", models, requests_for(list(models), 4, 100.0, 99), room)  # unmeasured
    for round_ in range(options.rounds):
        requests = requests_for(list(models), options.requests, options.rate, round_)
        tokens = {}
        for side in (*SIDES[round_ % len(SIDES) :], *SIDES[: round_ % len(SIDES)]):
            tokens[side], numbers = serve(side, models, requests, room, options.quantum_s)
            seen[side].append(numbers)
            print(round_, side, {key: round(value, 4) for key, value in numbers.items()}, flush=True)
        for side in SIDES:
            if tokens[side] != tokens["ample"]:
                raise SystemExit(f"tokens of {side} differ from those of ample memory in round {round_}")
    print(
        f"\n{options.models} models of {min(sizes) >> 20} to {max(sizes) >> 20} MiB, room for {options.memory}; ",
        end="",
    )
    print(f"{options.requests} requests at {options.rate}/s, turns of {options.quantum_s} s; ", end="")
    print(f"n = {options.rounds}: median (range), same tokens")
    keys = list(next(iter(seen.values()))[0])
    print("| side | " + " | ".join(keys) + " |\n|" + "---|" * (len(keys) + 1))
    for side, rounds in seen.items():
        cells = []
        for key in keys:
            values = sorted(each[key] for each in rounds)
            cells.append(f"{statistics.median(values):.3g} ({values[0]:.3g} to {values[-1]:.3g})")
        print(f"| {side} | " + " | ".join(cells) + " |")
    if options.json:
        machine = {"platform": platform.platform(), "python": platform.python_version()}
        options.json.write_text(
            json.dumps({"machine": machine, "sizes": sizes, "sides": seen, "first_tokens_s": firsts}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
