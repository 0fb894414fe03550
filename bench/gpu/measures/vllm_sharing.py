"""Three vLLM servers of three models in one memory, bursts in turn: `remap serve`, beside what stock vLLM offers for it.

    static parts   stock; each server has its weights and an equal part of what all weights leave
    sleep mode     stock; one server is awake at a time and has all that its weights leave, the others sleep at level 1
    remap          all on one broker, which has the same memory

The memory is the same on all sides: weights by the model's shape, and KV cache. Activations and CUDA contexts are beside it, on
all sides; so is what a sleeping server keeps. The models are copies of one random model, so one reference does for all: stock
vLLM with ample KV, once. In bfloat16 another batch may round otherwise: read remap's answers beside those of static parts.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.gpu.context import Context, Skip
from bench.gpu.http_load import HOST, Answer, Request, Turns, ask, drive, post, said
from bench.gpu.measures.vllm_burst import Case, environment, folder_of, on_the_gpu, run_side, save_model
from bench.gpu.processes import start, stop
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, count, figure

from remap_serve.sim.results import percentile

STATIC, SLEEP, REMAP = SIDES = ("static parts", "sleep mode", "remap")
SLEEP_FLAGS: Sequence[str] = ("--enable-sleep-mode",)


@dataclass(frozen=True)
class Sharing:
    """case: a server's model, its KV in static parts, and a burst. room: the weights of so many models fit. every_s: between
    bursts. turn_s: of sleep mode (`Turns`). limit_s: of a side, starts and load. flags: more ones, of all servers."""

    case: Case
    room: int
    models: int = 3
    rounds: int = 2
    every_s: float = 12.0
    turn_s: float = 5.0
    limit_s: float = 175.0
    device: str = "cuda:0"
    page_bytes: str = "auto"
    flags: tuple[str, ...] = ("--gpu-memory-utilization", "0.25")

    @property
    def weights(self) -> int:
        """Bytes of one model's."""
        return self.case.shape.params() * (4 if self.case.dtype == "float32" else 2)

    @property
    def total(self) -> int:
        """Bytes of weights and KV cache that all models have together, on every side."""
        return self.room * self.weights + self.models * self.case.kv_bytes

    def kv_bytes(self, side: str) -> int:
        """What a server is told. Raises Skip if the side cannot be: static parts that do not hold the weights."""
        if side == SLEEP:
            return self.total - self.weights
        if side == STATIC and self.room < self.models:
            raise Skip(f"{self.models} parts of {self.total} bytes do not hold weights of {self.weights} bytes each")
        return self.case.kv_bytes  # on a broker a request of the greatest length bounds it

    def arguments(self, side: str) -> list[object]:
        """Of a server: what `vllm_burst` gives an engine."""
        case, graphs = self.case, json.dumps({"cudagraph_capture_sizes": self.case.graphs})
        given: list[object] = ["--dtype", case.dtype, "--max-model-len", case.max_model_len, "--max-num-seqs", 64]
        given += ["--block-size", case.block_tokens, "--max-num-batched-tokens", 4096, "--skip-tokenizer-init"]
        given += ["--compilation-config", graphs] if case.graphs else ["--enforce-eager"]
        given += SLEEP_FLAGS if side == SLEEP else []
        return [*given, "--kv-cache-memory-bytes", self.kv_bytes(side), *self.flags]

    def load(self) -> list[Request]:
        """A burst of one model after another, the rounds with prompts of their own: no prefix cache answers a second one."""
        items, size = replace(self.case, requests=self.rounds * self.case.requests).items(), self.case.requests
        return [
            Request((turn * self.models + model) * self.every_s + at, model, int(prompt), int(output), int(seed))
            for turn in range(self.rounds)
            for model in range(self.models)
            for at, prompt, output, seed in items[turn * size : (turn + 1) * size]
        ]


class Processes:
    """A side's broker and servers, with their logs. They end with the stack."""

    def __init__(self, sharing: Sharing, side: str, model: Path, stack: ExitStack) -> None:
        self._sharing, self._side, self._model, self._stack = sharing, side, model, stack
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._logs: list[Path] = []
        self.end = time.monotonic() + sharing.limit_s
        self._more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        if side == SLEEP:
            self._more["VLLM_SERVER_DEV_MODE"] = "1"
        elif side == REMAP:
            path = self._folder / "broker"
            given = ("--capacity", sharing.total, "--page-bytes", sharing.page_bytes, "--device", sharing.device)
            process = self._start("remap", "serve", "--socket", path, *given)
            self._more["REMAP_ARENA"] = f"unix:{path}"
            self._wait(process, path.exists)

    def server(self) -> tuple[int, float]:
        """(port, seconds until it was healthy). It has answered one request, and sleeps if the side is sleep mode."""
        begun, vocabulary = time.monotonic(), self._sharing.case.shape.vocabulary
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port: int = probe.getsockname()[1]
        at = ("--model", self._model, "--host", HOST, "--port", port)
        process = self._start("vllm.entrypoints.openai.api_server", *at, *self._sharing.arguments(self._side))

        def healthy() -> bool:
            with suppress(ConnectionError):
                return bool(asyncio.run(said(port, "/health")))
            return False

        self._wait(process, healthy)
        took = time.monotonic() - begun
        asyncio.run(ask(port, Request(0.0, 0, 8, 8, 0), vocabulary, begun))
        if self._side == SLEEP:
            asyncio.run(post(port, "/sleep?level=1"))
        return port, took

    def last_words(self) -> str:
        """Of each log."""
        lasts = ((log.name, log.read_text(errors="replace").splitlines()[-6:]) for log in self._logs)
        return "; ".join(f"{name}: {' | '.join(last)[-1000:]}" for name, last in lasts)

    def _start(self, module: str, *arguments: object) -> Any:
        self._logs.append(self._folder / f"{len(self._logs)}-{module.partition('.')[0]}.log")
        around = {**environment(self._side), **self._more}
        process = start([sys.executable, "-m", module, *map(str, arguments)], around, self._logs[-1])
        self._stack.callback(stop, process)
        return process

    def _wait(self, process: Any, there: Callable[[], bool]) -> None:
        while not there():
            if process.poll() is not None or time.monotonic() > self.end:
                raise Wrong(f"it did not start on the side of {self._side}")
            time.sleep(0.2)


def reference(sharing: Sharing, model: Path) -> list[list[int]]:
    """The answer to each seed's prompt: stock vLLM with ample KV. It is kept beside the model. Raises Wrong if it preempted."""
    case = replace(sharing.case, requests=sharing.rounds * sharing.case.requests)
    kept = model / f"answers-{case.requests}-{case.output}.json"
    if not kept.exists():
        found = run_side(case, "stock", model, kv_bytes=16 * case.kv_bytes)["loads"]["burst"]
        if found["preemptions"]:
            raise Wrong(f"{found['preemptions']} preemptions with ample KV: it is no reference")
        kept.write_text(json.dumps(found["answers"]), encoding="utf-8")
    wanted: list[list[int]] = json.loads(kept.read_text(encoding="utf-8"))
    return wanted


def serve(
    title: str, sharing: Sharing, side: str, model: Path, wanted: Sequence[Sequence[int]], free: Callable[[], int]
) -> Iterator[Figure]:
    """One side's figures. free: bytes of the device. Raises Wrong if a request fails, or if most answers begin otherwise than the
    reference's."""
    before, title = free(), f"{title}, {side}"
    with ExitStack() as stack:
        processes = Processes(sharing, side, model, stack)
        try:
            ports, starts = zip(*(processes.server() for _ in range(sharing.models)))
            more: dict[str, Any] = {
                "each": starts,
                "device_bytes": before - free(),
            }  # in sleep mode: what the sleeping servers keep
            yield figure(f"{title}, start of a server", statistics.median(starts), "s", starts, **more)
            turns = Turns(sharing.turn_s) if side == SLEEP else None
            left, words = processes.end - time.monotonic(), sharing.case.shape.vocabulary
            answers, switches, peaks = asyncio.run(drive(ports, sharing.load(), words, turns, left))
        except (Wrong, OSError, asyncio.IncompleteReadError) as error:
            raise Wrong(f"{side}: {error}; last words: {processes.last_words()}") from error
    yield from figures(title, sharing, answers, peaks, wanted)
    if switches:
        yield figure(f"{title}, a change of the awake model", statistics.median(switches), "s", switches)


def figures(
    title: str, sharing: Sharing, answers: Sequence[Answer], peaks: Sequence[Mapping[str, float]], wanted: Sequence[Any]
) -> Iterator[Figure]:
    """Of all requests together; first tokens from when a request came, gaps between events of a stream."""
    first = [each.times[0] - each.request.at_s for each in answers]
    gaps = [after - before for each in answers for before, after in zip(each.times, each.times[1:])] or [0.0]
    for what, samples in (("first token", first), ("gap between tokens", gaps)):
        for name, share in (("P50", 0.5), ("P99", 0.99)):
            yield figure(f"{title}, {what}, {name}", percentile(samples, share) * 1e3, "ms", samples)
    yield figure(f"{title}, longest gap", max(gaps) * 1e3, "ms", gaps)
    tokens, last = sum(len(each.tokens) for each in answers), max(each.times[-1] for each in answers)
    memory: dict[str, Any] = {"total_bytes": sharing.total, "weights_bytes": sharing.weights, "models": sharing.models}
    yield figure(f"{title}, tokens/s", tokens / last, "tokens/s", first, requests=len(answers), **memory)
    preempted = [each["vllm:num_preemptions_total"] for each in peaks]
    yield count(f"{title}, preemptions", sum(preempted), "", n=len(peaks), each=preempted)
    if all("remap_alpha" in each for each in peaks):
        known = ("remap_alpha", "remap_usable_blocks", "remap_cold_layers")
        growth: dict[str, Any] = {name: [each[name] for each in peaks] for name in known}
        yield count(f"{title}, layers that were KV cache", max(growth["remap_alpha"]), "layers", n=len(peaks), **growth)
    pairs = [(each.tokens, list(wanted[each.request.seed])) for each in answers]
    if 2 * sum(mine[0] == theirs[0] for mine, theirs in pairs) < len(pairs):
        raise Wrong(f"{title}: most answers differ from the reference in their first token")
    alike = [next((at for at, (a, b) in enumerate(zip(*pair)) if a != b), len(pair[0])) for pair in pairs]
    same, mean = sum(mine == theirs for mine, theirs in pairs), statistics.mean(alike)
    yield count(f"{title}, answers as with ample KV", same, "requests", n=len(pairs), tokens_alike=mean)


def small_enough(ctx: Context, room: int) -> Sharing:
    """On the GPU, eager. Raises Skip if the device or the host has too little memory."""
    sharing = Sharing(on_the_gpu(ctx), room)
    device, host = sharing.total + 2 * sharing.weights, sharing.models * sharing.weights
    if ctx.free_bytes < device or ctx.host_budget < host:
        raise Skip(f"{device} bytes are wanted on the device, {host} of the host")
    return sharing


@measure("vLLM servers, the reference", needs=("torch-cuda", "vllm"), full_s=90, quick_s=None)
def answers_in_ample_memory(ctx: Context) -> Iterator[Figure]:
    """What the others compare with; each makes it itself if it is not there."""
    sharing = small_enough(ctx, 3)
    wanted = reference(sharing, save_model(sharing.case, folder_of(sharing.case), "cuda"))
    yield count("vLLM servers, answers of the reference", len(wanted), "requests", n=len(wanted))


def declared(title: str, room: int, side: str, full_s: float) -> None:
    """A measure of one side, so that a run that is cut off goes on with the next."""

    @measure(f"{title}, {side}", needs=("torch-cuda", "vllm"), full_s=full_s, quick_s=None)
    def body(ctx: Context) -> Iterator[Figure]:
        sharing = small_enough(ctx, room)
        sharing.kv_bytes(side)  # or it is skipped
        model = save_model(sharing.case, folder_of(sharing.case), "cuda")
        yield from serve(title, sharing, side, model, reference(sharing, model), lambda: ctx.free_bytes)


for _side in SIDES:
    declared("three vLLM servers", 3, _side, 170)
for _side in SIDES:
    declared("more vLLM servers than memory", 2, _side, 1 if _side == STATIC else 170)
