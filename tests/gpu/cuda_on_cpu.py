"""A test double for torch.cuda: code that computes with torch on a GPU runs on CPU tensors, over the emulated driver's memory.

    with cuda_on_cpu():  # on the thread that computes
        figures = list(measure(context))

What is asked for on "cuda" is made on the CPU. Every operation waits for the current stream before it runs and is over when it
returns, so it comes behind everything that was enqueued on that stream, as a kernel would, and before what is enqueued later.
Graphs run their pieces again. Nothing is measured: events hold the host's clock.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from bench.gpu.driver import Driver
from torch.overrides import TorchFunctionMode

__all__ = ["cuda_on_cpu"]


class Stream:
    """A stream of the driver's, by handle, or one on which nothing is ever enqueued."""

    def __init__(self, handle: int = 0, **more: Any) -> None:
        self.cuda_stream = handle

    def synchronize(self) -> None:
        if self.cuda_stream:
            Driver().synchronize(self.cuda_stream)

    def wait_stream(self, other: Stream) -> None:
        other.synchronize()

    def wait_event(self, event: Event) -> None:
        """It is over."""

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A moment of the host's clock."""

    def __init__(self, enable_timing: bool = False, external: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        (stream or _current()).synchronize()
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """It is over."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return max(1e-6, (other.at - self.at) * 1e3)


class EagerGraphs:
    """`remap_serve.engine.graphs.TorchCudaGraphs`, of which nothing can be recorded here."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def capture(self, piece: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            with _on(self.stream):
                piece()

        replay()
        return replay


_DEFAULT = Stream()
_here = threading.local()


def _current(device: Any = None) -> Stream:
    stack = getattr(_here, "streams", None)
    return stack[-1] if stack else _DEFAULT


@contextmanager
def _on(stream: Stream) -> Iterator[None]:
    stack = _here.__dict__.setdefault("streams", [])
    stack.append(stream)
    try:
        yield
    finally:
        stack.pop()


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


class _OnCpu(TorchFunctionMode):
    """Operations come behind the current stream; "cuda" means the CPU, and page-locked memory is memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: torch.device("cpu") if _is_cuda(value) else value for name, value in (kwargs or {}).items()}
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.copy_:
            kwargs.pop("non_blocking", None)
        _current().synchronize()
        return func(*(torch.device("cpu") if _is_cuda(value) else value for value in args), **kwargs)


def _everywhere(name: str, value: Any) -> list[Any]:
    """Patches of a name in all modules of the suite that have imported it."""
    modules = [each for key, each in sys.modules.items() if key.startswith("bench.gpu") and hasattr(each, name)]
    return [mock.patch.object(each, name, value) for each in modules]


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """On this thread; threads that compute begin their own."""
    fake = {
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "stream": _on,
        "current_stream": _current,
        "synchronize": lambda device=None: _current().synchronize(),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: 0,
    }
    patches = [mock.patch.object(torch.cuda, name, value) for name, value in fake.items()]
    patches.append(mock.patch("remap_serve.engine.graphs.TorchCudaGraphs", EagerGraphs))
    from bench.gpu import registry

    real = registry.missing

    def missing(need: str, *, emulated: bool) -> str | None:
        return None if need == "torch-cuda" else real(need, emulated=emulated)

    patches += _everywhere("missing", missing)
    with _OnCpu():
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in reversed(patches):
                patch.stop()
