# SPDX-License-Identifier: Apache-2.0
"""A microbatch's way through one member of a group.

    head        launch    schedules it, and computes the first stage
    each stage  compute   computes its layers, and sends hidden states on
    last stage            sends the tokens that it chose to the head
    head        land      gives them to their requests

Alone all of it happens at once. A function returns tokens for callers; the next stage gets its part over the ring.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from remap_serve.cluster.stage import Choice, row_of
from remap_serve.cluster.transport import bytes_of, tensor_of
from remap_serve.cluster.wire import Chosen, Microbatch, encode
from remap_serve.engine.attention import decode_first

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remap_serve.cluster.member import Member
    from remap_serve.cluster.messages import Tokens
    from remap_serve.cluster.stage import Row

__all__ = ["compute", "land", "launch"]


def launch(member: Member) -> list[Tokens] | None:
    """The head's next microbatch; None if none can be launched now. Raises what `Head.launch` and `Stage.compute` raise."""
    launched = None if member.head is None else member.head.launch()
    if launched is None:
        return None
    ordered = decode_first(launched.schedule.chunks)
    member.launched[launched.lane] = ordered
    rows = [row_of(chunk) for chunk in ordered]
    return _computed(member, launched.lane, rows, None, [chunk.sequence.tokens for chunk in ordered])


def compute(member: Member, message: Microbatch, payload: torch.Tensor) -> list[Tokens]:
    """One that comes from the stage before. Raises what `Stage.compute` raises."""
    return _computed(member, message.lane, message.rows, tensor_of(payload, message.shape, message.dtype), None)


def land(member: Member, lane: int, choice: Choice) -> list[Tokens]:
    """This was chosen for the lane's microbatch."""
    assert member.head is not None  # tokens come to heads only
    chunks = member.launched.pop(lane)
    for row, noted in choice.noted.items():
        chunks[row].sequence.noted.update(noted)
    return member.head.land(lane, [chunk for chunk in chunks if chunk.samples], choice.tokens)


def _computed(
    member: Member,
    lane: int,
    rows: list[Row],
    hidden: torch.Tensor | None,
    known: Sequence[Sequence[int]] | None,
) -> list[Tokens]:
    begin = time.perf_counter()
    result = member.stage.compute(rows, hidden, known)
    member.has.counts.note_pass(time.perf_counter() - begin, member.alone)
    if isinstance(result, torch.Tensor):
        payload, shape, dtype = bytes_of(result)
        member.forward(encode(Microbatch(lane, rows, shape, dtype)), payload)
    elif member.head is not None:
        return land(member, lane, result)
    else:
        member.forward(encode(Chosen(lane, result)))
    return []
