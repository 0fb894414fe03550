# SPDX-License-Identifier: Apache-2.0
"""The driver's handle of a caller's stream, whatever library made it. Pure: knows no driver, loads no package."""

from __future__ import annotations

import operator
from typing import SupportsIndex, SupportsInt, cast

from remap.errors import InvalidArgument
from remap.sizes import shown

__all__ = ["LEGACY_DEFAULT_STREAM", "native_stream"]

LEGACY_DEFAULT_STREAM = 1  # CU_STREAM_LEGACY

_PROTOCOL_VERSION = 0
_HANDLE_BITS = 64


def native_stream(stream: object) -> int:
    """The driver's handle (a CUstream as a number) of `stream`; its null stream, 0, becomes LEGACY_DEFAULT_STREAM.

    stream: an object with `__cuda_stream__()` (cuda.core, cuda.bindings, recent torch, cupy), with an integer attribute
    `cuda_stream` (torch.cuda.Stream), a wrapper of the driver's type (`int(stream)`, older cuda.bindings), or the
    handle itself as an integer. The caller keeps the stream alive. Raises InvalidArgument (field stream) for anything
    else, and for an unknown version of the protocol (field version).
    """
    if stream is None or isinstance(stream, (bool, float, str, bytes)):
        raise _refuse(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # Some early implementations made it a property.
        answer = protocol() if callable(protocol) else protocol
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise _refuse(stream)
        version, handle = answer
        if version != _PROTOCOL_VERSION:
            raise InvalidArgument(
                f"{type(stream).__name__}.__cuda_stream__() speaks version {shown(version)} of the protocol, expected "
                f"{_PROTOCOL_VERSION}; nothing changed; pass the stream's handle as an integer",
                stream=shown(stream),
                version=version,
            )
    elif hasattr(stream, "cuda_stream"):
        handle = getattr(stream, "cuda_stream")  # noqa: B009  of an object that may be anything
    elif hasattr(stream, "__index__"):
        handle = stream
    elif hasattr(stream, "__int__") and hasattr(stream, "getPtr"):  # cuda.bindings' wrappers of driver types
        handle = int(cast(SupportsInt, stream))
    else:
        raise _refuse(stream)
    try:
        number = operator.index(cast(SupportsIndex, handle))
    except TypeError:
        raise _refuse(stream) from None
    if not 0 <= number < 1 << _HANDLE_BITS:
        raise _refuse(stream)
    return number or LEGACY_DEFAULT_STREAM


def _refuse(stream: object) -> InvalidArgument:
    return InvalidArgument(
        "stream must be a CUDA stream (an object with __cuda_stream__(), a torch.cuda.Stream, a cuda.bindings "
        f"CUstream, or a handle as an integer >= 0), got {shown(stream)}; nothing changed",
        stream=shown(stream),
    )
