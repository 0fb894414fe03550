"""`bench.lab hybridserve`: what is run, what stands beside the paper's numbers, and the file of a run."""

from __future__ import annotations

import json
import math
import statistics
from functools import partial
from pathlib import Path

import pytest
from bench.lab import seeds
from bench.lab.commands import app
from bench.lab.hybridserve import batches, command, figures
from bench.lab.hybridserve.batches import SHAREGPT, Batch
from bench.lab.hybridserve.figures import CLAIMS, GRIDS, NOT_SIMULATED, engine_runs, name_of, runs
from bench.lab.paper.experiments import headlines
from typer.testing import CliRunner

from remap.errors import InvalidArgument
from remap_serve.policy.minibatches import total

SMALL = Batch("RTX-4090", "OPT-13b", 256, 16)


def test_what_is_run() -> None:
    """The paper's machine, models, lengths, and 128 requests of 128 tokens; five seeds where lengths are drawn."""
    assert command.SETTINGS.seeds == 5 and batches.OUTPUT == 128
    twelve = {(one.machine, one.model, one.size) for one in GRIDS["12"].batches}
    assert twelve == {("RTX-4090", f"OPT-{size}", 128) for size in ("6.7b", "13b", "30b", "66b")}
    assert {min(figures.PROMPTS), max(figures.PROMPTS)} == {128, 1920}
    assert {batch.size for batch in GRIDS["13"].batches} == {32, 64, 128}
    assert {one.machine for one in GRIDS["others"].batches} == {"H100-PCIe", "GH200-96GB"}
    assert sum(name.endswith("#4") for name in runs(command.SETTINGS)) == 4 * 4
    assert set(runs(command.QUICK)) < set(runs(command.SETTINGS))


def test_every_number_of_the_paper_is_reckoned_from_what_is_run_or_left_out() -> None:
    told = [one.headline for one in CLAIMS]
    assert sorted([*told, *NOT_SIMULATED]) == sorted(
        name for name, one in headlines().items() if one.paper == "HybridServe"
    )
    run = {(batch, system) for batch, system, seed in runs(command.SETTINGS).values() if seed == 0}

    def at(batch: Batch, system: str) -> seeds.Point:
        assert (batch, system) in run
        return dict.fromkeys(
            ("tokens_per_s", "busy", "weights_gb", "kv_gb", "activations_gb", "activation_share"),
            {"FlexGen": 1.0, "KV": 1.0, "activations": 2.0}.get(system, 0.5),
        )

    for one in CLAIMS:
        for system in one.systems:
            assert all(math.isfinite(each) for each in one.of(at, system)), one.headline
    by_id = {one.headline: one for one in CLAIMS}
    assert by_id["hybridserve-02"].of(at, "activations") == pytest.approx((2.0,))
    assert by_id["hybridserve-03"].of(at, "ours") == pytest.approx((0.25,))
    assert by_id["hybridserve-14"].of(at, "paper") == pytest.approx((2.0, 2.0))
    assert by_id["hybridserve-18"].of(at, "paper") == pytest.approx((50.0, 50.0))
    assert by_id["hybridserve-22"].of(at, "paper") == pytest.approx((1.0, 1.0))
    assert by_id["hybridserve-08"].of(at, "KV") == pytest.approx((21.0,), abs=0.01)
    assert by_id["hybridserve-09"].of(at, "KV") == pytest.approx((168.0,), abs=0.1)


def test_bytes_and_seconds_of_a_batch() -> None:
    found = {system: batches.run(SMALL, system, 0) for system in figures.FOUR}
    memory = batches.setup(SMALL.machine, SMALL.model).room
    blocks = [17, 18, 19, 20, 21, 22, 23, 24]  # of each request: 256 tokens and the middle of each 16 that are made
    kv = 16 * memory.layers * memory.block.kv * (16 * sum(blocks) - blocks[-1])  # in 127 passes
    assert found["KV"]["kv_gb"] == pytest.approx(kv / 1e9) and found["KV"]["activations_gb"] == 0
    assert found["activations"]["kv_gb"] == 0 and found["activations"]["activation_share"] == 1
    # Activations have half the bytes, less those that the device holds.
    held = memory.held * memory.layers * memory.block.activations * 127 / 1e9
    assert found["activations"]["activations_gb"] == pytest.approx(max(0.0, kv / 2e9 - held), rel=1e-3)
    for system, point in found.items():
        assert point["least_s"] * (1 - 1e-9) <= point["pass_s"] and 0 < point["busy"] <= 1, system
        whole = point["prefill_s"] + point["answers_s"]
        assert point["tokens_per_s"] == pytest.approx(16 * 128 / whole)
        assert found["ours"]["answers_s"] <= point["answers_s"] * (1 + 1e-9), system
    # The device keeps weights where it holds no activations.
    assert found["KV"]["weights_gb"] < found["activations"]["weights_gb"]


def test_memory_is_the_devices() -> None:
    for model in figures.MODELS:
        made = batches.setup("RTX-4090", model)
        where, one = made.roofline.machine, made.roofline.model
        parts = made.room.device_bytes + made.room.buffer_bytes + batches.RING * one.layer_bytes + batches.WORKING
        assert parts + one.resident_bytes == where.hbm_bytes and min(made.r_squared) > 0.99
        mixes = made.room.divided([128] * 128, (1, 1))
        assert total(mixes).held <= made.room.held
    with pytest.raises(InvalidArgument, match="keep K and V"):
        batches.setup("RTX-4090", "Llama-3-8b")


def test_prompts_are_the_seeds() -> None:
    chats = Batch("RTX-4090", "OPT-13b", SHAREGPT)
    assert chats.prompts(0) == chats.prompts(0) != chats.prompts(1)
    assert len(chats.prompts(0)) == 128 and max(chats.prompts(0)) <= 2048 - 128
    assert SMALL.prompts(0) == SMALL.prompts(1) == [256] * 16


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hybridserve.json"
    text = command.run_hybridserve(path, command.QUICK)
    assert path.with_suffix(".md").read_text(encoding="utf-8") == text and "of 2 seeds" in text
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["settings"] == command.QUICK.to_json() and set(data["points"]) == {
        *runs(command.QUICK),
        *engine_runs(command.QUICK),
    }
    kept = path.read_bytes()
    lost = name_of(GRIDS["12"].batches[0], "ours", 0)
    del data["points"][lost]
    seeds.write(path, data)
    capsys.readouterr()
    assert command.run_hybridserve(path, command.QUICK) == text
    assert capsys.readouterr().err.split("\n")[:-1] == [lost] and path.read_bytes() == kept


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "not JSON"], ids=["deep", "empty", "text"])
def test_a_file_that_is_no_result_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    found = CliRunner().invoke(app, ["hybridserve", "--report-only", "--results", str(path)])
    assert found.exit_code == 2 and "bench.lab hybridserve" in " ".join(found.output.split())
    assert path.read_text() == text and not path.with_suffix(".md").exists()


def test_what_is_stored_is_whole_and_is_what_the_page_says() -> None:
    stored = json.loads(command.RESULTS.read_text(encoding="utf-8"))
    assert stored["settings"] == command.SETTINGS.to_json()
    assert set(stored["points"]) == {*runs(command.SETTINGS), *engine_runs(command.SETTINGS)}
    assert command.page(stored) == command.RESULTS.with_suffix(".md").read_text(encoding="utf-8")


def test_of_what_is_stored_ours_is_never_slower_and_some_runs_are_made_again() -> None:
    stored = json.loads(command.RESULTS.read_text(encoding="utf-8"))["points"]
    for name, (batch, system, seed) in runs(command.SETTINGS).items():
        if system not in (*figures.FOUR, "1:1"):
            continue
        ours = partial(name_of, batch, "ours", seed)
        assert stored[ours()]["answers_s"] <= stored[name]["answers_s"] * (1 + 1e-9), name
        assert stored[name]["least_s"] <= stored[name]["pass_s"] * (1 + 1e-9), name
    for name in (name_of(GRIDS["12"].batches[0], "paper", 0), name_of(GRIDS["chats"].batches[1], "KV", 3)):
        assert batches.run(*runs(command.SETTINGS)[name]) == pytest.approx(stored[name])


def test_what_the_words_say_is_what_is_stored() -> None:
    stored = json.loads(command.RESULTS.read_text(encoding="utf-8"))["points"]

    def gains(grid: str, base: str, *, on: str = "", model: str = "") -> list[list[float]]:
        """Tokens/s of ours by those of `base`: of each batch, seed by seed."""
        return [
            [
                stored[name_of(batch, "ours", seed)]["tokens_per_s"]
                / stored[name_of(batch, base, seed)]["tokens_per_s"]
                for seed in range(GRIDS[grid].seeds(command.SETTINGS))
            ]
            for batch in GRIDS[grid].batches
            if on in batch.machine and model in batch.model
        ]

    def ends(found: list[list[float]]) -> tuple[int, int]:
        """The least and the most, in % more."""
        every = [100 * (each - 1) for values in found for each in values]
        return round(min(every)), round(max(every))

    def shares(grid: str, system: str, model: str, on: str = "RTX") -> list[int]:
        found = [batch for batch in GRIDS[grid].batches if batch.model == model and on in batch.machine]
        return [round(100 * stored[name_of(batch, system, 0)]["activation_share"]) for batch in found]

    assert ends(gains("12", "paper")) == (3, 41)
    assert round(100 * statistics.geometric_mean(each[0] for each in gains("12", "paper"))) == 112
    chats = gains("chats", "paper")
    assert ends(chats) == (12, 81) and ends([[statistics.median(each)] for each in chats]) == (15, 49)
    near = [point["pass_s"] / point["least_s"] - 1 for name, point in stored.items() if ": ours #" in name]
    assert max(near) < 0.012 and round(100 * statistics.median(near), 1) == 0.1
    assert (min(shares("12", "paper", "OPT-66b")), max(shares("12", "paper", "OPT-66b"))) == (38, 42)
    assert (max(shares("12", "ours", "OPT-66b")), min(shares("12", "ours", "OPT-66b"))) == (100, 53)
    for grid, one in GRIDS.items():
        assert all(ends(gains(grid, base))[0] >= 0 for base in one.systems if base in figures.FOUR)
    small = [stored[name_of(GRIDS["chats"].batches[0], "paper", seed)]["mini_batches"] for seed in range(5)]
    assert (min(small), max(small)) == (6, 11)
    most = max(
        (stored[name_of(batch, system, 0)]["tokens_per_s"] / stored[name_of(batch, "KV", 0)]["tokens_per_s"], batch)
        for batch in GRIDS["12"].batches
        for system in GRIDS["12"].systems
    )
    assert round(most[0], 2) == 1.56 and (most[1].model, most[1].prompt) == ("OPT-6.7b", 1536)
    times = [batches.setup("RTX-4090", model).costs for model in ("OPT-30b", "OPT-66b")]
    times += [batches.setup("GH200-96GB", "OPT-30b").costs, batches.setup("H100-PCIe", "OPT-30b").costs]
    assert [round(one.recompute.each_s / one.load_kv.each_s, 2) for one in times] == [1.27, 1.58, 6.61, 1.04]
    kv = [statistics.geometric_mean(each[0] for each in gains("12", "KV", model=one)) for one in figures.MODELS[1:]]
    assert kv == sorted(kv, reverse=True)
    assert [ends(gains("15", "1:1", model=one))[0] for one in figures.MODELS] == [16, 12, 5, 1]
    assert ends(gains("others", "KV", on="GH200")) == (0, 4) and ends(gains("others", "KV", on="H100")) == (33, 43)
    alone = [1 / each[0] for each in gains("others", "activations", on="GH200")]
    assert (round(100 * min(alone)), round(100 * max(alone))) == (8, 16)
    lost = {
        one: [
            1 - stored[name_of(batch, "whole", 0)]["tokens_per_s"] / stored[name_of(batch, "ours", 0)]["tokens_per_s"]
            for batch in GRIDS["12"].batches
            if batch.model == one
        ]
        for one in figures.MODELS
    }
    large = [each for one in figures.MODELS[1:] for each in lost[one]]
    assert (round(100 * min(large)), round(100 * max(large))) == (1, 5)
    assert (round(100 * min(lost["OPT-6.7b"])), round(100 * max(lost["OPT-6.7b"]))) == (6, 11)
    held = [
        stored[name_of(batch, one, 0)]["tokens_per_s"] / stored[name_of(batch, other, 0)]["tokens_per_s"] - 1
        for batch in GRIDS["12"].batches
        for one, other in (("whole, held", "whole"), ("ours", "parts"))
    ]
    assert (round(100 * min(held)), round(100 * max(held))) == (-1, 2)
    schedule = [
        100
        * (1 - stored[name_of(batch, "FlexGen", 0)]["tokens_per_s"] / stored[name_of(batch, "KV", 0)]["tokens_per_s"])
        for batch in GRIDS["12"].batches
    ]
    assert (round(min(schedule[:5])), round(max(schedule[:5]))) == (2, 17) and round(max(schedule[5:])) in (1, 2)
    here = shares("others", "ours", "OPT-30b", "GH200")
    assert (min(here), max(here)) == (0, 10)
