"""What all commands have in common: exit codes, the version, no traceback for input that cannot be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import remap
from remap.cli.main import app
from remap.cli.options import MEMORY, memory_bytes
from remap.config import Knobs
from remap.errors import InvalidArgument
from remap.extras import install
from remap.memory.machine_memory import memory_bound
from remap.policy.hardware import machine
from remap.sizes import MOST_BYTES, parse_size
from remap_serve.cli import demo_config, demo_run

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
    assert (found.exit_code, found.output.strip()) == (0, f"remap {remap.__version__}")


PLAN = ("plan", "--machine", "GH200", "--model", "OPT-13b")
SIMULATE = ("simulate", "--machine", "GH200", "--models")
FIT = ("--name", "x", "--out", "x.json")


@pytest.mark.parametrize(
    "arguments",
    [
        *(("demo", "--memory", "12 apples"), ("demo", "--memory", f"{LONG}B"), ("demo", "--requests", LONG)),
        *((*PLAN, "--memory", f"{LONG}B"), (*PLAN, "--memory", f"{LONG}%"), (*PLAN, "--context", LONG)),
        *((*SIMULATE, tenants) for tenants in ("nobody", f"OPT-13b:{LONG}B", f"OPT-13b:{LONG}%")),
        *((*SIMULATE, "C1", option, LONG) for option in ("--requests", "--rate")),
        *((*SIMULATE, "C1", "--quantum", number) for number in ("0", "-1", "nan")),
        *((*SIMULATE, "C1", "--lengths", f"fixed:{LONG}:1"), (*SIMULATE, "C1", "--seed", LONGER)),
        *((*SIMULATE, "C1", "--html", "/dev/null/x.html"), ("fit", "/nowhere/m.json", *FIT)),
        *(("fit", "DEEP", *FIT), (*PLAN, "--tables", "DEEP"), (*SIMULATE, "C1", "--tables", "DEEP")),
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
        assert "memory must be an int of bytes or text such as" in found.output


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
    assert parse_size("6291456") == 6291456, "`--capacity 6291456`: it must be an int of bytes, said the message"
    with pytest.raises(InvalidArgument, match="whole number of bytes"):
        parse_size("1.5")
    # Numbers beyond a float are refused by their field.
    table = {"machines": {"x": {"like": "H200", "figures": {"flops": 10**400}}}}
    for field, call in (("flops", lambda: machine("x", table)), ("slowdown", lambda: Knobs(slowdown=10**400))):
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert caught.value.field == field


def test_memory_is_a_size_or_a_share_in_every_command() -> None:
    assert memory_bytes("3MiB") == 3 << 20
    assert memory_bytes("50%") == memory_bound().nbytes // 2
    for words in ((*PLAN, "--memory", "0.4"), ("demo", "--memory", "0.9"), ("demo", "--memory", "101%")):
        found = CliRunner().invoke(app, list(words))
        assert found.exit_code == 2 and "24GiB" in found.output


def test_a_budget_that_holds_no_request_is_refused_before_anything_is_served() -> None:
    def room(budget: int) -> None:
        config = demo_config.DemoConfig(budget_bytes=budget)
        demo_run._room(config, (100 << 20) // config.page_bytes, 1 << 20, [SimpleNamespace(max_kv_tokens=100)])  # type: ignore[list-item]

    with pytest.raises(InvalidArgument) as caught:
        room(100 << 20)
    assert caught.value.needed > 100 << 20
    room(caught.value.needed)


# -- one set of options --------------------------------------------------------------------------------------------------
def commands(command: Any = None, name: str = "") -> dict[str, Any]:
    command = typer.main.get_command(app) if command is None else command
    below = getattr(command, "commands", {})
    found = {} if below else {name.strip(): command}
    for each, one in below.items():
        found.update(commands(one, f"{name} {each}"))
    return found


SERVERS = {"serve", "serve-many", "cluster serve"}  # they end when they are told to
WRITERS = {"trace"}  # of a file that is JSON by itself
ONE_HELP = ("--json", "--html", "--machine", "--tables", "--max-num-seqs", "--max-batch-tokens")


def test_an_option_of_one_name_is_one_option_in_all_commands() -> None:
    kinds: dict[str, set[bool]] = {}
    helps: dict[str, set[str]] = {}
    for command in commands().values():
        for each in (one for one in command.params if one.param_type_name == "option"):
            for name in each.opts:
                kinds.setdefault(name, set()).add(each.is_flag)
                helps.setdefault(name, set()).add(each.help)
    assert {name: found for name, found in helps.items() if name in ONE_HELP and len(found) > 1} == {}
    # Of what it is stands behind it. `plan` took 40%, `advise` 0.9 too, all others sizes alone.
    assert {help.startswith(MEMORY) for help in helps["--memory"]} == {True}
    assert {name for name, found in kinds.items() if len(found) > 1} == set()  # a flag here and a value there
    flags = {name: any("--json" in each.opts for each in one.params) for name, one in commands().items()}
    assert {name for name, has in flags.items() if not has} == SERVERS | WRITERS
    # What one word says in one command no other says in another: memory, tables of one's own, host memory for KV.
    assert not {"--budget", "--swap", "--machines-file", "--models-file"} & set(kinds)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("paln",), "plan"),
        (("cluster", "serv"), "serve"),
        (("plan", "--machin", "GH200"), "--machine"),
        (("plan", "--machine", "H20-PCIe", "--model", "OPT-13b"), "H100-PCIe"),
        (("plan", "--machine", "GH200", "--model", "Llama3-8b"), "Llama-3-8b"),
        ((*SIMULATE, "C1", "--policies", "remp"), "remap"),
        ((*SIMULATE, "C1", "--arrivals", "azur-code"), "azure-code"),
        ((*SIMULATE, "C1", "--lengths", "sharegtp"), "sharegpt"),
        ((*SIMULATE, "C1", "--sharing", "tempral"), "temporal"),
        ((*SIMULATE, "C1", "--scheduler", "chunks"), "chunked"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_a_name_with_a_slip_gets_the_one_that_was_meant(arguments: tuple[str, ...], meant: str) -> None:
    found = run(*arguments)
    said = " ".join(found.output.split())
    assert found.exit_code == 2 and re.search(
        rf"(?i)(did you mean|possible options?:)[^;?]*{re.escape(meant)}", said
    ), said


# -- what a terminal shows ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments",
    [
        (*PLAN, "--donors", "Llama-3-8b"),
        (*SIMULATE, "OPT-13b", "--requests", "10", "--policies", "recompute,remap"),
    ],
    ids=["plan", "simulate"],
)
def test_no_number_is_cut_off_in_a_narrow_terminal(arguments: tuple[str, ...]) -> None:
    narrow, wide = (CliRunner().invoke(app, arguments, env={"COLUMNS": columns}) for columns in ("50", "200"))
    assert narrow.exit_code == 0, narrow.output
    assert "…" not in narrow.stdout and "│" in narrow.stdout

    def cells(text: str) -> list[str]:
        rows = [line for line in text.splitlines() if line.startswith("│") and "simulated in" not in line]
        return [cell.strip() for row in rows for cell in row.strip("│").split("│")]

    assert cells(narrow.stdout) == cells(wide.stdout)


@pytest.mark.parametrize("more", [(), ("--json",), ("--help",)], ids=["text", "json", "help"])
def test_a_reader_that_has_gone_is_no_error(more: tuple[str, ...]) -> None:
    """As `remap plan ... | head`, with a reader that reads nothing at all: it has what it wanted."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "remap", *PLAN, *more], stdout=writes, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_behind_stdout_is_an_error_in_one_line() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "remap", *PLAN, "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert re.fullmatch(r"OSError: .*; what was printed may not be whole\n", done.stderr), done.stderr


def test_a_command_of_the_other_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from remap.cli import main

    assert {*main.installed()} == {"top", "trace", "serve", *main.OF_SERVE}
    monkeypatch.setattr(main, "entry_points", lambda group: ())
    assert {*main.installed()} == {"top", "trace", "serve"}  # also of sources on the path, without metadata
    for command in ("demo", "plan", "cluster"):
        found = run(command, "--help")
        assert (found.exit_code, "pip install remap-serve" in found.output) == (2, True)
    assert run("nonsense").exit_code == 2 and "remap-serve" not in run("nonsense").output
    listed = run("--help").output
    assert "doctor" in listed and "serve-many" not in listed


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_packages_the_command_says_so_in_one_sentence(package: str) -> None:
    code = """if True:
        import sys
        class Lacks:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == sys.argv[1]:
                    raise ModuleNotFoundError(name=sys.argv[1])
        sys.meta_path.insert(0, Lacks())
        import remap.cli
        remap.cli.main()"""
    done = subprocess.run([sys.executable, "-c", code, package], capture_output=True, text=True, check=False)
    said = f"The command line needs the package {package}: {install('cli')}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
