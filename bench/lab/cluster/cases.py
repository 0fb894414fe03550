"""What `bench.lab cluster` compares: how a cluster answers a burst, and the bursts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from bench.lab.rounds import Suite, find_in

from remap_serve.cli.shared_world import ModelSpec
from remap_serve.cluster.control import GroupPolicy as Control
from remap_serve.engine.request import Request, SamplingParams

__all__ = ["AGAIN", "COMPARED", "POLICIES", "SUITES", "Case", "Policy", "find"]


@dataclass(frozen=True)
class Policy:
    """control: of the cluster. instances: how many; 0: as the case says. ample: KV for all requests at once in each. streams:
    whether an instance may stream its own layers as well (`Session.step`). swaps: whether KV that is preempted in an instance
    alone goes to host memory, in which all requests have room."""

    about: str
    control: Control
    instances: int = 0
    ample: bool = False
    streams: bool = False
    swaps: bool = False


_ALONE = Control("alone")
_STREAMING = Policy("`all`, but instances never merge", _ALONE, streams=True, swaps=True)
ONE, AGAIN = "one", "again"
POLICIES: Mapping[str, Policy] = {
    ONE: Policy("one instance with memory for all requests at once", _ALONE, instances=1, ample=True),
    "ideal": Policy("each instance has memory for all requests at once", _ALONE, ample=True),
    "recompute": Policy("each instance alone; preempt and recompute", _ALONE),
    "swap": Policy("each instance alone; preempt and keep the KV in host memory", _ALONE, swaps=True),
    "pipeline": Policy("one pipeline of all instances, from the start", Control("pipeline")),
    "kunserve": Policy("the paper's: greedy plan, back when less than half of the KV is used", Control("kunserve")),
    "remap": Policy("exact plan, back by ski rental", Control("remap")),
    "all": Policy(
        "`remap`; each instance alone lets layers stream before it merges, and swaps what it preempts",
        Control("remap"),
        streams=True,
        swaps=True,
    ),
    "alone": _STREAMING,
    AGAIN: replace(_STREAMING, about="`alone` once more: how far two equal runs differ"),
}


@dataclass(frozen=True)
class Case:
    """`instances` copies of a model, each with KV for `kv_share` of its weights. Requests come at `rate` a second for
    `before_s`, then `burst` of them within `burst_s`, then at `rate` for `after_s`. prompts, answers: tokens, least and most.
    ttft_s, tpot_s: what a request may take, or it counts as violated."""

    name: str
    model: ModelSpec
    dtype: str
    kv_share: float
    rate: float
    before_s: float
    burst: int
    burst_s: float
    after_s: float
    prompts: tuple[int, int]
    answers: tuple[int, int]
    ttft_s: float
    tpot_s: float
    instances: int = 4
    page_bytes: int = 64 << 10
    block_tokens: int = 16
    max_num_seqs: int = 32
    max_batch_tokens: int = 192
    seed: int = 0

    def requests(self) -> list[Request]:
        """Prompts of random tokens, greedy answers of fixed lengths; equal for every policy."""
        rng = random.Random(f"cluster {self.seed}")
        times: list[float] = []
        now = 0.0
        while (now := now + rng.expovariate(self.rate)) < self.before_s:
            times.append(now)
        times += sorted(self.before_s + rng.uniform(0.0, self.burst_s) for _ in range(self.burst))
        begin = now = self.before_s + self.burst_s
        while (now := now + rng.expovariate(self.rate)) < begin + self.after_s:
            times.append(now)
        top = self.model.vocabulary if self.model.layers else 49152
        made = []
        for index, time_s in enumerate(times):
            prompt = tuple(rng.randrange(3, top) for _ in range(rng.randint(*self.prompts)))
            sampling = SamplingParams(max_tokens=rng.randint(*self.answers))
            made.append(Request(f"{index:04d}", prompt, sampling, time_s))
        return made

    def __str__(self) -> str:
        return (
            f"{self.instances} instances of {self.model.name} in {self.dtype}, each with KV of {self.kv_share:.0%} of its "
            f"weights; {self.rate:g} requests/s for {self.before_s:g} s, {self.burst} within {self.burst_s:g} s, then "
            f"{self.rate:g}/s for {self.after_s:g} s; prompts of {self.prompts[0]} to {self.prompts[1]} tokens, answers of "
            f"{self.answers[0]} to {self.answers[1]}; violated: the first token after {self.ttft_s:g} s, or TPOT above "
            f"{self.tpot_s:g} s"
        )


_LLAMA = ModelSpec("random Llama", layers=16, hidden=512, intermediate=1408, heads=8, kv_heads=8, vocabulary=4096)
FULL = Suite(
    (
        Case("SmolLM2", ModelSpec("SmolLM2"), "float32", 0.06, 0.5, 4.0, 48, 2.0, 24.0, (48, 144), (16, 48), 5.0, 0.5),
        Case("Llama", _LLAMA, "float32", 0.12, 1.0, 4.0, 64, 2.0, 20.0, (48, 144), (16, 48), 5.0, 0.5),
    ),
    rounds=3,
)
_TINY = ModelSpec("tiny", layers=6, hidden=64, intermediate=128, heads=4, kv_heads=2, vocabulary=256, positions=512)
# All arrive at once, so that memory is scarce however fast the machine is. The longest request fits into one instance.
QUICK = Suite(
    (
        Case("tiny", _TINY, "float32", 0.8, 1000.0, 0.01, 40, 0.01, 0.01, (12, 40), (60, 90), 5.0, 0.5, instances=2,
             page_bytes=4096, block_tokens=4),
    ),
    rounds=1,
)  # fmt: skip
DUEL = Suite(FULL.cases, rounds=5)
SUITES: Mapping[str, Suite[Case]] = {"full": FULL, "quick": QUICK, "duel": DUEL}
COMPARED: Mapping[str, Sequence[str]] = {
    "full": [name for name in POLICIES if name not in ("alone", AGAIN)],
    "quick": [name for name in POLICIES if name != AGAIN],
    "duel": ["alone", "all", AGAIN],
}
"""The policies of each suite."""
find = partial(find_in, SUITES)
