"""The order of things: each call's build, steps and measures, into one record; then the table, whatever failed on the way."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import machine, steps
from .budget import Budget
from .calls import CALLS, Task, tasks
from .processes import ROOT, run_limited
from .record import DOCUMENT, Part, Record, Unusable
from .table import Report, Step, render
from .workers import Workers, listing

__all__ = ["Options", "run"]

UNAVAILABLE = {"unavailable": "this was the emulated driver"}
# What the figures are figures of.
SOURCES = ("CMakeLists.txt", "cpp", "include", "python", "src")
NEVER = "no part of a quick run"
LEAST_S = 20.0
"""A call is not begun with less."""
LEFT_OUT = "left out: no time"


@dataclass(frozen=True)
class Options:
    """The command line. seconds: of each call; None: its own limit. total: of all of them together; None: no limit."""

    calls: tuple[str, ...]
    quick: bool
    emulated: bool
    checkout: bool
    seconds: float | None = None
    total: float | None = None
    only: tuple[str, ...] = ()
    again: str | None = None
    name: str | None = None
    out: Path | None = None
    resume: Path | None = None
    host_budget: str | None = None

    def wants(self, name: str) -> bool:
        """Whether a part of this name is asked for."""
        return not self.only or any(fnmatch.fnmatch(name, pattern) for pattern in self.only)


def run(options: Options, environment: dict[str, str]) -> int:
    """Every call. Returns the exit status: 0, 1 if something failed, 2 if there was nothing to run on."""
    begun = time.monotonic()
    state = machine.gpu_state() if not options.emulated else UNAVAILABLE
    device = "the emulated driver" if options.emulated else str(state.get("name", "an unnamed GPU"))
    try:
        record, paths = _open(options, device)
    except Unusable as error:
        print(f"bench/gpu: {error}", flush=True)
        return 2
    problem = False
    with record.saved_regularly():
        for call in options.calls:
            left = math.inf if options.total is None else options.total - (time.monotonic() - begun)
            if left < LEAST_S:
                known = record.calls.get(call, {"runs": 0, "limit_s": 0.0, "seconds": 0.0})
                with record.lock:
                    record.calls[call] = {**known, "state": LEFT_OUT}
                continue
            problem = not _Call(call, options, environment, record, paths, device, left).run()
            if problem:
                break
    mine = [part for part in record.parts.values() if part.call in options.calls]
    if not problem and options.only and not any(options.wants(part.name) for part in mine):
        record.problem("--only", options.calls[0], f"nothing matches {list(options.only)}")
        record.save()
        problem = True
    report = _report(options, record, time.monotonic() - begun, _written(options, record, device, problem))
    print(render(report), flush=True)
    return 2 if problem else 0 if report.ok else 1


def _open(options: Options, device: str) -> tuple[Record, steps.Paths]:
    """The record that goes on from what is there. Raises Unusable if that cannot be."""
    build = ROOT / "build" / ("gpu-emulated" if options.emulated else "gpu")
    folder = (options.out or build / ("results-quick" if options.quick else "results")).resolve()
    # Logs lie outside of the results: those are two files, whatever happens. A run that builds nothing leaves nothing behind
    # elsewhere, so that several can run at once.
    logs = (
        build / f"logs-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}" if options.checkout else folder / "logs"
    )
    record = Record(folder, logs, emulated=options.emulated)
    earlier = folder / DOCUMENT
    if not earlier.exists():
        shutil.rmtree(logs, ignore_errors=True)
        if options.resume is not None:  # which may be still to come: the same command begins and goes on
            earlier = options.resume
    if earlier.exists():
        record.load(earlier)
        known = record.facts.get("device")
        if known != device:
            raise Unusable(f"{earlier} holds results of {known}, and this is {device}: give another --out")
    name = options.name or record.facts.get("name") or device
    engines = record.facts.get("packages", {})
    record.facts = {
        **record.facts,
        "name": machine.slug(name),
        "device": device,
        "machine": machine.describe(),
        "packages": {
            name: {"ran": [], **engines.get(name, {}), "version": at} for name, at in machine.engines().items()
        },
    }
    record.facts.setdefault("gpu", {})
    record.facts.setdefault("mode", "aliased")
    record.facts.setdefault("strict_because", None)
    return record, steps.Paths(build if options.checkout else folder, logs)


def sources_digest(root: Path = ROOT) -> str:
    """Of the files that the library is built from, names and contents."""
    digest = hashlib.sha256()
    for top in SOURCES:
        files = [root / top] if (root / top).is_file() else sorted((root / top).rglob("*"))
        for path in files:
            if path.is_file() and path.suffix not in (".so", ".pyc"):
                digest.update(f"{path.relative_to(root)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


class _Call:
    """One call: `run` does all of it within its time."""

    def __init__(
        self,
        name: str,
        options: Options,
        environment: Mapping[str, str],
        record: Record,
        paths: steps.Paths,
        device: str,
        left_s: float = math.inf,
    ) -> None:
        """left_s: seconds that it may take at most, whatever its own limit."""
        self.name, self.options, self.record, self.paths = name, options, record, paths
        self.call, self._left_s = CALLS[name], left_s
        self.budget = self._budget()
        self.environment = _environment(options, environment, paths)
        self._follow_probe()
        mode = self.environment.get("REMAP_MODE") or "aliased"
        self.origin: dict[str, Any] = {"device": device}
        if name != "probe":
            self.origin |= {"sources": sources_digest(), "quick": options.quick, "mode": mode}
            if options.host_budget is not None:
                self.origin["host_budget"] = options.host_budget

    def run(self) -> bool:
        """Whether there was something to run on."""
        known = self.record.calls.get(self.name, {"runs": 0, "seconds": 0.0})
        entry = {
            "runs": known["runs"] + 1,
            "state": "running",
            "limit_s": self.budget.seconds,
            "seconds": known["seconds"],
        }
        with self.record.lock:
            self.record.calls[self.name] = entry
        self._gpu_state("before", entry)
        # The probe asks a GPU's driver without this library. The emulated driver has to be built for it.
        problem = None if self.name == "probe" and not self.options.emulated else self._build_and_look()
        if problem is not None:
            self.record.problem("driver", self.name, problem)
            print(f"bench/gpu: {problem}", flush=True)
        else:
            self._steps()
            if self.call.measures:
                self._measures()
            self._gpu_state("after", entry)
        self._follow_probe()  # which may have been this call
        with self.record.lock:
            entry["state"] = "ended" if problem is None else "nothing to run on"
            entry["seconds"] = known["seconds"] + self.budget.spent
        self.record.save()
        return problem is None

    # -- what it runs on -------------------------------------------------------------------------------------------

    def _budget(self) -> Budget:
        options = self.options
        limit = self.call.limit(quick=options.quick, emulated=options.emulated)
        return Budget(min(limit if options.seconds is None else options.seconds, self._left_s))

    def _follow_probe(self) -> None:
        """If the probe has found a fault, sessions are strict: no mapping changes while the tenant's stream is at work."""
        part = self.record.parts.get("probe")
        fault = part.detail.get("fault") if part is not None else None
        if fault:
            self.environment["REMAP_MODE"] = "strict"
        mode = self.environment.get("REMAP_MODE") or "aliased"
        with self.record.lock:
            self.record.facts |= {"mode": mode, "strict_because": f"probe: {fault}" if fault else None}

    def _gpu_state(self, when: str, entry: dict[str, Any]) -> None:
        if self.options.emulated:
            state = dict(UNAVAILABLE)
        else:
            devices = self.record.facts["gpu"].get("probe", {}).get("devices") or [{}]
            pcie = devices[0].get("pcie")
            state = machine.gpu_state(tuple(pcie) if pcie else None)
        with self.record.lock:
            entry[f"gpu_{when}"] = self.record.facts["gpu"][when] = state

    def _build_and_look(self) -> str | None:
        """Build, and ask the driver. Returns why nothing can be run."""
        if self.options.checkout:
            limit = 3600.0 if self.options.emulated else 0.6 * self.budget.seconds
            self._begin("build")
            step = steps.build(self.paths, seconds=limit, environment=self.environment, emulator=self.options.emulated)
            self._end("build", step)
            if not step.ok:
                return "nothing was built"
            if self.options.emulated:
                self.budget = self._budget()  # a small machine takes long to compile, and nobody lends it by the minute
        probe = _probe(self.environment, self.paths)
        problem = _unsuitable(self.options, probe)
        probe.pop("library", None)  # a path of this machine
        with self.record.lock:
            self.record.facts["gpu"]["probe"] = probe
        return problem

    def _kept(self, name: str) -> bool:
        """Whether it is finished and need not be run again."""
        again, part = self.options.again, self.record.parts.get(name)
        if again == "all" or (again == "failed" and part is not None and part.state == "failed"):
            return False
        return self.record.kept(name, self.origin)

    def _todo(self, names: Iterable[str]) -> list[str]:
        """Those of the names that are wanted and not there yet; what an earlier run was killed at comes last."""
        left: list[str] = []
        late: list[str] = []
        for name in names:
            if not self.options.wants(name):
                continue
            if self._kept(name):
                self._say(name, "kept")
                continue
            part = self.record.parts.get(name)
            (late if part is not None and part.state == "cut off" else left).append(name)
        return left + late

    # -- steps -----------------------------------------------------------------------------------------------------

    def _steps(self) -> None:
        options = self.options
        known = {
            each.name: each for each in tasks(self.name, self.paths, quick=options.quick, emulated=options.emulated)
        }
        for name in self._todo(known):
            self._step(known[name])

    def _step(self, task: Task) -> None:
        if self.budget.left < task.least_s:
            why = f"time: it takes {task.least_s:.0f} s at least, {max(0.0, self.budget.left):.0f} s were left"
            self.record.skip(task.name, self.name, "step", why)
            self._say(task.name, f"skipped: {why}")
            return
        self._begin(task.name)
        step = task.run(min(task.most_s, self.budget.left), self.environment)
        if isinstance(step, str):
            self.record.skip(task.name, self.name, "step", step)
            self._say(task.name, f"skipped: {step}")
            return
        self._end(task.name, step)
        if step.ok:
            self._ran(task.packages, task.name)

    def _begin(self, name: str) -> None:
        self.record.begin(name, self.name, "step", self.origin)

    def _end(self, name: str, step: Step) -> None:
        state = "ok" if step.ok else "failed"
        self.record.end(name, state, step.seconds, step.summary, detail=step.detail)
        self.record.save()
        self._say(name, f"{state} {step.seconds:.1f} s {step.summary}")

    def _ran(self, packages: Iterable[str], part: str) -> None:
        with self.record.lock:
            for package in packages:
                entry = self.record.facts["packages"].get(package)
                if entry is not None and entry["version"] is not None and part not in entry["ran"]:
                    entry["ran"].append(part)

    # -- measures --------------------------------------------------------------------------------------------------

    def _measures(self) -> None:
        options = self.options
        try:
            listed = listing(self.environment, self.paths.logs / "list.log")
        except RuntimeError as error:
            self.record.problem("measures", self.name, str(error))
            return
        known = {each["name"]: each for each in listed if each["call"] == self.name}
        never = [
            name for name, each in known.items() if options.quick and not options.emulated and each["quick_s"] is None
        ]
        for name in never:
            if options.wants(name):
                self.record.skip(name, self.name, "measure", NEVER)
        flags = [flag for flag, on in (("--quick", options.quick), ("--emulated", options.emulated)) if on]

        def ended(name: str) -> None:
            part = self.record.parts[name]
            if part.state == "ok":
                self._ran(known[name]["packages"], name)
            self.record.save()
            taken = ":" if part.state == "skipped" else f" {part.seconds:.1f} s"
            self._say(name, f"{part.state}{taken} {part.summary}")

        workers = Workers(self.record, self.name, self.origin, self.environment, flags, ended=ended)
        workers.run(
            self._todo(name for name in known if name not in never),
            self.budget.deadline - min(5.0, 0.05 * self.budget.seconds),
        )

    def _say(self, name: str, what: str) -> None:
        """One line as things happen: of a run that is cut off there is no table."""
        print(f"{self.budget.spent:6.1f} s  {self.name}: {name}: {' '.join(what.split())[:160]}", flush=True)


# -- environment and driver -------------------------------------------------------------------------------------------


def _environment(options: Options, given: Mapping[str, str], paths: steps.Paths) -> dict[str, str]:
    """The children's environment: this package, the package just built, and the emulated driver if it is wanted."""
    environment = dict(given)
    search = [str(ROOT), environment.get("PYTHONPATH", "")]
    if options.checkout:
        search.insert(0, str(paths.site))
    environment["PYTHONPATH"] = os.pathsep.join(part for part in search if part)
    environment["PYTHONUNBUFFERED"] = "1"
    if options.host_budget is not None:
        environment["REMAP_HOST_BUDGET"] = options.host_budget
    if not options.emulated:
        environment["REMAP_TEST_CUDA"] = "1"
        return environment
    # Built here, else the caller's, else where `make test` builds it.
    known = given.get("REMAP_EMULATED_DRIVER") or str(ROOT / "build" / "cpp" / paths.emulated_driver.name)
    if options.checkout:
        known = str(paths.emulated_driver)
    environment["REMAP_EMULATED_DRIVER"] = environment["REMAP_LIBCUDA"] = known
    environment["REMAP_DEVICE"] = "cuda:0"
    # A link with a speed, so that copies take time and schedules have something to hide.
    environment.setdefault("REMAP_EMULATED_H2D_GBPS", "4")
    environment.setdefault("REMAP_EMULATED_D2H_GBPS", "4")
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _probe(environment: Mapping[str, str], paths: steps.Paths) -> dict[str, Any]:
    """`_core.probe_cuda()` of a process of its own, so that this one never loads a driver; {"error": why} without one."""
    code = "import json; from remap import _core; print(json.dumps(_core.probe_cuda()))"
    log = paths.logs / "driver.log"
    status, _ = run_limited([sys.executable, "-c", code], seconds=60, environment=environment, log=log)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"]
    if status != 0:
        return {"error": f"no CUDA driver could be used: {lines[-1]}"}
    probe: dict[str, Any] = json.loads(lines[-1])
    return probe


def _unsuitable(options: Options, probe: Mapping[str, Any]) -> str | None:
    """Why nothing can be run with this driver."""
    if "error" in probe:
        return str(probe["error"])
    if probe["emulated"] and not options.emulated:
        return "the driver that was found is the emulated one; say --emulated"
    if options.emulated and not probe["emulated"]:
        return "a real driver was found where the emulated one was asked for; set REMAP_EMULATED_DRIVER"
    return None if probe["devices"] else "the driver shows no device"


# -- the end ----------------------------------------------------------------------------------------------------------


def _written(options: Options, record: Record, device: str, problem: bool) -> str:
    """Keep a copy among the results where that is wanted: what was not measured on a GPU stays out. Returns what to say."""
    shown = [record.folder / DOCUMENT]
    if not options.emulated and not problem and (options.name is not None or options.out is None):
        target = ROOT / "bench" / "results" / f"gpu-{record.facts['name']}{'-quick' if options.quick else ''}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(record.folder / DOCUMENT, target)
        shown.append(target)
    return "wrote " + " and ".join(str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path) for path in shown)


def _report(options: Options, record: Record, seconds: float, written: str) -> Report:
    """The table of the calls that were asked for."""
    parts = [part for part in record.parts.values() if part.call in options.calls]
    unfinished = [part for part in parts if part.state in ("running", "cut off")]
    return Report(
        title=_title(options, record),
        emulated=options.emulated,
        steps=[
            Step(part.name, part.state == "ok", part.seconds, part.summary, part.detail)
            for part in parts
            if part.kind == "step" and part.state in ("ok", "failed")
        ],
        figures=[each for part in parts for each in part.figures],
        errors=[(part.name, part.summary) for part in parts if part.kind != "step" and part.state == "failed"],
        skipped=[
            *((part.name, part.summary) for part in parts if part.left_out),
            *((part.name, "an earlier run was killed at it, and this one did not come to it") for part in unfinished),
        ],
        seconds=seconds,
        written=written,
        notes=[*_notes(record), *_mixed(parts), *_left_out(options, record)],
    )


def _notes(record: Record) -> list[str]:
    """The mode, and which engines were found and ran."""
    because = record.facts["strict_because"]
    probe = record.parts.get("probe")
    heard = "has found no fault" if probe is not None and probe.state == "ok" else "has not run"
    notes = [f"mode: {record.facts['mode']}" + (f", because of the {because}" if because else f" (the probe {heard})")]
    packages = record.facts["packages"]
    found = {name: entry for name, entry in packages.items() if entry["version"] is not None}
    ran = [f"{name} {entry['version']} ({len(entry['ran'])})" for name, entry in found.items() if entry["ran"]]
    idle = [f"{name} {entry['version']}" for name, entry in found.items() if not entry["ran"]]
    notes.append(f"found, and parts that ran with it: {', '.join(ran) or 'none'}")
    notes.append(f"found, not used: {', '.join(idle) or 'none'}")
    notes.append(f"not found: {', '.join(name for name in packages if name not in found) or 'none'}")
    return notes


def _left_out(options: Options, record: Record) -> list[str]:
    """Calls that were not begun."""
    names = [name for name in options.calls if record.calls.get(name, {}).get("state") == LEFT_OUT]
    return [f"not begun, since less than {LEAST_S:g} s were left: {', '.join(names)}"] if names else []


def _mixed(parts: Iterable[Part]) -> list[str]:
    """That parts of one table were run on different things."""
    origins = {json.dumps(part.origin, sort_keys=True) for part in parts if part.origin and part.call != "probe"}
    return [f"{len(origins)} states of the sources, or modes, are mixed here: see `origin` of each part"] * (
        len(origins) > 1
    )


def _title(options: Options, record: Record) -> str:
    gpu = record.facts["gpu"]
    probe, before, after = gpu.get("probe", {}), gpu.get("before", {}), gpu.get("after", {})
    if not probe.get("devices"):
        asked = options.calls == ("probe",) and not options.emulated and "name" in before
        return f"bench/gpu: {record.facts['device']}" if asked or options.emulated else "bench/gpu: there is no device"
    version = probe["driver_version"]
    driver = f"CUDA driver {version // 1000}.{version % 1000 // 10}"
    if options.emulated:
        return f"bench/gpu on the emulated driver, {driver}"
    link = f"PCIe {after.get('pcie_generation', '?')} x{after.get('pcie_width', '?')}"
    clocks = f"SM {before.get('sm_mhz', '?')} to {after.get('sm_mhz', '?')} MHz"
    return f"{probe['devices'][0]['name']}, {driver} ({before.get('driver', '?')}), {clocks}, {link}"
