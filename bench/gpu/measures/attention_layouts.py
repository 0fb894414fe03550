"""Decode attention by KV layout: block-major and layer-major strides over the same pages, and a tensor of torch's, taking turns.

The same kernel reads the same number of bytes in the same order of blocks. With block_major the next block of a layer lies a
block of all layers away (2 MiB with Llama-3-8b, 12.5 MiB with OPT-13b), with layer_major right behind. A plain tensor is laid
out layer by layer too, in memory of torch's allocator instead of an arena's pages: what is left between these two is the pages'.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.gpu.context import MIB, Context, Skip
from bench.gpu.registry import measure
from bench.gpu.results import Figure, ratio, seconds
from bench.gpu.tenants import make_masters

import remap
from remap.kv.spec import KVGeometry

from .attention import BLOCK_TOKENS, HEAD_DIM, Kernel, Replays, Shape, in_turns, kernels_for, verify

TOKENS = 2048  # of each sequence
GB = 10**9
ALIGNED_BLOCKS = 512  # so that a layer's keys fill whole pages in either layout


@dataclass(frozen=True)
class Model:
    """What of a model decides how its KV lies."""

    name: str
    layers: int
    heads: int
    kv_heads: int

    def spec(self, blocks: int, layout: str = "block_major") -> remap.KVSpec:
        return remap.KVSpec(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=HEAD_DIM,
            block_tokens=BLOCK_TOKENS,
            min_blocks=blocks,
            max_blocks=blocks,
            layout=layout,
        )


@dataclass(frozen=True)
class Case:
    """One cache: so many bytes of KV in all layers, about, in pages of `page_bytes`."""

    model: Model
    nbytes: int
    page_bytes: int
    aligned: int = ALIGNED_BLOCKS
    tokens: int = TOKENS

    @property
    def blocks(self) -> int:
        """A multiple of `aligned`, and at least that."""
        return max(1, self.nbytes // self.model.spec(1).block_bytes // self.aligned) * self.aligned

    @property
    def shape(self) -> Shape:
        """The batch that reads all of it."""
        model = self.model
        sequences = self.blocks // -(-self.tokens // BLOCK_TOKENS)
        return Shape(
            f"{model.name}, {self.nbytes / GB:.2g} GB of KV", model.heads, model.kv_heads, sequences, self.tokens
        )


LLAMA_3_8B = Model("Llama-3-8b", 32, 32, 8)
OPT_13B = Model("OPT-13b", 40, 40, 40)
# Opening an arena creates every page; of 64 GB in pages of 2 MiB that alone would take seconds.
CASES = (
    Case(LLAMA_3_8B, 8 * GB, 2 * MIB),
    Case(OPT_13B, 84 * GB // 10, 2 * MIB, aligned=128),
    Case(LLAMA_3_8B, 32 * GB, 16 * MIB),
    Case(LLAMA_3_8B, 64 * GB, 16 * MIB),
)
SIDES = ("block-major", "layer-major", "plain tensor")


def views(memory: Any, spec: remap.KVSpec, page_bytes: int, layout: str) -> list[Any]:
    """Each layer's tensor in `memory` (bytes, one dimension), as a session lays it out."""
    import torch

    geometry = KVGeometry(replace(spec, layout=layout), page_bytes)
    if geometry.region_bytes > memory.numel():
        raise Skip(f"{layout}: {geometry.region_bytes} bytes are needed where the region has {memory.numel()}")
    typed = memory.view(getattr(torch, spec.dtype))
    made = []
    for layer in range(spec.layers):
        offset, shape, stride = geometry.tensor_layout(layer)
        made.append(typed.as_strided(shape, stride, offset // spec.itemsize))
    return made


def one_case(
    ctx: Context,
    case: Case,
    device: str,
    replays: Replays,
    kernels: Callable[[Any, Shape, Any], Mapping[str, Kernel]],
    plain: bool,
    rounds: int,
    share: float,
) -> dict[str, dict[str, list[float]]]:
    """Seconds a call by kernel and side. device: torch's name of where the session's tensors are. plain: whether there is room
    for the tensor of torch's beside the session."""
    import torch

    spec, shape = case.model.spec(case.blocks), case.shape
    page = case.page_bytes
    capacity = -(-spec.max_blocks * spec.block_bytes // page) * page + (spec.layers + 2) * page
    taken: dict[str, dict[str, list[float]]] = {}
    with remap.Session(capacity, device="cuda:0", page_bytes=page) as session:
        tenant = session.attach_bytes(make_masters(spec.layers, min(page, 2 * MIB)), name="kv", kv=spec)
        memory = tenant.kv.memory
        used = spec.max_blocks * spec.block_bytes
        memory[:used].view(getattr(torch, spec.dtype)).normal_()  # all blocks are usable, so all of it is the tenant's
        sides = {"block-major": tenant.kv.tensors, "layer-major": views(memory, spec, page, "layer_major")}
        if plain:
            beside = torch.empty_like(memory[:used])
            beside.view(getattr(torch, spec.dtype)).normal_()
            sides["plain tensor"] = views(beside, spec, page, "layer_major")
        blocks = torch.tensor(tenant.kv.allocate(spec.max_blocks))[torch.randperm(spec.max_blocks)]
        width = -(-shape.tokens // BLOCK_TOKENS)
        table = blocks[: shape.sequences * width].to(device=device, dtype=torch.int32).view(shape.sequences, width)
        q = torch.randn(shape.sequences, shape.heads, HEAD_DIM, device=device, dtype=getattr(torch, spec.dtype))
        for name, kernel in kernels(torch, shape, table).items():
            for side, tensors in sides.items():
                for kv in (tensors[0], tensors[-1]):
                    verify(torch, f"{name}, {side}", shape, kernel, q, kv, table)
            calls = {side: partial(_attend, kernel, q, tensors) for side, tensors in sides.items()}
            taken[name] = in_turns(ctx, replays, calls, spec.layers, rounds, share)
        if device != "cpu":
            torch.cuda.current_stream().synchronize()
    return taken


def _attend(kernel: Kernel, q: Any, tensors: Sequence[Any], layer: int) -> None:
    kernel(q, tensors[layer])


def figures(case: Case, name: str, taken: Mapping[str, list[float]]) -> Iterator[Figure]:
    """What each side takes, and the ratios."""
    shape, base = case.shape, "plain tensor" if "plain tensor" in taken else "layer-major"
    title = f"decode attention, {name}, {shape.name}"
    detail = {"sequences": shape.sequences, "tokens": shape.tokens, "page_bytes": case.page_bytes}
    for side, samples in taken.items():
        rate = shape.read_bytes / statistics.median(samples) / GB
        yield seconds(f"{title}, {side}, a layer", samples, shown=False, read_GBps=rate, **detail)
    for side in taken:
        if side != base:
            yield ratio(f"{title}, {side} / {base}", taken[side], taken[base], **detail)


@measure("decode attention by layout", needs=("torch-cuda", "triton"), full_s=32, quick_s=8)
def attention_layouts(ctx: Context) -> Iterator[Figure]:
    """From 8 to 64 GB of KV, as much as the device has; the largest may leave no room for the plain tensor."""
    import torch

    torch.manual_seed(0)
    left_out = []
    cases = ctx.pick(CASES, CASES[:1], CASES[:1])
    for case in cases:
        nbytes = case.blocks * case.model.spec(1).block_bytes
        free = ctx.free_bytes
        if 1.1 * nbytes > free:
            left_out.append(f"{case.shape.name}: {nbytes >> 30} GiB of {free >> 30} GiB free")
            continue
        plain = 2.1 * nbytes < free
        rounds, share = ctx.pick(24, 10, 3), 0.6 / len(cases)
        for name, taken in one_case(ctx, case, "cuda", Replays(torch), kernels_for, plain, rounds, share).items():
            yield from figures(case, name, taken)
        torch.cuda.empty_cache()
    if left_out:
        raise Skip("too large for this device: " + "; ".join(left_out))
