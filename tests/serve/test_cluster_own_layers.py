"""Layers that come home and leave again, with commands and messages in any order. Layers and KV themselves are doubles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from remap_serve.cluster import own_layers, room
from remap_serve.cluster.member import Member
from remap_serve.cluster.messages import Part
from remap_serve.cluster.pool import GroupPool
from remap_serve.cluster.slots import Slots
from remap_serve.cluster.wire import Room, Shrink, decode

LAYERS, OWN, BLOCKS = 4, 4, 12
STAGES = (Part("head", 0, 2), Part("member", 2, 4))


class KV:
    """Blocks of one instance: OWN of them while all layers are here."""

    block_tokens = 1

    def __init__(self) -> None:
        self.free_ids = set(range(BLOCKS))

    @property
    def free_blocks(self) -> int:
        return len(self.free_ids)

    def allocate(self, count: int) -> list[int]:
        taken = sorted(self.free_ids)[:count]
        self.free_ids -= set(taken)
        return taken

    def free(self, blocks: Any) -> None:
        self.free_ids |= set(blocks)


class Pair:
    """A head and another stage, and what is on its way between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(own_layers, "hold", lambda *_: None)
        self.pool = GroupPool(1)
        self.ring: list[tuple[int, bytes]] = []
        scheduler = SimpleNamespace(kv=self.pool, draining=False, shrink=self.pool.shrink)
        self.members = [self.made(0, scheduler), self.made(1, None)]
        self.deliver()

    def made(self, place: int, head: Any) -> Member:
        part = STAGES[place]
        has = SimpleNamespace(
            name=part.instance,
            layers=LAYERS,
            own_blocks=frozenset(range(OWN)),
            tenant=SimpleNamespace(kv=KV()),
            counts=SimpleNamespace(activation_bytes=0),
        )
        ring = SimpleNamespace(rank=place, names=("head", "member"), post=lambda to, header, *_: self.post(to, header))
        nothing: Any = SimpleNamespace(first=part.first, end=part.end, read=lambda *_: None, write=lambda *_: None)
        arguments: Any = (has, 1, STAGES, place, nothing, None, Slots(LAYERS, 2), None, head, ring)
        member = Member(*arguments, home=False)
        room.grow(member, has.tenant.kv.allocate(BLOCKS))
        return member

    def post(self, to: int, header: bytes) -> None:
        self.ring.append((to, header))

    def deliver(self) -> None:
        while self.ring:
            to, header = self.ring.pop(0)
            member, message = self.members[to], decode(header)
            if isinstance(message, Room):
                room.hear(member, message)
            elif isinstance(message, Shrink) and member.head is None:
                own_layers.give_up(member, message)


def test_layers_that_are_to_leave_before_they_have_come_leave_when_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort comes by another way than what the head says, and may overtake it."""
    pair = Pair(monkeypatch)
    head, member = pair.members
    roomy = pair.pool.usable_blocks
    for each in pair.members:
        own_layers.fetch(each, 7, {})
    pair.deliver()
    assert head.shrinking
    own_layers.shrink(head)
    own_layers.unfetch(member, 7)
    pair.deliver()
    own_layers.unfetch(head, 7)
    pair.deliver()
    assert pair.pool.usable_blocks == roomy and not head.home and not member.home
    for each in pair.members:
        own_layers.fetch(each, 8, {})
    pair.deliver()
    assert head.shrinking
    own_layers.shrink(head)
    pair.deliver()
    assert head.home and member.home and pair.pool.usable_blocks < roomy


def test_what_was_said_for_an_epoch_that_is_over_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    head, member = pair.members
    own_layers.fetch(member, 7, {})
    own_layers.unfetch(head, 7)  # it has never heard of it
    own_layers.unfetch(member, 7)
    pair.deliver()
    own_layers.fetch(head, 8, {})
    pair.deliver()
    assert not head.shrinking  # the other stage has not said what it will have
    own_layers.fetch(member, 8, {})
    pair.deliver()
    assert head.shrinking
