"""`bench.lab vllm`: stock vLLM against vLLM on remap, at the same memory for weights and KV cache together.

    settings -> calibrate (stock, ample KV: what the machine serves) -> three loads -> runs of both sides, alternating -> report

Each run is a fresh process (engine.py) that serves all loads, one after the other. All sides get the same requests at
the same times. stock: as it ships. remap: the same command with REMAP_ENABLE=1; its capacity is what stock takes for weights and
KV. With `--host-kv` each of the two also runs with so much host memory, into which vLLM's OffloadingConnector copies KV and from
where it loads that of a preempted request. Every answer of a side is counted as equal or not to that side's answer when nothing
was short (`reference`): in bfloat16 vLLM's rows depend on which others are in the batch, so neither side reaches all;
tests/engines compares like with like.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.lab import ROOT

from remap.cli.errors import Missing
from remap.errors import InvalidArgument, InvalidState
from remap.extras import install
from remap_serve.sim.workload import SHAREGPT, Arrivals, Load, generate

__all__ = ["HOST", "LOADS", "SIDES", "VllmBench", "measure", "need_vllm"]

HOST = ", host KV"
"""Ends the name of a side that runs with KV in host memory."""
SIDES = ("stock", "remap")
LOADS = {"calm": 0.1, "edge": 0.25, "beyond": 1.0}
"""Name -> requests per second, as a share of what stock vLLM serves with ample KV cache."""


@dataclass(frozen=True, kw_only=True)
class VllmBench:
    """kv_bytes: stock's KV cache. seconds: requests arrive for so long, in each load. lengths: factor on ShareGPT's. cv: of the
    gaps between arrivals. runs: of each side. threads: that compute, on all sides. loads: of LOADS. host_kv_bytes: host memory
    for KV of the sides that have it; 0: there are no such sides."""

    model: str
    dtype: str = "bfloat16"
    kv_bytes: int = 40 * 2**20
    block_tokens: int = 32
    max_model_len: int = 1024
    max_num_seqs: int = 24
    max_batch_tokens: int = 512
    seconds: float = 45.0
    lengths: float = 0.5
    cv: float = 3.0
    runs: int = 2
    threads: int = 1
    seed: int = 2
    vocabulary: int = 40_000
    cpu_linear: str = "exact"  # the adapter's default
    loads: tuple[str, ...] = tuple(LOADS)
    host_kv_bytes: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.loads if name not in LOADS]
        if unknown:
            raise InvalidArgument(
                f"no load is called {', '.join(unknown)}; nothing was run; there are {', '.join(LOADS)}",
                loads=tuple(unknown),
            )

    @property
    def sides(self) -> tuple[str, ...]:
        return tuple(f"{side}{more}" for side in SIDES for more in ("", HOST)) if self.host_kv_bytes else SIDES


def measure(bench: VllmBench, say: Callable[[str], None]) -> dict[str, Any]:
    """All runs: {"settings", "rate", "loads", "runs": [{"side", "loads": name -> result}]}. Raises InvalidState if one fails,
    with what it wrote last; and (fields load, rate, seconds) if no request comes under a load."""
    need_vllm()
    rate = _calibrate(bench)
    say(f"stock vLLM with ample KV cache serves {rate:.2f} requests/s of these lengths here")
    loads = {name: _items(bench, LOADS[name] * rate, name) for name in bench.loads}
    for name, items in loads.items():
        if not items:
            raise InvalidState(
                f"under the load {name!r}, {LOADS[name] * rate:.3g} requests/s, none comes within {bench.seconds:g} s; nothing "
                "was measured; raise --seconds, or leave the load out: this processor may be slow with the model's dtype",
                load=name,
                rate=LOADS[name] * rate,
                seconds=bench.seconds,
            )
    closed = [[0.0, *item[1:]] for items in loads.values() for item in items]
    reference = {}
    for side in SIDES:
        results = _run(bench, side, {"all": closed}, kv_bytes=bench.kv_bytes * 16)
        reference[side] = results["loads"]["all"]["answers"]
    runs = []
    for number in range(bench.runs):
        for side in bench.sides if number % 2 == 0 else bench.sides[::-1]:
            results = _run(bench, side, loads)
            results["load_average"] = os.getloadavg()[0]  # of the last minute: this run's, and what else computed
            first = 0
            for name, result in results["loads"].items():
                answers = result.pop("answers")
                expected = reference[side.removesuffix(HOST)][first : first + len(answers)]
                result["same_answers"] = sum(mine == wanted for mine, wanted in zip(answers, expected))
                first += len(answers)
                say(
                    f"{side} {name}: {result['tokens'] / result['seconds']:.1f} tokens/s, {result['preemptions']} preemptions, "
                    f"{result['same_answers']} of {len(answers)} answers as the reference's"
                )
            runs.append({"side": side, **results})
    return {"settings": asdict(bench), "rate": rate, "loads": {name: LOADS[name] for name in bench.loads}, "runs": runs}


def need_vllm() -> None:
    """Raises Missing where vLLM is not installed: each run would end in its import."""
    if importlib.util.find_spec("vllm") is None:
        raise Missing(
            "`bench.lab vllm` compares with vLLM, which is not installed here; nothing was run; run it with the Python that has "
            f"vLLM, or {install('vllm')}",
            package="vllm",
        )


def _items(bench: VllmBench, rate: float, name: str) -> list[list[float]]:
    """[arrival in seconds, prompt tokens, output tokens, seed of the prompt] each."""
    lengths = SHAREGPT.scaled(bench.lengths, most=bench.max_model_len // 2 - 1)
    load = Load("vllm", Arrivals(rate=rate, cv=bench.cv), lengths)
    # The same draws for every load: a faster one is the same bursts sped up, and more of them. Prompts are other ones.
    items = generate([load], bench.seconds, seed=bench.seed)
    first = 1000 * sum(map(ord, name))
    return [[item.time_s, item.prompt_tokens, item.output_tokens, first + n] for n, item in enumerate(items)]


def _calibrate(bench: VllmBench) -> float:
    """Requests per second when they are all there at once and there is room for all."""
    items = [[0.0, *item[1:]] for item in _items(bench, 2.0, "calibration")][: 2 * bench.max_num_seqs]
    result = _run(bench, "stock", {"all": items}, kv_bytes=bench.kv_bytes * 16)["loads"]["all"]
    return float(result["requests"] / result["seconds"])


def _run(bench: VllmBench, side: str, loads: dict[str, Any], kv_bytes: int | None = None) -> dict[str, Any]:
    spec = {
        **asdict(bench),
        "side": side.removesuffix(HOST),
        "host_kv_bytes": bench.host_kv_bytes if side.endswith(HOST) else 0,
        "kv_bytes": kv_bytes or bench.kv_bytes,
        "remap": {"cpu_linear": bench.cpu_linear},
        "loads": [{"name": name, "items": items} for name, items in loads.items()],
    }
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("REMAP_")},
        "OMP_NUM_THREADS": str(bench.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        **({"REMAP_ENABLE": "1"} if side.startswith("remap") else {}),
    }
    done = subprocess.run(
        [sys.executable, "-m", "bench.lab.vllm.engine"],
        input=json.dumps(spec),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        raise InvalidState(
            f"the {side} engine ended with code {done.returncode}; nothing was written; its last words:\n{done.stderr[-3000:]}",
            side=side,
            code=done.returncode,
        )
    return dict(json.loads(lines[-1]))


def model_folder(given: str | None) -> str:
    """The model to serve: the one given, or SmolLM2 as it lies in the demo's cache (which the demo makes).

    Raises Missing if there is none.
    """
    if given is not None:
        return given
    from remap.cli.smollm2 import cache_root

    found = sorted(Path(cache_root()).glob("SmolLM2-*-bfloat16-*/model.safetensors"))
    if not found:
        raise Missing(
            "no model given, and the demo's is not in the cache; nothing was run; give --model, or run `remap demo` first"
        )
    return str(found[0].parent)
