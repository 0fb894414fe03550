"""How an instance's layers leave and come home: to be computed elsewhere, their pages KV; and back from the host.

A drop is one call, `hold`, at the switch. Coming home takes two steps, while the group serves:

    fetch     each stage says how many blocks it will have places for, without the pages that other layers had
    shrink    the head, when all have and nothing is in flight, moves live blocks below the least of these
    give_up   each stage gives the pages back, and its layers come from the master copies while passes compute others

`unfetch` undoes both, if the change is given up. Layers of an instance alone may stream meanwhile (`streamable`). This is the one
place where the data plane asks for layers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from remap import advanced
from remap.cluster import room
from remap.cluster.wire import Shrink, encode
from remap.errors import InvalidState, OutOfBlocks
from remap.policy.cluster.placement import Streamable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from remap.cluster.member import Member
    from remap.report import StepReport

__all__ = ["end_streaming", "fetch", "give_up", "hold", "shrink", "streamable", "unfetch"]


def hold(member: Member, first: int, end: int, besides: Collection[int] = ()) -> None:
    """Compute the layers first <= i < end from now on, and hold those of `besides` as well. What is missing of them comes from
    the host's master copies.

    Live blocks of a head alone are followed to where they moved; where they have no room, its youngest requests lose theirs.
    Raises what `advanced.place` raises, with nothing changed; and InvalidState (field moved) if blocks of a stage of several
    moved: its places straddle blocks, so its KV is torn.
    """
    has = member.has
    _follow(member, partial(advanced.place, has.session, has.name, first, end, hold=besides))


def end_streaming(member: Member) -> None:
    """Let none of the layers that the instance holds stream: pages that became KV for that come back, and never again move
    blocks of a stage. Live blocks as in `hold`. Raises what `advanced.remap` raises, with nothing changed."""
    _follow(member, partial(advanced.remap, member.has.session, member.has.name, 0))


def streamable(member: Member) -> Streamable:
    """What of an instance's layers streams now or still may, as its certificate allows; between passes. Raises what
    `advanced.offer` raises."""
    offer = advanced.offer(member.has.session, member.has.name)
    block_bytes = member.has.tenant.kv.spec.block_bytes
    return Streamable(offer.blocks * block_bytes, offer.stall_s + offer.share * offer.reload_s)


def fetch(member: Member, epoch: int) -> None:
    """Begin to bring all layers home for this epoch. Does nothing if they are here."""
    member.fetching = epoch
    if member.home:
        return
    if member.slots is None:
        _come_home(member)
    else:
        room.tell(member, member.slots.room_without(member.slots.held - member.has.own_blocks), leaving=epoch)


def shrink(member: Member) -> None:
    """As a head, when every stage has said how many blocks it will have, and nothing is in flight."""
    assert member.head is not None  # the others are told
    limit = min(member.leaving[place] for place in member.working)
    moves = list(member.head.shrink(limit).items())
    member.rooms = {}
    message = Shrink(member.leaving_for, limit, moves)
    _launch_again(member)
    if member.ring is not None:
        member.forward(encode(message))
    give_up(member, message)


def give_up(member: Member, message: Shrink) -> None:
    """Logical blocks end, and live ones change their number, as the head says; then the layers come home to the pages of those
    that others' layers had. They leave again if that was undone meanwhile: commands and messages come by different ways."""
    slots, kv, limit = member.slots, member.kv, message.limit
    if slots is None:
        return
    if message.moves:
        sources, targets = zip(*message.moves)
        kv.write(slots.table(targets), kv.first, kv.end, kv.read(slots.table(sources), kv.first, kv.end))
    others = slots.held - member.has.own_blocks
    shifts = slots.shrink(limit, others)
    if shifts:
        kv.write([to for _, to in shifts], kv.first, kv.end, kv.read([at for at, _ in shifts], kv.first, kv.end))
    member.has.tenant.kv.free(sorted(others))
    _come_home(member)
    if message.epoch <= member.unfetched:
        _leave(member)


def unfetch(member: Member, epoch: int) -> None:
    """The pages of what came home for this epoch become KV again, or of what is still to come. Does nothing if nothing is."""
    member.unfetched = max(member.unfetched, epoch)
    if member.fetching != epoch or member.alone:
        return
    member.fetching = 0
    if member.head is not None:
        _launch_again(member)
    _leave(member)


def _leave(member: Member) -> None:
    """What came home goes again."""
    if member.home:
        part, kv = member.part, member.has.tenant.kv
        hold(member, part.first, part.end)
        member.home = part.end - part.first == member.has.layers
        member.arrived = frozenset()
        room.grow(member, kv.allocate(kv.free_blocks))


def _launch_again(member: Member) -> None:
    """The head need not drain to shrink any more."""
    assert member.head is not None
    member.leaving, member.shrinking = {}, False
    member.head.draining = member.next is not None


def _come_home(member: Member) -> None:
    """All layers, of which the stage goes on computing its own."""
    part, everything = member.part, range(member.has.layers)
    hold(member, part.first, part.end, everything)
    member.home = True
    member.arrived = frozenset(everything) - set(range(part.first, part.end))


def _follow(member: Member, change: Callable[[], StepReport]) -> None:
    """Carry out a change of the tenant's layers, and follow live blocks (see `hold`)."""
    report = None
    while report is None:
        try:
            report = change()
        except OutOfBlocks:
            # Live blocks lie in pages that layers need. Of a stage of several, nobody here knows whose they are.
            if not member.alone or member.head is None or not member.head.preempt():
                raise
    name = member.has.name
    moved: Mapping[int, int] = report.moved.get(name, {})
    if moved and (member.slots is not None or member.exchange is not None):
        raise InvalidState(
            f"{len(moved)} blocks moved at {name!r} while a stage had KV across them, which is torn now; recover",
            instance=name,
            moved=dict(moved),
        )
    if member.head is not None:
        member.head.follow(moved)
