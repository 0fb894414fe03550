"""Whether what an adapter uses of an engine is there, and takes the arguments that it is given: before anything is changed.

What a name means cannot be seen so, nor what instances hold: an unknown version that passes is served with a warning.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from remap.errors import InvalidState

__all__ = ["Touched", "admit", "known", "unlike"]


class Touched(NamedTuple):
    """A name in a module, dotted: a method, a field of a dataclass. takes: of a function the parameters that it is called with or
    overridden by, "self block num_tokens=": those in order, and with "=" by name; others have to have defaults, unless a "*" says
    that whatever there is will be passed on. None: any."""

    module: str
    name: str
    takes: str | None = None


_warned: set[tuple[str, str | None]] = set()


def known(found: str | None, tested: Sequence[str]) -> bool:
    """Whether the version is the first or the last of the tested ones, or between them. tested: such as ("0.31", "0.32")."""
    return _order(found, tested) == 0


def admit(
    what: str,
    found: str | None,
    tested: Sequence[str],
    touched: Sequence[Touched],
    warn: Callable[[str], None],
    otherwise: str,
) -> None:
    """Raises InvalidState (fields version, tested, unlike) for a version that cannot be entered: none, one older than the tested
    ones, or a newer one in which something of `touched` is not as expected. A newer one in which nothing is: one warning in
    this process. otherwise: what the user can do instead."""
    order = _order(found, tested)
    if order == 0 or (what, found) in _warned:
        return
    span = " to ".join(dict.fromkeys((tested[0], tested[-1])))
    if order is None or order < 0:
        raise InvalidState(
            f"remap is written for {what} {span} and newer, installed is {found}; nothing was changed; {otherwise}",
            version=found,
            tested=tuple(tested),
            unlike=(),
        )
    wrong = unlike(touched)
    if wrong:
        raise InvalidState(
            f"remap was tested with {what} {span}; in {found}, {len(wrong)} of the {len(touched)} names that it uses are not as "
            f"expected: {'; '.join(wrong)}; nothing was changed; {otherwise}",
            version=found,
            tested=tuple(tested),
            unlike=tuple(wrong),
        )
    _warned.add((what, found))
    warn(
        f"remap was tested with {what} {span}, this is {found}: the {len(touched)} names in it that remap uses are there and "
        "take what they are given; what they do was not tested"
    )


def _order(found: str | None, tested: Sequence[str]) -> int | None:
    """-1: older than the tested ones, 0: among them, 1: newer. None: not a version."""
    numbers = re.match(r"\d+(\.\d+)*", found or "")
    if numbers is None:
        return None
    first, last = (tuple(map(int, each.split("."))) for each in (tested[0], tested[-1]))
    version = tuple(map(int, numbers[0].split(".")))
    return -1 if version[: len(first)] < first else int(version[: len(last)] > last)


def unlike(touched: Sequence[Touched]) -> list[str]:
    """What is missing or takes other arguments, each in words; [] if all is as expected. Imports the modules."""
    return [text for each in touched if (text := _unlike(each))]


def _unlike(each: Touched) -> str:
    label = f"{each.module}:{each.name}"
    try:
        found: Any = import_module(each.module)
    except ImportError as error:
        return f"{label}: {error}"
    for part in each.name.split("."):
        if part in getattr(found, "__dataclass_fields__", ()):
            return ""
        if not hasattr(found, part):
            return f"{label} is not there"
        found = getattr(found, part)
    if each.takes is None:
        return ""
    parameters = inspect.signature(found).parameters.values()
    given = each.takes.split()
    ordered = [name for name in given if not name.endswith(("=", "*"))]
    named = {name[:-1] for name in given if name.endswith("=")}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [one.name for one in parameters if one.kind not in variable]
    needed = {one.name for one in parameters if one.kind not in variable and one.default is one.empty}
    if "*" in given:
        needed = set()
    if names[: len(ordered)] != ordered or not named <= set(names) or needed - set(ordered) - named:
        return f"{label} takes ({', '.join(names)}), expected ({', '.join(given)})"
    return ""
