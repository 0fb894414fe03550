# SPDX-License-Identifier: Apache-2.0
"""Two checks of an engine's version that is newer than those that an adapter was tested with.

`admit` checks, before any change, that the engine has the names that the adapter uses and that they take its arguments.
It does not see the meaning of a function, nor how the engine calls the adapter. `prove` therefore runs a trial after the
attach and before the first request, and takes the attach back if the trial shows a difference. Tested versions pay for
neither.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

from remap.errors import InvalidState

__all__ = ["Touched", "admit", "known", "prove", "unlike"]


class Touched(NamedTuple):
    """A name in an engine's module that an adapter uses: dotted, a method, a field, or an attribute that a method of the class
    sets.

    takes: for a function, the parameters that the adapter passes, or that its override has, as in "self block
    num_tokens=": plain names by position, names with "=" by keyword. All other parameters of the function must have
    defaults, unless "*" is among the words (the adapter passes on all that it gets). None: the parameters are not
    checked.
    """

    module: str
    name: str
    takes: str | None = None


_warned: set[tuple[str, str | None]] = set()


def known(found: str | None, tested: Sequence[str]) -> bool:
    """Whether the version lies between the first and the last of the tested ones, both included. tested: as ("0.31",
    "0.32").
    """
    return _order(found, tested) == 0


def admit(
    what: str,
    found: str | None,
    tested: Sequence[str],
    touched: Sequence[Touched],
    warn: Callable[[str], None],
    otherwise: str,
) -> bool:
    """Refuse a version of the engine `what` that the adapter cannot work with.

    Raises InvalidState (fields version, tested, unlike) if there is none, if it is older than the tested ones, or if it
    is newer and something in `touched` is not as expected. For a newer version in which all is as expected, calls
    `warn` once in this process. otherwise: the error's advice to the user. Returns whether the version is a newer one: the
    adapter then makes a trial before it serves.
    """
    order = _order(found, tested)
    if order == 0 or (what, found) in _warned:
        return order != 0
    span = " to ".join(dict.fromkeys((tested[0], tested[-1])))
    if order is None or order < 0:
        raise InvalidState(
            f"remap works with {what} {span} and newer, but {found} is installed; nothing was changed; {otherwise}",
            version=found,
            tested=tuple(tested),
            unlike=(),
        )
    wrong = unlike(touched)
    if wrong:
        raise InvalidState(
            f"remap was tested with {what} {span}; in {found}, {len(wrong)} of the {len(touched)} names that it uses "
            f"are not as expected: {'; '.join(wrong)}; nothing was changed; {otherwise}",
            version=found,
            tested=tuple(tested),
            unlike=tuple(wrong),
        )
    _warned.add((what, found))
    warn(
        f"remap was tested with {what} {span}, this is {found}: it has the {len(touched)} names that remap uses, with "
        "the expected parameters; remap's tests were not run with it"
    )
    return True


def prove(
    what: str,
    found: str | None,
    tested: Sequence[str],
    trial: Callable[[], str],
    undo: Callable[[], None],
    otherwise: str,
) -> None:
    """Run `trial` if the version is not a tested one; it returns what differed, or "".

    Raises InvalidState (fields version, tested, differed), after `undo`, if something differed or the trial raised (the
    cause of the error). Errors of `undo` are raised as they are. otherwise: the error's advice to the user.
    """
    if known(found, tested):
        return
    cause = None
    try:
        differed = trial()
    except Exception as error:  # noqa: BLE001 - an unknown version may fail with any error, and each means the same
        differed, cause = f"{type(error).__name__}: {error}", error
    except BaseException:  # an interrupt: the caller does not get the attached object
        undo()
        raise
    if not differed:
        return
    undo()
    span = " to ".join(dict.fromkeys((tested[0], tested[-1])))
    raise InvalidState(
        f"remap was tested with {what} {span}; with {found} a trial before the first request failed: {differed}; the "
        f"attach was undone; {otherwise}",
        version=found,
        tested=tuple(tested),
        differed=differed,
    ) from cause


def _order(found: str | None, tested: Sequence[str]) -> int | None:
    """-1 if the version is older than the tested ones, 0 if it is among them, 1 if it is newer, None if it is no
    version.
    """
    numbers = re.match(r"\d+(\.\d+)*", found or "")
    if numbers is None:
        return None
    first, last = (tuple(map(int, each.split("."))) for each in (tested[0], tested[-1]))
    version = tuple(map(int, numbers[0].split(".")))
    return -1 if version[: len(first)] < first else int(version[: len(last)] > last)


def unlike(touched: Sequence[Touched]) -> list[str]:
    """A sentence for each name that is missing or takes other arguments; [] if all is as expected.

    Imports the modules.
    """
    return [text for each in touched if (text := _unlike(each))]


@functools.cache
def _attributes(owner: Any) -> frozenset[str]:
    """What instances have: fields that are declared in the class and its bases, and what their methods set in `self`."""
    found = set(getattr(owner, "__dataclass_fields__", ()))
    for each in owner.__mro__[:-1]:
        with suppress(OSError, TypeError):  # no source
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(each)))):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found.add(node.target.id)
                elif (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Store)
                    and ast.unparse(node.value) == "self"
                ):
                    found.add(node.attr)
    return frozenset(found)


def _unlike(each: Touched) -> str:
    label = f"{each.module}:{each.name}"
    try:
        found: Any = import_module(each.module)
    except ImportError as error:
        return f"{label}: {error}"
    for part in each.name.split("."):
        if not hasattr(found, part) and isinstance(found, type) and part in _attributes(found):
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
