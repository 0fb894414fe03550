"""Pages of one memfd in several arenas, as of several processes: a page belongs to one of them at a time.

shared_pages_test.cpp has more of it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Iterator

import pytest

from remap import _core
from remap.errors import InvalidArgument

PAGE, PAGES, TENANT, NOBODY = 1 << 16, 16, 1, 0xFFFFFFFF


class Member:
    """An arena over the file, whose one tenant has a place in its KV region for every page."""

    def __init__(self, file: int, mode: str = "aliased") -> None:
        self.backend = _core.make_host_backend(PAGES * PAGE, PAGE, file=file)
        self.arena = _core.Arena(self.backend, PAGES * PAGE, PAGE, getattr(_core.Mode, mode), outside=True)
        self.executor = _core.Executor(self.arena)
        self.kv = self.arena.add_kv_region(TENANT, PAGES)
        self.arena.designate(self.kv, 0, list(range(PAGES)))

    def move(self, pages: list[int], *owners: str) -> int:
        """From owner to owner, a plan each. Bytes that were zeroed."""
        zeroed = 0
        for before, after in zip(owners, owners[1:]):
            plan = _core.Plan(self.arena.epoch)
            tenant = NOBODY if "outside" in (before, after) else TENANT
            plan.set_owner(pages, getattr(_core.Owner, before), getattr(_core.Owner, after), tenant)
            self.executor.apply(plan)
            zeroed += self.executor.zero_due()
            self.executor.commit(None)
            self.arena.check()
        return zeroed

    def take(self, pages: list[int]) -> int:
        """What the process is given becomes KV."""
        return self.move(pages, "outside", "free", "kv")

    def give(self, pages: list[int]) -> int:
        """The reverse."""
        return self.move(pages, "kv", "free", "outside")

    def write(self, page: int, value: int) -> None:
        ctypes.memset(self.arena.address(self.kv) + page * PAGE, value, PAGE)

    def values(self, page: int) -> set[int]:
        return set(ctypes.string_at(self.arena.address(self.kv) + page * PAGE, PAGE))

    def close(self) -> None:
        self.executor.stop()
        self.arena.close()


@pytest.fixture
def file() -> Iterator[int]:
    made = os.memfd_create("pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(made, PAGES * PAGE)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    yield made
    os.close(made)


@pytest.fixture(params=["aliased", "strict"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_page_goes_between_members_and_its_bytes_do_not(file: int, mode: str) -> None:
    mine, other = Member(file, mode), Member(file, mode)
    assert mine.arena.counts()["outside"] == mine.arena.counts()["total"] == PAGES
    assert mine.take([0, 1, 2]) == 3 * PAGE
    assert (mine.arena.counts()["outside"], mine.arena.counts()["kv"]) == (PAGES - 3, 3)
    for page in range(3):
        mine.write(page, 0xA5)
    assert mine.give([1, 2]) == 0
    assert other.take([1, 2]) == 2 * PAGE
    assert other.values(1) == other.values(2) == {0}
    other.write(2, 0x5A)
    other.give([2])
    assert mine.take([2]) == PAGE and mine.values(2) == {0}
    assert mine.values(0) == {0xA5}  # nobody has zeroed what stayed
    other.close()
    assert mine.values(0) == {0xA5}  # nor given it back to the system
    mine.close()


def test_the_own_page_of_a_layer_that_has_gone_can_be_anothers(file: int) -> None:
    mine = Member(file)
    mine.move([0, 1], "outside", "free")
    home = mine.arena.take(2, _core.Owner.params, 7)
    mine.arena.add_layer_region(7, "layer", home)
    mine.arena.remove_tenant(7)
    mine.move([0, 1], "free", "outside", "free")
    again = mine.arena.take(2, _core.Owner.params, 8)
    mine.arena.add_layer_region(8, "another", again)
    mine.arena.remove_tenant(8)
    assert mine.take([]) == 0
    mine.arena.check()
    mine.close()


def test_a_file_of_another_size_is_refused(file: int) -> None:
    for pages in (PAGES - 1, PAGES + 1):
        with pytest.raises(InvalidArgument, match="sealed"):
            _core.make_host_backend(pages * PAGE, PAGE, file=file)
    with pytest.raises(InvalidArgument, match="None for a new one"):
        _core.make_host_backend(PAGES * PAGE, PAGE, file=-1)
    read_only = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    with pytest.raises(InvalidArgument, match="read and written"):
        _core.make_host_backend(PAGES * PAGE, PAGE, file=read_only)
    os.close(read_only)
    reading, writing = os.pipe()
    with pytest.raises(InvalidArgument, match="memfd"):
        _core.make_host_backend(PAGES * PAGE, PAGE, file=reading)
    os.close(reading)
    os.close(writing)
