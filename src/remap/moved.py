# SPDX-License-Identifier: Apache-2.0
"""Names that have changed. The old ones work for one release more, and say what to use instead; all of them come here.

    moved              a name that stood on a public class
    renamed            a keyword of a public class or function
    SETTINGS, present  variables of the environment, and names in vLLM's --additional-config
    OPTIONS            of commands (`remap.cli.options`)

docs/versions.md has the policy.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from remap.errors import InvalidArgument

__all__ = ["GOES", "KEYWORDS", "OPTIONS", "SETTINGS", "goes", "moved", "present", "renamed"]

GOES = "0.2"
"""The release without the old names: with it they leave these tables."""

SETTINGS = {"HEADROOM": "RESERVE_BLOCKS", "TTFT_BUDGET_S": "RELOAD_S"}
"""Variables, without REMAP_ in front: old -> new."""

OPTIONS: Mapping[tuple[str, ...], Mapping[str, str]] = {
    ("demo",): {"--budget": "--memory"},
    ("plan",): {"--max-requests": "--max-num-seqs"},
    ("simulate",): {"--tenants": "--models"},
    ("cluster", "serve"): {"--swap": "--host-kv"},
}
"""Command -> old -> new."""

KEYWORDS: list[tuple[type, Mapping[str, str]]] = []
"""Classes with `renamed` keywords: old -> new."""

Class = TypeVar("Class", bound=type)

_logger = logging.getLogger("remap.settings")
_told: set[str] = set()


def goes(old: str, new: str) -> str:
    """What is said of every old name."""
    return f"{old} goes with the next release; use {new}"


def _refuse_both(old: str, new: str) -> InvalidArgument:
    return InvalidArgument(
        f"{old} is called {new} now, and both were given; nothing changed; leave {old} out", field=old, value=new
    )


def moved(asked: object, name: str, holder: str, place: str, to: str = "") -> Any:
    """For `__getattr__`: what `asked.name` was, with a DeprecationWarning that says where it is now.

    holder: the attribute of `asked` with the object that has it now, under the name `to` or the same. place: of that object, for
    users, such as "advanced.internals(tenant)". Raises AttributeError if there was no such name.
    """
    kind, to = type(asked).__name__, to or name
    missing = object()
    found = missing if name.startswith("_") else getattr(getattr(asked, holder), to, missing)
    if found is missing:
        raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=asked)
    warnings.warn(goes(f"{kind}.{name}", f"{place}.{to}"), DeprecationWarning, stacklevel=3)
    return found


def renamed(**names: str) -> Callable[[Class], Class]:
    """A decorator of a class whose `__init__` takes these keywords still: old="new". Giving one warns; giving both raises
    InvalidArgument (field)."""

    def decorate(kind: Class) -> Class:
        cls: Any = kind
        original = cls.__init__

        @functools.wraps(original)
        def init(self: Any, *args: Any, **given: Any) -> None:
            for old in given.keys() & names.keys():
                new = names[old]
                if new in given:
                    raise _refuse_both(old, new)
                warnings.warn(goes(f"{cls.__name__}({old}=)", f"{new}="), DeprecationWarning, stacklevel=2)
                given[new] = given.pop(old)
            original(self, *args, **given)

        cls.__init__ = init
        KEYWORDS.append((kind, names))
        return kind

    return decorate


def present(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment with the present name of each variable that has an old one (`SETTINGS`), which is also said in the log:
    an operator sees no DeprecationWarning.

    An empty variable counts as not set. Raises InvalidArgument (field) if both are set.
    """
    found = {f"REMAP_{old}": f"REMAP_{new}" for old, new in SETTINGS.items() if environment.get(f"REMAP_{old}")}
    if not found:
        return environment
    now = dict(environment)
    for old, new in found.items():
        if now.get(new):
            raise _refuse_both(old, new)
        now[new] = now.pop(old)
        warnings.warn(goes(old, new), DeprecationWarning, stacklevel=3)
        if old not in _told:
            _told.add(old)
            _logger.warning("%s", goes(old, new))
    return now
