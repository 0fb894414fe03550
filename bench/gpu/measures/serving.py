"""A burst of requests on an OPT of random weights in a capped budget: recompute, remap by hand, remap by the controller.

One model, attached once; the engine of `remap_serve.engine` serves the same requests three times. What differs is who changes the
number of remapped layers: nobody (a sequence that finds no block is preempted and computed again), the hand, once, before
the burst, or the controller, at every step. The hand takes what a decode pass can hide nearly all of, by the measured times of
its layers and of their copies: where the link is slow that is the last pages of each layer, or nothing.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.gpu.context import Context, Skip
from bench.gpu.registry import measure, missing
from bench.gpu.results import Figure, count, figure
from bench.gpu.tenants import PAGE

import remap
from remap.internals import internals
from remap.policy import schedule
from remap_serve.sim.results import percentile

if TYPE_CHECKING:
    from remap_serve.engine import LLMEngine, Request

BLOCK_TOKENS = 16
BUFFERS = 2
SLOWDOWN = 0.25  # of a decode pass, that the hand allows
TIMELINE_POINTS = 100


@dataclass(frozen=True)
class Shape:
    """An OPT model and a burst for it. kv_tokens: what fits beside the weights before anything is remapped."""

    name: str
    hidden: int
    layers: int
    heads: int
    vocabulary: int
    dtype: str
    requests: int
    running: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    kv_tokens: int
    limit_s: float  # of one run; what is unfinished then is aborted and counted

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 4 if self.dtype == "float32" else 2

    @property
    def weight_bytes(self) -> int:
        """Roughly: 12 hidden^2 a layer, and the embedding."""
        return (12 * self.hidden**2 * self.layers + self.vocabulary * self.hidden) * self.itemsize


OPT_13B = Shape("OPT-13b", 5120, 40, 40, 50272, "bfloat16", 160, 64, (64, 384), (64, 192), 8192, 20.0)
OPT_1B3 = Shape("OPT-1.3b", 2048, 24, 32, 50272, "bfloat16", 96, 48, (64, 384), (32, 96), 6144, 5.0)
OPT_125M = Shape("OPT-125m", 768, 12, 12, 50272, "bfloat16", 64, 32, (64, 256), (32, 64), 4096, 5.0)
TINY = Shape("a tiny OPT", 128, 6, 4, 128, "float32", 10, 8, (24, 60), (24, 40), 320, 60.0)
POSITIONS = 1024


def choose(ctx: Context) -> Shape:
    """The largest shape that fits twice into the device (while it is attached) and once into page-locked memory."""
    if missing("torch-cuda", emulated=ctx.emulated) is not None:
        return TINY
    for shape in ctx.pick((OPT_13B, OPT_1B3, OPT_125M), (OPT_1B3, OPT_125M), (TINY,)):
        if 2.5 * shape.weight_bytes < ctx.free_bytes and 1.2 * shape.weight_bytes < ctx.host_budget:
            return shape
    raise Skip("not even OPT-125m fits into the free device memory and the budget of page-locked memory")


@dataclass(frozen=True)
class Choice:
    """Arguments of `advanced.remap`. layers: 0 if a pass would wait too long for the smallest part of any layer."""

    layers: float
    buffers: int
    selection: str


def by_hand(compute_s: Sequence[float], copy_s: float, layer_pages: int) -> Choice:
    """The most that a decode pass waits for no longer than SLOWDOWN of its computation; an eighth of the layers at most.

    copy_s: of one layer, of `layer_pages` pages. Whole layers where one fits, otherwise the last pages of every layer.
    """
    layers, most = len(compute_s), max(1, len(compute_s) // 8)
    if copy_s <= 0:
        return Choice(0, BUFFERS, "uniform")
    whole, buffers = schedule.max_remapped(compute_s, copy_s, slowdown=SLOWDOWN)
    if whole:
        return Choice(min(whole, most), buffers, "uniform")
    # A slice of each layer is copied in every pass: their sum may take as long as the pass.
    share = (1 + SLOWDOWN) * sum(compute_s) / (layers * copy_s)
    pages = int(min(1.0, share) * layer_pages)
    return Choice((layers - BUFFERS) * pages / layer_pages, BUFFERS, "slices")


def _advised(engine: LLMEngine, session: remap.Session, requests: Sequence[Request], layer_pages: int) -> Choice:
    """After a few requests with one layer remapped, so that computation and copies have been timed."""
    remap.advanced.remap(session, "opt", 1, BUFFERS)
    remap.advanced.settle(session)
    serve("measuring", engine, session, requests, 2.0)
    remap.advanced.remap(session, "opt", 0)
    remap.advanced.settle(session)
    times = internals(engine.tenant).times()
    if times is None:
        raise Skip("no pass was timed")
    return by_hand(times.compute_s, statistics.fmean(times.transfer_s), layer_pages)


def make_model(shape: Shape, device: str) -> Any:
    """Random weights, made on the device."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.OPTConfig(
        hidden_size=shape.hidden,
        ffn_dim=4 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        vocab_size=shape.vocabulary,
        word_embed_proj_dim=shape.hidden,
        max_position_embeddings=POSITIONS,
    )
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, shape.dtype)).eval()


def make_requests(shape: Shape) -> list[Request]:
    """The burst: all at once, lengths and tokens from a fixed seed."""
    from remap_serve.engine import Request, SamplingParams

    rng = random.Random(1)
    made = []
    for index in range(shape.requests):
        prompt = tuple(rng.randrange(4, shape.vocabulary) for _ in range(rng.randint(*shape.prompt)))
        made.append(Request(f"r{index}", prompt, SamplingParams(max_tokens=rng.randint(*shape.output))))
    return made


@dataclass(frozen=True)
class Run:
    """What one way of serving gave. unfinished: requests that the time limit cut off."""

    kind: str
    metrics: Any
    tokens: dict[str, tuple[int, ...]]
    unfinished: int
    stall_s: float

    @property
    def detail(self) -> dict[str, Any]:
        """For the JSON."""
        timeline = self.metrics.timeline
        every = max(1, len(timeline) // TIMELINE_POINTS)
        return {
            **self.metrics.summary(),
            "unfinished": self.unfinished,
            "stall_share": self.stall_s / max(self.metrics.duration_s, 1e-9),
            "timeline": [
                {
                    "s": round(each.time_s, 4),
                    "alpha": each.layers_remapped,
                    "usable": each.kv_usable_blocks,
                    "running": each.running,
                }
                for each in timeline[::every]
            ],
        }


def serve(kind: str, engine: LLMEngine, session: remap.Session, requests: Sequence[Request], limit_s: float) -> Run:
    """All requests arrive now; until they are finished or the time is over."""
    stalled = session.snapshot().tenants["opt"].stall_s
    engine.reset_metrics()
    begun = time.perf_counter()
    outputs: dict[str, tuple[int, ...]] = {}
    for request in requests:
        engine.add_request(request, arrived_s=engine.metrics.started_s)
    while engine.unfinished and time.perf_counter() - begun < limit_s:
        outputs.update((output.id, output.tokens) for output in engine.step().finished)
    late = [request.id for request in requests if request.id not in outputs]
    metrics = engine.metrics
    for name in late:
        engine.abort(name)
    stalled = session.snapshot().tenants["opt"].stall_s - stalled
    return Run(kind, metrics, outputs, len(late), stalled)


def figures(shape: Shape, run: Run) -> Iterator[Figure]:
    """Throughput with the time between tokens beside it, and the time to the first token."""
    detail = run.detail
    gaps, first = run.metrics.tbt_s or [0.0], run.metrics.ttft_s or [0.0]
    by_hand = run.kind == "by hand"
    yield figure(f"{shape.name}, {run.kind} (us: between tokens)", detail["tokens_per_s"], "tokens/s", gaps, **detail)
    late = percentile(first, 0.99) * 1e3
    yield figure(f"{shape.name}, {run.kind}, first token, P99", late, "ms", first, shown=not by_hand)
    yield count(f"{shape.name}, {run.kind}, tokens recomputed", detail["recomputed_tokens"], "tokens", n=len(gaps))


def _agreement(shape: Shape, base: Run, other: Run) -> Figure:
    """How many of the requests that both finished got the same tokens. What is recomputed, or decoded in other company, may
    round otherwise, and random weights put the best two tokens close together: nothing is promised across batches."""
    both = [name for name in base.tokens if name in other.tokens]
    same = sum(base.tokens[name] == other.tokens[name] for name in both)
    return count(f"{shape.name}, {other.kind}, answers as the baseline's", same, "requests", n=len(both))


@measure("serving", needs=("torch", "transformers"), full_s=75, quick_s=16, emulated_s=8)
def serving(ctx: Context) -> Iterator[Figure]:
    """The same burst three times: baseline, by hand (what the measured times allow), controller."""
    import torch

    from remap.model.footprint import footprint
    from remap_serve.engine import LLMEngine

    shape = choose(ctx)
    on_gpu = missing("torch-cuda", emulated=ctx.emulated) is None
    model = make_model(shape, "cuda" if on_gpu else "cpu")
    block_bytes = 2 * shape.layers * BLOCK_TOKENS * shape.hidden * shape.itemsize
    kv_pages = -(-shape.kv_tokens // BLOCK_TOKENS * block_bytes // PAGE)
    # Weights and the first blocks, and not a page more: what lies free would be the first donor.
    capacity = (footprint(model, None).pages(PAGE) + kv_pages) * PAGE
    spec = remap.KVSpec(
        layers=shape.layers,
        kv_heads=shape.heads,
        head_dim=shape.hidden // shape.heads,
        block_tokens=BLOCK_TOKENS,
        dtype=shape.dtype,
        min_blocks=kv_pages * PAGE // block_bytes,
        max_blocks=capacity // block_bytes + 1,
        host_blocks=0,  # one engine runs all kinds, and whoever "recompute" preempts is recomputed
    )
    requests = make_requests(shape)
    runs: list[Run] = []
    with remap.Session(capacity, device="cuda:0", page_bytes=PAGE) as session:
        tenant = session.attach(model, name="opt", kv=spec, hooks=False)
        if on_gpu:
            torch.cuda.empty_cache()  # the tensors that the model came with
        engine = LLMEngine(
            model, tenant, session=session, max_num_seqs=shape.running, max_batch_tokens=512, runner="gpu",
            max_model_len=shape.prompt[1] + shape.output[1],
        )  # fmt: skip
        engine.warm_up()
        choice = _advised(engine, session, requests[:4], -(-12 * shape.hidden**2 * shape.itemsize // PAGE))
        yield count(
            f"{shape.name}, layers' worth remapped by hand", choice.layers, "layers", n=1, selection=choice.selection
        )
        # Where nothing would be remapped there is nothing to run by hand.
        for kind in ("recompute", *(("by hand",) if choice.layers else ()), "controller"):
            remap.advanced.remap(session, "opt", 0)
            if kind == "by hand":
                remap.advanced.remap(session, "opt", choice.layers, choice.buffers, choice.selection)
            remap.advanced.settle(session)
            engine.session = session if kind == "controller" else None
            serve(f"{kind} (warm-up)", engine, session, requests[:4], 2.0)
            run = serve(kind, engine, session, requests, min(shape.limit_s, max(2.0, ctx.until - time.monotonic())))
            yield from figures(shape, run)
            runs.append(run)
            remap.advanced.check(session)
    for run in runs[1:]:
        yield _agreement(shape, runs[0], run)
    if on_gpu:
        step = [each.step_s for each in runs[0].metrics.timeline]
        yield figure(
            f"{shape.name}, engine step of the baseline", statistics.median(step) * 1e3, "ms", step, shown=False
        )
