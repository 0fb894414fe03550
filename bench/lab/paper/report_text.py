"""The words of bench/results/paper.md: what stands before the figures, and reasons, which are sentences about stored points."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from bench.lab.seeds import Column, Point, cell

from remap.policy.hardware import machine
from remap_serve.sim.serving import Setup

from .experiments import BASELINE, Experiment, Reckoning, setup_of
from .reckoning import Finding
from .runs import Store

__all__ = ["GAPS", "INTRO", "constants", "facts"]

INTRO = """# Oneiros' figures beside ours

Figures of a paper beside those of a simulation on one machine, `{machine}`. The paper is Oneiros: Li et al., KV Cache
Optimization through Parameter Remapping for Multi-tenant LLM Serving. This page has all figures and their reasons; what
follows from them, for this paper and three others: [docs/paper-vs-ours.md](../../docs/notes/paper-vs-ours.md).

Every number of ours is the median of {seeds} seeds, (lowest to highest), and {requests} requests a run (three times
as many of Alpaca's). TTFT is the time to a request's first token, TBT the time between two tokens of a request;
percentiles are over all models of a run. Two of the loads with 2,000 requests a run:
[headline.md](headline.md).

This page is generated: `python -m bench.lab paper` runs what is missing in `bench/results/paper.json` and writes the
page; `--report-only` only writes it.

## In short

Of {figures} figures of the paper that are compared:

{short}

## How to read it

- The paper states neither its request rates nor, mostly, the size of its KV caches. Every comparison is therefore run
  over a grid of rates, the same for all: shares of c, the rate at which `recompute` (vLLM's preemption) is saturated.
  Beside each of our figures stands the rate: the lowest one at which the paper's number is reached or passed or, if it
  is reached nowhere, the one that comes nearest. The median of the seeds chooses that rate, never the best seed: of one
  seed, chance chooses. It is a favourable rate all the same; beside it stands the mean of all that count.
- A seed of one policy is compared with the same seed of the other: both get the same requests. Where a figure of the
  paper is an average over data sets, so is ours, seed by seed.
- A load counts at a rate only if `recompute` preempts there: below, memory is not scarce and all policies do the same.
  "mean" is the average over such rates at which `recompute` still serves all requests within {finishes:g} times the
  time in which they came; "better at 4 of 6" says at how many of them ours is better. Both go by the medians of the
  seeds.
- Ours are runs of weights alone, as in the paper: every KV reservation is its model's own, and nothing goes to host
  memory. `remap:weights+oneiros` is the library set as Oneiros describes it: evenly spaced layers, the most recently used
  model gives first, two buffers. `remap:weights` decides as the library does by default. The default has all donors and is
  called `remap`; it stands in [headline.md](headline.md) and in [gap.md](gap.md).
- "reached": the paper's number is reached or passed: an "up to" at one rate, an average in the mean of the rates that
  count, a range at both ends. "at its best rate": reached or passed at the rate that is quoted, not in the mean.
  "direction": better at most of the rates that count, but less than the paper's number. "at some rates": better at the
  rate that is quoted, not at most. What is different is told with figures of the runs, in the section of the figure.
- A minus is worse: "P99 TBT lower, -30 %" is 30 % higher. In the tables of what the paper does not have, "x2.5" stands
  where what should be less is 2.5 times as much.

## What is simulated

Time is simulated; the memory manager is not. The session, controller, planner, arena, executor and prefetcher are those
of the library, driven by a serving loop in virtual time. Passes take the time that a roofline fitted to published
measurements gives them, copies and mapping what the machine's table says (`remap plan --machine {machine}` prints both
with their sources). Arrivals and lengths are drawn from generators fitted to the Azure code trace, ShareGPT and Alpaca;
the traces themselves are not part of this project. Pie is a model of its own: event by event in Fig 14, and its pipeline in
closed form where one model is alone.

No constant was chosen for a figure of this page: they come from the tables of machines and models. Sources begin with P
(a seed paper), S (a stored public page), D (a data sheet), V (fitted to published measurements) or A (an assumption).

{constants}

Assumed besides: turns of {quantum:g} s under temporal sharing, 0.5 GB of activations a model, blocks of 16 tokens, at
most 256 sequences at once, and vLLM V0's order: prompts before decoding, whole prompts. So a burst of short prompts
makes short passes between the decoding ones, and gaps between tokens longer in all policies alike.
"""


GAPS = """## One gap between tokens, and the mean gap of a request

Time between tokens can be told in two ways. P99 TBT is the gap that 1 % of all gaps exceed; P99 TPOT is the mean gap of a
request that 1 % of the requests exceed. "-8 / +40": P99 TBT is 8 % longer than under the policy that it is compared with, P99
TPOT 40 % shorter. Medians of the seeds; c is the rate at which `recompute` is saturated. –: no run at this rate. First the
loads of Figures 8 to 10, 12 and 13, then the figures that compare with something else.
"""

_CONSTANTS = (
    ("device memory", "hbm_bytes", 1e9, "GB"),
    ("its bandwidth", "hbm_bytes_per_s", 1e9, "GB/s"),
    ("computation, 16 bit", "flops", 1e12, "TFLOP/s"),
    ("host to device", "h2d_bytes_per_s", 1e9, "GB/s"),
    ("device to host", "d2h_bytes_per_s", 1e9, "GB/s"),
    ("share of a direction while the other is busy too", "duplex", 1.0, ""),
    ("start of a copy", "copy_setup_s", 1e-6, "us"),
    ("mapping a page of 2 MiB", "map_page_s", 1e-6, "us"),
    ("allowing access to it", "set_access_s", 1e-6, "us"),
    ("unmapping it", "unmap_page_s", 1e-6, "us"),
    ("between two passes", "iteration_gap_s", 1e-3, "ms"),
)


def constants(name: str) -> list[str]:
    """A table of the machine's constants and where they come from, as lines of markdown."""
    chosen = machine(name)
    out = ["| constant | value | source |", "|---|---|---|"]
    for title, field, unit, letters in _CONSTANTS:
        value = f"{getattr(chosen, field) / unit:.4g} {letters}".strip()
        out.append(f"| {title} | {value} | {chosen.sources.get(field, '')} |")
    line = chosen.roofline
    values = f"bandwidth {line.eff_bw:g}, computation {line.eff_flops:g}, p {line.p:g}"
    return [*out, f"| roofline: shares that passes reach | {values} | {chosen.sources.get('roofline.eff_bw', '')} |"]


def facts(store: Store, experiment: Experiment, reckoning: Reckoning, findings: Sequence[Finding]) -> tuple[str, ...]:
    """Sentences about the runs behind the last finding that has a value, one a panel, at the rate that it quotes."""
    quoted = [one for one in findings if one.value is not None and one.at]
    if not quoted:
        return ()
    one = quoted[-1]
    panels = {panel.name: panel for panel in experiment.panels}
    said = []
    for name, rate in one.at:
        test, base = store.points.at(name, one.key, one.test), store.points.at(name, one.key, one.base)
        plain = store.points.at(name, one.key, BASELINE)
        setup = setup_of(panels[name], machine(store.settings.machine))
        said.append(f"{name} at {rate:.3g}/s: " + "; ".join(_facts(setup, reckoning, one, test, base, plain)))
    return tuple(said)


def _facts(
    setup: Setup,
    reckoning: Reckoning,
    finding: Finding,
    test: Sequence[Point],
    base: Sequence[Point],
    plain: Sequence[Point],
) -> list[str]:
    """test, base, plain: the points of the finding's policies and of `BASELINE`, one a seed."""

    def both(value: Callable[[Point], float], times: float = 1.0, unit: str = "") -> str:
        first, second = (_cell(map(value, points), times) + unit for points in (base, test))
        return f"{first} under {finding.base}, {second} under {finding.test}"

    said = []
    if plain and not _middle(plain, "preemptions"):
        said.append("recompute preempts nothing here")
    else:
        said.append(f"preemptions {both(itemgetter('preemptions'))}")
    growth = [one["kv_blocks_peak"] / one["kv_blocks_start"] for one in test]
    if statistics.median(growth) > 1:
        said.append(f"KV up to {_cell(growth)} times as large")
    else:
        said.append("usable KV does not grow")
    if _middle(test, "layers_remapped_peak"):
        layers = _cell(one["layers_remapped_peak"] for one in test)
        said[-1] += f", {layers} layers remapped at most"
    if max(_middle(points, "stall_fraction") for points in (test, base)) >= 0.02:
        said.append(f"share of passes spent waiting {both(itemgetter('stall_fraction'), 100, ' %')}")
    if "tbt" in reckoning.metric or "tail" in reckoning.metric:
        share = 50 if "p50" in reckoning.metric else 99
        said.append(f"P{share} TBT {both(itemgetter(f'tbt_p{share}_s'), 1e3, ' ms')}")
        in_turns = setup.sharing == "temporal" and len(setup.tenants) > 1
        if in_turns and _middle(base, f"tbt_p{share}_s") > setup.quantum_s / 2:
            said[-1] += f", where a turn of another model lasts {setup.quantum_s:g} s"
        if "p99" in reckoning.metric and _middle(base, "preemptions"):
            long = _cell((one["preemptions"] / (one["tokens_per_s"] * one["virtual_s"]) for one in base), 100)
            said.append(
                f"preemptions make {long} % of the gaps between tokens of {finding.base}, and P99 is of the longest 1 %"
            )
    if "ttft" in reckoning.metric:
        said.append(f"P99 TTFT {both(itemgetter('ttft_p99_s'), unit=' s')}")
    if "throughput" in reckoning.metric:
        most = _cell(one["virtual_s"] / one["arrive_s"] for one in base)
        said.append(
            f"requests come for {_cell(one['arrive_s'] for one in base)} s of the {_cell(one['virtual_s'] for one in base)} s "
            f"of {finding.base}, so at most {most} times its tokens/s can be had"
        )
    return said


def _cell(values: Iterable[float], times: float = 1.0) -> str:
    return cell(list(values), Column("", "", times))


def _middle(points: Sequence[Point], figure: str) -> float:
    return statistics.median(one[figure] for one in points)
