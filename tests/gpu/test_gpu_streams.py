"""Whose stream it is does not matter: torch's, cuda.core's, a raw handle; and passes may change streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import needs
from rig import Reader, one_pass

import remap

CHANGES = ((0, 1), (3, 1), (6, 2), (2, 2), (0, 1))


class Protocol:
    """What an object of another library shows of its stream."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@contextmanager
def _torch_stream() -> Iterator[tuple[Any, int]]:
    import torch

    stream = torch.cuda.Stream()
    yield stream, stream.cuda_stream
    stream.synchronize()


@contextmanager
def _cuda_core_stream() -> Iterator[tuple[Any, int]]:
    needs("cuda")
    device = pytest.importorskip("cuda.core").Device(0)
    device.set_current()
    stream = device.create_stream()
    yield stream, int(stream.handle)
    stream.sync()
    stream.close()


@contextmanager
def _bindings_stream() -> Iterator[tuple[Any, int]]:
    needs("cuda")
    driver = pytest.importorskip("cuda.bindings.driver")
    error, stream = driver.cuStreamCreate(1)
    assert int(error) == 0
    yield stream, int(stream)
    for call in (driver.cuStreamSynchronize, driver.cuStreamDestroy):
        assert int(call(stream)[0]) == 0


OTHERS = {"torch": _torch_stream, "cuda.core": _cuda_core_stream, "cuda.bindings": _bindings_stream}


def _passes(tenant: Any, marks: Any, stream: Any, handle: int) -> None:
    assert tenant.backend.adopt_stream(handle) == handle
    with Reader(tenant, len(CHANGES) * tenant.layers) as reader:
        for alpha, buffers in CHANGES:
            remap.advanced.remap(tenant.session, "raw", alpha, buffers)
            one_pass(tenant, reader, stream, handle)
        reader.end(marks, handle)


def _come_home(tenant: Any, marks: Any) -> None:
    """A pass on the tenant's own stream: the next one waits for its last stream, which has to live until then."""
    with Reader(tenant, tenant.layers) as reader:
        one_pass(tenant, reader, tenant.stream, tenant.handle)
        reader.end(marks, tenant.handle)


@pytest.mark.parametrize("given", ["handle", "protocol", "legacy default"])
def test_streams_in_any_form(raw: Any, given: str) -> None:
    """0 means the legacy default stream, as everywhere in CUDA; its handle is 1."""
    tenant, marks = raw
    own = tenant.stream
    stream, handle = {"handle": (own, own), "protocol": (Protocol(own), own), "legacy default": (Protocol(0), 1)}[given]
    _passes(tenant, marks, stream, handle)


@pytest.mark.parametrize("library", OTHERS)
def test_streams_of_other_libraries(real_gpu: Any, raw: Any, library: str) -> None:
    with OTHERS[library]() as (stream, handle):
        _passes(*raw, stream, handle)
        _come_home(*raw)


def test_a_stream_may_die_once_the_tenant_has_left_it(context: Any, raw: Any) -> None:
    with context.stream() as stream:
        _passes(*raw, stream, stream)
        _come_home(*raw)
    _passes(*raw, raw[0].stream, raw[0].stream)


def test_passes_on_changing_streams_are_ordered(context: Any, raw: Any) -> None:
    """Each pass overwrites what the one before reads on another stream: they must not overlap. The last one is on the first
    stream again: a tenant's last stream has to live on."""
    tenant, marks = raw
    remap.advanced.remap(tenant.session, "raw", 6, 2)
    with context.stream() as other, Reader(tenant, 13 * tenant.layers) as reader:
        assert tenant.backend.adopt_stream(other) == other
        for turn in range(13):
            handle = other if turn % 2 else tenant.stream
            one_pass(tenant, reader, handle, handle)
        reader.end(marks, handle)


def test_torchs_current_stream_is_the_default(real_gpu: Any, models: Any) -> None:
    import torch
    from rig import Rig

    with Rig(real_gpu, models) as rig:
        remap.advanced.remap(rig.session, "m", 4, 2)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(4):
                rig.check()
        torch.cuda.current_stream().wait_stream(stream)
        rig.check()


def test_waiting_on_a_stream_that_is_being_captured_is_refused(context: Any, raw: Any) -> None:
    """A copy cannot be part of a graph that outlives the change; the pass says so and can be run again."""
    tenant, marks = raw
    remap.advanced.remap(tenant.session, "raw", 4, 2)
    with context.driver as driver:
        # The bracket itself may refuse, or the first wait: either way nothing is left behind.
        driver.begin_capture(tenant.stream)
        try:
            with pytest.raises(remap.Error) as caught:
                tenant.run()
        finally:
            driver.abandon_capture(tenant.stream)
    assert "captur" in str(caught.value)
    _come_home(tenant, marks)
