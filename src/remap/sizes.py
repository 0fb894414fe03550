"""Sizes as users write them: an int of bytes, or "24GiB"."""

from __future__ import annotations

import re

from .errors import InvalidArgument

__all__ = ["parse_size", "show_size"]

_UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


def parse_size(size: int | str, name: str = "size") -> int:
    """Bytes. Raises InvalidArgument (field: name) for a negative, an unknown unit, or a fraction of a byte."""
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise InvalidArgument(
                f"{name} must not be negative, got {size} bytes; nothing changed", name=name, value=size
            )
        return size
    match = _TEXT.fullmatch(size) if isinstance(size, str) else None
    if match is None or match[2] not in _UNITS:
        raise InvalidArgument(
            f"{name} must be an int of bytes or text such as '24GiB' (units: {', '.join(_UNITS)}), got {size!r}; "
            "nothing changed",
            name=name,
            value=size,
        )
    value = float(match[1]) * _UNITS[match[2]]
    if value != int(value):
        raise InvalidArgument(
            f"{name} of {size!r} is not a whole number of bytes; nothing changed", name=name, value=size
        )
    return int(value)


def show_size(size: int) -> str:
    """The size in the largest binary unit that leaves at least one, with two decimals at most: 268435456 -> "256 MiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{size} B"
