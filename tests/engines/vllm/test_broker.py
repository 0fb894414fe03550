"""Engines in processes of their own, on the pages of one broker: each grows by what the other does not use; and what cannot
join."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import Vllm, end, environment
from test_tokens import BURST, SETTINGS, answers, remap, stock

MIB = 1 << 20
WEIGHTS, FIRST, NEEDED = 26, 8, 18
"""MiB of the model's weights; of the KV cache for one request of the greatest length; and for the burst, about."""
CAPACITY = 2 * WEIGHTS + FIRST + NEEDED + 2
RANK = (WEIGHTS + FIRST) // 2 + 2
"""MiB of one of two ranks: too few for the burst by some layers."""
APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@contextmanager
def serving(path: Path, mib: int) -> Iterator[Path]:
    """`remap serve` with so much memory."""
    command = [sys.executable, "-m", "remap", "serve", "--socket", str(path), "--capacity", f"{mib}MiB"]
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


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    """Of `remap serve`."""
    with serving(tmp_path / "broker", CAPACITY) as path:
        yield path


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

    def refused(name: str, **settings: Any) -> dict[str, Any]:
        return {**remap(name, []), "settings": {**given, **settings}, "refused": True}

    run = vllm.serve(
        [
            refused("nobody", arena="unix:/nonexistent/broker"),
            refused("capacity", capacity="1GiB"),
            refused("page", page_bytes="2MiB"),
        ]
    )
    said = {name: (each.get("error"), each.get("text", "")) for name, each in run.items()}
    assert said["nobody"][0] == "InvalidArgument" and "remap serve --socket /nonexistent/broker" in said["nobody"][1]
    assert said["capacity"][0] == "InvalidArgument" and f"has {CAPACITY * MIB}" in said["capacity"][1]
    assert said["page"][0] == "InvalidArgument" and "REMAP_PAGE_BYTES" in said["page"][1]


@pytest.mark.parametrize("sockets", [1, 2])
def test_two_ranks(vllm: Vllm, tmp_path: Path, sockets: int) -> None:
    """Each rank wins other pages, of one broker or, as GPUs have them, of one each. The first round needs layers as well; the
    second is the same requests, some of whose blocks are in the prefix cache."""
    half = {"tensor_parallel_size": 2, "enable_prefix_caching": True}
    plenty = answers(vllm.serve([stock("plenty", [BURST, BURST], **half)], **APART)["plenty"])
    with ExitStack() as undo:
        for number in range(sockets):
            undo.enter_context(serving(tmp_path / f"broker-{number}", RANK * 2 // sockets))
        arena = f"unix:{tmp_path}/broker-{'{device}' if sockets > 1 else 0}"
        run = {**remap("remap", [BURST, BURST], **half), "settings": {**SETTINGS, "arena": arena}}
        found = vllm.serve([run], **APART)["remap"]
    assert answers(found) == plenty
    assert all(rank["copies"] > 0 for rank in found["ranks"]), found["ranks"]
    assert any("reload 1 layers" in reason for reason in found["decisions"])
    assert all(max(each["cached"]) > 0 for each in found["rounds"][1:])
