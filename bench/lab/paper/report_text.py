"""The words of docs/paper-vs-ours.md: what stands before the figures, and reasons, which are sentences about stored points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from remap.sim.hardware import machine

from .experiments import BASELINE, Experiment, Panel, Reckoning, setup_of
from .reckoning import Finding
from .runs import Store

__all__ = ["INTRO", "constants", "facts"]

INTRO = """# Paper versus ours

Figures of two papers beside those of a simulation on one machine, `{machine}`. This page is generated:
`python -m bench.lab paper` runs what is missing in `bench/results/paper.json` and writes it; `--report-only` only writes it.

- Oneiros: Li et al., KV Cache Optimization through Parameter Remapping for Multi-tenant LLM Serving.
- Pie: Xu et al., Pooling CPU Memory for LLM Inference.

## What is simulated

Time is simulated; the memory manager is not. The session, controller, planner, arena, executor and prefetcher are those of the
library, driven by a serving loop in virtual time. Passes take the time that a roofline fitted to published measurements gives
them, copies and mapping what the machine's table says (`remap plan --machine {machine}` prints both with their sources).
Arrivals and lengths are drawn from generators fitted to the Azure code trace, ShareGPT and Alpaca; the traces themselves are
not part of this project. Pie is a model of its own pipeline, with both directions of the link paid for.

No constant was chosen for a figure of this page: they come from the tables of machines and models. Sources begin with P (a
seed paper), S (a stored public page), D (a data sheet), V (fitted to published measurements) or A (an assumption).

{constants}

Assumed besides: turns of {quantum:g} s under temporal sharing, 0.5 GB of activations a model, blocks of 16 tokens, at most 256
sequences at once, and vLLM V0's order: prompts before decoding, whole prompts. So a burst of short prompts makes short passes
between the decoding ones, and gaps between tokens longer in all policies alike.

## How to read it

- The papers state neither their request rates nor, mostly, the size of their KV caches. Every comparison is therefore run over a
  grid of rates, the same for all: shares of c, the rate at which `recompute` (vLLM's preemption) is saturated. For each of our
  figures the rate is told: the lowest one at which the paper's number is reached or passed or, if it is reached nowhere, the
  one that comes nearest.
- A load counts at a rate only if `recompute` preempts there: below, memory is not scarce and all policies do the same. "mean"
  is the average over such rates at which `recompute` still serves all requests within {finishes:g} times the time in which
  they came; "better at 4 of 6" says at how many of them ours is better. Where a figure of the paper is an average over data
  sets, so is ours.
- `remap:oneiros` is the library set as Oneiros describes it: evenly spaced layers, the most recently used model gives first,
  two buffers. `remap` is the library with its defaults.
- "reached": the paper's number is reached or passed: an "up to" at one rate, an average in the mean of the rates that count, a
  range in that mean and up to its upper end. "at its best rate": reached or passed at the rate that is quoted, not in the mean.
  "direction": better at most of the rates that count, but less than the paper's number. "at some rates": better at the rate that
  is quoted, not at most. What is different is told with figures of the runs, in the section of the figure.
- In the tables of what the papers do not have, a plus is better; "x2.5" stands where what should be less is 2.5 times as much.
- {requests} requests a run (three times as many of Alpaca's), {seeds}. Percentiles are over all models of a run.{caution}
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


def facts(store: Store, experiment: Experiment, reckoning: Reckoning, findings: Sequence[Finding]) -> str:
    """Sentences about the runs behind the last finding that has a value, panel by panel, at the rate that it quotes."""
    quoted = [one for one in findings if one.value is not None and one.at]
    if not quoted:
        return ""
    one = quoted[-1]
    panels = {panel.name: panel for panel in experiment.panels}
    said = []
    for name, rate in one.at[:2]:
        test, base = store.points.at(name, one.key, one.test), store.points.at(name, one.key, one.base)
        plain = store.points.at(name, one.key, BASELINE)
        if test and base:
            said.append(
                f"{name} at {rate:.3g}/s: "
                + "; ".join(_facts(panels[name], store, reckoning, one, test[0], base[0], plain))
            )
    return ". ".join(said)


def _facts(
    panel: Panel,
    store: Store,
    reckoning: Reckoning,
    finding: Finding,
    test: Mapping[str, float],
    base: Mapping[str, float],
    plain: Sequence[Mapping[str, float]],
) -> list[str]:
    said = []
    if plain and plain[0]["preemptions"] == 0:
        said.append("recompute preempts nothing here")
    else:
        said.append(
            f"preemptions {base['preemptions']:.0f} ({finding.base}), {test['preemptions']:.0f} ({finding.test})"
        )
    # A fixed expansion begins with more than the device holds: what `recompute` has is the device's.
    growth = test["kv_blocks_peak"] / (plain[0] if plain else test)["kv_blocks_start"]
    if test["layers_remapped_peak"]:
        said.append(f"KV up to x{growth:.2f}, {test['layers_remapped_peak']:.0f} layers remapped at most")
    elif growth > 1:
        said.append(f"KV up to x{growth:.2f}")
    else:
        said.append("usable KV does not grow")
    if test["stall_fraction"] >= 0.02 or base["stall_fraction"] >= 0.02:
        said.append(
            f"passes wait {100 * test['stall_fraction']:.0f} % of their time ({finding.test}), "
            f"{100 * base['stall_fraction']:.0f} % ({finding.base})"
        )
    setup = setup_of(panel, machine(store.settings.machine))
    if "tbt" in reckoning.metric or "tail" in reckoning.metric:
        if panel.sharing == "temporal" and len(setup.tenants) > 1 and base["tbt_p99_s"] > setup.quantum_s / 2:
            said.append(
                f"P99 gap {base['tbt_p99_s']:.2f} s ({finding.base}), {test['tbt_p99_s']:.2f} s ({finding.test}), where a turn "
                f"of another model lasts {setup.quantum_s:g} s"
            )
        else:
            said.append(
                f"P99 gap {1e3 * base['tbt_p99_s']:.0f} ms ({finding.base}), {1e3 * test['tbt_p99_s']:.0f} ms ({finding.test})"
            )
        tokens = base["tokens_per_s"] * base["virtual_s"]
        if "p99" in reckoning.metric and base["preemptions"] and tokens:
            share = 100 * base["preemptions"] / tokens
            said.append(f"preemptions of {finding.base} are {share:.2g} % of its tokens, P99 begins at 1 %")
    if "ttft" in reckoning.metric:
        said.append(
            f"P99 TTFT {base['ttft_p99_s']:.2f} s ({finding.base}), {test['ttft_p99_s']:.2f} s ({finding.test})"
        )
    if "throughput" in reckoning.metric and base["arrive_s"] > 0:
        most = base["virtual_s"] / base["arrive_s"]
        said.append(
            f"requests come for {base['arrive_s']:.0f} s of the {base['virtual_s']:.0f} s of {finding.base}, so at most "
            f"x{most:.2f} can be gained"
        )
    return said
