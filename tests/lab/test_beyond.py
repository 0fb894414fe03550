"""bench/results/beyond.md: what it says is what is stored, computed here once more from the files as they are."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from bench.lab import ROOT
from bench.lab.beyond import donors
from bench.lab.beyond.donors import SOURCES
from bench.lab.beyond.exact import compared
from bench.lab.beyond.page import PAGE, page, regrets_of
from bench.lab.commands import app
from bench.lab.paper.runs import Settings, Store
from bench.lab.regret import POLICIES
from typer.testing import CliRunner

from remap.errors import InvalidArgument

RESULTS = ROOT / "bench" / "results"
TEXT = PAGE.read_text(encoding="utf-8")
WORDS = " ".join(TEXT.split())


def stored(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def test_the_page_is_what_is_stored_and_has_its_pictures(tmp_path: Path) -> None:
    assert page(donors.read()) == TEXT
    links = [line.split("](")[1].rstrip(")") for line in TEXT.splitlines() if line.startswith("![")]
    assert [Path(link).name for link in links] == [
        f"beyond-{name}.svg" for name in ("regret", "donors", "processes", "exact")
    ]
    assert all((PAGE.parent / link).exists() for link in links)
    result = CliRunner().invoke(app, ["beyond", "--report-only", "--page", str(tmp_path / "beyond.md")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "beyond.md").read_text(encoding="utf-8") == TEXT
    assert sorted((tmp_path / "pictures").iterdir()) == sorted(tmp_path / link for link in links)


def test_regret_is_that_of_the_runs() -> None:
    """Of P99 TTFT, with seed by seed medians as the page says, from the points alone."""
    points: dict[str, dict[str, float]] = stored("regret")["points"]
    loads: dict[str, dict[int, dict[str, float]]] = {}
    for name, point in points.items():
        *load, policy, seed = name.split(" | ")
        if policy == "ideal":
            continue
        loads.setdefault(" | ".join(load), {}).setdefault(int(seed), {})[policy] = point["ttft_p99_s"]
    whole = [
        each
        for each in loads.values()
        if len(each) == 5 and all(len(one) >= len(POLICIES) - 2 for one in each.values())
    ]
    found, number = regrets_of()
    assert number == 5 and len(whole) == len(found["ttft_p99_s"]["remap"])
    for policy in POLICIES:
        mine = []
        for load in (each for each in whole if policy in each[0]):
            best = {seed: min(one[name] for name in one if name != "whole") for seed, one in load.items()}
            behind = [(one[policy], best[seed]) for seed, one in load.items()]
            mine.append(median(0.0 if its - best <= 0.05 else (its - best) / best for its, best in behind))
        assert sorted(found["ttft_p99_s"][policy]) == pytest.approx(sorted(mine))
        row = f"| `{policy}` | {sum(value > 0.1 for value in mine)}; {100 * max(mine):,.0f} % |"
        assert row in TEXT


def test_kv_is_from_where_the_page_says() -> None:
    runs = stored("beyond")["donors"]
    ours, base = runs["remap"], runs["recompute"]
    assert all(not any(base[name]) for name in SOURCES if name != "own")
    own = max(base["own"])
    totals = [sum(each) for each in zip(*(ours[name] for name in SOURCES))]
    peak = totals.index(max(totals))
    assert f"have {own / 1e3:.3g} GB of KV; at the peak (after {ours['time_s'][peak]:.0f} s)" in WORDS
    assert f"{totals[peak] / 1e3:.3g} GB, {totals[peak] / own:.1f} times as much" in WORDS
    for name, title in SOURCES.items():
        assert f"{title} {ours[name][peak] / 1e3:.3g}" in WORDS
    # Nobody has more of the reservations than there is.
    assert all(mine + unused <= own + 0.2 for mine, unused in zip(ours["own"], ours["unused"]))
    assert f"At most {max(ours['waiting'])} requests wait, under `recompute` {max(base['waiting'])};" in WORDS


@pytest.mark.parametrize("policy", donors.RUN)
def test_a_small_run_finds_every_byte_once(policy: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "paper.json", Settings(requests=40, seeds=1))
    store.points.c[donors.PANEL.name] = 1.5
    found = donors.simulated(store, policy)
    looks = len(found["time_s"])
    assert looks > 3 and all(len(column) == looks for column in found.values())
    assert all(value >= 0 for name in SOURCES for value in found[name])
    assert found["time_s"] == sorted(found["time_s"])
    moved = [name for name in SOURCES if name != "own" and any(found[name])]
    assert bool(moved) == (policy == "remap")


def test_what_was_run_is_not_run_again_and_another_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, column = tmp_path / "beyond.json", [0.0]
    monkeypatch.setattr(
        donors, "simulated", lambda store, policy: dict.fromkeys(("time_s", *SOURCES, "running", "waiting"), column)
    )
    first = donors.run(path)
    assert sorted(first) == ["recompute", "remap"]
    monkeypatch.setattr(donors, "simulated", None)
    assert donors.run(path).keys() == first.keys()
    path.write_text('{"points": {}}', encoding="utf-8")
    with pytest.raises(InvalidArgument, match=r"not a result of `bench.lab beyond`") as caught:
        donors.run(path)
    assert caught.value.field == "path"


def test_lending_is_what_the_three_processes_did() -> None:
    rounds = stored("processes")["rounds"]

    def of(side: str, key: str) -> float:
        return median(one[side][key] for one in rounds)

    late = [of(side, "ttft_p99_s") for side in ("broker", "static, remap", "static")]
    assert (
        "With a broker P99 TTFT is {:.3g} s where own layers alone bring {:.3g} s and recomputation {:.3g} s".format(
            *late
        )
        in WORDS
    )
    gain = [100 * (1 - one["broker"]["ttft_p99_s"] / one["static, remap"]["ttft_p99_s"]) for one in rounds]
    assert f"takes {min(gain):.3g} to {max(gain):.3g} % more off" in WORDS
    assert f"{of('broker', 'tbt_p99_s') / of('static', 'tbt_p99_s'):.1f} times that of recomputation" in WORDS


def test_as_many_requests_are_exact_as_the_files_say() -> None:
    found = {one.what: one for one in compared()}
    assert all(one.same == one.requests for one in found.values())
    vllm = [
        (run["side"].split(",")[0], load["same_answers"], load["requests"])
        for name in ("vllm", "vllm-default", "vllm-host-kv")
        for run in stored(name)["runs"]
        for load in run["loads"].values()
    ]
    stock = [(same, of) for side, same, of in vllm if side == "stock"]
    assert f"Stock vLLM, {sum(same for same, _ in stock)} of {sum(of for _, of in stock)}" in WORDS
    real = stored("real")
    moving = [run.split(" | ")[0] for run in real["points"] if run.split(" | ")[1] not in ("ideal", "recompute")]
    count = sum(len(real["tokens"][case]) for case in moving)
    assert f"| `ideal` | {count:,} of {count:,} | 339 of 339 |" in TEXT
    kills = stored("cluster-kills")
    assert kills["answered otherwise"] == 0 and f"{kills['answered']:,} of {kills['answered']:,}" in TEXT
    total = sum(one.requests for one in found.values())
    assert f"With memory that moves, {total:,} of {total:,} have the reference's tokens." in WORDS
