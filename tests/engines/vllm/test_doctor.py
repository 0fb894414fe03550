"""`remap doctor --vllm` in an environment where vLLM can be entered, and where a part of it is missing."""

from __future__ import annotations

import pytest

from remap.adapters.vllm import internals
from remap.cli import doctor_vllm


def levels() -> dict[str, str]:
    return {finding.what: finding.level for finding in doctor_vllm.findings()}


def test_this_vllm_can_be_entered():
    found = levels()
    assert set(found.values()) <= {"ok", "note"}
    assert found["vllm"] == found["entry points"] == found["what the adapter touches"] == found["how to enter"] == "ok"


def test_another_version_cannot(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(internals, "installed_version", lambda: "0.99.1")
    (finding,) = doctor_vllm.findings()
    assert finding.level == "bad"
    assert "0.99.1" in finding.found


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(internals, "TOUCHED", (*internals.TOUCHED, ("vllm.v1.core.block_pool", "BlockPool.not_there")))
    *_, last = doctor_vllm.findings()
    assert last.level == "bad"
    assert "vllm.v1.core.block_pool:BlockPool.not_there" in last.found
