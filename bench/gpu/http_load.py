"""A load of completions over HTTP on servers of several models, in streams; and turns, where one model is awake at a time.

Requests come when the load says, whether or not earlier ones are done (open loop), each on a connection of its own. One thread
reads all streams. It imports nothing that a server needs.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from .registry import Wrong

__all__ = ["HOST", "Answer", "Request", "Turns", "ask", "drive", "post", "said"]

HOST = "127.0.0.1"
READ = re.compile(r"(remap_\w+|vllm:num_preemptions_total)(?:\{.*\})? (\S+)\s*")
GREEDY = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}


@dataclass(frozen=True)
class Request:
    """at_s: when it comes, whether or not others are done. model: whose it is, from 0 on. seed: of the prompt, and the place of
    its answer in the reference."""

    at_s: float
    model: int
    prompt: int
    output: int
    seed: int


class Turns:
    """Which model is awake in sleep mode, and which requests are sent. It is told the time.

    A request of the awake model is sent at once, as long as its turn is not over. A turn is over once it has lasted for turn_s
    and a request of another model waits. From then on requests of the awake model wait, and those sent finish: sleep drops KV.
    The awake model sleeps as soon as it has none in flight and another's wait, also within its turn. Then the model wakes whose
    first request has waited for longest, and all of its requests are sent.
    """

    def __init__(self, turn_s: float) -> None:
        self.turn_s = turn_s
        self.awake: int | None = None
        self._since = 0.0
        self._waiting: defaultdict[int, deque[tuple[float, Any]]] = defaultdict(deque)
        self._flying: Counter[int] = Counter()

    def arrive(self, model: int, request: Any, now: float) -> None:
        """It waits from now on."""
        self._waiting[model].append((now, request))

    def finish(self, model: int) -> None:
        """One that was sent is answered."""
        self._flying[model] -= 1

    def woke(self, model: int, now: float) -> None:
        """Its turn begins."""
        self.awake, self._since = model, now

    def due(self, now: float) -> list[Any]:
        """What is to be sent now; it counts as in flight."""
        if self.awake is None or (self._others() and now - self._since >= self.turn_s):
            return []
        mine = [request for _, request in self._waiting[self.awake]]
        self._waiting[self.awake].clear()
        self._flying[self.awake] += len(mine)
        return mine

    def next(self) -> int | None:
        """The model that is to wake now, behind `due`; None: none is."""
        others = self._others()
        if not others or (self.awake is not None and self._flying[self.awake]):
            return None
        return min(others)[1]

    def _others(self) -> list[tuple[float, int]]:
        """Of those that wait and sleep: since when, and which."""
        return [(waiting[0][0], model) for model, waiting in self._waiting.items() if waiting and model != self.awake]


@dataclass
class Answer:
    """request's, with the time of each event of its stream, in seconds of the load."""

    request: Request
    tokens: list[int]
    times: list[float]


async def lines(port: int, path: str, body: Mapping[str, Any] | None = None) -> AsyncGenerator[bytes, None]:
    """The lines of a server's answer, head and all, as they come; a POST if there is a body. Raises Wrong if it refuses."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 22)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        status = await reader.readline()
        if b" 200 " not in status:
            raise Wrong(f"{path}: {(status + await reader.read(2000)).decode(errors='replace')}")
        while line := await reader.readline():
            yield line
    finally:
        writer.close()


async def said(port: int, path: str, body: Mapping[str, Any] | None = None) -> list[bytes]:
    return [line async for line in lines(port, path, body)]


async def ask(port: int, request: Request, vocabulary: int, begun: float) -> Answer:
    """Greedy, to the full length. Raises Wrong if other than so many tokens come, or the stream has no end."""
    draw, answer, done = random.Random(request.seed), Answer(request, [], []), False
    prompt = [draw.randrange(10, vocabulary) for _ in range(request.prompt)]  # as bench.lab.vllm.engine draws it
    body = {**GREEDY, "prompt": prompt, "max_tokens": request.output}
    async with aclosing(lines(port, "/v1/completions", body)) as stream:
        async for line in stream:  # a chunk is an event, so a line of data is never cut in two
            if line.startswith(b"data: {"):
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise Wrong(f"{request}: {event['error']}")
                new = [token for choice in event["choices"] for token in choice["token_ids"] or ()]
                if new:
                    answer.tokens += new
                    answer.times.append(time.monotonic() - begun)
            done = done or line.startswith(b"data: [DONE]")
    if not done or len(answer.tokens) != request.output:
        raise Wrong(
            f"{request}: {len(answer.tokens)} tokens came, {'and' if done else 'and not'} the end of the stream"
        )
    return answer


async def post(port: int, path: str) -> None:
    """/sleep?level=1: KV is dropped and weights go to host memory; /wake_up: the weights are on the device again."""
    await said(port, path, {})


async def drive(
    ports: Sequence[int], load: Sequence[Request], vocabulary: int, turns: Turns | None, limit_s: float
) -> tuple[list[Answer], list[float], list[dict[str, float]]]:
    """Answers; seconds of each change of the awake model, if there are turns; the peaks of each server's figures (counters: the
    last). Raises Wrong if any request fails, or if not all are answered within limit_s."""
    begun, changed = time.monotonic(), asyncio.Event()
    switches: list[float] = []
    peaks: list[dict[str, float]] = [{} for _ in ports]

    async def one(request: Request) -> Answer:
        await asyncio.sleep(begun + request.at_s - time.monotonic())
        if turns is None:
            return await ask(ports[request.model], request, vocabulary, begun)
        sent = asyncio.get_running_loop().create_future()
        turns.arrive(request.model, sent, time.monotonic())
        changed.set()
        await sent
        answer = await ask(ports[request.model], request, vocabulary, begun)
        turns.finish(request.model)
        changed.set()
        return answer

    async def switch() -> None:
        while turns is not None:
            changed.clear()
            for sent in turns.due(time.monotonic()):
                sent.set_result(None)
            model = turns.next()
            if model is None:
                await changed.wait()
                continue
            at = time.monotonic()
            if turns.awake is not None:
                await post(ports[turns.awake], "/sleep?level=1")
            await post(ports[model], "/wake_up")
            turns.woke(model, time.monotonic())
            switches.append(time.monotonic() - at)

    async def look() -> None:
        for port, peak in zip(ports, peaks):
            for found in filter(None, (READ.fullmatch(line.decode()) for line in await said(port, "/metrics"))):
                peak[found[1]] = max(peak.get(found[1], 0.0), float(found[2]))

    async def watch() -> None:
        while True:
            await look()
            await asyncio.sleep(0.5)

    answers = asyncio.gather(*map(one, load))
    beside: list[Any] = [asyncio.ensure_future(each) for each in ((switch(), watch()) if turns else (watch(),))]
    try:
        done, _ = await asyncio.wait([answers, *beside], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()  # raises what went wrong
        if answers not in done:
            raise Wrong(f"the load took longer than {limit_s:.0f} s")
        await look()
    finally:
        for each in (answers, *beside):
            each.cancel()
        await asyncio.gather(answers, *beside, return_exceptions=True)
    return answers.result(), switches, peaks
