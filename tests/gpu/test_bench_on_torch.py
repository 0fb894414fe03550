"""Measures that compute with torch on a GPU, on the test double of torch.cuda: every line of them runs, nothing is measured."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from bench.gpu.context import Skip
from bench.gpu.results import Figure
from conftest import needs
from rig import obvious_kernels, tiny_case


def run(body: Callable[[Any], Iterator[Figure]], context: Any) -> list[Figure]:
    """All that it yields until it ends or skips the rest."""
    from cuda_on_cpu import cuda_on_cpu

    figures: list[Figure] = []
    with cuda_on_cpu(), suppress(Skip):
        for figure in body(context):
            figures.append(figure)
    assert figures, "it was skipped before it measured anything"
    return figures


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("beside_kernels", "between_passes"),
        ("beside_kernels", "beside_kernels"),
        ("step_latency", "calls_beside_repointing"),
        ("graphs", "graphs"),
        ("graphs", "graphs_over_alpha"),
        ("overhead", "overhead"),
        ("link", "torch_copies"),
    ],
)
def test_it_runs_with_kernels_of_torch(small: Any, module: str, name: str) -> None:
    figures = run(getattr(importlib.import_module(f"bench.gpu.measures.{module}"), name), small)
    for figure in figures:
        if figure.exact and figure.target is not None:
            assert figure.met, figure


def test_attention_is_timed_over_replays(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from bench.gpu.measures import attention
    from cuda_on_cpu import cuda_on_cpu

    monkeypatch.setattr(attention, "kernels_for", obvious_kernels)
    shape = attention.Shape("tiny", 4, 2, 3, 40)
    with cuda_on_cpu():
        taken = attention.one_shape(small, torch, shape, 0.1)
    assert list(taken) == ["obvious"]
    assert len(taken["obvious"]) >= 2


def test_attention_by_layout_runs_and_names_what_is_too_large(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.gpu.context import MIB
    from bench.gpu.measures import attention_layouts as layouts

    monkeypatch.setattr(layouts, "kernels_for", obvious_kernels)
    monkeypatch.setattr(layouts, "CASES", (tiny_case(layouts),))
    names = [each.name for each in run(layouts.attention_layouts, small)]
    assert sum("block-major / plain tensor" in name for name in names) == 1
    monkeypatch.setattr(layouts, "CASES", (layouts.Case(layouts.LLAMA_3_8B, 8 * layouts.GB, 2 * MIB),))
    with pytest.raises(Skip, match="too large for this device: Llama-3-8b, 8 GB of KV"):
        list(layouts.attention_layouts(small))


def test_a_decode_step_is_timed_by_events(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("transformers")
    from bench.gpu.measures import decode_step as steps

    tiny = steps._shape(small, on_gpu=False)
    monkeypatch.setattr(steps, "_shape", lambda ctx, on_gpu: tiny)
    small.until = time.monotonic() + 20
    assert [each.unit for each in run(steps.decode_step, small)] == ["%", "us"]


def test_models_are_chosen_by_what_fits(small: Any) -> None:
    from bench.gpu.measures import continuous_batching as batching
    from bench.gpu.measures import decode_step as steps

    def machine(free_gib: int, host_gib: int) -> Any:
        return SimpleNamespace(
            pick=lambda full, quick, emulated: full, free_bytes=free_gib << 30, host_budget=host_gib << 30
        )

    large, small_one = machine(76, 100), machine(40, 100)
    assert steps._shape(large, on_gpu=True)[0].layers == 32
    assert steps._shape(small_one, on_gpu=True)[0].layers == 16
    assert batching.choose(large, on_gpu=True).shape.layers == 32
    assert batching.choose(machine(76, 10), on_gpu=True).shape.layers == 16
    for body in (steps._shape, batching.choose):
        with pytest.raises(Skip):
            body(machine(4, 100), on_gpu=True)


def test_a_large_reload_is_compared_with_torch_memory_saver(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from bench.gpu.measures import reload

    class Saver:
        """The package's calls; nothing is ever released, so nothing is lost."""

        hook_mode = ""
        calls: list[str] = []  # noqa: RUF012 - one saver, as there is one in the package

        @contextmanager
        def region(self, *, enable_cpu_backup: bool) -> Iterator[None]:
            yield

        def pause(self) -> None:
            self.calls.append("pause")

        def resume(self) -> None:
            self.calls.append("resume")

    module = ModuleType("torch_memory_saver")
    module.torch_memory_saver = Saver()  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec("torch_memory_saver", None)
    monkeypatch.setitem(sys.modules, "torch_memory_saver", module)
    small.until = time.monotonic() + 10
    names = [each.name for each in run(reload.reload_13b, small)]
    assert names[-1] == "reload of 40 of OPT-13b's 40 layers, torch_memory_saver / remap"
    assert (Saver.calls[:2], module.torch_memory_saver.hook_mode) == (["pause", "resume"], "torch")
    assert torch.zeros(1).device.type == "cpu"


@pytest.mark.slow
def test_continuous_batching_has_three_sides_on_a_gpu(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("transformers")
    from bench.gpu.measures import continuous_batching as batching

    tiny = replace(batching.choose(small, on_gpu=False), rates=(10.0,))
    monkeypatch.setattr(batching, "choose", lambda ctx, on_gpu: tiny)
    small.until = time.monotonic() + 15
    names = [each.name for each in run(batching.continuous_batching, small)]
    for side in ("stock", "remap", "stock, its own settings"):
        assert any(f", {side}, goodput" in name for name in names)


def test_serving_runs_as_on_a_gpu(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("transformers")
    from bench.gpu.measures import serving

    monkeypatch.setattr(serving, "choose", lambda ctx: serving.TINY)
    small.until = time.monotonic() + 15
    assert any("answers as the baseline's" in each.name for each in run(serving.serving, small))
