"""What `bench.lab hybridserve` runs, and how the paper's numbers are reckoned from it. Pure description.

Lengths of Figures 12 to 15 are fixed, so their runs have no seed; ShareGPT's prompts are drawn with one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.lab.seeds import Point

from remap_serve.sim.roofline import prefill_pairs

from .batches import BLOCK_TOKENS, SHAREGPT, Batch, setup
from .engine import ENGINE_POLICIES, VirtualLoad
from .flexgen import SYSTEMS_MOVES
from .orders import VARIANTS

__all__ = [
    "CLAIMS",
    "GRIDS",
    "LOADS",
    "NOT_SIMULATED",
    "Claim",
    "Grid",
    "Settings",
    "engine_name",
    "engine_runs",
    "name_of",
    "runs",
]

ON = "RTX-4090"
MODELS = ("OPT-6.7b", "OPT-13b", "OPT-30b", "OPT-66b")
PROMPTS = (128, 512, 1024, 1536, 1920)
LARGE = "OPT-30b"
HYBRIDS = ("paper", "ours")
FOUR = ("KV", "activations", *HYBRIDS)


@dataclass(frozen=True)
class Settings:
    """seeds: of the batches with ShareGPT's prompts."""

    seeds: int = 5
    quick: bool = False

    def to_json(self) -> dict[str, int | bool]:
        """As it stands in the file of results."""
        return {"seeds": self.seeds, "quick": self.quick}


@dataclass(frozen=True)
class Grid:
    """A table: batches, and the systems that serve each."""

    title: str
    batches: tuple[Batch, ...]
    systems: tuple[str, ...]
    show: tuple[str, ...]  # of a point

    def seeds(self, settings: Settings) -> int:
        """How many seeds its batches have."""
        return settings.seeds if any(batch.prompt == SHAREGPT for batch in self.batches) else 1


_12 = tuple(Batch(ON, model, prompt) for model in MODELS for prompt in PROMPTS)
_14 = tuple(Batch(ON, LARGE, prompt, size) for size in (32, 64, 128) for prompt in PROMPTS)
_15 = tuple(Batch(ON, model, PROMPTS[-1]) for model in MODELS)
GRIDS = {
    "12": Grid("Figure 12: throughput", _12, FOUR, ("tokens_per_s", "activation_share")),
    "13": Grid(
        "Figures 13 and 14: bytes to the device while answers are made, and the share of that time in which the "
        "processor computes",
        _14,
        ("KV", *HYBRIDS),
        ("weights_gb", "kv_gb", "activations_gb", "busy"),
    ),
    "orders": Grid(
        "Figure 12's batches without what HybridServe has and our engine lacks: activations that stay, copies by mini-batch",
        _12,
        VARIANTS,
        ("tokens_per_s", "activation_share", "batches"),
    ),
    "flexgen": Grid(
        "FlexGen's schedule and kernels",
        tuple(dict.fromkeys((*_12, *_14))),
        tuple(SYSTEMS_MOVES),
        ("tokens_per_s", "busy", "mini_batches"),
    ),
    "15": Grid(
        "Figure 15: prompts of 1,920 tokens",
        _15,
        ("activations", "1:1", *HYBRIDS),
        ("tokens_per_s", "activation_share", "mini_batches"),
    ),
    "chats": Grid(
        "ShareGPT's prompts",
        tuple(Batch(ON, model, SHAREGPT) for model in MODELS),
        FOUR,
        ("tokens_per_s", "activation_share"),
    ),
    "others": Grid(
        "Where computing is scarcer",
        tuple(Batch(where, LARGE, prompt) for where in ("H100-PCIe", "GH200-96GB") for prompt in PROMPTS),
        FOUR,
        ("tokens_per_s", "activation_share", "busy"),
    ),
}

LOADS = (
    VirtualLoad("RTX-4090", "OPT-30b", 12, (128, 384), 12, 24),
    VirtualLoad("RTX-4090", "OPT-6.7b", 12, (256, 768), 12, 24),
    VirtualLoad("H100-PCIe", "OPT-30b", 12, (256, 768), 12, 24),
    VirtualLoad("GH200-96GB", "OPT-30b", 12, (256, 768), 12, 24),
)
"""What the engine itself serves in virtual time: where the link is the scarce one, two loads between, and where computing is."""

Run = tuple[Batch, str, int]
EngineRun = tuple[VirtualLoad, str, int]


def name_of(batch: Batch, system: str, seed: int) -> str:
    """Of a run, in the file of results."""
    prompt = "ShareGPT" if batch.prompt == SHAREGPT else f"{batch.prompt}"
    return f"{batch.machine}, {batch.model}, {batch.size} prompts of {prompt}: {system} #{seed}"


def runs(settings: Settings) -> dict[str, Run]:
    """All runs by name; quick: the shortest batch of each grid, and two seeds at most."""
    found: dict[str, Run] = {}
    for grid in GRIDS.values():
        for batch in grid.batches[:1] if settings.quick else grid.batches:
            for system in grid.systems:
                for seed in range(grid.seeds(settings)):
                    found[name_of(batch, system, seed)] = batch, system, seed
    return found


def engine_name(load: VirtualLoad, policy: str, seed: int) -> str:
    """Of a run of the engine, in the file of results."""
    return f"engine, {load}: {policy} #{seed}"


def engine_runs(settings: Settings) -> dict[str, EngineRun]:
    """All runs of the engine by name, seed by seed; quick: of the first load."""
    return {
        engine_name(load, policy, seed): (load, policy, seed)
        for seed in range(settings.seeds)
        for load in (LOADS[:1] if settings.quick else LOADS)
        for policy in ENGINE_POLICIES
    }


# ---------------------------------------------------------------------------------------------- the paper's numbers

At = Callable[[Batch, str], Point]
"""The point of one run. Raises KeyError where it was not run."""
Reckoned = tuple[float, ...]


def _gain(at: At, batches: Sequence[Batch], system: str, base: str) -> float:
    """The geometric mean of tokens/s by those of `base`."""
    return statistics.geometric_mean(
        at(batch, system)["tokens_per_s"] / at(batch, base)["tokens_per_s"] for batch in batches
    )


def _of_model(batches: Sequence[Batch], model: str) -> list[Batch]:
    return [batch for batch in batches if batch.model == model]


def _of_size(size: int) -> list[Batch]:
    return [batch for batch in _14 if batch.size == size]


def _traffic(at: At, system: str) -> Reckoned:
    """How many times fewer bytes come to the device than with KV alone, weights among them: the most of all prompts, with 32
    and with 64 requests. With few requests the device holds all activations, so that of these alone none come."""

    def of(batch: Batch, system: str) -> float:
        return math.fsum(at(batch, system)[key] for key in ("weights_gb", "kv_gb", "activations_gb"))

    return tuple(max(of(batch, "KV") / of(batch, system) for batch in _of_size(size)) for size in (32, 64))


def _busy(at: At, system: str, size: int) -> float:
    return statistics.fmean(at(batch, system)["busy"] for batch in _of_size(size))


def _busier(at: At, system: str, sizes: Sequence[int]) -> float:
    return statistics.fmean(
        at(batch, system)["busy"] / at(batch, "FlexGen")["busy"] for size in sizes for batch in _of_size(size)
    )


def _ratio(at: At, model: str, system: str) -> float:
    share = at(_of_model(_15, model)[0], system)["activation_share"]
    return (1.0 - share) / share if share else math.inf


def _kv_gib(size: int) -> float:
    """GiB of KV of one pass over contexts of 1,024 tokens."""
    room = setup(ON, LARGE).room
    return size * 1024 / BLOCK_TOKENS * room.layers * room.block.kv / 2**30


def _recomputing(at: At, system: str) -> Reckoned:
    """% of a layer's seconds saved by making K and V again from activations instead of from tokens; 64 x 1,024 tokens."""
    found, size, context = setup(ON, LARGE), 64, 1024
    rest = found.roofline.layer_s(0, 0, size, size * context)
    tokens = found.roofline.layer_s(size * context, size * prefill_pairs(context), 0, 0)
    made = found.costs.recompute(size * context // BLOCK_TOKENS)
    return (100.0 * (1.0 - (rest + made) / (rest + tokens)),)


@dataclass(frozen=True)
class Claim:
    """A number of the paper, by its id in paper/headlines.json, and how it is reckoned. systems: whose number it is; of
    HYBRIDS, first with the paper's algorithm and then with ours."""

    headline: str
    about: str
    of: Callable[[At, str], Reckoned]
    systems: tuple[str, ...] = HYBRIDS


def _one(of: Callable[[At, str], float]) -> Callable[[At, str], Reckoned]:
    return lambda at, system: (of(at, system),)


CLAIMS = (
    Claim("hybridserve-01", "tokens/s, FlexGen = 1, geometric mean", _one(lambda at, s: _gain(at, _12, s, "FlexGen"))),
    Claim("hybridserve-02", "the same", _one(lambda at, s: _gain(at, _12, s, "FlexGen")), ("activations",)),
    Claim("hybridserve-03", "tokens/s, activations alone = 1", _one(lambda at, s: _gain(at, _12, s, "activations"))),
    Claim(
        "hybridserve-04",
        "tokens/s, FlexGen = 1",
        _one(lambda at, s: _gain(at, _of_model(_12, MODELS[0]), s, "FlexGen")),
    ),
    Claim(
        "hybridserve-05",
        "tokens/s, FlexGen = 1",
        _one(lambda at, s: _gain(at, _of_model(_12, MODELS[3]), s, "FlexGen")),
    ),
    Claim("hybridserve-08", "GiB of KV in a pass", _one(lambda at, s: _kv_gib(16)), ("KV",)),
    Claim("hybridserve-09", "GiB of KV in a pass", _one(lambda at, s: _kv_gib(128)), ("KV",)),
    Claim("hybridserve-10", "% of the time computing", _one(lambda at, s: 100 * _busy(at, s, 128)), ("FlexGen",)),
    Claim("hybridserve-13", "% less time for a layer, 64 requests of 1,024 tokens", _recomputing, ("activations",)),
    Claim(
        "hybridserve-14",
        "times fewer bytes to the device, weights among them, 32 and 64 requests",
        _traffic,
    ),
    Claim("hybridserve-15", "times more of the time computing", _one(lambda at, s: _busier(at, s, (32, 64, 128)))),
    Claim("hybridserve-16", "times more of the time computing", _one(lambda at, s: _busier(at, s, (128,)))),
    Claim(
        "hybridserve-17",
        "% of the time computing, 32 and 128 requests",
        lambda at, s: (100 * _busy(at, s, 32), 100 * _busy(at, s, 128)),
        ("FlexGen",),
    ),
    Claim(
        "hybridserve-18",
        "% of the time computing, 32 and 128 requests",
        lambda at, s: (100 * _busy(at, s, 32), 100 * _busy(at, s, 128)),
    ),
    Claim(
        "hybridserve-19",
        "tokens/s, activations alone = 1",
        _one(lambda at, s: _gain(at, _15, s, "activations")),
        ("1:1",),
    ),
    Claim(
        "hybridserve-20",
        "tokens/s, activations alone = 1, OPT-6.7b and 66b",
        lambda at, s: tuple(_gain(at, _of_model(_15, MODELS[i]), s, "activations") for i in (0, 3)),
        ("1:1",),
    ),
    Claim(
        "hybridserve-21",
        "tokens/s, activations alone = 1, OPT-30b and 66b",
        lambda at, s: tuple(_gain(at, _of_model(_15, MODELS[i]), s, "activations") for i in (2, 3)),
    ),
    Claim(
        "hybridserve-22",
        "KV by activations, OPT-30b and 66b",
        lambda at, s: tuple(_ratio(at, MODELS[i], s) for i in (2, 3)),
    ),
    Claim(
        "hybridserve-23", "R^2 of T_kv_gen and T_load_kv", lambda at, s: setup(ON, LARGE).r_squared, ("activations",)
    ),
)
NOT_SIMULATED = {
    "hybridserve-06": "DeepSpeed-Inference is another system",
    "hybridserve-07": "DeepSpeed-Inference is another system",
    "hybridserve-11": "K and V made again from tokens, which the library does not do beside KV",
    "hybridserve-12": "K and V made again from tokens, which the library does not do beside KV",
}
"""By id in paper/headlines.json: why."""
