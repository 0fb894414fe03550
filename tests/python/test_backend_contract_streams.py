"""The backend contract (include/remap/backend.h), one conformance suite over every backend: streams and events.

Each precondition is broken once: the typed error comes and nothing has changed (usage() is equal). Each postcondition is
looked at through memory. Every test leaves the backend with nothing in it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from contract import (
    ON_GPU,
    PAGE,
    WAIT_S,
    Access,
    finished,
    host_memory,
    pages,
    peek,
    peek_host,
    poke,
    poke_host,
    read,
    refused,
    region,
    shown,
    stream_and_event,
)

from remap.errors import DriverError, InvalidArgument, InvalidState

# -- streams and events ----------------------------------------------------------------------------------------------


def test_work_on_one_stream_runs_in_order(backend: Any) -> None:
    with pages(backend, 1) as handles, shown(backend, handles) as at, stream_and_event(backend) as (stream, event):
        host_at = backend.allocate_host(PAGE)
        poke_host(host_at, 1)
        for round_ in range(50):
            backend.fill(stream, at, round_, PAGE)
            backend.copy(stream, at, host_at, PAGE // 2)
            backend.copy(stream, host_at + PAGE // 2, at + PAGE // 2, PAGE // 2)
        backend.record(event, stream)
        finished(backend, event)
        assert peek(backend, at, PAGE // 2) == {1} and peek(backend, at + PAGE // 2, PAGE // 2) == {49}
        assert peek_host(host_at + PAGE // 2, PAGE // 2) == {49}
        backend.free_host(host_at, PAGE)


def test_copies_of_odd_sizes_touch_exactly_their_bytes(backend: Any) -> None:
    with pages(backend, 2) as handles, shown(backend, handles) as at, stream_and_event(backend) as (stream, event):
        source = ctypes.create_string_buffer(bytes(range(256)) * (PAGE // 128))
        for offset, count in ((0, 0), (1, 1), (3, 63), (64, 4097), (5, PAGE + 17)):
            poke(backend, at, 0xEE, 2 * PAGE)
            backend.copy(stream, at + offset, ctypes.addressof(source) + 1, count)
            backend.record(event, stream)
            finished(backend, event)
            got = read(backend, at, 2 * PAGE)
            assert got[offset : offset + count] == source.raw[1 : 1 + count]
            assert set(got[:offset] + got[offset + count :]) == {0xEE}


def test_a_stream_waits_for_another_streams_event(backend: Any) -> None:
    with (
        pages(backend, 1) as handles,
        shown(backend, handles) as at,
        stream_and_event(backend) as (first, done),
        stream_and_event(backend) as (second, end),
    ):
        for round_ in range(20):
            for value in range(64):  # long enough for the second stream to overtake, if it could
                backend.fill(first, at, value, PAGE)
            backend.fill(first, at, 100 + round_, PAGE)
            backend.record(done, first)
            backend.stream_wait(second, done)
            source = backend.allocate_host(PAGE)
            backend.copy(second, source, at, PAGE)
            backend.record(end, second)
            finished(backend, end)
            assert peek_host(source) == {100 + round_}
            backend.free_host(source, PAGE)


def test_an_event_never_recorded_counts_as_complete(backend: Any) -> None:
    with stream_and_event(backend) as (stream, event):
        assert backend.query(event) is True
        assert backend.synchronize(event, 0.0) is True
        backend.stream_wait(stream, event)
        with refused(backend, InvalidState):
            backend.elapsed(event, event)


AMOUNTS = (20, 200, 2000)
"""Fills of 32 MiB: more where this process was kept waiting for so long that fewer were over when it looked."""


def fill(backend: Any, stream: int, memory: int, count: int) -> None:
    for _ in range(count):
        backend.fill(stream, memory, 1, 32 << 20)


def has_elapsed(backend: Any, start: int, end: int) -> bool:
    try:
        backend.elapsed(start, end)
    except InvalidState:
        return False
    return True


def test_timeouts_end_a_wait_and_a_later_wait_succeeds(backend: Any) -> None:
    with stream_and_event(backend) as (slow, event), stream_and_event(backend) as (waiting, end):
        memory = backend.allocate_host(32 << 20)
        for fills in AMOUNTS:
            fill(backend, slow, memory, fills)
            backend.record(event, slow)
            backend.stream_wait(waiting, event)
            backend.record(end, waiting)
            seen = (backend.synchronize(end, 0.0), backend.query(end), has_elapsed(backend, event, end))
            if not backend.query(end):  # so nothing of this was over when it was asked
                break
        assert seen == (False, False, False)
        finished(backend, end)
        assert backend.query(end) is True and backend.query(event) is True
        assert backend.elapsed(event, end) >= 0.0
        backend.free_host(memory, 32 << 20)


def test_recording_again_starts_an_event_anew(backend: Any) -> None:
    with stream_and_event(backend) as (stream, event), stream_and_event(backend) as (_, start):
        memory = backend.allocate_host(32 << 20)
        backend.record(event, stream)
        finished(backend, event)
        backend.record(start, stream)
        for fills in AMOUNTS:
            fill(backend, stream, memory, fills)
            backend.record(event, stream)
            over = backend.query(event)
            if not over:
                break
        assert over is False
        finished(backend, event)
        assert backend.elapsed(start, event) > 0.0
        assert backend.elapsed(event, start) < 0.0
        backend.free_host(memory, 32 << 20)


def test_destroying_an_event_leaves_its_work_going_and_destroying_a_stream_waits_for_it(backend: Any) -> None:
    memory = backend.allocate_host(32 << 20)
    stream, event = backend.create_stream(), backend.create_event()
    for value in range(8):
        backend.fill(stream, memory, value, 32 << 20)
    backend.record(event, stream)
    backend.destroy_event(event)
    backend.destroy_stream(stream)
    assert peek_host(memory, 4096) == {7} and peek_host(memory + (32 << 20) - 4096, 4096) == {7}
    backend.free_host(memory, 32 << 20)


def test_unknown_streams_and_events_are_refused(backend: Any) -> None:
    with stream_and_event(backend) as (stream, event):
        own = ctypes.create_string_buffer(8)
        at = ctypes.addressof(own)
        for call in (
            lambda: backend.copy(0, at, at, 4),
            lambda: backend.fill(987654, at, 0, 4),
            lambda: backend.record(event, 987654),
            lambda: backend.record(987654, stream),
            lambda: backend.stream_wait(stream, 987654),
            lambda: backend.stream_wait(987654, event),
            lambda: backend.query(0),
            lambda: backend.synchronize(987654, 0.0),
            lambda: backend.elapsed(event, 987654),
            lambda: backend.destroy_stream(0),
            lambda: backend.destroy_event(0),
            lambda: backend.copy(stream, 0, at, 4),
            lambda: backend.fill(stream, 0, 0, 4),
        ):
            with refused(backend, InvalidArgument):
                call()


def test_a_device_is_not_sent_where_nothing_is_accessible(backend: Any) -> None:
    """It would lose its context there. On the host the copying thread would fault: the caller keeps them apart."""
    if backend.device_kind != "cuda":
        return
    with (
        pages(backend, 1) as handles,
        region(backend, 2) as at,
        shown(backend, handles, at),
        host_memory(backend, PAGE) as own,
        stream_and_event(backend) as (stream, _),
    ):
        for place in (at + PAGE, at + PAGE // 2):  # nothing is mapped there, or in its second half
            for call in (
                lambda: backend.copy(stream, place, own, PAGE),  # noqa: B023  called at once
                lambda: backend.copy(stream, own, place, PAGE),  # noqa: B023
                lambda: backend.fill(stream, place, 0, PAGE),  # noqa: B023
            ):
                with refused(backend, InvalidState):
                    call()
        backend.set_access(at, PAGE, Access.read)
        with refused(backend, InvalidState):
            backend.copy(stream, at, own, PAGE)
        backend.copy(stream, own, at, PAGE)


def test_errors_carry_numbers(backend: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        backend.reserve(PAGE, 3 * PAGE)
    assert caught.value.alignment == 3 * PAGE
    with pages(backend, 1) as handles, shown(backend, handles):
        with pytest.raises(InvalidState) as busy:
            backend.destroy_page(handles[0])
        assert busy.value.mapped == 1 and busy.value.page == handles[0]


def test_a_copy_that_fails_while_it_runs_reaches_every_waiter(backend: Any) -> None:
    """Only the fault decorator can make one fail; the others have nothing to show here."""
    if not hasattr(backend, "fail_async_copy"):
        return
    with stream_and_event(backend) as (failing, event), stream_and_event(backend) as (waiting, end):
        memory = backend.allocate_host(3 * PAGE)
        poke_host(memory, 1, PAGE)
        poke_host(memory + PAGE, 0, 2 * PAGE)
        backend.record(event, failing)  # recorded before: stays good
        backend.fail_async_copy(1)
        backend.copy(failing, memory + PAGE, memory, PAGE)
        backend.copy(failing, memory + 2 * PAGE, memory, PAGE)
        finished(backend, event)
        backend.record(event, failing)
        backend.stream_wait(waiting, event)
        backend.record(end, waiting)
        for late in (event, end):
            with pytest.raises(DriverError):
                backend.synchronize(late, WAIT_S)
            with pytest.raises(DriverError):
                backend.query(late)
        assert peek_host(memory + PAGE, PAGE // 2) == {1} and peek_host(memory + PAGE + PAGE // 2, PAGE // 2) == {0}
        assert peek_host(memory + 2 * PAGE) == {0}
        backend.free_host(memory, 3 * PAGE)


# -- streams of the caller's -----------------------------------------------------------------------------------------


def test_the_callers_streams_are_used_in_order_and_stay_the_callers(backend: Any) -> None:
    if backend.device_kind != "cuda":
        with refused(
            backend, InvalidArgument
        ):  # computations are the calling thread's: there are no streams but its own
            backend.adopt_stream(1)
        with refused(backend, InvalidArgument):
            backend.forget_stream(1)
        return
    legacy, per_thread = 1, 2
    before = backend.usage()
    with refused(backend, InvalidArgument):
        backend.adopt_stream(0)
    assert [backend.adopt_stream(native) for native in (legacy, per_thread, legacy)] == [legacy, per_thread, legacy]
    assert backend.usage() == before  # they do not count
    with (
        pages(backend, 1) as handles,
        shown(backend, handles) as at,
        stream_and_event(backend) as (own, event),
        host_memory(backend, PAGE) as to,
    ):
        for round_ in range(10):
            backend.fill(per_thread, at, round_, PAGE)
            backend.record(event, per_thread)
            backend.stream_wait(legacy, event)
            backend.copy(legacy, to, at, PAGE)
            backend.record(event, legacy)
            backend.stream_wait(own, event)
            backend.fill(own, at, 0xFF, PAGE)
            backend.record(event, own)
            finished(backend, event)
            assert peek_host(to) == {round_}
        with refused(backend, InvalidArgument):
            backend.destroy_stream(legacy)
        with refused(backend, InvalidArgument):
            backend.forget_stream(own)
        for native in (legacy, per_thread):
            backend.forget_stream(native)
            for call in (
                lambda: backend.fill(native, at, 0, PAGE),  # noqa: B023  called at once
                lambda: backend.record(event, native),  # noqa: B023
                lambda: backend.stream_wait(native, event),  # noqa: B023
                lambda: backend.forget_stream(native),  # noqa: B023
            ):
                with refused(backend, InvalidArgument):
                    call()
        with refused(backend, InvalidArgument):
            backend.adopt_stream(own)


def test_what_is_no_stream_is_not_adopted(backend: Any) -> None:
    if ON_GPU:
        return  # a driver may crash on a pointer that never was a stream
    with refused(backend, InvalidArgument):
        backend.adopt_stream(0x1230)
