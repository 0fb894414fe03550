"""Fixtures of more than one file. The core is imported when one is used: the pure tests do without it."""

from __future__ import annotations

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
