# SPDX-License-Identifier: Apache-2.0
"""Tables of machines and models as JSON: the built-in ones, a user's on top, and looking a name up. For `hardware`. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from remap.config import invalid
from remap.errors import InvalidArgument
from remap.policy.near_names import meant, nearest

__all__ = ["Extra", "begins", "resolve", "table_of"]

Extra = str | Path | Mapping[str, Any] | None
"""A table of the user's: the path of a JSON file, or what such a file holds."""


@cache
def _builtin(kind: str) -> dict[str, Any]:
    text = (resources.files("remap.policy") / "tables" / f"{kind}.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)[kind]
    return table


def table_of(kind: str, extra: Extra) -> dict[str, Mapping[str, Any]]:
    """The built-in entries with the user's on top, each merged with the one that it is like."""
    table: dict[str, Mapping[str, Any]] = dict(_builtin(kind))
    if extra is None:
        return table
    given = _read(extra).get(kind, {})
    if not isinstance(given, Mapping):
        raise invalid(kind, given, "an object of entries by name")
    for name, entry in given.items():
        if not isinstance(entry, Mapping) or not isinstance(name, str) or not name:
            raise invalid(f"{kind}.{name}", entry, "an object, under a name")
        aliases = entry.get("aliases", [])
        if not isinstance(aliases, (list, tuple)) or not all(isinstance(alias, str) for alias in aliases):
            raise invalid(f"{name}.aliases", aliases, "a list of names")
        base: Mapping[str, Any] = {}
        same = [known for known in table if known.lower() == name.lower()]
        if "like" in entry:
            if not isinstance(entry["like"], str):
                raise invalid(f"{name}.like", entry["like"], f"the name of a {kind[:-1]}")
            base = {
                key: part for key, part in table[resolve(kind[:-1], entry["like"], table)].items() if key != "aliases"
            }
        elif same:
            base = table[same[0]]
        table[same[0] if same else name] = _merged(base, entry)
    return table


def _merged(base: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**base, **entry}
    for part in ("figures", "roofline"):
        if isinstance(base.get(part), Mapping) and isinstance(entry.get(part), Mapping):
            merged[part] = {**base[part], **entry[part]}
    return merged


def _read(extra: Extra) -> Mapping[str, Any]:
    if isinstance(extra, Mapping):
        return extra
    if not isinstance(extra, (str, Path)):
        raise invalid("extra", extra, "the path of a JSON file, or a mapping")
    try:
        document = json.loads(Path(extra).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(
            f"extra: {extra} cannot be read ({error.strerror}); nothing changed; correct the path",
            field="extra",
            value=str(extra),
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"extra: {extra} is not JSON ({error}); nothing changed; correct the file", field="extra", value=str(extra)
        ) from error
    if not isinstance(document, Mapping) or not ({"machines", "models"} & set(document)):
        raise invalid("extra", str(extra), "an object with `machines` or `models`")
    return document


def begins(known: str, wanted: str) -> bool:
    """Whether a known name begins with what was asked for, in any case, and no number is cut off: A10 is no A100."""
    rest = known[len(wanted) :]
    cut = wanted[-1:].isdigit() and rest[:1].isdigit()
    return bool(wanted) and known.lower().startswith(wanted.lower()) and not cut


def resolve(kind: str, name: object, table: Mapping[str, Mapping[str, Any]]) -> str:
    """The full name: exact, an alias, or a unique beginning, in that order and in any case."""
    wanted = name.strip().lower() if isinstance(name, str) else ""
    if wanted:
        for known in table:
            if known.lower() == wanted:
                return known
        for known, entry in table.items():
            if wanted in [alias.lower() for alias in entry.get("aliases", ())]:
                return known
    begun = [known for known in table if begins(known, wanted)]
    if len(begun) == 1:
        return begun[0]
    known_names = tuple(table)
    if begun:
        raise InvalidArgument(
            f"{kind} {name!r} may be {' or '.join(begun)}; nothing was looked up; give the full name",
            field=kind,
            name=name,
            known=known_names,
            candidates=tuple(begun),
        )
    near = nearest(wanted, table)
    raise InvalidArgument(
        f"unknown {kind} {name!r}{meant(near)}; nothing was looked up; the known ones are {', '.join(known_names)}; a JSON of "
        "one's own adds more",
        field=kind,
        name=name,
        known=known_names,
        candidates=near,
    )
