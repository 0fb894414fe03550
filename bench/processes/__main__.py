"""Three servers of SmolLM2-135M in three processes, bursts that come at different times, the same memory on every side.

    python -m bench.processes --rounds 3 --out bench/results/processes.json

A round runs every side, in an order that turns from round to round. All servers are loaded and warm before the clock starts. The
tokens of every request are compared between the sides, and each session checks its books at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.processes.server import SIDES, Config, spec_of

from remap.broker.server import Broker
from remap_serve.sim.results import percentile

__all__ = ["Load", "main", "run_side", "summary", "table"]

SERVERS = 3
PAGE_BYTES = 2 << 20
FIELDS = (
    ("ttft_p99_s", "P99 time to first token, s"),
    ("ttft_p50_s", "P50, s"),
    ("tbt_p99_s", "P99 gap between tokens, s"),
    ("tokens_per_s", "tokens/s"),
    ("preemptions", "preemptions"),
    ("recomputed", "tokens recomputed"),
)


@dataclass(frozen=True)
class Load:
    """blocks: of KV that each server's part has beside the weights. gap_s: between two servers' bursts. Else see `Config`."""

    blocks: int = 60
    burst: int = 24
    gap_s: float = 20.0
    every_s: float = 4.0
    tokens: tuple[int, int] = (32, 96)
    running: int = 32
    model: Any = None

    def configs(self, side: str, arena: str | int) -> list[Config]:
        """One a server."""
        first = Config(
            side=side, index=0, arena=arena, page_bytes=PAGE_BYTES, blocks=self.blocks, bursts=(), burst=self.burst,
            every_s=self.every_s, seconds=SERVERS * self.gap_s, tokens=self.tokens, running=self.running, model=self.model,
        )  # fmt: skip
        return [replace(first, index=index, bursts=(1.0 + index * self.gap_s,)) for index in range(SERVERS)]


def pages_of(load: Load) -> int:
    """Pages of one server's part: the weights, and its KV."""
    from bench.processes.server import load as load_model

    from remap.model.footprint import footprint

    (config,) = load.configs("static", 0)[:1]
    model, _ = load_model(config)
    block_bytes = spec_of(model.config, min_blocks=1, max_blocks=1).block_bytes
    return int(footprint(model, None).pages(PAGE_BYTES)) + -(-load.blocks * block_bytes // PAGE_BYTES)


def run_side(side: str, load: Load, pages: int, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """What each server gave. pages: of one server's part."""
    with ExitStack() as stack:
        arena: str | int = pages * PAGE_BYTES
        if side == "broker":
            path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "arena"
            stack.enter_context(Broker(path, SERVERS * pages * PAGE_BYTES, PAGE_BYTES))
            arena = f"unix:{path}"
        processes = []
        for config in load.configs(side, arena):
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.processes.server", config.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            stack.callback(process.kill)
            processes.append(process)
            # One after the other: with a broker the later ones attach beside what the earlier ones have grown to.
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                raise RuntimeError(f"server {config.index} of {side!r} did not start")
        begin = time.monotonic() + 0.5
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{begin!r}\n")
            process.stdin.flush()
        say(f"{side}: serving")
        found = []
        for process in processes:
            out, _ = process.communicate()
            if process.returncode:
                raise RuntimeError(f"a server of {side!r} ended with {process.returncode}")
            found.append(json.loads(out))
        return found


def summary(servers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of all servers of a side in one round."""
    first = [each for one in servers for each in one["ttft_s"]]
    gaps = [each for one in servers for each in one["tbt_s"]]
    return {
        "ttft_p99_s": percentile(first, 0.99),
        "ttft_p50_s": percentile(first, 0.5),
        "tbt_p99_s": percentile(gaps, 0.99),
        "tokens_per_s": sum(len(each) for one in servers for each in one["tokens"])
        / max(one["seconds"] for one in servers),
        "preemptions": sum(one["preemptions"] for one in servers),
        "recomputed": sum(one["recomputed"] for one in servers),
        "blocks_peak": max(one["blocks_peak"] for one in servers),
        "layers_away_peak": max(one["layers_away_peak"] for one in servers),
    }


def equal(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """(requests with the same tokens, of how many)."""
    pairs = [pair for mine, theirs in zip(one, other) for pair in zip(mine["tokens"], theirs["tokens"], strict=True)]
    return sum(a == b for a, b in pairs), len(pairs)


def table(rounds: Sequence[dict[str, dict[str, float]]]) -> str:
    """Markdown: medians over the rounds, lowest to highest."""
    lines = ["| side | " + " | ".join(title for _, title in FIELDS) + " |", "|---" * (len(FIELDS) + 1) + "|"]
    for side in SIDES:
        cells = []
        for key, _ in FIELDS:
            values = [one[side][key] for one in rounds]
            cells.append(f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})")
        lines.append(f"| {side} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--blocks", type=int, default=Load.blocks)
    parser.add_argument("--burst", type=int, default=Load.burst)
    parser.add_argument("--gap", type=float, default=Load.gap_s)
    given = parser.parse_args(arguments)

    def say(text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    load = Load(blocks=given.blocks, burst=given.burst, gap_s=given.gap)
    pages = pages_of(load)
    rounds: list[dict[str, dict[str, float]]] = []
    same: dict[str, list[tuple[int, int]]] = {}
    for number in range(given.rounds):
        order = [*SIDES[number % len(SIDES) :], *SIDES[: number % len(SIDES)]]
        found = {side: run_side(side, load, pages, say) for side in order}
        rounds.append({side: summary(servers) for side, servers in found.items()})
        for side in SIDES[1:]:
            same.setdefault(side, []).append(equal(found[SIDES[0]], found[side]))
        say(json.dumps(rounds[-1]))
    document = {
        "load": vars(load),
        "pages": pages,
        "page_bytes": PAGE_BYTES,
        "rounds": rounds,
        "same_tokens_as_static": same,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
                    "python": platform.python_version()},
    }  # fmt: skip
    if given.out:
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(table(rounds) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
