"""The CUDA driver through ctypes, without this library: what its backend is compared with, and whose streams it is given.

Entry points come from cuGetProcAddress with the version whose signature is used here, so that the emulated driver answers
as a real one does.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Driver", "DriverFailure"]

_VERSIONS = {
    "cuInit": 2000,
    "cuDeviceGet": 2000,
    "cuDevicePrimaryCtxRetain": 7000,
    "cuDevicePrimaryCtxRelease": 11000,
    "cuCtxPushCurrent": 4000,
    "cuCtxPopCurrent": 4000,
    "cuMemGetInfo": 3020,
    "cuMemAddressReserve": 10020,
    "cuMemAddressFree": 10020,
    "cuMemCreate": 10020,
    "cuMemRelease": 10020,
    "cuMemMap": 10020,
    "cuMemUnmap": 10020,
    "cuMemSetAccess": 10020,
    "cuMemHostRegister": 6050,
    "cuMemHostUnregister": 4000,
    "cuStreamCreateWithPriority": 5050,
    "cuStreamDestroy": 4000,
    "cuStreamSynchronize": 2000,
    "cuStreamBeginCapture": 10010,
    "cuStreamEndCapture": 10000,
    "cuGraphDestroy": 10000,
    "cuLaunchHostFunc": 10000,
    "cuEventCreate": 2000,
    "cuEventDestroy": 4000,
    "cuEventRecord": 2000,
    "cuEventSynchronize": 2000,
}

_PINNED, _DEVICE, _READ_WRITE, _NON_BLOCKING, _THREAD_LOCAL = 1, 1, 3, 1, 1

_u64, _size = ctypes.c_ulonglong, ctypes.c_size_t


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _AccessDesc(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class DriverFailure(RuntimeError):
    """A driver call that failed, with its name and code."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} returned {code}")
        self.call, self.code = call, code


class Driver:
    """One device's primary context, current on the calling thread while the object is used as a context manager."""

    def __init__(self, library: str = "", device: int = 0) -> None:
        path = library or os.environ.get("REMAP_LIBCUDA") or "libcuda.so.1"
        self._library = ctypes.CDLL(path)
        self._calls: dict[str, Callable[..., int]] = {}
        self._call("cuInit", ctypes.c_uint(0))
        number = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
        self._device = number.value

    @contextmanager
    def held(self) -> Iterator[None]:
        """The primary context outlives whoever else lets go of it; it is made current on no thread.

        Without this the last user's leaving tears the context down, and the next one pays for another.
        """
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(self._device))
        try:
            yield
        finally:
            self._call("cuDevicePrimaryCtxRelease", ctypes.c_int(self._device))

    def __enter__(self) -> Driver:
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(self._device))
        self._call("cuCtxPushCurrent", context)
        return self

    def __exit__(self, *error: object) -> None:
        context = ctypes.c_void_p()
        self._call("cuCtxPopCurrent", ctypes.byref(context))
        self._call("cuDevicePrimaryCtxRelease", ctypes.c_int(self._device))

    # -- memory ----------------------------------------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device, as the driver counts them."""
        free, total = _size(), _size()
        self._call("cuMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def reserve(self, nbytes: int, alignment: int = 0) -> int:
        """Addresses without memory."""
        address = _u64()
        self._call("cuMemAddressReserve", ctypes.byref(address), _size(nbytes), _size(alignment), _u64(0), _u64(0))
        return address.value

    def free_addresses(self, address: int, nbytes: int) -> None:
        """The reverse of `reserve`."""
        self._call("cuMemAddressFree", _u64(address), _size(nbytes))

    def create(self, nbytes: int) -> int:
        """A handle of device memory."""
        prop = _AllocationProp(type=_PINNED, location=_Location(_DEVICE, self._device))
        handle = _u64()
        self._call("cuMemCreate", ctypes.byref(handle), _size(nbytes), ctypes.byref(prop), _u64(0))
        return handle.value

    def release(self, handle: int) -> None:
        """The reverse of `create`."""
        self._call("cuMemRelease", _u64(handle))

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Put the handle's memory behind the addresses; not accessible yet."""
        self._call("cuMemMap", _u64(address), _size(nbytes), _size(0), _u64(handle), _u64(0))

    def unmap(self, address: int, nbytes: int) -> None:
        """The reverse of `map`. Waits for nothing."""
        self._call("cuMemUnmap", _u64(address), _size(nbytes))

    def set_access(self, address: int, nbytes: int) -> None:
        """Readable and writable by the device."""
        access = _AccessDesc(_Location(_DEVICE, self._device), _READ_WRITE)
        self._call("cuMemSetAccess", _u64(address), _size(nbytes), ctypes.byref(access), _size(1))

    def register(self, address: int, nbytes: int, piece: int) -> None:
        """Page-lock host memory, so many bytes a call."""
        for at in range(0, nbytes, piece):
            size = min(piece, nbytes - at)
            self._call("cuMemHostRegister", ctypes.c_void_p(address + at), _size(size), ctypes.c_uint(0))

    def unregister(self, address: int, nbytes: int, piece: int) -> None:
        """The reverse of `register`."""
        for at in range(0, nbytes, piece):
            self._call("cuMemHostUnregister", ctypes.c_void_p(address + at))

    def violations(self) -> list[str]:
        """Rules of the driver API that the emulated driver has seen broken; a real driver does not tell."""
        if not hasattr(self._library, "remapEmulatedViolations"):
            return []
        self._library.remapEmulatedViolations.restype = ctypes.c_uint64
        self._library.remapEmulatedViolation.restype = ctypes.c_char_p
        number = self._library.remapEmulatedViolations()
        return [self._library.remapEmulatedViolation(_u64(index)).decode() for index in range(number)]

    # -- streams ---------------------------------------------------------------------------------------------------

    @contextmanager
    def stream(self, priority: int = 0) -> Iterator[int]:
        """A stream of the caller's own, as an engine without torch has one."""
        stream = ctypes.c_void_p()
        self._call(
            "cuStreamCreateWithPriority", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(priority)
        )
        assert stream.value is not None
        try:
            yield stream.value
        finally:
            self._call("cuStreamSynchronize", stream)
            self._call("cuStreamDestroy", stream)

    @contextmanager
    def event(self, flags: int) -> Iterator[int]:
        """An event with these flags of the driver's."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(flags))
        assert event.value is not None
        try:
            yield event.value
        finally:
            self._call("cuEventDestroy", event)

    def wait(self, event: int, stream: int) -> None:
        """Record the event on the stream, and wait for it as its flags say."""
        self._call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))
        self._call("cuEventSynchronize", ctypes.c_void_p(event))

    def synchronize(self, stream: int) -> None:
        """Wait for all of a stream's work."""
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def host_function(self, stream: int, function: object, data: object) -> None:
        """Call a function of C's when the stream gets there. Both have to live until then."""
        address = ctypes.cast(function, ctypes.c_void_p)
        self._call("cuLaunchHostFunc", ctypes.c_void_p(stream), address, ctypes.byref(data))

    def begin_capture(self, stream: int) -> None:
        """What is enqueued on the stream from now on is recorded, not run. Only this thread's calls can spoil it."""
        self._call("cuStreamBeginCapture", ctypes.c_void_p(stream), ctypes.c_int(_THREAD_LOCAL))

    def abandon_capture(self, stream: int) -> None:
        """End a capture, whatever became of it, and throw the graph away."""
        graph = ctypes.c_void_p()
        code = self._entry("cuStreamEndCapture")(ctypes.c_void_p(stream), ctypes.byref(graph))
        if code == 0 and graph.value:
            self._call("cuGraphDestroy", graph)

    def _call(self, name: str, *arguments: object) -> None:
        code = self._entry(name)(*arguments)
        if code != 0:
            raise DriverFailure(name, code)

    def _entry(self, name: str) -> Callable[..., int]:
        known = self._calls.get(name)
        if known is None:
            address, status = ctypes.c_void_p(), ctypes.c_int()
            code = self._library.cuGetProcAddress_v2(
                name.encode(), ctypes.byref(address), ctypes.c_int(_VERSIONS[name]), _u64(0), ctypes.byref(status)
            )
            if code != 0 or not address.value:
                raise DriverFailure(f"cuGetProcAddress({name})", code)
            known = self._calls[name] = ctypes.CFUNCTYPE(ctypes.c_int)(address.value)
        return known
