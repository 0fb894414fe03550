# SPDX-License-Identifier: Apache-2.0
"""The switch: an instance becomes a member of the group that was decided, and what its old group had goes on elsewhere."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from remap.internals import internals
from remap_serve.cluster import beside, member, own_layers, room, throughput
from remap_serve.cluster.exchange import Exchange, Run
from remap_serve.cluster.layer_copies import LayerCopies
from remap_serve.cluster.slots import Departure
from remap_serve.cluster.wire import Handed, LayerPart, Message, encode
from remap_serve.policy.cluster.exchange import chunk_bytes, takers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from remap_serve.cluster.member import Member
    from remap_serve.cluster.messages import GroupPlan
    from remap_serve.cluster.prepared import PreparedGroup
    from remap_serve.cluster.resources import Resources
    from remap_serve.cluster.transport import GroupLink

    Send = Callable[[int, Message, torch.Tensor | None], None]

__all__ = ["MOST_BYTES", "switch"]

MOST_BYTES = 256 << 20
"""Of KV or layers on their way from an instance, and so in memory twice, but for the last piece."""


def switch(old: Member, prepared: PreparedGroup, sent: Callable[[], None]) -> Member:
    """Carry the plan out. Nothing of the old group is in flight here. sent: called in another thread, each time that a piece of
    KV or of a layer has left."""
    has, plan, kv = old.has, prepared.plan, internals(old.has.tenant).kv
    new = member.alone(has, plan.epoch) if prepared.ring is None else member.stage_of(has, plan, prepared.ring)
    own_layers.hold(old, new.part.first, new.part.end)
    new.home = new.part.end - new.part.first == has.layers
    if old.alone and not new.alone:
        # Behind the drop, which makes room for blocks that move. From here on they must not: a stage's places straddle
        # them, so no model may take a page back later.
        beside.end(old)
    leaving = old.head.leave() if old.head is not None else []
    held = set(kv.pool.live_ids())
    for link in (old.ring, old.mesh):
        if link is not None:
            link.close()
    if prepared.mesh is not None:
        new.mesh = prepared.mesh
        send = partial(_send, has, prepared.mesh, sent)
        new.exchange = _exchange(old, new, plan, prepared.mesh, held, send)
        if not new.alone:
            new.copies = LayerCopies(has.session, has.name, has.layer_bytes, send, new.exchange.chunk_bytes)
        if new.head is not None:
            new.head.exchanging = True
    if new.slots is not None:
        room.grow(new, kv.allocate(kv.free_blocks))
    if old.head is not None and new.exchange is not None and new.mesh is not None:
        # Requests come in at several heads; each is handed on by exactly one, with its blocks as they are now.
        # Where a group is dissolved its instances have equal room, as far as this one knows.
        heads = range(len(new.mesh.names)) if new.alone else [new.mesh.names.index(plan.head)]
        ranks = [heads[place] for place in takers((one.length for one, _ in leaving), [0] * len(heads))]
        new.exchange.hand_over(
            [Handed.of(sequence, attempt, to, kv.spec.block_tokens) for (sequence, attempt), to in zip(leaving, ranks)]
        )
    return new


def _send(
    has: Resources, mesh: GroupLink, sent: Callable[[], None], to: int, message: Message, payload: torch.Tensor | None
) -> None:
    if payload is None:
        mesh.post(to, encode(message))
        return
    nbytes = payload.numel()
    has.counts.note_sent(nbytes, layer=isinstance(message, LayerPart))

    def left(seconds: float) -> None:
        has.throughput.note(nbytes, seconds)
        sent()

    mesh.post(to, encode(message), payload, left)


def _exchange(old: Member, new: Member, plan: GroupPlan, mesh: GroupLink, held: set[int], send: Send) -> Exchange:
    """held: the physical blocks in which the old group's KV lies."""
    has = old.has
    ranks = {name: rank for rank, name in enumerate(mesh.names)}
    before = {
        ranks[group[0].instance]: [Run(ranks[part.instance], part.first, part.end) for part in group]
        for group in plan.before
    }
    if new.alone:
        runs = {rank: [Run(rank, 0, has.layers)] for rank in range(len(mesh.names))}
    else:
        runs = {ranks[plan.head]: [Run(ranks[part.instance], part.first, part.end) for part in plan.stages]}

    def departing(live: dict[str, Sequence[int]]) -> Departure:
        return Departure(old.places, held, live if old.part.first < old.part.end else {})

    network = has.throughput.network
    whole_s = has.cost.batch_s + has.cost.chunk(0, has.limits.max_batch_tokens)
    # A stage without layers computes nothing, and may have much to send.
    seconds = whole_s * max(1, new.part.end - new.part.first) / has.layers
    return Exchange(
        mesh.rank,
        len(mesh.names),
        old=old.kv,
        departing=departing,
        heads=before,
        head=ranks[old.stages[0].instance],
        before=before,
        runs=runs,
        new=new.kv,
        places=new.places,
        taker=new.head,
        send=send,
        network=network,
        cost=has.cost,
        # Pieces that are too small to show the network's rate would leave it at whatever was measured last, for good.
        chunk_bytes=min(MOST_BYTES, max(throughput.LEAST_BYTES, chunk_bytes(network, seconds))),
    )
