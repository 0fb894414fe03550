"""Warnings about what happens at every step."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from remap.rate_limited import AGAIN_S, RateLimitedWarning


def test_what_happens_at_every_step_is_said_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [5.0]
    monkeypatch.setattr("remap.rate_limited.time", SimpleNamespace(monotonic=lambda: now[0]))
    warning = RateLimitedWarning(logging.getLogger("remap.tests"))
    for seconds in (0.0, 1.0, 1.0, AGAIN_S, 1.0):
        now[0] += seconds
        warning.warn("rank %d stays", 1)
    assert [each.getMessage() for each in caplog.records] == [
        "rank 1 stays",
        "rank 1 stays (and 2 times since this was said last)",
    ]
