# SPDX-License-Identifier: Apache-2.0
"""Pages that several processes share: a broker makes them, and its members map them. Of the host they are one file; of a device
each page has a descriptor, of which a member fetches some at a time. The broker itself maps none of them."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack, suppress
from typing import Protocol

from remap import _core
from remap.errors import InvalidArgument, InvalidState, OutOfMemory
from remap.memory.device import parse
from remap.memory.machine_memory import require_memory

__all__ = ["MOST_FILES", "DevicePages", "HostPages", "JoinedPages", "SharedPages", "make_pages"]

MOST_FILES = 250
"""Descriptors of a message: the kernel takes 253."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedPages(Protocol):
    """Those that a broker has made. device: "cpu" or "cuda:N", as this process counts them. uuid: of that device in any process;
    "" of the host. file: of all of them; None if each has its own."""

    @property
    def device(self) -> str: ...
    @property
    def uuid(self) -> str: ...
    @property
    def file(self) -> int | None: ...

    def export(self, first: int) -> list[int]:
        """Descriptors of the pages from `first` on, at most `MOST_FILES`, the caller's to close."""
        ...

    def close(self) -> None:
        """Let go of them. Members keep their pages."""
        ...


class HostPages:
    """A memfd of all pages, sealed against other sizes."""

    device, uuid = "cpu", ""

    def __init__(self, pages: int, page_bytes: int) -> None:
        grain = os.sysconf("SC_PAGESIZE")
        if page_bytes % grain:
            raise InvalidArgument(
                f"page_bytes must be a multiple of {grain}, got {page_bytes}; nothing was made", page_bytes=page_bytes
            )
        require_memory(pages * page_bytes)
        self.file: int | None = _make_file(pages * page_bytes)

    def export(self, first: int) -> list[int]:
        raise InvalidState("these pages are one file, which members have from the beginning")

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


class DevicePages:
    """Pages of a device, made at once. Each costs the driver a call of its own to export: a member that joins waits for all."""

    file: int | None = None

    def __init__(self, index: int, pages: int, page_bytes: int) -> None:
        made = _core.make_cuda_pages(page_bytes, pages, index)
        self.device, self.uuid = f"cuda:{index}", made.uuid
        self._pages: _core.CudaPages | None = made

    def export(self, first: int) -> list[int]:
        return _export(self._pages, first)

    def close(self) -> None:
        if self._pages is not None:
            self._pages.close()
            self._pages = None


def make_pages(device: str, pages: int, page_bytes: int) -> SharedPages:
    """Raises InvalidArgument for a size or a device that cannot be, OutOfMemory for more than there is, DriverError without a
    usable driver."""
    name = parse(device)
    if name.kind == "cpu":
        return HostPages(pages, page_bytes)
    if name.kind != "cuda":
        raise InvalidArgument(
            f"device must be 'cpu' or 'cuda:N' for pages that processes share, got {device!r}; nothing was made",
            device=device,
        )
    return DevicePages(name.index, pages, page_bytes)


def _export(pages: _core.CudaPages | None, first: int) -> list[int]:
    if pages is None or not 0 <= first < pages.count:
        raise InvalidState(f"there is no page {first} to fetch")
    with ExitStack() as undo:
        made = []
        for number in range(first, min(pages.count, first + MOST_FILES)):
            made.append(pages.export_page(number))
            undo.callback(os.close, made[-1])
        undo.pop_all()
    return made


class JoinedPages:
    """Those that a member has, or a broker that begins where another was: a file of all, or those of a device that it has
    imported so far. As `SharedPages`, once all are here; who has a file exports that."""

    def __init__(self) -> None:
        self._file = -1
        self._device: _core.CudaPages | None = None

    @property
    def empty(self) -> bool:
        return self._file < 0 and self._device is None

    @property
    def file(self) -> int | None:
        return None if self._file < 0 else self._file

    @property
    def device(self) -> str:
        return "cpu" if self._device is None else f"cuda:{self._device.device}"

    @property
    def uuid(self) -> str:
        return "" if self._device is None else self._device.uuid

    def export(self, first: int) -> list[int]:
        """Descriptors of the device's pages from `first` on, at most `MOST_FILES`, or of the file; the caller's to close. Raises
        InvalidState if there are none."""
        return (
            [os.dup(self._file)]
            if self._device is None and self._file >= 0 and not first
            else _export(self._device, first)
        )

    @property
    def count(self) -> int:
        """Pages of the device that are here."""
        return 0 if self._device is None else self._device.count

    def open_device(self, uuid: str, page_bytes: int) -> None:
        """The pages will be of this device. Raises InvalidState (fields uuid, devices) if this process does not see it,
        DriverError without a usable driver."""
        self._device = _core.make_cuda_pages(page_bytes, uuid=uuid)

    def require_file(self, nbytes: int) -> None:
        """Raises InvalidState unless the file is as a broker makes them, of so many bytes."""
        size, seals = os.fstat(self._file).st_size, 0
        with suppress(OSError):  # of no memfd
            seals = fcntl.fcntl(self._file, fcntl.F_GET_SEALS)
        if size != nbytes or seals & _SEALS != _SEALS:
            raise InvalidState(
                f"its pages are a file of {size} bytes with the seals {seals}, expected {nbytes} and {_SEALS}"
            )

    def take(self, file: int) -> None:
        """The file of all pages, or the next page's descriptor. It is this object's from now on."""
        if self._device is None:
            self._file = file
            return
        try:
            self._device.import_page(file)
        finally:
            os.close(file)

    def make_backend(self, pages: int, page_bytes: int, copy_threads: int, host_budget: int) -> _core.Backend:
        """Over all of them. host_budget: of a device, bytes of page-locked host memory at most; 0: as much as the machine can
        spare."""
        if self._device is None:
            return _core.make_host_backend(pages * page_bytes, page_bytes, copy_threads, file=self._file)
        device = self._device
        return _core.make_cuda_backend(device=device.device, pages=device, host_budget_bytes=host_budget)

    def close(self) -> None:
        """Let go of them. A backend over them goes on with those that it has."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._device is not None:
            self._device.close()
            self._device = None


def _make_file(nbytes: int) -> int:
    file = os.memfd_create("remap-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(file)
        raise OutOfMemory(
            f"a file of {nbytes} bytes cannot be made: {error}; nothing was made", requested=nbytes
        ) from error
    return file
