"""Fixtures of more than one file. The core is imported when one is used: the pure tests do without it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(params=["host", "trace", "limit", "fault", "stacked"])
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Every backend in turn; the test must leave nothing in it."""
    from contract import BACKENDS

    made = BACKENDS[request.param]()
    assert set(made.usage().values()) == {0}
    yield made
    assert set(made.usage().values()) == {0}, "the test left something behind"


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
