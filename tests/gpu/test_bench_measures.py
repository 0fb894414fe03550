"""The GPU suite's measures with tiny sizes: each runs, on the emulated driver and, where it computes with torch on a GPU, on the
test double of torch.cuda. Nothing is measured; what they count and compare is right.
"""

from __future__ import annotations

import importlib.machinery
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from bench.gpu import registry
from bench.gpu.context import MIB, Skip
from bench.gpu.registry import Wrong
from bench.gpu.results import Figure
from conftest import needs
from rig import obvious_kernels, tiny_case

import remap
from remap.internals import internals

MEASURES = {each.name: each for each in registry.all_measures()}
# Not here: they need packages of others, or have sizes that only a GPU can do.
ELSEWHERE = {name for name in MEASURES if name.startswith(("beside ", "long turns", "link under load"))}
# Without torch the processor's copies are what computes; with it, kernels on the double.
BOTH_WAYS = {
    "re-pointing beside kernels",
    "re-pointing between passes",
    "calls beside re-pointing",
    "overhead with nothing remapped",
    "a decode step attached at alpha 0",
    "serving",
    "reload of a 13B model",
    "continuous batching at fixed rates",
}
SHARING = {name for name in MEASURES if name.startswith("sharing")}
SLOW = {*SHARING, "continuous batching at fixed rates", "cold models", "master copies that find no room"}


def ways() -> Iterator[Any]:
    for name, each in MEASURES.items():
        marks = [pytest.mark.slow] if name in SLOW else []
        double = "torch-cuda" in each.needs
        if name in ELSEWHERE or "vllm" in each.needs:  # tests/engines/vllm/test_gpu_measures.py
            continue
        for on_double in {double, double or name in BOTH_WAYS}:
            yield pytest.param(name, on_double, marks=marks, id=f"{name}{', on the double' * on_double}")


def on_cpu() -> Any:
    needs("torch")
    from cuda_on_cpu import cuda_on_cpu

    return cuda_on_cpu()


def run(body: Callable[[Any], Iterator[Figure]], context: Any, *, double: bool = False) -> dict[str, Figure]:
    """All that it yields until it ends or skips the rest, by name."""
    found: dict[str, Figure] = {}
    with on_cpu() if double else nullcontext(), suppress(Skip):
        for figure in body(context):
            found[figure.name] = figure
    assert found, "it was skipped before it measured anything"
    return found


def made_small(monkeypatch: pytest.MonkeyPatch, small: Any) -> None:
    """What a measure takes for a GPU, as small as on the emulated driver."""
    from bench.gpu.measures import attention, attention_layouts, continuous_batching, decode_step, serving

    step = decode_step._shape(small, on_gpu=False)
    batching = replace(continuous_batching.choose(small, on_gpu=False), rates=(10.0,))
    for module, name, value in (
        (attention, "SHAPES", (attention.Shape("tiny", 4, 2, 3, 40),)),
        (attention, "kernels_for", obvious_kernels),
        (attention_layouts, "kernels_for", obvious_kernels),
        (attention_layouts, "CASES", (tiny_case(attention_layouts),)),
        (decode_step, "_shape", lambda ctx, on_gpu: step),
        (continuous_batching, "choose", lambda ctx, on_gpu: batching),
        (serving, "choose", lambda ctx: serving.TINY),
    ):
        monkeypatch.setattr(module, name, value)


# What is looked at beside targets that are exact: a part of a figure's name, and what is so of one figure that has it.
EXPECTED: dict[str, list[tuple[str, Callable[[Figure], bool]]]] = {
    "re-pointing beside kernels": [
        ("wrong bytes read beside re-pointing", lambda each: each.n > 0 and each.detail["regions"] >= 16)
    ],
    "re-pointing between passes": [("between which layers moved", lambda each: each.n >= each.detail["changes"] > 0)],
    "session.step": [("backend calls of such steps", lambda each: each.value == 0)],
    "growth": [("backend calls before blocks are usable, most of any case", lambda each: each.value == 0)],
    "calls beside re-pointing": [("calls made while the worker was at work, pages of 2 MiB", lambda each: each.exact)],
    "small copies beside layers": [
        (f"whole layers, {title}", lambda each: (each.target, each.at_least) == (0.97, True))
        for title in ("whole layers", "1 MiB pieces")
    ],
    "gaps between chunks": [("fill, default, share", lambda each: (each.target, each.n) == (0.95, 2))],
    "copies inside graphs": [
        (
            f"{side} / pieces, computation = 4 copies, alpha 2, beta 2",
            lambda each: each.n > 0 and each.detail["theirs_n"] > 0,
        )
        for side in ("one graph", "open graph", "no copies")
    ],
    "copies of KV blocks": [
        (f"64 copies {way} of 512 bytes, batches / a call each", lambda each: each.n == 3) for way in ("in", "out")
    ],
    "cold models": [
        ("first tokens that differ", lambda each: each.n > 0 and each.value == 0),
        ("whole models, LRU, bytes copied", lambda each: each.value > 0),
    ],
    "master copies that find no room": [("until it was page-locked", lambda each: 0 < each.value < 40)],
    "page-locking beside launches": [("130 MiB in pieces of 64 MiB", lambda each: each.n == 3)],
    "waits for events": [("the library / spinning", lambda each: each.n == 5)],
    "processes that share a GPU": [("pages that were granted", lambda each: each.value == 64 * 3)],
    "making pages": [("16 pages of 2 MiB, 4 threads / one", lambda each: each.n == 3)],
    "decode attention by layout": [("block-major / plain tensor", lambda each: each.n > 0)],
    "a decode step attached at alpha 0": [("attached, longer by", lambda each: "control_percent" in each.detail)],
    "reload of an idle model": [
        (f"reload, {way}, of 16 layers of 2 MiB, share of the link", lambda each: each.n == 2)
        for way in ("streaming", "idle")
    ],
    "reload of a 13B model": [
        (f"40 of OPT-13b's 40 layers, {way}, share of the link", lambda each: each.n == 2)
        for way in ("streaming", "idle")
    ],
    "serving": [("answers as the baseline's", lambda each: each.value == each.n > 0)],
    "continuous batching at fixed rates": [
        ("answers as stock's", lambda each: each.value == each.n > 0),
        *((f", {side}, goodput", lambda each: each.detail["runs"] >= 1) for side in ("stock", "remap")),
    ],
    "continuous batching at fixed rates, on the double": [
        (", stock, its own settings, goodput", lambda each: each.detail["runs"] >= 1)
    ],
    **{
        name: [
            ("layers of one model that were KV at once", lambda each: each.n > 0),
            ("remap, first token, P99", lambda each: each.n > 0),
            ("tokens/s, remap / kv-pool+swap", lambda each: each.detail["runs"] > 0),
        ]
        for name in SHARING
    },
}


@pytest.mark.parametrize(("name", "double"), list(ways()))
def test_it_runs_and_counts_right(small: Any, monkeypatch: pytest.MonkeyPatch, name: str, double: bool) -> None:
    each = MEASURES[name]
    needs(*(package for package in each.needs if package in ("torch", "transformers")))
    if double:
        needs("torch", "transformers")
        made_small(monkeypatch, small)
    small.until = time.monotonic() + (3.0 if each.emulated_s < 3.0 else each.emulated_s + 7.0)
    if name == "serving":
        small.until += 120.0  # it ends when all are answered; too few are, where others keep the cores busy
    found = run(each.body, small, double=double)
    for figure in found.values():
        if figure.exact and figure.target is not None:
            assert figure.met, figure
    for part, holds in (*EXPECTED.get(name, ()), *(EXPECTED.get(f"{name}, on the double", ()) if double else ())):
        mine = [figure for title, figure in found.items() if part in title]
        assert mine and all(map(holds, mine)), (part, mine)


def test_only_the_drivers_own_way_copies_ordinary_memory(small: Any) -> None:
    """The staged way is the library's, and copies to memory of its own alone: what was timed on a GPU first was the driver's."""
    from emulated import Emulated, find

    driver = Emulated(find())
    before = driver.pageable()
    found = run(MEASURES["staged copies"].body, small)
    rounds = next(each.n for title, each in found.items() if title.endswith("the driver's")) + 1
    assert driver.pageable() - before == rounds


# -- reading layers ----------------------------------------------------------------------------------------------------


def test_readings_count_words_that_are_not_the_master_copys(emulated_gpu: Any, context: Any, raw: Any) -> None:
    needs("torch")
    from bench.gpu.reading import CopyReading, KernelReading

    tenant, marks = raw
    layer, at = 3, remap.advanced.layer_address(tenant.session, "raw", 3)
    with context.buffers(host=2 * internals(tenant).layer_bytes) as (_, host):
        for what in (KernelReading(tenant, None), CopyReading(tenant, marks, tenant.handle, host, 2)):
            for each in range(tenant.layers):
                what.read(each)
            assert (what.wrong(), what.reads) == (0, tenant.layers), what.kind
            for flipped in (0xFF, 0):
                tenant.backend.fill(tenant.handle, at, int(tenant.masters[layer][0]) ^ flipped, 1)
                marks.wait(marks.mark(tenant.handle))
                marks.reset()
                what.read(layer)
                assert what.wrong() == 1, what.kind


def test_what_goes_wrong_in_the_background_is_raised_at_its_end(raw: Any) -> None:
    from bench.gpu.measures.beside_kernels import Background

    def read(layer: int) -> None:
        raise ValueError("no such layer")

    background = Background(SimpleNamespace(read=read), raw[0].layers, raw[1], raw[0].handle)
    with pytest.raises(ValueError, match="no such layer"):
        background.end()


def test_calls_are_told_apart_by_whether_the_worker_was_at_work(small: Any) -> None:
    from bench.gpu.measures.step_latency import Calls
    from bench.gpu.mover import Mover, mover_bytes
    from bench.gpu.tenants import device_tenant

    with device_tenant(small, 2, 2 * MIB, spare_bytes=mover_bytes(4, 2 * MIB, 2 * MIB)) as (raw, marks):
        mover = Mover(raw, 4, 2 * MIB)
        calls = Calls(raw, SimpleNamespace(at_work=False), marks, lambda: None)  # type: ignore[arg-type]
        seen = []
        for at_work, while_busy in ((False, False), (True, True), (False, True)):  # the last ends at once: it is idle
            calls._mover = SimpleNamespace(at_work=at_work)  # type: ignore[assignment]
            calls.rounds(5, while_busy=while_busy)
            seen.append([{len(each) for each in kind.values()} for kind in (calls.idle, calls.busy)])
        assert seen == [[{5}, {0}], [{5}, {5}], [{6}, {5}]]
        for _ in range(3):
            mover.begin()
            raw.run()
        mover.go_home()
        assert (mover.at_work, mover.regions) == (False, 4 * 4)
        raw.verify(marks)


# -- attention by layout -----------------------------------------------------------------------------------------------


def test_views_are_the_tensors_of_a_session_with_that_layout(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("torch")
    import torch
    from bench.gpu.measures import attention_layouts as layouts
    from bench.gpu.tenants import make_masters

    case = tiny_case(layouts)
    spec = case.model.spec(case.blocks, "layer_major")
    with remap.Session("64MiB", device="cuda:0") as session:
        tenant = session.attach_bytes(make_masters(3, 2 * MIB), name="kv", kv=spec)
        mine = layouts.views(torch.empty_like(tenant.kv.memory), spec, 2 * MIB, "layer_major")
        for theirs, ours in zip(tenant.kv.tensors, mine):
            assert (theirs.shape, theirs.stride()) == (ours.shape, ours.stride())
    with pytest.raises(Skip, match="layer_major"):
        layouts.views(torch.empty(MIB, dtype=torch.uint8), spec, 2 * MIB, "layer_major")
    monkeypatch.setattr(layouts, "CASES", (layouts.Case(layouts.LLAMA_3_8B, 8 * layouts.GB, 2 * MIB),))
    with pytest.raises(Skip, match="too large for this device: Llama-3-8b, 8 GB of KV"), on_cpu():
        list(layouts.attention_layouts(small))


def test_the_caches_that_are_measured_are_of_the_sizes_that_they_say() -> None:
    from bench.gpu.measures import attention_layouts as layouts

    for case in layouts.CASES:
        spec = case.model.spec(case.blocks)
        assert 0.85 * case.nbytes < case.blocks * spec.block_bytes <= case.nbytes
        # A layer's keys fill whole pages, so the layer-major region is no longer than the block-major one.
        assert case.blocks * spec.chunk_bytes % case.page_bytes == 0
        assert case.shape.sequences * case.shape.tokens == case.blocks * layouts.BLOCK_TOKENS


# -- beside others: stock transformers, torch_memory_saver -------------------------------------------------------------


def test_a_side_that_computes_other_logits_is_found(small: Any) -> None:
    needs("torch", "transformers")
    import torch
    from bench.gpu.measures import decode_step as steps
    from bench.gpu.models import make_model

    shape, dtype = steps._shape(small, on_gpu=False)
    models = {"stock": make_model(shape, "cpu", dtype), "attached": make_model(shape, "cpu", dtype, seed=1)}
    clock = steps.Clock(torch, on_gpu=False)
    batch = steps.Batch(2, 8, 8)
    assert steps.steps_in_turn(small, torch, clock, models, batch, "cpu", 0.5).apart == {"stock": 0, "attached": 8}
    with pytest.raises(Wrong, match="'attached': 8"):
        steps.verify(small, torch, clock, models, batch, "cpu")
    same = {"stock": models["stock"], "attached": make_model(shape, "cpu", dtype)}
    assert steps.verify(small, torch, clock, same, batch, "cpu") == 8


def test_models_are_chosen_by_what_fits(small: Any) -> None:
    needs("torch", "transformers")
    from bench.gpu.measures import continuous_batching as batching
    from bench.gpu.measures import decode_step as steps

    def layers(choose: Any, free_gib: int, host_gib: int) -> int:
        gib = SimpleNamespace(free_bytes=free_gib << 30, host_budget=host_gib << 30)
        chosen = choose(SimpleNamespace(pick=lambda full, quick, emulated: full, **vars(gib)), on_gpu=True)
        return (chosen[0] if choose is steps._shape else chosen.shape).layers

    assert (layers(steps._shape, 76, 100), layers(steps._shape, 40, 100)) == (32, 16)
    assert (layers(batching.choose, 76, 100), layers(batching.choose, 76, 10)) == (32, 16)
    for choose in (steps._shape, batching.choose):
        with pytest.raises(Skip):
            layers(choose, 4, 100)


class FakeSaver:
    """torch_memory_saver's calls on CPU tensors: pause() loses their bytes, resume() brings back what it kept."""

    hook_mode = ""

    def __init__(self, *, loses: bool = False) -> None:
        self.loses, self.calls = loses, []
        self.made: list[Any] = []
        self.kept: list[Any] = []

    @contextmanager
    def region(self, *, enable_cpu_backup: bool) -> Iterator[None]:
        import torch

        assert enable_cpu_backup
        real = torch.full

        def full(*arguments: Any, **more: Any) -> Any:
            self.made.append(real(*arguments, **more))
            return self.made[-1]

        torch.full = full  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.full = real

    def pause(self) -> None:
        self.calls.append("pause")
        self.kept = [tensor.clone() for tensor in self.made]
        for tensor in self.made:
            tensor.fill_(-1)

    def resume(self) -> None:
        self.calls.append("resume")
        for tensor, kept in zip(self.made, self.kept if not self.loses else ()):
            tensor.copy_(kept)


def test_what_torch_memory_saver_brings_back_is_compared(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("torch")
    import torch
    from bench.gpu.measures import reload

    assert len(reload.saver_seconds(small, torch, FakeSaver(), "cpu", 1 << 20, 4, 0.5)) == 3
    with pytest.raises(Wrong, match="other bytes"):
        reload.saver_seconds(small, torch, FakeSaver(loses=True), "cpu", 1 << 20, 4, 0.5)
    with pytest.raises(Skip, match="torch_memory_saver: needs torch on a GPU"):
        list(reload.reload_13b(small))
    module = ModuleType("torch_memory_saver")
    module.torch_memory_saver = saver = FakeSaver()  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec("torch_memory_saver", None)
    monkeypatch.setitem(sys.modules, "torch_memory_saver", module)
    names = list(run(reload.reload_13b, small, double=True))
    assert names[-1] == "reload of 40 of OPT-13b's 40 layers, torch_memory_saver / remap"
    assert (saver.calls[:2], saver.hook_mode) == (["pause", "resume"], "torch")


# -- transformers' continuous batching ---------------------------------------------------------------------------------


class FakeManager:
    """transformers' manager as far as it is called here. hangs: this request never gets a token."""

    def __init__(self, *, hangs: str = "", fails: str = "") -> None:
        self.hangs, self.fails = hangs, fails
        self.now = 100.0
        self.ready: list[Any] = []
        self.cancelled: list[str] = []
        self.is_running = lambda: True
        self.cancel_request = self.cancelled.append

    def add_request(self, ids: list[int], *, request_id: str, max_new_tokens: int, **more: Any) -> None:
        assert more == {"record_timestamps": True, "eos_token_id": -1}
        done = SimpleNamespace(
            request_id=request_id,
            generated_tokens=list(range(max_new_tokens)),
            timestamps=[self.now + 0.25 + 0.05 * token for token in range(max_new_tokens)],
            error="no room" if request_id == self.fails else None,
            is_finished=lambda: True,
        )
        self.ready += [done] if request_id != self.hangs else []

    def get_result(self, timeout: float) -> Any:
        self.now += timeout
        return self.ready.pop(0) if self.ready else None


def test_requests_are_timed_from_their_arrival_and_late_ones_count() -> None:
    needs("torch")
    from bench.gpu.measures import continuous_batching as batching

    asked = [batching.Request(name, 0.01 * index, (5, 6), 3) for index, name in enumerate("abc")]
    manager = FakeManager(hangs="b")
    run = batching.serve(manager, asked, 0.3, lambda: manager.now)
    assert (run.good, run.unfinished, manager.cancelled, set(run.answers)) == (2, 1, ["b"], {"a", "c"})
    assert run.first_s == pytest.approx([0.25, 0.25], abs=0.003)
    assert run.token_s == pytest.approx([0.05, 0.05])
    assert run.late_s == pytest.approx([0.29], abs=0.003)
    found = {each.name: each for each in batching.figures("b", {"stock": [run], "remap": [run, run]}, 5.0, 0.3)}
    assert found["b, answers as stock's"].value == 2
    assert found["b, remap, goodput (us: first token)"].detail["runs"] == 2
    assert found["b, stock, first token, P99"].n == 3
    with pytest.raises(Wrong, match="request a: no room"):
        batching.serve(FakeManager(fails="a"), asked[:1], 0.3)


# -- what the hand remaps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute_s", "copy_s", "selection", "least", "most"),
    [
        (150e-6, 11.4e-3, "slices", 0.1, 1.0),  # a layer of 13B behind PCIe: a few pages of each
        (1e-3, 1.5e-3, "uniform", 1, 5),  # a fast link
        (1e-6, 1.0, "slices", 0, 0),  # not even a page of each
        (1e-3, 0.0, "uniform", 0, 0),  # no copy was timed
    ],
)
def test_the_hand_takes_what_a_pass_nearly_hides(
    compute_s: float, copy_s: float, selection: str, least: float, most: float
) -> None:
    needs("torch", "transformers")
    from bench.gpu.measures.serving import BUFFERS, SLOWDOWN, by_hand

    from remap.policy import schedule

    layers, pages = 40, 301
    choice = by_hand([compute_s] * layers, copy_s, pages)
    assert choice.selection == selection
    assert least <= choice.layers <= most
    if selection == "uniform" and choice.layers:
        streamed = schedule.uniform(layers, int(choice.layers), choice.buffers)
        period = schedule.period([compute_s] * layers, [copy_s] * layers, streamed, choice.buffers)
        assert period <= (1 + SLOWDOWN) * layers * compute_s * (1 + 1e-6)
    elif choice.layers:
        slice_s = choice.layers / (layers - BUFFERS) * copy_s
        assert layers * slice_s <= (1 + SLOWDOWN) * layers * compute_s


def test_what_the_hand_chose_can_be_remapped(raw: Any) -> None:
    needs("torch", "transformers")
    from bench.gpu.measures.serving import by_hand

    tenant, marks = raw
    # A layer's copy takes longer than a pass: some pages of each, of which these layers have two.
    choice = by_hand([1e-3] * tenant.layers, 20e-3, 32)
    assert (choice.selection, choice.layers) == ("slices", 0.375)
    remap.advanced.remap(tenant.session, "raw", choice.layers, choice.buffers, choice.selection)
    tenant.verify(marks)
    assert tenant.tenant.remapped >= choice.layers
