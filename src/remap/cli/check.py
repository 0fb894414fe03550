# SPDX-License-Identifier: Apache-2.0
"""The result of one check of `remap doctor`, and a reader of system files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Check", "read_text"]


@dataclass(frozen=True)
class Check:
    """One check. what: its subject. found: the present state. fix: advice to the user, empty if there is nothing to do.

    level: "ok", "note" (it works and could be better, or it is not needed here) or "bad" (it does not work).
    """

    level: str
    what: str
    found: str
    fix: str = ""


def read_text(path: str) -> str | None:
    """The file's text without surrounding space; None if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
