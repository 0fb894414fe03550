"""vLLM as it ships and on remap, with the same memory for KV cache at the start: a burst of requests, greedy, to the full length.

Each side is a process of its own (`bench.lab.vllm.engine`). The reference is stock vLLM with ample KV. In bfloat16 a batch of
other rows may round otherwise, so the answers of stock in small memory are counted beside remap's.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.context import MIB, Context, Skip
from bench.gpu.models import LLAMA_3_8B, ModelShape, make_model
from bench.gpu.processes import ROOT, start, stop
from bench.gpu.registry import Wrong, measure
from bench.gpu.results import Figure, count, figure

from remap_serve.sim.results import percentile

SIDES: Mapping[str, Mapping[str, Any]] = {"stock": {}, "remap": {}, "remap, slowdown 0.5": {"slowdown": 0.5}}


@dataclass(frozen=True)
class Case:
    """kv_bytes: of both sides at the start. graphs: sizes of batches that are captured; (): eager. limit_s: of one process."""

    shape: ModelShape
    dtype: str
    kv_bytes: int
    requests: int
    output: int
    block_tokens: int = 16
    max_model_len: int = 1024  # as the model says of itself: vLLM refuses more
    graphs: tuple[int, ...] = ()
    limit_s: float = 150.0

    def items(self) -> list[list[float]]:
        """All at once: [arrival, prompt tokens, output tokens, seed] each. Prompts have 64 to 560 tokens, or what fits."""
        most = self.max_model_len - self.output
        return [[0.0, min(64 + 16 * n % 512, most), self.output, n] for n in range(self.requests)]


def environment(side: str) -> dict[str, str]:
    """Of an engine's process: remap is switched on on its own side alone."""
    return {
        **{name: value for name, value in os.environ.items() if name not in ("REMAP_ENABLE", "REMAP_DEVICE")},
        **({"REMAP_ENABLE": "1"} if side == "remap" else {}),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


def run_side(
    case: Case,
    side: str,
    model: Path,
    *,
    kv_bytes: int | None = None,
    loads: Sequence[str] = ("burst",),
    remap: Mapping[str, Any] | None = None,
    **engine: Any,
) -> dict[str, Any]:
    """One engine's results, a load after the other. remap: settings of the adapter; None: as it ships. Raises Wrong with its last
    words if it ends otherwise."""
    graphs = {"compilation_config": {"cudagraph_capture_sizes": list(case.graphs)}} if case.graphs else {}
    spec = {
        "model": str(model),
        "dtype": case.dtype,
        "side": side,
        "kv_bytes": kv_bytes or case.kv_bytes,
        "host_kv_bytes": 0,
        "block_tokens": case.block_tokens,
        "max_model_len": case.max_model_len,
        "max_num_seqs": 64,
        "max_batch_tokens": 4096,
        "vocabulary": case.shape.vocabulary,
        "remap": dict(remap or {}),
        "engine": {"skip_tokenizer_init": True, "enforce_eager": not case.graphs, **graphs, **engine},
        "loads": [{"name": name, "items": case.items()} for name in loads],
    }
    with tempfile.TemporaryDirectory() as folder:
        given, log = Path(folder) / "spec.json", Path(folder) / "log"
        given.write_text(json.dumps(spec), encoding="utf-8")
        # Of `start` for its keeper: no engine outlives the suite.
        around = {**environment(side), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        process = start([sys.executable, "-m", "bench.lab.vllm.engine", str(given)], around, log)
        end = time.monotonic() + case.limit_s
        try:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.2)
            code = process.poll()
        finally:
            stop(process)
        told = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
    if code != 0 or not told[-1].startswith("{"):
        why = f"took longer than {case.limit_s:.0f} s" if code is None else f"ended with code {code}"
        raise Wrong(f"the {side} engine {why}; its last words: {' | '.join(told[-6:])[-1500:]}")
    found: dict[str, Any] = json.loads(told[-1])
    return found


def figures(
    title: str, results: Mapping[str, Sequence[Mapping[str, Any]]], reference: Sequence[Any]
) -> Iterator[Figure]:
    """Of each side: preemptions, tokens recomputed, tokens/s, first token and gap between tokens, answers as the reference's.
    results: its bursts."""
    for side, bursts in results.items():
        rates = [each["tokens"] / each["seconds"] for each in bursts]
        first = [s for each in bursts for s in each["ttft_s"]]
        gaps = [s for each in bursts for s in each["tbt_s"]] or [0.0]
        yield figure(
            f"{title}, {side}, tokens/s (us: between tokens)",
            statistics.median(rates),
            "tokens/s",
            gaps,
            range=[min(rates), max(rates)],
            runs=len(bursts),
            recomputed=[each["recomputed_tokens"] for each in bursts],
            growth=[each["alpha_peak"] for each in bursts],
        )
        for what, values in (("first token", "ttft_s"), ("between tokens", "tbt_s")):
            late = [percentile(each[values] or [0.0], 0.99) * 1e3 for each in bursts]
            yield figure(f"{title}, {side}, {what}, P99", statistics.median(late), "ms", first if values == "ttft_s" else gaps,
                         range=[min(late), max(late)])  # fmt: skip
        longest = [max(each["tbt_s"] or [0.0]) * 1e3 for each in bursts]
        yield figure(
            f"{title}, {side}, longest gap", statistics.median(longest), "ms", gaps, range=[min(longest), max(longest)]
        )
        yield count(
            f"{title}, {side}, preemptions",
            statistics.median(each["preemptions"] for each in bursts),
            "",
            n=len(bursts),
        )
        answers = [mine == wanted for each in bursts for mine, wanted in zip(each["answers"], reference)]
        yield count(f"{title}, {side}, answers as with ample KV", sum(answers), "requests", n=len(answers))


def compare(ctx: Context, title: str, case: Case, model: Path, bursts: int) -> Iterator[Figure]:
    """The reference once, then stock, remap as it ships, and remap where passes may take half as long again: over PCIe a busy
    model that is alone hides next to no copies."""
    names = [f"burst {number}" for number in range(bursts)]
    ample = run_side(case, "stock", model, kv_bytes=16 * case.kv_bytes)["loads"]["burst"]
    if ample["preemptions"]:
        raise Wrong(f"{ample['preemptions']} preemptions with ample KV: it is no reference")
    sides: dict[str, Sequence[Mapping[str, Any]]] = {"ample": [ample]}
    for side, settings in SIDES.items():
        found = run_side(case, side.split(",")[0], model, loads=names, remap=settings)
        sides[side] = [found["loads"][name] for name in names]
        yield figure(f"{title}, {side}, start", found["started_s"], "s", [found["started_s"]], shown=False)
    yield from figures(title, sides, ample["answers"])


def save_model(case: Case, folder: Path, device: str) -> Path:
    """The same random weights for all sides. Large enough ones that each layer decides what the next token is."""
    import torch

    if not (folder / "config.json").exists():
        model = make_model(case.shape, device, case.dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(2.5)
        model.config.eos_token_id = None
        model.save_pretrained(folder)
    return folder


def on_the_gpu(ctx: Context, graphs: tuple[int, ...] = ()) -> Case:
    shape = LLAMA_3_8B.scaled(0.375)
    weights = 2 * shape.params()
    if ctx.free_bytes < 4 * weights or ctx.host_budget < weights:
        raise Skip(
            f"{shape.name} with {shape.layers} layers has {weights} bytes: four times that is wanted on the device"
        )
    return Case(shape, "bfloat16", 768 * MIB, requests=48, output=384, graphs=graphs)


def folder_of(case: Case) -> Path:
    return ROOT / "build" / "gpu" / f"vllm-{case.shape.name}-{case.shape.layers}"


@measure("vLLM in a burst, eager", needs=("torch-cuda", "vllm"), full_s=300, quick_s=None)
def eager(ctx: Context) -> Iterator[Figure]:
    """Does it run, and are the tokens right: stock with ample KV, then all sides with 768 MiB; one burst each."""
    case = on_the_gpu(ctx)
    yield from compare(ctx, "vLLM eager", case, save_model(case, folder_of(case), "cuda"), 1)


@measure("vLLM in a burst, CUDA graphs", needs=("torch-cuda", "vllm"), full_s=480, quick_s=None)
def graphs(ctx: Context) -> Iterator[Figure]:
    """With vLLM's own default of graphs: three bursts each."""
    case = on_the_gpu(ctx, graphs=(1, 2, 4, 8, 16, 32, 64))
    yield from compare(ctx, "vLLM with graphs", case, save_model(case, folder_of(case), "cuda"), 3)


@measure("vLLM at alpha 0, by kind of graph", needs=("torch-cuda", "vllm"), full_s=400, quick_s=None)
def pieces(ctx: Context) -> Iterator[Figure]:
    """What pieces that end at layers cost where nothing streams: ample KV, so that no layer leaves."""
    base = on_the_gpu(ctx, graphs=(1, 2, 4, 8, 16, 32, 64))
    model = save_model(base, folder_of(base), "cuda")
    for mode in ("FULL", "PIECEWISE"):
        config = {"cudagraph_capture_sizes": list(base.graphs), "cudagraph_mode": mode}
        medians = {}
        for side in ("stock", "remap"):
            found = run_side(base, side, model, kv_bytes=16 * base.kv_bytes, compilation_config=config)["loads"][
                "burst"
            ]
            if found["alpha_peak"]:
                raise Wrong(f"{found['alpha_peak']} layers left, though there was room")
            medians[side] = statistics.median(found["tbt_s"])
            yield figure(f"vLLM at alpha 0, {mode}, {side}, between tokens", medians[side] * 1e3, "ms", found["tbt_s"])
        yield figure(
            f"vLLM at alpha 0, {mode}, remap / stock", medians["remap"] / medians["stock"], "x", [medians["remap"]]
        )
