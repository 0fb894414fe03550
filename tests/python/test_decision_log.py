"""What the logger `remap.decisions` says: layers that leave and come home, and demand that is not met, now and then."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from arena_worlds import PAGE, forward, make_layers, make_spec

import remap
from remap import Demand
from remap.memory.observe import AGAIN_S


def lines(caplog: Any) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == "remap.decisions"]
    caplog.clear()
    return found


def test_layers_that_leave_and_come_home_and_demand_that_is_not_met(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    with remap.Session(48 * PAGE, page_bytes=PAGE) as session, caplog.at_level(logging.INFO, logger="remap.decisions"):
        layers = make_layers([2] * 6)
        tenant = session.attach_bytes(layers, name="m", kv=make_spec(6, max_blocks=160))
        monkeypatch.setattr(session._log, "_clock", lambda: now[0])
        forward(session, tenant, layers)
        remap.advanced.remap(session, "m", 2, 2)
        (left,) = lines(caplog)
        assert left.startswith("m: 2 of 6 layers are away, 0 before; ") and "2 layers by hand" in left
        remap.advanced.remap(session, "m", 2, 2)
        assert not lines(caplog)
        remap.advanced.remap(session, "m", 0)
        (home,) = lines(caplog)
        assert home.startswith("m: 0 of 6 layers are away, 2 before; ")
        while session.step({"m": Demand(10_000)}).changed:  # what it can take first
            now[0] += AGAIN_S
        caplog.clear()
        now[0] += AGAIN_S
        spoken = []
        for seconds in (0.0, AGAIN_S / 2, AGAIN_S / 2, AGAIN_S):
            now[0] += seconds
            unmet = session.step({"m": Demand(10_000)}).unmet_blocks["m"]
            spoken.append([line for line in lines(caplog) if line.startswith(f"m: {unmet} blocks short: ")])
        assert [len(each) for each in spoken] == [1, 0, 1, 1]
