"""A cluster of two vLLM engines, of which processes are killed while they serve: python cluster.py MODEL OUT.json

MODEL: a folder with a tokenizer of bytes. OUT: {"calm", "instance killed", "engine killed": {"answers": {name: {"tokens",
"reason", "noted", "prompt"}}, "restarts": how often requests were sent again}, "refused": {request: [error, text]}, "offers":
bytes by which each KV cache may grow, "groups": instances of each, "left": processes of engines that live when all has ended}.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from remap.errors import Error
from remap_serve.cluster.control import Control, GroupPolicy
from remap_serve.cluster.front import Front
from remap_serve.cluster.ray_cluster import RayInstances
from remap_serve.cluster.transport import ASSUMED
from remap_serve.cluster.vllm_served import vllm_model
from remap_serve.engine.request import Request, SamplingParams

ARGUMENTS = {
    "max_model_len": 512,
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": 32,
    "enable_prefix_caching": False,
}
NAMES = ("i0", "i1")
SCHEMA = json.dumps(
    {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs": {"logprobs": 2, "prompt_logprobs": True},
    "temperature": {"temperature": 0.9, "top_p": 0.95},
    "top_k": {"temperature": 1.1, "top_k": 20, "min_p": 0.01},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    "bias": {"logit_bias": ((7, 4.0), (9, -100.0)), "temperature": 0.5},
    "json": {"json_schema": SCHEMA, "stop_token_ids": frozenset({256}), "temperature": 1.0},
}


def requests(name: str) -> list[Request]:
    """Two of each kind, the same ones for each name."""
    rng = random.Random(5)
    made = []
    for number, (kind, more) in enumerate(2 * list(KINDS.items())):
        prompt = tuple(rng.randrange(1, 250) for _ in range(rng.randint(10, 40)))
        sampling = SamplingParams(max_tokens=96, seed=number, **more)
        made.append(Request(f"{name}/{kind} {number // len(KINDS)}", prompt, sampling))
    return made


async def answer(front: Front[Request], request: Request, delivered: list[int]) -> tuple[str, dict[str, Any]]:
    tokens, noted, prompt, reason = list[int](), [], 0, None
    async for part in front.generate(request.id, request):
        assert part.first == len(tokens)
        tokens += part.tokens
        noted += part.noted
        prompt += len(part.prompt)
        delivered[0] += len(part.tokens)
        reason = part.finish_reason
    found = {"tokens": tokens, "reason": reason, "noted": [(each.token, len(each.top)) for each in noted]}
    return request.id.partition("/")[2], found | {"prompt": prompt}


async def burst(front: Front[Request], name: str, victim: tuple[str, int] | None = None) -> dict[str, Any]:
    """The answers, and how often requests were submitted again. victim: an instance, and a process of it that is killed while it
    has requests that have tokens."""
    delivered, before = [0], front.restarts
    tasks = [asyncio.create_task(answer(front, request, delivered)) for request in requests(name)]
    if victim is not None:
        while delivered[0] < 120 or front.service.busy(victim[0]) < 2:
            assert not all(task.done() for task in tasks), "all had ended before a process was killed"
            await asyncio.sleep(0.005)
        os.kill(victim[1], signal.SIGKILL)
    found = dict(await asyncio.gather(*tasks))
    while not all(front.up.values()):
        await asyncio.sleep(0.1)
    return {"answers": found, "restarts": front.restarts - before}


def engines() -> list[int]:
    """Processes of vLLM's cores of this user that descend from this process, or from none."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if "VLLM::" in line]


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    return [int(each) for each in found.split()]


async def serve(instances: RayInstances, said: dict[str, Any]) -> None:
    first = instances.connections[0]
    described = await first.call("describe")
    control = Control(described.model, ASSUMED, GroupPolicy("remap"), 30.0)
    front = Front[Request](control, instances.connections, lambda request: len(request.prompt))
    await front.start(patience_s=300.0)
    assert all(front.up.values()), front.rejected

    pids = {each.name: (await each.call("describe")).pid for each in instances.connections}
    (core,) = set(children(pids["i1"])) & set(engines())
    said["calm"] = await burst(front, "calm")
    said["offers"] = [sum(offer.nbytes for offer in report.offers) for report in front.reports.values()]
    said["instance killed"] = await burst(front, "one", ("i0", pids["i0"]))
    said["engine killed"] = await burst(front, "two", ("i1", core))
    for what, request in (
        ("long", Request("long", (1,) * 100, SamplingParams(max_tokens=500))),
        ("token", Request("token", (1, 512), SamplingParams(max_tokens=2))),
        ("schema", Request("schema", (1,), SamplingParams(max_tokens=2, json_schema='{"type": "nothing"}'))),
    ):
        try:
            await answer(front, request, [0])
        except Error as error:
            said.setdefault("refused", {})[what] = [type(error).__name__, str(error)]
    said["groups"] = [len(view.stages) for view in front.groups]
    await front.close()


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    model, out = sys.argv[1], Path(sys.argv[2])
    before, said = set(engines()), dict[str, Any]()
    served, arguments = vllm_model(model, model, ARGUMENTS)
    assert served.grammars
    common = {"model": model, "memory": None, "threads": 1, "max_num_seqs": 8, "max_batch_tokens": 128}
    instances = RayInstances("remap_serve.cluster.vllm_engine:make", NAMES, common | arguments, {"CPU": 1})
    try:
        asyncio.run(serve(instances, said))
    finally:
        instances.close()
    end_s = time.monotonic() + 60
    while set(engines()) - before and time.monotonic() < end_s:
        time.sleep(0.5)
    said["left"] = len(set(engines()) - before)
    out.write_text(json.dumps(said))


if __name__ == "__main__":
    main()
