"""Whoever reads a tenant's layers on a stream and counts the bytes that are not the master copy's: kernels, or copies."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np

import remap

from .context import Context
from .registry import missing
from .tenants import DeviceTenant
from .timing import Marks

__all__ = ["CopyReading", "KernelReading", "Reading", "reading"]


class Reading(Protocol):
    """kind: who reads, for the report. reads: how often a layer was read."""

    kind: str
    reads: int

    def read(self, layer: int) -> None:
        """Enqueue one reading of the layer."""

    def wrong(self) -> int:
        """Wait for all that was enqueued; the number of wrong words so far."""


class KernelReading:
    """Kernels of torch compare the layer, through its own address, with a copy elsewhere on the device.

    stream None: on the CPU, at once. That is how the tests run this class, for the emulated driver runs no kernels.
    """

    kind = "kernels"

    def __init__(self, raw: DeviceTenant, stream: int | None) -> None:
        import torch

        session = raw.session
        device = torch.device("cpu" if stream is None else "cuda")
        self._torch = torch
        self._stream: Any = None if stream is None else torch.cuda.ExternalStream(stream)
        whole = raw.layer_bytes // 8 * 8  # in words of 8 bytes
        self._wanted = [torch.from_numpy(each[:whole]).to(device).view(torch.int64) for each in raw.masters]
        self._seen = [
            session._memory(remap.advanced.layer_address(session, "raw", layer), whole).view(torch.int64)
            for layer in range(raw.layers)
        ]
        self._total = torch.zeros((), dtype=torch.int64, device=device)
        self.reads = 0
        if stream is not None:
            torch.cuda.current_stream().synchronize()

    def read(self, layer: int) -> None:
        with self._here():
            self._total.add_((self._seen[layer] != self._wanted[layer]).sum())
        self.reads += 1

    def wrong(self) -> int:
        if self._stream is not None:
            self._stream.synchronize()
        return int(self._total)

    def _here(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else self._torch.cuda.stream(self._stream)


class CopyReading:
    """Copies of the layer to the host, compared there: what reads where no kernel of ours can run."""

    kind = "copies"

    def __init__(self, raw: DeviceTenant, marks: Marks, stream: int, host: int, slots: int) -> None:
        """stream: the backend's number for it. host: page-locked, room for `slots` layers."""
        self._raw, self._marks, self._stream = raw, marks, stream
        self._addresses = [remap.advanced.layer_address(raw.session, "raw", layer) for layer in range(raw.layers)]
        self._host, self._slots = host, slots
        self._waiting: list[int] = []
        self._found = 0
        self.reads = 0

    def read(self, layer: int) -> None:
        if len(self._waiting) == self._slots:
            self.wrong()
        to = self._host + len(self._waiting) * self._raw.layer_bytes
        self._raw.backend.copy(self._stream, to, self._addresses[layer], self._raw.layer_bytes)
        self._waiting.append(layer)
        self.reads += 1

    def wrong(self) -> int:
        self._marks.wait(self._marks.mark(self._stream))
        self._marks.reset()
        nbytes = self._raw.layer_bytes
        for index, layer in enumerate(self._waiting):
            seen = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self._host + index * nbytes))
            self._found += int((seen != self._raw.masters[layer]).sum())
        self._waiting.clear()
        return self._found


@contextmanager
def reading(ctx: Context, raw: DeviceTenant, stream: int) -> Iterator[Reading]:
    """Kernels where torch has the GPU, copies elsewhere. stream: as the driver knows it. Nothing is in flight at the end."""
    if missing("torch-cuda", emulated=ctx.emulated) is None:
        kernels = KernelReading(raw, stream)
        try:
            yield kernels
        finally:
            ctx.driver.synchronize(stream)
        return
    slots = 2 * raw.layers
    marks = Marks(raw.backend)
    with ctx.buffers(host=slots * raw.layer_bytes) as (_, host):
        try:
            yield CopyReading(raw, marks, raw.backend.adopt_stream(stream), host, slots)
        finally:
            ctx.driver.synchronize(stream)
            for event in marks.events:
                raw.backend.destroy_event(event)
