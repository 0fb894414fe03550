"""A session on the CPU that the machine can never hold is refused, before anything of it is made."""

from __future__ import annotations

import pytest
from subprocesses import expect_ok

import remap
from remap.errors import OutOfMemory
from remap.memory.machine_memory import memory_bound, require_memory

GIB = 1 << 30
PAGE = 4096
MEMINFO = f"MemTotal:       {24 * GIB // 1024} kB\nMemFree:        100 kB\nSwapTotal:      {GIB // 1024} kB\n"


V1, V2, SWAP = "memory/a/memory.limit_in_bytes", "memory.max", "memory.swap.max"
BOUNDS = [  # /proc/self/cgroup, what the groups allow -> the bound in GiB
    ("", {}, 25),
    *(("4:cpu,memory:/a\n0::/a\n", {V1: none, f"a/{V2}": none}, 25) for none in ("max", "9223372036854771712", "")),
    ("0::/a/b\n", {f"a/b/{V2}": 4 * GIB}, 5),  # and the machine's swap
    ("0::/a/b\n", {f"a/b/{V2}": 4 * GIB, f"a/b/{SWAP}": 0}, 4),
    ("0::/a/b\n", {f"a/b/{V2}": 4 * GIB, f"a/{V2}": 2 * GIB, f"a/{SWAP}": 0}, 2),
    ("0::/host/only\n", {V2: 3 * GIB, SWAP: 0}, 3),
    ("4:memory:/a\n", {V1: 3 * GIB}, 4),
    ("4:memory:/a\n", {V1: 3 * GIB, "memory/a/memory.memsw.limit_in_bytes": 3 * GIB}, 3),
]


@pytest.mark.parametrize(("cgroup", "files", "gib"), BOUNDS)
def test_the_tightest_group_or_the_machine_bounds(tmp_path, cgroup, files, gib):
    expected, limited_by = gib * GIB, "machine" if gib == 25 else "cgroup"
    given = {f"sys/fs/cgroup/{name}": f"{value}\n" for name, value in files.items()}
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **given}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    root = str(tmp_path)
    bound = memory_bound(root)
    assert (bound.nbytes, bound.limited_by) == (expected, limited_by)
    require_memory(expected, root)
    with pytest.raises(remap.OutOfMemory) as caught:
        require_memory(expected + 1, root)
    assert caught.value.fields == {"requested": expected + 1, "limit": expected, "limited_by": limited_by}


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
    expect_ok(REFUSED, timeout_s=120)


def test_a_session_about_as_large_as_the_memory_opens():
    pages = memory_bound().nbytes // (2 << 20)
    with remap.Session(pages * (2 << 20), "cpu") as session:
        assert session.snapshot().pages.free == pages


def _hosted(nbytes: int) -> remap.KVSpec:
    """A KVSpec with so many bytes of host blocks, rounded up."""
    unit = 2 * 2 * 64 * 4096  # layers, keys and values, a block of int8
    spec = {"layers": 2, "kv_heads": 1, "head_dim": 64, "dtype": "int8", "block_tokens": 4096}
    return remap.KVSpec(**spec, min_blocks=0, max_blocks=1, host_blocks=-(-nbytes // unit))


def test_host_memory_that_the_machine_cannot_hold_is_refused_and_the_sum_counts() -> None:
    layers, bound = [b"x" * PAGE] * 2, memory_bound().nbytes
    with remap.Session(40 * PAGE, device="cpu", page_bytes=PAGE) as session:
        with pytest.raises(OutOfMemory) as caught:
            session.attach_bytes(layers, name="a", kv=_hosted(2 * bound))
        assert caught.value.limit == bound and caught.value.requested >= 2 * bound
        assert not session.snapshot().tenants
        session.attach_bytes(layers, name="a", kv=_hosted(bound * 6 // 10))  # addresses only: nothing is touched
        with pytest.raises(OutOfMemory):
            session.attach_bytes(layers, name="b", kv=_hosted(bound * 6 // 10))
        assert set(session.snapshot().tenants) == {"a"}
        session.detach("a")
        session.attach_bytes(layers, name="b", kv=_hosted(bound * 6 // 10))
