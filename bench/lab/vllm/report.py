"""The table of `bench.lab vllm`, in markdown and as JSON."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from remap.sizes import show_size
from remap_serve.cli.machine import machine_now
from remap_serve.engine.metrics import percentile

from .compare import SIDES

__all__ = ["markdown", "stem", "summarise", "write"]

ROWS = (
    ("tokens_per_s", "tokens/s", "{:.1f}", "higher"),
    ("ttft_p50_s", "TTFT P50, s", "{:.3f}", "lower"),
    ("ttft_p99_s", "TTFT P99, s", "{:.3f}", "lower"),
    ("tbt_p50_s", "TBT P50, s", "{:.4f}", "lower"),
    ("tbt_p99_s", "TBT P99, s", "{:.4f}", "lower"),
    ("tbt_max_s", "longest gap between tokens, s", "{:.2f}", "lower"),
    ("preemptions", "preemptions", "{:.0f}", ""),
    ("recomputed_tokens", "tokens recomputed", "{:.0f}", ""),
    ("loaded_tokens", "tokens loaded from the host", "{:.0f}", ""),
    ("blocks_peak", "KV blocks, peak", "{:.0f}", ""),
    ("alpha_peak", "layers remapped, peak", "{:.0f}", ""),
    ("streamed_mb", "weights streamed, MB", "{:.0f}", ""),
    ("stall_share", "stalled, share of computing", "{:.4f}", ""),
)


def summarise(result: dict[str, Any]) -> dict[str, float]:
    """The metrics of one run under one load."""
    return {
        "tokens_per_s": result["tokens"] / result["seconds"],
        "ttft_p50_s": percentile(result["ttft_s"], 0.5),
        "ttft_p99_s": percentile(result["ttft_s"], 0.99),
        "tbt_p50_s": percentile(result["tbt_s"], 0.5),
        "tbt_p99_s": percentile(result["tbt_s"], 0.99),
        "tbt_max_s": max(result["tbt_s"]),
        "preemptions": result["preemptions"],
        "recomputed_tokens": result["recomputed_tokens"],
        "loaded_tokens": result["loaded_tokens"],
        "blocks_peak": result["blocks_peak"],
        "alpha_peak": result["alpha_peak"],
        "streamed_mb": result.get("copied_bytes", 0) / 1e6,
        "stall_share": result.get("stall_s", 0.0) / max(result.get("compute_s", 0.0), 1e-9),
        "requests": result["requests"],
        "same_answers": result["same_answers"],
    }


def markdown(measured: dict[str, Any]) -> str:
    """All sides under each load: medians of the runs, their ranges, and the ratio of remap's and stock's medians."""
    settings, machine = measured["settings"], measured["machine"]
    names = list(dict.fromkeys(run["side"] for run in measured["runs"]))
    lines = [
        "# vLLM with and without remap" + (", with and without KV in host memory" if settings["host_kv_bytes"] else ""),
        "",
        f"{Path(settings['model']).name}, {settings['dtype']}; KV cache {show_size(settings['kv_bytes'])} at first; at most "
        f"{settings['max_num_seqs']} requests at once; {settings['threads']} computing thread(s) on all sides; lengths "
        f"{settings['lengths']} x ShareGPT's; gaps between arrivals with a coefficient of variation of {settings['cv']}; n = "
        f"{settings['runs']} runs of each side, alternating; remap's linear layers {settings['cpu_linear']}; "
        f"{machine['cpu']}, {machine['cores']} cores; load average "
        f"{min(run['load_average'] for run in measured['runs']):.1f} to "
        f"{max(run['load_average'] for run in measured['runs']):.1f}.",
    ]
    if settings["host_kv_bytes"]:
        lines[-1] += (
            f' "Host KV": {show_size(settings["host_kv_bytes"])} of host memory more, into which vLLM\'s OffloadingConnector '
            "copies every full block, by `remap.adapters.vllm.host_kv`."
        )
    for load, share in measured["loads"].items():
        sides = {
            side: [summarise(run["loads"][load]) for run in measured["runs"] if run["side"] == side] for side in names
        }
        count = int(sides["stock"][0]["requests"])
        rate = f"{measured['rate'] * share:.2f} requests/s, {count} in all"
        lines += [
            "",
            f"## {load}: {share:g} of what stock serves with ample KV cache ({rate})",
            "",
            f"| | {' | '.join(names)} | remap / stock |",
            "|---" * (len(names) + 2) + "|",
        ]
        for name, title, form, better in ROWS:
            values = {side: [run[name] for run in sides[side]] for side in names}
            middle = {side: statistics.median(values[side]) for side in SIDES}
            ratio = f"{middle['remap'] / middle['stock']:.2f}" if better and middle["stock"] else ""
            lines.append(f"| {title} | {' | '.join(_show(form, values[side]) for side in names)} | {ratio} |")
        same = [f"{int(min(run['same_answers'] for run in sides[side]))} of {count}" for side in names]
        lines.append(f"| answers as when nothing is short | {' | '.join(same)} | |")
    return "\n".join(lines) + "\n"


def _show(form: str, values: list[float]) -> str:
    middle = form.format(statistics.median(values))
    low, high = form.format(min(values)), form.format(max(values))
    return middle if low == high else f"{middle} ({low} to {high})"


def stem(host_kv_bytes: int) -> str:
    """The name of the result's files: the runs with KV in host memory have other settings, and stand beside the others."""
    return "vllm-host-kv" if host_kv_bytes else "vllm"


def write(measured: dict[str, Any], out: Path) -> str:
    """`stem`.json (the runs without single times, the machine) and .md in `out`. Returns the markdown."""
    measured = {**measured, "machine": machine_now()}
    measured["settings"] = {**measured["settings"], "model": Path(measured["settings"]["model"]).name}
    text = markdown(measured)
    runs = [
        {
            **{key: run[key] for key in ("side", "load_average")},
            "loads": {name: summarise(result) for name, result in run["loads"].items()},
        }
        for run in measured["runs"]
    ]
    out.mkdir(parents=True, exist_ok=True)
    name = stem(measured["settings"]["host_kv_bytes"])
    (out / f"{name}.json").write_text(json.dumps({**measured, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    return text
