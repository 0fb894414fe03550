"""Several models in one arena, one active at a time: layers of those that sleep become KV cache, against what serving engines do
instead.

All sides are served in turns by one process, with the same models in the same arena and the same requests; SIDES has what each
does when KV does not fit. Before each run all layers come home, and each tenant gets the pages of its KV cache back.

The loads: Llama-3-8b, Llama-2-13b and Qwen2.5-14B (`bench.lab gap` simulates them on an H100), and Oneiros' combinations
(section 7.2): C1 is OPT-13b, Llama-2-13b and Llama-3-8b, C2 is OPT-30b and OPT-6.7b. KV caches are what the models' shares of
the memory leave them there; where this device has less, all have the same share of that, half at least, then fewer layers.
Requests come in bursts as in the Azure code trace, with ShareGPT's lengths, cut to the models' positions.

The simulator is given the same requests, and its figures stand beside the measured ones: that is a test of the simulator.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bench.gpu.context import MIB, Context, Skip
from bench.gpu.models import (
    LLAMA_2_13B,
    LLAMA_3_8B,
    OPT_6_7B,
    OPT_13B,
    OPT_30B,
    POSITIONS,
    QWEN_14B,
    ModelShape,
    deepened,
    one_layer,
)
from bench.gpu.registry import Wrong, measure, missing
from bench.gpu.results import Figure, count, figure

import remap
from remap.internals import internals
from remap.memory.pages import plan_free_pages
from remap.memory.view import free_pages_of
from remap_serve.sim.results import percentile
from remap_serve.sim.whole_models import WholeModels

if TYPE_CHECKING:
    from remap_serve.engine import LLMEngine, Request

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Side:
    """decides: what is asked at each step and turn: "session" (the controller), "whole" (`WholeModels`) or "" (nothing: each
    tenant keeps the KV cache that it has). swaps: preempted requests keep their KV in host memory. weights: layers may
    leave. simulated: the simulator's policy that does the same; "" if it has none. mode: `SharedEngines`'."""

    decides: str
    swaps: bool
    weights: bool
    simulated: str = ""
    mode: str = "temporal"


OURS, IN_EPOCHS = "remap", "remap in epochs"
SIDES: Mapping[str, Side] = {
    OURS: Side("session", swaps=True, weights=True, simulated="remap"),
    IN_EPOCHS: Side("session", swaps=True, weights=True, simulated="remap", mode="epochs"),
    "kv-pool+swap": Side("session", swaps=True, weights=False, simulated="kv-pool+swap"),
    "whole models+swap": Side("whole", swaps=True, weights=True, simulated="sleep+swap"),
    "recompute": Side("", swaps=False, weights=False, simulated="recompute"),
    "whole models": Side("whole", swaps=False, weights=True, simulated="sleep"),
    "swap": Side("", swaps=True, weights=False),  # the simulator's is of another scheduler
    "kv-pool": Side("session", swaps=False, weights=False, simulated="kv-pool"),
}
"""In the order of what convinces most: the default's donors in turns, and with passes in rounds; the strongest alternative that
moves no weights, the strongest that does (whole models put to sleep and woken), what engines do as they are; then their parts."""
FIRST_SIDES = tuple(SIDES)[:5]
"""These are run with every seed before any other side is."""
OWN = 0.25  # of a tenant's KV: so much stays its own where unused KV is everybody's, as in the simulator
CV = 5.0  # of the gaps between requests: of the trace's 13, what still puts several bursts into a span of seconds
HOST_KV_BYTES = (
    16 << 30
)  # of host memory for KV that is swapped, of all models together: beside the weights and a model that is made
LEAST_S = 180.0  # the models are made and page-locked in about 90, then a seed of the first sides
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
        """(bytes of the device, bytes of page-locked memory), about. Models are made in host memory, one after the other."""
        weights = sum(self.weight_bytes())
        return weights + sum(shape.kv_bytes for shape in self.models) + HEADROOM_BYTES, weights

    def turning(self, quantum_s: float) -> Combination:
        """With turns of this length, and requests for at least two of them."""
        return replace(self, quantum_s=quantum_s, span_s=max(self.span_s, 2 * quantum_s))

    def with_kv(self, share: float) -> Combination:
        """With this share of every model's KV cache."""
        return replace(self, models=tuple(shape.with_kv(share) for shape in self.models))

    def scaled(self, share: float) -> Combination:
        """With this share of every model's layers."""
        return replace(self, models=tuple(shape.scaled(share) for shape in self.models))


def _trio(rate: float) -> Combination:
    """KV caches are what 25, 37 and 37 % of 80 GiB leave beside weights. rate: of all, requests a second."""
    models = (replace(LLAMA_3_8B, kv_bytes=4_900_000_000), replace(LLAMA_2_13B, kv_bytes=5_200_000_000), QWEN_14B)
    return Combination(f"8B, 13B and 14B at {rate:g}/s", models, rate / 3, 1.0, 20.0, 64, 1.0, 16 * MIB, limit=1.25)


C1 = Combination("C1", (OPT_13B, LLAMA_2_13B, LLAMA_3_8B), 12.0, 0.5, 8.0, 64, 1.0, 16 * MIB)
C2 = Combination("C2", (OPT_30B, OPT_6_7B), 3.0, 0.5, 10.0, 16, 1.0, 16 * MIB)


def _tiny(case: Combination) -> Combination:
    """The same families and proportions, for the emulated driver."""
    models = tuple(
        replace(shape, layers=4 + 2 * index, hidden=128, ffn=256, heads=4, kv_heads=4 if shape.kv_heads == shape.heads else 2,
                vocabulary=128, kv_bytes=2 * MIB)
        for index, shape in enumerate(case.models)
    )  # fmt: skip
    return replace(case, models=models, rate=20.0, longer=0.3, span_s=0.5, running=8, quantum_s=0.1, page_bytes=2 * MIB,
                   dtype="float32", limit=4.0, seeds=2)  # fmt: skip


def _small(case: Combination) -> Combination:
    """A tenth of the layers and of their KV's half, for two seconds of many requests: whether all of it runs on this GPU, under
    pressure too, before the whole is tried."""
    return replace(case.scaled(0.1).with_kv(0.5), rate=40.0, span_s=2.0, limit=1.25, seeds=1)


def fitting(case: Combination, device_bytes: int, host_bytes: int) -> tuple[Combination, float, float]:
    """(the combination as it fits, the share of the layers, the share of their KV caches). Half of the KV caches goes before the
    first layer does. Raises Skip if a quarter of the layers with so little KV does not fit."""
    shares = [(1.0, twentieths / 20) for twentieths in range(20, 10, -1)]
    for layers, kv in [*shares, *((twentieths / 20, 0.5) for twentieths in range(20, 4, -1))]:
        tried = case.with_kv(kv).scaled(layers)
        device, host = tried.needs()
        if device <= device_bytes and 1.05 * host + min(HOST_KV_BYTES, device) <= host_bytes:
            return tried, layers, kv
    raise Skip(
        f"a quarter of {case.name}'s layers with half of its KV needs {device >> 30} GiB of the device and {host >> 30} GiB "
        f"page-locked, there are {device_bytes >> 30} and {host_bytes >> 30}"
    )


def longest(shape: ModelShape, itemsize: int) -> int:
    """Tokens of a prompt, and of an answer, at most: two such requests fit into the KV cache, and one into the positions."""
    tokens = shape.kv_bytes // shape.block_bytes(BLOCK_TOKENS, itemsize) * BLOCK_TOKENS
    return max(8, min(tokens // 4, POSITIONS // 2))


def make_requests(case: Combination, after: int = -1) -> tuple[dict[str, list[Request]], int]:
    """(requests by tenant, the seed). The first seed behind `after` that gives every tenant about as many as its rate says, since
    few bursts fall into so short a time; it depends on nothing that is measured."""
    import random

    from remap_serve.engine import Request, SamplingParams
    from remap_serve.sim.workload import AZURE_CODE, SHAREGPT, Load, generate

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
    """The models of a combination in one session, with an engine each. drawn_on: torch's device on which random numbers are
    drawn, before the session takes its memory; the models are made in host memory."""

    def __init__(self, case: Combination, drawn_on: str, stack: ExitStack) -> None:
        import torch

        from remap_serve.engine import LLMEngine

        self.case, self._torch = case, torch
        page = case.page_bytes
        first = {
            shape.name: torch.nn.Module.to(one_layer(shape, drawn_on, case.dtype, seed=index), "cpu")
            for index, shape in enumerate(case.models)
        }
        self.kv_pages = {shape.name: -(-shape.kv_bytes // page) for shape in case.models}
        # Weights and KV, and not a page more: what lies free would be the first donor.
        self.capacity = (
            sum(_pages(shape, first[shape.name], page) for shape in case.models) + sum(self.kv_pages.values())
        ) * page
        self.empty_cache()
        self.host_kv = min(HOST_KV_BYTES, self.capacity)
        self.session = stack.enter_context(
            remap.Session(self.capacity, device="cuda:0", page_bytes=page, host_kv=self.host_kv)
        )
        stack.callback(self._let_go)
        stack.callback(self._forget_models)
        self.engines: dict[str, LLMEngine] = {}
        self._declared: list[tuple[int, int]] = []
        self._models: list[Any] = []
        for shape in case.models:
            block_bytes = shape.block_bytes(BLOCK_TOKENS, case.itemsize)
            spec = remap.KVSpec(
                layers=shape.layers,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                block_tokens=BLOCK_TOKENS,
                dtype=case.dtype,
                min_blocks=max(1, int(OWN * self.kv_pages[shape.name] * page / block_bytes)),
                max_blocks=self.capacity // block_bytes + 1,
            )
            model = deepened(first.pop(shape.name), shape.layers)
            tenant = self.session.attach(model, name=shape.name, kv=spec, hooks=False)
            self._models.append(model)
            self.empty_cache()  # the tensors that the model came with
            self.engines[shape.name] = LLMEngine(
                model, tenant, session=self.session, max_num_seqs=case.running, max_batch_tokens=512, runner="gpu",
                max_model_len=2 * longest(shape, case.itemsize),
            )  # fmt: skip
        without = [name for name, engine in self.engines.items() if not engine.tenant.kv.host.total]
        if without:
            raise Wrong(f"{without} have no host memory for KV: they would recompute where it says that they swap")
        layers = {shape.name: shape.layers for shape in case.models}
        self.whole = WholeModels(self.session, layers, self._follow)
        self._deal()
        self.start = {name: engine.tenant.kv.usable_blocks for name, engine in self.engines.items()}

    def _forget_models(self) -> None:
        """The session's end gives models memory of their own again, for which there is no room: nobody wants them any more."""
        for model in self._models:
            for each in (*model.parameters(), *model.buffers()):
                each.data = self._torch.empty(0, dtype=each.dtype, device=each.device)

    def _follow(self, moved: Mapping[str, Mapping[int, int]]) -> None:
        for name, pairs in moved.items():
            self.engines[name].follow(pairs)

    def empty_cache(self) -> None:
        """What torch keeps of the device without needing it."""
        gc.collect()
        if self._torch.cuda.is_available():
            self._torch.cuda.empty_cache()

    def warm_up(self) -> None:
        """Graphs are recorded and kernels compiled, and the session learns the times of prompts and of decodes."""
        from remap_serve.engine import Request, SamplingParams

        for engine in self.engines.values():
            engine.session = None
            engine.warm_up()
            for index in range(4):
                prompt = tuple(range(4, 12 + 16 * index))[: engine.runner.max_tokens // 2]
                engine.add_request(Request(f"warm-{index}", prompt, SamplingParams(max_tokens=6)))
            while engine.unfinished:
                engine.advance()

    def prepare(self, kind: str) -> Any:
        """Everything as at the start, and set to serve in this way. Returns what decides; None: nobody. No request may be
        running."""
        side = SIDES[kind]
        self.restore()
        for engine in self.engines.values():
            kv, may_leave = engine.tenant.kv.host, side.swaps and side.decides == "session"
            engine.scheduler.swap = side.swaps
            kv.offer(engine.releasable() if may_leave else 0)
        if not side.weights:
            self._hold()
        return {"": None, "whole": self.whole, "session": self.session}[side.decides]

    def restore(self) -> None:
        """All tenants active, with their own layers and the pages of KV cache that they began with. No request may be running."""
        self._let_go()
        for name in self.engines:
            report = self.session.activate(name)
            if not report.activated:
                raise Wrong(f"{name} could not be activated with nothing running: {report.reason}")
            remap.advanced.remap(self.session, name, 0)
        remap.advanced.settle(self.session)
        self._deal()
        remap.advanced.check(self.session)
        for name, tenant in self.session.snapshot().tenants.items():
            # The number of pages is what it was; a block less may lie whole in them.
            lacking = self.start[name] - tenant.usable_blocks
            if tenant.remapped or tenant.lent_pages or abs(lacking) > 0.02 * self.start[name]:
                raise Wrong(
                    f"{name} has {tenant.usable_blocks} blocks after all came home, {self.start[name]} before; "
                    f"{tenant.remapped:g} of its layers are remapped, {tenant.lent_pages} of its pages are lent"
                )

    def _hold(self) -> None:
        """No layer leaves from now on: all are declared as registered."""
        for name in self.engines:
            for address, nbytes in self._layers(name):
                remap.advanced.declare_registered(self.session, address, nbytes)
                self._declared.append((address, nbytes))

    def _let_go(self) -> None:
        """The reverse."""
        while self._declared:
            remap.advanced.withdraw_registered(self.session, *self._declared[-1])
            self._declared.pop()

    def _layers(self, name: str) -> list[tuple[int, int]]:
        """(address, bytes) of each layer's region."""

        def regions(core: Any) -> list[tuple[int, int]]:
            tenant = core.tenant(name)
            return list(tenant.regions[: tenant.layers])

        found: list[tuple[int, int]] = self.session.exclusively(regions, claims=False)
        return found

    def _deal(self) -> None:
        """Each tenant has as many pages of KV cache as its share, and each time the same places: all that can be given becomes
        free, then each takes its own, the first places first. Which places they are decides how many whole blocks they hold."""

        def deal(core: Any) -> None:
            tenants = [core.tenant(name) for name in self.engines]
            for giver in tenants:
                for taker in tenants:
                    if taker is not giver:
                        core.lending.free_idle(giver, taker, _kv_pages(giver), giver.kv.usable_blocks)
            for taker in tenants:
                lacking = self.kv_pages[taker.name] - _kv_pages(taker)
                if lacking > 0:
                    plan = plan_free_pages(taker.pages, free_pages_of(core.changes, taker)[:lacking], give=True)
                    core.changes.apply(taker, plan)
            found = {each.name: _kv_pages(each) for each in tenants}
            if found != self.kv_pages:
                raise Wrong(f"pages of KV cache: {found}, expected {self.kv_pages}")

        self.session.exclusively(deal)


def _kv_pages(tenant: Any) -> int:
    return len(internals(tenant).kv.pool.owned_slots())


def _pages(shape: ModelShape, first: Any, page_bytes: int) -> int:
    """Of the weights: all layers are alike, so the model of one layer and its layer tell. first: that model."""
    from remap.model.footprint import footprint

    one = footprint(first, None)
    return one.pages(page_bytes) + (shape.layers - 1) * one.layer_pages(page_bytes)[0]


# -- one run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one way of serving gave. late_s: how long requests had waited that had no token when the run was cut off. predicted:
    the simulator's figures (`PolicyResult.headline`); empty without any."""

    kind: str
    result: Any
    unfinished: int
    late_s: tuple[float, ...]
    seed: int = 0
    predicted: Mapping[str, float] = field(default_factory=dict)

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
            "predicted": dict(self.predicted),
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
    from remap_serve.engine import SharedEngines

    session = arena.prepare(kind)
    for engine in arena.engines.values():
        engine.session = session
    shared = SharedEngines(session, arena.engines, SIDES[kind].mode, quantum_s=quantum_s)
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
    by_kind = {kind: mine for kind in SIDES if (mine := [run for run in runs if run.kind == kind])}
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
    for old in (kind for kind in by_kind if kind != OURS and OURS in by_kind):
        # The time may end between two sides of a seed.
        for name, values in (("first token, P99", first), ("between tokens, P99", between), ("tokens/s", speed)):
            ratios = [ours / max(1e-9, theirs) for ours, theirs in zip(values[OURS], values[old])]
            seconds = between[OURS] if values is speed else values[OURS]
            yield figure(f"{title}, {name}, {OURS} / {old}", statistics.median(ratios), "x", seconds, **_spread(ratios))
    for kind in (kind for kind in by_kind if SIDES[kind].decides):
        yield from _activations(f"{title}, {kind}", [each for run in by_kind[kind] for each in run.result.activations])
    ours = by_kind.get(OURS, [])
    peak = max((tenant["layers_remapped_peak"] for run in ours for tenant in run.result.summary()["tenants"].values()),
               default=0)  # fmt: skip
    yield count(f"{title}, layers of one model that were KV at once", peak, "layers", n=len(ours))
    yield from _predicted(title, by_kind, first, between)


def _predicted(
    title: str,
    runs: Mapping[str, Sequence[Run]],
    first: Mapping[str, Sequence[float]],
    between: Mapping[str, Sequence[float]],
) -> Iterator[Figure]:
    """Of each kind that was simulated: the simulator's P99, and the measured one over it, the median over the seeds."""
    for kind, mine in runs.items():
        for name, key, measured in (("first token", "ttft_p99_s", first), ("between tokens", "tbt_p99_s", between)):
            pairs = [(run.predicted[key], seen) for run, seen in zip(mine, measured[kind]) if run.predicted]
            if not pairs:
                continue
            late = [expected * 1e3 for expected, _ in pairs]
            yield count(
                f"{title}, {kind}, {name}, P99, simulated", statistics.median(late), "ms", n=len(pairs), **_spread(late)
            )
            ratios = [seen / max(1e-9, expected) for expected, seen in pairs]
            samples = [seen for _, seen in pairs]
            yield figure(
                f"{title}, {kind}, {name}, P99, measured / simulated",
                statistics.median(ratios),
                "x",
                samples,
                **_spread(ratios),
            )


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
    """Every side with every seed, with turns of each length, as far as the time goes; the first sides with one seed at least."""
    on_gpu = missing("torch-cuda", emulated=ctx.emulated) is None
    layers, kv, drawn_on = 1.0, 1.0, "cuda"
    if on_gpu:
        if ctx.quick:
            case = _small(case)
        case, layers, kv = fitting(case, ctx.free_bytes, ctx.host_budget)
    else:
        case, drawn_on = _tiny(case), "cpu"
    of = [f"{share:.0%} of the {what}" for share, what in ((layers, "layers"), (kv, "KV")) if share < 1.0]
    name = f"{case.name} with {' and '.join(of)}" if of else case.name
    begun = time.monotonic()
    with ExitStack() as stack:
        arena = Arena(case, drawn_on, stack)
        arena.warm_up()
        more = {
            "layers_share": layers,
            "kv_share": kv,
            "models": {shape.name: {"layers": shape.layers, "kv_bytes": shape.kv_bytes} for shape in case.models},
            "capacity_bytes": arena.capacity,
            "host_kv_bytes": arena.host_kv,
            "page_bytes": case.page_bytes,
            "start_blocks": arena.start,
            "rate_each": case.rate,
            "cv": CV,
            "lengths": f"ShareGPT's x {case.longer}",
            "setup_s": time.monotonic() - begun,
        }
        simulated = _simulation(ctx, case, arena) if on_gpu else None
        for number, quantum_s in enumerate(turns):
            timed = case.turning(quantum_s)
            work, runs = _work(timed), list[Run]()
            failed: Exception | None = None
            try:
                for run in _runs(
                    ctx, arena, timed, work, 1.0 / (len(turns) - number), PREDICTING_S if simulated else 0.0
                ):
                    runs.append(run)
            except Exception as error:  # noqa: BLE001 - raised again below, behind the figures of what was served before
                failed = error
            if simulated is not None:
                limit_s = timed.limit * timed.span_s
                runs = [replace(run, predicted=simulated(run.kind, work[run.seed], quantum_s, limit_s)) for run in runs]
            counts = {run.seed: sum(len(each.ttft_s) for each in run.result.metrics.values()) for run in runs}
            detail = {**more, "quantum_s": quantum_s, "span_s": timed.span_s, "answered": counts}
            if runs:
                yield from _figures(f"{name}, turns of {quantum_s:g} s", runs, detail)
            if failed is not None:
                raise failed
        arena.restore()


Simulated = Callable[[str, Mapping[str, Sequence["Request"]], float, float], Mapping[str, float]]
"""(side, requests, seconds of a turn, seconds after which a run is cut off) -> the simulator's figures."""


def _simulation(ctx: Context, case: Combination, arena: Arena) -> Simulated | None:
    """What the simulator says of this arena; None if it knows no such device, or not all of the models as they are."""
    from remap.policy.hardware import machine, model
    from remap_serve.sim.serving import Setup, simulate
    from remap_serve.sim.setup import TenantSetup
    from remap_serve.sim.workload import Item

    name = next((known for part, known in KNOWN.items() if part in ctx.probe["name"]), "")
    if not name or any(shape.layers != model(shape.name).layers for shape in case.models):
        return None
    on = machine(name)
    given = tuple(
        TenantSetup(
            shape.name,
            model(shape.name),
            shape.params() * case.itemsize + shape.kv_bytes,
            kv_blocks=arena.start[shape.name],
        )
        for shape in case.models
    )
    if sum(tenant.memory_bytes for tenant in given) > on.hbm_bytes:  # this device has more memory than the simulator's
        return None
    scheduling = {"max_num_seqs": case.running, "max_batch_tokens": 512}

    def figures(
        side: str, requests: Mapping[str, Sequence[Request]], quantum_s: float, limit_s: float
    ) -> Mapping[str, float]:
        policy = SIDES[side].simulated
        if not policy:
            return {}
        items = [
            Item(tenant, each.arrival_s, len(each.prompt), each.sampling.max_tokens)
            for tenant, mine in requests.items()
            for each in mine
        ]
        setup = Setup(
            *(on, given, SIDES[side].mode, "chunked", quantum_s, BLOCK_TOKENS),
            page_bytes=case.page_bytes,
            scheduling=scheduling,
        )
        result = simulate(setup, sorted(items, key=lambda each: each.time_s), policy)
        # Simulated requests are served to their end. Who has no token when a run is cut off counts as late as it is then.
        late = [
            min(first_s, limit_s - each.arrival_s)
            for tenant in result.tenants
            for first_s, each in zip(tenant.ttft_s, requests[tenant.tenant], strict=True)
        ]
        return {**result.headline(), "ttft_p99_s": percentile(late, 0.99)}

    return figures


KNOWN = {"H200": "H200", "H100 PCIe": "H100-PCIe", "H100": "H100-SXM", "GH200": "GH200-96GB", "A100": "A100"}
"""By a part of the driver's name of a device: the simulator's, the first that fits."""


def _work(case: Combination) -> dict[int, dict[str, list[Request]]]:
    """The requests of each seed."""
    found: dict[int, dict[str, list[Request]]] = {}
    seed = -1
    for _ in range(case.seeds):
        requests, seed = make_requests(case, seed)
        found[seed] = requests
    return found


def _runs(
    ctx: Context,
    arena: Arena,
    case: Combination,
    work: Mapping[int, Mapping[str, Sequence[Request]]],
    share: float,
    kept_s: float,
) -> Iterator[Run]:
    """A run of each side with each seed, those of FIRST_SIDES before the others, while this share of the time, less `kept_s`,
    lasts for one more; FEWEST in any case. Every second seed the other way round: whoever comes later finds a warmer machine."""
    groups = (FIRST_SIDES, tuple(kind for kind in SIDES if kind not in FIRST_SIDES))
    order = [
        (kind, seed)
        for group in groups
        for index, seed in enumerate(work)
        for kind in (group if index % 2 == 0 else group[::-1])
    ]
    begun = time.monotonic()
    end = begun + share * max(0.0, ctx.until - begun) - kept_s
    longest_s = case.span_s
    for number, (kind, seed) in enumerate(order):
        now = time.monotonic()
        if number >= FEWEST and now + longest_s > end:
            return
        yield serve(kind, arena, work[seed], case.limit * case.span_s, case.quantum_s, seed)
        longest_s = max(longest_s, time.monotonic() - now)


FEWEST = 3
"""Runs in any case."""
PREDICTING_S = 25.0
"""The simulator's runs take so long at most, behind all others."""


def _turns(ctx: Context, turns: tuple[float, ...]) -> tuple[float, ...]:
    """The first, a tenth of it, on the emulated driver, where models are tiny, and in a quick run."""
    return tuple(each / 10 for each in turns[:1]) if ctx.emulated or ctx.quick else turns


@measure(
    "sharing 8B, 13B and 14B at 8/s",
    needs=("torch", "transformers"),
    full_s=460,
    quick_s=60,
    emulated_s=20,
    least_s=LEAST_S,
)
def sharing_eight(ctx: Context) -> Iterator[Figure]:
    """The models that `bench.lab gap` simulates on an H100: 20 s of 8 requests a second, three seeds. Requests are shorter
    here, and come for seconds: at fewer a second the simulator sees no side preempt, so that all would be alike."""
    yield from compared(ctx, _trio(8.0), _turns(ctx, (1.0,)))


@measure(
    "sharing 8B, 13B and 14B at 12/s",
    needs=("torch", "transformers"),
    full_s=460,
    quick_s=None,
    emulated_s=20,
    least_s=LEAST_S,
)
def sharing_twelve(ctx: Context) -> Iterator[Figure]:
    """At 12 requests a second."""
    yield from compared(ctx, _trio(12.0), _turns(ctx, (1.0,)))


@measure("sharing C1", needs=("torch", "transformers"), full_s=400, quick_s=None, emulated_s=20, least_s=LEAST_S)
def sharing_c1(ctx: Context) -> Iterator[Figure]:
    """OPT-13b, Llama-2-13b and Llama-3-8b in turns of 1 and of 5 s."""
    yield from compared(ctx, C1, _turns(ctx, (1.0, 5.0)))


@measure("sharing C2", needs=("torch", "transformers"), full_s=400, quick_s=None, emulated_s=20, least_s=LEAST_S)
def sharing_c2(ctx: Context) -> Iterator[Figure]:
    """OPT-30b and OPT-6.7b in turns of 1 and of 5 s."""
    yield from compared(ctx, C2, _turns(ctx, (1.0, 5.0)))
