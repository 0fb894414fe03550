"""How many requests have the tokens of the reference, in every stored experiment that has counted them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bench.lab import ROOT
from bench.lab.rounds import DIFFER

__all__ = ["Compared", "compared"]

RESULTS = ROOT / "bench" / "results"
_OFF = {"real": ("ideal", "recompute"), "cluster": ("ideal", "recompute", "swap"), "offline": ("ample",)}
"""Of files of `bench.lab.rounds`: policies under which the library moves nothing, the reference first."""


@dataclass(frozen=True)
class Compared:
    """what: where; reference: whose tokens count. same, requests: with memory that moves. others: of the baselines in the same
    memory, the same two numbers, if any has been counted."""

    what: str
    page: str
    reference: str
    same: int
    requests: int
    others: tuple[int, int] | None = None


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _rounds(name: str, what: str, page: str) -> Compared:
    data, (reference, *baselines) = _read(name), _OFF[name]
    moves, stays = [0, 0], [0, 0]
    for run, point in data["points"].items():
        case, policy, _ = run.split(" | ")
        if policy != reference:
            count, each = len(data["tokens"][case]), stays if policy in baselines else moves
            each[0] += count - int(point.get(DIFFER.key, 0))
            each[1] += count
    others = (stays[0], stays[1]) if baselines else None
    return Compared(what, page, f"`{reference}`", moves[0], moves[1], others)


def _vllm() -> Compared:
    """All loads and runs of the three files."""
    ours, stock = [0, 0], [0, 0]
    for name in ("vllm", "vllm-default", "vllm-host-kv"):
        for run in _read(name)["runs"]:
            side = ours if run["side"].startswith("remap") else stock
            for load in run["loads"].values():
                side[0] += load["same_answers"]
                side[1] += load["requests"]
    reference = "the same side with 16 times the KV"
    return Compared("vLLM 0.32 under load", "vllm.md", reference, ours[0], ours[1], (stock[0], stock[1]))


def _device() -> list[Compared]:
    """Of the GPU suite: how many differ is the result, n how many were compared."""
    said = (
        (
            "CUDA graphs replayed over every alpha, on an H200",
            ("gpu-h200",),
            "replays that differ",
            "the same pass, layers at home",
        ),
        (
            "first tokens of a cold model, on two H200",
            ("gpu-h200-c2", "gpu-h200-cold"),
            "first tokens that differ",
            "the warm one",
        ),
    )
    out = []
    for what, names, about, reference in said:
        found = [one for name in names for one in _read(name)["results"] if about in one["name"]]
        count = sum(int(one["n"]) for one in found)
        out.append(
            Compared(
                what, "../../docs/notes/gpu-run.md", reference, count - sum(int(one["value"]) for one in found), count
            )
        )
    return out


def compared() -> list[Compared]:
    """In the order of the page. The demo's baseline is in docs/results.md and not in its file, so it is not here."""
    demo, processes, kills = _read("demo"), _read("processes"), _read("cluster-kills")
    pairs = [pair for side in processes["same_tokens_as_static"].values() for pair in side]
    return [
        Compared(
            "the demo, one model",
            "../../docs/results.md",
            "memory for all",
            sum(one["requests"] * one["tokens_identical"] for one in demo["rounds"]),
            sum(one["requests"] for one in demo["rounds"]),
        ),
        _rounds("real", "each policy on our engine", "real.md"),
        _rounds("offline", "offline batches, weights that stream", "offline.md"),
        Compared(
            "three processes that lend each other memory",
            "../../docs/notes/results.md",
            "each has a third, recomputation",
            sum(same for same, _ in pairs),
            sum(requests for _, requests in pairs),
        ),
        _rounds("cluster", "four processes that merge and dissolve", "cluster.md"),
        Compared(
            f"a cluster of which {kills['kills']} instances were killed",
            "../../docs/notes/cluster.md",
            "one engine, nothing killed",
            kills["answered"] - kills["answered otherwise"] - kills.get("answered otherwise, as good", 0),
            kills["answered"],
        ),
        _vllm(),
        *_device(),
    ]
