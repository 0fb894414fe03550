# SPDX-License-Identifier: Apache-2.0
"""How an instance's layers leave and come home: to be computed elsewhere, their pages KV; and back from the host.

A drop is one call, `hold`, at the switch. Coming home takes two steps, while the group serves:

    fetch     each stage says how many blocks it will have places for, without the pages that other layers had
    shrink    the head, when all have and nothing is in flight, moves live blocks below the least of these
    give_up   each stage gives the pages back, and its layers come while passes compute others: from the master copies, and
              those for which control named other instances from these (`layer_copies`)

`unfetch` undoes both, if the change is given up. Every call of the session that may move blocks of an instance between two
passes goes through `following`; the instance's own go through `changed`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from remap import StepReport, advanced
from remap.errors import InvalidState, OutOfBlocks
from remap.internals import internals
from remap.memory.activate import ActivationReport
from remap_serve.cluster import room
from remap_serve.cluster.resources import KVLost
from remap_serve.cluster.wire import Shrink, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from remap_serve.cluster.member import Member

__all__ = ["ReportT", "came", "changed", "fetch", "following", "give_up", "hold", "shrink", "unfetch"]


ReportT = TypeVar("ReportT", StepReport, ActivationReport)
"""The reports of calls of the session that may move blocks."""


def hold(member: Member, first: int, end: int, besides: Collection[int] = (), fill: Collection[int] = ()) -> None:
    """Compute the layers first <= i < end from now on, and hold those of `besides` as well. Missing ones come from
    the host's master copies, but for the layers of `fill`.

    Live blocks as in `changed`. Raises what `advanced.place` raises, with nothing changed; and InvalidState (fields expected,
    got) if that ended before all was done.
    """
    has = member.has
    report = changed(member, partial(advanced.place, has.session, has.name, first, end, hold=besides, fill=tuple(fill)))
    elsewhere = sorted({*range(has.layers)} - ({*range(first, end), *besides} - {*fill}))
    within = internals(has.tenant)
    got = within.computed, sorted(within.elsewhere)
    if got != (range(first, end), elsewhere):
        raise InvalidState(
            f"{has.name!r} was to compute {first} to before {end}, without the layers {elsewhere}; it computes {got[0].start} to "
            f"before {got[0].stop}, without {got[1]} ({report.reason.get(has.name)}); recover",
            instance=has.name,
            expected=(range(first, end), elsewhere),
            got=got,
        )


def changed(member: Member, change: Callable[[], ReportT]) -> ReportT:
    """As `following`, and `others` is told where live blocks of the session's other tenants moved. Raises what both raise."""
    report = following(member, change)
    member.has.tell(report.moved)
    return report


def following(member: Member, change: Callable[[], ReportT]) -> ReportT:
    """Carry out a change of the session between two passes: its report. Live blocks of a head alone are followed to where they
    moved; where they have no room, its youngest requests lose theirs, and it is tried again.

    Raises what the change raises; and KVLost (fields instance, moved) if blocks of a stage of several moved: its places straddle
    blocks, so its KV is torn.
    """
    while True:
        try:
            report = change()
        except OutOfBlocks as error:
            in_the_way = error.fields.get("preempt")
            if not isinstance(in_the_way, dict) or member.has.name not in in_the_way or not _preempt(member):
                raise  # others' blocks, or no request has any more
            continue
        _moved(member, report.moved.get(member.has.name, {}))
        blocks = isinstance(report, ActivationReport) and not report.activated and member.has.name in report.preempt
        if not blocks or not _preempt(member):
            return report


def _preempt(member: Member) -> bool:
    """Whether a request lost its blocks, which lay in pages that layers need. Of a stage of several, the head does not know whose
    they are."""
    return member.alone and member.head is not None and member.head.preempt()


def _moved(member: Member, moved: Mapping[int, int]) -> None:
    """These live blocks moved."""
    name = member.has.name
    if moved and (member.slots is not None or member.exchange is not None):
        raise KVLost(
            f"{len(moved)} blocks moved at {name!r} while a stage had KV across them, which is torn now; recover",
            instance=name,
            moved=dict(moved),
        )
    if member.head is not None:
        member.head.follow(moved)


def fetch(member: Member, epoch: int, sources: Mapping[int, int]) -> None:
    """Begin to bring all layers home for this epoch: these from other instances (by their ranks in the mesh), all others from the
    master copies. Work begun for an earlier epoch is undone, for commands may overtake each other. Does nothing if they are
    here, or if this epoch is over."""
    if epoch <= member.unfetched or epoch < member.fetching:
        return
    if 0 < member.fetching < epoch:
        unfetch(member, member.fetching)
    member.fetching = epoch
    if member.home:
        return
    member.sources = dict(sources)
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
    member.go_on()
    if member.ring is not None:
        member.forward(encode(message))
    give_up(member, message)


def give_up(member: Member, message: Shrink) -> None:
    """Logical blocks end, and live ones change their number, as the head says; then the layers come home to the pages of those
    that others' layers had. If that was undone meanwhile (commands and messages come by different ways), those pages go on as
    KV."""
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
    if message.epoch != member.fetching:
        room.grow(member, others)
        return
    member.has.tenant.kv.free(sorted(others))
    _come_home(member)


def unfetch(member: Member, epoch: int) -> None:
    """The pages of layers that came home for this epoch, or still come, become KV again. Does nothing if there are none."""
    member.unfetched = max(member.unfetched, epoch)
    if member.fetching != epoch or member.alone:
        return
    member.fetching = 0
    if member.head is not None and member.leaving_for <= epoch:
        member.go_on()
    member.sources = {}
    if member.copies is not None:
        member.copies.drop(epoch)
    if member.home:
        part, kv = member.part, member.has.tenant.kv
        hold(member, part.first, part.end)
        member.home = part.end - part.first == member.has.layers
        member.arrived = frozenset()
        room.grow(member, kv.allocate(kv.free_blocks))


def _come_home(member: Member) -> None:
    """All layers, of which the stage goes on computing its own."""
    copies, sources = member.copies, member.sources
    _hold_all(member)
    member.home = True
    if copies is not None:
        copies.want(member.fetching, sources)


def came(member: Member, layer: int, whole: bool) -> None:
    """This layer has come from another instance; or it cannot, so it comes from the master copy."""
    del member.sources[layer]
    if whole:
        member.arrived |= {layer}
    else:
        _hold_all(member)


def _hold_all(member: Member) -> None:
    """All layers, with pages for those that come from other instances."""
    part, everything = member.part, range(member.has.layers)
    hold(member, part.first, part.end, everything, member.sources)
    member.arrived = frozenset(everything) - set(range(part.first, part.end)) - member.sources.keys()
