# SPDX-License-Identifier: Apache-2.0
"""A decode pass of a fixed batch size, recorded once and replayed: whole, or layer by layer.

Batch sizes are bucketed. Of each bucket there is, recorded when first needed,

    whole       embedding, all layers, head and argmax in one piece: while nothing is streamed, a pass is one replay
    piecewise   embedding, one piece a layer, head: while something is streamed, `wait(i)`, replay layer i, `done(i)`

Both run the same functions over the same tensors, so they give the same bits. The pieces hand over through `hidden` and
the rotary tensors, which lie outside of any graph's memory. Nothing here is made anew when the remapping changes.

Recording runs the pieces on padding only (length 0, slot -1): nothing is written into KV, and the result is thrown away.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from remap_serve.engine.graphs import Graphs
    from remap_serve.engine.inputs import TokenInputs
    from remap_serve.engine.models import Decoder
    from remap_serve.engine.paged import DeviceAttention

__all__ = ["CapturedDecode", "buckets_up_to"]


def buckets_up_to(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of 8 up to 256 and of 16 beyond, and `most` itself."""
    sizes = [size for size in (1, 2, 4) if size < most]
    size = 8
    while size < most:
        sizes.append(size)
        size += 8 if size < 256 else 16
    return (*sizes, most)


class CapturedDecode:
    """inputs: their first tokens are the batch, its block table all sequences'. `tokens` holds the next token of each row
    after a pass, `hidden` what the head was given. graphs: None runs every piece anew instead of replaying it.
    """

    def __init__(
        self, decoder: Decoder, attention: DeviceAttention, inputs: TokenInputs, graphs: Graphs | None, most: int
    ) -> None:
        self.buckets = buckets_up_to(most)
        self.captures = 0
        self._decoder = decoder
        self._attention = attention
        self._inputs = inputs
        self._graphs = graphs
        self._layers = len(decoder.layers)
        self._whole: dict[int, Callable[[], None]] = {}
        self._pieces: dict[int, list[Callable[[], None]]] = {}
        self.tokens = torch.zeros(most, dtype=torch.int64, device=inputs.ids.device)
        # The model decides the shapes: those of one token, for as many as there can be.
        hidden, rotary = decoder.embed(inputs.ids[:1], inputs.positions[:1])
        self.hidden = _room_for(hidden, most)
        self._rotary: Any = None if rotary is None else tuple(_room_for(one, most) for one in rotary)

    def bucket(self, size: int) -> int:
        """The smallest batch size recorded for that holds `size` sequences."""
        return next(bucket for bucket in self.buckets if bucket >= size)

    def ready(self, bucket: int, piecewise: bool) -> bool:
        """Whether a pass of this kind needs no recording."""
        return self._graphs is None or bucket in (self._pieces if piecewise else self._whole)

    def prepare(self, bucket: int, piecewise: bool) -> None:
        """Record what `ready` misses. Not inside a pass; every row of the inputs on the device must be padding, and the
        attention planned for it. Raises what the pieces or the recording raise; then the bucket is as before.
        """
        if self.ready(bucket, piecewise) or self._graphs is None:
            return
        if piecewise:
            self._pieces[bucket] = [self._graphs.capture(piece) for piece in self._steps(bucket)]
        else:
            self._whole[bucket] = self._graphs.capture(partial(_run_all, self._steps(bucket)))
        self.captures += 1

    def run(self, bucket: int, *, piecewise: bool, tenant: Any) -> None:
        """One pass over the first `bucket` rows of the inputs. piecewise: each layer between `wait` and `done`.

        Pieces that are not recorded run as they are, with the same result.
        """
        if not piecewise:
            whole = self._whole.get(bucket)
            _run_all([whole] if whole is not None else self._steps(bucket))
            return
        steps = self._pieces.get(bucket) or self._steps(bucket)
        steps[0]()
        for layer in range(self._layers):
            tenant.wait(layer)
            steps[1 + layer]()
            tenant.done(layer)
        steps[-1]()

    def _steps(self, size: int) -> list[Callable[[], None]]:
        layers = [partial(self._layer, layer, size) for layer in range(self._layers)]
        return [partial(self._embed, size), *layers, partial(self._head, size)]

    def _embed(self, size: int) -> None:
        hidden, rotary = self._decoder.embed(self._inputs.ids[:size], self._inputs.positions[:size])
        self.hidden[:size].copy_(hidden)
        if rotary is not None:
            for place, one in zip(self._rotary, rotary, strict=True):
                place[:size].copy_(one)

    def _layer(self, layer: int, size: int) -> None:
        hidden = self.hidden[:size]
        rotary = None if self._rotary is None else tuple(one[:size] for one in self._rotary)
        result = self._decoder.layer(layer, hidden, rotary, partial(self._attend, layer, size))
        if result is not hidden:
            hidden.copy_(result)

    def _attend(
        self, layer: int, size: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        inputs, table = self._inputs, self._inputs.table
        assert table is not None
        self._attention.write(layer, k, v, inputs.slots[:size])
        out = torch.empty_like(q)
        self._attention.decode(layer, q, table.device, inputs.rows[:size], inputs.lens[:size], out)
        return out.flatten(1)

    def _head(self, size: int) -> None:
        torch.argmax(self._decoder.head(self.hidden[:size]), -1, out=self.tokens[:size])


def _run_all(steps: list[Callable[[], None]]) -> None:
    for step in steps:
        step()


def _room_for(one: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.zeros(rows, *one.shape[1:], dtype=one.dtype, device=one.device)
