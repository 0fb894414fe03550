"""The emulated driver as Python tests use it: settings from the environment, and that a broken rule is seen.

Its rules are tested in C++ (tests/cpp/emulated_driver*_test.cpp).
"""

from __future__ import annotations

import ctypes
from typing import Any

import emulated as control
import pytest
from subprocesses import expect_ok

from remap import _core
from remap.errors import DriverError


def test_the_environment_says_what_the_machine_is_like(emulated: Any) -> None:
    program = f"""
import os
os.environ.update(
    REMAP_EMULATED_MEMORY="1048576",
    REMAP_EMULATED_GRANULARITY="131072",
    REMAP_EMULATED_DEVICES="3",
    REMAP_EMULATED_DRIVER_VERSION="12040",
)
from remap import _core
found = _core.probe_cuda(library={emulated.path!r})
assert found["driver_version"] == 12040 and found["emulated"], found
assert [device["index"] for device in found["devices"]] == [0, 1, 2], found
assert {{(device["total_bytes"], device["granularity"]) for device in found["devices"]}} == {{(1 << 20, 128 << 10)}}, found
"""
    expect_ok(program)


def test_a_missing_library_is_named_with_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAP_EMULATED_DRIVER", "/no/such/library.so")
    with pytest.raises(FileNotFoundError) as caught:
        control.find()
    assert "/no/such/library.so" in str(caught.value) and "make cpp-tests" in str(caught.value)


def test_a_broken_rule_is_seen_and_forgotten_by_a_reset(emulated: Any) -> None:
    driver = ctypes.CDLL(emulated.path)
    assert driver.cuInit(1) == 1  # no flag is known
    (text,) = emulated.violations()
    assert text.startswith("cuInit")
    emulated.reset()
    assert emulated.violations() == []


def test_injected_errors_counts_and_live_things(emulated: Any) -> None:
    backend = _core.make_cuda_backend(library=emulated.path)
    page = emulated.calls("cuMemCreate"), backend.create_page(64 << 10)
    assert emulated.calls("cuMemCreate") == page[0] + 1
    assert emulated.live() == {"pages": 1, "contexts": 1}
    emulated.arm("cuMemRelease", 1, control.NOT_PERMITTED)
    with pytest.raises(DriverError) as caught:
        backend.destroy_page(page[1])
    assert (caught.value.call, caught.value.code) == ("cuMemRelease", control.NOT_PERMITTED)
    backend.destroy_page(page[1])
    assert emulated.live() == {"contexts": 1}
    names = emulated.entry_points()
    assert len(names) == len(set(names)) and {"cuMemCreate", "cuEventElapsedTime", "cuMemcpyHtoDAsync"} <= set(names)
    with pytest.raises(AssertionError):
        emulated.configure(no_such_setting=1)
