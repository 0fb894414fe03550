# SPDX-License-Identifier: Apache-2.0
"""The link of a device, for `remap doctor`: measured by copies through the backend, judged by what its lanes carry."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from remap.errors import DriverError, Error, LimitExceeded, OutOfMemory
from remap.sizes import show_size

from .check import Check, read_text

__all__ = ["MeasuredLink", "check_link", "lane_rate", "measure_link", "read_slot"]

# One copy of the measurement: large against what starting a copy costs, small against any GPU. And for how long it may
# repeat.
LINK_BYTES = 32 << 20
LINK_SECONDS = 0.2
PATIENCE_S = 1.0
# If the rate is below this share of the rate of the slot's lanes, something slows the copies down.
LINK_SHARE = 0.6
SLOT_FILES = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")


@dataclass(frozen=True)
class MeasuredLink:
    """A page-locked copy there and back, the fastest of a few. Rates in bytes per second of the device's own clock."""

    bytes: int
    to_device: float
    to_host: float
    equal: bool  # the bytes came back as they were sent


def measure_link(backend: Any, nbytes: int = LINK_BYTES, seconds: float = LINK_SECONDS) -> MeasuredLink:
    """Copy `nbytes` (rounded up to the granularity) to one page of the backend and back, at least once, for about
    `seconds`.

    Gives everything back. Raises DriverError, OutOfMemory (device full, or no page-locked memory) and LimitExceeded.
    """
    from remap import _core

    with ExitStack() as undo:
        nbytes = -(-nbytes // backend.granularity) * backend.granularity
        page = backend.create_page(nbytes)
        undo.callback(backend.destroy_page, page)
        region = backend.reserve(nbytes, backend.granularity)
        undo.callback(backend.release, region, nbytes)
        backend.map(region, [page], nbytes)
        undo.callback(backend.unmap, region, nbytes)
        backend.set_access(region, nbytes, _core.Access.read_write)
        sent = backend.allocate_host(2 * nbytes)
        undo.callback(backend.free_host, sent, 2 * nbytes)
        returned = sent + nbytes
        pattern = os.urandom(nbytes)  # so that a copy which lands elsewhere is seen
        ctypes.memmove(sent, pattern, nbytes)
        ctypes.memset(returned, 0, nbytes)
        stream = backend.create_stream()
        undo.callback(backend.destroy_stream, stream)
        events = []
        for _ in range(3):
            events.append(backend.create_event())
            undo.callback(backend.destroy_event, events[-1])
        before, between, after = events

        to_device = to_host = float("inf")
        end = time.monotonic() + seconds
        while True:
            backend.record(before, stream)
            backend.copy(stream, region, sent, nbytes)
            backend.record(between, stream)
            backend.copy(stream, returned, region, nbytes)
            backend.record(after, stream)
            if not backend.synchronize(after, PATIENCE_S):
                raise DriverError(
                    f"{nbytes} bytes there and back took more than {PATIENCE_S:g} s; nothing was kept",
                    call="synchronize",
                )
            to_device = min(to_device, backend.elapsed(before, between))
            to_host = min(to_host, backend.elapsed(between, after))
            if time.monotonic() >= end:
                break
        equal = ctypes.string_at(returned, nbytes) == pattern
        return MeasuredLink(nbytes, nbytes / to_device, nbytes / to_host, equal)


def read_slot(domain: int, bus: int, device: int) -> dict[str, str]:
    """File name -> the kernel's text about the PCI device's link, without files that cannot be read."""
    folder = f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/"
    read = {name: read_text(folder + name) for name in SLOT_FILES}
    return {name: text for name, text in read.items() if text is not None}


def check_link(
    what: str, link: MeasuredLink | Error | None, slot: Mapping[str, str], emulated: bool, blocked: str
) -> Check:
    """The check of a measured link. A link slower than the card's, or rates far below those of its lanes, are notes.

    slot: the kernel's files about the PCI device, read just after the copies, because an idle card lowers its speed.
    """
    if link is None or isinstance(link, (OutOfMemory, LimitExceeded)):
        why = "" if link is None else f": {link}"
        return Check(
            "note", what, f"not measured{why}", "free some memory on the device and of the host, and ask again"
        )
    if isinstance(link, Error):
        return Check(
            blocked, what, f"not measured: {type(link).__name__}: {link}", "no session can be opened on it as it is"
        )
    if not link.equal:
        return Check(
            "bad",
            what,
            f"{show_size(link.bytes)} came back different from the bytes sent",
            "do not use this device: its memory, its link or its driver is at fault",
        )
    if emulated:
        return Check(
            "ok",
            what,
            f"{show_size(link.bytes)} there and back through the emulated driver, unchanged; no rate is shown",
        )
    rates = f"to the device {link.to_device / 1e9:.1f} GB/s, back {link.to_host / 1e9:.1f} GB/s"
    rates += f" ({show_size(link.bytes)}, page-locked)"
    now, most = _lanes(slot, "current"), _lanes(slot, "max")
    if now.rate < link.to_device:
        return Check("ok", what, rates)  # no files, or those of a virtual machine, which describe another link
    rates += f"; PCIe at {now.text} carries {now.rate / 1e9:.1f} GB/s"
    if now.rate < most.rate:
        fix = f"the card can use {most.text}: another slot, a cable or riser, or the slot's setting in the firmware"
        return Check("note", what, rates, fix)
    if link.to_device < LINK_SHARE * now.rate:
        fix = (
            "look for other traffic, a slower link upstream (`lspci -tv`), a far NUMA node (numactl), "
            "or a virtual machine's IOMMU"
        )
        return Check("note", what, rates, fix)
    return Check("ok", what, rates)


class _Lanes(NamedTuple):
    text: str  # "16.0 GT/s x16"
    rate: float  # bytes per second, 0.0 if unknown


def _lanes(slot: Mapping[str, str], state: str) -> _Lanes:
    speed, width = slot.get(f"{state}_link_speed", ""), slot.get(f"{state}_link_width", "")
    lanes = int(width) if width.isdigit() else 0
    return _Lanes(f"{speed.removesuffix(' PCIe')} x{lanes}", lane_rate(speed) * lanes)


def lane_rate(speed: str) -> float:
    """Bytes per second of one PCIe lane, from the kernel's words ("16.0 GT/s PCIe"): the encoding taken off, headers
    not. 0.0 for words that are not understood."""
    number = speed.partition(" ")[0]
    try:
        transfers = float(number)
    except ValueError:
        return 0.0
    if transfers <= 5:
        return transfers * 1e9 * 8 / 10 / 8
    if transfers <= 32:
        return transfers * 1e9 * 128 / 130 / 8
    return transfers * 1e9 * 242 / 256 / 8  # from 64 GT/s on, flits of 256 bytes of which 242 carry data and headers
