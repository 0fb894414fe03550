"""The closing table of targets, and what is taken out of (and added to) pytest-benchmark's JSON."""

from __future__ import annotations

import os
from typing import Any

from measure import RESULTS, Result, machine


def pytest_addoption(parser: Any) -> None:
    parser.addoption(
        "--host-budget",
        metavar="SIZE",
        help="page-locked memory at most, such as 24GiB, of the sessions on a GPU (REMAP_DEVICE=cuda); sets REMAP_HOST_BUDGET",
    )


def pytest_configure(config: Any) -> None:
    """Sessions are opened in many places, some in processes of their own: the environment reaches them all."""
    if budget := config.getoption("--host-budget"):
        os.environ["REMAP_HOST_BUDGET"] = budget


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    """No host name; our own description of the machine beside pytest-benchmark's."""
    machine_info.pop("node", None)
    machine_info["remap"] = machine()


def pytest_benchmark_update_json(config: Any, benchmarks: Any, output_json: dict[str, Any]) -> None:
    """Raw samples out (their order statistics stay), the table in."""
    for entry in output_json["benchmarks"]:
        entry["stats"].pop("data", None)
    output_json["targets"] = [result.to_json() for result in RESULTS]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was measured against what was promised."""
    if not RESULTS:
        return
    here = machine()
    terminalreporter.section("targets")
    terminalreporter.write_line(
        f"{here['cpu']}, {here['cores']} cores, load {here['load_1min']} (a loaded machine proves nothing)"
    )
    width = max(len(result.name) for result in RESULTS)
    terminalreporter.write_line(f"{'':{width}}  {'measured':>12}  {'target':>12}  met")
    for result in RESULTS:
        terminalreporter.write_line(_line(result, width))
    missed = sum(result.met is False for result in RESULTS)
    judged = sum(result.met is not None for result in RESULTS)
    terminalreporter.write_line(f"{judged - missed} of {judged} targets met")


def _line(result: Result, width: int) -> str:
    target = "" if result.target is None else f"{'>=' if result.at_least else '<='} {result.target:g} {result.unit}"
    met = {None: "", True: "yes", False: "NO"}[result.met]
    return f"{result.name:{width}}  {f'{result.value:.4g} {result.unit}':>12}  {target:>12}  {met}"
