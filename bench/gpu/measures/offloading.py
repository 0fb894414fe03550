"""A stack of layers that does not fit: streamed by remap, by accelerate's and by diffusers' offloading, at equal memory."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

from bench.gpu.context import Context
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, ratio, seconds
from bench.gpu.tenants import PAGE

import remap

HELD = 2  # layers' worth of device memory that every side may use for weights


class Stack:
    """`layers` blocks of two linear layers, bfloat16, on the CPU. What it computes does not matter, what it reads does."""

    def __init__(self, torch: Any, layers: int, hidden: int) -> None:
        nn = torch.nn

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up = nn.Linear(hidden, 4 * hidden, bias=False, dtype=torch.bfloat16)
                self.down = nn.Linear(4 * hidden, hidden, bias=False, dtype=torch.bfloat16)

            def forward(self, x: Any) -> Any:
                return x + self.down(torch.relu(self.up(x)))

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(Block() for _ in range(layers))

            def forward(self, x: Any) -> Any:
                for layer in self.layers:
                    x = layer(x)
                return x

        torch.manual_seed(0)
        self.model = Model().eval()
        self.layer_bytes = 2 * hidden * 4 * hidden * 2


def _time(
    ctx: Context, torch: Any, run: Callable[[], Any], expected: Any, rounds: int, share: float
) -> tuple[list[float], int]:
    """(device seconds of each call, most bytes that torch held meanwhile); every result must be the expected one."""
    taken: list[float] = []
    torch.cuda.reset_peak_memory_stats()
    for index in ctx.rounds(rounds + 1, share=share):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        result = run()
        ended.record()
        ended.synchronize()
        if not torch.equal(result.cpu(), expected):
            raise Wrong("another result than with all weights on the device")
        if index:
            taken.append(begun.elapsed_time(ended) / 1e3)
    return taken, torch.cuda.max_memory_allocated()


def _setup(ctx: Context) -> tuple[Any, Stack, Any, Any, int]:
    """(torch, the stack, an input, its result, rounds)."""
    import torch

    layers = ctx.pick(12, 6, 3)
    hidden = ctx.pick(4096, 4096, 64)
    ctx.fit(2 * layers * 16 * hidden * hidden, unit=2 * layers * 16 * hidden * hidden, host=True)
    stack = Stack(torch, layers, hidden)
    x = torch.randn(256, hidden, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        whole = copy.deepcopy(stack.model).to("cuda")
        expected = whole(x).cpu()
        del whole
    gc.collect()
    torch.cuda.empty_cache()
    return torch, stack, x, expected, ctx.pick(10, 4, 2)


def _ours(ctx: Context, torch: Any, stack: Stack, x: Any, expected: Any, rounds: int) -> list[float]:
    """All layers streamed through a ring of `HELD` buffers."""
    from remap.adapters.hooks import attach_hooks

    layers = len(stack.model.layers)
    capacity = layers * -(-stack.layer_bytes // PAGE) * PAGE + 8 * PAGE
    block_bytes = 2 * layers * 16 * 64 * 2
    most = capacity // block_bytes + 1
    spec = remap.KVSpec(layers=layers, kv_heads=1, head_dim=64, dtype="bfloat16", min_blocks=1, max_blocks=most)
    with remap.Session(capacity, device="cuda:0", page_bytes=PAGE) as session:
        tenant = session.attach(stack.model, layers=stack.model.layers, name="stack", kv=spec, hooks=False)
        with attach_hooks(stack.model.layers, tenant, model=stack.model):
            remap.advanced.remap(session, "stack", layers - HELD, HELD)
            taken, _ = _time(ctx, torch, lambda: stack.model(x), expected, rounds, 0.3)
    return taken


@measure("beside accelerate's cpu_offload", needs=("torch-cuda", "accelerate"), full_s=12, quick_s=None)
def beside_accelerate(ctx: Context) -> Iterator[Figure]:
    """One pass, everything streamed; accelerate copies each weight when its module runs."""
    torch, stack, x, expected, rounds = _setup(ctx)
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    with torch.inference_mode():
        ours = _ours(ctx, torch, stack, x, expected, rounds)
        theirs_model = copy.deepcopy(stack.model)
        cpu_offload(theirs_model, execution_device=torch.device("cuda"))
        theirs, most = _time(ctx, torch, lambda: theirs_model(x), expected, rounds, 0.5)
        remove_hook_from_submodules(theirs_model)
    yield seconds(
        "streamed pass, remap", ours, shown=False, layers=len(stack.model.layers), layer_bytes=stack.layer_bytes
    )
    yield seconds("streamed pass, accelerate cpu_offload", theirs, shown=False, peak_bytes=most)
    yield ratio("accelerate cpu_offload / remap", theirs, ours)


@measure("beside diffusers' group offloading", needs=("torch-cuda", "diffusers"), full_s=12, quick_s=None)
def beside_diffusers(ctx: Context) -> Iterator[Figure]:
    """One pass, everything streamed; diffusers prefetches one block ahead on a stream of its own."""
    torch, stack, x, expected, rounds = _setup(ctx)
    from diffusers.hooks import apply_group_offloading

    with torch.inference_mode():
        ours = _ours(ctx, torch, stack, x, expected, rounds)
        theirs_model = copy.deepcopy(stack.model)
        apply_group_offloading(
            theirs_model,
            onload_device=torch.device("cuda"),
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=True,
        )
        theirs, most = _time(ctx, torch, lambda: theirs_model(x), expected, rounds, 0.5)
    yield seconds("streamed pass, remap, beside diffusers", ours, shown=False)
    yield seconds("streamed pass, diffusers group offloading", theirs, shown=False, peak_bytes=most)
    yield ratio("diffusers group offloading / remap", theirs, ours)
