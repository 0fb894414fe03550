"""A session on the CPU that the machine can never hold is refused, before anything of it is made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import remap
from remap.memory.machine_memory import memory_bound, require_memory

GIB = 1 << 30
MEMINFO = "MemTotal:       {total} kB\nMemFree:        100 kB\nSwapTotal:      {swap} kB\n"


def _root(tmp_path: Path, *, total: int = 24 * GIB, swap: int = 0, **files: str) -> str:
    given = {"proc/meminfo": MEMINFO.format(total=total // 1024, swap=swap // 1024), **files}
    for name, text in given.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path)


def test_the_machine_bounds_memory_and_swap(tmp_path):
    bound = memory_bound(_root(tmp_path, swap=2 * GIB))
    assert (bound.nbytes, bound.limited_by) == (26 * GIB, "machine")


@pytest.mark.parametrize("unlimited", ["max\n", "9223372036854771712\n", ""])
def test_a_group_without_a_limit_bounds_nothing(tmp_path, unlimited):
    v1, v2 = "sys/fs/cgroup/memory/a/memory.limit_in_bytes", "sys/fs/cgroup/a/memory.max"
    root = _root(tmp_path, **{"proc/self/cgroup": "4:cpu,memory:/a\n0::/a\n", v1: unlimited, v2: unlimited})
    assert memory_bound(root).limited_by == "machine"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": 4 * GIB}, 5 * GIB),  # and the machine's swap
        ("0::/a/b\n", {"a/b/memory.max": 4 * GIB, "a/b/memory.swap.max": 0}, 4 * GIB),
        ("0::/a/b\n", {"a/b/memory.max": 4 * GIB, "a/memory.max": 2 * GIB, "a/memory.swap.max": 0}, 2 * GIB),
        ("0::/host/only\n", {"memory.max": 3 * GIB, "memory.swap.max": 0}, 3 * GIB),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": 3 * GIB}, 4 * GIB),
        (
            "4:memory:/a\n",
            {"memory/a/memory.limit_in_bytes": 3 * GIB, "memory/a/memory.memsw.limit_in_bytes": 3 * GIB},
            3 * GIB,
        ),
    ],
)
def test_the_tightest_group_bounds(tmp_path, cgroup, files, expected):
    files = {f"sys/fs/cgroup/{name}": f"{value}\n" for name, value in files.items()}
    root = _root(tmp_path, swap=GIB, **{"proc/self/cgroup": cgroup}, **files)
    bound = memory_bound(root)
    assert (bound.nbytes, bound.limited_by) == (expected, "cgroup")
    require_memory(expected, root)
    with pytest.raises(remap.OutOfMemory) as caught:
        require_memory(expected + 1, root)
    assert caught.value.fields == {"requested": expected + 1, "limit": expected, "limited_by": "cgroup"}


# In a process of its own with little memory to grow into: a table of 900 TiB of pages would take gigabytes.
REFUSED = """
import resource
import remap

resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
for size, page in (("10TiB", "2MiB"), ("900TiB", "2MiB"), ("900TiB", "4KiB"), (1 << 62, "2MiB")):
    try:
        remap.Session(size, "cpu", page_bytes=page)
    except remap.OutOfMemory as error:
        assert error.requested > error.limit > 0 and error.limited_by in ("machine", "cgroup")
    else:
        raise AssertionError(size)
"""


def test_capacities_that_no_machine_holds():
    subprocess.run([sys.executable, "-c", REFUSED], check=True, timeout=120)


def test_a_session_about_as_large_as_the_memory_opens():
    pages = memory_bound().nbytes // (2 << 20)
    with remap.Session(pages * (2 << 20), "cpu") as session:
        assert session.snapshot().pages.free == pages
