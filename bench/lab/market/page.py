"""The grid, the search for the most models, the stored file and the page.

python -m bench.lab market                  runs what is missing, with `--jobs` processes, and writes the page
python -m bench.lab market --quick          one machine, one seed, short: that it runs
python -m bench.lab market --report-only    writes the page of what is stored
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lab import ROOT

from remap.policy.hardware import Machine, machine, model
from remap_serve.sim.roofline import Roofline

from .strategies import STRATEGIES
from .world import Device, Served, Tenant, arrivals, serve

__all__ = ["CELLS", "RESULTS", "Cell", "page", "run_market", "table"]

RESULTS = ROOT / "bench" / "results" / "market.json"
COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 50, 64, 80, 100)
ATTAINED = 0.9
SECONDS, SEEDS = 300.0, 5
LARGE = ("Qwen3-4B", "Mistral-7B-v0.3", "Llama-3-8b", "Qwen3-14B")
SMALL = ("Qwen3-4B", "Mistral-7B-v0.3")
MACHINES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "H100": ("H100-SXM", LARGE),
    "H200": ("H200-SXM", LARGE),
    "GH200": ("GH200-96GB", LARGE),
    "A10": ("A10", SMALL),
}
TARGETS = ((10.0, 0.1), (1.0, 0.05))
RATES = ("0.01", "0.05", "0.2", "tail")
SHOWN = ("static", "kvcached", "sleep mode", "LRU", "round robin", "Aegaeon", "whole, due", "ours", "ample")


@dataclass(frozen=True)
class Cell:
    """rate: requests a second of each model, or "tail": 0.05 in the mean, the i-th model in proportion to 1 / i."""

    machine: str
    rate: str
    ttft_s: float
    tbt_s: float

    @property
    def key(self) -> str:
        return f"{self.machine} {self.rate} {self.ttft_s:g} {self.tbt_s:g}"


FEWER = ("0.05", "0.2")
"""On the A10, and with the stricter targets, where the most models are few."""
CELLS = tuple(
    Cell(on, rate, *target)
    for target in TARGETS
    for on in MACHINES
    for rate in (RATES if target == TARGETS[0] and on != "A10" else FEWER)
)


def _machine(name: str) -> Machine:
    if name != "A10":
        return machine(name)
    # NVIDIA's data sheet: 24 GB at 600 GB/s, 125 TFLOP/s; PCIe 4.0 x16, of which large copies reach 25 GB/s.
    return machine("L40S").with_(
        name="A10",
        hbm_bytes=24_000_000_000,
        hbm_bytes_per_s=600e9,
        flops=125e12,
        h2d_bytes_per_s=25e9,
        d2h_bytes_per_s=25e9,
    )


def run_one(cell: Cell, strategy: str, count: int, seed: int, seconds: float, enough: float) -> Served | None:
    """One run with `count` models; None: they do not fit."""
    name, mix = MACHINES[cell.machine]
    on = _machine(name)
    rooflines = {each: Roofline(on, model(each)) for each in mix}
    tenants = [Tenant.of(i, (which := rooflines[mix[i % len(mix)]]).model, which) for i in range(count)]
    device = Device(on, int(0.9 * on.hbm_bytes), cell.ttft_s, cell.tbt_s)
    made = STRATEGIES[strategy](device, tenants)
    if not made.fits(device, tenants):
        return None
    if cell.rate == "tail":
        weights = [1 / (i + 1) for i in range(count)]
        rates = [0.05 * count * each / sum(weights) for each in weights]
        random.Random(seed).shuffle(rates)
    else:
        rates = [float(cell.rate)] * count
    return serve(device, tenants, arrivals(rates, seconds, seed), made, enough)


def most(cell: Cell, strategy: str, seed: int, seconds: float = SECONDS) -> dict[str, float]:
    """The most models of COUNTS with 90 % of the tokens on time, by bisection; and the shares of time of computing and
    copying then."""
    low, high, best = -1, len(COUNTS), None
    while high - low > 1:
        middle = (low + high) // 2
        served = run_one(cell, strategy, COUNTS[middle], seed, seconds, ATTAINED)
        if served is not None and served.attained >= ATTAINED:
            low, best = middle, served
        else:
            high = middle
    if best is None:
        return {"models": 0, "busy": 0.0, "link": 0.0}
    return {
        "models": COUNTS[low],
        "busy": round(best.busy_s / best.seconds, 3) if best.seconds else 0.0,
        "link": round(best.link_s / best.seconds, 3) if best.seconds else 0.0,
    }


def _cell(cell: Cell, seeds: int, seconds: float) -> dict[str, list[dict[str, float]]]:
    return {name: [most(cell, name, seed, seconds) for seed in range(seeds)] for name in STRATEGIES}


def models_of(found: Mapping[str, Any], name: str) -> list[float]:
    """By seed. "ample": the better of its two rules."""
    if name == "ample":
        pair = (models_of(found, "ample, due"), models_of(found, "ample, 50 ms"))
        return [max(both) for both in zip(*pair, strict=True)]
    return [one["models"] for one in found[name]]


def _shown(values: list[float]) -> str:
    low, middle, high = min(values), statistics.median_low(values), max(values)
    return f"{middle:g}" if low == high else f"{middle:g} ({low:g} to {high:g})"


def table(stored: Mapping[str, Any], ttft_s: float, tbt_s: float) -> str:
    """Models per GPU at these targets."""
    lines = ["| machine | requests/s each | " + " | ".join(SHOWN) + " |", "|" + "---|" * (len(SHOWN) + 2)]
    for cell in CELLS:
        found = stored["cells"].get(cell.key)
        if found is None or (cell.ttft_s, cell.tbt_s) != (ttft_s, tbt_s):
            continue
        rate = "0.05, tailed" if cell.rate == "tail" else cell.rate
        numbers = " | ".join(_shown(models_of(found, name)) for name in SHOWN)
        lines.append(f"| {cell.machine} | {rate} | {numbers} |")
    return "\n".join(lines)


PAGE = """# Models per GPU: {seeds} seeds of {seconds:g} s

The most models, of {counts}, of which 90 % of the tokens come in time: the first within the first
target of its request's arrival, each later one within the second target of when the one before was due. Median of {seeds} seeds,
(fewest to most). Virtual time, ShareGPT lengths, Poisson arrivals at the same rate for each model; "tailed": 0.05/s in the mean,
the i-th model in proportion to 1 / i. Models on the A10: {small}; else {large},
in turn, in bfloat16. 90 % of the device's memory, of which a tenth is KV of whoever computes. Untied embeddings lie in host
memory, heads come and go with layers; KV of who waits lies in host memory. Models of 72B fit none of these GPUs in bfloat16, and
one of 32B leaves no room for a second on most: they are left out, and so are 0.5 requests/s. Fewer rates on the A10 and with
the stricter targets.

Made by `python -m bench.lab market`. It is a model of the strategies with the library's roofline, certificate of first layers and
rule of turns; not the library's session, and nothing of it is measured. What each column does:
[strategies.py](../lab/market/strategies.py). "Aegaeon" is its scheduling as we read it, on one GPU, which it does not claim to be
made for: it has other GPUs for prefills. "whole, due" has our turns and whole models. "ample" has memory for all models and
computes one at a time, by the better of two rules: the device's bound, as far as these rules reach it.

{tables}

## The link and the device at that many models

Shares of the time, median of the seeds.

{shares}
"""


def page(stored: Mapping[str, Any]) -> str:
    """Of the stored file."""
    tables = []
    for ttft_s, tbt_s in TARGETS:
        tables.append(
            f"## First token within {ttft_s:g} s, then {1e3 * tbt_s:g} ms a token\n\n{table(stored, ttft_s, tbt_s)}"
        )
    shares = [
        "| machine | requests/s each | targets | ours computes | ours copies | whole, due copies |",
        "|---|---|---|---|---|---|",
    ]
    for cell in CELLS:
        found = stored["cells"].get(cell.key)
        if found is not None:
            middle = {
                (name, key): statistics.median(one[key] for one in found[name])
                for name in ("ours", "whole, due")
                for key in ("busy", "link")
            }
            rate = "0.05, tailed" if cell.rate == "tail" else cell.rate
            targets = f"{cell.ttft_s:g} s, {1e3 * cell.tbt_s:g} ms"
            shares.append(
                f"| {cell.machine} | {rate} | {targets} | {100 * middle['ours', 'busy']:.0f} % | "
                f"{100 * middle['ours', 'link']:.0f} % | {100 * middle['whole, due', 'link']:.0f} % |"
            )
    return PAGE.format(
        seeds=stored["seeds"],
        seconds=stored["seconds"],
        counts=", ".join(map(str, COUNTS)),
        small=" and ".join(SMALL),
        large=", ".join(LARGE),
        tables="\n\n".join(tables),
        shares="\n".join(shares),
    )


def run_market(
    path: Path, *, quick: bool = False, jobs: int = 1, report_only: bool = False, say: Callable[[str], None] = print
) -> str:
    """Run the cells that the file lacks, and write the page beside it. Returns the page."""
    seeds, seconds = (1, 10.0) if quick else (SEEDS, SECONDS)
    cells = CELLS[:1] if quick else CELLS
    stored: dict[str, Any] = {"seeds": seeds, "seconds": seconds, "cells": {}}
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
    lacking = [] if report_only else [cell for cell in cells if cell.key not in stored["cells"]]
    if lacking:
        with ProcessPoolExecutor(jobs) as pool:
            running = [(cell, pool.submit(_cell, cell, seeds, seconds)) for cell in lacking]
            for cell, future in running:
                stored["cells"][cell.key] = future.result()
                say(
                    f"{cell.key}: "
                    + ", ".join(f"{name} {_shown(models_of(stored['cells'][cell.key], name))}" for name in SHOWN)
                )
                path.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    made = page(stored)
    path.with_suffix(".md").write_text(made, encoding="utf-8")
    return made
