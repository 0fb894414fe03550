# SPDX-License-Identifier: Apache-2.0
"""Sizes as users write them: an int of bytes, or "24GiB"; where all is text, as in a command, "25769803776" too."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from .errors import InvalidArgument

__all__ = ["MOST_BYTES", "parse_memory", "parse_size", "show_size", "shown"]

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
MOST_BYTES = 2**63 - 1
"""The largest size: the core counts bytes in 64 bits."""
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: int | str, name: str = "size") -> int:
    """The size in bytes. name: of the argument, for error messages.

    Raises InvalidArgument (fields name, value) for a negative size, an unknown unit, a fraction of a byte, or more than
    MOST_BYTES.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise InvalidArgument(
                f"{name} must not be negative, got {shown(size)} bytes; nothing changed", name=name, value=size
            )
        return _bounded(size, name, size)
    match = _TEXT.fullmatch(size) if isinstance(size, str) else None
    unit = None if match is None else _UNITS.get(match[2] or "B")
    if match is None or unit is None:
        raise InvalidArgument(
            f"{name} must be an int of bytes or text such as '24GiB' (units: {', '.join(_UNITS)}), got {shown(size)}; "
            "nothing changed",
            name=name,
            value=size,
        )
    if len(match[1]) > _LONG:
        raise _too_large(name, size)
    from fractions import Fraction  # here: it takes 5 ms to import

    value = Fraction(match[1]) * unit
    if value.denominator != 1:
        raise InvalidArgument(
            f"{name} of {size!r} is not a whole number of bytes; nothing changed; give a unit, as in '24GiB'",
            name=name,
            value=size,
        )
    return _bounded(int(value), name, size)


def parse_memory(text: int | str, whole: Callable[[], int], name: str = "memory") -> int:
    """Bytes of a size, as `parse_size` reads it, or of a share such as "90%" of `whole()`. Raises InvalidArgument."""
    if not isinstance(text, str) or not text.strip().endswith("%"):
        return parse_size(text, name)
    try:
        percent = float(text.strip()[:-1])
    except ValueError:
        percent = math.nan
    if not 0 < percent <= 100:
        raise InvalidArgument(
            f"{name} must be a share above 0% and at most 100%, or a size such as '24GiB', got {shown(text)}; nothing was done; "
            f"correct {name}",
            field=name,
            value=text,
        )
    return int(percent / 100 * whole())


_LONG = 60  # characters; a longer number is neither read nor repeated in a message


def _bounded(size: int, name: str, given: int | str) -> int:
    if size > MOST_BYTES:
        raise _too_large(name, given)
    return size


def _too_large(name: str, given: int | str) -> InvalidArgument:
    return InvalidArgument(
        f"{name} must be at most {MOST_BYTES} bytes ({show_size(MOST_BYTES)}), got {shown(given)}; nothing changed; "
        "give a smaller size",
        name=name,
        value=given,
    )


def shown(value: object) -> str:
    """The value in a message, however long it is."""
    if isinstance(value, int) and value.bit_length() > 4 * _LONG:  # Python refuses to print an int of 5000 digits
        return f"a number of about {int(value.bit_length() * 0.30103) + 1} digits"
    try:
        text = repr(value)
    except ValueError:  # it holds such an int
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= 2 * _LONG else f"{text[:_LONG]}... ({len(text)} characters)"


def show_size(size: int) -> str:
    """The size in the largest binary unit that leaves at least one, with two decimals at most: 268435456: "256 MiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{size} B"
