"""`native_stream`: every kind of stream object that callers have, and what is none."""

from __future__ import annotations

import pytest

from remap.errors import InvalidArgument
from remap.memory.native_stream import LEGACY_DEFAULT_STREAM, native_stream

HANDLE = 0x55D0_1234_5678


def like(name, **members):
    """An object whose class has these members; a function of none is a method that gives its value."""
    return type(name, (), {key: (lambda self, v=v: v) if key.startswith("__") else v for key, v in members.items()})()


def protocol(answer):
    return like("cuda.core, cuda.bindings 13, cupy", __cuda_stream__=answer)


def torch_stream(handle):
    return like("torch.cuda.Stream before the protocol", cuda_stream=handle)


def bindings_stream(handle):
    return like("CUstream before the protocol", __int__=handle, getPtr=lambda self: 1)


INDEX = like("an integer of another library", __index__=HANDLE)
EARLY = type("the first drafts of the protocol made it a property", (), {"__cuda_stream__": (0, HANDLE)})()
BOTH = like("both kinds", cuda_stream=7, __cuda_stream__=(0, HANDLE))


@pytest.mark.parametrize(
    "stream",
    [HANDLE, INDEX, protocol((0, HANDLE)), protocol((0, INDEX)), EARLY, torch_stream(HANDLE), BOTH, bindings_stream(HANDLE)],
)  # fmt: skip
def test_every_kind_gives_the_drivers_handle(stream):
    assert native_stream(stream) == HANDLE


@pytest.mark.parametrize("null", [0, protocol((0, 0)), torch_stream(0), bindings_stream(0)])
def test_the_null_stream_is_the_legacy_default_stream(null):
    assert native_stream(null) == LEGACY_DEFAULT_STREAM == 1


@pytest.mark.parametrize("handle", [LEGACY_DEFAULT_STREAM, 2, (1 << 64) - 1])
def test_handles_at_the_edges(handle):
    assert native_stream(handle) == native_stream(protocol((0, handle))) == handle


COUNTABLE = like("what has __int__ and is no stream", __int__=HANDLE)
NONE = [None, True, 1.0, "1", b"1", -1, 1 << 64, object(), COUNTABLE, torch_stream("1"), torch_stream(None)]
NONE += map(protocol, [HANDLE, (0,), (0, "1"), (0, -1), (1, HANDLE)])


@pytest.mark.parametrize("stream", NONE)
def test_what_is_no_stream_is_refused_with_what_it_was(stream):
    with pytest.raises(InvalidArgument, match="nothing changed") as caught:
        native_stream(stream)
    assert caught.value.fields.get("version") == 1 or caught.value.stream == repr(stream)


def test_an_error_inside_the_protocol_is_the_callers_to_see():
    class Broken:
        def __cuda_stream__(self):
            raise RuntimeError("the stream was closed")

    with pytest.raises(RuntimeError, match="closed"):
        native_stream(Broken())
