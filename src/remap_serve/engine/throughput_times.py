# SPDX-License-Identifier: Apache-2.0
"""The cost of an offline batch's passes on this machine: a short calibration, before the first of them.

One pass computes layer 0 several times on made-up activations, whose keys and values go to scratch blocks: no block of a
request is read or written, so no token changes. The link's seconds are the session's (`Inside.streamed_seconds`), which
were measured when the model was attached.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from remap.internals import internals
from remap_serve.engine.attention import AttentionBatch
from remap_serve.engine.chunk import Chunk
from remap_serve.engine.models import min_rows
from remap_serve.engine.pairs import PAIR
from remap_serve.engine.request import Request, Sequence
from remap_serve.engine.throughput_runner import MiniBatch
from remap_serve.policy.activations import BlockBytes, Line
from remap_serve.policy.offline import OfflineCosts, OfflineRoom

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Listed

    from remap_serve.engine.throughput_runner import ThroughputRunner

__all__ = ["Times", "costs_of", "measure", "room_of"]

_REPEATS = 5


@dataclass(frozen=True)
class Times:
    """Measured seconds; of one layer, but for ends_s.

    base_s, token_s, pair_s: of all that is computed for a token of each of some sequences, but for recomputation: once, for each
    of them, and for each pair of blocks that they attend to. recompute: to make keys and values of pairs again. copy: to copy
    host blocks in. weights_s: to copy each layer in, 0 for one that stays. ends_s: of a pass, what no layer holds.
    """

    base_s: float
    token_s: float
    pair_s: float
    recompute: Line
    copy: Line
    weights_s: tuple[float, ...]
    ends_s: float

    def forward_s(self, requests: int, pairs: int) -> float:
        """One layer, for a token of each of `requests` requests with `pairs` pairs together."""
        return self.base_s + self.token_s * requests + self.pair_s * pairs


def costs_of(times: Times, layers: int, block_tokens: int, ring: int) -> OfflineCosts:
    """A block of these is a pair. Copies out are as quick as copies in."""
    kv, activations = (Line(times.copy.base_s, blocks * times.copy.each_s) for blocks in (PAIR, 1))
    return OfflineCosts(
        layers=layers,
        weights_s=sum(times.weights_s) / layers,
        load_kv=kv,
        load_activations=activations,
        recompute=times.recompute,
        forward_s=times.forward_s,
        ends_s=lambda requests: times.ends_s,
        store_kv_s=kv(1) / (PAIR * block_tokens),
        store_activations_s=activations(1) / (PAIR * block_tokens),
        ring=ring,
        weights=times.weights_s,
    )


def room_of(layers: int, unit_bytes: int, host_blocks: int, scratch_blocks: int) -> OfflineRoom:
    """unit_bytes: of a block's keys in one layer."""
    block = BlockBytes(kv=PAIR * 2 * unit_bytes, activations=2 * unit_bytes)
    return OfflineRoom(
        layers=layers,
        block=block,
        host_bytes=layers * 2 * unit_bytes * host_blocks,
        device_bytes=0,
        weight_bytes=1,
        buffer_bytes=scratch_blocks // PAIR * block.kv,
    )


@torch.inference_mode()
def measure(runner: ThroughputRunner, requests: int, tokens: int, clock: Callable[[], float]) -> Times:
    """Of passes with `requests` requests of `tokens` tokens each, in one pass. clock: in seconds. The tenant must be between
    passes. Raises what a pass raises."""
    tenant = runner.tenant
    pair_tokens = PAIR * runner.block_tokens
    few, short = max(1, requests // 2), max(1, tokens // 2)
    pairs = max(1, min(len(internals(tenant).kv.scratch) // PAIR, requests * tokens // pair_tokens))
    made = sorted({max(1, pairs // 4), pairs})
    with tenant.forward(phase="prefill", tokens=requests):
        for layer in range(tenant.layers):
            tenant.wait(layer)
            if layer == 0:
                _fill(runner)
                shapes = ((requests, tokens), (requests, short), (few, short))
                works = [_layer(runner, rows, length) for rows, length in shapes]
                full, half, less, *again = _seconds([*works, *(_remake(runner, each) for each in made)], clock)
            if layer == tenant.layers - 1:
                # The head, if it is no layer of the tenant's, can be computed at any time.
                (ends_s,) = _seconds([_ends(runner, requests, tokens)], clock)
            tenant.done(layer)
    base_s, token_s, pair_s = _forward_parts(
        (requests, tokens, full), (requests, short, half), (few, short, less), pair_tokens
    )
    within = internals(tenant)
    sizes = within.layer_bytes
    rate = within.copy_seconds() / (sum(sizes) / tenant.layers)
    streamed = set(tenant.streamed)
    return Times(
        base_s=base_s,
        token_s=token_s,
        pair_s=pair_s,
        recompute=_line(made, again),
        copy=_copy_line(within.streamed_seconds(1), within.streamed_seconds(2)),
        weights_s=tuple(size * rate if layer in streamed else 0.0 for layer, size in enumerate(sizes)),
        ends_s=ends_s,
    )


def _forward_parts(
    full: tuple[int, int, float], half: tuple[int, int, float], less: tuple[int, int, float], pair_tokens: int
) -> tuple[float, float, float]:
    """(base_s, token_s, pair_s) of `Times` from measurements (requests, tokens of each, seconds): half has fewer tokens than
    full, less fewer requests than half. None is below 0, and they give full's seconds exactly: passes to come are like it."""
    (requests, tokens, full_s), (_, short, half_s), (few, _, less_s) = full, half, less
    pairs, fewer = requests * tokens / pair_tokens, requests * short / pair_tokens
    pair_s = min(max(0.0, full_s - half_s) / (pairs - fewer), full_s / pairs) if tokens > short else 0.0
    rest = max(0.0, full_s - pair_s * pairs)
    rows_s = half_s - less_s - pair_s * (requests - few) * short / pair_tokens
    token_s = min(max(0.0, rows_s) / (requests - few), rest / requests) if requests > few else 0.0
    return max(0.0, rest - token_s * requests), token_s, pair_s


def _line(blocks: Listed[int], seconds: Listed[float]) -> Line:
    """Through the last point, which is nearest to the passes to come, and the first one, unless a part were negative."""
    slope = (seconds[-1] - seconds[0]) / max(1, blocks[-1] - blocks[0])
    base = max(0.0, seconds[0] - slope * blocks[0]) if slope > 0.0 else 0.0
    return Line(base, (seconds[-1] - base) / blocks[-1])


def _copy_line(one: float, two: float) -> Line:
    """Through the seconds of one block and of two."""
    return Line(max(0.0, 2.0 * one - two), max(0.0, two - one))


def _seconds(works: Listed[Callable[[], object]], clock: Callable[[], float]) -> list[float]:
    """The median of a few times of each, without the first, all in turns: other work on the machine falls on all of them, as
    it will on the passes."""
    found: list[list[float]] = [[] for _ in works]
    for _ in range(_REPEATS + 1):
        for work, seconds in zip(works, found, strict=True):
            begun = clock()
            work()
            seconds.append(clock() - begun)
    return [statistics.median(seconds[1:]) for seconds in found]


def _fill(runner: ThroughputRunner) -> None:
    """Give the scratch blocks numbers that are like activations: the bytes there may be slow to compute with."""
    tensor, scratch = runner.tenant.kv.tensors[0], internals(runner.tenant).kv.scratch
    tensor[:, scratch.start : scratch.stop] = torch.randn(tensor[:, :1].shape, dtype=tensor.dtype)


def _batch(runner: ThroughputRunner, rows: int, length: int) -> AttentionBatch:
    """`rows` sequences decode their token number `length`, all of them in the same scratch blocks."""
    scratch, size = internals(runner.tenant).kv.scratch, runner.block_tokens
    chunks = []
    for row in range(rows):
        sequence = Sequence.of(Request(f"calibration {row}", (0,) * length), row)
        sequence.tokens.append(0)
        first = row * (length // size + 1)
        sequence.blocks = [scratch[(first + at) % len(scratch)] for at in range(length // size + 1)]
        chunks.append(Chunk(sequence, length, 1))
    return AttentionBatch(chunks, size, runner.dtype)


def _layer(runner: ThroughputRunner, rows: int, length: int) -> Callable[[], object]:
    batch = _batch(runner, rows, length)
    width = max(rows, min_rows(runner.dtype))
    hidden = torch.randn(width, runner.decoder.activation_width, dtype=runner.dtype)
    positions = torch.full((width,), length)
    rotary = runner.decoder.rotary(hidden, positions)
    attend = partial(runner.attend, 0, [MiniBatch(batch, 0, rows, None)])
    return lambda: runner.decoder.layer(0, hidden.clone(), rotary, attend)


def _remake(runner: ThroughputRunner, pairs: int) -> Callable[[], object]:
    scratch, size = torch.tensor(internals(runner.tenant).kv.scratch), runner.block_tokens
    targets = scratch[: PAIR * pairs]
    source = torch.tensor([0, 1] * pairs), scratch[:pairs].repeat_interleave(2)
    places = torch.arange(PAIR * pairs * size) % runner.decoder.max_tokens
    return partial(runner.remake, 0, MiniBatch(_batch(runner, 1, 1), 0, 1, (source, targets, places)))


def _ends(runner: ThroughputRunner, rows: int, length: int) -> Callable[[], object]:
    """The work done once a pass: the index tensors, the embedding and the head."""

    def work() -> object:
        batch, padding = _batch(runner, rows, length), max(0, min_rows(runner.dtype) - rows)
        ids = torch.zeros(rows + padding, dtype=torch.int64)
        hidden, _ = runner.decoder.embed(ids, torch.cat([batch.positions, batch.positions[:1].expand(padding)]))
        return runner.decoder.head(hidden).float().argmax(-1)

    return work
