"""What a tenant that serves nothing would give next is looked for while nobody asks, and only used while it still holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="messages between processes need msgspec")

import numpy as np
from arena_worlds import make_spec
from broker_member import LAYER_PAGES, LAYERS, PAGE, opened, until

import remap
from remap.broker.server import Broker
from remap.internals import internals
from remap.memory import donors

DEVICE = os.environ.get("REMAP_DEVICE") or "cpu"  # on the emulated driver as well: device_suites.txt
MANY = 12
PAGES = (LAYERS + MANY) * LAYER_PAGES + 8


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "s", PAGES * PAGE, PAGE, DEVICE) as made:
        yield made


def attach(session: remap.Session) -> remap.Tenant:
    masters = [np.full(LAYER_PAGES * PAGE, layer, dtype=np.uint8) for layer in range(MANY)]
    knobs = remap.advanced.Knobs(reserve_blocks=0, min_idle=0.0)
    tenant = session.attach_bytes(
        masters, name="giver", kv=make_spec(MANY, min_blocks=8, max_blocks=4000), config=knobs
    )
    run(tenant)
    return tenant


def run(tenant: remap.Tenant) -> None:
    with tenant.forward():
        for layer in range(MANY):
            tenant.wait(layer)
            tenant.done(layer)


def asleep(session: remap.Session) -> Any:
    """It has been prepared."""
    session.deactivate("giver")
    state = internals(session.tenants["giver"])._state
    assert session._other_processes is not None
    until(
        lambda: not session.exclusively(lambda core: core.other_processes.prepare(), claims=False),
        "it has been prepared",
    )
    assert state.answers._known.get("quotes") is not None
    return state


def give(session: remap.Session, pages: int) -> None:
    session.exclusively(lambda core: core.other_processes.give_up(pages, layers=True))


def refuse(*arguments: Any, **more: Any) -> None:
    raise AssertionError("looked for while somebody waits")


@pytest.mark.parametrize("layers", range(1, 5))
def test_an_answer_is_what_was_prepared(broker: Broker, monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    with opened(broker) as session:
        tenant = attach(session)
        state = asleep(session)
        streamed, preference = sorted(state.in_order)[-(layers + 1) :], state.pages.ring_preference
        with monkeypatch.context() as patch:
            patch.setattr(donors, "_late", refuse)
            patch.setattr(type(state), "possible", refuse)
            give(session, layers * LAYER_PAGES)
        assert list(state.streamed) == streamed, "the last layers, as without preparation"
        assert len(state.pages.lent) == layers * LAYER_PAGES
        remap.advanced.check(session)
        assert state.pages.ring_preference == preference
        assert session.activate("giver").activated
        until(lambda: session.step({"giver": 0}) is not None and not state.gone, "home")
        run(tenant)
        remap.advanced.check(session)


def test_the_next_answer_is_prepared_behind_each(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(broker) as session:
        attach(session)
        state = asleep(session)
        give(session, LAYER_PAGES)
        while session.exclusively(lambda core: core.other_processes.prepare(), claims=False):
            pass
        monkeypatch.setattr(donors, "_late", refuse)
        give(session, 2 * LAYER_PAGES)
        assert len(state.pages.lent) == 3 * LAYER_PAGES
        remap.advanced.check(session)


def test_what_was_prepared_before_a_pass_or_a_write_is_not_used(broker: Broker) -> None:
    with opened(broker) as session:
        tenant = attach(session)
        state = asleep(session)
        quotes = state.answers._known.get("quotes")
        session.activate("giver")
        run(tenant)
        session._other_processes.prepare()  # type: ignore[union-attr]
        assert state.answers._known.get("quotes") is quotes, "one that serves prepares nothing"
        session.deactivate("giver")
        until(lambda: not session.exclusively(lambda core: core.other_processes.prepare(), claims=False), "prepared")
        assert state.answers._known.get("quotes") is not quotes, (
            "a pass may have changed what its next one can wait for"
        )
        last = MANY - 1
        state.source = replace(state.source, watch=lambda layers: {last: ["weight"]} if last in layers else {})
        give(session, LAYER_PAGES)
        assert last in state.pinned and last not in state.streamed
        assert len(state.pages.lent) == LAYER_PAGES
        remap.advanced.check(session)
