"""The backend contract (include/remap/backend.h), one conformance suite over every backend: memory.

Each precondition is broken once: the typed error comes and nothing has changed (usage() is equal). Each postcondition is
looked at through memory. Every test leaves the backend with nothing in it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from contract import (
    BOUNDED,
    PAGE,
    PAGES,
    Access,
    each_page,
    host_memory,
    pages,
    peek,
    peek_host,
    poke,
    poke_host,
    refuses,
    region,
    shown,
    written,
)

from remap import _core
from remap.errors import InvalidArgument, InvalidState, LimitExceeded, OutOfMemory

# -- regions ---------------------------------------------------------------------------------------------------------


def test_reservations_are_aligned_counted_and_disjoint(backend: Any) -> None:
    for wanted in (1, PAGE, 2 << 20, 8 << 20):
        alignment = max(wanted, backend.granularity)
        places = [backend.reserve(3 * PAGE, alignment) for _ in range(5)]
        assert all(at and at % alignment == 0 for at in places)
        assert all(abs(a - b) >= 3 * PAGE for a in places for b in places if a != b)
        usage = backend.usage()
        assert (usage["reserved_bytes"], usage["page_bytes"], usage["mapped_bytes"]) == (15 * PAGE, 0, 0)
        for at in places:
            backend.release(at, 3 * PAGE)
    odd = ((0, PAGE), (PAGE + 1, PAGE), (PAGE, 3 * PAGE), (PAGE, 0), (PAGE, 16))
    refuses(backend, InvalidArgument, "reserve", *odd)
    with pytest.raises(InvalidArgument) as caught:
        backend.reserve(PAGE, 3 * PAGE)
    assert caught.value.alignment == 3 * PAGE


def test_what_is_retired_reads_zeros_until_it_is_released(backend: Any) -> None:
    """A whole reservation, or first a part of it."""

    def reads(value: int, place: int, slots: int) -> bool:
        return backend.device_kind != "host" or peek_host(place, slots * PAGE) == {value}

    with region(backend, 4) as at, pages(backend, 1) as handles:
        for place, overlap in ((at, at), (at + 3 * PAGE, at + 2 * PAGE)):
            with shown(backend, handles, place):
                poke(backend, place, 7)
                refuses(backend, InvalidState, "retire", (overlap, 2 * PAGE))
        odd = ((at, 5 * PAGE), (at + 1, 4 * PAGE), (at, PAGE + 1), (at, 0), (0, PAGE))
        refuses(backend, InvalidArgument, "retire", *odd)
        before = backend.usage()
        for place, slots in ((at + PAGE, 2), (at + 2 * PAGE, 1), (at, 4)):
            backend.retire(place, slots * PAGE)
            assert backend.usage() == before and reads(0, place, slots)
            refuses(backend, InvalidState, "map", (place, handles, PAGE))
        if backend.device_kind == "host":
            poke_host(at, 9, 4 * PAGE)
            backend.retire(at, 4 * PAGE)
        assert reads(9, at, 4)  # again: nothing changed
        # Nothing of it reached the page, and nobody else gets the addresses.
        with shown(backend, handles) as elsewhere:
            assert peek(backend, elsewhere) == {7}
            assert abs(elsewhere - at) >= PAGE
    refuses(backend, InvalidArgument, "retire", (at, 4 * PAGE))


def test_release_takes_only_whole_empty_reservations(backend: Any) -> None:
    with region(backend, 4) as at, pages(backend, 1) as handles:
        parts = ((at, 3 * PAGE), (at + PAGE, 3 * PAGE), (at, 5 * PAGE), (at + 1, 4 * PAGE))
        refuses(backend, InvalidArgument, "release", *parts)
        with shown(backend, handles, at + PAGE):
            refuses(backend, InvalidState, "release", (at, 4 * PAGE))
    refuses(backend, InvalidArgument, "release", (at, 4 * PAGE))


# -- pages -----------------------------------------------------------------------------------------------------------


def test_pages_have_distinct_handles_and_run_out_exactly(backend: Any, backend_name: str) -> None:
    with pages(backend, PAGES) as handles:
        assert 0 not in handles and len(set(handles)) == PAGES
        before = backend.usage()
        assert before["page_bytes"] == PAGES * PAGE
        # Whichever refuses first: capacity, the limit decorator, or that all pages have one size.
        for nbytes in [1 << 40, *([PAGE] if backend_name in BOUNDED else [])]:
            with pytest.raises((OutOfMemory, LimitExceeded, *([InvalidArgument] if nbytes != PAGE else []))):
                backend.create_page(nbytes)
            assert backend.usage() == before


def test_page_sizes_and_stale_handles_are_refused(backend: Any) -> None:
    refuses(backend, InvalidArgument, "create_page", (0,), (1,), (PAGE - 4096,))
    page = backend.create_page(PAGE)
    backend.destroy_page(page)
    refuses(backend, InvalidArgument, "destroy_page", (0,), (page,))
    with pages(backend, 1) as fresh, region(backend, 1) as at:
        assert fresh != [page]
        refuses(backend, InvalidArgument, "map", (at, [page], PAGE))
        with shown(backend, fresh, at):
            with pytest.raises(InvalidState) as busy:
                backend.destroy_page(fresh[0])
            assert (busy.value.mapped, busy.value.page) == (1, fresh[0])


def test_pages_of_several_sizes_where_the_device_has_them(backend: Any) -> None:
    if backend.device_kind != "cuda":
        refuses(backend, InvalidArgument, "create_page", (2 * PAGE,))  # made with one page size
        return
    with pages(backend, 1) as small, pages(backend, 2, 2 * PAGE) as large, region(backend, 5) as at:
        assert backend.usage()["page_bytes"] == 5 * PAGE
        mixed = ((at, small, 2 * PAGE), (at, large, PAGE), (at, [*small, *large], PAGE))
        refuses(backend, InvalidArgument, "map", *mixed)
        with shown(backend, small, at), shown(backend, large, at + PAGE, 2 * PAGE):
            for index in range(5):
                poke(backend, at + index * PAGE, index + 1)
            refuses(backend, InvalidState, "unmap", (at + PAGE, PAGE), (at + 2 * PAGE, PAGE))  # half of a page
            refuses(backend, InvalidState, "set_access", (at, 2 * PAGE, Access.read))
            assert each_page(backend, at, 5) == [1, 2, 3, 4, 5]


def test_new_pages_read_zero_if_the_backend_says_so(backend: Any) -> None:
    for _ in range(2 if backend.new_pages_are_zero else 0):  # the second time the same memory was written before
        with pages(backend, 2) as handles, shown(backend, handles) as at:
            assert peek(backend, at, 2 * PAGE) == {0}
            poke(backend, at, 0xAB, 2 * PAGE)


# -- mappings --------------------------------------------------------------------------------------------------------


def test_aliases_are_coherent_in_both_directions_and_outlive_each_other(backend: Any) -> None:
    with pages(backend, 1) as handles, region(backend, 3) as at:
        with shown(backend, handles, at), shown(backend, handles, at + PAGE):
            assert backend.usage()["mapped_bytes"] == 2 * PAGE and backend.usage()["page_bytes"] == PAGE
            for first, second in ((0, PAGE), (PAGE, 0)):
                poke(backend, at + first, 0x40 + first // PAGE)
                assert peek(backend, at + second) == {0x40 + first // PAGE}
        with shown(backend, handles, at + 2 * PAGE):  # the bytes are the page's, not the mapping's
            assert peek(backend, at + 2 * PAGE) == {0x41}


def test_map_refuses_what_is_mapped_unreserved_or_odd(backend: Any) -> None:
    with pages(backend, 3) as handles, region(backend, 3) as at:
        one, two = handles[:1], handles[1:]
        with shown(backend, one, at + PAGE):
            poke(backend, at + PAGE, 7)
            taken = ((at, two, PAGE), (at + PAGE, handles[1:2], PAGE), (at + PAGE, one, PAGE))
            refuses(backend, InvalidState, "map", *taken)
            assert peek(backend, at + PAGE) == {7}
        past_the_end, unaligned, nothing = (at + 2 * PAGE, two, PAGE), (at + 8, one, PAGE), (at, [], PAGE)
        sizes, unknown = ((at, one, 2 * PAGE), (at, one, 0)), ((at, [0], PAGE), (at, [one[0], 12345678], PAGE))
        refuses(backend, InvalidArgument, "map", past_the_end, unaligned, nothing, *sizes, *unknown)


def test_unmap_takes_any_whole_mapped_pages(backend: Any) -> None:
    with region(backend, 5) as at, pages(backend, 4) as handles:
        backend.map(at, handles, PAGE)
        backend.set_access(at, 4 * PAGE, Access.read_write)
        for index in (0, 3):
            poke(backend, at + index * PAGE, index + 1)
        backend.unmap(at + PAGE, 2 * PAGE)  # the middle of a run
        assert peek(backend, at) == {1} and peek(backend, at + 3 * PAGE) == {4}
        assert backend.usage()["mapped_bytes"] == 2 * PAGE
        refuses(backend, InvalidState, "unmap", (at, 2 * PAGE), (at + PAGE, PAGE), (at + 3 * PAGE, 2 * PAGE))
        # Half a page is a whole number of a host's pages, but no range of a device's.
        cut = InvalidState if backend.granularity <= PAGE // 2 else InvalidArgument
        refuses(backend, cut, "unmap", (at, PAGE // 2), (at + PAGE // 2, PAGE))
        refuses(backend, InvalidArgument, "unmap", (at, 0), (at + 1, PAGE), (at, PAGE + 1))
        backend.unmap(at, PAGE)
        backend.unmap(at + 3 * PAGE, PAGE)


def test_access_and_populate_need_mapped_pages(backend: Any) -> None:
    with pages(backend, 1) as handles, region(backend, 2) as at:
        refuses(backend, InvalidState, "set_access", (at, PAGE, Access.read))
        refuses(backend, InvalidState, "populate", (at, PAGE))
        with shown(backend, handles, at):
            poke(backend, at, 9)
            backend.populate(at, PAGE)
            refuses(backend, InvalidState, "set_access", (at, 2 * PAGE, Access.read))
            backend.set_access(at, PAGE, Access.none)
            refuses(backend, InvalidState, "populate", (at, PAGE))  # nothing to fill in: not accessible
            backend.set_access(at, PAGE, Access.read)
            assert peek(backend, at) == {9}
            backend.set_access(at, PAGE, Access.read_write)


def test_exchange_swaps_what_stands_behind_two_ranges(backend: Any) -> None:
    if not backend.can_exchange:
        with written(backend, 2) as (_, at):
            refuses(backend, InvalidState, "exchange", (at, at + PAGE, PAGE))
            assert each_page(backend, at, 2) == [1, 2]
        return
    with written(backend, 4) as (handles, whole), region(backend, 6) as at:
        one, other = at, at + 3 * PAGE
        with shown(backend, handles[:2], one), shown(backend, [handles[2], handles[0]], other):
            for _ in range(3):
                backend.exchange(one, other, 2 * PAGE)
            assert each_page(backend, one, 2) + each_page(backend, other, 2) == [3, 1, 1, 2]
            poke(backend, one, 0x55)  # writable, and the page's bytes
            assert peek(backend, whole + 2 * PAGE) == {0x55}
            refuses(backend, InvalidArgument, "exchange", (one, one, 2 * PAGE))
            refuses(backend, InvalidState, "exchange", (one, other, 3 * PAGE))
            assert [peek(backend, one), peek(backend, other)] == [{0x55}, {1}]


# -- host memory -----------------------------------------------------------------------------------------------------


def test_host_memory_is_counted_given_back_whole_and_changes_its_use_in_place(backend: Any) -> None:
    with host_memory(backend, 100_000) as at:
        poke_host(at, 5, 100_000)
        assert backend.usage()["host_bytes"] == 100_000
        refuses(backend, InvalidArgument, "free_host", (at, 99_999), (at + 1, 100_000))
        refuses(backend, InvalidArgument, "unregister_host", (at, 100_000))
        refuses(backend, InvalidState, "register_host", (at + 10, 10))
        for use in (_core.HostUse.staged, _core.HostUse.staged, _core.HostUse.locked, _core.HostUse.locked):
            backend.use_host(at, 100_000, use)
            assert backend.usage()["host_bytes"] == 100_000 and peek_host(at, 100_000) == {5}
        refuses(backend, InvalidArgument, "use_host", (at, 99_999, use), (at + 1, 99_999, use), (0, 5, use))
        backend.use_host(at, 100_000, _core.HostUse.staged)
    refuses(backend, InvalidArgument, "free_host", (at, 100_000))
    refuses(backend, InvalidArgument, "allocate_host", (0,))


@pytest.mark.parametrize("use", [_core.HostUse.locked, _core.HostUse.staged], ids=["locked", "staged"])
def test_registered_memory_is_the_callers(backend: Any, use: Any) -> None:
    own = ctypes.create_string_buffer(b"\x07" * 5000, 5000)
    at = ctypes.addressof(own)
    backend.register_host(at, 5000, use)
    assert backend.usage()["host_bytes"] == 5000
    refuses(backend, InvalidState, "register_host", (at, 5000), (at + 100, 10), (at - 10, 20))
    refuses(backend, InvalidArgument, "free_host", (at, 5000))
    for other in (_core.HostUse.staged, _core.HostUse.locked):
        backend.use_host(at, 5000, other)
    backend.unregister_host(at, 5000)
    refuses(backend, InvalidArgument, "unregister_host", (at, 5000))
    assert set(own.raw) == {7}
