"""A server of a tiny Llama in a process of its own, told what to do a line at a time:
`python broker_paused_serving.py DEVICE SEED`. DEVICE: "unix:PATH", or bytes of an arena of its own."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import torch
import transformers

import remap
from remap_serve.engine import LLMEngine, Request, SamplingParams

__all__ = ["PAGE", "Server", "Serving"]

PAGE = 1 << 16
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
BLOCKS = 8
TOKENS = 40


class Server:
    def __init__(self, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
        spec = remap.KVSpec(
            layers=4, kv_heads=2, head_dim=16, block_tokens=16, dtype="float32", min_blocks=BLOCKS, max_blocks=400,
            host_blocks=400,
        )  # fmt: skip
        where = {"device": device} if device.startswith("unix:") else {"capacity": int(device), "page_bytes": PAGE}
        self.session = remap.Session(**where)
        knobs = remap.advanced.Knobs(reserve_blocks=0, max_layers=0)
        self.tenant = self.session.attach(model, name="m", kv=spec, hooks=False, config=knobs)
        self.engine = LLMEngine(model, self.tenant, session=self.session)
        self.seed, self.count = seed, 0
        self.tokens: dict[str, list[int]] = {}

    def ask(self, count: int, steps: int) -> str:
        """That many requests more, and so many steps."""
        rng = random.Random(self.seed)
        for _ in range(count):
            self.count += 1
            prompt = tuple(rng.randrange(512) for _ in range(24 + 8 * (self.count % 4)))
            self.engine.add_request(Request(str(self.count), prompt, SamplingParams(max_tokens=TOKENS)))
        for _ in range(steps):
            self._note(self.engine.step())
        return "asked"

    def _note(self, step: Any) -> None:
        for output in step.finished:
            self.tokens[output.id] = list(output.tokens)

    def step(self) -> str:
        """How many requests are left."""
        self._note(self.engine.step())
        return str(self.engine.unfinished)

    def finish(self) -> str:
        while self.engine.unfinished:
            self._note(self.engine.step())
        remap.advanced.check(self.session)
        return json.dumps(self.tokens)

    def pause(self) -> None:
        self.engine.pause()
        self.session.deactivate("m")

    @property
    def live_blocks(self) -> int:
        return self.session.snapshot().tenants["m"].live_blocks

    @property
    def pages(self) -> int:
        """That are its own."""
        seen = self.session.snapshot().pages
        return seen.total - seen.outside

    def rest(self) -> None:
        """Its turn is over: as a loop that has nothing else to do."""
        self.engine.give_way()

    def resume(self) -> None:
        assert self.session.activate("m").activated
        self.engine.bring_back()

    def preempted(self) -> str:
        return f"{self.engine.metrics.preemptions} {self.engine.metrics.recomputed_tokens}"


class Serving:
    """The other side of `main`."""

    def __init__(self, device: str, seed: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, device, str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def await_ready(self) -> None:
        assert self._read() == "ready"

    def __call__(self, *line: object) -> str:
        self._say(*line)
        return self._read()

    def _say(self, *line: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, line)) + "\n")
        self.process.stdin.flush()

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait(timeout=60)


def main(device: str, seed: str) -> None:
    server = Server(device, int(seed))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        verb, *numbers = line.split()
        sys.stdout.write(getattr(server, verb)(*map(int, numbers)) + "\n")
        sys.stdout.flush()
    server.session.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
