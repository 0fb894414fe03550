"""Every old name works, warns and gives what the new one gives; with the release in which they go, this fails until they do."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from typing import Any

import pytest
from arena_worlds import PAGE, make_layers, make_spec

import remap
from remap import moved
from remap.adapters.settings import Settings
from remap.advanced import internals
from remap.errors import InvalidArgument

VALUES = {"reserve_blocks": 7, "max_layers": 3, "reload_s": 0.25}
GIVEN = {"REMAP_RESERVE_BLOCKS": "7", "REMAP_RELOAD_S": "0.25"}
ON = {"REMAP_ENABLE": "1", "REMAP_CAPACITY": "1GiB"}


def test_they_go_with_the_release_that_is_named() -> None:
    def numbers(version: str) -> tuple[int, ...]:
        return tuple(int(each) for each in version.split(".")[:2])

    assert numbers(remap.__version__) < numbers(moved.GOES), "take the old names out of remap.moved, and name the next"


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_what_stood_on_a_class() -> None:
    """Each name of what is inside, asked for where it stood."""
    with remap.Session(48 * PAGE, page_bytes=PAGE) as session:
        tenant = session.attach_bytes(make_layers([2] * 6), name="m", kv=make_spec(6, max_blocks=160))
        within = internals(tenant)
        asked = 0
        for old, new in ((tenant, within), (tenant.kv, within.kv), (tenant.kv.host, within.kv.host)):
            for name in public(type(new)) - public(type(old)) - set(vars(old)):
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    value = getattr(old, name)
                assert [each.category for each in told] == [DeprecationWarning], name
                assert f"{type(old).__name__}.{name} goes with the next release; use " in str(told[0].message)
                assert type(value) is type(getattr(new, name))
                asked += 1
        assert asked > 30


@pytest.mark.parametrize(("kind", "names"), moved.KEYWORDS, ids=lambda each: getattr(each, "__name__", ""))
def test_keywords(kind: Any, names: dict[str, str]) -> None:
    fields = {each.name for each in dataclasses.fields(kind)}
    for old, new in names.items():
        assert new in fields and old not in fields
        with pytest.warns(DeprecationWarning, match=rf"\({old}=\) goes with the next release; use {new}=") as told:
            made = kind(**{old: VALUES[new]})
        assert told[0].filename == __file__
        assert made == kind(**{new: VALUES[new]}) != kind()
        with pytest.raises(InvalidArgument) as caught:
            kind(**{old: VALUES[new], new: VALUES[new]})
        assert caught.value.fields["field"] == old
        with pytest.raises(InvalidArgument):
            kind(**{new: -1})  # what it checks it still checks


@pytest.mark.parametrize(("old", "new"), [(f"REMAP_{a}", f"REMAP_{b}") for a, b in moved.SETTINGS.items()])
def test_settings(old: str, new: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved, "_told", set())
    before = {**ON, old: GIVEN[new]}
    for _ in range(2):  # an engine reads them more than once
        with pytest.warns(DeprecationWarning, match=f"{old} goes with the next release; use {new}"):
            found = Settings.read(before)
        assert found == Settings.read({**ON, new: GIVEN[new]}) != Settings.read(ON)
    assert before == {**ON, old: GIVEN[new]}
    said = [each for each in caplog.records if each.name == "remap.settings" and each.levelno == logging.WARNING]
    assert len(said) == 1
    with pytest.raises(InvalidArgument) as caught:
        Settings.read({**before, new: GIVEN[new]})
    assert caught.value.fields["field"] == old
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Settings.read({**ON, old: ""}) == Settings.read(ON)  # an empty one is not set


OPTIONS = [(path, *pair) for path, names in moved.OPTIONS.items() for pair in names.items()]


@pytest.mark.parametrize(("path", "old", "new"), OPTIONS, ids=str)
def test_options(path: tuple[str, ...], old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    typer = pytest.importorskip("typer")
    from remap.cli.main import app

    command: Any = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    parameter = next(each for each in command.params if new in each.opts)
    assert not any(old in each.opts for each in command.params)
    for given, said in (([new, "12"], False), ([old, "12"], True), ([f"{old}=12"], True)):
        context = command.context_class(command, resilient_parsing=True)  # without what it requires besides
        command.parse_args(context, given)
        assert str(context.params[parameter.name]) == "12"
        expected = f"remap: {old} goes with the next release; use {new}\n" if said else ""
        assert capsys.readouterr().err == expected
