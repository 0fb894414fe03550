"""The emulated driver as Python tests use it: settings from the environment, and that a broken rule is seen.

Its rules are tested in C++ (tests/cpp/emulated_driver*_test.cpp).
"""

from __future__ import annotations

from typing import Any

import emulated as control
import pytest
from cuda_streams import Driver
from subprocesses import expect_ok

from remap import _core
from remap.errors import DriverError, InvalidArgument


def test_the_environment_says_what_the_machine_is_like_and_what_calls_cost(emulated: Any) -> None:
    """At least that much, and the lock under which mapping calls exclude enqueueing is a switch beside it."""
    program = f"""
import os, time
os.environ.update(
    REMAP_EMULATED_MEMORY="1048576",
    REMAP_EMULATED_GRANULARITY="131072",
    REMAP_EMULATED_DEVICES="3",
    REMAP_EMULATED_DRIVER_VERSION="12040",
    REMAP_EMULATED_MAP_US="1500.5",
    REMAP_EMULATED_UNMAP_US="2000",
    REMAP_EMULATED_SET_ACCESS_US="1000",
    REMAP_EMULATED_DRIVER_LOCK="1",
    REMAP_EMULATED_PIN_S_PER_GIB="10",
    REMAP_EMULATED_COPY_GBPS="0.1",
    REMAP_EMULATED_CHANNEL_OPS="2",
)
from remap import _core

found = _core.probe_cuda(library={emulated.path!r})
assert found["driver_version"] == 12040 and found["emulated"], found
assert [device["index"] for device in found["devices"]] == [0, 1, 2], found
assert {{(device["total_bytes"], device["granularity"]) for device in found["devices"]}} == {{(1 << 20, 128 << 10)}}, found

def seconds(call, *arguments):
    begun = time.monotonic()
    call(*arguments)
    return time.monotonic() - begun

backend = _core.make_cuda_backend(library={emulated.path!r})
page = backend.granularity
at = backend.reserve(4 * page, page)
handles = [backend.create_page(page) for _ in range(4)]
assert seconds(backend.map, at, handles, page) >= 4 * 1.5e-3
assert seconds(backend.set_access, at, 4 * page, _core.Access.read_write) >= 4 * 1e-3
stream = backend.create_stream()
host = []
assert seconds(lambda: host.append(backend.allocate_host(page))) >= 10 * page / 2**30
# The fourth is enqueued when two are left to do: the first and the second are over then.
begun = time.monotonic()
for _ in range(4):
    backend.copy(stream, at, host[0], page)
assert time.monotonic() - begun >= 2 * page / 1e8
backend.destroy_stream(stream)
assert time.monotonic() - begun >= 4 * page / 1e8
backend.free_host(host[0], page)
assert seconds(backend.unmap, at, 4 * page) >= 4 * 2e-3
"""
    expect_ok(program)


def test_a_handle_that_was_destroyed_ends_the_run(emulated: Any) -> None:
    """A driver's behaviour is undefined; here nobody gets an error to live with, but a context that is lost."""
    backend = _core.make_cuda_backend(library=emulated.path)
    event = backend.create_event()
    backend.destroy_event(event)
    with pytest.raises(InvalidArgument):  # the library knows its own, and does not ask the driver
        backend.query(event)
    assert emulated.violations() == []
    engine = Driver(emulated.path)
    with engine.stream() as gone:
        pass
    with pytest.raises(RuntimeError, match="700"):
        engine.synchronize(gone)
    (text,) = emulated.violations()
    assert text.startswith("cuStreamSynchronize: unknown or destroyed stream")
    with pytest.raises(DriverError) as caught:
        backend.create_event()
    assert caught.value.code == 700
    emulated.reset()
    backend.destroy_event(backend.create_event())
    engine.close()
    with pytest.raises(AssertionError):
        emulated.configure(no_such_setting=1)


def test_a_missing_library_is_named_with_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAP_EMULATED_DRIVER", "/no/such/library.so")
    with pytest.raises(FileNotFoundError) as caught:
        control.find()
    assert "/no/such/library.so" in str(caught.value) and "make cpp-tests" in str(caught.value)
