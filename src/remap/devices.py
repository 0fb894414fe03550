"""The device of a session: its name, its backend, tensors over its memory, and the stream that computations use there.

"cpu"               pages are host memory, computations are the calling thread's
"cuda", "cuda:N"    pages are device memory; "cuda" is "cuda:0"
cuda, emulated      pages of the emulated driver (tests): the processor reads and writes them, so tensors are CPU tensors
                    and computations are the calling thread's, unless a pass is given a stream
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _core
from .errors import InvalidArgument
from .sizes import parse_size
from .streams import LEGACY_DEFAULT_STREAM

if TYPE_CHECKING:
    import torch

__all__ = ["SHAREABLE", "Device", "DeviceName", "default_name", "parse", "resolve"]

SHAREABLE = ("none", "posix_fd", "fabric")
_CUDA = re.compile(r"cuda(?::(0|[1-9]\d{0,3}))?")


@dataclass(frozen=True)
class DeviceName:
    """A parsed name. index: as the driver counts devices (CUDA_VISIBLE_DEVICES applies); 0 on the CPU."""

    kind: str  # "cpu" or "cuda"
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


def default_name() -> str:
    """REMAP_DEVICE, else "cpu"."""
    return os.environ.get("REMAP_DEVICE") or "cpu"


def parse(device: object) -> DeviceName:
    """Raises InvalidArgument (field device) unless it is "cpu", "cuda" or "cuda:N"."""
    if device == "cpu":
        return DeviceName("cpu")
    found = _CUDA.fullmatch(device) if isinstance(device, str) else None
    if found is None:
        raise InvalidArgument(
            f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}; nothing was created", device=device
        )
    return DeviceName("cuda", int(found.group(1) or 0))


class Device:
    """What a session asks about its backend's device. `name` is what `Session.device` shows."""

    def __init__(self, backend: Any) -> None:
        kind = "cuda" if backend.device_kind == "cuda" else "cpu"
        self.name = DeviceName(kind, backend.device_index if kind == "cuda" else 0)
        self.cuda = kind == "cuda"
        self.host_addressable: bool = backend.host_addressable

    @property
    def torch_device(self) -> str:
        """Where tensors over the pages are, and an attached model's tensors with them."""
        return "cpu" if self.host_addressable else str(self.name)

    def tensor(self, address: int, nbytes: int, owner: Any) -> torch.Tensor:
        """A 1-D uint8 tensor over device memory, on `torch_device`; keeps `owner` alive."""
        from torch.utils.dlpack import from_dlpack

        if self.host_addressable:
            return from_dlpack(_core.BytesView(address, nbytes, owner))
        return from_dlpack(_core.BytesView(address, nbytes, owner, self.name.kind, self.name.index))

    @staticmethod
    def host_tensor(address: int, nbytes: int, owner: Any) -> torch.Tensor:
        """A 1-D uint8 CPU tensor over host memory; keeps `owner` alive."""
        from torch.utils.dlpack import from_dlpack

        return from_dlpack(_core.BytesView(address, nbytes, owner))

    def default_stream(self) -> Any:
        """The stream on which a pass computes if its caller names none; None if that is the calling thread.

        On a GPU that is torch's current stream there. Without torch in the process nothing else than the driver's
        default stream is current, so torch need not be loaded for the answer.
        """
        if self.host_addressable:
            return None
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return LEGACY_DEFAULT_STREAM
        return torch.cuda.current_stream(self.name.index)

    def wait_for_torch(self) -> None:
        """Block until what torch enqueued on its current stream of a GPU is done: set-up and tear-down only."""
        if not self.host_addressable:
            import torch

            torch.cuda.current_stream(self.name.index).synchronize()


def resolve(
    device: object,
    backend: Any,
    capacity: int,
    page_bytes: int,
    *,
    copy_threads: int = 1,
    shareable: str = "none",
    gpu_direct_rdma: bool = False,
    host_budget: int | str | None = None,
) -> tuple[Any, Device]:
    """(backend, device) of a session of `capacity` bytes; arguments as `Session` takes them. A ready backend is kept.

    Raises InvalidArgument for a bad name, for another device than the ready backend's, and for options that the device
    does not have; DriverError on cuda without a usable driver.
    """
    if backend is None:
        name = parse(default_name() if device is None else device)
        backend = _make_backend(
            name,
            capacity,
            page_bytes,
            copy_threads=copy_threads,
            shareable=shareable,
            gpu_direct_rdma=gpu_direct_rdma,
            host_budget=host_budget,
        )
        return backend, Device(backend)
    found = Device(backend)
    if device is not None and parse(device) != found.name:
        raise InvalidArgument(
            f"device is {device!r}, the given backend's is {str(found.name)!r}; nothing was created; leave device out",
            device=device,
            backend=str(found.name),
        )
    return backend, found


def _make_backend(
    name: DeviceName,
    capacity: int,
    page_bytes: int,
    *,
    copy_threads: int,
    shareable: str,
    gpu_direct_rdma: bool,
    host_budget: int | str | None,
) -> Any:
    if shareable not in SHAREABLE:
        raise InvalidArgument(
            f"shareable must be one of {SHAREABLE}, got {shareable!r}; nothing was created", shareable=shareable
        )
    budget = 0 if host_budget is None else parse_size(host_budget, "host_budget")
    if host_budget is not None and budget == 0:
        raise InvalidArgument(
            "host_budget must be more than 0 bytes; nothing was created; leave it out for what the machine has to spare",
            host_budget=host_budget,
        )
    if name.kind == "cuda":
        return _core.make_cuda_backend(
            device=name.index,
            shareable=getattr(_core.ShareableHandle, shareable),
            gpu_direct_rdma=gpu_direct_rdma,
            host_budget_bytes=budget,
        )
    for option, given in (
        ("shareable", shareable != "none"),
        ("gpu_direct_rdma", gpu_direct_rdma),
        ("host_budget", budget > 0),
    ):
        if given:
            raise InvalidArgument(
                f"{option} is for device 'cuda', this is {name}; nothing was created; leave it out", device=str(name)
            )
    return _core.make_host_backend(capacity - capacity % page_bytes, page_bytes, copy_threads)
