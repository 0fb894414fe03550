"""One server: `python -m bench.processes.server CONFIG` loads the model, says "ready", waits for a line with the time at which
all of them begin (time.monotonic, one clock for all processes), serves its requests and prints what came of them as JSON."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remap_serve.engine import Request

__all__ = ["BLOCK_TOKENS", "DTYPE", "SIDES", "Config", "main", "requests_of", "spec_of"]

DTYPE, BLOCK_TOKENS = "float32", 16
SIDES = ("static", "static, remap", "broker")
"""Each server its part of the memory, and whoever does not fit is recomputed; the same with `remap` inside each of them; and all
pages the broker's."""
WARM_TOKENS = 4


@dataclass(frozen=True)
class Config:
    """index: which server. arena: "unix:PATH", or bytes of its own. blocks: of KV at the beginning. bursts: seconds at which
    `burst` requests arrive at once; one more comes every `every_s`. tokens: of prompts and of answers, at least and at most."""

    side: str
    index: int
    arena: str | int
    page_bytes: int
    blocks: int
    bursts: tuple[float, ...]
    burst: int
    every_s: float
    seconds: float
    tokens: tuple[int, int]
    running: int
    model: Any = None

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


def requests_of(config: Config, vocabulary: int) -> list[Request]:
    """The same in every run."""
    from remap_serve.engine import Request, SamplingParams

    rng = random.Random(config.index)
    arrivals = [at for at in config.bursts for _ in range(config.burst)]
    count = int(config.seconds / config.every_s)
    arrivals += [config.every_s * (number + rng.random()) for number in range(count)]
    least, most = config.tokens
    made = []
    for number, at in enumerate(sorted(arrivals)):
        prompt = tuple(rng.randrange(100, vocabulary) for _ in range(rng.randint(least, most)))
        made.append(
            Request(f"{config.index}-{number}", prompt, SamplingParams(max_tokens=rng.randint(least, most)), at)
        )
    return made


def spec_of(shape: Any, **more: int) -> Any:
    """The KV cache of a model with this transformers config."""
    import remap

    return remap.KVSpec(
        layers=shape.num_hidden_layers,
        kv_heads=shape.num_key_value_heads,
        head_dim=shape.hidden_size // shape.num_attention_heads,
        block_tokens=BLOCK_TOKENS,
        dtype=DTYPE,
        **more,
    )


def load(config: Config) -> tuple[Any, Any]:
    """(model, its weights' folder): SmolLM2-135M, or a tiny one of `config.model` with random weights."""
    import torch
    import transformers

    from remap.cli import smollm2

    torch.set_num_threads(1)
    if config.model is None:
        model, _, folder = smollm2.load(DTYPE)
        return model, folder
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.model)).eval(), None


def serve(config: Config, wait: Any) -> dict[str, Any]:
    """Everything. wait(): says that the server is ready, and returns the time at which all begin."""
    import remap
    from remap_serve.engine import LLMEngine, Request, SamplingParams

    model, folder = load(config)
    shape = model.config
    name = f"server-{config.index}"
    shared = config.side == "broker"
    where: dict[str, Any] = {"device": config.arena} if shared else {
        "capacity": config.arena, "device": "cpu", "page_bytes": config.page_bytes
    }  # fmt: skip
    with remap.Session(**where) as session:
        block_bytes = spec_of(shape, min_blocks=1, max_blocks=1).block_bytes
        # Where pages are everybody's, a quarter is a server's own, as in the simulator's pool.
        own = max(1, config.blocks // 4) if shared else config.blocks
        spec = spec_of(shape, min_blocks=own, max_blocks=session.capacity_bytes // block_bytes)
        tenant = session.attach(model, name=name, kv=spec, weights=folder, hooks=False)
        engine = LLMEngine(
            model, tenant, session=None if config.side == "static" else session, max_num_seqs=config.running
        )
        warm = [
            Request(f"warm-{i}", tuple(range(100 + i, 140)), SamplingParams(max_tokens=WARM_TOKENS)) for i in range(2)
        ]
        engine.run(warm)
        requests = requests_of(config, shape.vocab_size)
        begin = wait()
        while (left := begin - time.monotonic()) > 0:
            time.sleep(min(left, 0.01))
        peaks = {"blocks": 0, "away": 0}

        def on_step(engine: LLMEngine, step: object) -> None:
            seen = session.snapshot().tenants[name]
            peaks["blocks"] = max(peaks["blocks"], seen.usable_blocks)
            peaks["away"] = max(peaks["away"], len(seen.streamed))

        result = engine.run(requests, on_step=on_step)
        remap.advanced.check(session)
        metrics = result.metrics
        return {
            "ttft_s": list(metrics.ttft_s),
            "tbt_s": list(metrics.tbt_s),
            "seconds": metrics.duration_s,
            "tokens": [list(result.outputs[request.id].tokens) for request in requests],
            "preemptions": metrics.preemptions,
            "recomputed": metrics.recomputed_tokens,
            "blocks_peak": peaks["blocks"],
            "layers_away_peak": peaks["away"],
        }


def main(arguments: Sequence[str]) -> None:
    """CONFIG as JSON."""
    given = json.loads(arguments[0])
    config = Config(**{**given, "bursts": tuple(given["bursts"]), "tokens": tuple(given["tokens"])})
    out = sys.stdout

    def wait() -> float:
        out.write("ready\n")
        out.flush()
        return float(sys.stdin.readline())

    out.write(json.dumps(serve(config, wait)) + "\n")
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
