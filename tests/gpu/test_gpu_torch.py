"""Beside torch: its caching allocator, expandable segments, captured graphs, compiled layers and NVTX."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import program
from rig import Rig

import remap

SCRIPT = """
import sys
from types import SimpleNamespace
import models
import remap
import torch
from rig import Rig

device = sys.argv[1]
with Rig(SimpleNamespace(torch=device, emulated=device == "cpu"), models) as rig:
    held = [torch.full((1 << 20,), float(i), device=device) for i in range(8)]
    for alpha in (0, 3, 5, 1, 0):
        remap.advanced.remap(rig.session, "m", alpha, 1)
        del held[::2]
        held += [torch.full((3 << 18,), 9.0, device=device) for _ in range(4)]
        rig.check()
        if device != "cpu":
            torch.cuda.empty_cache()
        rig.check()
    assert all(bool((tensor == tensor[0]).all()) for tensor in held)
print("bit-identical")
"""


ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "settings"),
    [
        ("real_gpu", {}),
        ("real_gpu", dict.fromkeys(ALLOCATORS, "expandable_segments:True")),
        ("gpu", {"REMAP_NVTX": "1"}),
    ],
    ids=["the caching allocator", "expandable segments", "NVTX ranges"],
)
def test_in_a_process_of_its_own_beside(
    request: pytest.FixtureRequest, models: Any, device: str, settings: dict[str, str]
) -> None:
    gpu = request.getfixturevalue(device)
    assert program(SCRIPT, gpu.torch, **settings) == "bit-identical"


def test_graphs_stay_valid_over_every_change(real_gpu: Any, context: Any) -> None:
    """Captured once, with nothing remapped; replayed for every alpha and beta, at once after each change."""
    from bench.gpu.measures.graphs import graphs_over_alpha

    context.until = float("inf")
    figures = list(graphs_over_alpha(context))
    assert [(each.value, each.n > 20) for each in figures] == [(0, True)]


def test_decode_graphs_of_the_engine_stay_valid(real_gpu: Any, models: Any) -> None:
    """The engine's captured decode steps give the tokens of eager passes while layers come and go, and capture nothing anew."""
    import torch

    from remap_serve.engine import LLMEngine, Request, SamplingParams

    requests = [Request(f"r{i}", tuple(range(3 + i, 20 + 2 * i)), SamplingParams(max_tokens=24)) for i in range(4)]
    tokens: dict[str, dict[str, tuple[int, ...]]] = {}
    for graphs in ("eager", "cuda"):
        model = models.make("llama", dtype=torch.float32).to("cuda")
        with remap.Session("128MiB", device="cuda:0") as session:
            room = models.kv_spec(model, block_tokens=16, min_blocks=1, max_blocks=1)
            most = session.capacity_bytes // room.block_bytes  # every layer has a place in the KV region
            spec = models.kv_spec(model, block_tokens=16, max_blocks=most, min_blocks=32)
            tenant = session.attach(model, name="m", kv=spec, hooks=False)
            engine = LLMEngine(
                model, tenant, max_num_seqs=4, max_batch_tokens=128, runner="gpu", attention="triton", graphs=graphs
            )
            engine.warm_up([1, 2, 4])
            captured = engine.runner.stats["captured"]
            for request in requests:
                engine.add_request(request)
            outputs: dict[str, tuple[int, ...]] = {}
            step = 0
            while engine.unfinished:
                if graphs == "cuda":
                    alpha = (
                        step // 2 % (models.LAYERS - 1)
                    )  # for two passes: in the first, layers may be on their way home
                    report = remap.advanced.remap(session, "m", alpha, 1)
                    engine.scheduler.relocate(report.moved.get("m", {}))
                step += 1
                outputs.update((each.id, each.tokens) for each in engine.step().finished)
            assert engine.runner.stats["captured"] == captured
            if graphs == "cuda":
                assert captured > 0
                assert engine.runner.stats["whole"] > 0
                assert engine.runner.stats["piecewise"] > 0
            tokens[graphs] = outputs
    assert tokens["cuda"] == tokens["eager"]


@pytest.mark.slow
def test_compiled_layers(gpu: Any, models: Any) -> None:
    """torch.compile'd layers between wait and done: compiled code reads weights at addresses that do not change.

    On the emulated driver the graph is traced but not compiled to machine code, which takes long and adds nothing there.
    """
    backend = "eager" if gpu.emulated else "inductor"
    with Rig(gpu, models) as rig:
        torch = rig.torch
        for layer in models.layers_of(rig.model):
            layer.forward = torch.compile(layer.forward, backend=backend)
        try:
            expected = rig.logits()
            assert torch.allclose(expected, rig.expected, rtol=1e-3, atol=1e-3)
            for alpha, buffers in ((3, 1), (4, 2), (1, 1), (0, 1)):
                remap.advanced.remap(rig.session, "m", alpha, buffers)
                for _ in range(2):
                    assert torch.equal(rig.logits(), expected)
        finally:
            for layer in models.layers_of(rig.model):
                del layer.forward
