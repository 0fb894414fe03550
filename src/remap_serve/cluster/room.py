# SPDX-License-Identifier: Apache-2.0
"""Room for KV in a group: each stage says how many logical blocks it has places for, and the head's pool has the least."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remap_serve.cluster.wire import Room, encode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from remap_serve.cluster.member import Member

__all__ = ["grow", "hear", "reuse", "tell"]


def grow(member: Member, blocks: Iterable[int]) -> None:
    """These physical blocks are the stage's; of an instance without slots they are free."""
    if member.slots is None:
        member.has.tenant.kv.free(blocks)
    else:
        tell(member, member.slots.grow(blocks))


def reuse(member: Member) -> bool:
    """Places that the old group's KV does not need any more are the stage's; then more requests may have room. Whether there was
    any."""
    did = False
    while member.exchange is not None and (blocks := member.exchange.take_freed()):
        grow(member, blocks)
        member.exchange.pump()
        did = True
    return did


def tell(member: Member, blocks: int, leaving: int = 0) -> None:
    """Tell the head that this stage has places for `blocks` logical blocks; leaving: that it will have (see `Room`)."""
    message = Room(member.place, blocks, leaving)
    if member.head is not None:
        hear(member, message)
    else:
        member.forward(encode(message))


def hear(member: Member, message: Room) -> None:
    """As a head. When all stages have said what they will have, the head drains, to shrink its pool (`own_layers.shrink`). What
    they will not have any more, since that epoch is over, is ignored."""
    assert member.head is not None  # it comes to heads only
    if message.leaving:
        if message.leaving <= member.unfetched or message.leaving < member.leaving_for:
            return
        if message.leaving > member.leaving_for:
            member.go_on()  # it may drain for an earlier epoch
            member.leaving_for = message.leaving
    rooms = member.leaving if message.leaving else member.rooms
    rooms[message.stage] = message.blocks
    if any(place not in rooms for place in member.working):
        return
    if message.leaving:
        member.shrinking = member.head.draining = True
    else:
        member.head.kv.grow(min(rooms[place] for place in member.working))
        member.head.ready = True
