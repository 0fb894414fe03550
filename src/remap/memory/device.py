# SPDX-License-Identifier: Apache-2.0
"""The device of a session: its name, its backend, tensors over its memory, and the stream that computations use there.

"cpu"               pages are host memory, computations are the calling thread's
"cuda", "cuda:N"    pages are device memory; "cuda" is "cuda:0"
cuda, emulated      pages of the emulated driver (tests): the processor reads and writes them, so tensors are CPU tensors
                    and computations are the calling thread's, unless a pass is given a stream
"sim:NAME"          a named machine in virtual time (include/remap/sim.h): pages are numbers, computations are what
                    `SimBackend.compute` enqueues, and a pass names the stream that it enqueues them on. Such memory has
                    no bytes, hence no tensors, unless the backend was made with `backed=True`
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remap import _core
from remap.config import invalid, is_count
from remap.errors import InvalidArgument
from remap.memory.machine_memory import require_memory
from remap.memory.native_stream import LEGACY_DEFAULT_STREAM
from remap.sizes import parse_size, shown

if TYPE_CHECKING:
    import torch

    from remap.policy.hardware import Machine

__all__ = [
    "COPY_CHUNK_BYTES",
    "Device",
    "DeviceName",
    "Platform",
    "budget_of",
    "default_mode",
    "default_name",
    "parse",
    "resolve",
    "simulated",
    "usual_chunk_bytes",
    "usual_page_bytes",
]

COPY_CHUNK_BYTES = 32 << 20
"""Beside layers of 256 MiB that stream, a copy of 64 KiB takes 92 ms (P99) on an H200; beside chunks of 32 MiB 1.1 ms, and layers
then arrive at 0.98 of the link's rate; beside chunks of 4 MiB 0.16 ms, and 0.86 (bench/gpu/measures/small_copies.py)."""
PAGES_OF_A_SESSION = 1024
SMALLEST_PAGE, LARGEST_PAGE = 2 << 20, 4 << 20
"""Of a session on a GPU that is not given `page_bytes`. With pages of 4 MiB 16 layers of 256 MiB come home at 0.97 of an H200's
link, with pages of 2 MiB at 0.54: its driver takes some 45 to 75 us to point a layer at a page, in which PCIe 5 brings 2.5 to 4
MiB (bench/gpu/measures/reload.py, n = 12 each). Larger ones were not tried and waste more, half a page a layer."""

_SHAREABLE = ("none", "posix_fd", "fabric")
_SIM = re.compile(r"sim:([A-Za-z0-9][A-Za-z0-9._+-]{0,63})")
_CUDA = re.compile(r"cuda(?::(0|[1-9]\d{0,3}))?")


@dataclass(frozen=True)
class Platform:
    """How a session's pages are made and its copies run, for experts and tests (`remap.advanced`).

    copy_chunk_bytes: layers are copied in chunks of this many bytes (or "32MiB"), and other copies may run between two
    chunks: else an engine's copies of its inputs wait for all layers that are on their way. 0: one copy per layer. None:
    on cuda COPY_CHUNK_BYTES, else 0.
    copy_threads: on the CPU, threads that share one copy.
    shareable ("none", "posix_fd" or "fabric") and gpu_direct_rdma: on cuda, the allowed uses of the pages outside of
    this process; they cannot be changed later.
    backend: a ready backend instead of the session's `device` (decorators, tests); of the other options only
    copy_chunk_bytes counts then.

    Raises InvalidArgument (field) for values out of range.
    """

    copy_chunk_bytes: int | str | None = None
    copy_threads: int = 1
    shareable: str = "none"
    gpu_direct_rdma: bool = False
    backend: _core.Backend | None = None

    def __post_init__(self) -> None:
        if self.copy_chunk_bytes is not None:
            object.__setattr__(self, "copy_chunk_bytes", parse_size(self.copy_chunk_bytes, "copy_chunk_bytes"))
        if not is_count(self.copy_threads, 1):  # the backend checks its own maximum
            raise invalid("copy_threads", self.copy_threads, "an int of at least 1")
        if self.shareable not in _SHAREABLE:
            raise invalid("shareable", self.shareable, f"one of {_SHAREABLE}")
        if not isinstance(self.gpu_direct_rdma, bool):
            raise invalid("gpu_direct_rdma", self.gpu_direct_rdma, "True or False")
        if not isinstance(self.backend, (_core.Backend, type(None))):
            raise invalid("backend", self.backend, "a backend of remap's, or None")


_USUAL = Platform()


@dataclass(frozen=True)
class DeviceName:
    """A parsed name. index: as the driver counts devices (CUDA_VISIBLE_DEVICES applies); 0 on the CPU. machine: of
    "sim"."""

    kind: str  # "cpu", "cuda" or "sim"
    index: int = 0
    machine: str = ""

    def __str__(self) -> str:
        if self.kind == "sim":
            return f"sim:{self.machine}"
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


def default_name() -> str:
    """REMAP_DEVICE, else "cpu"."""
    return os.environ.get("REMAP_DEVICE") or "cpu"


def usual_page_bytes(capacity: int, device: object, platform: Platform) -> int:
    """The page size of a session of `capacity` bytes that is given none. Raises InvalidArgument for a bad device name."""
    if platform.backend is not None:
        kind = Device(platform.backend).name.kind
    else:
        kind = parse(default_name() if device is None else device).kind
    page = SMALLEST_PAGE
    while kind == "cuda" and page < LARGEST_PAGE and 2 * page * PAGES_OF_A_SESSION <= capacity:
        page *= 2
    return page


def usual_chunk_bytes(device: Device, platform: Platform) -> int:
    """Bytes of a chunk, as `Platform` has it; 0: a layer is one copy."""
    if platform.copy_chunk_bytes is None:
        return COPY_CHUNK_BYTES if device.name.kind == "cuda" else 0
    return int(platform.copy_chunk_bytes)


def default_mode() -> str:
    """REMAP_MODE, else "aliased"."""
    return os.environ.get("REMAP_MODE") or "aliased"


def parse(device: object) -> DeviceName:
    """Raises InvalidArgument (field device) unless it is "cpu", "cuda", "cuda:N" or "sim:NAME" (of any machine)."""
    if device == "cpu":
        return DeviceName("cpu")
    simulated = _SIM.fullmatch(device) if isinstance(device, str) else None
    if simulated is not None:
        return DeviceName("sim", machine=simulated.group(1))
    found = _CUDA.fullmatch(device) if isinstance(device, str) else None
    if found is None:
        raise InvalidArgument(
            f"device must be 'cpu', 'cuda', 'cuda:N', 'unix:PATH' or 'sim:NAME', got {shown(device)}; nothing was created",
            device=device,
        )
    return DeviceName("cuda", int(found.group(1) or 0))


class Device:
    """A session's questions about its backend's device. `Session.device` shows `name`."""

    def __init__(self, backend: _core.Backend) -> None:
        kind = backend.device_kind if backend.device_kind in ("cuda", "sim") else "cpu"
        # The virtual clock behind the backend, or None: then time is real.
        self.simulator: _core.SimBackend | None = backend.simulator if kind == "sim" else None
        machine: str = "" if self.simulator is None else self.simulator.machine
        self.name = DeviceName(kind, backend.device_index if kind == "cuda" else 0, machine)
        self.cuda = kind == "cuda"
        self.host_addressable: bool = backend.host_addressable
        self.clock: Callable[[], float] = time.monotonic if self.simulator is None else self.simulator.read_clock

    @property
    def torch_device(self) -> str:
        """The torch device of tensors over the pages, an attached model's included."""
        return "cpu" if self.host_addressable or self.simulator is not None else str(self.name)

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        """A 1-D uint8 tensor over device memory, on `torch_device`; keeps `owner` alive.

        With `Arena.hold(address, nbytes)` as its owner it may outlive its region (detach, close): its addresses are
        then used for nothing else. From then on the processor reads zeros there, and a GPU's kernel that uses it fails.

        Raises InvalidArgument (field device) for simulated memory without bytes.
        """
        self.require_bytes()
        from torch.utils.dlpack import from_dlpack

        if self.host_addressable:
            return from_dlpack(_core.BytesView(address, nbytes, owner))
        return from_dlpack(_core.BytesView(address, nbytes, owner, self.name.kind, self.name.index))

    def require_bytes(self) -> None:
        """Raises InvalidArgument (field device) if pages are numbers only."""
        if self.simulator is not None and not self.host_addressable:
            raise InvalidArgument(
                f"simulated memory of {self.name} has no bytes, so there are no tensors over it; nothing changed; "
                "attach with attach_bytes, or give the session a backend made with backed=True",
                device=str(self.name),
            )

    @staticmethod
    def host_tensor(address: int, nbytes: int, owner: object) -> torch.Tensor:
        """A 1-D uint8 CPU tensor over host memory; keeps `owner` alive."""
        from torch.utils.dlpack import from_dlpack

        return from_dlpack(_core.BytesView(address, nbytes, owner))

    def default_stream(self) -> object:
        """The stream on which a pass computes if its caller names none; None if that is the calling thread.

        On a GPU that is torch's current stream. Without torch in the process only the driver's default stream is
        current, so this does not load torch. A simulated device has none: see `require_stream`.
        """
        if self.host_addressable or self.simulator is not None:
            return None
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return LEGACY_DEFAULT_STREAM
        return torch.cuda.current_stream(self.name.index)

    def require_stream(self) -> None:
        """For a pass that names no stream: raises InvalidArgument (field device) on a simulated device. There the
        calling thread cannot compute either: that would take real time, and all else takes virtual time."""
        if self.simulator is not None:
            raise InvalidArgument(
                f"a pass on {self.name} computes in virtual time, on a stream; no pass was begun; give "
                "forward(stream=) one that the session's backend has made (create_stream)",
                device=str(self.name),
            )

    def wait_for_torch(self) -> None:
        """Block until torch's current stream of a GPU has done its work: for set-up and tear-down only."""
        if self.torch_device != "cpu":
            import torch

            torch.cuda.current_stream(self.name.index).synchronize()


def host_room(budget: int = 0) -> tuple[int, str]:
    """Bytes of host memory that may be taken now, and what bounds them: `budget` ("host_budget") if it is not 0, else the
    environment's ("REMAP_HOST_BUDGET"), whatever is in use of them; else what the control group ("cgroup") and the machine
    ("machine") can spare."""
    room: tuple[int, str] = _core.host_room(budget)
    return room


def stage(backend: _core.Backend, address: int, nbytes: int) -> None:
    """Let copies read this ordinary memory of the caller's (`HostUse::staged`). Raises the backend's error."""
    backend.register_host(address, nbytes, _core.HostUse.staged)


def use_host(backend: _core.Backend, address: int, nbytes: int, *, staged: bool) -> None:
    """Let copies from this memory, which the backend has allocated or registered, be staged, or direct (`HostUse`). Raises the
    backend's error."""
    backend.use_host(address, nbytes, _core.HostUse.staged if staged else _core.HostUse.locked)


def machine_room() -> tuple[int, str]:
    """Bytes of ordinary host memory that may be taken now, whatever budget page-locked memory has, and what bounds them."""
    room: tuple[int, str] = _core.machine_room()
    return room


def resolve(
    device: object,
    capacity: int,
    page_bytes: int,
    platform: Platform = _USUAL,
    host_budget: int | str | None = None,
) -> tuple[_core.Backend, Device]:
    """(backend, device) of a session of `capacity` bytes; arguments as `Session` takes them. A ready backend is kept.

    On a simulated machine, `capacity` may be a part of its memory; OutOfMemory comes when pages are made beyond that.
    Raises InvalidArgument for a bad name, an unknown machine, another device than the ready backend's, or options that
    the device does not have; OutOfMemory on the CPU for more than the machine or its control group could ever hold;
    DriverError on cuda without a usable driver.
    """
    if platform.backend is None:
        name = parse(default_name() if device is None else device)
        backend = _make_backend(name, capacity, page_bytes, platform, host_budget)
        return backend, Device(backend)
    found = Device(platform.backend)
    if device is not None and parse(device) != found.name:
        raise InvalidArgument(
            f"device is {shown(device)}, the given backend's is {str(found.name)!r}; nothing was created; leave device out",
            device=device,
            backend=str(found.name),
        )
    return platform.backend, found


def budget_of(host_budget: int | str | None) -> int:
    """Bytes; 0 if none was given. Raises InvalidArgument for a size that is none."""
    budget = 0 if host_budget is None else parse_size(host_budget, "host_budget")
    if host_budget is not None and budget == 0:
        raise InvalidArgument(
            "host_budget must be more than 0 bytes; nothing was created; leave it out to use REMAP_HOST_BUDGET, or "
            "what the machine can spare",
            host_budget=host_budget,
        )
    return budget


def _make_backend(
    name: DeviceName, capacity: int, page_bytes: int, platform: Platform, host_budget: int | str | None
) -> _core.Backend:
    budget = budget_of(host_budget)
    if name.kind == "cuda":
        return _core.make_cuda_backend(
            device=name.index,
            shareable=getattr(_core.ShareableHandle, platform.shareable),
            gpu_direct_rdma=platform.gpu_direct_rdma,
            host_budget_bytes=budget,
        )
    for option, given in (
        ("shareable", platform.shareable != "none"),
        ("gpu_direct_rdma", platform.gpu_direct_rdma),
        ("host_budget", budget > 0),
    ):
        if given:
            raise InvalidArgument(
                f"{option} is for device 'cuda', this is {name}; nothing was created; leave it out", device=str(name)
            )
    if name.kind == "sim":
        from remap.policy.hardware import machine

        return simulated(machine(name.machine))
    require_memory(capacity)
    return _core.make_host_backend(capacity - capacity % page_bytes, page_bytes, platform.copy_threads)


def simulated(machine: Machine, *, contention: bool = True, backed: bool = False) -> _core.SimBackend:
    """A backend (`_core.SimBackend`) in virtual time with the memory, the link and the driver of `machine`. It uses
    real memory only if it is `backed`. contention: copies over the link slow the kernels that run beside them.
    """
    return _core.make_sim_backend(
        machine=machine.name,
        capacity_bytes=machine.hbm_bytes,
        hbm_bytes_per_s=machine.hbm_bytes_per_s,
        h2d_bytes_per_s=machine.h2d_bytes_per_s,
        d2h_bytes_per_s=machine.d2h_bytes_per_s,
        duplex=machine.duplex,
        copy_setup_s=machine.copy_setup_s,
        create_page_s=machine.create_page_s,
        map_s=machine.map_page_s,
        set_access_s=machine.set_access_s,
        unmap_s=machine.unmap_page_s,
        contention=contention,
        backed=backed,
    )
