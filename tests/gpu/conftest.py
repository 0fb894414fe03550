"""The device of these tests: a real GPU if there is one, else the emulated driver; without either they are skipped, by name.

    pytest tests/gpu                        a GPU, else build/cpp/libremap_emulated_cuda.so or REMAP_EMULATED_DRIVER
    REMAP_TEST_CUDA=1 pytest tests/gpu      a GPU, or the tests fail

On the emulated driver tensors are CPU tensors over the same pages, and a test computes on its own thread where a GPU would
compute on a stream; copies run on streams on both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The tiny models of the Python suite, and the benchmarks' tenant without a model (bench/gpu/tenants.py).
sys.path[:0] = [str(ROOT / "tests" / "python"), str(ROOT)]


@dataclass(frozen=True)
class Gpu:
    """The device under test. torch: the device that torch calls it, where tensors over its pages are."""

    emulated: bool
    name: str
    torch: str


def _find() -> Gpu | str:
    """The device, or why there is none."""
    from remap import _core
    from remap.errors import Error

    try:
        probe = _core.probe_cuda()
    except Error as error:
        if os.environ.get("REMAP_TEST_CUDA") == "1":
            raise
        library = os.environ.get("REMAP_EMULATED_DRIVER") or str(ROOT / "build/cpp/libremap_emulated_cuda.so")
        if not Path(library).exists():
            return f"no CUDA driver ({error}), and no emulated one at {library}"
        os.environ["REMAP_LIBCUDA"] = library
        probe = _core.probe_cuda()
    if not probe["devices"]:
        return "the CUDA driver shows no device"
    if probe["emulated"] and os.environ.get("REMAP_TEST_CUDA") == "1":
        raise RuntimeError("REMAP_TEST_CUDA=1 asks for a GPU, and the driver that was found is the emulated one")
    return Gpu(probe["emulated"], probe["devices"][0]["name"], "cpu" if probe["emulated"] else "cuda:0")


@pytest.fixture(scope="session")
def gpu() -> Iterator[Gpu]:
    """A real GPU or the emulated driver. Its primary context lasts for the whole run: no test tears it down for the next."""
    found = _find()
    if isinstance(found, str):
        pytest.skip(found)
    from bench.gpu.driver import Driver

    with Driver().held():
        yield found


@pytest.fixture(autouse=True)
def _no_rule_broken(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the emulated driver calls a violation (a use after unmap, a wrong order, ...) fails the test it happens in."""
    if "gpu" not in request.fixturenames or not request.getfixturevalue("gpu").emulated:
        yield
        return
    from bench.gpu.driver import Driver

    driver = Driver()
    before = len(driver.violations())
    yield
    assert driver.violations()[before:] == []


@pytest.fixture
def emulated_gpu(gpu: Gpu) -> Gpu:
    """The emulated driver, also where there is a GPU to be had: what bench/gpu/run.sh shows there, or what only counts."""
    if not gpu.emulated:
        pytest.skip("shown on the emulated driver; bench/gpu/run.sh measures a GPU")
    return gpu


@pytest.fixture
def real_gpu(gpu: Gpu) -> Gpu:
    """A real GPU that torch sees."""
    if gpu.emulated:
        pytest.skip("needs a GPU: this is the emulated driver, which runs no device code")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU (torch.cuda.is_available() is False)")
    return gpu


@pytest.fixture
def models(gpu: Gpu) -> Any:
    """tests/python/models.py: tiny models with fixed seeds."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import models

    return models


@pytest.fixture
def context(gpu: Gpu) -> Any:
    """Sizes, streams and buffers as the benchmarks use them, at the emulated driver's size: tests are not about speed."""
    from bench.gpu.context import Context

    return Context(quick=True, emulated=gpu.emulated)


@pytest.fixture
def raw(context: Any) -> Iterator[Any]:
    """Eight layers of random bytes on a stream of the caller's: (tenant, marks); every byte is verified at the end."""
    from bench.gpu.tenants import device_tenant

    with device_tenant(context, 8, 4 << 20) as (tenant, marks):
        yield tenant, marks
        tenant.verify(marks)


@pytest.fixture
def small(emulated_gpu: Gpu, context: Any) -> Any:
    """A context of tiny sizes that ends a measure's loops soon."""
    context.until = time.monotonic() + 3
    return context


def needs(*packages: str) -> None:
    """Skip, by name, where a package is missing."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def emulated_environment(**more: str) -> dict[str, str]:
    """Of a process of the suite that is to find the driver under test."""
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if "REMAP_LIBCUDA" in os.environ:
        found["REMAP_EMULATED_DRIVER"] = os.environ["REMAP_LIBCUDA"]
    return {**found, **more}


def bench_command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "bench.gpu", *map(str, arguments)]


def printed(command: list[str], *, expected: int = 0, **environment: str) -> str:
    """What a process of its own prints, which finds what this one imports."""
    found = {**emulated_environment(), **environment}
    done = subprocess.run(command, cwd=ROOT, env=found, capture_output=True, text=True, timeout=270)
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout.strip()


def bench(*arguments: object, expected: int = 0) -> str:
    """The suite's command line from end to end; what it printed."""
    return printed(bench_command(*arguments), expected=expected)


def program(text: str, *arguments: str, **environment: str) -> str:
    return printed([sys.executable, "-c", text, *arguments], **environment)


def results_in(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return document
