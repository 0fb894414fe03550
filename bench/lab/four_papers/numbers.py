"""The numbers of docs/notes/paper-vs-ours.md, from the stored results of other commands. Nothing is run here."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.lab import ROOT, headline
from bench.lab.hybridserve import figures as hybridserve
from bench.lab.hybridserve.batches import Batch
from bench.lab.hybridserve.window import window
from bench.lab.kunserve import burst_map
from bench.lab.kunserve import figures as kunserve
from bench.lab.paper.experiment_list import EXPERIMENTS
from bench.lab.paper.experiments import BASELINE, IDEAL, Panel
from bench.lab.paper.reckoning import Finding, Spread, compare, curve
from bench.lab.paper.report import Row
from bench.lab.paper.report import rows as oneiros_rows
from bench.lab.paper.runs import Store
from bench.lab.pie import figures as pie
from bench.lab.pie.command import flexgen_beside
from bench.lab.seeds import Point

from remap.errors import InvalidArgument
from remap_serve.sim.ideal import against_ideal
from remap_serve.sim.policies import OURS, UNUSED_KV_AND_SWAP, WEIGHTS_ONLY

__all__ = [
    *(
        "Oneiros",
        "Stored",
        "above_bound",
        "bursts_of",
        "closed_form_less",
        "engine_gains",
        "flexgen_of",
        "gap_closed",
        "headline_gaps",
        "hybridserve_of",
    ),
    *(
        "kunserve_of",
        "mixtures",
        "number",
        "offline_best",
        "over_kv",
        "parts_worth",
        "pie_at_3c",
        "pie_of",
        "preemptions_fewer",
    ),
    "times",
]

RESULTS = ROOT / "bench" / "results"


def number(value: float) -> str:
    """Three digits at most, whole from ten on, a true minus, and no "-0"."""
    text = f"{value:,.0f}" if abs(value) >= 9.95 else f"{value:.1f}" if abs(value) >= 0.05 else "0"
    return text.replace("-", "−")


def times(value: float) -> str:
    """Of a ratio: two decimals below ten."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.0f}"


@dataclass(frozen=True)
class Stored:
    """What is stored. oneiros: of `bench.lab paper`; the others: the points of each file, by the names of their runs."""

    oneiros: Store
    headline: Mapping[str, Point]
    kunserve: Mapping[str, Any]
    burst_map: Mapping[str, Point]
    hybridserve: Mapping[str, Point]
    pie: Mapping[str, Any]
    offline: Mapping[str, Point]
    gap: Mapping[str, Point]

    @classmethod
    def read(cls, results: Path = RESULTS) -> Stored:
        """From this folder. Raises InvalidArgument (field path) for a file that is missing or of something else."""

        def of(name: str) -> Any:
            path = results / f"{name}.json"
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
                dict(found["points"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise InvalidArgument(
                    f"{path} is not a result of `bench.lab {name}` ({error!r}); nothing was written",
                    field="path",
                    value=str(path),
                ) from error
            return found

        return cls(
            Store.read(results / "paper.json"),
            of("headline")["points"],
            of("kunserve"),
            of("kunserve-map")["points"],
            of("hybridserve")["points"],
            of("pie"),
            of("offline")["points"],
            of("gap")["points"],
        )


# ---------------------------------------------------------------------------------------------- Oneiros


class Oneiros:
    """The findings of `bench.lab paper`: by the id of a headline, of weights alone unless another policy is compared."""

    def __init__(self, stored: Stored) -> None:
        self._points = stored.oneiros.points
        self._rows = {row.headline.id: row for row in oneiros_rows(stored.oneiros)}

    def row(self, id: str) -> Row:
        """Of a headline, such as "oneiros-04"."""
        return self._rows[id]

    def ours(self, id: str) -> Finding:
        """Of the last policy that is compared: `remap:weights` where it is one of them."""
        return self._rows[id].findings[-1]

    def ideal(self, id: str) -> Spread | None:
        """The mean over the rates that count, of the loads for which `ideal` was run; None if it was for none."""
        row = self._rows[id]
        panels = [one for one in row.experiment.panels if self._points.keys(one.name, IDEAL)]
        if not panels:
            return None
        return compare(self._points, row.headline, row.reckoning, panels, IDEAL).mean

    def tpot(self, id: str, policy: str = WEIGHTS_ONLY) -> Finding:
        """In P99 of the requests' mean gaps, for a headline in P99 of the gaps; of the loads for which the policy was run."""
        row = self._rows[id]
        other = replace(row.reckoning, metric="tpot_p99_reduction")
        panels = [one for one in row.experiment.panels_of(other) if self._points.keys(one.name, policy)]
        return compare(self._points, row.headline, other, panels, policy)

    def loads_of(self, policy: str) -> list[tuple[Panel, float]]:
        """(load, share of c) of Figures 8 to 10, 12 and 13 for which the policy was run."""
        return [
            (panel, float(key[1:]))
            for panel in EXPERIMENTS["oneiros-all"].panels
            for key in self._points.keys(panel.name, BASELINE, policy)
            if key.startswith("x")
        ]

    def cut(self, panel: Panel, factor: float, metric: str = "tpot_p99_reduction", policy: str = WEIGHTS_ONLY) -> float:
        """Percent less than under recompute at factor x c: the median of the seeds."""
        return statistics.median(dict(curve(self._points, [panel], policy, BASELINE, metric))[f"x{factor:g}"])

    def median(self, panel: str, factor: float, policy: str, figure: str) -> float:
        """Of a figure of the runs at factor x c."""
        return statistics.median(one[figure] for one in self._points.at(panel, f"x{factor:g}", policy))


def headline_gaps(stored: Stored) -> dict[tuple[str, float], dict[str, float]]:
    """(load, share of c) -> policy -> P99 TBT in seconds, the median of the seeds: the eight loads of headline.md."""
    return {
        (panel.name, factor): {
            policy: statistics.median(
                stored.headline[headline.name_of(panel, factor, policy, seed)]["tbt_p99_s"]
                for seed in range(headline.SETTINGS.seeds)
            )
            for policy in (BASELINE, UNUSED_KV_AND_SWAP, WEIGHTS_ONLY, OURS, IDEAL)
        }
        for panel in headline.PANELS
        for factor in headline.FACTORS
    }


# ---------------------------------------------------------------------------------------------- KunServe


def kunserve_of(stored: Stored, id: str, system: str, about: str = "") -> tuple[float, ...]:
    """A number of the paper as the stored runs have it: medians of the seeds, (least, most) where it is a range.
    about: of several claims of one id, the one whose description begins so."""
    (claim,) = (one for one in kunserve.CLAIMS if one.id == id and one.about.startswith(about))
    found = [claim.of(_kunserve(stored, seed), system) for seed in range(stored.kunserve["settings"]["seeds"])]
    return tuple(_median(values) for values in zip(*found))


def _kunserve(stored: Stored, seed: int) -> kunserve.At:
    def at(setup: str, system: str) -> Point:
        found: Point = stored.kunserve["points"][kunserve.name_of(setup, system, seed)]
        return found

    return at


def bursts_of(stored: Stored) -> list[burst_map.Place]:
    """The loads of the map, each with how many times lower P99 TTFT is."""
    return burst_map.places_of({**stored.kunserve["points"], **stored.burst_map})


def preemptions_fewer(stored: Stored) -> float:
    """% fewer preemptions with the paper's policy than with vLLM's recomputation: the least of the loads of Figures 12 and 13,
    of medians."""
    seeds = range(stored.kunserve["settings"]["seeds"])
    figure = kunserve.FIGURES[0]

    def median(setup: str, system: str) -> float:
        return statistics.median(
            stored.kunserve["points"][kunserve.name_of(setup, system, seed)]["preemptions"] for seed in seeds
        )

    return min(100.0 * (1.0 - median(setup, "kunserve") / median(setup, "vllm")) for setup in figure.setups)


def _median(values: Iterable[float]) -> float:
    """Of those that are numbers; nan if none is."""
    known = [value for value in values if value == value]
    return statistics.median(known) if known else float("nan")


# ---------------------------------------------------------------------------------------------- HybridServe


def hybridserve_of(stored: Stored, id: str, system: str) -> tuple[float, ...]:
    """A number of the paper (its id in paper/headlines.json) as the stored runs have it."""
    (claim,) = (one for one in hybridserve.CLAIMS if one.headline == id)
    return claim.of(lambda batch, of: stored.hybridserve[hybridserve.name_of(batch, of, 0)], system)


def mixtures(stored: Stored) -> tuple[int, int, float]:
    """Of the simulated batches of Figure 12: in how many a mixture is ahead of KV alone and of activations alone, of how many,
    and the most by which it is, times."""
    ahead = []
    for batch in hybridserve.GRIDS["12"].batches:
        found = {
            system: stored.hybridserve[hybridserve.name_of(batch, system, 0)]
            for system in ("KV", "activations", *hybridserve.HYBRIDS)
        }
        pure = max(found[system]["tokens_per_s"] for system in ("KV", "activations"))
        mixed = [found[one] for one in hybridserve.HYBRIDS if 0.0 < found[one]["activation_share"] < 1.0]
        ahead.append(max((one["tokens_per_s"] / pure for one in mixed), default=0.0))
    return sum(one > 1.0 for one in ahead), len(ahead), max(ahead)


def over_kv(stored: Stored, grid: str, machine: str) -> float:
    """The most tokens/s of `ours`, KV alone = 1, of a grid's batches on this machine."""
    return max(
        stored.hybridserve[hybridserve.name_of(batch, "ours", 0)]["tokens_per_s"]
        / stored.hybridserve[hybridserve.name_of(batch, "KV", 0)]["tokens_per_s"]
        for batch in hybridserve.GRIDS[grid].batches
        if batch.machine == machine
    )


def above_bound(stored: Stored) -> float:
    """The most by which a pass of `ours` is longer than the bound, times, in the batches of Figure 12."""
    points = (
        (batch, stored.hybridserve[hybridserve.name_of(batch, "ours", 0)]) for batch in hybridserve.GRIDS["12"].batches
    )
    return max(point["pass_s"] / window(batch).seconds(point["activation_share"]) for batch, point in points)


def parts_worth(stored: Stored) -> float:
    """The most tokens/s with copies by mini-batch and activations that stay, without both = 1, in the batches of Figure 12."""

    def rate(batch: Batch, system: str) -> float:
        return stored.hybridserve[hybridserve.name_of(batch, system, 0)]["tokens_per_s"]

    return max(rate(batch, "ours") / rate(batch, "whole") for batch in hybridserve.GRIDS["12"].batches)


def engine_gains(stored: Stored) -> list[float]:
    """Of the loads at which the library's engine chose a mixture in virtual time: its tokens/s by those of the better of KV alone
    and activations alone, seed by seed; the medians."""
    gains = []
    for load in hybridserve.LOADS:
        seeds = [number for number in range(5) if hybridserve.engine_name(load, "best", number) in stored.hybridserve]
        rates, mixed = [], False
        for seed in seeds:
            runs = {
                policy: stored.hybridserve[hybridserve.engine_name(load, policy, seed)]
                for policy in ("KV", "activations", "best")
            }
            best = runs.pop("best")
            mixed |= 0.0 < best["activation_share"] < 1.0
            rates.append(best["tokens_per_s"] / max(one["tokens_per_s"] for one in runs.values()))
        if mixed:
            gains.append(statistics.median(rates))
    return gains


def offline_best(stored: Stored) -> dict[str, tuple[float, dict[str, float]]]:
    """Of each case that was measured in the engine: the share of activations that the engine chose (the median of the rounds),
    and tokens/s of each policy."""
    found: dict[str, dict[str, list[Point]]] = {}
    for name, point in stored.offline.items():
        case, policy, _ = name.split(" | ")
        found.setdefault(case, {}).setdefault(policy, []).append(point)
    return {
        case: (
            statistics.median(one["activation_share"] for one in policies["best"]),
            {name: statistics.median(one["tokens_per_s"] for one in runs) for name, runs in policies.items()},
        )
        for case, policies in found.items()
    }


# ---------------------------------------------------------------------------------------------- Pie


def pie_of(stored: Stored, id: str, policies: Sequence[str] = (), of: Callable[[str], str] = str) -> float:
    """A number of the paper as the stored runs have it, the median of the seeds. policies: Pie's own if there are none, as `of`
    reads them. Raises KeyError for what was not run."""
    (claim,) = (one for one in pie.CLAIMS if one.headline == id)
    seeds = range(stored.pie["settings"]["seeds"])
    chosen = tuple(policies) or tuple(map(of, claim.pie))
    return statistics.median(claim.of(_pie(stored, seed), chosen) for seed in seeds)


def closed_form_less(stored: Stored, of: Callable[[str], str], figure: int) -> tuple[float, float]:
    """How many % fewer tokens/s fixed expansions of Pie serve, as `of` reads them, than in closed form, at the places of one of
    `pie.FIGURES`: the least and the most, medians of the seeds."""
    ats = [_pie(stored, seed) for seed in range(stored.pie["settings"]["seeds"])]
    found = [
        _median(
            100.0
            * (1.0 - at(*place, of(policy))["tokens_per_s"] / at(*place, pie.closed_form_of(policy))["tokens_per_s"])
            for at in ats
        )
        for place in pie.FIGURES[figure].places
        for policy in pie.EXPANSIONS
    ]
    return min(found), max(found)


def flexgen_of(stored: Stored, id: str, *, padding: bool = False) -> float:
    """Pie's tokens/s by FlexGen's as described, the median of the seeds. padding: FlexGen's tokens of padding count."""
    runs = flexgen_beside(stored.pie, id, as_described=True)
    return statistics.median(mine / (block.all_per_s if padding else block.answers_per_s) for mine, block in runs)


def _pie(stored: Stored, seed: int) -> pie.At:
    def at(panel: Panel, factor: float, policy: str) -> Point:
        found: Point = stored.pie["points"][headline.name_of(panel, factor, policy, seed)]
        return found

    return at


def pie_at_3c(stored: Stored, gigabytes: Sequence[int]) -> tuple[float, float]:
    """tokens/s of Pie in Figure 7 (3 c), `recompute` = 1, with so much KV: the least and the most of loads and sizes."""
    seeds = range(stored.pie["settings"]["seeds"])
    found = [
        statistics.median(pie.gain(_pie(stored, seed), (place,), (pie.PIE,)) for seed in seeds)
        for place in pie.FIGURES[1].places
        if int(place[0].name.split()[-2]) in gigabytes
    ]
    return min(found), max(found)


def gap_closed(stored: Stored, machine: str, policy: str) -> tuple[float, float]:
    """How far a policy comes from recompute to ideal in P99 TTFT, %, with several models in turns on this machine: the least
    and the most of the loads of gap.md, medians of their seeds."""
    cells: dict[str, dict[str, dict[str, Point]]] = {}
    for name, point in stored.gap.items():
        load, of, seed = name.rsplit(" | ", 2)
        if load.startswith(f"{machine} | "):
            cells.setdefault(load, {}).setdefault(seed, {})[of] = point
    found = [
        _median(100.0 * against_ideal(runs)[policy]["gap_closed_ttft_p99"] for runs in seeds.values())
        for seeds in cells.values()
    ]
    return min(found), max(found)
