"""The trace is the replay input: what a session asked of its backend can be done again, elsewhere, from a text file."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
from arena_worlds import PAGE, forward, make_layers, make_spec

import remap
from remap import _core
from remap.errors import InvalidArgument

CAPACITY = 48 * PAGE


def traced_session(mode: str) -> tuple[Any, str]:
    """A session's whole life behind a trace, and the log as text."""
    trace = _core.make_trace_backend(_core.make_host_backend(CAPACITY, PAGE, 1))
    with remap.Session(
        CAPACITY, page_bytes=PAGE, mode=mode, platform=remap.advanced.Platform(backend=trace)
    ) as session:
        layers = make_layers([2, 3, 2, 3, 1, 3])
        tenant = session.attach_bytes(layers, name="m", kv=replace(make_spec(6, max_blocks=160), host_blocks=3))
        for remapped, buffers in ((1, 1), (3, 2), (2, 1), (0, 1), (4, 1)):
            ids = tenant.kv.allocate(min(3, tenant.kv.free_blocks))
            remap.advanced.remap(session, "m", remapped, buffers)
            forward(session, tenant, layers)
            hosts = tenant.kv.host.copy_out(ids)
            tenant.kv.host.copy_in(hosts, ids)
            tenant.kv.host.free(hosts)
            tenant.kv.free(ids)
        remap.advanced.settle(session)
    del tenant, session
    gc.collect()  # the prefetcher's stream and events go with the tenant, which may be part of a cycle
    return trace, _core.serialize_trace(trace.log())


@pytest.mark.parametrize("mode", ["aliased", "strict"])
def test_a_sessions_trace_replays_on_a_fresh_backend(mode: str) -> None:
    trace, text = traced_session(mode)
    log = _core.parse_trace(text)
    fresh = _core.make_host_backend(CAPACITY, PAGE, 1)
    result = _core.replay(log, fresh)
    assert result.ok, result.message
    assert result.replayed == len(log) == trace.count()
    assert fresh.usage() == trace.usage()
    assert set(fresh.usage().values()) == {0}


@pytest.mark.parametrize(
    "line",
    [
        "teleport ok 0",
        "map ok",
        "map perhaps 0 1 1 1 pages 1",
        "map ok 0 4096 2 65536 pages 1",
        "copy_batch ok 0 7 1 pages 1 2 3",
        "copy_batch ok 0 7 1 ranges 1 2",
        "copy_batch ok 0 7 2 ranges 1 2 3",
        "unmap ok 0 1 2 3",
        "release ok x 1 2",
    ],
)
def test_a_line_that_is_no_record_is_refused_by_number(line: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        _core.parse_trace("create_event ok 1 0\n\n" + line + "\n")
    assert caught.value.line == 3


def test_a_backend_that_is_too_small_diverges_where_it_runs_out() -> None:
    _, text = traced_session("aliased")
    log = _core.parse_trace(text)
    small = _core.make_host_backend(4 * PAGE, PAGE, 1)
    result = _core.replay(log, small)
    creations = [index for index, record in enumerate(log) if record.call == _core.Call.create_page]
    assert not result.ok
    assert result.divergence == creations[4]
    assert "create_page" in result.message


def test_failed_calls_are_logged_as_failed_and_left_out() -> None:
    fault = _core.make_fault_backend(_core.make_host_backend(CAPACITY, PAGE, 1))
    trace = _core.make_trace_backend(fault)
    fault.arm(_core.Call.create_page, 3)
    with pytest.raises(remap.Error):
        remap.Session(CAPACITY, page_bytes=PAGE, platform=remap.advanced.Platform(backend=trace))
    log = trace.log()
    assert [record.failed for record in log].count(True) == 1
    fresh = _core.make_host_backend(CAPACITY, PAGE, 1)
    result = _core.replay(log, fresh)
    assert result.ok and result.replayed == len(log) - 1
    assert set(fresh.usage().values()) == set(trace.usage().values()) == {0}
