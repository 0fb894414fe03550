"""Versions of an engine: which are served, which with a warning, which are refused, and what is said."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest

from remap.adapters import touched
from remap.adapters.touched import Touched, admit, known, unlike
from remap.errors import InvalidState


class Engine:
    """What an adapter may touch."""

    def move(self, block: int, *, tokens: int, again: bool = False) -> None: ...
    @functools.wraps(move)
    def wrapped(self, *args: Any, **kwargs: Any) -> None: ...


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


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("Engine.move", "self block"),  # tokens is needed too
        ("Engine.move", "self page tokens="),
        ("Engine.move", "self block tokens= more="),
        ("Engine.gone", None),
        ("Fields.gone", None),
        ("Gone.move", None),
    ],
)
def test_what_does_not(name: str, takes: str | None):
    (text,) = unlike([of(name, takes)])
    assert text.startswith(f"{__name__}:{name}")


@pytest.mark.parametrize(
    ("version", "tested", "is_known"),
    [
        ("0.32.0", ("0.31", "0.32"), True),
        ("0.31", ("0.31", "0.32"), True),
        ("0.32.5.dev3+gabc", ("0.31", "0.32"), True),
        ("0.33.0", ("0.31", "0.32"), False),
        ("0.4.0", ("0.31", "0.32"), False),
        ("5.19.0", ("5.16", "5.23"), True),
        ("0.5.23", ("0.5.23",), True),
        ("0.5.24", ("0.5.23",), False),
        ("main", ("0.5.23",), False),
        (None, ("0.5.23",), False),
    ],
)
def test_known(version: str | None, tested: tuple[str, ...], is_known: bool):
    assert known(version, tested) is is_known


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


@pytest.mark.parametrize("which", ["transformers", "continuous_batching"])
def test_transformers_is_as_expected(which: str):
    """What is looked at in a version newer than the tested ones is there in this one."""
    pytest.importorskip("transformers")
    from remap.adapters import continuous_batching, transformers

    assert unlike({"transformers": transformers, "continuous_batching": continuous_batching}[which].TOUCHED) == []
