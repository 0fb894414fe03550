"""The backend contract (include/remap/backend.h), one conformance suite over every backend: streams and events.

Each precondition is broken once: the typed error comes and nothing has changed (usage() is equal). Each postcondition is
looked at through memory. Every test leaves the backend with nothing in it.
"""

from __future__ import annotations

import ctypes
from typing import Any

from contract import (
    ON_GPU,
    PAGE,
    WAIT_S,
    Access,
    finished,
    host_memory,
    peek,
    peek_host,
    poke,
    poke_host,
    read,
    refuses,
    region,
    stream_and_event,
    written,
)

from remap.errors import DriverError, InvalidArgument, InvalidState

MUCH = 32 << 20
AMOUNTS = (20, 200, 2000)
"""Fills of 32 MiB: more where this process was kept waiting for so long that fewer were over when it looked."""


def test_work_on_one_stream_runs_in_order(backend: Any) -> None:
    half = PAGE // 2
    with (
        written(backend, 1) as (_, at),
        stream_and_event(backend) as (stream, event),
        host_memory(backend, PAGE) as own,
    ):
        poke_host(own, 1)
        for round_ in range(50):
            backend.fill(stream, at, round_, PAGE)
            backend.copy(stream, at, own, half)
            backend.copy(stream, own + half, at + half, half)
        finished(backend, event, stream)
        assert [peek(backend, at, half), peek(backend, at + half, half)] == [{1}, {49}]
        assert peek_host(own + half, half) == {49}


def test_copies_of_odd_sizes_touch_exactly_their_bytes(backend: Any) -> None:
    with written(backend, 2) as (_, at), stream_and_event(backend) as (stream, event):
        source = ctypes.create_string_buffer(bytes(range(256)) * (PAGE // 128))
        for offset, count in ((0, 0), (1, 1), (3, 63), (64, 4097), (5, PAGE + 17)):
            poke(backend, at, 0xEE, 2 * PAGE)
            backend.copy(stream, at + offset, ctypes.addressof(source) + 1, count)
            finished(backend, event, stream)
            got = read(backend, at, 2 * PAGE)
            assert got[offset : offset + count] == source.raw[1 : 1 + count]
            assert set(got[:offset] + got[offset + count :]) == {0xEE}


def test_a_stream_waits_for_another_streams_event(backend: Any) -> None:
    with (
        written(backend, 1) as (_, at),
        stream_and_event(backend) as (first, done),
        stream_and_event(backend) as (second, end),
        host_memory(backend, PAGE) as to,
    ):
        for round_ in range(20):
            for value in range(64):  # long enough for the second stream to overtake, if it could
                backend.fill(first, at, value, PAGE)
            backend.fill(first, at, 100 + round_, PAGE)
            backend.record(done, first)
            backend.stream_wait(second, done)
            backend.copy(second, to, at, PAGE)
            finished(backend, end, second)
            assert peek_host(to) == {100 + round_}


def test_a_batch_of_copies_is_one_piece_of_its_streams_work(backend: Any) -> None:
    count, size = 700, 24
    with (
        written(backend, 8) as (_, at),
        host_memory(backend, 2 * count * size) as memory,
        stream_and_event(backend) as (stream, event),
    ):
        for index in range(count):
            poke_host(memory + index * size, index % 250 + 1, size)
        out = memory + count * size
        inward = [(at + 40 * index, memory + index * size, size) for index in range(count)]
        outward = [(out + (count - 1 - index) * size, at + 40 * index, size) for index in range(count)]
        backend.copy_batch(stream, [*inward, (at + 40 * count, memory, 0)])
        backend.fill(stream, at, 0xFF, 40)  # behind all of it
        backend.copy_batch(stream, outward)
        backend.copy_batch(stream, [])
        finished(backend, event, stream)
        for index in range(1, count):
            assert peek_host(out + (count - 1 - index) * size, size) == {index % 250 + 1}
        assert peek_host(out + (count - 1) * size, size) == {0xFF}


def test_an_event_never_recorded_counts_as_complete(backend: Any) -> None:
    with stream_and_event(backend) as (stream, event):
        assert backend.query(event) is True
        assert backend.synchronize(event, 0.0) is True
        backend.stream_wait(stream, event)
        refuses(backend, InvalidState, "elapsed", (event, event))


def test_timeouts_end_a_wait_and_recording_again_starts_an_event_anew(backend: Any) -> None:
    with (
        stream_and_event(backend) as (slow, event),
        stream_and_event(backend) as (waiting, end),
        stream_and_event(backend) as (_, start),
        host_memory(backend, MUCH) as memory,
    ):
        for early in (event, start):
            finished(backend, early, slow)
        for fills in AMOUNTS:
            for _ in range(fills):
                backend.fill(slow, memory, 1, MUCH)
            backend.record(event, slow)
            backend.stream_wait(waiting, event)
            backend.record(end, waiting)
            seen = (backend.synchronize(end, 0.0), backend.query(event))
            if not backend.query(event):  # so nothing of this was over when it was asked
                break
        assert seen == (False, False)
        finished(backend, end)
        assert backend.query(end) is True and backend.query(event) is True
        assert backend.elapsed(event, end) >= 0.0
        assert backend.elapsed(start, event) > 0.0 > backend.elapsed(event, start)


def test_destroying_an_event_leaves_its_work_going_and_destroying_a_stream_waits_for_it(backend: Any) -> None:
    with host_memory(backend, MUCH) as memory:
        with stream_and_event(backend) as (stream, _):
            for value in range(8):
                backend.fill(stream, memory, value, MUCH)
            gone = backend.create_event()
            backend.record(gone, stream)
            backend.destroy_event(gone)
        assert peek_host(memory, 4096) == peek_host(memory + MUCH - 4096, 4096) == {7}


def test_unknown_streams_and_events_are_refused(backend: Any) -> None:
    with stream_and_event(backend) as (stream, event):
        own = ctypes.create_string_buffer(8)
        at, unknown = ctypes.addressof(own), 987654
        for call, *arguments in (
            ("copy", (0, at, at, 4), (stream, 0, at, 4)),
            ("copy_batch", (0, [(at, at, 4)]), (stream, [(at, at + 4, 4), (at, 0, 4)]), (stream, [(0, at, 4)])),
            ("fill", (unknown, at, 0, 4), (stream, 0, 0, 4)),
            ("record", (event, unknown), (unknown, stream)),
            ("stream_wait", (stream, unknown), (unknown, event)),
            ("query", (0,)),
            ("synchronize", (unknown, 0.0)),
            ("elapsed", (event, unknown)),
            ("destroy_stream", (0,)),
            ("destroy_event", (0,)),
        ):
            refuses(backend, InvalidArgument, call, *arguments)


def test_a_device_is_not_sent_where_nothing_is_accessible(backend: Any) -> None:
    """It would lose its context there. On the host the copying thread would fault: the caller keeps them apart."""
    if backend.device_kind != "cuda":
        return
    with (
        region(backend, 2) as at,
        written(backend, 1, where=at),
        host_memory(backend, PAGE) as own,
        stream_and_event(backend) as (stream, _),
    ):
        for place in (at + PAGE, at + PAGE // 2):  # nothing is mapped there, or in its second half
            refuses(backend, InvalidState, "copy", (stream, place, own, PAGE), (stream, own, place, PAGE))
            refuses(backend, InvalidState, "fill", (stream, place, 0, PAGE))
            refuses(backend, InvalidState, "copy_batch", (stream, [(at, own, PAGE), (place, own, PAGE)]))
        backend.set_access(at, PAGE, Access.read)
        refuses(backend, InvalidState, "copy", (stream, at, own, PAGE))
        backend.copy(stream, own, at, PAGE)


def test_a_copy_that_fails_while_it_runs_reaches_every_waiter(backend: Any) -> None:
    """Only the fault decorator can make one fail; the others have nothing to show here."""
    if not hasattr(backend, "fail_async_copy"):
        return
    with (
        stream_and_event(backend) as (failing, event),
        stream_and_event(backend) as (waiting, end),
        host_memory(backend, 3 * PAGE) as memory,
    ):
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
            refuses(backend, DriverError, "synchronize", (late, WAIT_S))
            refuses(backend, DriverError, "query", (late,))
        # The first half of the copy that failed, and nothing behind it.
        assert [peek_host(memory + part * (PAGE // 2), PAGE // 2) for part in range(2, 6)] == [{1}, {0}, {0}, {0}]


# -- streams of the caller's -----------------------------------------------------------------------------------------


def test_the_callers_streams_are_used_in_order_and_stay_the_callers(backend: Any) -> None:
    if not ON_GPU:  # a driver may crash on a pointer that never was a stream
        refuses(backend, InvalidArgument, "adopt_stream", (0x1230,))
    if backend.device_kind != "cuda":  # computations are the calling thread's: there are no streams but its own
        refuses(backend, InvalidArgument, "adopt_stream", (1,))
        refuses(backend, InvalidArgument, "forget_stream", (1,))
        return
    legacy, per_thread = 1, 2
    before = backend.usage()
    assert [backend.adopt_stream(native) for native in (legacy, per_thread, legacy)] == [legacy, per_thread, legacy]
    assert backend.usage() == before  # they do not count
    with written(backend, 1) as (_, at), stream_and_event(backend) as (own, event), host_memory(backend, PAGE) as to:
        for round_ in range(10):
            backend.fill(per_thread, at, round_, PAGE)
            backend.record(event, per_thread)
            backend.stream_wait(legacy, event)
            backend.copy(legacy, to, at, PAGE)
            backend.record(event, legacy)
            backend.stream_wait(own, event)
            backend.fill(own, at, 0xFF, PAGE)
            finished(backend, event, own)
            assert peek_host(to) == {round_}
        refuses(backend, InvalidArgument, "destroy_stream", (legacy,))
        backend.forget_stream(legacy)  # it was adopted twice
        backend.fill(legacy, at, 0, PAGE)
        finished(backend, event, legacy)
        for native in (legacy, per_thread):
            backend.forget_stream(native)
            refuses(backend, InvalidArgument, "fill", (native, at, 0, PAGE))
        refuses(backend, InvalidArgument, "forget_stream", (own,), (legacy,), (per_thread,))
        refuses(backend, InvalidArgument, "adopt_stream", (0,), (own,))
