"""More models than the device has memory for: what a turn of a model costs that has no page on it, and serving several such
models in three ways. `bench/cold_models.py` has the same on a processor.

    remap              whoever gets a turn takes the pages of those needed last, layers or all of it, and begins at once
    whole models, LRU  the model used longest ago leaves, whole, until there is room; a pass begins when all layers have come
    sleep mode         one model is awake at a time, and wakes whole

All three are one session's, with the same requests, in turns; before each run every model is cold. Models are Llama-3-8b's
layers, each with random weights of its own, in master copies that are page-locked as far as the budget goes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.gpu.context import MIB, Context
from bench.gpu.models import LLAMA_3_8B, ModelShape, deepened, one_layer
from bench.gpu.registry import Wrong, measure, missing
from bench.gpu.results import Figure, count, figure, seconds

import remap
from remap.internals import internals
from remap.session import Session
from remap_serve.cli.whole_models import SleepingModels
from remap_serve.sim.results import percentile

if TYPE_CHECKING:
    from remap_serve.engine import LLMEngine, Request

OURS, LRU, SLEEP = WAYS = ("remap", "whole models, LRU", "sleep mode")
BLOCK_TOKENS, MIN_BLOCKS = 16, 16
LAYERS, MODELS, ROOM = 12, 6, 3  # room for so many models, and KV of 15 % beside
PROMPT, ANSWER = (64, 512), (8, 48)
RATE, SPAN_S, QUANTUM_S = 6.0, 8.0, 0.25


class Models(SleepingModels):
    """A session that serves in each of the ways."""

    way = OURS

    @property
    def keeps(self) -> bool:  # type: ignore[override]
        """Whether other models stay while there is room."""
        return self.way == LRU

    def activate(self, name: str, *, alone: bool = False, partial: bool | float = False) -> Any:
        """As the way has it."""
        kind: Any = Session if self.way == OURS else SleepingModels
        return kind.activate(self, name, alone=alone, partial=partial)

    def expect(self, name: str, *, blocks: int = 0) -> tuple[int, ...]:
        """As the way has it."""
        return Session.expect(self, name) if self.way == OURS else ()


class Cold:
    """The models, none on the device, each with an engine."""

    def __init__(
        self,
        ctx: Context,
        shape: ModelShape,
        models: int,
        room: int,
        stack: ExitStack,
        locked: float | None = None,
        reload_s: float | None = None,
    ) -> None:
        """locked: so many models' master copies have room in page-locked memory; None: as many as the budget says. reload_s: by
        so much a cold model's first token may be late (`Knobs.reload_s`); None: the default."""
        import torch

        from remap_serve.engine import LLMEngine

        on_gpu = missing("torch-cuda", emulated=ctx.emulated) is None
        dtype, page = ("bfloat16", 16 * MIB) if on_gpu else ("float32", 2 * MIB)
        self.weight_bytes = shape.params() * (2 if on_gpu else 4)
        # What is no parameter (a table of angles) keeps pages of its own, two a model.
        capacity = (int(1.15 * room * self.weight_bytes) // page + 2 * models) * page
        block = shape.block_bytes(BLOCK_TOKENS, 2 if on_gpu else 4)
        spec = remap.KVSpec(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_tokens=BLOCK_TOKENS,
            dtype=dtype,
            min_blocks=MIN_BLOCKS,
            max_blocks=capacity // block,
        )
        knobs = remap.advanced.Knobs(min_idle=0.0)  # of equal priority, whoever is needed last gives first
        if reload_s is not None:
            knobs = replace(knobs, reload_s=reload_s)
        host = {} if locked is None else {"host_budget": int(locked * self.weight_bytes), "host_kv": 0}
        self.session = stack.enter_context(Models(capacity, device="cuda:0", page_bytes=page, config=knobs, **host))
        self._models: list[Any] = []
        stack.callback(self._forget_models)
        self.engines: dict[str, LLMEngine] = {}
        for index in range(models):
            model = deepened(
                torch.nn.Module.to(one_layer(shape, "cuda" if on_gpu else "cpu", dtype, index), "cpu"), shape.layers
            )
            name = f"m{index}"
            tenant = self.session.attach(model, name=name, kv=spec, active=False, pages="none", hooks=False)
            self._models.append(model)
            if on_gpu:
                torch.cuda.empty_cache()
            self.engines[name] = LLMEngine(
                model, tenant, session=self.session, max_num_seqs=16, max_batch_tokens=512, runner="gpu",
                max_model_len=1024 if on_gpu else 128,
            )  # fmt: skip
        for name in self.engines:
            self.warm_up(name)

    def _forget_models(self) -> None:
        """The session's end gives models memory of their own again, which nobody wants any more."""
        import torch

        for model in self._models:
            for each in (*model.parameters(), *model.buffers()):
                each.data = torch.empty(0, dtype=each.dtype, device=each.device)

    def warm_up(self, name: str) -> None:
        """Kernels are compiled and graphs recorded."""
        self.wake(name)
        remap.advanced.settle(self.session)
        internals(self.session.tenants[name])._state.prefetcher.drain()
        engine = self.engines[name]
        engine.session = None
        engine.warm_up()
        engine.session = self.session
        for length in (1, engine.runner.max_tokens // 2):
            self.tokens(name, range(4, 4 + length), 3)

    def wake(self, name: str) -> None:
        """The model, alone, may serve; its layers are still to come."""
        report = self.session.activate(name, alone=True)
        if not report.activated:
            raise Wrong(f"{name} could not be activated with nothing running: {report.reason}")

    def sleep(self) -> None:
        """All models are cold."""
        self.session.way = OURS
        for name in self.engines:
            self.session.deactivate(name, pages="none")
        remap.advanced.settle(self.session)
        held = {name: each.layers - len(each.cold) for name, each in self.session.snapshot().tenants.items()}
        if any(held.values()):
            raise Wrong(f"layers on the device after all models were put to sleep: {held}")

    def tokens(self, name: str, prompt: Sequence[int], answer: int) -> tuple[int, ...]:
        """What one request, alone, is answered."""
        from remap_serve.engine import Request, SamplingParams

        engine, found = self.engines[name], list[int]()
        engine.add_request(Request(f"{time.perf_counter_ns()}", tuple(prompt), SamplingParams(max_tokens=answer)))
        while engine.unfinished:
            found += [token for _, token in engine.step().tokens]
        return tuple(found)

    def answer(self, name: str) -> tuple[int, ...]:
        """To a prompt that is always the same."""
        return self.tokens(name, range(4, 36), 2)

    def loaded(self, name: str) -> None:
        """Returns when all of the model's layers are on the device."""
        remap.advanced.settle(self.session)
        internals(self.session.tenants[name])._state.prefetcher.drain()


def first_tokens(ctx: Context, cold: Cold, prompt: int) -> Iterator[Figure]:
    """Each model in turn, from no page: until all of it has come; until its first token; and the first token of it warm."""
    taken: dict[str, list[float]] = {"load": [], "cold": [], "warm": []}
    differ = compared = 0
    text = range(4, 4 + prompt)
    for number in ctx.rounds(ctx.pick(24, 12, 4), least=4, share=0.15):
        name = f"m{number // 2 % len(cold.engines)}"
        cold.sleep()
        begun = time.perf_counter()
        cold.wake(name)
        if number % 2:
            cold.loaded(name)
            taken["load"].append(time.perf_counter() - begun)
            continue
        first = cold.tokens(name, text, 1)
        taken["cold"].append(time.perf_counter() - begun)
        cold.loaded(name)
        begun = time.perf_counter()
        warm = cold.tokens(name, text, 1)
        taken["warm"].append(time.perf_counter() - begun)
        compared, differ = compared + 1, differ + (first != warm)
    title = f"a cold model of {cold.weight_bytes / 1e9:.3g} GB, a prompt of {prompt} tokens"
    middle = {kind: statistics.median(each) for kind, each in taken.items()}
    rate = cold.weight_bytes / middle["load"] / 1e9
    yield seconds(f"{title}, all of it loads", taken["load"], GBps=rate)
    yield seconds(f"{title}, first token", taken["cold"])
    yield seconds(f"{title}, first token when it is warm", taken["warm"])
    yield figure(f"{title}, first token / its load", middle["cold"] / middle["load"], "x", taken["cold"], target=1.1)
    yield figure(
        f"{title}, first token / (load + warm)", middle["cold"] / (middle["load"] + middle["warm"]), "x", taken["cold"]
    )
    yield count(f"{title}, first tokens that differ from the warm one's", differ, "tokens", n=compared, target=0)


def requests_for(names: Sequence[str], longest: int, rate: float, span_s: float, seed: int) -> dict[str, list[Request]]:
    """Poisson arrivals; model i is asked for in proportion to 1 / (i + 1). longest: of a prompt and its answer, tokens."""
    from remap_serve.engine import Request, SamplingParams

    rng, at = random.Random(seed), 0.0
    made: dict[str, list[Request]] = {name: [] for name in names}
    weights = [1 / (index + 1) for index in range(len(names))]
    while (at := at + rng.expovariate(rate)) < span_s:
        (name,) = rng.choices(names, weights)
        answer = rng.randint(*(each * longest // 1024 or 1 for each in ANSWER))
        length = rng.randint(*(each * longest // 1024 for each in PROMPT))
        prompt = tuple(rng.randrange(4, 128) for _ in range(length))
        made[name].append(Request(f"{len(made[name])}", prompt, SamplingParams(max_tokens=answer), at))
    return made


def served(cold: Cold, way: str, requests: Mapping[str, Sequence[Request]]) -> dict[str, float]:
    """One run."""
    from remap_serve.engine import SharedEngines

    cold.sleep()
    before = _copied(cold)
    cold.session.way = way
    result = SharedEngines(cold.session, cold.engines, quantum_s=QUANTUM_S).run(requests)
    asked, told = sum(map(len, requests.values())), [s for one in result.metrics.values() for s in one.ttft_s]
    if len(told) != asked:
        raise Wrong(f"{way}: {len(told)} first tokens for {asked} requests")
    waits = [each.first_pass_s for each in result.activations if each.restored_layers and each.first_pass_s is not None]
    return {
        "ttft_p50_s": statistics.median(told),
        "ttft_p99_s": percentile(told, 0.99),
        "tbt_p99_s": percentile([s for one in result.metrics.values() for s in one.tbt_s] or [0.0], 0.99),
        "tokens_per_s": sum(one.generated_tokens for one in result.metrics.values()) / result.duration_s,
        "loads": len(waits),
        "first_pass_s": statistics.median(waits) if waits else 0.0,
        "copied_GB": (_copied(cold) - before) / 1e9,
    }


def _copied(cold: Cold) -> int:
    return sum(each.copied_bytes for each in cold.session.snapshot().tenants.values())


@measure("cold models", needs=("torch", "transformers"), full_s=180, quick_s=40, emulated_s=15, least_s=100)
def cold_models(ctx: Context) -> Iterator[Figure]:
    """Six models where three have room: a cold model's first token, then 8 s of 6 requests a second, three seeds."""
    shape, models, room, longest, span_s = replace(LLAMA_3_8B, layers=LAYERS), MODELS, ROOM, 1024, SPAN_S
    if missing("torch-cuda", emulated=ctx.emulated) is not None:
        shape = replace(shape, layers=6, hidden=512, ffn=2048, heads=8, kv_heads=4, vocabulary=128)
        models, room, longest, span_s = 3, 2, 128, 0.5
    elif ctx.quick:
        shape, models, room, span_s = replace(shape, layers=4), 3, 2, 2.0
    begun = time.monotonic()
    with ExitStack() as stack:
        cold = Cold(ctx, shape, models, room, stack)
        made_s = time.monotonic() - begun
        for prompt in (longest // 32, longest // 2):
            yield from first_tokens(ctx, cold, prompt)
        seen: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for seed in ctx.rounds(ctx.pick(3, 1, 2), least=1, share=0.8):
            requests = requests_for(list(cold.engines), longest, RATE, span_s, seed)
            for way in (*WAYS[seed % 3 :], *WAYS[: seed % 3]):
                seen[way].append(served(cold, way, requests))
        title = f"{models} models of {cold.weight_bytes / 1e9:.3g} GB where {room} have room"
        more = {"setup_s": made_s, "rate": RATE, "quantum_s": QUANTUM_S, "span_s": span_s, "layers": shape.layers}
        for way, runs in seen.items():
            for name, key, unit, per in (
                ("first token, P50", "ttft_p50_s", "ms", 1e3),
                ("first token, P99", "ttft_p99_s", "ms", 1e3),
                ("between tokens, P99", "tbt_p99_s", "ms", 1e3),
                ("a cold turn's first pass", "first_pass_s", "ms", 1e3),
                ("tokens/s", "tokens_per_s", "tokens/s", 1.0),
                ("bytes copied", "copied_GB", "GB", 1.0),
            ):
                values = [run[key] * per for run in runs]
                spread = {"runs": len(values), "least": min(values), "most": max(values)}
                detail = {"each": runs, **more} if key == "ttft_p50_s" else {}
                yield figure(
                    f"{title}, {way}, {name}",
                    statistics.median(values),
                    unit,
                    [run[key] for run in runs],
                    shown="P50" not in name,
                    **spread,
                    **detail,
                )
        remap.advanced.check(cold.session)


@measure("layers that hide a model's load", needs=("torch", "transformers"), full_s=25, quick_s=12, emulated_s=5)
def kept_layers(ctx: Context) -> Iterator[Figure]:
    """A model that is put to sleep where its first token must not be late keeps as many first layers as hide the others' loading,
    by the certificate: its first token against the warm one's, by the length of the prompt."""
    shape, longest = replace(LLAMA_3_8B, layers=LAYERS), 1024
    if missing("torch-cuda", emulated=ctx.emulated) is not None:
        shape, longest = replace(shape, layers=6, hidden=512, ffn=2048, heads=8, kv_heads=4, vocabulary=128), 128
    elif ctx.quick:
        shape = replace(shape, layers=4)
    with ExitStack() as stack:
        cold = Cold(ctx, shape, 1, 1, stack, reload_s=0.0)
        (name,) = cold.engines
        for prompt in (longest // 32, longest // 2):
            text, differ = range(4, 4 + prompt), 0
            taken: dict[str, list[float]] = {"warm": [], "kept": []}
            layers: list[float] = []
            for _ in ctx.rounds(ctx.pick(20, 10, 3), least=3, share=0.4):
                begun = time.perf_counter()
                warm = cold.tokens(name, text, 1)
                taken["warm"].append(time.perf_counter() - begun)
                cold.session.deactivate(name, pages="auto")
                remap.advanced.settle(cold.session)
                held = cold.session.snapshot().tenants[name]
                layers.append(held.layers - len(held.cold))
                begun = time.perf_counter()
                cold.wake(name)
                differ += cold.tokens(name, text, 1) != warm
                taken["kept"].append(time.perf_counter() - begun)
                cold.loaded(name)
            title = f"a model of {cold.weight_bytes / 1e9:.3g} GB that kept what hides its load, a prompt of {prompt} tokens"
            least, most = int(min(layers)), int(max(layers))
            yield seconds(f"{title}, first token", taken["kept"], layers_kept=[least, most], layers=shape.layers)
            yield seconds(f"{title}, when it is warm", taken["warm"], shown=False)
            ratio = statistics.median(taken["kept"]) / statistics.median(taken["warm"])
            yield figure(f"{title}, / warm", ratio, "x", taken["kept"], target=1.2)
            yield count(f"{title}, tokens that differ", differ, "tokens", n=len(layers), target=0)
        remap.advanced.check(cold.session)


@measure("master copies that find no room", needs=("torch", "transformers"), full_s=70, quick_s=30, emulated_s=10)
def staged_models(ctx: Context) -> Iterator[Figure]:
    """Two models, of which one's master copies may be page-locked. The other's are staged, until it has loaded so much more that
    it changes places with the first (remap/memory/tiers.py)."""
    shape = replace(LLAMA_3_8B, layers=LAYERS)
    if missing("torch-cuda", emulated=ctx.emulated) is not None:
        shape = replace(shape, layers=6, hidden=512, ffn=2048, heads=8, kv_heads=4, vocabulary=128)
    elif ctx.quick:
        shape = replace(shape, layers=4)
    with ExitStack() as stack:
        cold = Cold(ctx, shape, 2, 2, stack, locked=1.2)
        hosts = {name: internals(tenant)._state.host for name, tenant in cold.session.tenants.items()}
        expected: dict[str, tuple[int, ...]] = {}

        def load(name: str) -> float:
            cold.sleep()
            begun = time.perf_counter()
            cold.wake(name)
            cold.loaded(name)
            taken = time.perf_counter() - begun
            answer = cold.answer(name)
            if expected.setdefault(name, answer) != answer:
                raise Wrong(f"{name} answers otherwise than before")
            return taken

        locked, staged = (next(name for name, host in hosts.items() if host.staged == way) for way in (False, True))
        before: dict[str, list[float]] = {locked: [], staged: []}
        for _ in range(3):
            for name, taken in before.items():
                taken.append(load(name))
        title = f"a cold model of {cold.weight_bytes / 1e9:.3g} GB loads"
        loads = 0
        while hosts[staged].staged and not cold.session._tiers.busy and loads < 40:
            loads += 1
            load(staged)
        begun, beside = time.monotonic(), list[float]()
        while cold.session._tiers.busy and time.monotonic() < begun + 30:
            beside.append(load(staged))
        took = time.monotonic() - begun
        if hosts[staged].staged or not hosts[locked].staged:
            raise Wrong(f"{staged} is not page-locked after {loads} loads of it, or {locked} still is")
        after: dict[str, list[float]] = {staged: [], locked: []}
        for _ in range(3):
            for name, taken in after.items():
                taken.append(load(name))
        for name, which in ((locked, "page-locked"), (staged, "staged")):
            rate = cold.weight_bytes / statistics.median(before[name]) / 1e9
            yield seconds(f"{title}, {which}", before[name], GBps=rate)
        yield count("loads of a staged model until it was page-locked", loads, "loads", n=1)
        yield seconds(f"page-locking {cold.weight_bytes / 1e9:.3g} GB beside loads, at most", [took])
        yield seconds(f"{title}, while it is being page-locked", beside or [0.0], loads=len(beside))
        yield seconds(
            f"{title}, page-locked since",
            after[staged],
            GBps=cold.weight_bytes / statistics.median(after[staged]) / 1e9,
        )
        yield seconds(f"{title}, staged since", after[locked], shown=False)
        remap.advanced.check(cold.session)
