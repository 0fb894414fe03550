"""Three processes with a server each, as `python -m bench.processes` has measured them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bench.lab import ROOT

__all__ = ["MEASURES", "SIDES", "rounds"]

SIDES: Mapping[str, str] = {
    "static": "a third each, recomputation",
    "static, remap": "a third each, own layers stream",
    "broker": "one broker: they lend each other KV and layers",
}
MEASURES: Mapping[str, str] = {
    "ttft_p99_s": "P99 time to first token, s",
    "ttft_p50_s": "P50, s",
    "tbt_p99_s": "P99 gap between tokens, s",
    "tokens_per_s": "tokens/s",
    "blocks_peak": "KV blocks of one, most",
}


def rounds() -> list[dict[str, dict[str, Any]]]:
    """Of each round: side -> figure -> value."""
    path = ROOT / "bench" / "results" / "processes.json"
    found: list[dict[str, dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))["rounds"]
    return found
