"""Versions of an engine: which are served, which with a warning, which are refused, and what is said."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest

from remap.adapters import touched
from remap.adapters.touched import Touched, admit, known, prove, unlike
from remap.errors import InvalidState


class Engine:
    """What an adapter may touch."""

    def move(self, block: int, *, tokens: int, again: bool = False) -> None: ...
    @functools.wraps(move)
    def wrapped(self, *args: Any, **kwargs: Any) -> None: ...


class Parts(Engine):
    """Instances have more than their class."""

    declared: int

    def __init__(self) -> None:
        self.parts, self.size = [1], 2
        self.kept: int = self.read_only.there


class More(Parts):
    pass


@dataclass
class Fields:
    size: int


def of(name: str, takes: str | None = None) -> Touched:
    return Touched(__name__, name, takes)


@pytest.mark.parametrize(
    "takes", ["self block tokens=", "self block tokens= again=", "self tokens= *", "self block *", None]
)
@pytest.mark.parametrize("name", ["Engine.move", "Engine.wrapped"])
def test_what_takes_what_it_is_given(name: str, takes: str | None):
    assert unlike([of(name, takes), of("Fields.size"), of("Engine")]) == []
    assert unlike([of(f"More.{each}") for each in ("declared", "parts", "size", "kept", "move")]) == []


@pytest.mark.parametrize("takes", ["self block", "self page tokens=", "self block tokens= more="])
def test_what_does_not(takes: str):  # tokens is needed; there is no page; no more
    gone = [of("Engine.gone"), of("Fields.gone"), of("Gone.move"), of("More.gone"), of("More.read_only")]
    found = unlike([of("Engine.move", takes), *gone])
    names = ["Engine.move", *(each.name for each in gone)]
    assert all(text.startswith(f"{__name__}:{name}") for text, name in zip(found, names, strict=True))


def test_known():
    """Up to the newest one's last number; what is no version, and what lies between single ones, is not."""
    served = {
        ("0.31", "0.32"): ["0.32.0", "0.31", "0.32.5.dev3+gabc"],
        ("5.16", "5.23"): ["5.19.0"],
        ("0.5.23",): ["0.5.23"],
    }
    other = {("0.31", "0.32"): ["0.33.0", "0.4.0"], ("0.5.23",): ["0.5.24", "main", None]}
    assert all(known(version, tested) is True for tested, versions in served.items() for version in versions)
    assert all(known(version, tested) is False for tested, versions in other.items() for version in versions)


@pytest.mark.parametrize("version", [None, "main", "0.30.9", "0.4"])
def test_an_older_one_or_none_is_refused(version: str | None):
    with pytest.raises(InvalidState) as refusal:
        admit("engine", version, ("0.31", "0.32"), [], pytest.fail, "install it")
    assert (refusal.value.version, refusal.value.tested) == (version, ("0.31", "0.32"))


def test_a_newer_one_is_warned_of_once_or_refused_with_what_is_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(touched, "_warned", set())
    said: list[str] = []
    for _ in range(2):
        admit("engine", "0.33.1", ("0.31", "0.32"), [of("Engine.move")], said.append, "install it")
    assert len(said) == 1 and "0.33.1" in said[0]
    with pytest.raises(InvalidState) as refusal:
        admit("engine", "0.34", ("0.31", "0.32"), [of("Engine.move"), of("Engine.gone")], said.append, "install it")
    assert len(refusal.value.unlike) == 1 and len(said) == 1


def trial(end: str | BaseException, version: str) -> tuple[list[str], Any]:
    """What was done of a trial that ends so, and what it raised."""
    done: list[str] = []

    def run() -> str:
        done.append("run")
        if isinstance(end, BaseException):
            raise end
        return end

    try:
        prove("engine", version, ("0.31", "0.32"), run, lambda: done.append("undone"), "install it")
    except (InvalidState, KeyboardInterrupt) as raised:
        return done, raised
    return done, None


def test_a_trial_is_made_with_newer_versions_only_and_undone_unless_nothing_differs():
    assert trial("all", "0.32.4") == ([], None)
    assert trial("", "0.33") == (["run"], None)
    for end in ("logits", ZeroDivisionError("logits")):
        done, refusal = trial(end, "0.33.1")
        assert done == ["run", "undone"] and refusal.differed
        assert (refusal.version, refusal.tested) == ("0.33.1", ("0.31", "0.32"))
        assert refusal.__cause__ is (end if isinstance(end, Exception) else None)
    stop = KeyboardInterrupt()
    assert trial(stop, "0.33.1") == (["run", "undone"], stop)


@pytest.mark.parametrize("which", ["transformers", "continuous_batching"])
def test_transformers_is_as_expected(which: str):
    """What is looked at in a version newer than the tested ones is there in this one."""
    pytest.importorskip("transformers")
    from remap.adapters import continuous_batching, transformers

    assert unlike({"transformers": transformers, "continuous_batching": continuous_batching}[which].TOUCHED) == []
