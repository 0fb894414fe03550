# SPDX-License-Identifier: Apache-2.0
"""Requests that come to a member, and leave it before their end. Between passes. Of a member that is halted nothing is
asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remap.errors import InvalidArgument, InvalidState
from remap_serve.cluster.messages import Tokens
from remap_serve.cluster.wire import require_sendable

if TYPE_CHECKING:
    from collections.abc import Callable

    from remap_serve.cluster.member import Member
    from remap_serve.engine.request import Request

__all__ = ["attempt_of", "cancel", "give_up", "submit"]


def submit(
    member: Member, request: Request, attempt: int, tokens: tuple[int, ...], told: Callable[[list[Tokens]], None]
) -> None:
    """See `ClusterInstance.submit`. told: of the end of an older attempt."""
    name = member.has.name
    if member.head is None or member.next is not None:
        raise InvalidState(
            f"instance {name!r} schedules nothing now: it is no head, or hands over; nothing was queued; submit to the head of "
            "its group",
            instance=name,
        )
    require_sendable(request)
    here = attempt_of(member, request.id)
    if here is not None and here < attempt:
        told(cancel(member, request.id))
        raise InvalidState(
            f"an older attempt of request {request.id!r} was here and is cancelled; nothing was queued; submit it again",
            instance=name,
        )
    if here is not None:
        raise InvalidArgument(f"request id {request.id!r} is in use; nothing was queued", id=request.id)
    member.head.submit(request, attempt, tokens)


def attempt_of(member: Member, id: str) -> int | None:
    """Of a request that is here; None for others."""
    waits = None if member.exchange is None else member.exchange.attempt(id)
    return waits if waits is not None or member.head is None else member.head.attempt(id)


def cancel(member: Member, id: str, attempt: int | None = None) -> list[Tokens]:
    """See `ClusterInstance.cancel`: its end."""
    here = attempt_of(member, id)
    if attempt is not None and here is not None and here > attempt:
        return []
    handed = None if member.exchange is None else member.exchange.cancel(id)
    if handed is not None:
        return [Tokens(id, handed.attempt, len(handed.tokens), (), "abort")]
    return [] if member.head is None else member.head.cancel(id)


def give_up(member: Member, id: str) -> list[Tokens]:
    """See `ClusterInstance.give_up`: its end."""
    return [] if member.head is None else member.head.give_up(id)
