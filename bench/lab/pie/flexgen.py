"""What FlexGen would take for the requests of a run, as Pie's section 5.7 describes it (Figure 10). Pure.

Requests are padded to the longest prompt and the longest answer, and answered block by block: a block is `batches` batches of
`size` requests. A pass goes layer by layer; a layer's weights come in once for all of a block's batches, then each batch's KV
comes in, is computed with, and what it adds goes out.

    as described   weights and KV lie in host memory, and are fetched when they are needed ("synchronous swapping"): a pass takes
                   its copies and its computation, one after the other
    at its best    any share of the weights on the device, KV there as far as it fits, and copies behind computation: a pass
                   takes the longest of copies in, copies out and computation (FlexGen's own cost model)

Both take the block that serves most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from remap.policy.hardware import Machine, Model
from remap_serve.sim.roofline import Roofline, prefill_pairs
from remap_serve.sim.workload import Item

__all__ = ["BATCHES", "HOST_BYTES", "SIZES", "Block", "best_block"]

HOST_BYTES = 480_000_000_000
"""Of a GH200: FlexGen "assumes it can freely use" it all."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BATCHES = (1, 3, 8, 12, 24)
"""Pie profiles sizes from 32 and numbers from 3 on; with long answers blocks of so many do not fit."""
_SHARES = tuple(tenth / 10 for tenth in range(11))
_CONTEXTS = 8
"""At so many lengths of the answer passes are reckoned."""


@dataclass(frozen=True)
class Block:
    """weights: the share of them that stays on the device. answers_per_s, all_per_s: tokens of answers, and those of padding
    too."""

    size: int
    batches: int
    weights: float
    answers_per_s: float = 0.0
    all_per_s: float = 0.0


def _seconds(block: Block, prompt: int, answer: int, roofline: Roofline, device_bytes: int, synchronous: bool) -> float:
    """Of a block of padded requests; infinite if it does not fit. device_bytes: for layers' weights, KV, and buffers of two
    layers' weights, if any stream, and of two batches' KV of a layer."""
    model, machine = roofline.model, roofline.machine
    token, whole = model.kv_bytes_per_token_layer, model.layers * model.layer_bytes
    kv = block.size * block.batches * (prompt + answer) * token * model.layers
    used = block.weights * whole + 2 * model.layer_bytes * (block.weights < 1)
    used += 2 * block.size * (prompt + answer) * token
    spare = device_bytes - used
    if spare < 0:
        return float("inf")
    here = 0.0 if synchronous else min(1.0, spare / kv)
    if (1 - block.weights) * whole + (1 - here) * kv > HOST_BYTES:
        return float("inf")
    weights_s = (1 - block.weights) * model.layer_bytes / machine.h2d_bytes_per_s

    def one_pass(read: int, new: int, compute_s: float, ends_s: float) -> float:
        """read: tokens of KV that a request's batch reads; new: that it adds."""
        away = (1 - here) * block.size * token
        into = weights_s + block.batches * away * read / machine.h2d_bytes_per_s
        out = block.batches * away * new / machine.d2h_bytes_per_s
        layer_s = block.batches * compute_s
        together = into + out + layer_s if synchronous else max(into, out, layer_s)
        return model.layers * together + block.batches * ends_s

    size = block.size
    seconds = one_pass(
        0,
        prompt,
        roofline.layer_s(size * prompt, size * prefill_pairs(prompt), 0, 0),
        roofline.ends_s(size * prompt, size),
    )
    for part in range(_CONTEXTS):
        context = prompt + round((part + 0.5) * answer / _CONTEXTS)
        each = one_pass(context, 1, roofline.layer_s(0, 0, size, size * context), roofline.ends_s(size, size))
        seconds += (answer - 1) / _CONTEXTS * each
    return seconds


def best_block(
    items: Sequence[Item], model: Model, machine: Machine, device_bytes: int, *, as_described: bool
) -> Block:
    """The block that serves most. device_bytes: see `_seconds`. A last block that is not full takes its share of one."""
    prompt, answer = max(item.prompt_tokens for item in items), max(item.output_tokens for item in items)
    mean, roofline = sum(item.output_tokens for item in items) / len(items), Roofline(machine, model)
    shares: Iterable[float] = (0.0,) if as_described else _SHARES
    found = []
    for size, batches, weights in product(SIZES, BATCHES, shares):
        if size * batches <= len(items):
            block = Block(size, batches, weights)
            each_s = _seconds(block, prompt, answer, roofline, device_bytes, as_described) / (size * batches)
            found.append(replace(block, answers_per_s=mean / each_s, all_per_s=answer / each_s))
    return max(found, key=lambda one: one.answers_per_s)
