# SPDX-License-Identifier: Apache-2.0
"""Room for KV that an instance has beside its own memory, while it serves alone: of its layers that stream, and of models that
are idle in its session. The session gives it when requests need it (`Head.rest`). Reports say how much that may be and what it
costs; at the switch to a group it ends. Such a model may wake and serve, and borrow pages of the instance's layers in its turn:
then those cannot leave, and the instance stays alone (`check`)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from remap import advanced
from remap.errors import InvalidState
from remap_serve.cluster.own_layers import changed
from remap_serve.policy.cluster.placement import Offer

if TYPE_CHECKING:
    from remap_serve.cluster.member import Member

__all__ = ["check", "end", "offers"]


def offers(member: Member) -> tuple[Offer, ...]:
    """The memory that it has beside its own now, or may have; the cheapest for its bytes first. Between passes. Raises what
    `advanced.offers` raises."""
    block_bytes = member.has.tenant.kv.spec.block_bytes
    quotes = advanced.offers(member.has.session, member.has.name)
    found = [Offer(each.blocks * block_bytes, each.stall_s + each.share * each.reload_s) for each in quotes]
    return tuple(sorted(found, key=lambda offer: offer.added_s / offer.nbytes))


def check(member: Member) -> None:
    """Between passes. Raises InvalidState (field neighbours: name -> live blocks) if another model's KV lies in pages of this
    instance's layers, which are to come home for a merger."""
    tenants = member.has.session.snapshot().tenants
    lent = tenants[member.has.name].lent_to
    neighbours = {name: tenants[name].live_blocks for name in lent if tenants[name].live_blocks}
    if neighbours:
        raise InvalidState(
            f"pages of {member.has.name!r}'s layers hold KV of {sorted(neighbours)}, with {sum(neighbours.values())} live "
            "blocks; nothing changed; prepare when their requests have ended",
            instance=member.has.name,
            neighbours=neighbours,
        )


def end(member: Member) -> None:
    """None of its layers streams any more, and what other models lent is theirs again: so no model takes pages back, which would
    move blocks of a stage. Live blocks as in `own_layers.changed`. Raises what `advanced.remap` and `advanced.give_back`
    raise."""
    has = member.has
    changed(member, partial(advanced.remap, has.session, has.name, 0))
    changed(member, partial(advanced.give_back, has.session, has.name))
