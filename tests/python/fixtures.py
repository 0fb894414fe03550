"""Fixtures of the suites in tests/python and tests/lab."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

__all__ = ["emulated"]


@pytest.fixture
def emulated() -> Iterator[Any]:
    """The emulated driver with pages of 64 KiB. The test must break none of its rules and leave nothing in it."""
    from emulated import Emulated, find

    driver = Emulated(find())
    driver.configure(granularity=64 << 10, memory=1 << 30)
    yield driver
    driver.disarm()
    gc.collect()  # sessions that a failed call left in a cycle
    assert driver.violations() == []
    assert driver.live() == {}, "the test left something behind"
    driver.reset()
