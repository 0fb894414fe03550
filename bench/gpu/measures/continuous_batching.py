"""transformers' continuous batching at fixed rates, as it comes and over an attached model: goodput, first token, time a token.

Both sides have the same memory for weights and KV cache, the same block size, and serve the same requests, which arrive at the
same moments. The adapter needs transformers' asynchronous batches, CUDA graphs and prefix sharing to be off, so "stock" has them
off too; "stock, its own settings" leaves them to transformers, in the same memory.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

from bench.gpu.context import Context, Skip
from bench.gpu.models import LLAMA_3_8B, POSITIONS, ModelShape, make_model
from bench.gpu.registry import Wrong, measure, missing
from bench.gpu.results import Figure, count, figure
from bench.gpu.tenants import PAGE

import remap
from remap_serve.sim.results import percentile

BLOCK_TOKENS = 16
FIRST_S, TOKEN_S = 1.0, 0.1  # a request is good if its first token and the mean of the others came within these
LIMIT = 2.0  # times the span; what is unfinished then is cancelled


@dataclass(frozen=True)
class Traffic:
    """Requests come for `span_s`, at random moments of a fixed seed; lengths are drawn evenly."""

    span_s: float
    prompt: tuple[int, int]
    output: tuple[int, int]


@dataclass(frozen=True)
class Case:
    """kv_tokens: what fits beside the weights before anything is remapped."""

    shape: ModelShape
    dtype: str
    kv_tokens: int
    batch_tokens: int
    rates: tuple[float, ...]
    traffic: Traffic

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 4 if self.dtype == "float32" else 2

    @property
    def kv_pages(self) -> int:
        blocks = -(-self.kv_tokens // BLOCK_TOKENS)
        return -(-blocks * self.shape.block_bytes(BLOCK_TOKENS, self.itemsize) // PAGE)

    @property
    def blocks(self) -> int:
        """That those pages hold."""
        return self.kv_pages * PAGE // self.shape.block_bytes(BLOCK_TOKENS, self.itemsize)


@dataclass(frozen=True)
class Request:
    """at_s: when it arrives."""

    name: str
    at_s: float
    prompt: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class Run:
    """What one side gave at one rate. Seconds of each finished request; late_s: how long those that have no token had waited."""

    first_s: list[float]
    token_s: list[float]
    late_s: list[float]
    answers: dict[str, tuple[int, ...]]
    good: int
    unfinished: int
    seconds: float


def make_requests(case: Case, rate: float) -> list[Request]:
    """The same for every side."""
    rng, traffic = random.Random(7), case.traffic
    made: list[Request] = []
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        if at > traffic.span_s and made:
            return made
        prompt = tuple(rng.randrange(4, case.shape.vocabulary) for _ in range(rng.randint(*traffic.prompt)))
        made.append(Request(f"r{len(made)}", at, prompt, rng.randint(*traffic.output)))


def serve(
    manager: Any, requests: Sequence[Request], limit_s: float, clock: Callable[[], float] = time.perf_counter
) -> Run:
    """Each request from its arrival on, until all are finished or the time is over. clock: that of transformers' timestamps."""
    waiting = list(requests)
    arrived: dict[str, float] = {}
    done: dict[str, Any] = {}
    begun = clock()
    while len(done) < len(requests) and (now := clock() - begun) < limit_s:
        while waiting and waiting[0].at_s <= now:
            each = waiting.pop(0)
            arrived[each.name] = begun + each.at_s
            manager.add_request(
                list(each.prompt), request_id=each.name, max_new_tokens=each.tokens, record_timestamps=True, eos_token_id=-1
            )  # fmt: skip
        output = manager.get_result(timeout=0.002)
        if output is not None and output.is_finished():
            if output.error is not None:
                raise Wrong(f"request {output.request_id}: {output.error}")
            done[output.request_id] = output
        elif not manager.is_running():
            raise Wrong("transformers' serving thread ended")
    ended = clock()
    for name in arrived:
        if name not in done:
            manager.cancel_request(name)
    wanted = {each.name: each for each in requests}
    first, token, good = [], [], 0
    for name, output in done.items():
        if len(output.generated_tokens) != wanted[name].tokens:
            raise Wrong(
                f"request {name}: {len(output.generated_tokens)} tokens where {wanted[name].tokens} were asked for"
            )
        times = output.timestamps
        first.append(times[0] - arrived[name])
        token.append((times[-1] - times[0]) / max(1, len(times) - 1))
        good += first[-1] <= FIRST_S and token[-1] <= TOKEN_S
    late = [ended - since for name, since in arrived.items() if name not in done]
    answers = {name: tuple(output.generated_tokens) for name, output in done.items()}
    return Run(first, token, late, answers, good, len(requests) - len(done), ended - begun)


class Sides:
    """A manager of each side on demand; the models stay. A stack closes what is left."""

    def __init__(self, case: Case, device: str, stack: ExitStack) -> None:
        from remap.adapters.transformers import attach
        from remap.model.footprint import footprint

        self.case = case
        ours = make_model(case.shape, device, case.dtype)
        self.capacity = (footprint(ours, None).pages(PAGE) + case.kv_pages) * PAGE
        try:
            attached = attach(
                ours,
                self.capacity,
                "cuda:0",
                block_tokens=BLOCK_TOKENS,
                min_tokens=max(0, (case.blocks - 2) * BLOCK_TOKENS),
                config=remap.advanced.Knobs(),  # here requests wait for blocks: nothing has to be slowed down for them
            )
        except remap.InvalidState as refused:
            if "version" in refused.fields:  # of transformers
                raise Skip(str(refused)) from refused
            raise
        self.attached = stack.enter_context(attached)
        if device == "cuda":
            import torch

            torch.cuda.empty_cache()  # the tensors that the model came with
        self.ours, self.stock = ours, make_model(case.shape, device, case.dtype)
        self.copies = 0
        stack.callback(self.forget)

    def forget(self) -> None:
        """The models go."""
        del self.ours, self.stock

    def manager(self, side: str) -> AbstractContextManager[Any]:
        """Serving with that side's model, in a thread of transformers'."""
        import transformers

        case = self.case
        asked = transformers.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=POSITIONS
        )
        if side == "remap":
            model, how = self.ours, self.attached.continuous_batching(max_batch_tokens=case.batch_tokens)
        else:
            same = {} if side == "stock, its own settings" else {
                "allow_block_sharing": False, "use_async_batching": False, "use_cuda_graph": False,
                "max_blocks_per_request": 0, "auto_switch_to_flash": False, "safety_margin": 0.0,
            }  # fmt: skip
            model = self.stock
            how = transformers.ContinuousBatchingConfig(
                page_size=BLOCK_TOKENS, num_blocks=case.blocks, max_batch_tokens=case.batch_tokens, **same
            )
        entered: AbstractContextManager[Any] = model.continuous_batching_context_manager(
            generation_config=asked, continuous_batching_config=how
        )
        return entered

    def run(self, side: str, requests: Sequence[Request], limit_s: float) -> Run:
        """One run of one side, everything back to where it was before."""
        import gc

        import torch

        with torch.no_grad(), self.manager(side) as manager:
            made = serve(manager, requests, limit_s)
        gc.collect()  # a manager's cycles hold its blocks
        if side == "remap":
            self.copies = self.attached.snapshot.copies
            remap.advanced.remap(self.attached.session, self.attached.name, 0)
            remap.advanced.settle(self.attached.session)
            remap.advanced.check(self.attached.session)
        return made


def figures(title: str, runs: Mapping[str, Sequence[Run]], rate: float, span_s: float) -> Iterator[Figure]:
    """Goodput, P99 of the first token and of a token, of each side; median and range over its runs."""
    medians: dict[str, float] = {}
    for side, mine in runs.items():
        goodput = [run.good / max(run.seconds, span_s) for run in mine]
        medians[side] = statistics.median(goodput)
        first = [s for run in mine for s in (*run.first_s, *run.late_s)] or [0.0]
        token = [s for run in mine for s in run.token_s] or [0.0]
        yield figure(
            f"{title}, {side}, goodput (us: first token)",
            medians[side],
            "good requests/s",
            first,
            rate=rate,
            runs=len(mine),
            range=[min(goodput), max(goodput)],
            good_means=f"first token within {FIRST_S:g} s, a token each {TOKEN_S:g} s",
            unfinished=sum(run.unfinished for run in mine),
        )
        late = [percentile([*run.first_s, *run.late_s] or [0.0], 0.99) * 1e3 for run in mine]
        slow = [percentile(run.token_s or [0.0], 0.99) * 1e3 for run in mine]
        yield figure(
            f"{title}, {side}, first token, P99", statistics.median(late), "ms", first, range=[min(late), max(late)]
        )
        yield figure(
            f"{title}, {side}, a token, P99", statistics.median(slow), "ms", token, range=[min(slow), max(slow)]
        )
    if runs.get("stock") and runs.get("remap"):
        base, ours = runs["stock"][0].answers, runs["remap"][0].answers
        both = [name for name in base if name in ours]
        same = sum(base[name] == ours[name] for name in both)
        # In other company a sum may round otherwise, and random weights put the best two tokens close together.
        yield count(f"{title}, answers as stock's", same, "requests", n=len(both))


def choose(ctx: Context, *, on_gpu: bool) -> Case:
    """The largest share of Llama-3-8b of which three fit for a moment, and traffic that its KV cache is too small for."""
    if not on_gpu:
        tiny = replace(LLAMA_3_8B, layers=4, hidden=64, ffn=128, heads=4, kv_heads=2, vocabulary=96)
        return Case(tiny, "float32", 512, 64, (20.0,), Traffic(0.5, (8, 24), (4, 12)))
    for share in (1.0, 0.5, 0.25):
        shape = LLAMA_3_8B.scaled(share)
        case = Case(shape, "bfloat16", 16_384, 512, (4.0, 10.0), Traffic(6.0, (64, 512), (32, 160)))
        weights = 2 * shape.params()
        if 3 * weights + 2 * case.kv_pages * PAGE + (4 << 30) < ctx.free_bytes and 1.1 * weights < ctx.host_budget:
            return case
    raise Skip("not even a quarter of Llama-3-8b's layers fit three times")


@measure("continuous batching at fixed rates", needs=("torch", "transformers"), full_s=190, quick_s=None, emulated_s=20)
def continuous_batching(ctx: Context) -> Iterator[Figure]:
    """Each rate: three runs a side, taking turns, as far as the time goes."""
    from remap.errors import InvalidState

    on_gpu = missing("torch-cuda", emulated=ctx.emulated) is None
    case = choose(ctx, on_gpu=on_gpu)
    sides = ("stock", "remap", "stock, its own settings") if on_gpu else ("stock", "remap")
    with ExitStack() as stack:
        try:
            made = Sides(case, "cuda" if on_gpu else "cpu", stack)
            made.attached.continuous_batching(max_batch_tokens=case.batch_tokens)
        except InvalidState as error:
            raise Skip(str(error)) from error
        for side in sides:  # kernels are compiled, and times learnt
            made.run(side, make_requests(case, case.rates[0])[:3], 20.0)
        for number, rate in enumerate(case.rates):
            requests, span = make_requests(case, rate), case.traffic.span_s
            runs: dict[str, list[Run]] = {side: [] for side in sides}
            for index in ctx.rounds(3, least=1, share=0.85 / (len(case.rates) - number)):
                for side in sides if index % 2 == 0 else sides[::-1]:
                    runs[side].append(made.run(side, requests, LIMIT * span))
            yield from figures(f"continuous batching, {case.shape.name}, {rate:g} requests/s", runs, rate, span)
        yield count("layers' copies while remap served so", made.copies, "copies", n=len(case.rates))
