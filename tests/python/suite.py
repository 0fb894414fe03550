"""Fixtures of more than one file, of this folder and of tests/serve (conftest.py of both). The core is imported when one is
used: the pure tests do without it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from effort import LONG, examples
from fixtures import emulated
from hypothesis import settings

__all__ = [
    "backend",
    "backend_name",
    "emulated",
    "on_the_device_under_test",
    "pytest_collection_modifyitems",
    "young_heap",
]

# No test depends on how long something takes: an example may be slow on a busy machine.
settings.register_profile("remap", deadline=None, max_examples=examples(100), derandomize=not LONG)
settings.load_profile("remap")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first: with one of them last, the other workers would wait for it."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="module", autouse=True)
def young_heap() -> None:
    """What modules have imported and left is not looked through in each of the tests' hundreds of collections, in 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["host", "trace", "limit", "fault", "stacked", "cuda", "cuda-stacked", "sim", "sim-stacked"])
def backend_name(request: pytest.FixtureRequest) -> str:
    """The backend that `backend` is."""
    name: str = request.param
    return name


@pytest.fixture
def backend(backend_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Every backend in turn; the test must leave nothing in it. On the emulated driver, it breaks no rule of the driver."""
    import contract

    if backend_name == "cuda-stacked":
        monkeypatch.setattr(contract, "through_copies", True)
    made = contract.BACKENDS[backend_name]()
    assert set(made.usage().values()) == {0}
    yield made
    assert set(made.usage().values()) == {0}, "the test left something behind"
    if backend_name.startswith("cuda") and not contract.ON_GPU:
        driver = contract.driver()
        assert driver.violations() == []
        assert set(driver.live()) == {"contexts"}  # the backend's own
        driver.reset()


@pytest.fixture(autouse=True)
def on_the_device_under_test() -> Iterator[None]:
    """With every session on the emulated device (device_suites.txt): no test may break a rule of the driver."""
    library = os.environ.get("REMAP_LIBCUDA", "")
    if "emulated" not in library or os.environ.get("REMAP_DEVICE", "cpu") == "cpu":
        yield
        return
    from emulated import Emulated

    driver = Emulated(Path(library))
    before = len(driver.violations())
    yield
    assert driver.violations()[before:] == []
