# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of a session's methods: each raises InvalidArgument before the method changes anything."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike, fsencode
from typing import Any, cast

from remap.config import Config, invalid, is_count
from remap.errors import InvalidArgument
from remap.kv.spec import KVSpec
from remap.policy.views import Demand
from remap.sizes import shown

__all__ = [
    "require",
    "require_attach",
    "require_buffers",
    "require_bytes",
    "require_call",
    "require_demands",
    "require_layer",
    "require_layers",
    "require_module",
    "require_options",
    "require_path",
    "require_range",
]

ADDRESSES = 1 << 63
"""Sizes and addresses are below this limit: the core's are 64-bit, and errors carry signed numbers."""


def require(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raises InvalidArgument (fields field, value) unless `value` is an instance of `kinds`.

    A bool does not count as an int, unless `kinds` names bool or object.
    """
    if isinstance(value, kinds):
        named = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(value, bool) or bool in named or object in named:
            return
    raise InvalidArgument(
        f"{name} must be {expected}, got {_shown(value)}; nothing changed; correct {name}", field=name, value=value
    )


def require_attach(
    name: object, priority: object, kv: object, config: object, active: object, resident_layers: object, pages: object
) -> None:
    """Checks the arguments that `Session.attach` and `attach_bytes` share; raises as `require` does."""
    require("name", name, str, "the tenant's name, a str")
    if not _encodes(cast(str, name).encode):
        raise invalid("name", name, "text that UTF-8 can encode: the core names regions by it")
    require("priority", priority, int, "an int")
    require("kv", kv, KVSpec, "a KVSpec")
    require("config", config, (Config, type(None)), "a remap.Config, or None for the session's")
    require("active", active, bool, "True or False")
    if resident_layers is not None and not is_count(resident_layers):
        raise invalid("resident_layers", resident_layers, "a number of layers, at least 0, or None for all of them")
    require("pages", pages, str, "'auto', 'own' or 'none'")
    if pages not in ("auto", "own", "none"):
        raise invalid("pages", pages, "'auto', 'own' or 'none'")
    if pages == "none" and (active or resident_layers is not None):
        raise invalid("pages", pages, "'auto' or 'own', unless active=False and resident_layers=None")


def require_module(model: object) -> None:
    """Raises InvalidArgument (fields field, value) unless `model` is a torch module."""
    from torch import nn

    require("model", model, nn.Module, "a torch module (attach_bytes takes plain buffers)")


def require_options(
    layers: object, mutable: object, weights: object, names: object, extra: object, hooks: object
) -> None:
    """Checks the arguments of `Session.attach` alone; raises as `require` does.

    `pack.build` refuses one string as `mutable`.
    """
    require("layers", layers, (Iterable, type(None)), "a list of modules, the path of one, or None")
    require("mutable", mutable, Sequence, "a sequence of patterns")
    require("extra_layers", extra, Iterable, "a sequence of modules or their paths")
    require("hooks", hooks, bool, "True or False")
    require("names", names, (Mapping, type(None)), "a mapping of tensors' names to those in the weights files, or None")
    for pattern in cast("Sequence[object]", mutable):
        require("mutable", pattern, str, "a sequence of patterns, each a str")
    paths = weights if isinstance(weights, Sequence) and not isinstance(weights, (str, bytes)) else (weights,)
    for path in paths:
        if path is not None:
            require_path("weights", path, "a path, a sequence of paths, or None")


def require_path(name: str, path: object, expected: str = "a path") -> None:
    """Raises InvalidArgument (fields field, value) for a value that is no path, or none that a file can have."""
    require(name, path, (str, PathLike), expected)
    known = cast("str | PathLike[str]", path)
    if not _encodes(partial(fsencode, known)) or b"\0" in fsencode(known):
        raise invalid(name, path, "a path that the file system can name: no NUL, no lone surrogate")


def require_layer(layer: object, layers: int) -> None:
    """Raises InvalidArgument (fields field, value, layers) unless `layer` is the number of one of `layers` layers."""
    if not is_count(layer) or cast(int, layer) >= layers:
        raise InvalidArgument(
            f"layer must be an int in 0..{layers - 1}, got {shown(layer)}; nothing changed",
            field="layer",
            value=layer,
            layer=layer,
            layers=layers,
        )


def require_layers(name: str, layers: object, count: int) -> tuple[int, ...]:
    """These numbers of layers, of `count` that there are, each once and ascending. Raises InvalidArgument (fields field, value)
    for a value that is no collection of ints."""
    if isinstance(layers, (str, bytes, bytearray, memoryview)) or not isinstance(layers, Collection):
        raise invalid(name, layers, "a collection of layers' numbers")
    found = set[int]()
    for layer in layers:  # of a range without end the first that is none
        if not is_count(layer) or cast(int, layer) >= count:
            raise invalid(name, layers, f"a collection of layers' numbers, each an int in 0..{count - 1}")
        found.add(cast(int, layer))
    return tuple(sorted(found))


def require_bytes(**values: object) -> None:
    """Raises InvalidArgument (fields field, value) for a size, offset or address that is no int from 0 to ADDRESSES - 1."""
    for name, value in values.items():
        if not is_count(value):
            raise invalid(name, value, f"an int from 0 to {ADDRESSES - 1}")


def require_call(name: str, call: object) -> None:
    """Raises InvalidArgument (fields field, value) for what cannot be called."""
    if not callable(call):
        raise invalid(name, call, "a function")


def require_range(address: object, nbytes: object) -> None:
    """Raises InvalidArgument (fields field, value) unless both are ints from 0 to ADDRESSES - 1."""
    require_bytes(address=address, nbytes=nbytes)


def require_buffers(layers: object) -> list[memoryview]:
    """Each layer as a view of its bytes. Raises InvalidArgument (fields field, value and, for a bad layer, layer)."""
    if isinstance(layers, (str, bytes, bytearray, memoryview, Mapping)) or not isinstance(layers, Sequence):
        raise InvalidArgument(
            f"layers must be a sequence with one buffer for each layer, got {_shown(layers)}; nothing was attached; "
            "put a single layer into a list",
            field="layers",
            value=layers,
        )
    if not layers:
        raise InvalidArgument(
            "layers must hold at least one buffer, got none; nothing was attached", field="layers", value=layers
        )
    views = []
    for index, layer in enumerate(layers):
        try:
            views.append(memoryview(layer).cast("B"))
        except (TypeError, ValueError, BufferError) as error:
            raise InvalidArgument(
                f"layer {index} must be a contiguous buffer of bytes, got {_shown(layer)} ({error}); nothing was "
                "attached",
                field="layers",
                value=layer,
                layer=index,
            ) from error
    return views


_demand = functools.lru_cache(maxsize=256)(Demand)  # a value, and most steps want what the step before wanted


def require_demands(demand: Any) -> Mapping[str, Demand]:
    """A step's demands, all checked before one is met. A number of blocks becomes a Demand.

    Raises InvalidArgument (fields field, value and, for one tenant's demand, tenant).
    """
    if demand is None:
        return {}
    if demand.__class__ is not dict and not isinstance(demand, Mapping):
        raise InvalidArgument(
            f"demand must map tenants' names to Demand, got {_shown(demand)}; nothing changed",
            field="demand",
            value=demand,
        )
    plain = {}  # the demands that were given as numbers of blocks
    for name, wanted in demand.items():
        if isinstance(wanted, Demand):
            continue
        if not is_count(wanted):
            raise InvalidArgument(
                f"the demand of {name!r} must be a number of blocks, an int of at least 0, or a Demand, got "
                f"{_shown(wanted)}; nothing changed",
                field="demand",
                value=wanted,
                tenant=name,
            )
        plain[name] = _demand(wanted)
    return {**demand, **plain} if plain else demand


def _encodes(encode: Callable[[], bytes]) -> bool:
    try:
        encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: object) -> str:
    """The value if it is short, else its type: a model's repr has thousands of lines."""
    plain = value is None or isinstance(value, (bool, int, float, str))
    return shown(value) if plain else f"an object of type {type(value).__name__}"
