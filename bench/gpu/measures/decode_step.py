"""A decode step of transformers, attached with nothing remapped, against the same model as it comes: same code, same kernels.

Two models of the same weights decode the same tokens with caches of transformers' own, taking turns. What differs is where the
weights lie, the hooks around each layer, and the pass around the call.

First, with attention as plain matrix products, logits have to be the same bits at every step. In the timed steps attention is
torch's choice, which differs from itself: on an H200 a model that decodes the same tokens twice gets other logits (torch 2.11,
scaled_dot_product_attention of one query with a mask). There it is counted how often two sides differ, the same model's too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.gpu.context import Context, Skip
from bench.gpu.models import LLAMA_3_8B, ModelShape, make_model
from bench.gpu.registry import Wrong, measure, missing
from bench.gpu.results import Figure, figure
from bench.gpu.tenants import PAGE

import remap

from .overhead import percent_more

WARM_UP = 4
SIDES = ("stock", "attached", "stock again")


@dataclass(frozen=True)
class Batch:
    """`sequences` prompts of `tokens` tokens, then `steps` steps of decode."""

    sequences: int
    tokens: int
    steps: int


class Clock:
    """Seconds of a call on the device (on the host, without one), and until it returned."""

    def __init__(self, torch: Any, *, on_gpu: bool) -> None:
        self._torch, self._on_gpu = torch, on_gpu

    def time(self, call: Any) -> tuple[Any, float, float]:
        """(its result, seconds until it is computed, seconds until the call returned). The device is idle before."""
        if not self._on_gpu:
            begun = time.perf_counter()
            result = call()
            taken = time.perf_counter() - begun
            return result, taken, taken
        first, last = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._torch.cuda.synchronize()
        begun = time.perf_counter()
        first.record()
        result = call()
        last.record()
        enqueued = time.perf_counter() - begun
        last.synchronize()
        return result, first.elapsed_time(last) / 1e3, enqueued


class Decoding:
    """One side's model and cache."""

    def __init__(self, torch: Any, model: Any, batch: Batch) -> None:
        from transformers import StaticCache

        self._torch, self._model = torch, model
        self._cache = StaticCache(config=model.config, max_cache_len=batch.tokens + batch.steps)
        self._tokens = 0

    def __call__(self, ids: Any) -> Any:
        """The logits behind the last of these tokens, (sequences, vocabulary)."""
        torch = self._torch
        at = torch.arange(self._tokens, self._tokens + ids.shape[1], device=ids.device)
        self._tokens += ids.shape[1]
        with torch.inference_mode():
            out = self._model(ids, past_key_values=self._cache, use_cache=True, position_ids=at[None], logits_to_keep=1)
        return out.logits[:, -1]


@dataclass
class Taken:
    """By side: seconds of device time and of the host of each step, and steps with other logits than the first side's."""

    device: dict[str, list[float]]
    host: dict[str, list[float]]
    apart: dict[str, int]


def steps_in_turn(
    ctx: Context, torch: Any, clock: Clock, models: Mapping[str, Any], batch: Batch, device: str, share: float
) -> Taken:
    """Each side's steps, in turns, over the same tokens."""
    generator = torch.Generator().manual_seed(1)
    top = next(iter(models.values())).config.vocab_size
    ids = torch.randint(4, top, (batch.sequences, batch.tokens), generator=generator).to(device)
    sides = {name: Decoding(torch, model, batch) for name, model in models.items()}
    taken = Taken({name: [] for name in models}, {name: [] for name in models}, dict.fromkeys(models, 0))
    for index in ctx.rounds(batch.steps, least=WARM_UP + 4, share=share):
        order = list(sides.items())
        results = {}
        for name, side in order if index % 2 else order[::-1]:
            results[name], on_device, on_host = clock.time(partial(side, ids))
            if index > WARM_UP:  # the first one is the prompt
                taken.device[name].append(on_device)
                taken.host[name].append(on_host)
        first = results[order[0][0]]
        for name, logits in results.items():
            taken.apart[name] += not torch.equal(logits, first)
        ids = first.argmax(-1, keepdim=True)
    return taken


def verify(ctx: Context, torch: Any, clock: Clock, models: Mapping[str, Any], batch: Batch, device: str) -> int:
    """Steps whose logits were the same bits on all sides, with attention that gives the same bits for the same numbers. Raises
    Wrong if one was not."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    few = replace(batch, steps=WARM_UP + 4)
    with sdpa_kernel(SDPBackend.MATH):
        apart = steps_in_turn(ctx, torch, clock, models, few, device, 0.2).apart
    if any(apart.values()):
        raise Wrong(f"of {few.steps} steps these had other logits than {next(iter(models))}: {apart}")
    return few.steps


def _shape(ctx: Context, *, on_gpu: bool) -> tuple[ModelShape, str]:
    """(the largest model of which two fit, and one more while it is attached; its dtype)."""
    if not on_gpu:
        tiny = replace(LLAMA_3_8B, layers=4, hidden=64, ffn=128, heads=4, kv_heads=2, vocabulary=96)
        return tiny, "float32"
    for share in ctx.pick((1.0, 0.5, 0.25), (0.25,), (0.25,)):
        shape = LLAMA_3_8B.scaled(share)
        nbytes = 2 * shape.params()
        if 3.3 * nbytes < ctx.free_bytes and 1.1 * nbytes < ctx.host_budget:
            return shape, "bfloat16"
    raise Skip("not even a quarter of Llama-3-8b's layers fit three times")


@measure("a decode step attached at alpha 0", needs=("torch", "transformers"), full_s=30, quick_s=9, emulated_s=8)
def decode_step(ctx: Context) -> Iterator[Figure]:
    """Device and host time of a step, attached and stock; and stock against itself, which says how far two sides ever differ."""
    import torch

    from remap.model.footprint import footprint

    on_gpu = missing("torch-cuda", emulated=ctx.emulated) is None
    device = "cuda" if on_gpu else "cpu"
    shape, dtype = _shape(ctx, on_gpu=on_gpu)
    batch = ctx.pick(Batch(16, 512, 200), Batch(16, 128, 80), Batch(2, 8, 24))
    stock, attached = (make_model(shape, device, dtype) for _ in range(2))
    spec = remap.KVSpec(
        layers=shape.layers, kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=dtype, min_blocks=0, max_blocks=1
    )
    capacity = (footprint(attached, None).pages(PAGE) + 2) * PAGE
    with remap.Session(capacity, device="cuda:0", page_bytes=PAGE) as session:
        session.attach(attached, kv=spec, name="m")
        if on_gpu:
            torch.cuda.empty_cache()  # the tensors that the model came with
        models = dict(zip(SIDES, (stock, attached, stock)))
        clock = Clock(torch, on_gpu=on_gpu)
        verified = verify(ctx, torch, clock, models, batch, device)
        taken = steps_in_turn(ctx, torch, clock, models, batch, device, 0.6)
        remap.advanced.check(session)
    title = f"decode step of {shape.layers} layers of {shape.name}, {batch.sequences} sequences"
    times, host = taken.device, taken.host
    control = (statistics.median(times["stock again"]) / statistics.median(times["stock"]) - 1) * 100
    yield percent_more(
        f"{title}, attached, longer by", times["attached"], times["stock"], 0.5, control_percent=control, dtype=dtype,
        verified_steps=verified, steps_with_other_logits=taken.apart,
    )  # fmt: skip
    more = (statistics.median(host["attached"]) - statistics.median(host["stock"])) / shape.layers
    yield figure("attached with nothing remapped, host time a layer", more * 1e6, "us", host["attached"])
