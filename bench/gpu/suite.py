"""The order of things: steps, then measures in worker processes, then table and JSON, whatever failed on the way."""

from __future__ import annotations

import fnmatch
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import machine, steps
from .budget import Budget
from .results import Figure
from .table import Report, Step, render
from .workers import Measured, Workers, listing

__all__ = ["Options", "run"]

SCHEMA = 1
UNAVAILABLE = {"unavailable": "this was the emulated driver"}


@dataclass(frozen=True)
class Options:
    """The command line."""

    quick: bool
    emulated: bool
    checkout: bool
    seconds: float
    only: tuple[str, ...] = ()
    name: str | None = None
    out: Path | None = None


@dataclass
class State:
    """What has happened so far."""

    steps: list[Step]
    probe: dict[str, Any]
    before: dict[str, Any]
    after: dict[str, Any]
    measured: Measured


def run(options: Options, environment: dict[str, str]) -> int:
    """Everything. Returns the exit status: 0, 1 if something failed, 2 if there was nothing to measure with."""
    budget = Budget(options.seconds)
    paths = _paths(options)
    paths.build.mkdir(parents=True, exist_ok=True)
    state = State([], {}, UNAVAILABLE, UNAVAILABLE, Measured())
    environment = _environment(options, environment, paths)
    if options.checkout:
        state.steps.append(_build(options, budget, paths, environment))
        if options.emulated:
            budget = Budget(options.seconds)  # a small machine takes long to compile, and nobody lends it by the minute
    problem = None if all(step.ok for step in state.steps) else "nothing was built"
    if problem is None:
        state.probe = _probe(environment, paths)
        problem = _unsuitable(options, state.probe)
    if problem is None:
        _with_device(options, budget, paths, environment, state)
    else:
        state.measured.errors.append(("driver", problem))
    _finish(options, budget, paths, state, measured=problem is None)
    return 2 if problem is not None else 0 if _report(options, budget, state, "").ok else 1


def _with_device(
    options: Options, budget: Budget, paths: steps.Paths, environment: Mapping[str, str], state: State
) -> None:
    pcie = tuple(state.probe["devices"][0]["pcie"])
    if not options.emulated:
        state.before = machine.gpu_state(pcie)
    if options.checkout:
        state.steps += _tests(options, budget, paths, environment)
    names = _wanted(options, budget, paths, environment, state)
    flags = [flag for flag, on in (("--quick", options.quick), ("--emulated", options.emulated)) if on]
    workers = Workers(paths.build, environment, flags)
    workers.measured.errors += state.measured.errors
    workers.run(names, budget.deadline - min(5.0, 0.05 * budget.seconds))
    state.measured = workers.measured
    if not options.emulated:
        state.after = machine.gpu_state(pcie)


# -- steps ------------------------------------------------------------------------------------------------------------


def _paths(options: Options) -> steps.Paths:
    """A run without a build of its own keeps its few files where its result goes, so that several can run at once."""
    if options.out is not None and not options.checkout:
        return steps.Paths(options.out.resolve())
    return steps.Paths(steps.ROOT / "build" / ("gpu-emulated" if options.emulated else "gpu"))


def _environment(options: Options, given: dict[str, str], paths: steps.Paths) -> dict[str, str]:
    """The steps' environment: this package, the package just built, and the emulated driver if it is wanted."""
    environment = dict(given)
    search = [str(steps.ROOT), environment.get("PYTHONPATH", "")]
    if options.checkout:
        search.insert(0, str(paths.site))
    environment["PYTHONPATH"] = os.pathsep.join(part for part in search if part)
    environment["PYTHONUNBUFFERED"] = "1"
    if not options.emulated:
        environment["REMAP_TEST_CUDA"] = "1"
        return environment
    # Built here, else the caller's, else where `make test` builds it.
    known = given.get("REMAP_EMULATED_DRIVER") or str(steps.ROOT / "build" / "cpp" / paths.emulated_driver.name)
    if options.checkout:
        known = str(paths.emulated_driver)
    environment["REMAP_EMULATED_DRIVER"] = environment["REMAP_LIBCUDA"] = known
    environment["REMAP_DEVICE"] = "cuda:0"
    # A link with a speed, so that copies take time and schedules have something to hide.
    environment.setdefault("REMAP_EMULATED_H2D_GBPS", "4")
    environment.setdefault("REMAP_EMULATED_D2H_GBPS", "4")
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _build(options: Options, budget: Budget, paths: steps.Paths, environment: Mapping[str, str]) -> Step:
    everything = not options.quick and not options.emulated
    limit = 3600.0 if options.emulated else 0.6 * budget.seconds
    return steps.build(paths, seconds=limit, environment=environment, emulator=options.emulated, cpp_tests=everything)


def _tests(options: Options, budget: Budget, paths: steps.Paths, environment: Mapping[str, str]) -> Iterator[Step]:
    """Correctness first, but most of the time is kept for the measures."""
    keep = (0.6 if options.quick else 0.55) * budget.seconds
    contract = [f"tests/python/test_backend_contract{part}.py" for part in ("", "_streams")]
    on_device = ["tests/gpu", *(("-m", "not slow") if options.quick else ())]
    for name, arguments, least in (("conformance suite", contract, 10.0), ("tests/gpu", on_device, 15.0)):
        if budget.allows(name, least, keep=keep):
            yield steps.tests(name, paths, arguments, seconds=budget.left - keep, environment=environment)
    if options.emulated:
        budget.skip("compute-sanitizer", "the emulated driver runs no device code")
        budget.skip("C++ tests", "`make test` runs them; this is a run on the emulated driver")
        return
    if options.quick:
        budget.skip("C++ tests", "no part of a quick run")
    elif budget.allows("C++ tests", 20.0, keep=keep):
        yield steps.cpp_tests(paths, seconds=budget.left - keep, environment=environment)
    if budget.allows("compute-sanitizer", 25.0, keep=keep):
        step = steps.sanitizer(paths, seconds=min(90.0, budget.left - keep), environment=environment)
        if isinstance(step, Step):
            yield step
        else:
            budget.skip("compute-sanitizer", step)


def _probe(environment: Mapping[str, str], paths: steps.Paths) -> dict[str, Any]:
    """`_core.probe_cuda()` of a process of its own, so that this one never loads a driver; {"error": why} without one."""
    code = "import json; from remap import _core; print(json.dumps(_core.probe_cuda()))"
    log = paths.build / "probe.log"
    status, _ = steps.run_limited([sys.executable, "-c", code], seconds=60, environment=environment, log=log)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"]
    if status != 0:
        return {"error": f"no CUDA driver could be used: {lines[-1]}"}
    probe: dict[str, Any] = json.loads(lines[-1])
    return probe


def _unsuitable(options: Options, probe: Mapping[str, Any]) -> str | None:
    """Why nothing can be measured with this driver."""
    if "error" in probe:
        return str(probe["error"])
    if probe["emulated"] and not options.emulated:
        return "the driver that was found is the emulated one; say --emulated"
    if options.emulated and not probe["emulated"]:
        return "a real driver was found where the emulated one was asked for; set REMAP_EMULATED_DRIVER"
    return None if probe["devices"] else "the driver shows no device"


def _wanted(
    options: Options, budget: Budget, paths: steps.Paths, environment: Mapping[str, str], state: State
) -> list[str]:
    """The names of the measures of this run, in order; what is no part of it is skipped by name."""
    try:
        known = listing(environment, paths.build / "list.log")
    except RuntimeError as error:
        state.measured.errors.append(("measures", str(error)))
        return []
    names: list[str] = []
    for each in known:
        name = each["name"]
        if options.only and not any(fnmatch.fnmatch(name, pattern) for pattern in options.only):
            continue
        if options.quick and not options.emulated and each["quick_s"] is None:
            budget.skip(name, "no part of a quick run")
        else:
            names.append(name)
    if not names:
        state.measured.errors.append(("measures", f"none matches {list(options.only)}"))
    return names


# -- the end ----------------------------------------------------------------------------------------------------------


def _finish(options: Options, budget: Budget, paths: steps.Paths, state: State, *, measured: bool) -> None:
    """Write the JSON, print the table. What was not measured on a GPU stays out of bench/results."""
    device = (state.probe.get("devices") or [{}])[0]
    name = machine.slug(options.name or str(device.get("name", "no-gpu")))
    if options.quick:
        name += "-quick"
    folder = options.out
    if folder is None:
        folder = steps.ROOT / "bench" / "results" if measured and not options.emulated else paths.build
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / ("emulated.json" if options.emulated else f"gpu-{name}.json")
    target.write_text(json.dumps(_document(options, budget, state, name), indent=1) + "\n", encoding="utf-8")
    shown = target.resolve()
    where = shown.relative_to(steps.ROOT) if shown.is_relative_to(steps.ROOT) else shown
    print(render(_report(options, budget, state, f"wrote {where}")), flush=True)


def _report(options: Options, budget: Budget, state: State, written: str) -> Report:
    return Report(
        title=_title(options, state),
        emulated=options.emulated,
        steps=state.steps,
        figures=[each for _, each in state.measured.figures],
        errors=state.measured.errors,
        skipped=[*budget.skipped, *state.measured.skipped],
        seconds=budget.spent,
        written=written,
    )


def _document(options: Options, budget: Budget, state: State, name: str) -> dict[str, Any]:
    measured = state.measured
    probe = {key: value for key, value in state.probe.items() if key != "library"}  # a path of this machine
    return {
        "schema": SCHEMA,
        "name": name,
        "emulated": options.emulated,
        "quick": options.quick,
        "seconds": round(budget.spent, 1),
        "machine": machine.describe(),
        "gpu": {"probe": probe, "before": state.before, "after": state.after},
        "steps": [vars(step) for step in state.steps],
        "results": [_entry(options.emulated, measure, each) for measure, each in measured.figures],
        "errors": [
            {"what": what, "error": why, "traceback": measured.tracebacks.get(what)} for what, why in measured.errors
        ],
        "skipped": [{"what": what, "why": why} for what, why in (*budget.skipped, *measured.skipped)],
        "measure_seconds": measured.seconds,
    }


def _entry(emulated: bool, measure: str, each: Figure) -> dict[str, Any]:
    """A figure as the JSON has it. A speed of the emulated driver is no value: it stands apart, under a name that says so."""
    entry = {"measure": measure, **each.to_json()}
    if emulated and not each.exact:
        speeds = {key: entry[key] for key in ("value", "median_us", "p99_us", "detail")}
        entry.update(value=None, median_us=None, p99_us=None, met=None, detail={}, of_the_emulated_driver=speeds)
    return entry


def _title(options: Options, state: State) -> str:
    if not state.probe.get("devices"):
        return "bench/gpu: there is no device to measure"
    version = state.probe["driver_version"]
    driver = f"CUDA driver {version // 1000}.{version % 1000 // 10}"
    if options.emulated:
        return f"bench/gpu on the emulated driver, {driver}"
    before, after = state.before, state.after
    link = f"PCIe {after.get('pcie_generation', '?')} x{after.get('pcie_width', '?')}"
    clocks = f"SM {before.get('sm_mhz', '?')} to {after.get('sm_mhz', '?')} MHz"
    return f"{state.probe['devices'][0]['name']}, {driver} ({before.get('driver', '?')}), {clocks}, {link}"
