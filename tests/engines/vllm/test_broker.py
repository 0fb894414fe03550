"""Engines in processes of their own, on the pages of one broker: each grows by what the other does not use; and what cannot
join."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Vllm, end, environment
from test_tokens import BURST, SETTINGS, answers, remap, stock

MIB = 1 << 20
WEIGHTS, FIRST, NEEDED = 26, 8, 18
"""MiB of the model's weights; of the KV cache for one request of the greatest length; and for the burst, about."""
CAPACITY = 2 * WEIGHTS + FIRST + NEEDED + 2


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    """Of `remap serve`."""
    path = tmp_path / "broker"
    command = [sys.executable, "-m", "remap", "serve", "--socket", str(path), "--capacity", f"{CAPACITY}MiB"]
    process = subprocess.Popen(
        [*command, "--page-bytes", "64KiB"],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert "pages of 64 KiB on cpu" in process.stdout.readline()
        yield path
    finally:
        end(process)


def on(socket: Path, name: str, **more: Any) -> dict[str, Any]:
    """No layer ever leaves: what the KV cache gains comes from the other process."""
    settings = {**SETTINGS, "max_layers": 0, "arena": f"unix:{socket}"}
    return {**remap(name, []), "settings": settings, "keep": True, **more}


def test_each_grows_by_what_the_other_does_not_use(vllm: Vllm, socket: Path, tmp_path: Path) -> None:
    """The second engine's scheduler and its worker are in two more processes, as vLLM starts them by default."""
    model = {"model": str(vllm.folder / "tiny")}
    done = {n: str(tmp_path / f"done {n}") for n in (1, 2, 3)}
    other = Vllm(tmp_path / "other")
    other.folder.mkdir()
    plenty = answers(vllm.serve([stock("plenty", [BURST])])["plenty"])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(
            vllm.serve,
            [
                on(socket, "first", rounds=[BURST], touch=done[1]),
                {"name": "again", "use": "first", "remap": True, "rounds": [BURST], "wait": done[2], "touch": done[3]},
            ],
        )
        second = pool.submit(
            other.serve,
            [
                {**on(socket, "second", rounds=[BURST], wait=done[1], touch=done[2]), **model},
                {"name": "still", "use": "second", "remap": True, "rounds": [], "wait": done[3]},
            ],
            VLLM_ENABLE_V1_MULTIPROCESSING="1",
        )
        runs = {**first.result(), **second.result()}
    for name in ("first", "second", "again"):
        run = runs[name]  # on a busy machine the other may answer late, and a request be preempted and computed again
        assert answers(run) == plenty
        # All that is not weights, or the first blocks of the other, cannot be had by both at once.
        kv = run["rounds"][0]["usable_blocks"] * runs["first"]["manifest"]["block_bytes"]
        assert kv > (CAPACITY - 2 * WEIGHTS) * MIB // 2
    manifest = runs["first"]["manifest"]
    assert (manifest["capacity_bytes"], manifest["page_bytes"]) == (CAPACITY * MIB, 64 << 10)
    block = manifest["block_bytes"]
    assert manifest["first_blocks"] * block <= FIRST * MIB + block  # and vLLM's null block


def test_what_cannot_join_does_not_start_and_says_why(vllm: Vllm, socket: Path) -> None:
    given = on(socket, "")["settings"]

    def refused(name: str, engine: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
        run = {**remap(name, [], **(engine or {})), "settings": {**given, **settings}}
        return {**run, "refused": True}

    run = vllm.serve(
        [
            refused("nobody", arena="unix:/nonexistent/broker"),
            refused("capacity", capacity="1GiB"),
            refused("page", page_bytes="2MiB"),
            refused("ranks", {"tensor_parallel_size": 2}),
        ]
    )
    said = {name: (each.get("error"), each.get("text", "")) for name, each in run.items()}
    assert said["nobody"][0] == "InvalidArgument" and "remap serve --socket /nonexistent/broker" in said["nobody"][1]
    assert said["capacity"][0] == "InvalidArgument" and f"has {CAPACITY * MIB}" in said["capacity"][1]
    assert said["page"][0] == "InvalidArgument" and "REMAP_PAGE_BYTES" in said["page"][1]
    assert "error" in run["ranks"] and "2 ranks would get different pages" in vllm.said()  # a worker's, far up
