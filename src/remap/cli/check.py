"""One thing that `remap doctor` looked at, and how it reads files of the system."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Check", "read_text"]


@dataclass(frozen=True)
class Check:
    """level: "ok", "note" (works, could be better, or not needed here) or "bad" (does not work). found: what was seen.
    fix: what to do about it, empty where there is nothing to do."""

    level: str
    what: str
    found: str
    fix: str = ""


def read_text(path: str) -> str | None:
    """The file's text without surrounding space; None where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
