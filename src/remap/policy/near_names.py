# SPDX-License-Identifier: Apache-2.0
"""The known names that a user may have meant by an unknown one. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["meant", "nearest"]


def nearest(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Up to three of the known names that look like this one, in any case; the likest first."""
    by_lower = {one.lower(): one for one in known}
    return tuple(by_lower[one] for one in difflib.get_close_matches(name.lower(), by_lower, n=3))


def meant(near: Sequence[str]) -> str:
    """ ", did you mean A or B?" for the middle of a message; "" if there is none."""
    return f", did you mean {' or '.join(near)}?" if near else ""
