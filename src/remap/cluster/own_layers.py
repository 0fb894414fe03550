"""Which layers an instance computes and holds, and what of them may stream; the pages of the others are KV. The one place where
the data plane asks for that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remap import advanced
from remap.policy.cluster.placement import Streamable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["end_streaming", "hold", "streamable"]


def hold(session: Any, name: str, first: int, end: int, besides: Collection[int] = ()) -> Mapping[int, int]:
    """Let the tenant compute its layers first <= i < end, and hold those of `besides` as well. What it lacks of them comes from
    the host's master copies. Returns (old -> new) of live blocks that moved.

    Raises what `advanced.place` raises; nothing changed then.
    """
    report = advanced.place(session, name, first, end, hold=besides)
    moved: Mapping[int, int] = report.moved.get(name, {})
    return moved


def streamable(session: Any, name: str, block_bytes: int) -> Streamable:
    """What of the tenant's layers streams now or still may, as its certificate allows; between passes. block_bytes: of a KV
    block. Raises what `advanced.offer` raises."""
    offer = advanced.offer(session, name)
    return Streamable(offer.blocks * block_bytes, offer.stall_s + offer.share * offer.reload_s)


def end_streaming(session: Any, name: str) -> Mapping[int, int]:
    """Let none of the layers that the tenant holds stream: pages that became KV for that come back, and never again move blocks
    of a stage. Returns (old -> new) of live blocks that moved. Raises what `advanced.remap` raises; nothing changed then."""
    report = advanced.remap(session, name, 0)
    moved: Mapping[int, int] = report.moved.get(name, {})
    return moved
