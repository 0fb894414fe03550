# SPDX-License-Identifier: Apache-2.0
"""The checks of CUDA: `look` asks the driver, and `checks` judges the answers. `checks` asks nothing itself, so
literals test it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from remap.errors import DriverError, Error, InvalidArgument
from remap.memory import device as devices
from remap.sizes import show_size

from .check import Check, read_text
from .doctor_link import MeasuredLink, check_link, measure_link, read_slot

__all__ = ["DriverAnswers", "checks", "device_bytes", "look"]


@dataclass(frozen=True)
class DriverAnswers:
    """The answers that `look` got.

    probe: `_core.probe_cuda()`; None if it raised `error`. The other mappings are by device index.
    """

    probe: Mapping[str, Any] | None = None
    error: DriverError | InvalidArgument | None = None
    links: Mapping[int, MeasuredLink | Error] = field(default_factory=dict)
    slots: Mapping[int, Mapping[str, str]] = field(default_factory=dict)  # doctor_link.read_slot
    environment: Mapping[str, str] = field(default_factory=dict)
    kernel_module: str = ""  # first line of /proc/driver/nvidia/version
    device_files: bool = False  # /dev/nvidiactl is there

    @property
    def devices(self) -> Sequence[Mapping[str, Any]]:
        return self.probe["devices"] if self.probe is not None else ()

    @property
    def has_gpu(self) -> bool:
        """Whether there is a device that is not emulated."""
        return self.probe is not None and bool(self.devices) and not self.probe["emulated"]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: numbers as the driver gave them, errors as text."""
        return {
            "probe": None if self.probe is None else dict(self.probe),
            "error": None if self.error is None else str(self.error),
            "links": {
                str(index): {"error": str(link)} if isinstance(link, Error) else asdict(link)
                for index, link in self.links.items()
            },
            "slots": {str(index): dict(slot) for index, slot in self.slots.items()},
            "environment": dict(self.environment),
            "kernel_module": self.kernel_module,
        }


SETTINGS = ("REMAP_DEVICE", "REMAP_MODE", "REMAP_LIBCUDA", "REMAP_HOST_BUDGET", "CUDA_VISIBLE_DEVICES")


def look() -> DriverAnswers:
    """Ask the driver, and copy a little on every device that can hold an arena.

    Raises nothing: errors are in the result.
    """
    from remap import _core

    common: dict[str, Any] = {
        "environment": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "kernel_module": (read_text("/proc/driver/nvidia/version") or "").partition("\n")[0],
        "device_files": Path("/dev/nvidiactl").exists(),
    }
    try:
        probe = _core.probe_cuda()
    except (DriverError, InvalidArgument) as error:
        return DriverAnswers(error=error, **common)
    links: dict[int, MeasuredLink | Error] = {}
    slots = {}
    for device in probe["devices"]:
        if device["vmm"]:
            try:
                links[device["index"]] = measure_link(_core.make_cuda_backend(device=device["index"]))
            except Error as error:
                links[device["index"]] = error
        slots[device["index"]] = read_slot(*device["pcie"])
    return DriverAnswers(probe=probe, links=links, slots=slots, **common)


def device_bytes(index: int) -> int:
    """All memory of this device. Raises InvalidArgument (field device) if there is none, and DriverError without a driver."""
    from remap import _core

    for one in _core.probe_cuda()["devices"]:
        if one["index"] == index:
            return int(one["total_bytes"])
    raise InvalidArgument(f"there is no device cuda:{index}; nothing was done; name one that there is", device=index)


def checks(seen: DriverAnswers) -> Iterator[Check]:
    """The checks of these answers.

    A missing driver or device is a note, unless REMAP_DEVICE asks for CUDA: then it is bad.
    """
    wanted = seen.environment.get("REMAP_DEVICE", "").startswith("cuda")
    blocked = "bad" if wanted else "note"
    if seen.probe is None:
        yield _no_driver(seen, blocked)
    else:
        yield _driver(seen, seen.probe)
        if not seen.devices:
            yield _no_device(seen, blocked)
        for device in seen.devices:
            yield from _device(seen, device, seen.probe["emulated"], blocked)
        if seen.devices:
            yield _budget(seen.probe)
    yield _choice(seen)


def _no_driver(seen: DriverAnswers, level: str) -> Check:
    if isinstance(seen.error, InvalidArgument):
        return Check("bad", "cuda settings", str(seen.error), "no session opens on device='cuda' with it")
    library = seen.environment.get("REMAP_LIBCUDA", "")
    fields = seen.error.fields if seen.error is not None else {}
    if library:
        fix = f"REMAP_LIBCUDA={library} names the library: unset it, or name a libcuda.so.1 that loads"
    elif "needed" in fields:
        fix = "update NVIDIA's driver"
    elif "code" in fields:
        fix = (
            "`nvidia-smi` says more; after an update of the driver, library and kernel module agree only after a reboot"
        )
    elif seen.device_files:
        fix = (
            "the kernel module is there, its library is not: in a container, give it the driver "
            "(docker run --gpus all, NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        )
    else:
        fix = "needed for device='cuda' only: install NVIDIA's driver, or start the container with its GPU"
    return Check(level, "cuda driver", str(seen.error), fix)


def _driver(seen: DriverAnswers, probe: Mapping[str, Any]) -> Check:
    version = "CUDA {}.{}".format(probe["driver_version"] // 1000, probe["driver_version"] % 1000 // 10)
    if probe["emulated"]:
        return Check(
            "note",
            "cuda driver",
            f"emulated ({probe['library']}, {version}): it proves order and bookkeeping, not speed, and not a real "
            "driver",
            "unset REMAP_LIBCUDA to use the machine's own",
        )
    return Check("ok", "cuda driver", ", ".join(filter(None, (probe["library"], version, seen.kernel_module))))


def _no_device(seen: DriverAnswers, level: str) -> Check:
    visible = seen.environment.get("CUDA_VISIBLE_DEVICES")
    found = "the driver counts no device"
    if visible is not None:
        return Check(level, "cuda devices", found, f"CUDA_VISIBLE_DEVICES={visible!r} hides devices: unset it")
    return Check(level, "cuda devices", found, "give the process a GPU (docker run --gpus all)")


def _device(seen: DriverAnswers, device: Mapping[str, Any], emulated: bool, blocked: str) -> Iterator[Check]:
    name = f"cuda:{device['index']}"
    major, minor = device["compute_capability"]
    free = device["free_bytes"]
    memory = f"{show_size(device['total_bytes'])}, {show_size(free)} free"
    fix = (
        ""
        if free
        else "nothing is free, or no context can be opened: `nvidia-smi` shows other processes and the compute mode"
    )
    yield Check("ok" if free else blocked, name, f"{device['name']}, compute capability {major}.{minor}, {memory}", fix)
    if not device["vmm"]:
        yield Check(
            blocked,
            f"{name} virtual memory",
            "the driver does not offer virtual memory management on this device: no arena can be opened on it",
            "take another device; not every virtual GPU offers it",
        )
        return
    least, best = device["granularity"], device["recommended_granularity"]
    pages = f"multiples of {show_size(least)}, {show_size(best)} recommended"
    fix = "" if best == least else f"Session(page_bytes='{show_size(best).replace(' ', '')}') if mapping is slow"
    yield Check("ok", f"{name} pages", pages, fix)
    if major == 7 and minor < 5:
        yield Check(
            "note",
            f"{name} re-pointing",
            "kvcached reports faults on Volta when mappings change beside running kernels (its issue 465)",
            "Session(mode='strict') (or REMAP_MODE=strict) waits for the tenant's stream before it changes a mapping",
        )
    kinds = [label for label in ("posix_fd", "fabric") if device[label]]
    rdma = "NICs may register pages (gpu_direct_rdma=True)" if device["gpu_direct_rdma"] else "no GPUDirect RDMA"
    yield Check("ok", f"{name} sharing", f"pages can be exported as {' or '.join(kinds) or 'nothing'}; {rdma}")
    if device["coherent"]:
        yield Check(
            "ok",
            f"{name} coherence",
            "the device reads ordinary host memory through the host's page tables, and its own memory is a NUMA node; "
            "master copies are registered all the same, in memory that a processor has touched first, so that it lies "
            "beside a processor; only such nodes count for the budget below",
        )
    if device["integrated"]:
        yield Check(
            "note",
            f"{name} memory",
            "integrated: host and device share one memory, so a layer that is streamed exists twice in it and frees "
            "nothing",
            "use remap here for tests only",
        )
    index = device["index"]
    # A coherent device's link is not the PCIe that its slot describes.
    slot = {} if device["coherent"] else seen.slots.get(index, {})
    yield check_link(f"{name} link", seen.links.get(index), slot, emulated, blocked)


def _budget(probe: Mapping[str, Any]) -> Check:
    """Every layer has a master copy in page-locked memory, so the budget bounds the weights that can be attached."""
    budget, largest = probe["host_budget_bytes"], max(device["total_bytes"] for device in probe["devices"])
    limited_by = probe["host_limited_by"]
    by_setting = limited_by == "REMAP_HOST_BUDGET"
    why = "as REMAP_HOST_BUDGET says" if by_setting else f"the free memory of the {limited_by}"
    found = f"{show_size(budget)} may be taken here now ({why})"
    if budget < largest:
        return Check(
            "note",
            "page-locked memory",
            f"{found}; the device holds {show_size(largest)}, and weights of more than the budget cannot be attached",
            "raise REMAP_HOST_BUDGET"
            if by_setting
            else "raise the container's memory limit, free host memory, or set host_budget= or REMAP_HOST_BUDGET",
        )
    return Check("ok", "page-locked memory", found)


def _choice(seen: DriverAnswers) -> Check:
    """The device of a session that names none."""
    what = "device of a session"
    chosen = seen.environment.get("REMAP_DEVICE") or "cpu"
    source = "REMAP_DEVICE" if seen.environment.get("REMAP_DEVICE") else "REMAP_DEVICE is not set"
    try:
        name = devices.parse(chosen)
    except InvalidArgument:
        return Check("bad", what, f"REMAP_DEVICE={chosen!r} names no device", "set it to cpu, cuda, or cuda:N")
    usable = [f"cuda:{device['index']}" for device in seen.devices if device["vmm"]]
    if name.kind == "sim":
        return Check(
            "note",
            what,
            f"{name} ({source}): in virtual time, nothing is computed",
            "to serve, set it to cpu or cuda:N",
        )
    if name.kind == "cpu":
        fix = f"for the GPU: Session(device='{usable[0]}'), or REMAP_DEVICE={usable[0]}" if usable else ""
        return Check("ok", what, f"cpu ({source})", fix)
    if str(name) not in usable:
        found = f"REMAP_DEVICE={chosen}, but usable devices are: {', '.join(usable) or 'none'}"
        return Check("bad", what, found, "set it to one of them, or to cpu")
    return Check("ok", what, f"{name} ({source})")
