"""CUDA graphs: what a decode step costs eagerly, as a graph a layer and as one graph; and that graphs outlive every change."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from bench.gpu.context import MIB, Context
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, count, seconds
from bench.gpu.tenants import device_tenant

import remap

from .overhead import LAYERS, DecodeLike, Pass, alternate, bare, bracketed, percent_more


@measure("graphs", needs=("torch-cuda",), full_s=10, quick_s=3)
def graphs(ctx: Context) -> Iterator[Figure]:
    """One decode-like step of 40 layers: eager, a graph a layer between wait and done, one graph inside the bracket."""
    import torch

    from remap_serve.engine.graphs import TorchCudaGraphs

    with device_tenant(ctx, LAYERS, 2 * MIB) as (raw, marks):
        kernels = DecodeLike(raw.stream, ctx.pick(5120, 5120, 0), 16)
        made = TorchCudaGraphs(kernels.stream)
        layer_graphs = [made.capture(partial(kernels.layer, i)) for i in range(LAYERS)]

        def all_layers() -> None:
            for index in range(LAYERS):
                kernels.layer(index)

        whole = made.capture(all_layers)

        def replay(layer: int) -> None:
            layer_graphs[layer]()

        def in_one(*_: Any) -> None:
            with raw.tenant.forward(stream=raw.stream):
                whole()

        sides: dict[str, Pass] = {
            "eager": lambda raw, _: bracketed(raw, kernels.layer),
            "a graph a layer": lambda raw, _: bracketed(raw, replay),
            "a graph a layer, bare": lambda raw, _: bare(raw, replay),
            "one graph": in_one,
            "one graph, bare": lambda raw, _: whole(),
        }
        with torch.cuda.stream(kernels.stream):
            device, host = alternate(ctx, raw, marks, sides, kernels.layer, ctx.pick(40, 12, 3), 0.8)
        raw.verify(marks)
        for name in ("eager", "a graph a layer", "one graph"):
            yield seconds(
                f"decode step of {LAYERS} layers, {name}", device[name], host_us=statistics.median(host[name]) * 1e6
            )
        for name in ("a graph a layer", "one graph"):
            yield percent_more(f"overhead with nothing remapped, {name}", device[name], device[f"{name}, bare"], 0.5)


def float_masters(layers: int, hidden: int) -> list[np.ndarray]:
    """Square matrices of bfloat16 in [1, 2), another a layer, as bytes. No two bytes patterns mean NaN."""
    made = []
    for layer in range(layers):
        bits = np.random.default_rng(layer).integers(0, 128, (hidden, hidden), dtype=np.uint16) | np.uint16(0x3F80)
        made.append(np.ascontiguousarray(bits).view(np.uint8).reshape(-1))
    return made


@measure("graphs over every alpha", needs=("torch-cuda",), full_s=6, quick_s=3)
def graphs_over_alpha(ctx: Context) -> Iterator[Figure]:
    """Graphs captured once with nothing remapped, replayed for every alpha and beta: addresses stay, results are equal."""
    import torch

    from remap_serve.engine.graphs import TorchCudaGraphs

    layers, hidden = 8, 1024
    masters = float_masters(layers, hidden)
    with device_tenant(ctx, layers, masters[0].nbytes, masters=masters) as (raw, marks):
        session = raw.session
        stream = torch.cuda.ExternalStream(raw.stream)
        addresses = [remap.advanced.layer_address(session, "raw", layer) for layer in range(layers)]
        nbytes = masters[0].nbytes
        weights = [session._memory(at, nbytes).view(torch.bfloat16).view(hidden, hidden) for at in addresses]
        state = torch.empty(16, hidden, device="cuda", dtype=torch.bfloat16)
        start = torch.rand(16, hidden, device="cuda", dtype=torch.bfloat16)
        torch.cuda.current_stream().synchronize()

        def layer(index: int) -> None:
            product = state @ weights[index]
            state.copy_(product / product.abs().amax())

        made = TorchCudaGraphs(stream)
        recorded = [made.capture(partial(layer, i)) for i in range(layers)]

        def one_pass() -> Any:
            with torch.cuda.stream(stream):
                state.copy_(start)
                raw.run(lambda index: recorded[index]())
                result = state.clone()
            stream.synchronize()
            return result.view(torch.int16)

        expected = one_pass()
        differing = tried = 0
        for buffers in (1, 2):
            for alpha in range(layers - buffers + 1):
                remap.advanced.remap(session, "raw", alpha, buffers)  # at once after the pass before, without settling
                for _ in range(3):
                    tried += 1
                    differing += int(not torch.equal(one_pass(), expected))
                if [remap.advanced.layer_address(session, "raw", index) for index in range(layers)] != addresses:
                    raise Wrong(f"an address changed at alpha {alpha}, beta {buffers}")
        if torch.equal(expected, start.view(torch.int16)):
            raise Wrong("the passes computed nothing")
        raw.verify(marks)
        yield count("replays that differ, over every alpha and beta", differing, "passes", n=tried, target=0)
        if differing:
            raise Wrong(f"{differing} of {tried} replays gave other bytes")
