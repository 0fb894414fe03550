"""Limits are hard: one below, exactly at, and one above, for each kind; and the kernel's own limit on mappings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from arena_worlds import PAGE
from subprocesses import expect_ok

import remap
from remap import _core
from remap.errors import LimitExceeded

N = 3


def limited(**limits: int) -> Any:
    return _core.make_limit_backend(_core.make_host_backend(16 * PAGE, PAGE, 1), **limits)


def mapping(backend: Any) -> int:
    at: int = backend.reserve(PAGE, PAGE)
    try:
        backend.map(at, [backend.create_page(PAGE)], PAGE)
    except BaseException:
        backend.release(at, PAGE)
        raise
    return at


def unmapping(backend: Any, at: int) -> None:
    backend.unmap(at, PAGE)
    backend.release(at, PAGE)


# kind: what a unit is, how one is taken and given back
KINDS: dict[str, tuple[int, Callable[[Any], int], Callable[[Any, int], None]]] = {
    "page_bytes": (PAGE, lambda b: b.create_page(PAGE), lambda b, page: b.destroy_page(page)),
    "reserved_bytes": (PAGE, lambda b: b.reserve(PAGE, PAGE), lambda b, at: b.release(at, PAGE)),
    "host_bytes": (PAGE, lambda b: b.allocate_host(PAGE), lambda b, at: b.free_host(at, PAGE)),
    "streams": (1, lambda b: b.create_stream(), lambda b, stream: b.destroy_stream(stream)),
    "events": (1, lambda b: b.create_event(), lambda b, event: b.destroy_event(event)),
    "mappings": (1, mapping, unmapping),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [N - 1, N, N + 1])
def test_n_units_against_a_limit_around_n(kind: str, limit: int) -> None:
    unit, take, give_back = KINDS[kind]
    backend = limited(**{kind: limit * unit})
    held = [take(backend) for _ in range(limit)]
    for _ in range(2):  # what is given back can be taken again, and no more than that
        before = backend.usage()
        with pytest.raises(LimitExceeded) as caught:
            take(backend)
        assert (caught.value.limit_name, caught.value.requested) == (kind, unit)
        assert caught.value.limit == caught.value.used == limit * unit
        assert kind == "mappings" or backend.usage() == before
        give_back(backend, held.pop())
        held.append(take(backend))
    for handle in held:
        give_back(backend, handle)
    assert backend.usage()["reserved_bytes"] == backend.usage()["mapped_bytes"] == 0


def test_sizes_that_overflow_are_refused_and_a_call_that_fails_gives_its_count_back() -> None:
    backend = limited(page_bytes=2 * PAGE, reserved_bytes=2 * PAGE, host_bytes=2 * PAGE)
    huge = (1 << 64) - PAGE
    for call in (backend.create_page, lambda size: backend.reserve(size, PAGE), backend.allocate_host):
        with pytest.raises(LimitExceeded):
            call(huge)
    assert set(backend.usage().values()) == {0}
    fault = _core.make_fault_backend(_core.make_host_backend(16 * PAGE, PAGE, 1))
    backend = _core.make_limit_backend(fault, page_bytes=PAGE)
    for _ in range(5):
        fault.arm(_core.Call.create_page, 1)
        with pytest.raises(remap.DriverError):
            backend.create_page(PAGE)
    page = backend.create_page(PAGE)
    fault.arm(_core.Call.destroy_page, 1)
    with pytest.raises(remap.DriverError):
        backend.destroy_page(page)
    with pytest.raises(LimitExceeded):  # still there, so still counted
        backend.create_page(PAGE)
    backend.destroy_page(page)


MAX_MAP_COUNT = """
import ctypes, mmap
from remap import _core
from remap.errors import LimitExceeded

limit = int(open("/proc/sys/vm/max_map_count").read())
if limit > 200_000:
    raise SystemExit(0)  # would take minutes here; the accounting is the same
page, count = 4096, limit + 100
backend = _core.make_host_backend(count * page, page, 1)
pages = [backend.create_page(page) for _ in range(count)]
at = backend.reserve(count * page, page)
# No two neighbours in the file are neighbours in memory: each page is a kernel mapping of its own.
order = [pages[i // 2 if i % 2 else count - 1 - i // 2] for i in range(count)]
# Somebody else has taken the mappings that the arena leaves to others.
crowd = mmap.mmap(-1, 4 * 1100 * page)
libc = ctypes.CDLL(None, use_errno=True)
base = ctypes.addressof(ctypes.c_char.from_buffer(crowd))
for i in range(0, 2200, 2):
    assert libc.mprotect(ctypes.c_void_p(base + i * page), ctypes.c_size_t(page), 0) == 0
mapped, error = 0, None
while mapped < count:
    step = min(512, count - mapped)
    before = backend.usage()
    try:
        backend.map(at + mapped * page, order[mapped : mapped + step], page)
    except LimitExceeded as caught:
        error = caught
        assert backend.usage() == before
        break
    mapped += step
assert error is not None, "all mapped"
assert error.limited_by == "vm.max_map_count" and error.limit <= limit, error.fields
assert 0 < error.requested and error.in_use + error.requested + 64 > error.limit, error.fields
assert mapped > limit - 4000, mapped
# Giving back and going on works at the limit.
backend.unmap(at, mapped * page)
backend.map(at, pages[:100], page)
backend.unmap(at, 100 * page)
backend.release(at, count * page)
"""


def test_max_map_count_is_reached_for_real_and_named() -> None:
    expect_ok(MAX_MAP_COUNT, timeout_s=120)


# Each in a process of its own, with a limit of the process that 1 GiB does not fit into.
A_LIMIT = """
import ctypes, os, resource
import remap
from remap import _core

GIB = 1 << 30
def in_use(field):
    text = open("/proc/self/status").read()
    return next((1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith(field)), 0)

def limited(which, field, more):
    resource.setrlimit(which, (in_use(field) + more,) * 2)

def met(make, limited_by):
    try:
        make()
    except remap.LimitExceeded as error:
        assert error.limited_by == limited_by, (error.fields, str(error))
        assert error.requested + error.in_use > error.limit, error.fields
    else:
        raise SystemExit(f"not refused by {limited_by}")

backend = _core.make_host_backend(1 << 20, 4096)
before = backend.usage()
"""

LIMITS = {
    "addresses, for host memory, a region and KV in host memory": """
sim = _core.make_sim_backend(capacity_bytes=4 * GIB, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, hbm_bytes_per_s=1e11)
session = remap.Session(40 * 4096, page_bytes=4096)
spec = remap.KVSpec(layers=2, kv_heads=1, head_dim=64, dtype="int8", block_tokens=4096, min_blocks=0, max_blocks=1,
                    host_blocks=GIB // (2 * 2 * 64 * 4096))
limited(resource.RLIMIT_AS, "VmSize", GIB // 2)
met(lambda: backend.allocate_host(GIB), "RLIMIT_AS")
met(lambda: backend.reserve(GIB, 4096), "RLIMIT_AS")
met(lambda: sim.reserve(GIB, 1 << 21), "RLIMIT_AS")
met(lambda: session.attach_bytes([b"x" * 4096] * 2, name="a", kv=spec), "RLIMIT_AS")
assert not session.snapshot().tenants
session.close()
""",
    "addresses, for a thread": """
limited(resource.RLIMIT_AS, "VmSize", 2 << 20)  # a stack is larger
met(backend.create_stream, "RLIMIT_AS")
""",
    "private memory": """
limited(resource.RLIMIT_DATA, "VmData", GIB // 2)
met(lambda: backend.allocate_host(GIB), "RLIMIT_DATA")
""",
    "locked memory": """
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)  # the limit does not bind root
_, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
resource.setrlimit(resource.RLIMIT_MEMLOCK, ((GIB // 2 if hard < 0 else min(hard, GIB // 2)),) * 2)
assert ctypes.CDLL(None).mlockall(2) == 0  # MCL_FUTURE
ctypes.pythonapi.PyMem_RawMalloc.restype = ctypes.c_void_p
assert ctypes.pythonapi.PyMem_RawMalloc(ctypes.c_size_t(1 << 20))  # some that is locked
met(lambda: backend.allocate_host(GIB), "RLIMIT_MEMLOCK")
""",
    "the length of a file": """
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20,) * 2)
met(lambda: _core.make_host_backend(1 << 21, 4096), "RLIMIT_FSIZE")
met(lambda: remap.Session(1 << 21, page_bytes=4096), "RLIMIT_FSIZE")
""",
    "open files": """
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
try:
    _core.make_host_backend(1 << 20, 4096)
except remap.LimitExceeded as error:
    assert (error.limited_by, error.limit) == ("RLIMIT_NOFILE", 3)
else:
    raise SystemExit("not refused")
""",
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_of_the_process_is_named_with_its_numbers(limit: str) -> None:
    expect_ok(A_LIMIT + LIMITS[limit] + "\nassert backend.usage() == before\n")
