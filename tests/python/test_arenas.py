"""Sessions that engines of one process share."""

from __future__ import annotations

import pytest
from byte_world import spec

import remap
from remap.adapters.arenas import SharedSession, hosted, shared
from remap.adapters.settings import Settings
from remap.internals import internals

SIZE = {"capacity": 4 << 20, "device": "cpu", "page_bytes": 1 << 16, "copy_chunk_bytes": 0}


def attach(arena, name):
    layers = [bytes([i + 1]) * 5000 for i in range(8)]
    return arena.session.attach_bytes(layers, name=name, kv=spec())


def test_the_first_opens_and_the_last_closes():
    arena = shared("test_arenas")
    assert shared("test_arenas") is arena and arena.page_bytes is None
    first = arena.enter(**SIZE)
    assert arena.page_bytes == SIZE["page_bytes"]  # for those who come without a wish
    assert arena.enter(**SIZE) is first
    names = []
    for _ in range(3):
        names.append(arena.name_for("models/llama"))
        attach(arena, names[-1])
    assert names == ["llama", "llama-2", "llama-3"]
    arena.leave("llama")
    assert set(first.snapshot().tenants) == {"llama-2", "llama-3"}
    arena.leave("llama-2")
    assert first.closed
    with pytest.raises(remap.InvalidArgument):
        _ = arena.session
    again = arena.enter(**SIZE)
    assert again is not first
    arena.leave("nobody")
    assert again.closed


def test_the_settings_of_the_first_order_the_givers():
    """`REMAP_POLICY` once reached tenants alone, which no session asks for it."""
    arena = SharedSession()
    settings = Settings.read({"REMAP_ENABLE": "1", "REMAP_POLICY": "mru", "REMAP_MIN_IDLE": "4"}, 4 << 20)
    assert settings is not None
    session = arena.enter(**SIZE, config=settings.controller())
    assert session._offers._config.policy == "mru"
    attach(arena, "m")
    assert internals(session.tenants["m"])._state.config.min_idle == 4.0
    arena.leave("m")


def test_another_size_is_refused_and_does_not_count():
    arena = SharedSession()
    session = arena.enter(**SIZE)
    for other in ({"capacity": 8 << 20}, {"page_bytes": 1 << 17}):
        with pytest.raises(remap.InvalidArgument) as refused:
            arena.enter(**SIZE | other)
        assert refused.value.capacity == (SIZE | other)["capacity"]
    arena.leave("nobody")
    assert session.closed


def test_engines_enter_a_session_that_stays_its_owners():
    with remap.Session(SIZE["capacity"], SIZE["device"], page_bytes=SIZE["page_bytes"]) as session:
        with hosted("test_hosted", session):
            arena = shared("test_hosted")
            assert arena.page_bytes == SIZE["page_bytes"]
            assert arena.enter(**SIZE) is session
            attach(arena, "m")
            with pytest.raises(remap.InvalidState, match="another name"), hosted("test_hosted", session):
                pass
            arena.leave("m")
            assert not session.closed and not session.tenants
        assert arena.page_bytes is None
        assert arena.enter(**SIZE) is not session  # the name is free again
        arena.leave("nobody")
        with pytest.raises(remap.InvalidState, match="1 engines still use") as refused, hosted("test_hosted", session):
            arena.enter(**SIZE)
        assert refused.value.users == 1 and not session.closed
        with pytest.raises(ZeroDivisionError), hosted("test_hosted", session):
            arena.enter(**SIZE)
            1 / 0  # noqa: B018


def test_without_a_name_nothing_is_shared():
    assert shared("") is not shared("")
