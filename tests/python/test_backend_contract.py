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
    pages,
    peek,
    peek_host,
    poke,
    poke_host,
    refused,
    region,
    shown,
)

from remap.errors import InvalidArgument, InvalidState, LimitExceeded, OutOfMemory

# -- regions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [1, PAGE, 2 << 20, 8 << 20])
def test_reservations_are_aligned_counted_and_disjoint(backend: Any, alignment: int) -> None:
    alignment = max(alignment, backend.granularity)
    places = [backend.reserve(3 * PAGE, alignment) for _ in range(5)]
    assert all(at and at % alignment == 0 for at in places)
    assert all(abs(a - b) >= 3 * PAGE for a in places for b in places if a != b)
    assert backend.usage()["reserved_bytes"] == 15 * PAGE
    assert backend.usage()["page_bytes"] == backend.usage()["mapped_bytes"] == 0
    for at in places:
        backend.release(at, 3 * PAGE)


def test_reserve_refuses_what_is_not_aligned(backend: Any) -> None:
    for bytes_, alignment in ((0, PAGE), (PAGE + 1, PAGE), (PAGE, 3 * PAGE), (PAGE, 0), (PAGE, 16)):
        with refused(backend, InvalidArgument):
            backend.reserve(bytes_, alignment)


def test_a_retired_reservation_reads_zeros_until_it_is_released(backend: Any) -> None:
    with region(backend, 4) as at, pages(backend, 1) as handles:
        with shown(backend, handles, at + PAGE):
            poke(backend, at + PAGE, 7)
            with refused(backend, InvalidState):
                backend.retire(at, 4 * PAGE)
        for place, bytes_ in ((at, 5 * PAGE), (at + 1, 4 * PAGE), (at, PAGE + 1), (at, 0), (0, PAGE)):
            with refused(backend, InvalidArgument):
                backend.retire(place, bytes_)
        before = backend.usage()
        backend.retire(at, 4 * PAGE)
        assert backend.usage() == before
        if backend.device_kind == "host":
            assert peek_host(at, 4 * PAGE) == {0}
            poke_host(at, 9, 4 * PAGE)
            backend.retire(at, 4 * PAGE)
            assert peek_host(at, 4 * PAGE) == {9}  # again: nothing changed
        with refused(backend, InvalidState):
            backend.map(at, handles, PAGE)
        # Nothing of it reached the page, and nobody else gets the addresses.
        with shown(backend, handles) as elsewhere:
            assert peek(backend, elsewhere) == {7}
            assert abs(elsewhere - at) >= PAGE
    with refused(backend, InvalidArgument):
        backend.retire(at, 4 * PAGE)


def test_a_part_of_a_reservation_may_be_retired(backend: Any) -> None:
    with region(backend, 4) as at, pages(backend, 1) as handles:
        before = backend.usage()
        backend.retire(at + PAGE, 2 * PAGE)
        backend.retire(at + 2 * PAGE, PAGE)  # a part of that: changes nothing
        assert backend.usage() == before
        if backend.device_kind == "host":
            assert peek_host(at + PAGE, 2 * PAGE) == {0}
            poke_host(at + PAGE, 9, 2 * PAGE)
        for place in (at + PAGE, at + 2 * PAGE):
            with refused(backend, InvalidState):
                backend.map(place, handles, PAGE)
        for place in (at, at + 3 * PAGE):
            with shown(backend, handles, place):
                poke(backend, place, 7)
                with refused(backend, InvalidState):
                    backend.retire(place - PAGE if place > at else place, 2 * PAGE)
        backend.retire(at, 4 * PAGE)
        if backend.device_kind == "host":
            assert peek_host(at, 4 * PAGE) == {0}


def test_release_takes_only_whole_empty_reservations(backend: Any) -> None:
    with region(backend, 4) as at, pages(backend, 1) as handles:
        for place, bytes_ in ((at, 3 * PAGE), (at + PAGE, 3 * PAGE), (at, 5 * PAGE), (at + 1, 4 * PAGE)):
            with refused(backend, InvalidArgument):
                backend.release(place, bytes_)
        with shown(backend, handles, at + PAGE), refused(backend, InvalidState):
            backend.release(at, 4 * PAGE)
    with refused(backend, InvalidArgument):
        backend.release(at, 4 * PAGE)


# -- pages -----------------------------------------------------------------------------------------------------------


def test_pages_have_distinct_handles_and_run_out_exactly(backend: Any, backend_name: str) -> None:
    with pages(backend, PAGES) as handles:
        assert 0 not in handles and len(set(handles)) == PAGES
        assert backend.usage()["page_bytes"] == PAGES * PAGE
        if backend_name not in BOUNDED:
            return
        before = backend.usage()
        with pytest.raises((OutOfMemory, LimitExceeded)):  # whichever refuses first: capacity, or the limit decorator
            backend.create_page(PAGE)
        assert backend.usage() == before


def test_page_sizes_and_stale_handles_are_refused(backend: Any) -> None:
    for bytes_ in (0, 1, PAGE - 4096):
        with refused(backend, InvalidArgument):
            backend.create_page(bytes_)
    with refused(backend, InvalidArgument):
        backend.destroy_page(0)
    page = backend.create_page(PAGE)
    backend.destroy_page(page)
    with refused(backend, InvalidArgument):
        backend.destroy_page(page)
    with pages(backend, 1) as fresh:
        assert fresh != [page]
        with region(backend, 1) as at, refused(backend, InvalidArgument):
            backend.map(at, [page], PAGE)


def test_a_page_larger_than_a_device_is_refused(backend: Any) -> None:
    before = backend.usage()
    with pytest.raises((OutOfMemory, LimitExceeded, InvalidArgument)):  # the last where all pages have one size
        backend.create_page(1 << 40)
    assert backend.usage() == before


def test_pages_of_several_sizes_where_the_device_has_them(backend: Any) -> None:
    if backend.device_kind != "cuda":
        with refused(backend, InvalidArgument):  # made with one page size
            backend.create_page(2 * PAGE)
        return
    with pages(backend, 1) as small, pages(backend, 2, 2 * PAGE) as large, region(backend, 5) as at:
        assert backend.usage()["page_bytes"] == 5 * PAGE
        for which, size in ((small, 2 * PAGE), (large, PAGE), ([*small, *large], PAGE)):
            with refused(backend, InvalidArgument):
                backend.map(at, which, size)
        with shown(backend, small, at), shown(backend, large, at + PAGE, 2 * PAGE):
            for index in range(5):
                poke(backend, at + index * PAGE, index + 1)
            for place in (at + PAGE, at + 2 * PAGE):  # half of a page
                with refused(backend, InvalidState):
                    backend.unmap(place, PAGE)
            with refused(backend, InvalidState):
                backend.set_access(at, 2 * PAGE, Access.read)
            assert [peek(backend, at + index * PAGE) for index in range(5)] == [{index + 1} for index in range(5)]


def test_a_mapped_page_cannot_be_destroyed(backend: Any) -> None:
    with pages(backend, 1) as handles, shown(backend, handles), refused(backend, InvalidState):
        backend.destroy_page(handles[0])


def test_new_pages_read_zero_if_the_backend_says_so(backend: Any) -> None:
    if not backend.new_pages_are_zero:
        return
    for _ in range(2):  # the second time the same memory was written before
        with pages(backend, 2) as handles, shown(backend, handles) as at:
            assert peek(backend, at, 2 * PAGE) == {0}
            poke(backend, at, 0xAB, 2 * PAGE)


# -- mappings --------------------------------------------------------------------------------------------------------


def test_pages_stand_where_they_were_mapped_in_any_order(backend: Any) -> None:
    with pages(backend, 5) as handles, shown(backend, handles) as at:
        for index in range(5):
            poke(backend, at + index * PAGE, index + 1)
        order = [3, 0, 4, 1, 2]
        with shown(backend, [handles[i] for i in order]) as other:
            for place, index in enumerate(order):
                assert peek(backend, other + place * PAGE) == {index + 1}


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
        with shown(backend, handles[:1], at + PAGE):
            poke(backend, at + PAGE, 7)
            for place, which in ((at, handles[1:]), (at + PAGE, handles[1:2]), (at + PAGE, handles[:1])):
                with refused(backend, InvalidState):
                    backend.map(place, which, PAGE)
            assert peek(backend, at + PAGE) == {7}
        for place, which, size in (
            (at + 2 * PAGE, handles[:2], PAGE),  # past the end
            (at + 8, handles[:1], PAGE),
            (at, [], PAGE),
            (at, handles[:1], 2 * PAGE),
            (at, handles[:1], 0),
            (at, [0], PAGE),
            (at, [handles[0], 12345678], PAGE),
        ):
            with refused(backend, InvalidArgument):
                backend.map(place, which, size)


def test_unmap_takes_any_whole_mapped_pages(backend: Any) -> None:
    with pages(backend, 4) as handles, region(backend, 5) as at:
        backend.map(at, handles, PAGE)
        backend.set_access(at, 4 * PAGE, Access.read_write)
        for index in range(4):
            poke(backend, at + index * PAGE, index + 1)
        backend.unmap(at + PAGE, 2 * PAGE)  # the middle of a run
        assert peek(backend, at) == {1} and peek(backend, at + 3 * PAGE) == {4}
        assert backend.usage()["mapped_bytes"] == 2 * PAGE
        for place, bytes_ in ((at, 2 * PAGE), (at + PAGE, PAGE), (at + 3 * PAGE, 2 * PAGE)):
            with refused(backend, InvalidState):
                backend.unmap(place, bytes_)
        # Half a page is a whole number of a host's pages, but no range of a device's.
        cut = InvalidState if backend.granularity <= PAGE // 2 else InvalidArgument
        for place, bytes_ in ((at, PAGE // 2), (at + PAGE // 2, PAGE)):
            with refused(backend, cut):
                backend.unmap(place, bytes_)
        for place, bytes_ in ((at, 0), (at + 1, PAGE), (at, PAGE + 1)):
            with refused(backend, InvalidArgument):
                backend.unmap(place, bytes_)
        backend.unmap(at, PAGE)
        backend.unmap(at + 3 * PAGE, PAGE)


def test_access_needs_mapped_pages(backend: Any) -> None:
    with pages(backend, 1) as handles, region(backend, 2) as at:
        with refused(backend, InvalidState):
            backend.set_access(at, PAGE, Access.read)
        with shown(backend, handles, at):
            poke(backend, at, 9)
            with refused(backend, InvalidState):
                backend.set_access(at, 2 * PAGE, Access.read)
            backend.set_access(at, PAGE, Access.none)
            with refused(backend, InvalidState):
                backend.populate(at, PAGE)  # nothing to fill in: not accessible
            backend.set_access(at, PAGE, Access.read)
            assert peek(backend, at) == {9}
            backend.set_access(at, PAGE, Access.read_write)


def test_populate_never_changes_bytes(backend: Any) -> None:
    with pages(backend, 2) as handles, shown(backend, handles) as at:
        poke(backend, at, 3)
        poke(backend, at + PAGE, 4)
        backend.populate(at, 2 * PAGE)
        assert peek(backend, at) == {3} and peek(backend, at + PAGE) == {4}
    with region(backend, 1) as at, refused(backend, InvalidState):
        backend.populate(at, PAGE)


def test_exchange_swaps_what_stands_behind_two_ranges(backend: Any) -> None:
    if not backend.can_exchange:
        with pages(backend, 2) as handles, shown(backend, handles) as at:
            poke(backend, at, 1)
            poke(backend, at + PAGE, 2)
            with refused(backend, InvalidState):
                backend.exchange(at, at + PAGE, PAGE)
            assert [peek(backend, at), peek(backend, at + PAGE)] == [{1}, {2}]
        return
    with pages(backend, 4) as handles, region(backend, 6) as at:
        one, other = at, at + 3 * PAGE
        order = [handles[2], handles[0]]
        with shown(backend, handles[:2], one), shown(backend, order, other), shown(backend, handles) as whole:
            for index in range(4):
                poke(backend, whole + index * PAGE, index + 1)
            for _ in range(3):
                backend.exchange(one, other, 2 * PAGE)
            places = (one, one + PAGE, other, other + PAGE)
            assert [peek(backend, place) for place in places] == [{3}, {1}, {1}, {2}]
            poke(backend, one, 0x55)  # writable, and the page's bytes
            assert peek(backend, whole + 2 * PAGE) == {0x55}
            with refused(backend, InvalidArgument):
                backend.exchange(one, one, 2 * PAGE)
            with refused(backend, InvalidState):
                backend.exchange(one, other, 3 * PAGE)
            assert [peek(backend, one), peek(backend, other)] == [{0x55}, {1}]


# -- host memory -----------------------------------------------------------------------------------------------------


def test_host_memory_is_writable_counted_and_given_back_whole(backend: Any) -> None:
    at = backend.allocate_host(100_000)
    poke_host(at, 5, 100_000)
    assert peek_host(at, 100_000) == {5}
    assert backend.usage()["host_bytes"] == 100_000
    for place, bytes_ in ((at, 99_999), (at + 1, 100_000)):
        with refused(backend, InvalidArgument):
            backend.free_host(place, bytes_)
    with refused(backend, InvalidArgument):
        backend.unregister_host(at, 100_000)
    with refused(backend, InvalidState):
        backend.register_host(at + 10, 10)
    backend.free_host(at, 100_000)
    with refused(backend, InvalidArgument):
        backend.free_host(at, 100_000)
    with refused(backend, InvalidArgument):
        backend.allocate_host(0)


def test_registered_memory_is_the_callers(backend: Any) -> None:
    own = ctypes.create_string_buffer(b"\x07" * 5000, 5000)
    at = ctypes.addressof(own)
    backend.register_host(at, 5000)
    assert backend.usage()["host_bytes"] == 5000
    for place, bytes_ in ((at, 5000), (at + 100, 10), (at - 10, 20)):
        with refused(backend, InvalidState):
            backend.register_host(place, bytes_)
    with refused(backend, InvalidArgument):
        backend.free_host(at, 5000)
    backend.unregister_host(at, 5000)
    with refused(backend, InvalidArgument):
        backend.unregister_host(at, 5000)
    assert set(own.raw) == {7}
