"""`native_stream`: every kind of stream object that callers have, and what is none."""

from __future__ import annotations

import pytest

from remap.errors import InvalidArgument
from remap.memory.native_stream import LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, native_stream

HANDLE = 0x55D0_1234_5678


class Protocol:
    """cuda.core, cuda.bindings 13, cupy."""

    def __init__(self, answer):
        self.answer = answer

    def __cuda_stream__(self):
        return self.answer


class EarlyProtocol:
    """The first drafts of the protocol made it a property."""

    __cuda_stream__ = (0, HANDLE)


class TorchStream:
    """torch.cuda.Stream, before it had the protocol."""

    def __init__(self, handle):
        self.cuda_stream = handle


class BothKinds(TorchStream):
    def __cuda_stream__(self):
        return (0, HANDLE)


class BindingsStream:
    """cuda.bindings.driver.CUstream, before it had the protocol."""

    def __init__(self, handle):
        self.handle = handle

    def __int__(self):
        return self.handle

    def getPtr(self):
        return 1


class Index:
    """An integer of another library (numpy)."""

    def __index__(self):
        return HANDLE


@pytest.mark.parametrize(
    "stream",
    [
        HANDLE,
        Index(),
        Protocol((0, HANDLE)),
        Protocol((0, Index())),
        EarlyProtocol(),
        TorchStream(HANDLE),
        BothKinds(7),
        BindingsStream(HANDLE),
    ],
    ids=lambda stream: type(stream).__name__,
)
def test_every_kind_gives_the_drivers_handle(stream):
    assert native_stream(stream) == HANDLE


@pytest.mark.parametrize("null", [0, Protocol((0, 0)), TorchStream(0), BindingsStream(0)])
def test_the_null_stream_is_the_legacy_default_stream(null):
    assert native_stream(null) == LEGACY_DEFAULT_STREAM == 1


@pytest.mark.parametrize("handle", [LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, (1 << 64) - 1])
def test_handles_at_the_edges(handle):
    assert native_stream(handle) == native_stream(Protocol((0, handle))) == handle


class Countable:
    """It has __int__, as many things have that are no streams."""

    def __int__(self):
        return HANDLE


@pytest.mark.parametrize(
    "stream",
    [
        None,
        True,
        1.0,
        "1",
        b"1",
        -1,
        1 << 64,
        object(),
        Countable(),
        Protocol(HANDLE),
        Protocol((0,)),
        Protocol((0, "1")),
        Protocol((0, -1)),
        TorchStream("1"),
        TorchStream(None),
    ],
)
def test_what_is_no_stream_is_refused_with_what_it_was(stream):
    with pytest.raises(InvalidArgument) as caught:
        native_stream(stream)
    assert caught.value.stream == repr(stream)
    assert "nothing changed" in str(caught.value)


def test_an_unknown_version_of_the_protocol_is_named():
    with pytest.raises(InvalidArgument) as caught:
        native_stream(Protocol((1, HANDLE)))
    assert caught.value.version == 1


def test_an_error_inside_the_protocol_is_the_callers_to_see():
    class Broken:
        def __cuda_stream__(self):
            raise RuntimeError("the stream was closed")

    with pytest.raises(RuntimeError, match="closed"):
        native_stream(Broken())
