"""How a measure is declared, and what it may need.

    @measure("link", needs=("driver",), full_s=20, quick_s=6)
    def link(ctx: Context) -> Iterator[Figure]: ...

A measure is a generator: what it has yielded stays, whatever happens to it later. It runs in the worker's process, with
nothing left over from another measure, and is expected to verify bytes after each kind of measurement.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .results import Figure

if TYPE_CHECKING:
    from .context import Context

__all__ = ["Measure", "Wrong", "all_measures", "measure", "missing"]

Body = Callable[["Context"], Iterator[Figure]]


class Wrong(AssertionError):
    """Bytes, counts or tokens were not what they must be: whatever was timed there means nothing."""


@dataclass(frozen=True)
class Measure:
    """full_s, quick_s, emulated_s: about how long it takes; quick_s None: no part of a quick run on a GPU. least_s: a full run
    makes do with that. call: the call of the suite that it is a part of ("measure" or "serve"), order: when in it."""

    name: str
    body: Body
    needs: tuple[str, ...]
    full_s: float
    quick_s: float | None
    emulated_s: float
    call: str
    order: int
    least_s: float | None = None

    @property
    def packages(self) -> tuple[str, ...]:
        """The Python packages that it needs, or uses where they are."""
        needed = ("torch" if need == "torch-cuda" else need for need in self.needs if need not in ("driver", "gpu"))
        return (*needed, *USES.get(self.name, ()))

    def seconds(self, *, quick: bool, emulated: bool) -> float:
        """How long it takes, about."""
        if emulated:
            return self.emulated_s
        return self.quick_s if quick and self.quick_s is not None else self.full_s

    def least(self, *, quick: bool, emulated: bool) -> float:
        """With less time it is left out."""
        takes = self.seconds(quick=quick, emulated=emulated)
        return takes if quick or emulated or self.least_s is None else min(takes, self.least_s)


_REGISTERED: dict[str, Measure] = {}

# The files of measures/ by the call that runs them, in its order: what everything else is judged by, and what convinces most,
# comes first, so that a run that is cut off has it.
ORDER = {
    "measure": (
        "driver_calls",
        "link",
        "link_load",
        "beside_kernels",
        "growth",
        "step_latency",
        "prefetch",
        "small_copies",
        "chunk_gaps",
        "block_copies",
        "overhead",
        "pool",
        "period",
        "zeroing",
        "graphs",
        "attention",
        "attention_layouts",
        "decode_step",
        "reload",
    ),
    # Whole engines, each for a minute or more. One model alone over PCIe comes last: there its layers do not stream.
    "serve": (
        "shared_serving",
        "cold_models",
        "continuous_batching",
        "offloading",
        "long_turns",
        "serving",
        # Small ones, for which the call above has no time: no default waits for them but these.
        "page_locking",
        "staged_copies",
        "waits",
        "page_creation",
        "graph_copies",
        "sharing_processes",
    ),
    # A real vLLM, where it is installed or was carried (bench/gpu/vllm).
    "vllm": ("vllm_burst", "vllm_sharing"),
}

# Packages that a measure uses if they are there, beside those that it needs.
USES = {
    "decode attention": ("flashinfer",),
    "decode attention by layout": ("flashinfer",),
}


def place(module: str) -> tuple[str, int]:
    """(the call, the place in it) of a file of measures/. Raises ValueError if ORDER does not name it."""
    for call, modules in ORDER.items():
        if module in modules:
            return call, modules.index(module)
    raise ValueError(f"measures/{module}.py is in no call: name it in ORDER")


def measure(
    name: str,
    *,
    needs: tuple[str, ...] = ("driver",),
    full_s: float,
    quick_s: float | None,
    emulated_s: float = 1.5,
    least_s: float | None = None,
) -> Callable[[Body], Body]:
    """Register the decorated generator. Several measures may share a file; the file's name decides the order."""

    def register(body: Body) -> Body:
        if name in _REGISTERED:
            raise ValueError(f"a measure {name!r} is there already")
        module = body.__module__.rpartition(".")[2]
        _REGISTERED[name] = Measure(name, body, needs, full_s, quick_s, emulated_s, *place(module), least_s)
        return body

    return register


def all_measures() -> list[Measure]:
    """Every measure, call by call, in the order of the run."""
    from . import measures

    for module in pkgutil.iter_modules(measures.__path__):
        importlib.import_module(f"{measures.__name__}.{module.name}")
    calls = list(ORDER)
    return sorted(_REGISTERED.values(), key=lambda each: (calls.index(each.call), each.order))


def missing(need: str, *, emulated: bool) -> str | None:
    """Why this machine does not have what a measure needs; None if it does.

    "driver": a CUDA driver, emulated or not (the suite does not begin without). "torch-cuda": torch on a real GPU. "gpu":
    a real GPU. Anything else is the name of a Python package.
    """
    if need == "driver":
        return None
    if need == "gpu":
        return "needs a GPU; this is the emulated driver" if emulated else None
    if need == "torch-cuda":
        if emulated:
            return "needs torch on a GPU; this is the emulated driver"
        if find_spec("torch") is None:
            return "torch is not installed"
        import torch

        return None if torch.cuda.is_available() else "torch finds no GPU (torch.cuda.is_available() is False)"
    return None if find_spec(need) is not None else f"{need} is not installed"
