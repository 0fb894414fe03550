# SPDX-License-Identifier: Apache-2.0
"""The effects of a call on each tenant, for its report. Which blocks moved is not here: `Changes.moved` has that, so that a call
that raises loses nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from remap.policy.views import Decision

__all__ = ["Entries", "Entry", "ended_early", "merge"]


@dataclass
class Entry:
    """added: blocks that became usable. unmet: blocks of the demand that are lacking; short: that were, before. stall: certified
    seconds per pass, of what streams. wanted: donor -> live blocks that its engine is to free; rest: what is to be done then.
    An entry is in its report as soon as something has changed for the tenant."""

    added: int = 0
    unmet: int = 0
    stall: float = 0.0
    reason: str = ""
    short: int = 0
    wanted: dict[str, int] = field(default_factory=dict)
    rest: Decision | None = None


Entries = dict[str, Entry]


def merge(report: Entries, cause: str, moved: Mapping[str, Mapping[int, int]]) -> Entry:
    """Adds entries for `cause`, whose layers came home, and for all whose blocks moved for that, where there are none yet.
    Returns that of `cause`."""
    for name, moves in moved.items():
        report.setdefault(name, Entry(reason=f"{len(moves)} blocks moved: layers of {cause} came home"))
    return report.setdefault(cause, Entry(reason=f"layers of {cause} came home"))


def ended_early(reason: str, problem: str) -> str:
    """The reason, and the problem that ended the change early, if there is one. Changes made by then stay."""
    return f"{reason}; it ended early, and what was done before that stays: {problem}" if problem else reason
