"""`remap doctor --vllm` in an environment where vLLM can be entered, and where a part of it is missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from remap.adapters import touched
from remap.adapters.touched import Touched, unlike
from remap.adapters.vllm import engine_internals
from remap.cli import doctor_vllm
from remap.errors import InvalidState


def levels() -> dict[str, str]:
    return {check.what: check.level for check in doctor_vllm.checks()}


def test_this_vllm_can_be_entered():
    found = levels()
    assert set(found.values()) <= {"ok", "note"}
    assert found["vllm"] == found["entry points"] == found["what the adapter touches"] == found["how to enter"] == "ok"


@pytest.mark.parametrize(
    ("there", "command"), [(True, "vllm serve MODEL"), (False, "python -m vllm.entrypoints.openai")]
)
def test_the_command_is_one_that_starts(monkeypatch: pytest.MonkeyPatch, there: bool, command: str):
    def version(name: str) -> str:
        if not there:
            raise PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(doctor_vllm, "version", version)
    (said,) = (check.found for check in doctor_vllm.checks() if check.what == "how to enter")
    assert said.startswith(f"REMAP_ENABLE=1 {command}")


@pytest.mark.parametrize("version", ["0.30.2", "strange"])
def test_an_older_version_cannot(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(engine_internals, "installed_version", lambda: version)
    (check,) = doctor_vllm.checks()
    assert check.level == "bad"
    assert version in check.found


def test_a_newer_version_in_which_all_is_as_expected_can_and_is_warned_of_once(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(engine_internals, "installed_version", lambda: "0.99.1")
    monkeypatch.setattr(engine_internals.logger, "warning", said.append)
    monkeypatch.setattr(touched, "_warned", set())
    engine_internals.check_version()
    engine_internals.check_version()
    assert len(said) == 1 and "0.99.1" in said[0]
    found = levels()
    assert found["vllm"] == "note" and found["how to enter"] == "ok"


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("BlockPool.not_there", None),
        ("BlockPool._maybe_evict_cached_block", "self block other"),  # we would give one more than it takes
        ("BlockPool._insert_block_hash", "self block_hash_with_group_id"),  # it needs more than we would give
        ("BlockPool._insert_block_hash", "self block_hash_with_group_id block tokens="),
    ],
)
def test_what_is_not_as_expected_is_named_and_refused(monkeypatch: pytest.MonkeyPatch, name: str, takes: str | None):
    wrong = Touched("vllm.v1.core.block_pool", name, takes)
    monkeypatch.setattr(engine_internals, "TOUCHED", (*engine_internals.TOUCHED, wrong))
    *_, last = doctor_vllm.checks()
    assert last.level == "bad"
    assert f"vllm.v1.core.block_pool:{name}" in last.found
    engine_internals.check_version()  # a version that the suite has passed on
    monkeypatch.setattr(engine_internals, "installed_version", lambda: "0.99.1")
    monkeypatch.setattr(touched, "_warned", set())
    with pytest.raises(InvalidState) as refusal:
        engine_internals.check_version()
    assert (refusal.value.version, refusal.value.tested) == ("0.99.1", engine_internals.TESTED)
    assert len(refusal.value.unlike) == 1


def test_a_module_that_is_gone_is_named():
    (text,) = unlike([Touched("vllm.not_there", "anything")])
    assert text.startswith("vllm.not_there:anything")
