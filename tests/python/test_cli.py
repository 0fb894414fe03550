"""What all commands have in common: exit codes, the version, no traceback for input that cannot be."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from remap.cli import demo_config, demo_run
from remap.cli.main import app
from remap.config import Knobs
from remap.errors import InvalidArgument
from remap.policy.hardware import machine
from remap.sizes import MOST_BYTES, parse_size

LONG = "1" * 400
LONGER = "1" * 6000  # Python refuses to read or print an int of so many digits


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})


def test_python_dash_m_remap() -> None:
    done = subprocess.run([sys.executable, "-m", "remap", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert all(text in said for text in ("remap [OPTIONS] COMMAND", "0 done", "1 it ran", "2 nothing was done"))
    found = run("--version")
    assert (found.exit_code, found.output.strip()) == (0, f"remap {version('remap')}")


PLAN = ("plan", "--machine", "GH200", "--model", "OPT-13b")
SIMULATE = ("simulate", "--machine", "GH200", "--tenants")
FIT = ("--name", "x", "--out", "x.json")


@pytest.mark.parametrize(
    "arguments",
    [
        *(("demo", "--budget", "12 apples"), ("demo", "--budget", f"{LONG}B"), ("demo", "--requests", LONG)),
        *((*PLAN, "--memory", f"{LONG}B"), (*PLAN, "--memory", f"{LONG}%"), (*PLAN, "--context", LONG)),
        *((*SIMULATE, tenants) for tenants in ("nobody", f"OPT-13b:{LONG}B", f"OPT-13b:{LONG}%")),
        *((*SIMULATE, "C1", option, LONG) for option in ("--requests", "--rate")),
        *((*SIMULATE, "C1", "--quantum", number) for number in ("0", "-1", "nan")),
        *((*SIMULATE, "C1", "--lengths", f"fixed:{LONG}:1"), (*SIMULATE, "C1", "--seed", LONGER)),
        *((*SIMULATE, "C1", "--json", "/dev/null/x.json"), ("fit", "/nowhere/m.json", *FIT)),
        *(("fit", "DEEP", *FIT), (*PLAN, "--tables", "DEEP"), (*SIMULATE, "C1", "--machines-file", "DEEP")),
        *(("nonsense",), ("plan", "--nonsense")),
    ],
)
def test_what_cannot_be_is_refused_with_2_and_without_a_traceback(arguments: tuple[str, ...], tmp_path: Path) -> None:
    deep = tmp_path / "deep.json"  # JSON too deep to read
    deep.write_text("[" * 100_000)
    found = run(*(str(deep) if each == "DEEP" else each for each in arguments))
    assert found.exit_code == 2, found.output
    assert isinstance(found.exception, SystemExit) and "Traceback" not in found.output
    assert len(found.output) < 2000
    if "12 apples" in arguments:
        assert "budget must be an int of bytes or text such as" in found.output


@pytest.mark.parametrize("size", [LONG + "B", LONGER + "B", "9" * 19 + "GiB", int(LONG), "huge", "minus huge"])
def test_sizes_of_many_digits_are_refused(size: Any) -> None:
    # An id of a test cannot be made of an int of so many digits.
    size = {"huge": 1 << 40_000, "minus huge": -(1 << 40_000)}.get(size, size)
    with pytest.raises(InvalidArgument) as caught:
        parse_size(size, "budget")
    assert caught.value.name == "budget" and len(str(caught.value)) < 400


def test_sizes_are_exact() -> None:
    assert parse_size("9007199254740993B") == 9007199254740993, "2**53 + 1 is no float"
    assert parse_size("0.1KB") == 100 and parse_size(MOST_BYTES) == MOST_BYTES
    # Numbers beyond a float are refused by their field.
    table = {"machines": {"x": {"like": "H200", "figures": {"flops": 10**400}}}}
    for field, call in (("flops", lambda: machine("x", table)), ("slowdown", lambda: Knobs(slowdown=10**400))):
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert caught.value.field == field


def test_a_budget_that_holds_no_request_is_refused_before_anything_is_served() -> None:
    def room(budget: int) -> None:
        config = demo_config.DemoConfig(budget_bytes=budget)
        demo_run._room(config, (100 << 20) // config.page_bytes, 1 << 20, [SimpleNamespace(max_kv_tokens=100)])  # type: ignore[list-item]

    with pytest.raises(InvalidArgument) as caught:
        room(100 << 20)
    assert caught.value.needed > 100 << 20
    room(caught.value.needed)
