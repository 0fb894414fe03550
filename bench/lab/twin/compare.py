"""`bench.lab twin`: the demo's runs on this machine, and their simulation from the runs' own measurements, side by side.

A real run writes down what every pass computed and took, and what the link moved. The twin gets these costs, the same requests,
and nothing else of the run: memory, scheduling, what is remapped when, and every wait follow from the simulation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.lab.apart import run_apart

from remap.cli import smollm2
from remap.policy.hardware import Machine, Model
from remap.policy.hardware import machine as machine_of
from remap_serve.cli.demo_config import DemoConfig
from remap_serve.cli.machine import machine_now
from remap_serve.sim.policies import WEIGHTS_ONLY
from remap_serve.sim.results import percentile

from .calibrated import CalibratedCost, MeasuredPass, Recording, Rerun, calibrate, rerun

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["compared", "measure", "reckoned", "recording_of", "table", "twin"]

BOUNDS = {"step_mean_s": 0.10, "step_p99_s": 0.25}
"""How far the twin may be off, as a share of the real figure."""
KINDS = {"remap": WEIGHTS_ONLY, "baseline": "recompute"}
"""The demo's name of a run -> the policy that simulates it: the demo has one model, and no host memory for KV."""
POINTS = 120  # of each series in the file


def measure(kind: str, config: DemoConfig) -> dict[str, Any]:
    """One real run, in a process of its own. Raises InvalidState with the end of what it said if it fails."""
    found: dict[str, Any] = run_apart(
        kind, "bench.lab.twin.real", kind, json.dumps(asdict(config)), threads=config.threads
    )
    return found


def recording_of(config: DemoConfig, real: Mapping[str, Any]) -> Recording:
    """What the twin is told of the real run."""
    shape, layer_bytes = real["shape"], real["layer_bytes"]
    hidden, inner, kv = shape["hidden"], shape["intermediate"], shape["kv_heads"] * shape["hidden"] // shape["heads"]
    model = Model(
        name=smollm2.MODEL_NAME,
        layers=len(layer_bytes),
        hidden=hidden,
        heads=shape["heads"],
        kv_heads=shape["kv_heads"],
        head_dim=hidden // shape["heads"],
        vocab=shape["vocab"],
        dtype_bytes=4 if config.dtype == "float32" else 2,
        layer_bytes=max(layer_bytes),
        resident_bytes=0,
        linear_ops=(("qkv", hidden, hidden + 2 * kv), ("o", hidden, hidden), ("mlp", hidden, 3 * inner)),
        head=(hidden, shape["vocab"]),
        context=shape["context"],
    )
    passes = tuple(MeasuredPass(**row) for row in real["passes"])
    steps = [sample["step_s"] for sample in real["timeline"] if sample["tokens"]]
    return Recording(
        model=model,
        capacity_bytes=real["capacity_bytes"],
        kv_blocks=real["kv_blocks"],
        block_tokens=config.block_tokens,
        page_bytes=config.page_bytes,
        warm=tuple(map(tuple, real["warm"])),
        requests=tuple(map(tuple, real["requests"])),
        passes=passes,
        gap_s=max(0.0, math.fsum(steps) - math.fsum(one.seconds for one in passes)) / len(steps),
        copy_bytes_per_s=real["copy_bytes"] / real["copy_s"] if real["copy_s"] > 0 else 1e10,
        scheduling=real["scheduling"],
    )


def blank_machine() -> Machine:
    """A machine on which driver calls are free: on the host backend they are in the gap that was measured."""
    return machine_of("GH200-96GB").with_(
        name="this machine",
        create_page_s=0.0,
        map_page_s=0.0,
        set_access_s=0.0,
        unmap_page_s=0.0,
        copy_setup_s=0.0,
        duplex=1.0,
    )


def compared(real: Mapping[str, Any], found: Rerun) -> dict[str, dict[str, float]]:
    """Name -> real, twin and twin / real (nan where the real figure is 0)."""
    steps = [sample for sample in real["timeline"] if sample["tokens"]]
    seconds = [sample["step_s"] for sample in steps]
    pairs = {
        "steps": (len(steps), len(found.steps)),
        # Steps, from the first on, until one computed another number of tokens: the scheduler decided the same for so long.
        "steps_alike": (
            len(steps),
            _alike([sample["tokens"] for sample in steps], [one.tokens for one in found.steps]),
        ),
        "step_mean_s": (_mean(seconds), _mean(found.step_s)),
        "step_p50_s": (percentile(seconds, 0.5), percentile(found.step_s, 0.5)),
        "step_p99_s": (percentile(seconds, 0.99), percentile(found.step_s, 0.99)),
        "duration_s": (real["duration_s"], found.duration_s),
        "tokens_per_s": (real["generated_tokens"] / real["duration_s"], found.output_tokens / found.duration_s),
        "ttft_p50_s": (percentile(real["ttft_s"], 0.5), percentile(found.ttft_s, 0.5)),
        "ttft_p99_s": (percentile(real["ttft_s"], 0.99), percentile(found.ttft_s, 0.99)),
        "preemptions": (real["preemptions"], found.preemptions),
        "recomputed_tokens": (real["recomputed_tokens"], found.recomputed_tokens),
        "kv_blocks_peak": (max(s["kv_usable_blocks"] for s in steps), max(step.usable_blocks for step in found.steps)),
        "alpha_peak": (max(s["layers_remapped"] for s in steps), max(step.alpha for step in found.steps)),
        "alpha_mean": (
            _over_time([(s["step_s"], s["layers_remapped"]) for s in steps]),
            _over_time([(step.seconds, step.alpha) for step in found.steps]),
        ),
        "stall_s": (math.fsum(one["stall_s"] for one in real["passes"]), found.stall_s),
    }
    return {
        name: {"real": float(a), "twin": float(b), "ratio": b / a if a else math.nan} for name, (a, b) in pairs.items()
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _alike(first: Sequence[int], second: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


def _over_time(pairs: Sequence[tuple[float, float]]) -> float:
    whole = math.fsum(seconds for seconds, _ in pairs)
    return math.fsum(seconds * value for seconds, value in pairs) / whole if whole > 0 else 0.0


def _fit(passes: Sequence[MeasuredPass], cost: CalibratedCost) -> dict[str, float]:
    """How well the calibrated cost meets the passes that it was calibrated from: what the twin cannot be better than."""
    errors = []
    for one in passes:
        seconds = cost.layers * cost.layer_s(*map(int, one.features[1:5])) + cost.ends_s(0, one.sampled_rows)
        errors.append((seconds + cost.copied_byte_s * one.copied_bytes) / one.compute_s - 1.0)
    return {
        "passes": len(passes),
        "mean_abs_error": _mean([abs(error) for error in errors]),
        "p90_abs_error": percentile([abs(error) for error in errors], 0.9),
    }


def _thinned(rows: Sequence[Any]) -> list[Any]:
    return list(rows[:: max(1, len(rows) // POINTS)])


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Plain text: real, twin, ratio."""
    lines = [f"{'':<18} {'real':>12} {'twin':>12} {'ratio':>8}"]
    for name, row in rows.items():
        bound = BOUNDS.get(name)
        mark = (
            ""
            if bound is None
            else f"  within {bound:.0%}"
            if abs(row["ratio"] - 1) <= bound
            else f"  beyond {bound:.0%}"
        )
        ratio = "" if math.isnan(row["ratio"]) else f"{row['ratio']:.3f}"
        lines.append(f"{name:<18} {row['real']:>12.4g} {row['twin']:>12.4g} {ratio:>8}{mark}")
    return "\n".join(lines)


def reckoned(
    kind: str, config: DemoConfig, real: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Calibrate, simulate, compare one real run: (what goes into the file, the table's rows)."""
    recording = recording_of(config, real)
    cost = calibrate(recording.passes, recording.model.layers, recording.copy_bytes_per_s)
    found = rerun(recording, blank_machine(), cost, KINDS[kind])
    rows = compared(real, found)
    entry = {
        "calibrated": {
            **asdict(cost),
            "gap_s": recording.gap_s,
            "copy_bytes_per_s": recording.copy_bytes_per_s,
            "fit": _fit(recording.passes, cost),
        },
        "within": {name: abs(rows[name]["ratio"] - 1.0) <= bound for name, bound in BOUNDS.items()},
        "compared": {name: {k: None if math.isnan(v) else v for k, v in row.items()} for name, row in rows.items()},
        # [seconds, usable KV blocks, layers remapped]
        "real_over_time": _thinned(
            [[round(s["time_s"], 4), s["kv_usable_blocks"], s["layers_remapped"]] for s in real["timeline"]]
        ),
        "twin_over_time": _thinned([[round(step.end_s, 4), step.usable_blocks, step.alpha] for step in found.steps]),
    }
    return entry, rows


def twin(config: DemoConfig, out: Path, console: Console) -> dict[str, Any]:
    """Measure, simulate, compare, with and without remap; print the tables, write `out`/twin.json and return what is in it."""
    document: dict[str, Any] = {
        "machine": {**machine_now(), "threads": config.threads},
        "config": asdict(config),
        "bounds": BOUNDS,
        "runs": {},
    }
    for kind in KINDS:
        with console.status(f"serving the demo's {config.requests} requests on this machine ({kind})"):
            real = measure(kind, config)
        entry, rows = reckoned(kind, config, real)
        document["runs"][kind] = {**entry, "load_1min_after": machine_now()["load_1min"]}
        console.print(f"{kind}\n{table(rows)}\n", markup=False, highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "twin.json"
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")
    console.print(f"Written: {path}", style="dim", highlight=False)
    return document
