"""Several models in one arena, one active at a time: layers of those that sleep become KV cache, against a static partition of
the memory, and against swapping whole models.

The combinations are Oneiros' (section 7.2): C1 is OPT-13b, Llama-2-13b and Llama-3-8b, C2 is OPT-30b and OPT-6.7b, with the KV
cache that their shares of a 96 GB GPU leave them, whatever the memory of this one. Requests come in bursts as in the Azure code
trace, with ShareGPT's lengths, both shortened for a run of seconds.

All sides are served in turns by one process, with the same models in the same arena: "recompute" has each tenant keep what it
was attached with, and preempts when that is full; "swap" brings the whole model in at the beginning of its turn and sends all
others out (whole_models.py); "remap" lets the controller decide at every step. Between two runs all layers come home, and each
tenant has to have the blocks that it began with. Three seeds, and turns of several lengths.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bench.gpu.context import MIB, Context, Skip
from bench.gpu.models import (
    LLAMA_2_13B,
    LLAMA_3_8B,
    OPT_6_7B,
    OPT_13B,
    OPT_30B,
    POSITIONS,
    ModelShape,
    make_model,
)
from bench.gpu.registry import Wrong, measure, missing
from bench.gpu.results import Figure, count, figure
from bench.gpu.whole_models import WholeModels

import remap
from remap.sim.results import percentile

if TYPE_CHECKING:
    from remap.engine import LLMEngine, Request

BLOCK_TOKENS = 16
KINDS = ("recompute", "swap", "remap")
CV = 5.0  # of the gaps between requests: of the trace's 13, what still puts several bursts into a span of seconds
HEADROOM_BYTES = 3 << 30  # of the device: scratch memory of kernels and graphs, the driver's own
TIMELINE_POINTS = 60


@dataclass(frozen=True)
class Combination:
    """rate: of each tenant, requests a second. longer: lengths as a share of ShareGPT's. span_s: for how long requests come; a
    run is cut off after `limit` times that. running: most sequences of a tenant in a pass. quantum_s: a turn's length."""

    name: str
    models: tuple[ModelShape, ...]
    rate: float
    longer: float
    span_s: float
    running: int
    quantum_s: float
    page_bytes: int
    dtype: str = "bfloat16"
    limit: float = 1.5
    seeds: int = 3

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 4 if self.dtype == "float32" else 2

    def weight_bytes(self) -> list[int]:
        """Of each model."""
        return [shape.params() * self.itemsize for shape in self.models]

    def needs(self) -> tuple[int, int]:
        """(bytes of the device while the largest model is attached last, bytes of page-locked memory), about."""
        weights = self.weight_bytes()
        kv = sum(shape.kv_bytes for shape in self.models)
        return sum(weights) + kv + max(weights) + HEADROOM_BYTES, sum(weights)

    def turning(self, quantum_s: float) -> Combination:
        """With turns of this length, and requests for at least two of them."""
        return replace(self, quantum_s=quantum_s, span_s=max(self.span_s, 2 * quantum_s))

    def scaled(self, share: float) -> Combination:
        """With this share of every model's layers."""
        return replace(self, models=tuple(shape.scaled(share) for shape in self.models))


C1 = Combination("C1", (OPT_13B, LLAMA_2_13B, LLAMA_3_8B), 6.0, 0.5, 8.0, 64, 1.0, 16 * MIB)
C2 = Combination("C2", (OPT_30B, OPT_6_7B), 1.5, 0.5, 10.0, 16, 1.0, 16 * MIB)


def _tiny(case: Combination) -> Combination:
    """The same families and proportions, for the emulated driver."""
    models = tuple(
        replace(shape, layers=4 + 2 * index, hidden=128, ffn=256, heads=4, kv_heads=4 if shape.kv_heads == shape.heads else 2,
                vocabulary=128, kv_bytes=2 * MIB)
        for index, shape in enumerate(case.models)
    )  # fmt: skip
    return replace(case, models=models, rate=20.0, longer=0.3, span_s=0.5, running=8, quantum_s=0.1, page_bytes=2 * MIB,
                   dtype="float32", limit=4.0, seeds=2)  # fmt: skip


def fitting(case: Combination, device_bytes: int, host_bytes: int) -> tuple[Combination, float]:
    """(the combination with as many layers as fit, their share). Raises Skip if a quarter of them does not."""
    for twentieths in range(20, 4, -1):
        tried = case.scaled(twentieths / 20)
        device, host = tried.needs()
        if device <= device_bytes and 1.05 * host <= host_bytes:
            return tried, twentieths / 20
    raise Skip(
        f"a quarter of {case.name}'s layers needs {device >> 30} GiB of the device and {host >> 30} GiB page-locked, there are "
        f"{device_bytes >> 30} and {host_bytes >> 30}"
    )


def longest(shape: ModelShape, itemsize: int) -> int:
    """Tokens of a prompt, and of an answer, at most: two such requests fit into the KV cache, and one into the positions."""
    tokens = shape.kv_bytes // shape.block_bytes(BLOCK_TOKENS, itemsize) * BLOCK_TOKENS
    return max(8, min(tokens // 4, POSITIONS // 2))


def make_requests(case: Combination, after: int = -1) -> tuple[dict[str, list[Request]], int]:
    """(requests by tenant, the seed). The first seed behind `after` that gives every tenant about as many as its rate says, since
    few bursts fall into so short a time; it depends on nothing that is measured."""
    import random

    from remap.engine import Request, SamplingParams
    from remap.sim.workload import AZURE_CODE, SHAREGPT, Load, generate

    loads = [
        Load(shape.name, replace(AZURE_CODE.at(case.rate), cv=CV),
             SHAREGPT.scaled(case.longer, most=longest(shape, case.itemsize)))
        for shape in case.models
    ]  # fmt: skip
    wanted = case.rate * case.span_s
    for seed in range(after + 1, after + 10_001):
        items = generate(loads, case.span_s, seed)
        counts = [sum(item.tenant == shape.name for item in items) for shape in case.models]
        if all(abs(each - wanted) <= 0.3 * wanted for each in counts):
            break
    else:
        raise Wrong(f"no seed gives each tenant about {wanted:.0f} requests in {case.span_s} s")
    made: dict[str, list[Request]] = {shape.name: [] for shape in case.models}
    top = {shape.name: shape.vocabulary for shape in case.models}
    rng = random.Random(seed)
    for item in items:
        prompt = tuple(rng.randrange(4, top[item.tenant]) for _ in range(item.prompt_tokens))
        sampling = SamplingParams(max_tokens=item.output_tokens)
        made[item.tenant].append(Request(f"{len(made[item.tenant]):04d}", prompt, sampling, item.time_s))
    return made, seed


# -- one arena ---------------------------------------------------------------------------------------------------------


class Arena:
    """The models of a combination in one session, with an engine each. A context manager's worth of state: see `opened`."""

    def __init__(self, case: Combination, device: str, stack: ExitStack) -> None:
        import torch

        from remap.engine import LLMEngine

        self.case, self._torch = case, torch
        page = case.page_bytes
        kv_pages = {shape.name: -(-shape.kv_bytes // page) for shape in case.models}
        # Weights and KV, and not a page more: what lies free would be the first donor.
        self.capacity = (sum(_pages(shape, device, case) for shape in case.models) + sum(kv_pages.values())) * page
        config = remap.advanced.Knobs(reload_s=0.25)
        self.session = stack.enter_context(
            remap.Session(self.capacity, device="cuda:0", page_bytes=page, config=config)
        )
        self.engines: dict[str, LLMEngine] = {}
        self.start: dict[str, int] = {}
        for index, shape in enumerate(case.models):
            block_bytes = shape.block_bytes(BLOCK_TOKENS, case.itemsize)
            spec = remap.KVSpec(
                layers=shape.layers,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                block_tokens=BLOCK_TOKENS,
                dtype=case.dtype,
                min_blocks=kv_pages[shape.name] * page // block_bytes,
                max_blocks=self.capacity // block_bytes + 1,
            )
            model = make_model(shape, device, case.dtype, seed=index)
            tenant = self.session.attach(model, name=shape.name, kv=spec, hooks=False)
            self.empty_cache()  # the tensors that the model came with
            self.engines[shape.name] = LLMEngine(
                model, tenant, session=None, max_num_seqs=case.running, max_batch_tokens=512, runner="gpu",
                max_model_len=2 * longest(shape, case.itemsize),
            )  # fmt: skip
            self.start[shape.name] = tenant.kv.usable_blocks
        layers = {shape.name: shape.layers for shape in case.models}
        self.whole = WholeModels(self.session, layers, self._follow)

    def _follow(self, moved: Mapping[str, Mapping[int, int]]) -> None:
        for name, pairs in moved.items():
            self.engines[name].follow(pairs)

    def shared(self, kind: str) -> Any:
        """What decides in a run of this kind; None: nobody."""
        return {"recompute": None, "swap": self.whole, "remap": self.session}[kind]

    def empty_cache(self) -> None:
        """What torch keeps of the device without needing it."""
        gc.collect()
        if self._torch.cuda.is_available():
            self._torch.cuda.empty_cache()

    def warm_up(self) -> None:
        """Graphs are recorded and kernels compiled, and the session learns the times of prompts and of decodes."""
        from remap.engine import Request, SamplingParams

        for engine in self.engines.values():
            engine.session = None
            engine.warm_up()
            for index in range(4):
                prompt = tuple(range(4, 12 + 16 * index))[: engine.runner.max_tokens // 2]
                engine.add_request(Request(f"warm-{index}", prompt, SamplingParams(max_tokens=6)))
            while engine.unfinished:
                engine.advance()

    def restore(self) -> None:
        """All tenants active, with their own layers and the blocks that they began with. No request may be running."""
        for name in self.engines:
            report = self.session.activate(name)
            if not report.activated:
                raise Wrong(f"{name} could not be activated with nothing running: {report.reason}")
            remap.advanced.remap(self.session, name, 0)
        remap.advanced.settle(self.session)
        remap.advanced.check(self.session)
        for name, tenant in self.session.snapshot().tenants.items():
            if tenant.remapped or tenant.lent_pages or tenant.usable_blocks < self.start[name]:
                raise Wrong(f"{name} has {tenant.usable_blocks} blocks after all came home, {self.start[name]} before")


def _pages(shape: ModelShape, device: str, case: Combination) -> int:
    """Of the weights: all layers are alike, so a model of one layer and one of two tell."""
    from remap.model.footprint import footprint

    few = []
    for layers in (1, 2):
        model = make_model(replace(shape, layers=layers), device, case.dtype)
        few.append(footprint(model, None).pages(case.page_bytes))
        del model
    return few[0] + (shape.layers - 1) * (few[1] - few[0])


# -- one run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one way of serving gave. late_s: how long requests had waited that had no token when the run was cut off."""

    kind: str
    result: Any
    unfinished: int
    late_s: tuple[float, ...]
    seed: int = 0

    @property
    def first_s(self) -> list[float]:
        """Seconds to the first token of all tenants' requests. Those that have none yet count as late as they were then."""
        return [each for one in self.result.metrics.values() for each in one.ttft_s] + list(self.late_s)

    @property
    def between_s(self) -> list[float]:
        """Seconds between two tokens of a request, of all."""
        return [each for one in self.result.metrics.values() for each in one.tbt_s]

    @property
    def detail(self) -> dict[str, Any]:
        """For the JSON."""
        timeline = self.result.timeline
        every = max(1, len(timeline) // TIMELINE_POINTS)
        return {
            **self.result.summary(),
            "seed": self.seed,
            "unfinished": self.unfinished,
            "without_a_token": len(self.late_s),
            "timeline": [
                {
                    "s": round(each.time_s, 4),
                    "active": list(each.active),
                    **{
                        name: [tenant.layers_remapped, tenant.kv_usable_blocks, tenant.running, tenant.waiting]
                        for name, tenant in each.tenants.items()
                    },
                }
                for each in timeline[::every]
            ],
        }


def serve(
    kind: str, arena: Arena, requests: Mapping[str, Sequence[Request]], limit_s: float, quantum_s: float, seed: int
) -> Run:
    """All requests, each from its arrival on, in turns of the tenants, until they are finished or the time is over."""
    from remap.engine import SharedEngines

    session = arena.shared(kind)
    for engine in arena.engines.values():
        engine.session = session
    shared = SharedEngines(session, arena.engines, "temporal", quantum_s=quantum_s)
    unfinished: set[tuple[str, str]] = {(name, each.id) for name, mine in requests.items() for each in mine}
    late: list[float] = []

    def on_step(shared: SharedEngines, done: Mapping[str, Any]) -> None:
        for name, step in done.items():
            unfinished.difference_update((name, output.id) for output in step.finished)
        now = shared.seconds
        if now < limit_s:
            return
        # Every request has arrived: it is as late as this, and is taken out.
        for name, mine in requests.items():
            for each in mine:
                if (name, each.id) in unfinished and not arena.engines[name].abort(each.id).tokens:
                    late.append(now - each.arrival_s)

    result = shared.run(requests, on_step)
    return Run(kind, result, len(unfinished), tuple(late), seed)


# -- figures -----------------------------------------------------------------------------------------------------------


def _spread(values: Sequence[float]) -> dict[str, Any]:
    """How far the seeds lie apart."""
    return {"runs": len(values), "least": min(values), "most": max(values)}


def _figures(title: str, runs: Sequence[Run], more: Mapping[str, Any]) -> Iterator[Figure]:
    """P99 of both latencies and tokens/s of each kind, and the ratios: the median over the seeds, and their range."""
    by_kind = {kind: mine for kind in KINDS if (mine := [run for run in runs if run.kind == kind])}
    first = {kind: [percentile(run.first_s or [0.0], 0.99) for run in mine] for kind, mine in by_kind.items()}
    between = {kind: [percentile(run.between_s or [0.0], 0.99) for run in mine] for kind, mine in by_kind.items()}
    speed = {kind: [_tokens_per_s(run) for run in mine] for kind, mine in by_kind.items()}
    for kind, mine in by_kind.items():
        all_first = [s for run in mine for s in run.first_s] or [0.0]
        all_between = [s for run in mine for s in run.between_s] or [0.0]
        detail = {"each": [run.detail for run in mine], **_spread(speed[kind]), **more}
        rate = statistics.median(speed[kind])
        yield figure(f"{title}, {kind} (us: between tokens)", rate, "tokens/s", all_between, **detail)
        for name, values, samples in (("first token", first, all_first), ("between tokens", between, all_between)):
            late = [value * 1e3 for value in values[kind]]
            yield figure(f"{title}, {kind}, {name}, P99", statistics.median(late), "ms", samples, **_spread(late))
        again = sum(run.result.summary()["recomputed_tokens"] for run in mine)
        yield count(f"{title}, {kind}, tokens recomputed", again, "tokens", n=len(mine))
        yield count(f"{title}, {kind}, unfinished", sum(run.unfinished for run in mine), "requests", n=len(mine))
    new = KINDS[-1]
    for old in (kind for kind in by_kind if kind != new):
        for name, values in (("first token, P99", first), ("between tokens, P99", between), ("tokens/s", speed)):
            ratios = [ours / max(1e-9, theirs) for ours, theirs in zip(values[new], values[old])]
            seconds = between[new] if values is speed else values[new]
            yield figure(f"{title}, {name}, {new} / {old}", statistics.median(ratios), "x", seconds, **_spread(ratios))
    for kind in KINDS[1:]:
        yield from _activations(
            f"{title}, {kind}", [each for run in by_kind.get(kind, ()) for each in run.result.activations]
        )
    peak = max(tenant["layers_remapped_peak"] for run in runs if run.kind == new
               for tenant in run.result.summary()["tenants"].values())  # fmt: skip
    yield count(f"{title}, layers of one model that were KV at once", peak, "layers", n=len(by_kind[new]))


def _activations(title: str, turns: Sequence[Any]) -> Iterator[Figure]:
    delays = [each.first_pass_s for each in turns if each.first_pass_s is not None]
    if delays:
        yield figure(
            f"{title}, from a turn's beginning to its first pass, P99",
            percentile(delays, 0.99) * 1e3,
            "ms",
            delays,
            restored_layers=sum(each.restored_layers for each in turns),
            preempted_requests=sum(each.preempted_requests for each in turns),
            predicted_stall_s=sum(each.predicted_stall_s for each in turns),
        )


def _tokens_per_s(run: Run) -> float:
    tokens = sum(one.generated_tokens for one in run.result.metrics.values())
    return tokens / max(1e-9, run.result.duration_s)


def compared(ctx: Context, case: Combination, turns: Sequence[float]) -> Iterator[Figure]:
    """Every kind with every seed, with turns of each length, as far as the time goes; one seed at least."""
    on_gpu = missing("torch-cuda", emulated=ctx.emulated) is None
    share, device = 1.0, "cuda"
    if on_gpu:
        case, share = fitting(case, ctx.free_bytes, ctx.host_budget)
    else:
        case, device = _tiny(case), "cpu"
    name = case.name if share == 1.0 else f"{case.name} with {share:.0%} of the layers"
    begun = time.monotonic()
    with ExitStack() as stack:
        arena = Arena(case, device, stack)
        arena.warm_up()
        more = {
            "layers_share": share,
            "models": {shape.name: {"layers": shape.layers, "kv_bytes": shape.kv_bytes} for shape in case.models},
            "capacity_bytes": arena.capacity,
            "page_bytes": case.page_bytes,
            "start_blocks": arena.start,
            "rate_each": case.rate,
            "cv": CV,
            "lengths": f"ShareGPT's x {case.longer}",
            "setup_s": time.monotonic() - begun,
        }
        for number, quantum_s in enumerate(turns):
            timed = case.turning(quantum_s)
            runs = _seeds(ctx, arena, timed, share=1.0 / (len(turns) - number))
            counts = {run.seed: sum(len(each.ttft_s) for each in run.result.metrics.values()) for run in runs}
            detail = {**more, "quantum_s": quantum_s, "span_s": timed.span_s, "answered": counts}
            yield from _figures(f"{name}, turns of {quantum_s:g} s", runs, detail)
        arena.restore()


def _seeds(ctx: Context, arena: Arena, case: Combination, share: float) -> list[Run]:
    """One run of each kind with each seed."""
    runs: list[Run] = []
    seed = -1
    for index in ctx.rounds(case.seeds, least=1, share=share):
        requests, seed = make_requests(case, seed)
        # Odd seeds the other way round: whoever comes later finds a warmer machine.
        for kind in KINDS if index % 2 == 0 else KINDS[::-1]:
            arena.restore()
            runs.append(serve(kind, arena, requests, case.limit * case.span_s, case.quantum_s, seed))
    return runs


def _turns(ctx: Context, turns: tuple[float, ...]) -> tuple[float, ...]:
    """On the emulated driver a tenth of it: its models are tiny."""
    return tuple(each / 10 for each in turns[:1]) if ctx.emulated else turns


@measure("sharing C1", needs=("torch", "transformers"), full_s=250, quick_s=None, emulated_s=12)
def sharing_c1(ctx: Context) -> Iterator[Figure]:
    """OPT-13b, Llama-2-13b and Llama-3-8b in turns of 1 and of 5 s."""
    yield from compared(ctx, C1, _turns(ctx, (1.0, 5.0)))


@measure("sharing C2", needs=("torch", "transformers"), full_s=250, quick_s=None, emulated_s=12)
def sharing_c2(ctx: Context) -> Iterator[Figure]:
    """OPT-30b and OPT-6.7b in turns of 1 and of 5 s."""
    yield from compared(ctx, C2, _turns(ctx, (1.0, 5.0)))
