# SPDX-License-Identifier: Apache-2.0
"""Ranges for profilers (Nsight Systems), if REMAP_NVTX=1 was set when this package was imported.

"remap.step", "remap.apply" and "remap.settle" are calls; "remap.pass" is from the beginning to the end of a pass. They
come from the `nvtx` package or else from torch.cuda.nvtx; without either, and without the variable, nothing is called.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

__all__ = ["annotated", "load", "pop", "push"]

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_Ranges = tuple[Callable[[str], Any], Callable[[], Any]]


def _no_push(name: str) -> None:
    """Ranges are off."""


def _no_pop() -> None:
    """Ranges are off."""


def load(enabled: bool) -> _Ranges:
    """(push(name), pop()) of the first library that is there and works; two functions that do nothing otherwise."""
    for module, push, pop in (("nvtx", "push_range", "pop_range"), ("torch.cuda.nvtx", "range_push", "range_pop")):
        if not enabled:
            break
        try:
            library = importlib.import_module(module)
            begin, end = getattr(library, push), getattr(library, pop)
            begin("remap")  # a torch without CUDA has the functions and raises from them
            end()
        except (ImportError, RuntimeError):
            continue
        return begin, end
    return _no_push, _no_pop


push, pop = load(os.environ.get("REMAP_NVTX") == "1")


def annotated(name: str) -> Callable[[Callable[_Given, _Result]], Callable[_Given, _Result]]:
    """Decorates a function with a range of that name. While ranges are off the function stays as it is: no cost."""

    def decorate(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
        if push is _no_push:
            return function

        @functools.wraps(function)
        def ranged(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
            push(name)
            try:
                return function(*args, **kwargs)
            finally:
                pop()

        return ranged

    return decorate
