"""What all commands have in common: exit codes, the version, no traceback for input that cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from remap.cli import demo_config, demo_run
from remap.cli.main import app
from remap.config import Knobs
from remap.errors import InvalidArgument
from remap.sim.hardware import machine
from remap.sizes import MOST_BYTES, parse_size

LONG = "1" * 400
LONGER = "1" * 6000  # Python refuses to read or print an int of so many digits
DEEP = "[" * 100_000


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})


def test_help_says_what_the_exit_codes_mean() -> None:
    found = run("--help")
    assert found.exit_code == 0
    for text in ("0 done", "1 it ran", "2 nothing was done"):
        assert text in found.output.replace("\n", " "), text


def test_the_version() -> None:
    found = run("--version")
    assert (found.exit_code, found.output.strip()) == (0, f"remap {version('remap')}")


def test_python_dash_m_remap() -> None:
    done = subprocess.run([sys.executable, "-m", "remap", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "remap [OPTIONS] COMMAND" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--budget", "12 apples"),
        ("demo", "--budget", f"{LONG}B"),
        ("fit", "/nowhere/m.json", "--name", "x", "--out", "x.json"),
        ("plan", "--machine", "GH200", "--model", "OPT-13b", "--memory", f"{LONG}B"),
        ("plan", "--machine", "GH200", "--model", "OPT-13b", "--memory", f"{LONG}%"),
        ("plan", "--machine", "GH200", "--model", "OPT-13b", "--context", LONG),
        ("simulate", "--machine", "nobody", "--tenants", "C1"),
        ("simulate", "--machine", "GH200", "--tenants", "C1", "--requests", LONG),
        ("simulate", "--machine", "GH200", "--tenants", f"OPT-13b:{LONG}B"),
        ("simulate", "--machine", "GH200", "--tenants", f"OPT-13b:{LONG}%"),
        ("simulate", "--machine", "GH200", "--tenants", "C1", "--rate", LONG),
        ("simulate", "--machine", "GH200", "--tenants", "C1", "--quantum", LONG),
        ("simulate", "--machine", "GH200", "--tenants", "C1", "--lengths", f"fixed:{LONG}:1"),
        ("simulate", "--machine", "GH200", "--tenants", "C1", "--seed", LONGER),
        ("simulate", "--machine", "GH200", "--tenants", "C1", "--json", "/dev/null/x.json"),
        ("demo", "--requests", LONG),
        ("nonsense",),
        ("plan", "--nonsense"),
    ],
)
def test_what_cannot_be_is_refused_with_2_and_without_a_traceback(arguments: tuple[str, ...], tmp_path: Path) -> None:
    found = run(*arguments)
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
    assert parse_size("0.1KB") == 100
    assert parse_size(MOST_BYTES) == MOST_BYTES


def test_numbers_beyond_a_float_are_refused_by_their_field() -> None:
    with pytest.raises(InvalidArgument) as caught:
        machine("x", {"machines": {"x": {"like": "H200", "figures": {"flops": 10**400}}}})
    assert caught.value.field == "flops"
    with pytest.raises(InvalidArgument) as caught:
        Knobs(slowdown=10**400)
    assert caught.value.field == "slowdown"


def test_json_too_deep_to_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text(DEEP)
    deep = str(tmp_path / "deep.json")
    for arguments in (
        ("fit", deep, "--name", "x", "--out", str(tmp_path / "x.json")),
        ("plan", "--machine", "GH200", "--model", "OPT-13b", "--tables", deep),
        ("simulate", "--machine", "GH200", "--tenants", "C1", "--machines-file", deep),
    ):
        found = run(*arguments)
        assert found.exit_code == 2 and isinstance(found.exception, SystemExit), (arguments, found.output)


def test_results_go_into_a_folder_that_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "out.json"
    found = run(
        *("simulate", "--machine", "GH200", "--tenants", "OPT-13b:40%", "--requests", "2", "--policies", "recompute"),
        *("--lengths", "fixed:8:2", "--json", str(path)),
    )
    assert found.exit_code == 0, found.output
    assert json.loads(path.read_text())


def test_a_budget_that_holds_no_request_is_refused_before_anything_is_served() -> None:
    class Request:
        max_kv_tokens = 100

    config = demo_config.DemoConfig(budget_bytes=100 << 20)
    with pytest.raises(InvalidArgument) as caught:
        demo_run._room(config, (100 << 20) // config.page_bytes, 1 << 20, [Request()])  # type: ignore[list-item]
    assert caught.value.needed > 100 << 20
    demo_run._room(
        demo_config.DemoConfig(budget_bytes=caught.value.needed),
        (100 << 20) // config.page_bytes,
        1 << 20,
        [Request()],  # type: ignore[list-item]
    )
