"""The GPU suite's measures with tiny sizes, and what of them needs torch on a GPU, on CPU tensors over the emulated device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from bench.gpu.context import MIB, Skip
from bench.gpu.results import Figure
from conftest import needs
from rig import obvious_kernels, tiny_case

import remap


def figures_of(body: Any, context: Any) -> dict[str, Figure]:
    """What a measure yields, by name."""
    return {each.name: each for each in body(context)}


# -- reading layers ----------------------------------------------------------------------------------------------------


def _readings(raw: Any, marks: Any, context: Any) -> Iterator[Any]:
    from bench.gpu.reading import CopyReading, KernelReading

    yield KernelReading(raw, None)
    with context.buffers(host=2 * raw.layer_bytes) as (_, host):
        yield CopyReading(raw, marks, raw.handle, host, 2)


def test_readings_count_words_that_are_not_the_master_copys(emulated_gpu: Any, context: Any, raw: Any) -> None:
    needs("torch")
    tenant, marks = raw
    layer, at = 3, remap.advanced.layer_address(tenant.session, "raw", 3)
    for what in _readings(tenant, marks, context):
        for each in range(tenant.layers):
            what.read(each)
        assert (what.wrong(), what.reads) == (0, tenant.layers), what.kind
        word = int(tenant.masters[layer][0]) ^ 0xFF
        tenant.backend.fill(tenant.handle, at, word, 1)
        marks.wait(marks.mark(tenant.handle))
        marks.reset()
        what.read(layer)
        assert what.wrong() == 1, what.kind
        tenant.backend.fill(tenant.handle, at, word ^ 0xFF, 1)
        marks.wait(marks.mark(tenant.handle))
        marks.reset()
        what.read(layer)
        assert what.wrong() == 1, what.kind


def test_what_goes_wrong_in_the_background_is_raised_at_its_end(raw: Any) -> None:
    from bench.gpu.measures.beside_kernels import Background

    tenant, marks = raw

    def read(layer: int) -> None:
        raise ValueError("no such layer")

    background = Background(SimpleNamespace(read=read), tenant.layers, marks, tenant.handle)
    with pytest.raises(ValueError, match="no such layer"):
        background.end()


def test_layers_are_read_while_their_neighbours_are_repointed(small: Any) -> None:
    from bench.gpu.measures import beside_kernels

    found = figures_of(beside_kernels.beside_kernels, small)
    wrong = found["wrong bytes read beside re-pointing"]
    assert (wrong.value, wrong.target, wrong.exact) == (0, 0, True)
    assert wrong.n > 0
    assert wrong.detail["regions"] >= 4 * beside_kernels.LAYERS


def test_passes_read_right_bytes_whatever_moves_between_them(small: Any) -> None:
    from bench.gpu.measures import beside_kernels

    found = figures_of(beside_kernels.between_passes, small)
    wrong = found["wrong bytes read by passes between which layers moved"]
    assert wrong.value == 0
    assert wrong.n == beside_kernels.LAYERS * wrong.detail["changes"]


# -- calls and copies beside the worker --------------------------------------------------------------------------------


def test_calls_are_told_apart_by_whether_the_worker_was_at_work(small: Any) -> None:
    from bench.gpu.measures.step_latency import Calls
    from bench.gpu.mover import Mover, mover_bytes
    from bench.gpu.tenants import device_tenant

    with device_tenant(small, 2, 2 * MIB, spare_bytes=mover_bytes(4, 2 * MIB, 2 * MIB)) as (raw, marks):
        mover = Mover(raw, 4, 2 * MIB)
        at_work = False
        calls = Calls(raw, SimpleNamespace(at_work=False), marks, lambda: None)  # type: ignore[arg-type]
        calls.rounds(5, while_busy=False)
        assert {len(each) for each in calls.idle.values()} == {5}
        assert not any(calls.busy.values())
        calls._mover = SimpleNamespace(at_work=True)  # type: ignore[assignment]
        calls.rounds(5, while_busy=True)
        assert {len(each) for each in calls.busy.values()} == {5}
        calls._mover = SimpleNamespace(at_work=at_work)  # type: ignore[assignment]
        calls.rounds(5, while_busy=True)  # ends at once: the worker is idle
        assert {len(each) for each in calls.idle.values()} == {6}
        for _ in range(3):
            mover.begin()
            raw.run()
        mover.go_home()
        assert not mover.at_work
        assert mover.regions == 4 * 4
        raw.verify(marks)


def test_calls_beside_repointing_are_counted(small: Any) -> None:
    from bench.gpu.measures.step_latency import calls_beside_repointing

    found = figures_of(calls_beside_repointing, small)
    assert found["calls made while the worker was at work, pages of 2 MiB"].exact


def test_small_copies_are_measured_with_whole_layers_and_with_pieces(small: Any) -> None:
    from bench.gpu.measures import small_copies as module

    found = figures_of(module.small_copies, small)
    for title in ("whole layers", "1 MiB pieces"):
        rate = found[f"prefetch, share of plain copies of whole layers, {title}"]
        assert (rate.target, rate.at_least) == (0.97, True)


# -- attention by layout -----------------------------------------------------------------------------------------------


class HostReplays:
    """A stand-in for `attention.Replays` on CPU tensors: no graph, and the host's clock."""

    def record(self, piece: Any) -> Any:
        piece()
        return piece

    def seconds(self, replay: Any) -> float:
        begun = time.perf_counter()
        replay()
        return time.perf_counter() - begun


def test_layouts_are_compared_over_the_same_pages(small: Any) -> None:
    needs("torch")
    import torch
    from bench.gpu.measures import attention_layouts as layouts

    case = tiny_case(layouts)
    assert (case.blocks, case.shape.sequences) == (256, 256 // 3)
    taken = layouts.one_case(small, case, "cpu", HostReplays(), obvious_kernels, True, 3, 0.1)["obvious"]
    assert tuple(taken) == layouts.SIDES
    assert {len(samples) for samples in taken.values()} == {2}
    names = {each.name.rpartition(", ")[2]: each for each in layouts.figures(case, "obvious", taken)}
    assert {"block-major / plain tensor", "layer-major / plain tensor"} < set(names)
    del taken["plain tensor"]
    assert any("block-major / layer-major" in each.name for each in layouts.figures(case, "obvious", taken))
    assert torch.get_default_dtype() is torch.float32


def test_views_are_the_tensors_of_a_session_with_that_layout(small: Any) -> None:
    needs("torch")
    import torch
    from bench.gpu.measures import attention_layouts as layouts

    import remap

    case = tiny_case(layouts)
    spec = case.model.spec(case.blocks, "layer_major")
    with remap.Session("64MiB", device="cuda:0") as session:
        from bench.gpu.tenants import make_masters

        tenant = session.attach_bytes(make_masters(3, 2 * MIB), name="kv", kv=spec)
        mine = layouts.views(torch.empty_like(tenant.kv.memory), spec, 2 * MIB, "layer_major")
        for theirs, ours in zip(tenant.kv.tensors, mine):
            assert (theirs.shape, theirs.stride()) == (ours.shape, ours.stride())
    with pytest.raises(Skip, match="layer_major"):
        layouts.views(torch.empty(MIB, dtype=torch.uint8), spec, 2 * MIB, "layer_major")


def test_the_caches_that_are_measured_are_of_the_sizes_that_they_say() -> None:
    from bench.gpu.measures import attention_layouts as layouts

    for case in layouts.CASES:
        nbytes = case.blocks * case.model.spec(1).block_bytes
        assert 0.85 * case.nbytes < nbytes <= case.nbytes
        spec = case.model.spec(case.blocks)
        # A layer's keys fill whole pages, so the layer-major region is no longer than the block-major one.
        assert case.blocks * spec.chunk_bytes % case.page_bytes == 0
        assert case.shape.sequences * case.shape.tokens == case.blocks * layouts.BLOCK_TOKENS


# -- beside others: stock transformers, torch_memory_saver -------------------------------------------------------------


def test_a_step_attached_is_compared_with_the_same_model_as_it_comes(small: Any) -> None:
    needs("torch", "transformers")
    from bench.gpu.measures.decode_step import decode_step

    small.until = time.monotonic() + 20
    found = figures_of(decode_step, small)
    longer = next(each for name, each in found.items() if name.endswith("attached, longer by"))
    assert longer.n >= 3
    assert "control_percent" in longer.detail


def test_a_side_that_computes_other_logits_is_found(small: Any) -> None:
    needs("torch", "transformers")
    import torch
    from bench.gpu.measures import decode_step as steps
    from bench.gpu.models import make_model
    from bench.gpu.registry import Wrong

    shape, dtype = steps._shape(small, on_gpu=False)
    models = {"stock": make_model(shape, "cpu", dtype), "attached": make_model(shape, "cpu", dtype, seed=1)}
    clock = steps.Clock(torch, on_gpu=False)
    with pytest.raises(Wrong, match=r"step 0: .* computed other logits"):
        steps.steps_in_turn(small, torch, clock, models, steps.Batch(2, 8, 8), "cpu", 0.5)


def test_a_large_model_is_reloaded_as_a_small_one_is(small: Any) -> None:
    from bench.gpu.measures.reload import reload, reload_13b

    small.until = time.monotonic() + 6
    figures = list(reload(small))
    assert figures[0].name == "reload of 16 layers of 2 MiB, share of the link"
    with pytest.raises(Skip, match="torch_memory_saver: needs torch on a GPU"):
        figures.extend(reload_13b(small))
    assert figures[3].name == "reload of 40 of OPT-13b's 40 layers, share of the link"
    assert {each.n for each in figures} == {2}


class FakeSaver:
    """torch_memory_saver's calls on CPU tensors: pause() loses their bytes, resume() brings back what it kept."""

    def __init__(self, *, loses: bool) -> None:
        self.loses = loses
        self.kept: list[tuple[Any, Any]] = []
        self.made: list[Any] = []

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
        self.kept = [(tensor, tensor.clone()) for tensor in self.made]
        for tensor in self.made:
            tensor.fill_(-1)

    def resume(self) -> None:
        if not self.loses:
            for tensor, kept in self.kept:
                tensor.copy_(kept)


def test_what_torch_memory_saver_brings_back_is_compared(small: Any) -> None:
    needs("torch")
    import torch
    from bench.gpu.measures.reload import saver_seconds
    from bench.gpu.registry import Wrong

    assert len(saver_seconds(small, torch, FakeSaver(loses=False), "cpu", 1 << 20, 4, 0.5)) == 3
    with pytest.raises(Wrong, match="other bytes"):
        saver_seconds(small, torch, FakeSaver(loses=True), "cpu", 1 << 20, 4, 0.5)


# -- transformers' continuous batching ---------------------------------------------------------------------------------


class FakeManager:
    """transformers' manager as far as it is called here. hangs: this request never gets a token."""

    def __init__(self, *, hangs: str = "", fails: str = "") -> None:
        self.hangs, self.fails = hangs, fails
        self.now = 100.0
        self.ready: list[Any] = []
        self.cancelled: list[str] = []

    def add_request(self, ids: list[int], *, request_id: str, max_new_tokens: int, **more: Any) -> None:
        assert more == {"record_timestamps": True, "eos_token_id": -1}
        times = [self.now + 0.25 + 0.05 * token for token in range(max_new_tokens)]
        if request_id != self.hangs:
            error = "no room" if request_id == self.fails else None
            tokens = list(range(max_new_tokens))
            self.ready.append(
                SimpleNamespace(
                    request_id=request_id,
                    generated_tokens=tokens,
                    timestamps=times,
                    error=error,
                    is_finished=lambda: True,
                )
            )

    def get_result(self, timeout: float) -> Any:
        self.now += timeout
        return self.ready.pop(0) if self.ready else None

    def is_running(self) -> bool:
        return True

    def cancel_request(self, name: str) -> None:
        self.cancelled.append(name)


def _asked(*names: str) -> list[Any]:
    from bench.gpu.measures.continuous_batching import Request

    return [Request(name, 0.01 * index, (5, 6), 3) for index, name in enumerate(names)]


def test_requests_are_timed_from_their_arrival_and_late_ones_count() -> None:
    needs("torch")
    from bench.gpu.measures import continuous_batching as batching

    manager = FakeManager(hangs="b")
    run = batching.serve(manager, _asked("a", "b", "c"), 0.3, lambda: manager.now)
    assert (run.good, run.unfinished, manager.cancelled) == (2, 1, ["b"])
    assert set(run.answers) == {"a", "c"}
    assert run.first_s == pytest.approx([0.25, 0.25], abs=0.003)
    assert run.token_s == pytest.approx([0.05, 0.05])
    assert run.late_s == pytest.approx([0.29], abs=0.003)
    found = {each.name: each for each in batching.figures("b", {"stock": [run], "remap": [run, run]}, 5.0, 0.3)}
    assert found["b, answers as stock's"].value == 2
    assert found["b, remap, goodput (us: first token)"].detail["runs"] == 2
    assert found["b, stock, first token, P99"].n == 3


def test_a_request_that_fails_is_no_figure() -> None:
    needs("torch")
    from bench.gpu.measures import continuous_batching as batching
    from bench.gpu.registry import Wrong

    with pytest.raises(Wrong, match="request a: no room"):
        batching.serve(FakeManager(fails="a"), _asked("a"), 0.3)


@pytest.mark.slow
def test_continuous_batching_is_served_by_both_sides(small: Any) -> None:
    needs("torch", "transformers")
    from bench.gpu.measures.continuous_batching import continuous_batching

    small.until = time.monotonic() + 12
    found = figures_of(continuous_batching, small)
    same = found["continuous batching, Llama-3-8b, 20 requests/s, answers as stock's"]
    assert same.value == same.n > 0
    for side in ("stock", "remap"):
        assert (
            found[f"continuous batching, Llama-3-8b, 20 requests/s, {side}, goodput (us: first token)"].detail["runs"]
            >= 1
        )


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
