# SPDX-License-Identifier: Apache-2.0
"""Names that stood on a public class: they work for one release more, and say where they are now."""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["moved"]


def moved(asked: object, name: str, holder: str, place: str, to: str = "") -> Any:
    """For `__getattr__`: what `asked.name` was, with a DeprecationWarning that says where it is now.

    holder: the attribute of `asked` with the object that has it now, under the name `to` or the same. place: of that object, for
    users, such as "advanced.inside(tenant)". Raises AttributeError if there was no such name.
    """
    kind, to = type(asked).__name__, to or name
    missing = object()
    found = missing if name.startswith("_") else getattr(getattr(asked, holder), to, missing)
    if found is missing:
        raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=asked)
    warnings.warn(f"{kind}.{name} goes with the next release; use {place}.{to}", DeprecationWarning, stacklevel=3)
    return found
