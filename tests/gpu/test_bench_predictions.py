"""What was predicted of vLLM's measures: of their own case, and as the notes say it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from bench.gpu import vllm_predictions
from bench.gpu.measures.vllm_sharing import Sharing
from bench.gpu.processes import ROOT
from bench.gpu.vllm_predictions import LOADS, RESULTS, TITLES, as_json, predict, table

DATA = json.loads(RESULTS.read_text(encoding="utf-8"))
ANEW = "predict anew, before anything is measured: python -m bench.gpu.vllm_predictions"


def test_the_notes_have_the_table_of_the_file() -> None:
    page = (ROOT / "docs/notes/gpu-run.md").read_text(encoding="utf-8")
    assert DATA["simulated"] is True
    section = page.partition("\n## What is expected of vLLM on an H200\n")[2].partition("\n## ")[0]
    assert f"\n\n{table(DATA)}\n\n" in section
    blocks = "{1} blocks of KV, and stock with {0}".format(*DATA["kv_blocks"])
    assert f"`remap` begins with {blocks}" in " ".join(section.split())


def test_the_predictions_are_of_the_case_that_is_measured() -> None:
    assert DATA["loads"] == {name: as_json(load) for name, load in LOADS.items()}, ANEW
    assert all(len(run) == len(TITLES) for sides in DATA["sides"].values() for runs in sides.values() for run in runs)
    assert {len(runs) for sides in DATA["sides"].values() for runs in sides.values()} == {vllm_predictions.SEEDS}


@pytest.mark.parametrize("name", ["d", "e"])
def test_three_servers_get_the_requests_and_the_memory_of_the_measure(name: str) -> None:
    load = LOADS[name]
    measured = Sharing(load.case, load.room)
    assert (measured.total, measured.turn_s) == (load.total, load.turn_s), ANEW
    requests = [(f"m{each.model}", each.at_s, each.prompt, each.output) for each in measured.load()]
    items = [(each.tenant, each.time_s, each.prompt_tokens, each.output_tokens) for each in load.items(0)]
    assert sorted(requests) == sorted(items), ANEW


def test_a_seed_changes_the_order_and_not_the_requests() -> None:
    for load in LOADS.values():
        first, second = load.items(0), load.items(1)
        assert first != second and len(first) == load.rounds * load.models * load.case.requests
        assert sorted((each.tenant, each.prompt_tokens) for each in first) == sorted(
            (each.tenant, each.prompt_tokens) for each in second
        )
        assert all(0 <= each.time_s % load.every_s <= load.late_s for each in second)


def test_a_small_case_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(LOADS["c"].case, requests=3, output=4)
    small = {name: replace(load, case=case, every_s=1.0) for name, load in LOADS.items()}
    monkeypatch.setattr(vllm_predictions, "LOADS", small)
    found = predict(1)
    assert {name: list(sides) for name, sides in found["sides"].items()} == {
        name: list(sides) for name, sides in DATA["sides"].items()
    }
    assert all(run[0] == 0 for sides in found["sides"].values() for runs in sides.values() for run in runs)
    cold, warm = (found["sides"][name]["remap"][0][1] for name in ("e", "d"))
    assert cold > warm  # one model is always away
