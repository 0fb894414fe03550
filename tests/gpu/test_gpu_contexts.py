"""The device's primary context lasts for the whole run of tests: else each test would build it anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import program

CONFORMANCE = """
import os
from pathlib import Path

import contract
from emulated import Emulated

assert contract.ON_GPU
for _ in range(2):
    backend = contract.cuda()
    del backend
    print(contract.PAGE, Emulated(Path(os.environ["REMAP_LIBCUDA"])).live())
"""


def test_it_outlives_every_backend_of_the_conformance_suite(emulated_gpu: Any) -> None:
    """As on a GPU, with the emulated one in its place."""
    assert program(CONFORMANCE, REMAP_TEST_CUDA="1").splitlines() == [f"{2 << 20} {{'contexts': 1}}"] * 2


def test_masters_of_the_benchmarks_count_as_memory_that_is_there(gpu: Any) -> None:
    """Private memory: pages of a shared mapping are not seen as resident, and weigh on the budget a second time."""
    from bench.gpu.tenants import make_masters

    (master,) = make_masters(1, 1 << 20)
    address = master.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= address < last:
            assert line.split()[1] == "rw-p"
            return
    pytest.fail("the master copy is in no mapping")
