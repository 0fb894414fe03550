"""What `bench.lab real` compares: the policies, and the loads that each of them serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.lab.rounds import Suite, find_in

from remap_serve.cli.demo_config import default_config
from remap_serve.cli.shared_world import LARGE, SMALL, ModelSpec, Preset, Wiring
from remap_serve.sim.results import Targets
from remap_serve.sim.workload import Arrivals

from .pie import Pie

__all__ = ["FULL", "IDEAL", "IN_TURNS", "POLICIES", "QUICK", "SUITES", "Case", "Policy", "find"]


@dataclass(frozen=True)
class Policy:
    """What is done when KV does not fit. ample: memory for all requests at once, so nothing is done. prepare: makes an engine
    of the library's into the policy's; what it returns has the bytes that it copied out beside the library (`kv_out`)."""

    about: str
    wiring: Wiring
    ample: bool = False
    prepare: Callable[[Any], Any] | None = None


# A policy is one entry here. Each round runs them in this order; all are compared with the tokens of the first.
IDEAL = "ideal"
POLICIES: Mapping[str, Policy] = {
    IDEAL: Policy("memory for all requests at once", Wiring(), ample=True),
    "recompute": Policy("preempt and recompute", Wiring()),
    "swap": Policy("preempted requests keep their KV in host memory", Wiring(swap=True)),
    "pie": Policy(
        "KV beyond the device's is copied in and out in every pass", Wiring(swap=True, stream=True), prepare=Pie
    ),
    # A session, so that whoever has the turn has the link; no layer leaves.
    "stream": Policy(
        "KV of running requests streams from host memory",
        Wiring({"max_layers": 0, "lends": False}, swap=True, stream=True),
    ),
    "kv-pool+swap": Policy(
        "unused KV is everybody's, preempted requests keep theirs in host memory, weights stay",
        Wiring({"max_layers": 0}),
    ),
    "weights": Policy("the controller remaps weights, and nothing else", Wiring({}, own=1.0, swap=False)),
    "remap": Policy("the default: unused KV, KV in host memory, weights", Wiring({})),
    "all": Policy("the controller, KV in host memory, and KV that streams", Wiring({}, swap=True, stream=True)),
}


@dataclass(frozen=True)
class Case:
    """One load: models on one arena, in turns of quantum_s or all at once (mode), and when and how long their requests are.

    kv_share: see `World`. rate: requests a second of all models together, each has its share. cv: of the gaps between
    one model's requests. lengths: factor on ShareGPT's. targets: what goodput counts by.
    """

    name: str
    preset: Preset
    kv_share: float
    rate: float
    seconds: float
    targets: Targets
    cv: float = 2.0
    lengths: float = 0.25
    mode: str = "temporal"
    quantum_s: float = 1.0
    seed: int = 0

    @property
    def arrivals(self) -> Arrivals:
        """Of each model."""
        return Arrivals(self.rate / len(self.preset.models), self.cv)

    def __str__(self) -> str:
        models = [spec.name for spec in self.preset.models]
        of = f"of {self.quantum_s:g} s"
        turns = {"temporal": f" in turns {of}", "epochs": f" in epochs {of}"}.get(self.mode, " at once")
        turns *= len(models) > 1
        return (
            f"{' and '.join(models) if len(models) < 3 else ', '.join(models)}{turns} in {self.preset.dtype}, KV of "
            f"{self.kv_share:.0%} of the weights, {self.rate:g} requests/s for {self.seconds:g} s (cv {self.cv:g}), "
            f"lengths {self.lengths:g} times ShareGPT's; goodput: the first token within {self.targets.ttft_s:g} s and "
            f"TPOT of at most {self.targets.tpot_s:g} s"
        )


SMOLLM2 = ModelSpec("SmolLM2")
OPT = ModelSpec("OPT", layers=12, hidden=768, intermediate=3072, heads=12, vocabulary=50272, family="opt")
WIDE = next(spec for spec in LARGE.models if spec.name == "wide")


# Small: a layer_major cache, which streaming needs, grows by a page for each layer's keys and one for its values.
_PAGE, _SMALL_PAGE = 64 << 10, 4 << 10


def _large(*models: ModelSpec) -> Preset:
    return Preset(
        "large", models, dtype=default_config().dtype, page_bytes=_PAGE, max_num_seqs=24, max_batch_tokens=256
    )


def _small(*models: ModelSpec) -> Preset:
    return Preset("small", models, dtype=SMALL.dtype, page_bytes=_SMALL_PAGE, block_tokens=8)


_LATE = Targets(ttft_s=5.0, tpot_s=0.25)
# Of three models, each computes a third of the time.
_LATE_IN_TURNS = Targets(ttft_s=5.0, tpot_s=0.75)
FULL = Suite(
    (
        Case("SmolLM2", _large(SMOLLM2), 0.08, rate=2.0, seconds=16.0, targets=_LATE),
        Case("OPT", _large(OPT), 0.1, rate=2.0, seconds=16.0, targets=_LATE),
        Case("three in turns", _large(SMOLLM2, OPT, WIDE), 0.06, rate=2.4, seconds=16.0, targets=_LATE_IN_TURNS),
        Case("three at once", _large(SMOLLM2, OPT, WIDE), 0.06, 2.4, 16.0, _LATE_IN_TURNS, mode="spatial"),
    ),
    rounds=3,
)
TINY = ModelSpec("opt", layers=8, hidden=128, intermediate=512, heads=4, vocabulary=512, positions=512, family="opt")
_THREE = _small(*SMALL.models[:2], TINY)
# All arrive within milliseconds: memory is scarce however fast the machine is.
QUICK = Suite(
    (
        Case("one", _small(TINY), 0.1, 1000.0, 0.04, Targets(), lengths=0.1),
        Case("three in turns", _THREE, 0.1, 1500.0, 0.04, Targets(), lengths=0.1, quantum_s=0.1),
    ),
    rounds=1,
)
# The same load and memory under both rules.
TURNS = Suite((FULL.cases[2], replace(FULL.cases[2], name="three in epochs", mode="epochs")), rounds=3)
SUITES: Mapping[str, Suite[Case]] = {"full": FULL, "quick": QUICK, "turns": TURNS}
IN_TURNS = (IDEAL, "recompute", "kv-pool+swap", "remap")
"""The policies of `TURNS`."""

find = partial(find_in, SUITES)
