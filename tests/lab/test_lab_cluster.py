"""`bench.lab cluster` with a tiny random model: what a run tells, the page, and what its words say."""

from __future__ import annotations

import json
import math
import statistics
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("ray")
pytest.importorskip("typer")

import torch
from bench.lab import rounds
from bench.lab.cluster import command
from bench.lab.cluster.cases import AGAIN, COMPARED, DUEL, FULL, ONE, POLICIES, QUICK, SUITES, find
from bench.lab.cluster.instances import MARGIN, as_good, engine_answers
from bench.lab.cluster.one import serve
from bench.lab.seeds import AGAINST

from remap.errors import InvalidArgument
from remap_serve.cli.shared_world import build

COUNTED = [column.key for column in command.COLUMNS if column not in (*AGAINST, command.BUBBLES)]


@pytest.mark.slow
def test_a_run_drops_and_restores_and_gives_the_tokens_of_one_engine() -> None:
    (case,) = QUICK.cases
    found = serve("quick", case.name, "remap")
    figures = found["figures"]
    assert set(COUNTED) <= set(figures)
    assert figures["stages"] == 2 and figures["drops"] >= 1 and figures["restores"] >= 1
    assert min(figures["activation_bytes"], figures["kv_sent_bytes"], figures["layer_bytes"]) > 0
    requests = case.requests()
    answers = engine_answers(case, requests)
    model = build(case.model, case.dtype, case.seed)[0].eval()
    tokens = {id: [*map(int, text.split())] for id, text in found["tokens"].items()}
    assert tokens.keys() == answers.keys()
    assert all(as_good(model, one, answers[one.id], tokens[one.id]) for one in requests)
    assert len(set(found["tokens"].values())) > len(answers) / 2  # the answers vary, so equal ones say something


def test_an_answer_is_as_good_if_its_first_other_token_is() -> None:
    """By the model alone, after the tokens that they share; what follows is another text."""
    (case,) = QUICK.cases
    model = deepcopy(build(case.model, case.dtype, case.seed)[0]).requires_grad_(False)
    request = case.requests()[0]
    logits = model(torch.tensor([[*request.prompt, 5]]), use_cache=False).logits[0, -1]
    best, second, worst = (int(logits.sort(descending=True).indices[rank]) for rank in (0, 1, -1))
    assert float(logits[best] - logits[second]) > MARGIN  # so that these say something
    wanted = [5, best, 7]
    assert as_good(model, request, wanted, wanted)
    assert not as_good(model, request, wanted, [5, best])
    assert not as_good(model, request, wanted, [5, worst, 7])
    head = model.get_output_embeddings().weight
    head[second] = head[best]
    assert as_good(model, request, wanted, [5, second, 9])


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def pretended(kind: str, module: str, *names: str, threads: int) -> Any:
        asked.append(names)
        figures = dict.fromkeys(COUNTED, 1.0) | {"drop_prepare_s": math.nan, "load_1min_before": 0.5}
        return json.loads(json.dumps({"figures": figures, "tokens": {"0000": "1 2"}}))

    monkeypatch.setattr(rounds, "run_apart", pretended)
    path = tmp_path / "cluster.json"
    page = command.run_cluster(path, "quick")
    quick = COMPARED["quick"]
    assert asked == [("quick", "tiny", policy) for policy in quick]
    assert page == path.with_suffix(".md").read_text(encoding="utf-8") and str(QUICK.cases[0]) in page
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| tiny | ")]
    assert [row[1] for row in rows] == quick
    assert command.run_cluster(path, "quick", report_only=True) == page and len(asked) == len(quick)
    asked.clear()
    page = command.run_cluster(tmp_path / "duel.json", "duel")
    forwards = ["alone", "all", AGAIN]
    assert asked == [
        ("duel", case.name, policy)
        for number in range(DUEL.rounds)
        for case in DUEL.cases
        for policy in (forwards[::-1] if number % 2 else forwards)
    ]
    same = "1.00 (1.00 to 1.00), n = 5"
    assert (
        f"- Llama, TTFT P99: `all` {same}; `again` {same}\n" in page and "gap closed" not in page and "--duel`" in page
    )


def test_what_is_run() -> None:
    assert COMPARED["full"] == [ONE, "ideal", "recompute", "swap", "pipeline", "kunserve", "remap", "all"]
    assert set(POLICIES) == {AGAIN, *COMPARED["quick"]} == {*COMPARED["duel"], *COMPARED["quick"]}
    assert COMPARED.keys() == SUITES.keys()
    assert POLICIES[AGAIN] == replace(POLICIES["alone"], about=POLICIES[AGAIN].about)
    assert [case.name for case in FULL.cases] == ["SmolLM2", "Llama"] and FULL.rounds == 3
    assert all(case.instances == 4 for case in FULL.cases)
    with pytest.raises(InvalidArgument) as refused:
        find("nothing", "one")
    assert refused.value.fields == {"suite": "nothing", "case": "one"}


def test_what_the_words_say_is_what_is_stored() -> None:
    data = json.loads(command.RESULTS.read_text(encoding="utf-8"))
    assert data["settings"] == json.loads(json.dumps(FULL.settings()))
    assert len(data["points"]) == len(FULL.cases) * len(COMPARED["full"]) * FULL.rounds

    def middle(case: str, policy: str, figure: str) -> float:
        found = [data["points"][rounds.run_name(case, policy, number)][figure] for number in range(FULL.rounds)]
        return statistics.median(value for value in found if not math.isnan(value))

    for case, seconds, shares, steps in (
        ("SmolLM2", (12.5, 25.4, 23.1, 10.0, 10.0, 10.0), (0.92, 0.75), (0.9, 1.7, 2.2)),
        ("Llama", (9.7, 29.3, 31.2, 5.8, 9.3, 11.9), (0.98, 0.58), (0.4, 0.5, 1.1)),
    ):
        policies = ("remap", "recompute", "swap", "ideal", "kunserve", "all")
        assert tuple(round(middle(case, policy, "ttft_p99_s"), 1) for policy in policies) == seconds
        rates = {policy: middle(case, policy, "tokens_per_s") for policy in COMPARED["full"]}
        assert tuple(round(rates[policy] / rates["ideal"], 2) for policy in ("remap", "recompute")) == shares
        figures = ("drop_prepare_s", "exchange_s", "restore_s")
        assert tuple(round(middle(case, "remap", figure), 1) for figure in figures) == steps
        assert middle(case, "remap", "stages") == middle(case, "kunserve", "stages") == 2
        assert 5.9 < middle(case, "all", "layer_bytes") / middle(case, "remap", "layer_bytes") < 20.5
        assert all(middle(case, policy, "layers_sent_bytes") == 0 for policy in COMPARED["full"])
        assert middle(case, "all", "swapped_bytes") == 0 < middle(case, "swap", "swapped_bytes")
        assert middle(case, "pipeline", "ttft_p99_s") < middle(case, "remap", "ttft_p99_s")
    assert round(middle("SmolLM2", "remap", "tbt_p99_s") / middle("SmolLM2", "recompute", "tbt_p99_s"), 1) == 1.6
