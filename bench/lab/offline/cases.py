"""What `bench.lab offline` compares: how an offline batch keeps its cache, and the loads."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from bench.lab.rounds import Suite, find_in

from remap_serve.cli.shared_world import ModelSpec
from remap_serve.engine.request import Request, SamplingParams

__all__ = ["AMPLE", "FULL", "GROUPED", "POLICIES", "QUICK", "SUITES", "Case", "find"]

AMPLE = "ample"
# Each round runs them in this order; all are compared with the tokens of the first. But for it, a policy is the name of one of
# the options of `remap_serve.policy.offline.choose`.
POLICIES: Mapping[str, str] = {
    AMPLE: "the usual engine with memory for all weights and all requests at once",
    "KV": "keys and values alone, as FlexGen keeps them",
    "activations": "activations alone",
    "Algorithm 1": "the ratio of HybridServe's Algorithm 1, from the same measured times",
    "best": "what `ThroughputEngine` chooses",
}


@dataclass(frozen=True)
class Case:
    """A model and its requests. prompts: least and most tokens; answer: tokens of each. memory: of the session, a share of the
    weights. host: host memory for the cache, a share of the KV of all requests. link: bytes a second of a slower link than the
    machine's (`SlowLink`); 0: the machine's own."""

    name: str
    model: ModelSpec
    prompts: tuple[int, int]
    answer: int
    count: int
    memory: float
    host: float = 1.0
    link: float = 0.0
    dtype: str = "bfloat16"
    block_tokens: int = 16
    batch_tokens: int = 256
    seed: int = 0

    def requests(self) -> list[Request]:
        """Prompts of random tokens, greedy answers of a fixed length."""
        rng = random.Random(f"offline {self.seed}")
        made = []
        for index in range(self.count):
            prompt = tuple(rng.randrange(3, self.model.vocabulary) for _ in range(rng.randint(*self.prompts)))
            made.append(Request(f"r{index}", prompt, SamplingParams(max_tokens=self.answer)))
        return made

    def __str__(self) -> str:
        low, high = self.prompts
        return (
            f"{self.model.layers} layers of {self.model.hidden} in {self.dtype}, memory for {self.memory:.0%} of the weights, "
            f"{self.count} requests of {low} to {high} tokens, answers of {self.answer}, host memory for {self.host:.0%} of "
            f"their KV{f'; copies in take as long as over a link of {self.link / 1e6:g} MB/s' if self.link else ''}"
        )


OPT = ModelSpec("OPT", layers=12, hidden=512, intermediate=2048, heads=8, vocabulary=2048, family="opt")
LLAMA = ModelSpec("Llama", layers=12, hidden=512, intermediate=2048, heads=8, kv_heads=8, vocabulary=2048)
GROUPED = ModelSpec("grouped", layers=4, hidden=128, intermediate=256, heads=8, kv_heads=2, vocabulary=512)
_SLOW = 400e6
_MEMORY = 0.95
_SHORT, _LONG = ((32, 96), 32, 12), ((128, 320), 16, 12)


def _cases(model: ModelSpec) -> tuple[Case, ...]:
    return (
        Case(f"{model.name}, short", model, *_SHORT, _MEMORY),
        Case(f"{model.name}, long", model, *_LONG, _MEMORY),
        Case(f"{model.name}, long, slow link", model, *_LONG, _MEMORY, link=_SLOW),
    )


_SCARCE = Case("OPT, short, scarce host memory", OPT, *_SHORT, _MEMORY, host=0.3)
FULL = Suite((*_cases(OPT), _SCARCE, *_cases(LLAMA)), rounds=3)
_TINY = ModelSpec("OPT", layers=10, hidden=64, intermediate=256, heads=4, vocabulary=512, positions=512, family="opt")
_TINY_LLAMA = replace(_TINY, name="Llama", kv_heads=4, family="llama")
QUICK = Suite(
    (
        Case("OPT", _TINY, (8, 60), 8, 6, 0.9, 0.5, dtype="float32", block_tokens=4, batch_tokens=64),
        Case("Llama", _TINY_LLAMA, (8, 60), 8, 6, 0.9, link=20e6, dtype="float32", block_tokens=4, batch_tokens=64),
    ),
    rounds=1,
)
SUITES: Mapping[str, Suite[Case]] = {"full": FULL, "quick": QUICK}
find = partial(find_in, SUITES)
