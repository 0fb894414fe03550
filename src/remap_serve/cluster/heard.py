# SPDX-License-Identifier: Apache-2.0
"""What a member does with its peers' messages, of its epoch. Between passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remap_serve.cluster import own_layers, passes, room
from remap_serve.cluster.wire import Cannot, Chosen, LayerPart, Microbatch, Room, Shrink, WantLayer, decode

if TYPE_CHECKING:
    import torch

    from remap_serve.cluster.member import Member
    from remap_serve.cluster.messages import Tokens

__all__ = ["from_mesh", "from_ring", "piece_sent"]


def from_ring(member: Member, message: object, header: bytes, payload: torch.Tensor | None) -> list[Tokens]:
    """Of the stage before, but for `End`: the tokens that came of it."""
    match message:
        case Microbatch() if payload is not None and member.part.first < member.part.end:
            return passes.compute(member, message, payload)
        case Chosen(lane, choice) if member.head is not None:
            return passes.land(member, lane, choice)
        case Room() if member.head is not None:
            room.hear(member, message)
            if member.exchange is not None:
                member.exchange.pump()
        case Shrink() if member.head is not None:
            pass  # it has been round: every stage has done it
        case Shrink():
            own_layers.give_up(member, message)
            member.forward(header)
        case _:
            member.forward(header, payload)  # not for a stage without layers, or for the head
    return []


def from_mesh(member: Member, source: int, header: bytes, payload: torch.Tensor | None) -> None:
    """Of any instance of the change, by its rank: KV, or layers."""
    message = decode(header)
    if isinstance(message, WantLayer | LayerPart | Cannot):
        came = None if member.copies is None else member.copies.on(source, message, payload)
        if came is not None:
            own_layers.came(member, *came)
    elif member.exchange is not None:
        member.exchange.on(source, message, payload)


def piece_sent(member: Member) -> None:
    """One that this member sent is on its way."""
    if member.exchange is not None:
        member.exchange.sent()
    elif member.copies is not None:
        member.copies.sent()
