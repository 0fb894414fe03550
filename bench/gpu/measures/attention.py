"""Decode attention over paged KV: bytes of KV read a second, as a share of what the device's memory gives a plain copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from bench.gpu.context import MIB, Context, Skip
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, figure
from bench.gpu.tenants import PAGE, make_masters

import remap

LAYERS = 8
BLOCK_TOKENS = 16
HEAD_DIM = 128

Kernel = Callable[[Any, Any], Any]  # (q, one layer's KV) -> out


@dataclass(frozen=True)
class Shape:
    """One batch: sequences of `tokens` tokens each."""

    name: str
    heads: int
    kv_heads: int
    sequences: int
    tokens: int

    @property
    def read_bytes(self) -> int:
        """KV of one layer, read once, bfloat16."""
        return 2 * self.sequences * self.tokens * self.kv_heads * HEAD_DIM * 2


SHAPES = (
    Shape("OPT-13b, 32 x 1024", 40, 40, 32, 1024),
    Shape("Llama-3-8b, 64 x 2048", 32, 8, 64, 2048),
    Shape("Llama-3-8b, 4 x 8192", 32, 8, 4, 8192),
)


class Replays:
    """Pieces of work on one stream, recorded as graphs and timed by events: launching a kernel from Python takes longer than it
    runs, and engines replay graphs too."""

    def __init__(self, torch: Any) -> None:
        from remap_serve.engine.graphs import TorchCudaGraphs

        self._torch, self.stream = torch, torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        self._graphs = TorchCudaGraphs(self.stream)

    def record(self, piece: Callable[[], None]) -> Callable[[], None]:
        """Run it once, and hand back what runs it again."""
        return self._graphs.capture(piece)

    def seconds(self, replay: Callable[[], None]) -> float:
        """Of device time."""
        with self._torch.cuda.stream(self.stream):
            begun, ended = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            replay()
            ended.record()
            ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3


def in_turns(
    ctx: Context, replays: Replays, sides: Mapping[str, Callable[[int], object]], layers: int, rounds: int, share: float
) -> dict[str, list[float]]:
    """Seconds of a call of each side, which take turns; a sample is the mean of one call a layer, so that none finds its KV in
    the cache."""

    def every_layer(call: Callable[[int], object]) -> None:
        for layer in range(layers):
            call(layer)

    recorded = {name: replays.record(partial(every_layer, call)) for name, call in sides.items()}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for index in ctx.rounds(rounds, share=share):
        for name in list(recorded) if index % 2 else reversed(recorded):
            each = replays.seconds(recorded[name]) / layers
            if index:
                taken[name].append(each)
    return taken


def seconds_a_call(ctx: Context, torch: Any, call: Callable[[int], object], rounds: int, share: float) -> list[float]:
    """Seconds of a call; see `in_turns`."""
    return in_turns(ctx, Replays(torch), {"": call}, LAYERS, rounds, share)[""]


def copy_bandwidth(ctx: Context, torch: Any) -> float:
    """Bytes read plus bytes written a second by a large copy within the device."""
    source = torch.randint(0, 256, (1024 * MIB,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    taken = seconds_a_call(ctx, torch, lambda layer: target.copy_(source), 12, 0.1)
    return 2 * source.numel() / statistics.median(taken)


def reference(torch: Any, q: Any, kv: Any, table: Any, tokens: int, row: int) -> Any:
    """float32 attention of one sequence, (heads, head_dim)."""
    blocks = table[row, : -(-tokens // BLOCK_TOKENS)].long()
    keys, values = (kv[part][blocks].flatten(0, 1)[:tokens].float() for part in (0, 1))
    shared = q.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(shared, 1) for each in (keys, values))
    weights = torch.einsum("hd,thd->ht", q[row].float(), keys) * HEAD_DIM**-0.5
    return torch.einsum("ht,thd->hd", weights.softmax(-1), values)


def flashinfer_decode(torch: Any, shape: Shape, table: Any) -> Kernel:
    """FlashInfer's paged decode, planned once, as an engine plans once a pass."""
    import flashinfer

    workspace = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=shape.heads != shape.kv_heads
    )
    blocks = -(-shape.tokens // BLOCK_TOKENS)
    starts = torch.arange(shape.sequences + 1, dtype=torch.int32, device="cuda") * blocks
    last = torch.full((shape.sequences,), (shape.tokens - 1) % BLOCK_TOKENS + 1, dtype=torch.int32, device="cuda")
    indices = table[:, :blocks].reshape(-1).contiguous()
    wrapper.plan(
        starts, indices, last, shape.heads, shape.kv_heads, HEAD_DIM, BLOCK_TOKENS,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda q, kv: wrapper.run(q, (kv[0], kv[1]))


def verify(torch: Any, name: str, shape: Shape, kernel: Kernel, q: Any, kv: Any, table: Any) -> None:
    """The first and the last sequence, against float32."""
    out = kernel(q, kv)
    for row in (0, shape.sequences - 1):
        wanted = reference(torch, q, kv, table, shape.tokens, row)
        error = float((out[row].float() - wanted).norm() / wanted.norm())
        if not error < 2e-2:
            raise Wrong(f"{name}, {shape.name}, row {row}: relative error {error:.2g}")


def kernels_for(torch: Any, shape: Shape, table: Any) -> dict[str, Kernel]:
    """The engine's Triton kernel, and FlashInfer where it is installed."""
    from remap_serve.engine.paged_triton import paged_decode

    lengths = torch.full((shape.sequences,), shape.tokens, dtype=torch.int32, device="cuda")
    found: dict[str, Kernel] = {"Triton": lambda q, kv: paged_decode(q, kv, table, lengths)}
    if find_spec("flashinfer") is not None:
        found["FlashInfer"] = flashinfer_decode(torch, shape, table)
    return found


def one_shape(ctx: Context, torch: Any, shape: Shape, share: float) -> dict[str, list[float]]:
    """Seconds of the calls of each kernel, over a session's block-major KV tensors and shuffled blocks."""
    per_sequence = -(-shape.tokens // BLOCK_TOKENS)
    blocks = shape.sequences * per_sequence
    spec = remap.KVSpec(
        layers=LAYERS,
        kv_heads=shape.kv_heads,
        head_dim=HEAD_DIM,
        block_tokens=BLOCK_TOKENS,
        min_blocks=blocks,
        max_blocks=blocks,
    )
    capacity = -(-blocks * spec.block_bytes // PAGE) * PAGE + (2 * LAYERS + 2) * PAGE
    if ctx.fit(capacity, unit=PAGE) < capacity:
        raise Skip(f"{shape.name}: {capacity} bytes do not fit into half of the free device memory")
    taken: dict[str, list[float]] = {}
    with remap.Session(capacity, device="cuda:0", page_bytes=PAGE) as session:
        tenant = session.attach_bytes(make_masters(LAYERS, PAGE), name="kv", kv=spec)
        tensors = tenant.kv.tensors
        ids = torch.tensor(tenant.kv.allocate(blocks))[torch.randperm(blocks)]
        table = ids.to(device="cuda", dtype=torch.int32).view(shape.sequences, per_sequence)
        for tensor in tensors:
            tensor.normal_()
        q = torch.randn(shape.sequences, shape.heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for name, kernel in kernels_for(torch, shape, table).items():
            for kv in (tensors[0], tensors[-1]):
                verify(torch, name, shape, kernel, q, kv, table)
            call = partial(_attend, kernel, q, tensors)
            taken[name] = seconds_a_call(ctx, torch, call, ctx.pick(40, 16, 4), share)
        torch.cuda.current_stream().synchronize()
    return taken


def _attend(kernel: Kernel, q: Any, tensors: Sequence[Any], layer: int) -> None:
    kernel(q, tensors[layer])


@measure("decode attention", needs=("torch-cuda", "triton"), full_s=14, quick_s=4)
def decode_attention(ctx: Context) -> Iterator[Figure]:
    """Each kernel on each shape, against the rate of a copy."""
    import torch

    torch.manual_seed(0)
    bandwidth = copy_bandwidth(ctx, torch)
    shapes = ctx.pick(SHAPES, SHAPES[:2], SHAPES[:1])
    for shape in shapes:
        for name, taken in one_shape(ctx, torch, shape, 0.4 / len(shapes)).items():
            rate = shape.read_bytes / statistics.median(taken)
            yield figure(
                f"decode attention, {name}, {shape.name}, share of copy",
                rate / bandwidth,
                "x",
                taken,
                read_GBps=rate / 1e9,
                copy_GBps=bandwidth / 1e9,
            )
